"""Change rows of a Delta table in one commit, without Spark, so that readers see the whole change or none of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.transaction import RemoveAction

from jobs.core import times
from jobs.core.errors import RUN_FAILED
from jobs.storage.columns import parse_schema
from jobs.storage.dictionary import list_comments
from jobs.storage.part_files import PartFile, name_attempt, remove, write_parts
from jobs.storage.table_log import (
    NO_HOOKS,
    Conflict,
    Due,
    FileTable,
    add_absent,
    build_transaction,
    commit_or_remove,
    is_due,
)
from jobs.storage.table_rows import (
    Filter,
    Met,
    cast_rows,
    count_rows,
    drop_rows,
    find_files,
    list_live_files,
    open_log,
    open_parquet,
    read_columns,
    read_small,
    select_rows,
    to_rows,
)
from jobs.storage.warehouse import Tables

NOW: Final = object()
"""Placeholder for a value: the time of the change."""

Row = Mapping[str, Any]
Rows = Mapping[str, Any]
"""Row filter: for each column a value, or a tuple of allowed values. An empty mapping selects all rows."""


def put_rows(
    warehouse: Tables,
    table: str,
    keys: Sequence[str],
    changed: Callable[[list[dict[str, Any]]], Sequence[Row]],
) -> None:
    """Insert rows and replace rows with the same keys, in one commit; make no commit if there are no rows.

    Args:
        warehouse: warehouse of the table.
        table: name of the table.
        keys: columns that identify a row.
        changed: function that takes the table's present rows and returns the new rows, with all columns. It is called
            again if another commit came first.

    Raises:
        Conflict: other commits came first at every attempt.
        UserError: the table cannot be read or written. Errors of `changed` pass through.
    """
    same = " AND ".join(f"t.{name} = s.{name}" for name in keys)

    def merge(log: DeltaTable, properties: CommitProperties) -> None:
        there = to_rows(read_small(warehouse.root, table, log))
        at = times.now()  # all rows of one commit have the same time
        rows = [{name: at if one is NOW else one for name, one in row.items()} for row in changed(there)]
        if not rows:
            return
        source = pa.Table.from_pylist(rows, read_columns(log))
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
    """Set columns of the selected rows to values, in one commit; make no commit if no row is selected.

    Args:
        warehouse: warehouse of the table.
        table: name of the table.
        keys: columns that identify a row.
        rows: filter of the rows to change.
        values: new values, by column.

    Raises:
        Conflict: other commits came first at every attempt.
        UserError: the table cannot be read or written.
    """
    put_rows(
        warehouse, table, keys, lambda there: [{**row, **values} for row in there if _is_one_of(row, rows)]
    )


def add_columns(warehouse: Tables, table: str, columns: str) -> None:
    """Add the given columns (`jobs.storage.columns`) to a table of an earlier release that lacks them, in one commit.

    Raises:
        Conflict: other commits came first at every attempt.
        UserError: the table cannot be read or written.
    """
    wanted = parse_schema(columns).fields
    if {field.name for field in wanted} <= set(warehouse.column_names(table)):
        return  # also where the warehouse is read-only
    FileTable(warehouse, table).change(lambda log, properties: add_absent(log, wanted, properties))


def replace_table(warehouse: Tables, table: str, rows: pa.Table) -> int:
    """Replace all rows and columns of a table in one commit; return the version that the commit made.

    A table that does not exist is made.

    Raises:
        Conflict: other commits came first at every attempt.
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
    """Add missing comments to a table's columns, one column per commit; return whether any comments were missing.

    The commits change no file and no type, so streams that read the table continue, and appends work as before. If the
    process is killed, the next call adds the remaining comments.

    Args:
        tables: tables of the warehouse.
        table: name of the table, which must exist.
        more: comments by column, which replace the comments of the dictionary.

    Raises:
        Conflict: other commits came first at every attempt.
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


_OF_PARTITION = "partition."
_TRIES = 8
"""Attempts to rewrite files if other commits change the same files."""
_BATCH_ROWS = 1 << 16


class Overtaken(Conflict):
    """Other commits changed the same files before each attempt to replace the rows of these files."""


class KeptRows(NamedTuple):
    """New files with the rows that the table keeps, and the names of the old files that the new files replace."""

    parts: Sequence[PartFile]
    gone: Collection[str]


class ReplacingTable(FileTable):
    """A table in which new files can replace old files."""

    def files(self) -> pa.Table:
        """Return the table's files (`list_live_files`).

        Raises:
            UserError: the table does not exist.
        """
        return list_live_files(self._need())

    def replace_rows(
        self,
        parts: Sequence[PartFile],
        rows: Filter,
        keep: Callable[[pa.Table, Met], KeptRows],
        metadata: Mapping[str, Any] = MappingProxyType({}),
        transaction: tuple[str, int] | None = None,
    ) -> int | None:
        """Replace rows of the table by new files in one commit; return the version that the commit made.

        If there is nothing to change, no commit is made and the version that was read is returned.

        Args:
            parts: files to add.
            rows: filter of the rows to remove.
            keep: function that writes the rows to keep in the affected files to new files. Its arguments are the
                table's files, and the files that may contain rows to remove. It is called again if another commit has
                changed these files.
            metadata: metadata of the commit.
            transaction: application and number. If the table has this transaction or a later transaction of the
                application, the commit is skipped and None is returned.

        Raises:
            Overtaken: other commits changed the same files before each attempt.
            Conflict: other commits came first at every attempt.
            UserError: the log cannot be read or written, a file is gone, or the table no longer takes the columns that
                `ready` prepared.
        """
        for _ in range(_TRIES):
            if transaction is not None and not self.is_due(transaction):
                return None
            files = self.files()
            met = find_files(files, rows)
            kept = keep(files, met)
            gone = met.whole.union(kept.gone)
            if not (parts or gone or metadata):
                return self._need().version()

            def due(log: DeltaTable, met: Met = met, gone: Collection[str] = gone) -> Due | None:
                return self._due(log, rows, met, gone, transaction)

            version, self.tried = None, False
            try:
                version = self._commit([*parts, *kept.parts], due, {**metadata, "isBlindAppend": False})
            finally:
                if version is None and not self.tried:
                    remove(self.path, kept.parts)
            if version is not None:
                return version
        raise Overtaken(f"{self.path}: others have changed the same rows meanwhile; run it again", RUN_FAILED)

    def _due(
        self,
        log: DeltaTable,
        rows: Filter,
        met: Met,
        gone: Collection[str],
        transaction: tuple[str, int] | None,
    ) -> Due | None:
        """Return the transactions and removed files of a commit, or None if the planned commit must not be made.

        The commit must not be made if the files that contain rows to remove have changed, or if it was already made.
        """
        files = list_live_files(log)
        if find_files(files, rows) != met or (transaction is not None and not is_due(log, transaction)):
            return None
        if gone and "deletionVectors" in (log.protocol().reader_features or ()):
            raise self._build_refusal(
                "it has the feature deletionVectors, and rows are to be replaced: "
                "ALTER TABLE ... DROP FEATURE deletionVectors"
            )
        return Due(
            [] if transaction is None else [build_transaction(*transaction)],
            _build_remove_actions(files, gone),
        )


def replace_partition(tables: Tables, table: str, name: str, value: str, rows: pa.Table) -> None:
    """Replace all rows with one value in a table's partition column, in one commit.

    Args:
        tables: tables of the warehouse.
        table: name of the table, which must exist.
        name: name of the partition column.
        value: value of the partition column in all old and new rows.
        rows: the new rows.

    Raises:
        Conflict: other commits came first at every attempt.
        UserError: the table cannot be written.
    """
    log = ReplacingTable(tables, table)
    prefix = name_attempt(0, uuid.uuid4().hex, 0, 0)
    written = write_parts(log.path, prefix, rows.combine_chunks().to_batches(), (name,))
    mine = [[(name, "=", value)]]
    commit_or_remove(
        log, written, lambda parts: log.replace_rows(parts, mine, lambda files, met: KeptRows((), ()))
    )


def delete_rows(
    tables: Tables, table: str, rows: Filter, dry: bool = False, transaction: tuple[str, int] | None = None
) -> int:
    """Delete rows of a table in one commit, and return the number of rows.

    Without such rows, or if the table does not exist, no commit is made.

    Args:
        tables: tables of the warehouse.
        table: name of the table.
        rows: filter of the rows to delete.
        dry: whether to count the rows without deleting them.
        transaction: application and number. Nothing is deleted if the table has this transaction or a later
            transaction of the application.

    Raises:
        Conflict: other commits came first at every attempt.
        UserError: the table cannot be read or written.
    """
    if not tables.exists(table):
        return 0
    log, count = ReplacingTable(tables, table), 0
    schema = log.columns()

    def keep(files: pa.Table, met: Met) -> KeptRows:
        nonlocal count
        found = {
            name: sum(one.num_rows for one in read_rows_of(log.path, name, values, schema, rows, select_rows))
            for name, values in find_partitions(files, met.across).items()
        }
        found = {name: number for name, number in found.items() if number}
        count = _count_rows(log.path, files, met.whole) + sum(found.values())
        if dry:
            return KeptRows((), ())
        kept = (
            batch
            for name, values in find_partitions(files, found).items()
            for batch in read_rows_of(log.path, name, values, schema, rows, drop_rows)
        )
        prefix = name_attempt(0, uuid.uuid4().hex, 0, 0)
        parts = write_parts(
            log.path, prefix, kept, log.partition_by, full=log.file_bytes, indexed=log.indexed
        )
        return KeptRows(parts, found)

    if dry:
        files = log.files()
        keep(files, find_files(files, rows))
        return count
    log.ready(schema, by_partition=True)
    made = log.replace_rows((), rows, keep, transaction=transaction)
    return 0 if made is None else count


def read_rows_of(
    folder: str,
    name: str,
    partition: Mapping[str, Any],
    schema: pa.Schema,
    rows: Filter,
    choose: Callable[[pa.RecordBatch, Filter], pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Yield the selected rows of a file with all columns of its table, including columns that the file lacks.

    Args:
        folder: folder of the table.
        name: name of the file.
        partition: values of the file's partition columns, as texts.
        schema: schema of the table.
        rows: filter of the rows.
        choose: `select_rows` to yield the rows that meet the filter, or `drop_rows` to yield the other rows.
    """
    with open_parquet(folder, name) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield choose(cast_rows(batch, schema, partition), rows)


def find_partitions(files: pa.Table, names: Collection[str]) -> dict[str, dict[str, str | None]]:
    """Return, by file name, the partition values (texts) of the named files in a table's files (`list_live_files`)."""
    columns = [name for name in files.column_names if name.startswith(_OF_PARTITION)]
    wanted: Any = pa.array(sorted(names), pa.string())
    found = files.select(["path", *columns]).filter(pc.field("path").isin(wanted)).to_pylist()
    return {
        one["path"]: {
            name.removeprefix(_OF_PARTITION): None if one[name] is None else str(one[name])
            for name in columns
        }
        for one in sorted(found, key=lambda one: one["path"])
    }


def _count_rows(folder: str, files: pa.Table, names: Collection[str]) -> int:
    wanted: Any = pa.array(list(names), pa.string())
    return count_rows(folder, files.filter(pc.field("path").isin(wanted)))


def _build_remove_actions(files: pa.Table, gone: Collection[str]) -> list[RemoveAction]:
    now = int(time.time() * 1000)
    sizes = dict(zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True))
    return [
        RemoveAction(name, True, now, sizes[name], values)
        for name, values in find_partitions(files, gone).items()
    ]
