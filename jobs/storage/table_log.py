"""The log of a Delta table in a folder or in S3, and commits to the log, without Spark (delta-rs).

Each commit is one file of the log, which the store creates only if the file is absent. A commit must become the version
right after the version that was read. If another commit came first, the table is read and the change is computed again.
Each commit has a random identity. If the store's answer was lost, the identity in the log file of that version shows
whether the commit was made.

Delta in Java commits to the same tables. Both writers store transactions (application, number) in the log, and skip a
transaction whose number the table already has.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable, Field
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    PostCommitHookProperties,
    RemoveAction,
    Transaction,
)

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.faults import join_causes
from jobs.storage import object_files
from jobs.storage.demands import find_absent_fields, find_other_type, find_refusal
from jobs.storage.object_files import FileStamp
from jobs.storage.part_files import INDEXED, TARGET_BYTES, PartFile, name_attempt, remove, write_parts
from jobs.storage.table_rows import open_log, read_columns
from jobs.storage.warehouse import Tables, name_commit

_CHECKPOINT_EVERY = 10
"""Number of commits between two checkpoints of the log; Delta has the same default."""
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Properties of all commits. Checkpoints are written in a separate step, so that the failure of a checkpoint does not
fail the commit.
"""
_TRIES, _PAUSE_SECONDS, _LOCAL_SECONDS = 8, (0.1, 1.0), (0.0, 0.1)
"""Maximum attempts of a commit if other commits come first, and the range of the random pause between attempts, in
seconds. In a folder the pause is shorter, as a lock orders the commits of this product's commands.
"""
_LOOKS, _LOOK_SECONDS = 5, 0.3
"""Attempts to find a commit whose answer was lost, and the pause between attempts, in seconds."""
_COMMIT = "kalmanCommit"
"""Field of a commit that contains its identity."""


class Due(NamedTuple):
    """Further actions of a commit that adds files: transactions to record and files to remove."""

    transactions: Sequence[Transaction] = ()
    removed: Sequence[RemoveAction] = ()


class Conflict(UserError):
    """Other commits came before this one at every attempt."""


def open_plain_log(warehouse: Tables, table: str, version: int | None = None) -> DeltaTable | None:
    """Open the log of a version whose rows are exactly the rows of its Parquet files; by default the newest version.

    Return None if delta-rs cannot read the table, or the table uses deletion vectors, column mapping or other features
    of readers.
    """
    try:
        log = open_log(warehouse.root, table, version)
    except (DeltaError, OSError):
        return None
    protocol = log.protocol()
    return None if protocol.min_reader_version > 1 or protocol.reader_features else log


