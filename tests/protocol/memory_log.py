"""Stand-in for delta-rs: the log of a table in the simulated store, as `jobs.storage` opens, reads and commits to it.

The tables are those of `memory_delta`: both engines write one log. A commit is made for the version right after the one
that the handle has read, and refused if another is there, unless its properties allow more tries: then it is made on
top of what others have written, whatever that is, which is the worst that a library may do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import RemoveAction
from pyspark.sql.types import StructField, StructType

from jobs.storage.columns import parse_schema
from jobs.storage.part_files import PartFile
from jobs.storage.table_log import FileTable
from jobs.storage.table_rows import to_rows
from jobs.storage.warehouse import LogEntry
from tests.protocol import world
from tests.protocol.memory_columns import EPOCH, Column, expr, lit
from tests.protocol.memory_delta import (
    Change,
    Commit,
    commit_at,
    create,
    latest,
    named,
    put_change,
    read_latest,
)
from tests.protocol.memory_frame import Frame, parse_type

_ARROW = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<string>": pa.list_(pa.string()),
    "array<double>": pa.list_(pa.float64()),
    "map<string,array<double>>": pa.map_(pa.string(), pa.list_(pa.float64())),
}
"""Arrow's types of the columns of tables that are changed without Spark."""


class MemoryLog:
    """`deltalake.DeltaTable`, as far as the modules use it."""

    def __init__(self, path: str) -> None:
        found = read_latest(path)
        if found is None:
            raise TableNotFoundError(path)
        self.path, self.base = path, as_read(path, found)

    def version(self) -> int:
        return self.base.version

    def update_incremental(self) -> None:
        found = read_latest(self.path)
        assert found is not None
        self.base = as_read(self.path, found)

    def metadata(self) -> Any:
        return SimpleNamespace(
            id=self.base.table_id, configuration={}, partition_columns=list(self.base.partition_by)
        )

    def protocol(self) -> Any:
        return SimpleNamespace(reader_features=None, writer_features=None, min_writer_version=2)

    def schema(self) -> Any:
        fields = [
            SimpleNamespace(
                name=one.name, type=SimpleNamespace(type=one.dataType.typeName()), metadata={}, nullable=True
            )
            for one in self.base.schema.fields
        ]
        kinds = [(one.name, _ARROW[one.dataType.simpleString()]) for one in self.base.schema.fields]
        return SimpleNamespace(fields=fields, to_arrow=lambda: pa.schema(kinds))

    def transaction_version(self, application: str) -> int | None:
        return self.base.transactions.get(application)

    def create_write_transaction(
        self, actions: Sequence[Any], mode: str, *_: Any, commit_properties: CommitProperties, **__: Any
    ) -> None:
        """Commit files, whose rows are those that `write_rows` has put aside, and remove files (`live_files`)."""
        assert mode == "append", mode
        adds = [one for one in actions if not isinstance(one, RemoveAction)]
        parts = [world.current().parts[f"{self.path}/{one.path}"].detail for one in adds]
        gone = {one.path for one in actions if isinstance(one, RemoveAction)}
        removed = tuple(row for row in self.base.rows if _file_of(row) in gone)
        assert len(removed) == len(gone), gone
        given = [(one.app_id, one.version) for one in commit_properties.app_transactions or []]
        assert len(given) < 2, given
        transaction = given[0] if given else None
        metadata = dict(commit_properties.custom_metadata or {}).pop("userMetadata", None)

        def change(base: Commit) -> Change:
            added = tuple(
                {name: row.get(name) for name in base.schema.names} for rows in parts for row in rows
            )
            return Change("WRITE", removed, added, None, transaction, metadata)

        read = self.base  # the library's handle stays at the version that it has read
        count = sum(map(len, parts))
        name = "" if transaction is None else named(transaction)
        self._commit(f"write +{count} -{len(removed)}{name}", change, commit_properties)
        self.base = read

    def merge(self, source: pa.Table, predicate: str, commit_properties: CommitProperties, **_: Any) -> Any:
        def put() -> None:
            keys = re.findall(r"t\.(\w+) = s\.\w+", predicate)
            assert predicate == " AND ".join(f"t.{name} = s.{name}" for name in keys), predicate
            self._put(keys, to_rows(source), commit_properties)

        def update(values: Mapping[str, str]) -> Any:
            on, given = expr(predicate), to_rows(source)
            pairs = [(row, {"t": row, "s": one}) for row in self.base.rows for one in given]
            found = [(row, pair) for row, pair in pairs if on.value(pair) is True]
            return SimpleNamespace(execute=lambda: self._set("merge", found, values, commit_properties))

        inserts = SimpleNamespace(when_not_matched_insert_all=lambda: SimpleNamespace(execute=put))
        return SimpleNamespace(when_matched_update_all=lambda: inserts, when_matched_update=update)

    def update(
        self, updates: Mapping[str, str], predicate: str, commit_properties: CommitProperties, **_: Any
    ) -> None:
        test = expr(predicate)
        found = [(row, row) for row in self.base.rows if test.value(row) is True]
        self._set("update", found, updates, commit_properties)

    @property
    def alter(self) -> Any:
        return SimpleNamespace(add_columns=self._add_columns)

    def create_checkpoint(self) -> None:
        put_checkpoint(self.path, self.base)

    def cleanup_metadata(self) -> None:
        """Nothing is old enough."""

    def _put(self, keys: Sequence[str], rows: Sequence[dict[str, Any]], properties: CommitProperties) -> None:
        def change(base: Commit) -> Change:
            named = {tuple(row[name] for name in keys) for row in rows}
            removed = tuple(row for row in base.rows if tuple(row[name] for name in keys) in named)
            return Change("MERGE", removed, tuple({**row} for row in rows))

        self._commit("merge", change, properties)

    def _set(
        self,
        what: str,
        found: Sequence[tuple[dict[str, Any], Mapping[str, Any]]],
        values: Mapping[str, str],
        properties: CommitProperties,
    ) -> None:
        """Set columns of rows that the handle has read, each to values of what it is found with; no commit of none."""
        columns = {name: _sql(text) for name, text in values.items()}
        removed = tuple(row for row, _ in found)
        added = tuple(
            {**row, **{name: one.value(pair) for name, one in columns.items()}} for row, pair in found
        )
        if found:
            self._commit(what, lambda last: Change(what.upper(), removed, added), properties)

    def _add_columns(self, fields: Sequence[Any], commit_properties: CommitProperties, **_: Any) -> None:
        more = [StructField(one.name, _kind_of(one)) for one in fields]

        def change(base: Commit) -> Change:
            return Change("ADD COLUMNS", schema=StructType([*base.schema.fields, *more]))

        self._commit("add columns", change, commit_properties)

    def _commit(self, what: str, change: Callable[[Commit], Change], properties: CommitProperties) -> None:
        base, metadata = self.base, dict(properties.custom_metadata or {})

        def put() -> Commit:
            last = latest(self.path)
            assert last is not None
            if last.version != base.version and properties.max_commit_retries == 0:
                raise CommitFailedError(f"version {base.version + 1} is there")
            return put_change(self.path, last, change(last), metadata)

        name = f"commit {self.path.removeprefix(f'{world.ROOT}/')}: {what}"
        self.base = world.current().write(self.path, name, put, lambda: DeltaError("the answer was lost"))


