"""The tables and the small files below one root, in a folder or an object store, without Spark.

Small tables are read as a whole, large tables file by file (`jobs.storage.table_rows`). The class for a root with a
Spark session is `jobs.spark.warehouse.Warehouse`, which has all methods of `Tables` as well.

Transaction numbers of all applications are read from the log: delta-rs returns the number of a named application, but
cannot list the applications. Both Delta in Java and delta-rs copy the transactions into each checkpoint, so that
transactions outlive the files of their commits.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, create_table_with_add_actions

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.core.settings import find_local_path
from jobs.storage import object_files
from jobs.storage.columns import parse_schema
from jobs.storage.dictionary import list_comments
from jobs.storage.files import ChecksummedFiles, SmallFiles, open_files, open_lock
from jobs.storage.table_rows import (
    build_location,
    count_rows,
    group_rows,
    has_rows,
    list_live_files,
    open_log,
    read_small,
    report_unreadable_table,
    to_rows,
)

_TRIES = 5
"""Attempts to read a log while another process removes files from it."""
_RETENTION = "delta.setTransactionRetentionDuration"
_HINT = "_last_checkpoint"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.(?:parquet|json)")
"""Name of a checkpoint file. It contains the version, and for a checkpoint in several parts also the number of the part
and the number of parts.
"""


class _Checkpoint(NamedTuple):
    """A checkpoint's version and files. Version -1 without files means that no checkpoint exists."""

    version: int
    names: Sequence[str]


_NONE = _Checkpoint(-1, ())


def name_commit(version: int) -> str:
    """Return the name of a version's file in a log's folder."""
    return f"{version:020d}.json"


def read_last_numbers(root: str, table: str, files: SmallFiles) -> dict[str, int]:
    """Return the last transaction number of each application; an empty mapping if the table does not exist.

    Transactions that have expired by a setting of the table are left out, as in delta-rs.

    Args:
        root: root of the warehouse.
        table: name of the table.
        files: files of the log's folder.

    Raises:
        UserError: the log cannot be read.
    """
    path = f"{root}/{table}"
    try:
        for _ in range(_TRIES):
            log = open_log(root, table)
            found = _read_numbers(files, log.version())
            if found is not None:
                return _select_unexpired(log, found)
    except TableNotFoundError:
        return {}
    except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read: {extract_first_line(error)}", RUN_FAILED) from error
    raise UserError(f"{path} cannot be read: files of its log are gone", RUN_FAILED)


def _read_numbers(files: SmallFiles, version: int) -> dict[str, int] | None:
    """Return the last numbers up to a version; None if a file that is needed is gone."""
    found = _read_numbers_since(files, _read_pointer(files), version)
    return _read_numbers_since(files, _find_newest(files, version), version) if found is None else found


def _read_numbers_since(files: SmallFiles, checkpoint: _Checkpoint, version: int) -> dict[str, int] | None:
    """Return the last numbers up to a version, read from a checkpoint and the commits after the checkpoint.

    Return None if the checkpoint is newer than the version, or a file is gone.
    """
    if checkpoint.version > version:
        return None
    later = map(name_commit, range(checkpoint.version + 1, version + 1))
    found: dict[str, int] = {}
    for name in (*checkpoint.names, *later):
        content = files.read(name)
        if content is None:
            return None
        found.update(_parse_rows(content) if name.endswith(".parquet") else _parse_lines(content))
    return found


