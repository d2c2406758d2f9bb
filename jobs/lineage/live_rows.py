"""The live estimates for readers without Spark.

The module builds SQL for the valid rows, and the table `live` with the live generations and their micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from jobs.lineage import generations
from jobs.lineage.generations import LineageSegment, trace_live_lineage
from jobs.snapshots import manifests
from jobs.storage.queries import Queries, open_queries, quote_name, quote_text
from jobs.storage.row_changes import replace_partition
from jobs.storage.table_log import Conflict
from jobs.storage.table_rows import read_column_types, read_table
from jobs.storage.tables import LIVE_ESTIMATES
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest


_NAME = "estimates"
"""Name of the estimates table in queries."""
_SAME = ("generation", "key", "event_time")


def build_uncorrected_query(table: str, columns: Sequence[str], where: str, has_corrections: bool) -> str:
    """Return the query of the rows that no later micro-batch of their generation has corrected.

    If a generation has a correction for a key and event time, only the rows of its latest micro-batch count.

    Args:
        table: name of the estimates in queries.
        columns: columns to read.
        where: condition of the rows to read, in SQL.
        has_corrections: whether some rows may be corrections, which the column `correction` marks.
    """
    if not has_corrections:
        return f"SELECT {', '.join(map(quote_name, columns))} FROM {table} WHERE {where}"
    same = ", ".join(_SAME)
    # DuckDB keeps the first side of a join in memory: the corrected keys and times, which are few.
    return (
        f"SELECT {', '.join(f'r.{quote_name(name)}' for name in columns)} FROM (SELECT {same}, max(batch_id) AS newest "
        f"FROM {table} WHERE {where} GROUP BY {same} HAVING bool_or(correction)) c "
        f"RIGHT JOIN (SELECT * FROM {table} WHERE {where}) r ON {' AND '.join(f'r.{one} = c.{one}' for one in _SAME)} "
        f"WHERE c.newest IS NULL OR r.batch_id = c.newest"
    )


class EstimatesTable(NamedTuple):
    """A table of estimates, and the facts that decide which of its rows count.

    last_batch: last live micro-batch by generation; empty for a table of history, in which all rows count.
    has_corrections: whether the table has corrections, so that only the rows of the latest micro-batch count.
    """

    table: str
    last_batch: Mapping[str, int]
    has_corrections: bool


def open_estimates(root: str, table: str, lineage: Sequence[LineageSegment] = ()) -> EstimatesTable:
    """Return a table of live estimates with its lineage, or a table of history, which has no lineage."""
    last_batch = {name: NO_END if last is None else last for name, last in lineage}
    return EstimatesTable(
        table, last_batch, "correction" in read_column_types(root, table) and _has_corrections(root, table)
    )


def _has_corrections(root: str, table: str) -> bool:
    """Return whether some estimates are corrections."""
    with open_queries(root) as queries:
        queries.add(_NAME, table)
        return bool(queries.run(f"SELECT bool_or(correction) AS found FROM {_NAME}")["found"][0].as_py())


def build_counted_query(
    queries: Queries, estimates: EstimatesTable, columns: Sequence[str], condition: str = "true"
) -> str:
    """Return the query of the rows that count, with `generation` and those of the `columns` that the table has."""
    segments = [
        f"(generation = {quote_text(name)} AND batch_id <= {last})"
        for name, last in estimates.last_batch.items()
    ]
    schema = queries.add(_NAME, estimates.table)
    have = [] if schema is None else schema.names
    names = [name for name in dict.fromkeys([*columns, "generation"]) if name in have]
    where = f"({' OR '.join(segments) or 'true'}) AND {condition}"
    return build_uncorrected_query(_NAME, names, where, estimates.has_corrections)


def read_counted_batches(
    root: str, estimates: EstimatesTable, columns: Sequence[str], condition: str = "true"
) -> Iterator[pa.Table]:
    """Yield the rows that count (`build_counted_query`), in tables of some thousand rows."""
    with open_queries(root) as queries:
        for batch in queries.batches(build_counted_query(queries, estimates, columns, condition)):
            if batch.num_rows:
                yield pa.Table.from_batches([batch])


TABLE = "live"
NO_END = (1 << 63) - 1
"""`last_batch` of the live generation, which has no end; this is the largest number of the column's type."""
_ATTEMPTS = 5
"""Maximum number of attempts of a refresh. Another attempt is needed if a switch came during the previous attempt. The
next refresh makes the changes that remain."""
_TEXTS = pa.list_(pa.string())
_SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("place", pa.int32()),
        ("generation", pa.string()),
        ("last_batch", pa.int64()),
        ("model_version", pa.int32()),
        ("states", _TEXTS),
        ("key_columns", _TEXTS),
    ]
)


def refresh_live_table(warehouse: Tables, model: str) -> bool:
    """Write a model's rows of the table `live`, in one commit per change; return whether the rows have changed.

    After each write the generations are read again. Otherwise rows that were read before another command's switch, but
    written after that command's own refresh, would stay until the next start of a driver.
    """
    changed = False
    for _ in range(_ATTEMPTS):
        rows = build_live_rows(
            generations.read_generations(warehouse, model), manifests.read_manifests(warehouse, model)
        )
        if not rows and not warehouse.exists(TABLE):
            break
        warehouse.create(TABLE, LIVE_ESTIMATES, ("model",))
        if _read_present_rows(warehouse, model) == rows:
            break
        changed = True
        with suppress(Conflict):  # after a write by another command at the same time, compare again
            replace_partition(warehouse, TABLE, "model", model, pa.Table.from_pylist(rows, _SCHEMA))
    return changed


def build_live_rows(known: list[Generation], snapshots: list[Manifest]) -> list[dict[str, Any]]:
    """Return a row for each generation of a model with live micro-batches, the live generation first."""
    by_name = {one.generation: one for one in known}
    specs = {one.snapshot_id: json.loads(one.spec) for one in snapshots}
    segments = [(by_name[name], last) for name, last in trace_live_lineage(known) if last != -1]
    return [
        {
            "model": one.model,
            "place": place,
            "generation": one.generation,
            "last_batch": NO_END if last is None else last,
            "model_version": one.model_version,
            "states": specs.get(one.snapshot_id, {}).get("states"),
            "key_columns": specs.get(one.snapshot_id, {}).get("key"),
        }
        for place, (one, last) in enumerate(segments)
    ]


def _read_present_rows(warehouse: Tables, model: str) -> list[dict[str, Any]]:
    """Return the rows of a model in the table, ordered by the column `place`."""
    names = [name for name in _SCHEMA.names if name != "model"]
    found = read_table(warehouse.root, TABLE, names, partition={"model": model})
    rows = [] if found is None else [{"model": model, **row} for row in found.to_pylist()]
    return sorted(rows, key=lambda row: row["place"])
