"""The tables and the small files below one root, in a folder or an object store, without Spark.

Small tables are read as a whole, large tables file by file (`jobs.storage.table_rows`). The class for a root with a
Spark session is `jobs.spark.warehouse.Warehouse`, which has all methods of `Tables` as well.
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
from deltalake import Field, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, create_table_with_add_actions

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.core.settings import find_local_path
from jobs.storage import object_files
from jobs.storage.columns import parse_schema
from jobs.storage.dictionary import list_comments
from jobs.storage.files import ChecksummedFiles, WarehouseFiles, open_files, open_lock
from jobs.storage.log_transactions import read_last_numbers
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

    def files(self, folder: str) -> WarehouseFiles:
        """Return the small files of a folder of the warehouse."""
        return open_files(self.path(folder))

    def open_spark_files(self, folder: str) -> WarehouseFiles:
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
        columns: str,
        partition_by: Sequence[str] = (),
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create a table as `make` does; the columns are given as text (`jobs.storage.columns`)."""
        self.make(table, parse_schema(columns), partition_by, properties)

    def make(
        self,
        table: str,
        columns: Schema,
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
            columns: columns of the table.
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
        fields = [Field(one.name, one.type, metadata=about.get(one.name)) for one in columns.fields]
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

    def commit_info(self, table: str, version: int) -> dict[str, Any] | None:
        """Return the `commitInfo` of a version; None if its commit is not yet in the log or no longer in the log."""
        line = self.files(f"{table}/_delta_log").read_first_line(f"{version:020d}.json")
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