def live_files(log: MemoryLog) -> pa.Table:
    """Stand in for `jobs.storage.table_rows.list_live_files`: each row has its own file, described by its values."""
    rows, by = log.base.rows, log.base.partition_by
    columns: dict[str, Any] = {
        "path": pa.array(map(_file_of, rows), pa.string()),
        "size_bytes": pa.array([0] * len(rows), pa.int64()),
        "num_records": pa.array([1] * len(rows), pa.int64()),
    }
    for field in pa.schema(log.schema().to_arrow()):
        values = pa.array([row.get(field.name) for row in rows], field.type)
        if field.name in by:
            columns[f"partition.{field.name}"] = values
        elif not pa.types.is_nested(field.type):
            columns |= {f"min.{field.name}": values, f"max.{field.name}": values}
            columns[f"null_count.{field.name}"] = values.is_null().cast(pa.int64())
    return pa.table(columns)


def _file_of(row: Mapping[str, Any]) -> str:
    return f"row-{id(row)}"


def put_checkpoint(path: str, of: Commit) -> None:
    """Put the checkpoint of a version: the table's rows and transactions, in one file; older ones are replaced."""
    here = world.current()
    here.write(path, "checkpoint", lambda: here.put(f"{path}/_delta_log/_last_checkpoint", b"", of))


def as_read(path: str, last: Commit) -> Commit:
    """Return a table's last commit as a reader has it: the newest checkpoint, and the commits after it."""
    kept = world.current().files.get(f"{path}/_delta_log/_last_checkpoint")
    if kept is None:
        return last
    checkpoint: Commit = kept.detail
    rows, transactions = list(checkpoint.rows), dict(checkpoint.transactions)
    for version in range(checkpoint.version + 1, last.version + 1):
        commit = commit_at(path, version)
        rows = [*(row for row in rows if row not in commit.removed), *commit.added]
        transactions |= commit.transactions
    return replace(last, rows=tuple(rows), transactions=transactions)


