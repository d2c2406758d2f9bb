"""The log of a Delta table, and commits to it, without Spark (delta-rs), in a folder or in S3.

Each commit is one file of the log, which the store creates only if it is absent. A commit here is made for the version
right after the one that was read, never for a later one: if another commit came first, the table is read again, and
what is to be committed is decided anew. Each commit carries an identity of its own: where the store's answer was lost,
the file of that version tells whether the commit was made.

Delta in Java commits to the same tables. Both keep transactions (application, number) in the log, and skip one whose
number the table has.
"""

from __future__ import annotations

import random
import re
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
from jobs.storage import probe
from jobs.storage.demands import absent_fields, other_type, refusal
from jobs.storage.object_files import Seen
from jobs.storage.part_files import INDEXED, TARGET_BYTES, PartFile, attempt_name, remove, write_parts
from jobs.storage.table_rows import live_files, open_log
from jobs.storage.warehouse import Tables

_CHECKPOINT_EVERY = 10
"""Commits between checkpoints of the log, as in Delta's own default."""
NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Of each commit: checkpoints are written here, where their failure is not the commit's."""
_TRIES, _PAUSE_SECONDS, _LOCAL_SECONDS = 8, (0.1, 1.0), (0.0, 0.1)
"""A commit that another one came before is tried so often, each time after a random pause; in a folder after a short
one, as there a lock orders the commits of our own commands."""
_LOOKS, _LOOK_SECONDS = 5, 0.3
"""How often a commit is looked for whose answer was lost."""
_COMMIT = "kalmanCommit"
"""Field of a commit that identifies it."""


class Due(NamedTuple):
    """What a commit of files does besides adding them: the transactions that it ends, and the files that it removes."""

    transactions: Sequence[Transaction] = ()
    removed: Sequence[RemoveAction] = ()


class Conflict(UserError):
    """Other commits came before this one, each time that it was tried."""


def files_at(warehouse: Tables, table: str, version: int) -> pa.Table | None:
    """Return the files of a version of a table (`live_files`).

    None if the table cannot be read here, or has features by which rows of a file may not count or columns have other
    names.
    """
    try:
        log = open_log(warehouse.root, table, version)
    except (DeltaError, OSError):
        return None
    protocol = log.protocol()
    if protocol.min_reader_version > 1 or protocol.reader_features:
        return None
    return live_files(log)