class FileTable:
    """A table to which files are committed by name.

    The log is read once and then updated. If the table was replaced, its log is read from the beginning.

    Args:
        warehouse: warehouse of the table.
        table: name of the table.
        settings: table properties that the files satisfy, besides the properties that every file satisfies.
    """

    def __init__(
        self,
        warehouse: Tables,
        table: str,
        settings: Set[str] = frozenset(),
    ) -> None:
        self._warehouse, self.name = warehouse, table
        self._settings = settings
        self.path = warehouse.path(table)
        self._files = warehouse.files(table)
        self._log: DeltaTable | None = None
        self._seen: FileStamp | None = None
        self._asked: pa.Schema | None = None
        self._by_partition = False
        self.tried = False
        """Whether a commit of files was attempted, so that a version of the table may name these files. The code that
        writes other files resets this flag."""

    def ready(self, schema: pa.Schema, by_partition: bool = False) -> None:
        """Prepare the table for files with these columns: add the missing columns, in one commit.

        Args:
            schema: columns of the files.
            by_partition: whether each file has the values of its partition columns in `PartFile.values`.

        Raises:
            UserError: the table does not exist, a property of the table demands more of a writer than the files
                satisfy, or a column has another type.
        """
        self._asked, self._by_partition = schema, by_partition
        log = self._need()
        why = self._find_refusal(log, schema)
        if why is not None:
            raise self._build_refusal(why)
        absent = find_absent_fields(log, schema)
        if absent:
            self.change(lambda log, properties: add_absent(log, absent, properties))

    def columns(self) -> pa.Schema:
        """Return the table's columns, including its partition columns.

        Raises:
            UserError: the table does not exist.
        """
        return read_columns(self._need())

    @property
    def partition_by(self) -> list[str]:
        """Return the names of the partition columns."""
        return list(self._need().metadata().partition_columns)

    @property
    def indexed(self) -> int:
        """Return the number of leading columns that have statistics in each file."""
        asked = self._need().metadata().configuration.get("delta.dataSkippingNumIndexedCols", "")
        return int(asked) if asked.isdigit() else sys.maxsize if asked == "-1" else INDEXED

    @property
    def file_bytes(self) -> int:
        """Return the size in bytes at which a file of the table is full."""
        log = self._fresh()
        asked = None if log is None else log.metadata().configuration.get("delta.targetFileSize")
        return parse_bytes(asked) or TARGET_BYTES

    def is_due(self, transaction: tuple[str, int]) -> bool:
        """Return whether the table has neither this transaction (application, number) nor a later one."""
        return is_due(self._need(), transaction)

    def commit(
        self,
        parts: Sequence[PartFile],
        transaction: tuple[str, int] | None,
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> int | None:
        """Add files to the table in one commit; a repeated transaction (application, number) adds no files.

        Return the version that the commit made, or None if the table has the transaction, or a later transaction of the
        same application.

        Raises:
            UserError: other commits came first at every attempt, the log cannot be read or written, a file is gone, or
                the table no longer takes the columns that `ready` prepared.
        """

        def due(log: DeltaTable) -> Due | None:
            if transaction is None:
                return Due()
            return Due([build_transaction(*transaction)]) if is_due(log, transaction) else None

        # A blind append reads nothing, so Delta in Java does not see a conflict with a concurrent delete.
        return self._commit(parts, due, {**metadata, "isBlindAppend": True})

    def commit_for_all(
        self, parts: Sequence[PartFile], transactions: Sequence[tuple[str, int]], metadata: Mapping[str, Any]
    ) -> int:
        """Add files to the table in one commit that records several transactions, and return the version that it made.

        Raises:
            Conflict: another command has recorded one of the transactions.
            UserError: as in `commit`.
        """

        def due(log: DeltaTable) -> Due:
            # The transactions are read after the log, so another commit between the two reads makes this commit fail.
            # One read of all transactions is cheaper than one read of the log for each transaction.
            known = self._warehouse.transactions(self.name)
            ended = [name for name, _ in transactions if name in known]
            if ended:
                raise Conflict(
                    f"{self.path}: another command has committed {ended[0]} meanwhile; run the command again",
                    RUN_FAILED,
                )
            return Due([build_transaction(*one) for one in transactions])

        version = self._commit(parts, due, {**metadata, "isBlindAppend": True})
        assert version is not None
        return version

    def change(self, make: Callable[[DeltaTable, CommitProperties], object]) -> int | None:
        """Let delta-rs change the table's rows in one commit; repeat the change if another commit came first.

        Return the version of the table after the change.

        Args:
            make: function that makes at most one commit, given a log and commit properties.

        Raises:
            Conflict: other commits came first at every attempt.
            UserError: the log cannot be read or written.
        """

        def write(log: DeltaTable, identity: str) -> int:
            before = log.version()
            make(log, _build_properties(identity, {}))
            return min(log.version(), before + 1)  # delta-rs may have read later commits of others

        return self._try_commit(write)

    def overwrite(self, parts: Sequence[PartFile], columns: DeltaSchema) -> int:
        """Replace all files of the table in one commit; return the version that the commit made.

        Args:
            parts: the new files.
            columns: new columns of the table. If the table does not exist, it is made with these columns.

        Raises:
            Conflict: other commits came first at every attempt.
            UserError: the log cannot be read or written, or a file is gone.
        """
        if not self._warehouse.exists(self.name):
            self.tried = True
            if self._warehouse.create(self.name, columns, files=_build_add_actions(parts)):
                return 0

        def write(log: DeltaTable, identity: str) -> int:
            self._check(log, parts)
            self.tried = True
            return self._write(
                log,
                _build_add_actions(parts),
                "overwrite",
                columns,
                _build_properties(identity, _build_metrics(parts)),
            )

        version = self._try_commit(write)
        assert version is not None
        return version

    def _commit(
        self,
        parts: Sequence[PartFile],
        due: Callable[[DeltaTable], Due | None],
        metadata: Mapping[str, Any],
    ) -> int | None:
        """Commit files with further actions; return the new version, or None if the commit was already made."""

        def write(log: DeltaTable, identity: str) -> int | None:
            found = due(log)
            if found is None:
                return None
            self._check(log, parts)
            self.tried = True
            properties = _build_properties(
                identity, {**_build_metrics(parts), **metadata}, found.transactions
            )
            return self._write(
                log, [*_build_add_actions(parts), *found.removed], "append", log.schema(), properties
            )

        return self._try_commit(write)

    def _try_commit(self, write: Callable[[DeltaTable, str], int | None]) -> int | None:
        """Make a commit right after the newest version; return its version, or None if `write` made no commit."""
        object_files.ensure_probed(self._warehouse.root)
        with self._warehouse.lock(self.name):
            for left in reversed(range(_TRIES)):
                log, identity = self._need(), uuid.uuid4().hex
                before = log.version()
                try:
                    version = write(log, identity)
                except CommitFailedError as error:
                    self._log = None
                    if self._made(before + 1, identity):
                        version = before + 1
                    elif left == 0:
                        raise Conflict(f"{self.path}: {join_causes(str(error))[:600]}", RUN_FAILED) from error
                    else:
                        time.sleep(
                            random.uniform(*(_PAUSE_SECONDS if not self._warehouse.local else _LOCAL_SECONDS))
                        )
                        continue
                except (DeltaError, OSError) as error:
                    self._log = None
                    if not self._has_arrived(before + 1, identity):
                        raise self._problem(join_causes(str(error))[:600]) from error
                    version = before + 1
                if version is not None and version > before and version % _read_checkpoint_interval(log) == 0:
                    self._checkpoint()
                return version

    def _made(self, version: int, identity: str) -> bool:
        """Return whether the commit of a version has the given identity."""
        info = self._warehouse.commit_info(self.name, version)
        return info is not None and info.get(_COMMIT) == identity

    def _has_arrived(self, version: int, identity: str) -> bool:
        """Look for a commit after the answer to it was lost, as it may still arrive; return whether it was made."""
        for look in range(1 if self._warehouse.local else _LOOKS):
            time.sleep(_LOOK_SECONDS if look else 0.0)
            with suppress(UserError):
                if self._find_commit(version) is not None:
                    return self._made(version, identity)
        return False

    def _find_refusal(self, log: DeltaTable, schema: pa.Schema) -> str | None:
        """Return the reason why the table does not take files with these columns, or None if it takes them."""
        why = find_refusal(log, self._settings) or find_other_type(log, schema)
        if why is not None:
            return why
        lacking = set(log.metadata().partition_columns) - set(schema.names if self._by_partition else ())
        return f"it is partitioned by {', '.join(sorted(lacking))}: make it anew" if lacking else None

    def _build_refusal(self, why: str) -> UserError:
        return UserError(f"{self.path}: the table cannot be written: {why}")

    def _need(self) -> DeltaTable:
        log = self._fresh()
        if log is None:
            raise self._problem("the table is gone")
        return log

    def _check(self, log: DeltaTable, parts: Sequence[PartFile]) -> None:
        """Check the table and the files again, since minutes (in a frozen process, days) may have passed."""
        again = "run the command again, which writes its rows again"
        if self._asked is not None:
            why = self._find_refusal(log, self._asked)
            if why is not None or find_absent_fields(log, self._asked):
                raise UserError(
                    f"{self.path}: the table was changed while its files were written; {again}", RUN_FAILED
                )
        for part in parts:
            found = self._files.seen(part.path)
            if found is None or found.size != part.size:
                raise UserError(
                    f"{self.path}/{part.path}: the file was changed or removed before it was committed; {again}",
                    RUN_FAILED,
                )

    def _write(
        self,
        log: DeltaTable,
        actions: Sequence[AddAction | RemoveAction],
        mode: Literal["append", "overwrite"],
        columns: DeltaSchema,
        properties: CommitProperties,
    ) -> int:
        """Commit added and removed files right after the version of a log; return the new version."""
        log.create_write_transaction(
            list(actions),
            mode,
            columns,
            log.metadata().partition_columns,
            commit_properties=properties,
            post_commithook_properties=NO_HOOKS,
        )
        return log.version() + 1

    def _checkpoint(self) -> None:
        """Write a checkpoint of the log, and remove log files older than the retention, as Delta's writer does."""
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
            pass  # the commit succeeded; a later commit writes the checkpoint
        # Each update makes the next update of a log slower; a log that is read from a new checkpoint is fast again.
        self._log = None

    def _fresh(self) -> DeltaTable | None:
        """Return the log, updated to now, or None if the table does not exist."""
        log, self._log = self._log, None
        try:
            if log is None or self._find_commit(log.version()) != self._seen:
                log = open_log(self._warehouse.root, self.name)
            elif self._find_commit(log.version() + 1) is not None:
                log.update_incremental()
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise self._problem(join_causes(str(error))[:600]) from error
        self._log, self._seen = log, self._find_commit(log.version())
        return log

    def _find_commit(self, version: int) -> FileStamp | None:
        return self._files.seen(f"_delta_log/{name_commit(version)}")

    def _problem(self, why: str) -> UserError:
        return UserError(f"{self.path}: the commit failed: {why}", RUN_FAILED)


def commit_or_remove(
    files: FileTable, parts: list[PartFile], commit: Callable[[list[PartFile]], int | None]
) -> int | None:
    """Commit written files. If the commit failed and no version can name the files, remove them."""
    version = None
    try:
        version = commit(parts)
    finally:
        if version is None and not files.tried:
            remove(files.path, parts)
    return version


def append_rows(
    files: FileTable, rows: pa.RecordBatch, transaction: tuple[str, int], detail: str | None = None
) -> int | None:
    """Write rows from this process and append them in one commit, once per transaction (application, number).

    Return the version that the commit made, or None if the table has the transaction, or a later transaction of the
    same application.

    Args:
        files: the table; columns of the rows that the table lacks are added to it.
        rows: rows with the table's column names and types.
        transaction: application and number.
        detail: text stored in the commit (`LogEntry.detail` if it is JSON).

    Raises:
        UserError: the table does not take rows with these columns, or the commit failed.
    """
    if not files.is_due(transaction):
        return None
    files.ready(rows.schema)
    name = name_attempt(0, uuid.uuid4().hex, 0, 0)
    parts = write_parts(files.path, name, [rows], full=files.file_bytes, indexed=files.indexed)
    metadata = {} if detail is None else {"userMetadata": detail}
    return commit_or_remove(files, parts, lambda parts: files.commit(parts, transaction, metadata))


def _read_checkpoint_interval(log: DeltaTable) -> int:
    asked = log.metadata().configuration.get("delta.checkpointInterval", "")
    return int(asked) if asked.isdigit() and int(asked) else _CHECKPOINT_EVERY


def _build_properties(
    identity: str, metadata: Mapping[str, Any], transactions: Sequence[Transaction] = ()
) -> CommitProperties:
    """Return the properties of one commit; they prevent that delta-rs retries the commit at a later version."""
    return CommitProperties({**metadata, _COMMIT: identity}, 0, list(transactions))


def _build_add_actions(parts: Sequence[PartFile]) -> list[AddAction]:
    return [AddAction(one.path, one.size, dict(one.values), one.modified, True, one.stats) for one in parts]


def add_absent(log: DeltaTable, fields: Sequence[Field], properties: CommitProperties) -> None:
    """Add missing columns to a table in one commit; make no commit if no column is missing."""
    have = {field.name for field in log.schema().fields}
    absent = [field for field in fields if field.name not in have]
    if absent:
        log.alter.add_columns(absent, commit_properties=properties, post_commithook_properties=NO_HOOKS)


def _build_metrics(parts: Sequence[PartFile]) -> dict[str, Any]:
    rows, size = sum(one.rows for one in parts), sum(one.size for one in parts)
    found = {"numFiles": str(len(parts)), "numOutputRows": str(rows), "numOutputBytes": str(size)}
    return {"operationMetrics": found}


def is_due(log: DeltaTable, transaction: tuple[str, int]) -> bool:
    """Return whether a log has neither a transaction (application, number) nor a later one of the application."""
    # delta-rs finds a transaction only if its commit is not newer than the version that delta-rs has read.
    last = log.transaction_version(transaction[0])
    return last is None or last < transaction[1]


def build_transaction(application: str, number: int) -> Transaction:
    """Return a transaction in the form of an action of a commit."""
    # Delta in Java may expire a transaction that has no time.
    return Transaction(application, number, int(time.time() * 1000))


def parse_bytes(text: str | None) -> int | None:
    """Parse a size such as `104857600`, `100mb` or `1g` into bytes; return None if the text is not a size."""
    if text is None:
        return None
    plain = text.strip().lower().removesuffix("b")
    units = {"k": 10, "m": 20, "g": 30, "t": 40}
    shift = units.get(plain[-1:], 0)
    digits = plain[:-1] if shift else plain
    return int(digits) << shift if digits.isdigit() and int(digits) else None
