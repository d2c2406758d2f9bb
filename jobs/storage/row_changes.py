"""Change rows and columns of a small table that models share, without Spark.

A change of rows is one commit, made by compare-and-set: it must become the version right after the one that was read.
If another commit came first, the change is computed again from the new rows. After a kill before the commit the table
is unchanged, and VACUUM removes the files that no commit names.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema

from jobs.core import clock
from jobs.storage.columns import parse_schema
from jobs.storage.dictionary import list_comments
from jobs.storage.part_files import name_attempt, write_parts
from jobs.storage.table_log import NO_HOOKS, FileTable, add_absent, commit_or_remove
from jobs.storage.table_rows import open_log, read_small, to_rows
from jobs.storage.warehouse import Tables

NOW: Final = object()
"""Placeholder value: the time of the change."""

Row = Mapping[str, Any]
Rows = Mapping[str, Any]
"""Row filter: column to value, or to a tuple of allowed values. An empty mapping: all rows."""


def put_rows(
    warehouse: Tables,
    table: str,
    keys: Sequence[str],
    changed: Callable[[list[dict[str, Any]]], Sequence[Row]],
) -> None:
    """Insert rows and replace rows with the same keys, in one commit; no commit without rows.

    Args:
        warehouse: warehouse of the table.
        table: name of the table.
        keys: columns that identify a row.
        changed: function from the table's present rows to the new rows, with all columns; called again if another
            commit came first.

    Raises:
        Conflict: other commits came first each time.
        UserError: the table cannot be read or written. Errors of `changed` pass through.
    """
    same = " AND ".join(f"t.{name} = s.{name}" for name in keys)

    def merge(log: DeltaTable, properties: CommitProperties) -> None:
        there = to_rows(read_small(warehouse.root, table, log))
        at = clock.now()  # all rows of one commit have the same time
        rows = [{name: at if one is NOW else one for name, one in row.items()} for row in changed(there)]
        if not rows:
            return
        source = pa.Table.from_pylist(rows, pa.schema(log.schema().to_arrow()))
        merger = log.merge(
            source,
            same,
            source_alias="s",
            target_alias="t",
            commit_properties=properties,
            post_commithook_properties=NO_HOOKS,
        )
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    FileTable(warehouse, table).change(merge)


def update_rows(warehouse: Tables, table: str, keys: Sequence[str], rows: Rows, values: Row) -> None:
    """Set columns of the selected rows to values, in one commit; no commit if no row is selected.

    Args:
        warehouse: warehouse of the table.
        table: name of the table.
        keys: columns that identify a row.
        rows: filter of the rows to change.
        values: new value by column.

    Raises:
        Conflict: other commits came first each time.
        UserError: the table cannot be read or written.
    """
    put_rows(
        warehouse, table, keys, lambda there: [{**row, **values} for row in there if _is_one_of(row, rows)]
    )


def add_columns(warehouse: Tables, table: str, columns: str) -> None:
    """Add the columns (`jobs.storage.columns`) that a table of an earlier release lacks, in one commit.

    Raises:
        Conflict: other commits came first each time.
        UserError: the table cannot be read or written.
    """
    wanted = parse_schema(columns).fields
    FileTable(warehouse, table).change(lambda log, properties: add_absent(log, wanted, properties))


def replace_table(warehouse: Tables, table: str, rows: pa.Table) -> int:
    """Replace all rows and columns of a table, made if it does not exist, in one commit; return the version it made.

    Raises:
        Conflict: other commits came first each time.
        UserError: the table cannot be written.
    """
    columns = Schema.from_arrow(pa.schema([field.with_nullable(True) for field in rows.schema]))
    log = FileTable(warehouse, table)
    # deltalake's writer aborts the process if a folder's name contains a bracket.
    parts = write_parts(log.path, name_attempt(0, uuid.uuid4().hex, 0, 0), rows.combine_chunks().to_batches())
    version = commit_or_remove(log, parts, lambda parts: log.overwrite(parts, columns))
    assert version is not None
    return version


def describe_columns(tables: Tables, table: str, more: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Add missing comments to a table's columns, one column per commit; return whether any were missing.

    The commits change no file and no type: streams that read the table go on, and appends work as before. After a kill
    the next call adds the rest.

    Args:
        tables: tables of the warehouse.
        table: name of the table, which must exist.
        more: comments by column, which take precedence over those of the dictionary.

    Raises:
        Conflict: other commits came first each time.
        UserError: the table cannot be read or written.
    """
    wanted, log = {**list_comments(table), **more}, FileTable(tables, table)

    def lacking(log: DeltaTable) -> list[str]:
        return [
            field.name
            for field in log.schema().fields
            if field.name in wanted and field.metadata.get("comment") != wanted[field.name]
        ]

    def alter(name: str, log: DeltaTable, properties: CommitProperties) -> None:
        if name in lacking(log):
            about = {"comment": wanted[name]}
            log.alter.set_column_metadata(
                name, about, commit_properties=properties, post_commithook_properties=NO_HOOKS
            )

    names = lacking(open_log(tables.root, table))
    for name in names:
        log.change(partial(alter, name))
    return bool(names)


def _is_one_of(row: Row, rows: Rows) -> bool:
    return all(
        row[name] in wanted if isinstance(wanted, tuple) else row[name] == wanted
        for name, wanted in rows.items()
    )
