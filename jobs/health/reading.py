"""Read what the health of a model is judged by, from its tables and progress files, without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.lineage.chain import LineageSegment
from jobs.lineage.live_rows import Estimates, counted_estimates
from jobs.observability.progress import COLUMNS as PROGRESS_COLUMNS
from jobs.specs.model_spec import ModelSpec
from jobs.storage.files import files_of
from jobs.storage.table_rows import column_types, parts_of, read_table
from jobs.storage.tables import estimates, estimates_history


def _utc(at: Any) -> datetime | None:
    """Return a time of a table with its zone: some writers store it without, in UTC."""
    return None if at is None else at if at.tzinfo else at.replace(tzinfo=UTC)


def estimates_of(root: str, model: str, lineage: Sequence[LineageSegment]) -> Estimates | None:
    """Return the model's live estimates, by their lineage, else those of its history; None: it has neither."""
    if lineage and column_types(root, estimates(model)):
        return counted_estimates(root, estimates(model), lineage)
    if column_types(root, estimates_history(model)):
        return counted_estimates(root, estimates_history(model))
    return None


class Reason(NamedTuple):
    """Rows that were rejected for one reason; status: held, replaying, replayed or discarded."""

    reason: str
    status: str
    rows: int


def quarantined(root: str, model: str) -> list[Reason]:
    """Return the quarantined rows of a model by reason, without the values in it, and status; the most first."""
    counts: dict[tuple[str, str], int] = {}
    for part in parts_of(root, "quarantine", ["model", "reason", "status"]):
        mine = part.filter(pc.equal(part["model"], model))  # type: ignore[attr-defined]
        names = [name for name in ("reason", "status") if name in mine.column_names]
        for row in mine.group_by(names).aggregate([([], "count_all")]).to_pylist():
            place = _kind(row["reason"]), row.get("status") or "held"
            counts[place] = counts.get(place, 0) + row["count_all"]
    found = [Reason(reason, status, rows) for (reason, status), rows in counts.items()]
    return sorted(found, key=lambda one: (-one.rows, one.reason, one.status))


def _kind(reason: str | None) -> str:
    """Return a reason without the value that it quotes."""
    text = reason or "unknown"
    return text.split(" '", 1)[0].split(" (", 1)[0].rstrip(" :,")[:120]


def progress(root: str, model: str) -> list[dict[str, Any]]:
    """Return the records of the micro-batches of a model, of the table and of the files, oldest first."""
    table = read_table(root, f"progress/{model}", list(PROGRESS_COLUMNS))
    found = [] if table is None else table.to_pylist()
    for text in _progress_files(root, model):
        for line in text.split("\n"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # the last line of a driver that was killed, or the end of the file
    for one in found:
        at = one["started_at"]
        one["started_at"] = _utc(
            datetime.fromisoformat(at.replace("Z", "+00:00")) if isinstance(at, str) else at
        )
    return sorted(found, key=lambda one: one["started_at"])


def _progress_files(root: str, model: str) -> Iterator[str]:
    """Yield the content of the files with records of micro-batches."""
    files = files_of(f"{root}/_progress/{model}")
    for name in files.names(""):
        content = files.read(name) if name.endswith(".jsonl") else None
        if content is not None:
            yield content.decode("utf-8", "replace")


def learned(root: str, model: str, snapshot: str) -> list[dict[str, Any]]:
    """Return what was learned for a snapshot, a row a key, group or all: maps as dictionaries."""
    names = ["scope", "key", "key_group", "outcome", "parameters", "standard_errors", "rows"]
    found = read_table(root, "learned", names, partition={"model": model, "snapshot_id": snapshot})
    rows = [] if found is None else found.to_pylist()
    for row in rows:
        for name in ("parameters", "standard_errors"):
            row[name] = dict(row[name] or ())
    return rows


def measured_rows(root: str, spec: ModelSpec, keys: Sequence[str]) -> dict[str, tuple[NDArray, NDArray]]:
    """Return times (N,) and first measured values (N,) of some keys as landed; none of a key of several columns."""
    if len(spec.key) != 1:
        return {}
    names = [spec.key[0], spec.time, spec.measurement[0]]
    found = read_table(root, f"measurements/{spec.name}", names, among=(spec.key[0], list(keys)))
    if found is None or not set(names) <= set(found.column_names):
        return {}
    key = np.asarray(found[names[0]].cast(pa.string()).to_pylist(), object)
    time = found[names[1]].cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy()
    value = found[names[2]].cast(pa.float64()).to_numpy(zero_copy_only=False)
    return {one: (time[key == one], value[key == one]) for one in keys}
