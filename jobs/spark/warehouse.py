"""The Delta tables below one root: create, read, append, upsert, delete; transactions, versions and locks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from delta.exceptions import (
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    ConcurrentWriteException,
    DeltaConcurrentModificationException,
    MetadataChangedException,
    ProtocolChangedException,
)
from delta.tables import DeltaTable
from deltalake import Schema
from pyspark.errors import PySparkException
from pyspark.sql.types import StructField, StructType

from jobs.spark.conf import with_local_paths
from jobs.spark.written_rows import write_rows
from jobs.storage.dictionary import comments
from jobs.storage.part_files import PartFile, remove
from jobs.storage.table_log import FileTable
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_WRITE = "spark.databricks.delta.write"

CONFLICTS = (
    DeltaConcurrentModificationException,
    ConcurrentAppendException,
    ConcurrentDeleteDeleteException,
    ConcurrentDeleteReadException,
    ConcurrentTransactionException,
    ConcurrentWriteException,
    MetadataChangedException,
    ProtocolChangedException,
)
"""A commit that another one came before. In Python the first of them, unlike in Java, is no base of the others."""
_TRIES, _PAUSE_SECONDS = 8, (0.1, 1.0)
"""A commit to a table of several models that meets another one is tried so often, after a random pause."""


@dataclass(frozen=True, init=False)
class Warehouse(Tables):
    """The tables below one root, a local folder or the URI of one that Spark can access, with a session of Spark."""

    spark: SparkSession

    def __init__(self, spark: SparkSession, root: str) -> None:
        object.__setattr__(self, "spark", spark)
        object.__setattr__(self, "root", root)

    def setting(self, name: str) -> str | None:
        """Return a setting of the session, None if this version of Spark does not know it."""
        try:
            return str(self.spark.conf.get(name))
        except PySparkException:
            return None

    def create(
        self,
        table: str,
        columns: str,
        partition_by: tuple[str, ...] = (),
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Make a table unless it exists.

        Args:
            table: its name.
            columns: of the table, as DDL.
            partition_by: those whose values name folders.
            properties: of the table.

        Raises:
            UserError: the table cannot be made.
        """
        fields = Schema.from_json(commented(table, columns).json())
        self.make(table, fields, partition_by, properties or {})

    def comment(self, table: str, more: Mapping[str, str] = MappingProxyType({})) -> bool:
        """Give a table's columns the comments that they lack, in one commit; tell if there were any.

        The commit changes no file and no type: streams that read the table go on, and rows are appended as before. The
        lock keeps it from falling into another writer's commit of this machine.

        Args:
            table: which must exist.
            more: comments by column, besides and before those of the dictionary.
        """
        wanted = {**comments(table), **more}
        with self.lock(table):
            schema = DeltaTable.forPath(self.spark, self.path(table)).toDF().schema
            changes = [
                f"`{field.name.replace('`', '``')}` COMMENT '{_quoted(wanted[field.name])}'"
                for field in schema.fields
                if field.name in wanted and field.metadata.get("comment") != wanted[field.name]
            ]
            if changes:
                where = f"delta.`{self.path(table)}`"
                self.spark.sql(f"ALTER TABLE {where} ALTER COLUMN {', '.join(changes)}")
        return bool(changes)

    def read(self, table: str, version: int | None = None) -> DataFrame:
        """Read a table, at a version or the latest."""
        reader = self.spark.read.format("delta")
        if version is not None:
            reader = reader.option("versionAsOf", version)
        return reader.load(self.path(table))

    def append(
        self,
        frame: DataFrame,
        table: str,
        transaction: tuple[str, int] | None = None,
        detail: str | None = None,
        more_columns: bool = False,
    ) -> int | None:
        """Append rows in one commit; with a `transaction` (application, number), retries append them once.

        Killed before the commit, nothing is written: VACUUM removes files that no commit names.

        Args:
            frame: the rows, with columns of the table; it may lack some.
            table: to append to; made if there is none.
            transaction: skipped if the table has it, or a later one of its application.
            detail: text that the commit keeps (`LogEntry.detail` if it is JSON).
            more_columns: the table gets the columns that it lacks.

        Returns:
            The version that the commit made, or None if it was skipped.

        Raises:
            UserError: the table does not take such rows, or the commit failed.
        """
        files = self._taking(frame.schema, table)
        if transaction is not None and not files.is_due(transaction):
            return None
        return _committed(
            files,
            write_rows(frame, files, more_columns),
            lambda parts: files.commit(parts, transaction, _metadata(detail)),
        )

    def mark(self, table: str, columns: StructType, transaction: tuple[str, int]) -> None:
        """Commit a transaction without rows, unless the table has it or a later one of its application.

        Args:
            table: its name; made with the columns if there is none.
            columns: of rows that are appended to it.
            transaction: application and number.

        Raises:
            UserError: the table cannot be made or the commit failed.
        """
        self._taking(columns, table).commit([], transaction)

    def append_for_all(
        self, frame: DataFrame, table: str, transactions: Sequence[tuple[str, int]], detail: str | None = None
    ) -> int:
        """Append rows in one commit that ends several transactions, and return the version that it made.

        Unlike `append` it skips nothing: the caller has looked, under a lock.

        Raises:
            Conflict: another command has ended one of the transactions since.
            UserError: as `append` does.
        """
        files = self._taking(frame.schema, table)
        version = _committed(
            files,
            write_rows(frame, files, more_columns=False),
            lambda parts: files.commit_for_all(parts, transactions, _metadata(detail)),
        )
        assert version is not None
        return version

    def _taking(self, columns: StructType, table: str) -> FileTable:
        """Return the log of a table, which is made with columns if there is none."""
        if not self.exists(table):
            self.make(table, Schema.from_json(described(table, columns).json()))
        return FileTable(self, table)

    def upsert(
        self,
        frame: DataFrame,
        table: str,
        condition: str,
        transaction: tuple[str, int],
    ) -> None:
        """Merge rows into a table by a condition on t (the table) and s (the rows), once per `transaction`.

        The table gets the columns that it lacks.

        Only this thread may use the frame's session, since Delta reads a merge's transaction from the session.
        """
        session = frame.sparkSession
        merge = DeltaTable.forPath(session, self.path(table)).alias("t").merge(frame.alias("s"), condition)
        merge = merge.whenMatchedUpdateAll().whenNotMatchedInsertAll()
        with self.lock(table), of_transaction(session, *transaction):
            merge.withSchemaEvolution().execute()

    def delete(
        self, table: str, rows: Column, dry: bool = False, transaction: tuple[str, int] | None = None
    ) -> int:
        """Delete rows of a table, if it exists, in one commit; return their number. With `dry`, only count them.

        With a `transaction` (application, number), Delta skips the commit if the application has a later number.
        """
        if not self.exists(table):
            return 0
        count = self.read(table).filter(rows).count()
        if count and not dry:
            if transaction is None:
                self.commit(table, lambda found: found.delete(rows))
                return count
            # A session of its own, as other threads may write in the usual one.
            session = with_local_paths(self.spark.newSession(), self.root)
            with self.lock(table), of_transaction(session, *transaction):
                DeltaTable.forPath(session, self.path(table)).delete(rows)
        return count

    def commit(self, table: str, change: Callable[[DeltaTable], object]) -> None:
        """Make a change of a table that models share in one commit.

        Where no lock orders the commits (in an object store), one of another command may come in between, even one of
        another model. Delta then refuses this one, which is made again on what the other has written: `change` must
        mean the same whatever others have committed.

        Raises:
            One of `CONFLICTS`: others came in between each time.
        """
        for left in reversed(range(_TRIES)):
            try:
                with self.lock(table):
                    change(DeltaTable.forPath(self.spark, self.path(table)))
                return
            except CONFLICTS:
                if left == 0:
                    raise
                time.sleep(random.uniform(*_PAUSE_SECONDS))


