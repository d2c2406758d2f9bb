"""Commit Parquet files that are written already to a Delta table, without Spark (delta-rs).

Such a commit takes milliseconds where Delta in Java takes hundreds. Both kinds of commit agree on one table: each has
its transaction (application, number) in the log, skips one whose number the table has, and refuses one whose name
another process has used since the table was read. What delta-rs cannot write, or would write differently, is left to
Java: tables of other stores, with further features, partitions or columns (`FileTable.takes`).
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, PostCommitHookProperties, Transaction

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.roots import local_path
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.part_files import TARGET_BYTES, PartFile, write_parts

WRITER = "KALMAN_DELTA_WRITER"
"""Environment variable that says who writes estimates where either can: `files` (the tasks) or `java` (Delta)."""
FILES, JAVA = "files", "java"
DEFAULT = FILES
_WRITER_VERSION = 2
"""The newest version of Delta's protocol whose features are all known here."""
_FEATURES = {"appendOnly", "invariants"}
"""Features of that version; newer tables name theirs."""
_META = ("delta.invariants", "delta.generationExpression", "delta.identity.start", "delta.columnMapping.id")
"""Metadata of columns that ask a writer for more than the values."""
_SETTINGS = {
    "delta.appendOnly",
    "delta.checkpointInterval",
    "delta.deletedFileRetentionDuration",
    "delta.enableExpiredLogCleanup",
    "delta.isolationLevel",
    "delta.logRetentionDuration",
    "delta.setTransactionRetentionDuration",
    "delta.targetFileSize",
}
"""Settings of a table that commits here honour, or that say nothing to them. Others may ask a writer for more, such as
to compact files, to list them for other engines, or for other statistics."""
_CHECKPOINT_EVERY = 10
"""Commits between checkpoints of the log, as in Delta's own default."""
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Of each commit: checkpoints are written here, where their failure is not the commit's."""
_TRIES = 5


def wanted_writer() -> str:
    """Return who is to write estimates where either can.

    Raises:
        UserError: the environment variable names none of the two.
    """
    found = os.environ.get(WRITER) or DEFAULT
    if found not in (FILES, JAVA):
        raise UserError(f"{WRITER}={found}: unknown; use {FILES} (the default is {DEFAULT}) or {JAVA}")
    return found


def takes_files(warehouse: Warehouse) -> bool:
    """Tell if tables of a warehouse are to be written without Java where that can be.

    Raises:
        UserError: the environment variable names no writer.
    """
    return wanted_writer() == FILES and warehouse.local


class _Seen(NamedTuple):
    """A commit's file when it was read: a table that was put back from a backup has another."""

    inode: int
    modified: int
    size: int


def create_table(warehouse: Warehouse, table: str, fields: str, settings: Mapping[str, str]) -> bool:
    """Make an empty table of a local warehouse without Java, unless there is something in its place; tell if it did.

    Args:
        warehouse: of the table.
        table: its name.
        fields: its columns, as JSON of Spark's `StructType`.
        settings: of the table.
    """
    root = local_path(warehouse.root)
    assert root is not None, "the files of a remote warehouse are not within reach"
    folder = root / table
    if "%" in str(folder) or "\\" in str(folder):
        return False  # as in `FileTable.takes`
    with warehouse.lock(table):
        # What a killed process has left of a first commit is Java's to repair (`Warehouse.create`).
        if not folder.exists():
            with suppress(DeltaError, OSError):  # Java makes the table then, or says why it cannot
                DeltaTable.create(str(folder), Schema.from_json(fields), configuration=dict(settings))
                return True
    return False


def files_at(warehouse: Warehouse, table: str, version: int) -> pa.Table | None:
    """Return the files of a version of a local table, as `DeltaTable.get_add_actions` flattens them.

    None if the table is not a local one, cannot be read here, or has features by which rows of a file may not count or
    columns have other names.
    """
    root = local_path(warehouse.root)
    if root is None or "%" in (folder := str(root / table)) or "\\" in folder:
        return None
    try:
        log = DeltaTable(folder, version=version)
    except (DeltaError, OSError):
        return None
    protocol = log.protocol()
    if protocol.min_reader_version > 1 or protocol.reader_features:
        return None
    return _bounds(log)


