"""Change rows of a small table that models share, in one commit.

In a local warehouse delta-rs does it, in some 20 ms; else Delta in Java, whose first changes in a process take one to
three seconds. What is changed is told in plain values, so that both ways mean the same
(`tests/jobs/warehouse/test_row_changes.py`).

Killed before the commit, nothing has changed; files that no commit names are removed by VACUUM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as F

from jobs.core import clock
from jobs.warehouse.delta import Warehouse, commented
from jobs.warehouse.file_commits import NO_HOOKS, FileTable, create_table, takes_files
from jobs.warehouse.local_tables import LocalTables
from jobs.warehouse.positions import to_micros

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import Column

NOW: Final = object()
"""A value: the time of the change."""

Rows = Mapping[str, Any]
"""Which rows: the value that a column has, or a tuple of those of which it has one. An empty mapping: all rows."""


def small_table(warehouse: Warehouse, table: str) -> FileTable | None:
    """Return a table whose rows can be changed without Spark, or None if Java has to change them."""
    if not takes_files(warehouse):
        return None
    files = FileTable(warehouse, table)
    return files if files.takes(pa.schema([])) else None


def create_small_table(warehouse: Warehouse, table: str, columns: str) -> None:
    """Make a table (columns: DDL) unless it exists."""
    if takes_files(warehouse) and create_table(warehouse, table, commented(table, columns).json(), {}):
        return
    warehouse.create(
        table, columns
    )  # keeps a table that is there, and repairs what a killed process left of one


def update_rows(warehouse: Warehouse, table: str, rows: Rows, values: Mapping[str, Any]) -> None:
    """Set columns of the rows to values, in one commit; no commit if there are no such rows.

    Raises:
        UserError: other commits came in between each time, or the table cannot be written.
        One of `warehouse.delta.CONFLICTS`: others came in between each time, where Java writes.
    """
    files = small_table(warehouse, table)
    if files is None:
        columns: dict[str, Any] = {
            name: F.current_timestamp() if one is NOW else F.lit(one) for name, one in values.items()
        }
        warehouse.commit(table, lambda found: found.update(_condition(rows), columns))
        return
    texts = {name: _literal(clock.now() if one is NOW else one) for name, one in values.items()}
    predicate = " AND ".join(_test(name, wanted) for name, wanted in rows.items()) or None
    files.change(
        lambda log: log.update(updates=texts, predicate=predicate, post_commithook_properties=NO_HOOKS)
    )


def put_rows(
    files: FileTable,
    keys: Sequence[str],
    changed: Callable[[list[dict[str, Any]]], Sequence[Mapping[str, Any]]],
) -> None:
    """Add rows, and replace those that agree with one in the key columns, in one commit without Spark.

    Args:
        files: the table (`small_table`).
        keys: the columns that name a row.
        changed: returns all columns of these rows, given the table's rows as they are; called anew where another
            commit came in between.

    Raises:
        UserError: other commits came in between each time, or the table cannot be written; what `changed` raises.
    """
    same = " AND ".join(f"t.{name} = s.{name}" for name in keys)

    def merge(log: DeltaTable) -> object:
        there = LocalTables(str(files.folder.parent)).rows(files.folder.name, version=log.version())
        at = clock.now()  # one time, by which rows of one commit are known
        rows = [{name: at if one is NOW else one for name, one in row.items()} for row in changed(there)]
        source = pa.Table.from_pylist(rows, pa.schema(log.schema().to_arrow()))
        merger = log.merge(
            source, same, source_alias="s", target_alias="t", post_commithook_properties=NO_HOOKS
        )
        return merger.when_matched_update_all().when_not_matched_insert_all().execute()

    files.change(merge)


def _condition(rows: Rows) -> Column:
    found = F.lit(True)
    for name, wanted in rows.items():
        column = F.col(name)
        found = found & (column.isin(*wanted) if isinstance(wanted, tuple) else column == wanted)
    return found


def _test(name: str, wanted: Any) -> str:
    if isinstance(wanted, tuple):
        return f"{name} IN ({', '.join(map(_literal, wanted))})"
    return f"{name} = {_literal(wanted)}"


def _literal(value: str | int | datetime | None) -> str:
    """Return a value as DataFusion's SQL has it."""
    if value is None:
        return "NULL"
    if isinstance(value, datetime):
        return f"to_timestamp_micros({to_micros(value)})"
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
