"""Read what the health of a model is judged by, from its tables, without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.encoding.arrow import to_numpy
from jobs.lineage.generations import LineageSegment
from jobs.lineage.live_rows import Estimates, counted_estimates
from jobs.storage.quarantine import HELD
from jobs.storage.quarantine import TABLE as QUARANTINE
from jobs.storage.table_rows import UTC_MICROSECONDS, column_types, read_table
from jobs.storage.tables import estimates, estimates_history
from jobs.storage.warehouse import Tables


def estimates_of(root: str, model: str, lineage: Sequence[LineageSegment]) -> Estimates | None:
    """Return the model's live estimates, by their lineage, else those of its history; None: it has neither."""
    if lineage and column_types(root, estimates(model)):
        return counted_estimates(root, estimates(model), lineage)
    if column_types(root, estimates_history(model)):
        return counted_estimates(root, estimates_history(model))
    return None


def micros(times: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return times (N,) in microseconds since 1970."""
    return to_numpy(times.cast(UTC_MICROSECONDS).cast(pa.int64()).combine_chunks())


class Reason(NamedTuple):
    """Rows that were rejected for one reason; status: held, replaying, replayed or discarded."""

    reason: str
    status: str
    rows: int


def quarantined(tables: Tables, model: str) -> list[Reason]:
    """Return the quarantined rows of a model by reason, without the values in it, and status; the most first."""
    if not tables.exists(QUARANTINE):
        return []
    counts: Counter[tuple[str, str]] = Counter()
    for one in tables.group_counts(QUARANTINE, ("model", "reason", "status")):
        if one["model"] == model:
            counts[_kind(one["reason"]), one["status"] or HELD] += one["count"]
    found = [Reason(reason, status, rows) for (reason, status), rows in counts.items()]
    return sorted(found, key=lambda one: (-one.rows, one.reason, one.status))


def _kind(reason: str | None) -> str:
    """Return a reason without the value that it quotes."""
    text = reason or "unknown"
    return text.split(" '", 1)[0].split(" (", 1)[0].rstrip(" :,")[:120]


def learned(root: str, model: str, snapshot: str) -> list[dict[str, Any]]:
    """Return what was learned for a snapshot, a row a key, group or all: maps as dictionaries."""
    names = ["scope", "key", "key_group", "outcome", "parameters", "standard_errors", "rows"]
    found = read_table(root, "learned", names, partition={"model": model, "snapshot_id": snapshot})
    rows = [] if found is None else found.to_pylist()
    for row in rows:
        for name in ("parameters", "standard_errors"):
            row[name] = dict(row[name] or ())
    return rows
