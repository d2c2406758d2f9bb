"""Read what the health of a model is judged by, from its tables, without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.encoding.arrow import to_numpy
from jobs.lineage.generations import LineageSegment
from jobs.lineage.live_rows import counted_rows
from jobs.storage.quarantine import HELD
from jobs.storage.quarantine import TABLE as QUARANTINE
from jobs.storage.queries import Queries, literal, open_queries
from jobs.storage.table_rows import UTC_MICROSECONDS, column_types, read_table
from jobs.storage.warehouse import Tables


class Estimates(NamedTuple):
    """The table of estimates that is looked at, and which of its rows count.

    last_batch: by generation; empty for a table of history, whose rows all count. has_corrections: of some rows only
    those of the latest micro-batch count (`jobs.lineage.live_rows`).
    """

    table: str
    last_batch: Mapping[str, int]
    has_corrections: bool = False


ESTIMATES = "estimates"
"""Name in queries."""
_NO_END = np.iinfo(np.int64).max


def estimates_of(root: str, model: str, lineage: Sequence[LineageSegment]) -> Estimates | None:
    """Return the model's live estimates, by their lineage, else those of its history; None: it has neither."""
    live = {name: _NO_END if last is None else last for name, last in lineage}
    for table, kept in ((f"estimates/{model}", live), (f"estimates_history/{model}", {})):
        columns = column_types(root, table)
        if columns and (kept or not table.startswith("estimates/")):
            found = Estimates(table, kept)
            return (
                found
                if "correction" not in columns
                else found._replace(has_corrections=_corrected(root, table))
            )
    return None


def _corrected(root: str, table: str) -> bool:
    """Tell if some estimates are corrections."""
    with open_queries(root) as queries:
        queries.add(ESTIMATES, table)
        return bool(queries.run(f"SELECT bool_or(correction) AS found FROM {ESTIMATES}")["found"][0].as_py())


def counted(queries: Queries, estimates: Estimates, columns: Sequence[str], condition: str = "true") -> str:
    """Return the query of the rows that count, with the columns that the table has, and `generation`."""
    segments = [
        f"(generation = {literal(name)} AND batch_id <= {last})"
        for name, last in estimates.last_batch.items()
    ]
    schema = queries.add(ESTIMATES, estimates.table)
    have = [] if schema is None else schema.names
    names = [name for name in dict.fromkeys([*columns, "generation"]) if name in have]
    where = f"({' OR '.join(segments) or 'true'}) AND {condition}"
    return counted_rows(ESTIMATES, names, where, estimates.has_corrections)


def batches(root: str, estimates: Estimates, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows that count (`counted`), some thousands at a time."""
    with open_queries(root) as queries:
        for batch in queries.batches(counted(queries, estimates, columns)):
            if batch.num_rows:
                yield pa.Table.from_batches([batch])


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