def append_rows(
    warehouse: Warehouse,
    table: str,
    schema: pa.Schema,
    rows: Sequence[Mapping[str, Any]],
    transaction: tuple[str, int],
) -> bool:
    """Append a few rows to a table in one commit without Spark; tell if it was done, else Java has to.

    Killed before the commit, the file of the rows is no part of the table, and VACUUM removes it.

    Args:
        warehouse: of the table.
        table: its name.
        schema: columns of the rows, which the table may not have (`FileTable.takes`).
        rows: their values by column.
        transaction: application and number, by which retries append the rows once.

    Raises:
        UserError: as `FileTable.commit` does.
    """
    if not takes_files(warehouse):
        return False
    files = FileTable(warehouse, table)
    if not files.takes(schema):
        return False
    batch = pa.RecordBatch.from_pylist([dict(row) for row in rows], schema)
    files.commit(write_parts(files.folder, f"part-{uuid.uuid4().hex}", [batch]), transaction)
    return True


class FileTable:
    """A table of a local warehouse that takes files by name.

    The log is read once and followed from then on; it is read anew if the table is no longer the one that was read.

    Args:
        warehouse: of the table.
        table: its name.
        settings: of the table that the files honour, beside those that all files do.
        partition: values of its partition columns that all of the files' rows have; empty: it has no such columns.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        table: str,
        settings: Set[str] = frozenset(),
        partition: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._warehouse, self.name = warehouse, table
        self._settings, self._partition = settings, partition
        root = local_path(warehouse.root)
        assert root is not None, "the files of a remote warehouse are not within reach"
        self.folder = root / table
        self._log: DeltaTable | None = None
        self._seen: _Seen | None = None
        self._asked: pa.Schema | None = None
        self.tried = False
        """Whether a commit of files was tried, so that some version may name them; reset by whoever writes others."""

    def takes(self, schema: pa.Schema) -> bool:
        """Tell if the table, as it is now, takes files with these columns as they are."""
        self._asked = schema
        if "%" in str(self.folder) or "\\" in str(self.folder):
            return False  # the library would decode the path, or take another folder's table
        log = self._fresh()
        return log is not None and self._still_takes(log, schema)

    @property
    def file_bytes(self) -> int:
        """Return the bytes from which a file of the table is full."""
        log = self._fresh()
        asked = None if log is None else log.metadata().configuration.get("delta.targetFileSize")
        return _bytes_of(asked) or TARGET_BYTES

    def bounds(self) -> pa.Table | None:
        """Return the least and the greatest values of the table's files, as `DeltaTable.get_add_actions` flattens them.

        None if there is no such table.
        """
        log = self._fresh()
        return None if log is None else _bounds(log)

    def commit(self, parts: Sequence[PartFile], transaction: tuple[str, int]) -> None:
        """Add files to the table in one commit; retries of a transaction (application, number) add them once.

        Raises:
            UserError: other commits came in between again and again, the log cannot be read or written, a file is gone,
                or the table no longer takes the columns of which it was asked last.
        """
        application, number = transaction

        def due(log: DeltaTable) -> Transaction | None:
            # The library compares with commits after those that it has read, not with the latter.
            last = log.transaction_version(application)
            return _transaction(application, number) if last is None or last < number else None

        # Nothing was read: so Delta in Java lets it pass beside a deletion of other rows, as its own appends.
        self._commit(parts, due, {"isBlindAppend": True})

    def add(
        self,
        parts: Sequence[PartFile],
        application: str,
        fits: Callable[[pa.Table], bool],
        metadata: Mapping[str, Any],
    ) -> int | None:
        """Add files to the table in one commit if it has no rows in their place.

        Return the version of the table that the commit made, or None if it has such rows.

        Args:
            parts: the files.
            application: whose commits refuse each other, if one has not seen the other.
            fits: tells from the bounds of the table's files (`bounds`) if none has such rows.
            metadata: of the commit.

        Raises:
            UserError: as `commit` does.
        """

        def due(log: DeltaTable) -> Transaction | None:
            last = log.transaction_version(application)
            number = 1 if last is None else last + 1
            return _transaction(application, number) if fits(_bounds(log)) else None

        return self._commit(parts, due, {**metadata, "isBlindAppend": False})

    def change(self, make: Callable[[DeltaTable], object]) -> None:
        """Let the library change the table's rows in one commit, again on what others have written if one came between.

        Args:
            make: commits by the log that it is given.

        Raises:
            UserError: other commits came in between again and again, or the log cannot be read or written.
        """

        def write(log: DeltaTable) -> int:
            make(log)
            return log.version()

        self._tried(write)

    def _commit(
        self,
        parts: Sequence[PartFile],
        due: Callable[[DeltaTable], Transaction | None],
        metadata: Mapping[str, Any],
    ) -> int | None:
        """Commit files under the transaction that is due of the newest log, if one is; return the version made."""

        def write(log: DeltaTable) -> int | None:
            transaction = due(log)
            if transaction is None:
                return None
            self._check(log, parts)
            self.tried = True
            return self._write(log, parts, transaction, metadata)

        return self._tried(write)

    def _tried(self, write: Callable[[DeltaTable], int | None]) -> int | None:
        """Return the version that a commit to the newest log has made, None if it made none; try it some times."""
        with self._warehouse.lock(self.name):
            for left in reversed(range(_TRIES)):
                log = self._fresh()
                try:
                    if log is None:
                        raise TableNotFoundError("the table is gone")
                    before = log.version()
                    version = write(log)
                    if version is not None and version > before and version % _checkpoint_every(log) == 0:
                        self._checkpoint()
                    return version
                except CommitFailedError as error:
                    self._log = None
                    if left == 0:
                        raise self._problem(error) from error
                except (DeltaError, OSError) as error:
                    self._log = None
                    raise self._problem(error) from error

    def _still_takes(self, log: DeltaTable, schema: pa.Schema) -> bool:
        return _plain(log, self._settings, list(self._partition)) and _fits(schema, log)

    def _check(self, log: DeltaTable, parts: Sequence[PartFile]) -> None:
        """Check what may have changed while the files were written: for minutes, or days in a frozen process."""
        again = "run the command again, which writes its rows again"
        if self._asked is not None and not self._still_takes(log, self._asked):
            raise UserError(
                f"{self.folder}: the table was changed while its files were written; {again}", RUN_FAILED
            )
        for part in parts:
            try:
                whole = os.stat(self.folder / part.path).st_size == part.size
            except FileNotFoundError:
                whole = False
            if not whole:
                raise UserError(
                    f"{self.folder / part.path}: the file was changed or removed before it was committed; {again}",
                    RUN_FAILED,
                )

    def _write(
        self,
        log: DeltaTable,
        parts: Sequence[PartFile],
        transaction: Transaction,
        metadata: Mapping[str, Any],
    ) -> int:
        values: Any = dict(self._partition)
        adds: list[Any] = [
            AddAction(one.path, one.size, values, one.modified, True, one.stats) for one in parts
        ]
        rows, size = sum(one.rows for one in parts), sum(one.size for one in parts)
        metrics = {"numFiles": str(len(parts)), "numOutputRows": str(rows), "numOutputBytes": str(size)}
        log.create_write_transaction(
            adds,
            "append",
            log.schema(),
            list(self._partition) or None,
            commit_properties=CommitProperties(
                {"operationMetrics": metrics, **metadata}, app_transactions=[transaction]
            ),
            post_commithook_properties=NO_HOOKS,
        )
        return log.version() + 1

    def _checkpoint(self) -> None:
        """Write a checkpoint of the log, and remove what is older than its retention, as Delta's own writer does."""
        try:
            log = self._fresh()
            if log is not None:
                log.create_checkpoint()
                if (
                    log.metadata().configuration.get("delta.enableExpiredLogCleanup", "true").lower()
                    == "true"
                ):
                    log.cleanup_metadata()
        except (UserError, DeltaError, OSError):
            pass  # the commit is made; a later one writes a checkpoint again
        # What is followed costs more with each commit that it followed; what is read from a checkpoint less.
        self._log = None

    def _fresh(self) -> DeltaTable | None:
        """Return the log up to now, or None if there is no such table."""
        log, self._log = self._log, None
        try:
            if log is None or self._at(log.version()) != self._seen:
                log = DeltaTable(str(self.folder))
            elif self._at(log.version() + 1) is not None:
                log.update_incremental()
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise self._problem(error) from error
        self._log, self._seen = log, self._at(log.version())
        return log

    def _at(self, version: int) -> _Seen | None:
        try:
            found = os.stat(self.folder / "_delta_log" / f"{version:020d}.json")
        except FileNotFoundError:
            return None
        return _Seen(found.st_ino, found.st_mtime_ns, found.st_size)

    def _problem(self, error: Exception) -> UserError:
        return UserError(f"{self.folder}: the commit failed: {_reason(error)}", RUN_FAILED)