def struct_of(columns: str) -> StructType:
    """Return columns, given as DDL, as Spark's type of a row."""
    found = StructType.fromDDL(columns)
    assert isinstance(found, StructType)
    return found


def commented(table: str, columns: str) -> StructType:
    """Return columns (DDL) of a table with the comments that the dictionary has of them."""
    return described(table, struct_of(columns))


def described(table: str, columns: StructType) -> StructType:
    """Return columns of a table with the comments that the dictionary has of them; all of them may be null."""
    about = comments(table)
    return StructType(
        [
            StructField(
                one.name, one.dataType, True, {"comment": about[one.name]} if one.name in about else None
            )
            for one in columns.fields
        ]
    )


def _committed(
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


def _metadata(detail: str | None) -> dict[str, str]:
    return {} if detail is None else {"userMetadata": detail}


def _quoted(text: str) -> str:
    """Return a text as it stands between single quotes in Spark's SQL."""
    return text.replace("\\", "\\\\").replace("'", "\\'")


@contextmanager
def of_transaction(session: SparkSession, application: str, number: int) -> Iterator[None]:
    """Give a merge in this session a transaction, so that retries merge once.

    Delta reads the transaction from the session's settings, so nothing else may write in that session meanwhile.
    """
    settings = {f"{_WRITE}.txnAppId": application, f"{_WRITE}.txnVersion": str(number)}
    try:
        for name, value in settings.items():
            session.conf.set(name, value)
        yield
    finally:
        for name in settings:
            session.conf.unset(name)


def utc(values: dict[str, Any]) -> dict[str, Any]:
    """Return a collected row's values with times in UTC; Spark returns them in local time without a zone."""
    return {name: v.astimezone(UTC) if isinstance(v, datetime) else v for name, v in values.items()}