def _parse_lines(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the transactions in a commit, or in a checkpoint in JSON."""
    for line in content.splitlines():
        transaction = json.loads(line).get("txn") if b'"txn"' in line else None
        if transaction is not None:
            yield str(transaction["appId"]), int(transaction["version"])


def _parse_rows(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the transactions in a checkpoint's Parquet file."""
    file = pq.ParquetFile(pa.BufferReader(content))
    if "txn" in file.schema_arrow.names:
        for one in file.read(["txn"])["txn"].drop_null().to_pylist():
            yield str(one["appId"]), int(one["version"])


def _read_pointer(files: SmallFiles) -> _Checkpoint:
    """Return the checkpoint that the log's pointer names; it may be missing, and a newer checkpoint may exist."""
    try:
        hint: dict[str, Any] = json.loads(files.read(_HINT) or b"{}")
        version, parts = int(hint["version"]), int(hint.get("parts") or 0)
        of_second_format = hint.get("v2Checkpoint")
        if of_second_format is not None:
            return _Checkpoint(version, (str(of_second_format["path"]),))
    except (ValueError, KeyError, TypeError):
        return _NONE
    start = f"{version:020d}.checkpoint"
    if not parts:
        return _Checkpoint(version, (f"{start}.parquet",))
    return _Checkpoint(version, [f"{start}.{part:010d}.{parts:010d}.parquet" for part in range(1, parts + 1)])


def _find_newest(files: SmallFiles, version: int) -> _Checkpoint:
    """Return the newest complete checkpoint up to a version, according to the names of the log's files."""
    matches = [match for name in files.names("") if (match := _CHECKPOINT.fullmatch(name))]
    groups: dict[tuple[int, int], list[str]] = {}
    for match in matches:
        count = 0 if match[3] is None else int(match[3])
        names = groups.setdefault((int(match[1]), count), [])
        if count or not names:  # of several complete checkpoints of a version, any can be used
            names.append(match[0])
    whole = [
        _Checkpoint(at, names)
        for (at, count), names in groups.items()
        if at <= version and len(names) == max(count, 1)
    ]
    return max(whole, key=lambda one: one.version, default=_NONE)


def _select_unexpired(log: DeltaTable, found: dict[str, int]) -> dict[str, int]:
    """Return the numbers of the transactions that have not expired."""
    if _RETENTION not in log.metadata().configuration:
        return found
    numbers = {application: log.transaction_version(application) for application in found}
    return {application: number for application, number in numbers.items() if number is not None}


class LogEntry(NamedTuple):
    """A commit: the version that it made, Delta's name of the operation, and the JSON metadata from its writer."""

    version: int
    operation: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Tables:
    """The tables below one root, which is an absolute path or a URI."""

    root: str

    @property
    def local(self) -> bool:
        """Return whether the warehouse is a local folder."""
        return find_local_path(self.root) is not None

    def at(self, root: str) -> Self:
        """Return the tables below another root."""
        return replace(self, root=root)

    def path(self, table: str) -> str:
        """Return the location of a table or folder with a name such as `measurements/nile`."""
        return f"{self.root}/{table}"

    def files(self, folder: str) -> SmallFiles:
        """Return the small files of a folder of the warehouse."""
        return open_files(self.path(folder))

    def open_spark_files(self, folder: str) -> SmallFiles:
        """Return the files of a folder to which Spark writes; in a local folder they have Spark's checksums."""
        local = find_local_path(self.path(folder))
        return open_files(self.path(folder)) if local is None else ChecksummedFiles(local)

    def exists(self, table: str) -> bool:
        """Return whether a table exists."""
        return bool(self._list_versions(table))

    def latest_version(self, table: str) -> int:
        """Return the latest version of a table, according to the names of the log's files."""
        return max(self._list_versions(table))

    def table_id(self, table: str) -> str:
        """Return the id that Delta gave a table when it was made."""
        return str(open_log(self.root, table).metadata().id)

    def column_names(self, table: str) -> list[str]:
        """Return the names of a table's columns."""
        return [field.name for field in open_log(self.root, table).schema().fields]

    def create(
        self,
        table: str,
        columns: str | Schema,
        partition_by: Sequence[str] = (),
        properties: Mapping[str, str] = MappingProxyType({}),
        files: Sequence[AddAction] = (),
    ) -> bool:
        """Create a table unless it exists, and return whether this call created it.

        All columns are nullable, and have the comments of the dictionary.

        If several commands create the table at the same time, exactly one of them succeeds. A command that is killed
        before its only commit leaves at most a folder without a table, and the next command can create the table there.

        Args:
            table: name of the table.
            columns: columns of the table, also as text (`jobs.storage.columns`).
            partition_by: names of the partition columns.
            properties: properties of the table.
            files: files to add in the first commit.

        Raises:
            UserError: the table cannot be made.
        """
        if self.exists(table):
            return False
        object_files.ensure_probed(self.root)
        about = {name: {"comment": text} for name, text in list_comments(table).items()}
        schema = parse_schema(columns) if isinstance(columns, str) else columns
        fields = [Field(one.name, one.type, metadata=about.get(one.name)) for one in schema.fields]
        try:
            with self.lock(table):
                create_table_with_add_actions(
                    **build_location(self.root, table),
                    schema=Schema(fields),
                    add_actions=list(files),
                    partition_by=list(partition_by) or None,
                    configuration=dict(properties),
                )
            return True
        except (DeltaError, OSError) as error:
            if not self.exists(table):
                raise UserError(
                    f"{self.path(table)} cannot be made: {extract_first_line(error)}", RUN_FAILED
                ) from error
            return False

    def rows(
        self,
        table: str,
        where: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        version: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return rows of a small table, with times in UTC.

        Args:
            table: name of the table.
            where: required values, by column; None means all rows.
            columns: columns of the result; None means all columns.
            version: version of the table; None means the newest.
        """
        # An Arrow filter by a Python value would import pandas, which takes longer than all other steps.
        found = to_rows(self.columns(table, columns, version))
        return [row for row in found if all(row[name] == value for name, value in (where or {}).items())]

    def has_rows(self, table: str, where: Mapping[str, Any]) -> bool:
        """Return whether a table exists and has a row with these values; statistics determine which files are read."""
        return self.exists(table) and has_rows(self.root, table, where)

    def row_count(self, table: str) -> int:
        """Return the number of rows of a table, as its log records it."""
        return count_rows(self.path(table), list_live_files(open_log(self.root, table)))

    def group_counts(self, table: str, by: Sequence[str]) -> list[dict[str, Any]]:
        """Count the rows (`count`) of each combination of values in the columns `by`; an absent column is null."""
        values, group_of = group_rows(self.columns(table, by))
        counts = np.bincount(group_of, minlength=len(values)).tolist()
        return [
            {**dict(zip(by, group, strict=True)), "count": count}
            for group, count in zip(values, counts, strict=True)
        ]

    def columns(self, table: str, names: Sequence[str] | None = None, version: int | None = None) -> pa.Table:
        """Return columns of a table, by default all. A column that the table lacks is null, and times are in UTC."""
        with report_unreadable_table(self.path(table)):
            log = open_log(self.root, table, version)
        return read_small(self.root, table, log, names)

    def read_log_entries(self, table: str) -> list[LogEntry]:
        """Return the commits of a table that its log still contains, newest first.

        Raises:
            UserError: the log cannot be read.
        """
        with report_unreadable_table(self.path(table)):
            found = open_log(self.root, table).history()
        entries = [
            LogEntry(int(one["version"]), str(one.get("operation")), _parse_detail(one.get("userMetadata")))
            for one in found
        ]
        return sorted(entries, key=lambda one: -one.version)

    def read_commit(self, table: str, version: int) -> bytes | None:
        """Return the log file of a version; None if its commit is not yet in the log or no longer in the log."""
        return self.files(f"{table}/_delta_log").read(name_commit(version))

    def commit_info(self, table: str, version: int) -> dict[str, Any] | None:
        """Return the `commitInfo` of a version; None if its commit is not yet in the log or no longer in the log."""
        line = self.files(f"{table}/_delta_log").read_first_line(name_commit(version))
        if line is None:
            return None
        try:
            return json.loads(line).get("commitInfo") or {}
        except ValueError:
            return {}

    def transactions(self, table: str) -> dict[str, int]:
        """Return the number of each application's last transaction; an empty mapping if the table does not exist.

        Checkpoints of the log keep the numbers. The numbers do not expire with the history, unless the table
        has a setting for their expiry.

        Raises:
            UserError: the log cannot be read.
        """
        return read_last_numbers(self.root, table, self.files(f"{table}/_delta_log"))

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Ensure that only one process of this machine at a time commits to a local table.

        A local file system cannot refuse the second of two simultaneous commits of one version. Object stores can, so a
        table in an object store is not locked. The lock is released when the process that holds it ends.
        """
        root = find_local_path(self.root)
        if root is None:
            yield
            return
        folder = root / "_locks"
        folder.mkdir(parents=True, exist_ok=True)
        with open_lock(folder / (re.sub(r"[^A-Za-z0-9_.-]", "-", name) + ".lock")) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _list_versions(self, table: str) -> list[int]:
        """Return the versions that the log still contains, in any order; an empty list if there is no log."""
        names = self.files(f"{table}/_delta_log").names("")
        return [int(name[:20]) for name in names if name.endswith(".json") and name[:20].isdigit()]


def parse_actions(commit: bytes) -> Iterator[dict[str, Any]]:
    """Yield the actions in a version's log file, each with its kind as the name; raises ValueError."""
    return (json.loads(line) for line in commit.splitlines() if line.strip())


def _parse_detail(text: str | None) -> dict[str, Any]:
    """Return the JSON metadata that this product's writer added to a commit."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_AnyTables = TypeVar("_AnyTables", bound=Tables)


def find_home(warehouse: _AnyTables, name: str) -> tuple[_AnyTables, str]:
    """Return the warehouse that contains a table (the given warehouse or another), and the table's name there."""
    if not re.match(r"/|[A-Za-z][A-Za-z0-9+.-]*:/", name):
        return warehouse, name
    local = find_local_path(name)  # Spark would not decode an encoded URI
    folder, _, table = (name if local is None else str(local)).rstrip("/").rpartition("/")
    return warehouse.at(folder), table