def _sql(text: str) -> Column:
    """Parse a value in SQL: an expression of Spark's stand-in, or a time."""
    time = re.fullmatch(r"arrow_cast\((-?\d+), 'Timestamp\(Microsecond, Some\(\"UTC\"\)\)'\)", text)
    return expr(text) if time is None else lit(EPOCH + timedelta(microseconds=int(time[1])))


def _kind_of(field: Any) -> Any:
    """Return Spark's type of a column that is added: Spark's own, or Delta's name of it."""
    return parse_type(field.type.type) if hasattr(field, "type") else field.dataType


def write_rows(rows: Frame, table: FileTable, more_columns: bool) -> list[PartFile]:
    """Stand in for `jobs.spark.written_rows.write_rows`: rows are put aside under a name that is used once."""
    last = latest(table.path)
    assert last is not None, table.path
    absent: list[Any] = [one for one in rows.schema.fields if one.name not in last.schema.names]
    assert more_columns or not absent, f"{table.path} has no column {absent}"
    if absent:
        table.change(lambda log, properties: log.alter.add_columns(absent, commit_properties=properties))
    return [_put_aside(table.path, rows.rows)] if rows.rows else []


class MemoryPartWriter:
    """Stand in for `jobs.storage.part_files.PartWriter`, as `write_rows`."""

    def __init__(self, folder: str, prefix: str, full: int = 0, indexed: int = 0) -> None:
        self._folder, self._rows = folder, list[dict[str, Any]]()

    def add(self, batch: pa.RecordBatch) -> list[PartFile]:
        self._rows += to_rows(pa.Table.from_batches([batch]))
        return []

    def end(self) -> list[PartFile]:
        rows, self._rows = self._rows, []
        return [_put_aside(self._folder, rows)] if rows else []

    def abandon(self) -> None:
        return


def _put_aside(folder: str, rows: Sequence[Mapping[str, Any]]) -> PartFile:
    here = world.current()
    name = f"part-{here.new_id()}"
    here.parts[f"{folder}/{name}"] = world.Stored(b"", here.clock.now(), tuple(map(dict, rows)))
    return PartFile(name, 0, len(rows), 0, "{}")


def create_table(
    tables: Any,
    table: str,
    columns: Any,
    partition_by: Sequence[str] = (),
    properties: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Stand in for `Tables.create`: of processes that make a table at once one does."""
    path = tables.path(table)
    if read_latest(path) is None:
        schema = parse_schema(columns) if isinstance(columns, str) else columns
        create(path, StructType.fromJson(json.loads(schema.to_json())), tuple(partition_by), if_absent=True)


def open_log(root: str, table: str, version: int | None = None) -> MemoryLog:
    """Stand in for `jobs.storage.table_rows.open_log`."""
    assert version is None
    return MemoryLog(f"{root}/{table}")


def read_small(root: str, table: str, log: MemoryLog, names: Sequence[str] | None = None) -> pa.Table:
    """Stand in for `jobs.storage.table_rows.read_small`: the rows at the version that a log has read."""
    return pa.Table.from_pylist(list(log.base.rows), log.schema().to_arrow())


def rows(
    tables: Any,
    table: str,
    where: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
    version: int | None = None,
) -> list[dict[str, Any]]:
    """Stand in for `Tables.rows`."""
    found = MemoryLog(tables.path(table)).base.rows
    return [dict(row) for row in found if all(row[name] == one for name, one in (where or {}).items())]


def has_rows(tables: Any, table: str, where: Mapping[str, Any]) -> bool:
    """Stand in for `Tables.has_rows`."""
    found = read_latest(tables.path(table))
    return found is not None and any(all(row[n] == one for n, one in where.items()) for row in found.rows)


def log_entries(tables: Any, table: str) -> list[LogEntry]:
    """Stand in for `Tables.log_entries`."""
    path = tables.path(table)
    last = MemoryLog(path).base.version
    found = [commit_at(path, version) for version in range(last, -1, -1)]
    return [LogEntry(one.version, one.operation, json.loads(one.metadata or "{}")) for one in found]


def transactions(tables: Any, table: str) -> dict[str, int]:
    """Stand in for `Tables.transactions`."""
    last = read_latest(tables.path(table))
    return {} if last is None else dict(last.transactions)