class FileTable:
    """A table of a local warehouse that takes files by name.

    The log is read once and followed from then on; it is read anew if the table is no longer the one that was read.

    Args:
        warehouse: of the table.
        table: its name.
        settings: of the table that the files honour, beside those that all files do.
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
        self._seen: Seen | None = None
        self._asked: pa.Schema | None = None
        self._by_partition = False
        self.tried = False
        """Whether a commit of files was tried, so that some version may name them; reset by whoever writes others."""

    def ready(self, schema: pa.Schema, by_partition: bool = False) -> None:
        """Make the table ready for files with these columns: it gets those that it lacks, in one commit.

        Args:
            schema: the columns.
            by_partition: each file has values of partition columns of its own (`PartFile.values`).

        Raises:
            UserError: there is no such table, its owner asks more of a writer than files honour, or a column has
                another type.
        """
        self._asked, self._by_partition = schema, by_partition
        log = self._need()
        why = self._refusal(log, schema)
        if why is not None:
            raise self._refused(why)
        absent = absent_fields(log, schema)
        if absent:
            self.change(lambda log, properties: add_absent(log, absent, properties))

    def columns(self) -> pa.Schema:
        """Return the table's columns, those of its partitions among them.

        Raises:
            UserError: there is no such table.
        """
        found: Any = self._need().schema().to_arrow()
        return pa.schema(found)

    @property
    def partition_by(self) -> list[str]:
        """Return the columns whose values are those of partitions."""
        return list(self._need().metadata().partition_columns)

    @property
    def indexed(self) -> int:
        """Return how many of the first columns have statistics in each file."""
        asked = self._need().metadata().configuration.get("delta.dataSkippingNumIndexedCols", "")
        return int(asked) if asked.isdigit() else sys.maxsize if asked == "-1" else INDEXED

    @property
    def file_bytes(self) -> int:
        """Return the bytes from which a file of the table is full."""
        log = self._fresh()
        asked = None if log is None else log.metadata().configuration.get("delta.targetFileSize")
        return _bytes_of(asked) or TARGET_BYTES

    def is_due(self, transaction: tuple[str, int]) -> bool:
        """Tell if the table has neither a transaction (application, number) nor a later one of its application."""
        return is_due(self._need(), transaction)

    def commit(
        self,
        parts: Sequence[PartFile],
        transaction: tuple[str, int] | None,
        metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> int | None:
        """Add files to the table in one commit; retries of a transaction (application, number) add them once.

        Return the version that the commit made, or None if the table has the transaction, or a later one of its
        application.

        Raises:
            UserError: other commits came in between again and again, the log cannot be read or written, a file is gone,
                or the table no longer takes the columns of which it was asked last.
        """

        def due(log: DeltaTable) -> Due | None:
            if transaction is None:
                return Due()
            return Due([transaction_of(*transaction)]) if is_due(log, transaction) else None

        # Nothing was read: so Delta in Java lets it pass beside a deletion of other rows, as its own appends.
        return self._commit(parts, due, {**metadata, "isBlindAppend": True})

    def commit_for_all(
        self, parts: Sequence[PartFile], transactions: Sequence[tuple[str, int]], metadata: Mapping[str, Any]
    ) -> int:
        """Add files to the table in one commit that ends several transactions, and return the version that it made.

        Raises:
            Conflict: another command has ended one of the transactions.
            UserError: as `commit` does.
        """

        def due(log: DeltaTable) -> Due:
            # Read after the log: if a commit is in between, this one is not made. The log would be asked for each.
            known = self._warehouse.transactions(self.name)
            ended = [name for name, _ in transactions if name in known]
            if ended:
                raise Conflict(
                    f"{self.path}: another command has committed {ended[0]} meanwhile; run the command again",
                    RUN_FAILED,
                )
            return Due([transaction_of(*one) for one in transactions])

        version = self._commit(parts, due, {**metadata, "isBlindAppend": True})
        assert version is not None
        return version

    def change(self, make: Callable[[DeltaTable, CommitProperties], object]) -> int | None:
        """Let the library change the table's rows in one commit, again on what others have written if one came between.

        Return the version that the table then had.

        Args:
            make: commits by the log and with the properties that it is given, once at most.

        Raises:
            Conflict: other commits came in between again and again.
            UserError: the log cannot be read or written.
        """

        def write(log: DeltaTable, identity: str) -> int:
            before = log.version()
            make(log, _properties(identity, {}))
            return min(log.version(), before + 1)  # the library may have read commits of others after its own

        return self._tried(write)

    def overwrite(self, parts: Sequence[PartFile], columns: DeltaSchema) -> int:
        """Put files in the place of all that the table has, in one commit; return the version that it made.

        Args:
            parts: the files.
            columns: of the table from then on, which is made if there is none.

        Raises:
            Conflict: other commits came in between again and again.
            UserError: the log cannot be read or written, or a file is gone.
        """
        if not self._warehouse.exists(self.name):
            self.tried = True
            if self._warehouse.make(self.name, columns, files=_added(parts)):
                return 0

        def write(log: DeltaTable, identity: str) -> int:
            self._check(log, parts)
            self.tried = True
            return self._write(
                log, _added(parts), "overwrite", columns, _properties(identity, _metrics(parts))
            )

        version = self._tried(write)
        assert version is not None
        return version

    def _commit(
        self,
        parts: Sequence[PartFile],
        due: Callable[[DeltaTable], Due | None],
        metadata: Mapping[str, Any],
    ) -> int | None:
        """Commit files with what is due besides; return the version made, or None if none is to be made."""

        def write(log: DeltaTable, identity: str) -> int | None:
            found = due(log)
            if found is None:
                return None
            self._check(log, parts)
            self.tried = True
            properties = _properties(identity, {**_metrics(parts), **metadata}, found.transactions)
            return self._write(log, [*_added(parts), *found.removed], "append", log.schema(), properties)

        return self._tried(write)

    def _tried(self, write: Callable[[DeltaTable, str], int | None]) -> int | None:
        """Return the version that a commit right after the newest one has made, None if it made none."""
        probe.ready(self._warehouse.root)
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
                        raise Conflict(f"{self.path}: {_reason(error)}", RUN_FAILED) from error
                    else:
                        time.sleep(
                            random.uniform(*(_PAUSE_SECONDS if not self._warehouse.local else _LOCAL_SECONDS))
                        )
                        continue
                except (DeltaError, OSError) as error:
                    self._log = None
                    if not self._arrived(before + 1, identity):
                        raise self._problem(_reason(error)) from error
                    version = before + 1
                if version is not None and version > before and version % _checkpoint_every(log) == 0:
                    self._checkpoint()
                return version

    def _made(self, version: int, identity: str) -> bool:
        """Tell if a version of the table is the commit of this identity."""
        info = self._warehouse.commit_info(self.name, version)
        return info is not None and info.get(_COMMIT) == identity

    def _arrived(self, version: int, identity: str) -> bool:
        """Tell if a commit without an answer was made: in a store it may still be on its way, and is looked for."""
        for look in range(1 if self._warehouse.local else _LOOKS):
            time.sleep(_LOOK_SECONDS if look else 0.0)
            with suppress(UserError):
                if self._files.seen(_commit_name(version)) is not None:
                    return self._made(version, identity)
        return False

    def _refusal(self, log: DeltaTable, schema: pa.Schema) -> str | None:
        """Return why the table takes no files with these columns, or with some of them and others besides."""
        why = refusal(log, self._settings) or other_type(log, schema)
        if why is not None:
            return why
        lacking = set(log.metadata().partition_columns) - set(schema.names if self._by_partition else ())
        return f"it is partitioned by {', '.join(sorted(lacking))}: make it anew" if lacking else None

    def _refused(self, why: str) -> UserError:
        return UserError(f"{self.path}: the table cannot be written: {why}")

    def _need(self) -> DeltaTable:
        log = self._fresh()
        if log is None:
            raise self._problem("the table is gone")
        return log

    def _check(self, log: DeltaTable, parts: Sequence[PartFile]) -> None:
        """Check what may have changed while the files were written: for minutes, or days in a frozen process."""
        again = "run the command again, which writes its rows again"
        if self._asked is not None:
            why = self._refusal(log, self._asked)
            if why is not None or absent_fields(log, self._asked):
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
        """Commit files that are added and removed right after the version of a log; return the version that it made."""
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
                log = open_log(self._warehouse.root, self.name)
            elif self._at(log.version() + 1) is not None:
                log.update_incremental()
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise self._problem(_reason(error)) from error
        self._log, self._seen = log, self._at(log.version())
        return log

    def _at(self, version: int) -> Seen | None:
        return self._files.seen(_commit_name(version))

    def _problem(self, why: str) -> UserError:
        return UserError(f"{self.path}: the commit failed: {why}", RUN_FAILED)


def commit_or_remove(
    files: FileTable, parts: list[PartFile], commit: Callable[[list[PartFile]], int | None]
) -> int | None:
    """Commit files that were written, and remove them if no commit can name them."""
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
    """Write rows from this process and append them in one commit, once a transaction (application, number).

    Return the version that the commit made, or None if the table has the transaction, or a later one.

    Args:
        files: of the table, which gets the columns that it lacks.
        rows: with the names and types of the table.
        transaction: application and number.
        detail: text that the commit keeps (`LogEntry.detail` if it is JSON).

    Raises:
        UserError: the table does not take such rows, or the commit failed.
    """
    if not files.is_due(transaction):
        return None
    files.ready(rows.schema)
    name = attempt_name(0, uuid.uuid4().hex, 0, 0)
    parts = write_parts(files.path, name, [rows], full=files.file_bytes, indexed=files.indexed)
    metadata = {} if detail is None else {"userMetadata": detail}
    return commit_or_remove(files, parts, lambda parts: files.commit(parts, transaction, metadata))


def _checkpoint_every(log: DeltaTable) -> int:
    asked = log.metadata().configuration.get("delta.checkpointInterval", "")
    return int(asked) if asked.isdigit() and int(asked) else _CHECKPOINT_EVERY


def _commit_name(version: int) -> str:
    return f"_delta_log/{version:020d}.json"


def _properties(
    identity: str, metadata: Mapping[str, Any], transactions: Sequence[Transaction] = ()
) -> CommitProperties:
    """Return the properties of one commit: it is not made for a later version if another came before it."""
    return CommitProperties({**metadata, _COMMIT: identity}, 0, list(transactions))


def _added(parts: Sequence[PartFile]) -> list[AddAction]:
    return [AddAction(one.path, one.size, dict(one.values), one.modified, True, one.stats) for one in parts]


def add_absent(log: DeltaTable, fields: Sequence[Field], properties: CommitProperties) -> None:
    """Add the columns that a table lacks in one commit; none is made if it has them all."""
    have = {field.name for field in log.schema().fields}
    absent = [field for field in fields if field.name not in have]
    if absent:
        log.alter.add_columns(absent, commit_properties=properties, post_commithook_properties=NO_HOOKS)


def _metrics(parts: Sequence[PartFile]) -> dict[str, Any]:
    rows, size = sum(one.rows for one in parts), sum(one.size for one in parts)
    found = {"numFiles": str(len(parts)), "numOutputRows": str(rows), "numOutputBytes": str(size)}
    return {"operationMetrics": found}


def _reason(error: Exception) -> str:
    """Return an error's message on one line: the library draws its causes below each other, in color."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    causes = (line.strip().removeprefix("\u21b3").strip() for line in plain.splitlines())
    return ": ".join(cause for cause in causes if cause)[:600]


def is_due(log: DeltaTable, transaction: tuple[str, int]) -> bool:
    """Tell if a log has neither a transaction (application, number) nor a later one of its application."""
    # The library compares with commits after those that it has read, not with the latter.
    last = log.transaction_version(transaction[0])
    return last is None or last < transaction[1]


def transaction_of(application: str, number: int) -> Transaction:
    """Return a transaction as a commit ends it."""
    # Delta in Java may forget a transaction that does not say when it was.
    return Transaction(application, number, int(time.time() * 1000))


def _bytes_of(text: str | None) -> int | None:
    """Return a size such as `104857600`, `100mb` or `1g` in bytes, or None if there is none."""
    if text is None:
        return None
    plain = text.strip().lower().removesuffix("b")
    units = {"k": 10, "m": 20, "g": 30}
    shift = units.get(plain[-1:], 0)
    digits = plain[:-1] if shift else plain
    return int(digits) << shift if digits.isdigit() and int(digits) else None
