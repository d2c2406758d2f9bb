"""SQL for the valid rows of an estimates table: for corrected rows (`order.kind: replay`) the latest estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from jobs.lineage.generations import LineageSegment
from jobs.storage.queries import Queries, open_queries, quote_name, quote_text
from jobs.storage.table_rows import read_column_types

_NO_END = (1 << 63) - 1
_NAME = "estimates"
"""Name of the estimates table in queries."""
_SAME = ("generation", "key", "event_time")


def build_uncorrected_query(table: str, columns: Sequence[str], where: str, has_corrections: bool) -> str:
    """Return the query of rows that no later micro-batch of their generation has corrected.

    If a generation has any correction for a key and event time, only the rows of the latest micro-batch count.

    Args:
        table: name of the estimates in queries.
        columns: columns to read.
        where: condition of the rows to read.
        has_corrections: some rows may be corrections, marked by the column `correction`.
    """
    if not has_corrections:
        return f"SELECT {', '.join(map(quote_name, columns))} FROM {table} WHERE {where}"
    same = ", ".join(_SAME)
    # The first side of a join is held in memory: the corrected keys and times, which are few.
    return (
        f"SELECT {', '.join(f'r.{quote_name(name)}' for name in columns)} FROM (SELECT {same}, max(batch_id) AS newest "
        f"FROM {table} WHERE {where} GROUP BY {same} HAVING bool_or(correction)) c "
        f"RIGHT JOIN (SELECT * FROM {table} WHERE {where}) r ON {' AND '.join(f'r.{one} = c.{one}' for one in _SAME)} "
        f"WHERE c.newest IS NULL OR r.batch_id = c.newest"
    )


class EstimatesTable(NamedTuple):
    """A table of estimates, with the facts that decide which of its rows count.

    last_batch: last live micro-batch by generation; empty for a table of history, whose rows all count.
    has_corrections: the table has corrected rows, for which only the latest micro-batch counts.
    """

    table: str
    last_batch: Mapping[str, int]
    has_corrections: bool


def open_estimates(root: str, table: str, lineage: Sequence[LineageSegment] = ()) -> EstimatesTable:
    """Return a table of live estimates with their lineage, or a table of history without a lineage."""
    last_batch = {name: _NO_END if last is None else last for name, last in lineage}
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
    """Return the query of the rows that count, with the columns that the table has, and `generation`."""
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
    """Yield the rows that count (`counted`), some thousands at a time."""
    with open_queries(root) as queries:
        for batch in queries.batches(build_counted_query(queries, estimates, columns, condition)):
            if batch.num_rows:
                yield pa.Table.from_batches([batch])