def _reason(error: Exception) -> str:
    """Return an error's message on one line: the library draws its causes below each other, in color."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    causes = (line.strip().removeprefix("\u21b3").strip() for line in plain.splitlines())
    return ": ".join(cause for cause in causes if cause)[:600]


def _transaction(application: str, number: int) -> Transaction:
    # Delta in Java may forget a transaction that does not say when it was.
    return Transaction(application, number, int(time.time() * 1000))


def _bounds(log: DeltaTable) -> pa.Table:
    return pa.table(log.get_add_actions(flatten=True))


def _plain(log: DeltaTable, settings: Set[str], partition_by: list[str]) -> bool:
    """Tell if a table asks nothing of its writers but files, of its partitions, and their statistics."""
    protocol, about = log.protocol(), log.metadata()
    features = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    known = protocol.min_writer_version <= _WRITER_VERSION or bool(features) and features <= _FEATURES
    asked = {
        name
        for name, text in about.configuration.items()
        if name.startswith("delta.") and text.lower() not in ("false", "none")
    }
    return known and asked <= _SETTINGS | settings and about.partition_columns == partition_by


def _fits(schema: pa.Schema, log: DeltaTable) -> bool:
    """Tell if the columns of files are the table's own, and those that the files lack may be null."""
    fields = {field.name: field for field in log.schema().fields}
    if any(name in field.metadata for field in fields.values() for name in _META):
        return False
    have = pa.schema(log.schema().to_arrow())
    for field in schema:
        at = have.get_field_index(field.name)
        if at < 0 or _bare(have.field(at).type) != _bare(field.type):
            return False
    return all(field.nullable for field in fields.values())


def _bare(kind: pa.DataType) -> pa.DataType:
    """Return a type without the names and nullability within lists, and without the size of their offsets."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(_bare(kind.value_type))
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    return kind


def _checkpoint_every(log: DeltaTable) -> int:
    asked = log.metadata().configuration.get("delta.checkpointInterval", "")
    return int(asked) if asked.isdigit() and int(asked) else _CHECKPOINT_EVERY


def _bytes_of(text: str | None) -> int | None:
    """Return a size such as `104857600`, `100mb` or `1g` in bytes, or None if there is none."""
    if text is None:
        return None
    plain = text.strip().lower().removesuffix("b")
    units = {"k": 10, "m": 20, "g": 30}
    shift = units.get(plain[-1:], 0)
    digits = plain[:-1] if shift else plain
    return int(digits) << shift if digits.isdigit() and int(digits) else None
