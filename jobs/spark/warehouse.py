"""The Delta tables below one root; rows are read, appended, replaced and upserted, in one commit per change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from delta.tables import DeltaTable
from deltalake import Schema
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from jobs.spark.conf import choose_codegen
from jobs.spark.job_labels import label_jobs
from jobs.spark.local_frame import LocalFrame
from jobs.spark.written_rows import keep_rows, write_rows
from jobs.storage.columns import parse_arrow_schema
from jobs.storage.part_files import PartFile
from jobs.storage.row_changes import ReplacingTable
from jobs.storage.table_log import FileTable, commit_or_remove, open_plain_log
from jobs.storage.table_rows import Filter
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WRITE = "spark.databricks.delta.write"


class Warehouse(Tables):
    """The tables below one root, a local folder or a URI that Spark can access, with a Spark session.

    `spark` may be a function that starts Spark; the warehouse calls the function when the session is first needed. A
    request that the tables alone can answer or refuse does not start Spark.
    """

    def __init__(self, spark: SparkSession | Callable[[], SparkSession], root: str) -> None:
        super().__init__(root)
        self._spark = spark
        self.moves_rows = True
        """Whether many rows will pass through Java. A command whose tasks read and write all rows clears this before
        the session starts, so that Java starts as for a short command."""
        self.in_process = False
        """Whether this process does the work of tasks (`spread`), because the rows are few. Work that takes a frame of
        Spark starts Spark nevertheless."""

    @cached_property
    def spark(self) -> SparkSession:
        """The session, started on first use."""
        return self._spark() if callable(self._spark) else self._spark

    @property
    def has_spark(self) -> bool:
        """Return whether the session has been started."""
        return not callable(self._spark) or "spark" in vars(self)

    def at(self, root: str) -> Warehouse:
        """Return the tables below another root, with the same session."""
        other = Warehouse(lambda: self.spark, root)
        other.in_process = self.in_process
        return other

    def work(self, in_process: bool) -> Warehouse:
        """Return the same tables for work in this process, or in Spark's tasks."""
        other = self.at(self.root)
        other.in_process = in_process
        return other

    def spread(self, rows: Sequence[tuple[Any, ...]], columns: str) -> DataFrame:
        """Return a few rows from which functions over batches begin, in Spark's tasks or in this process."""
        if not self.in_process:
            return self.spark.createDataFrame(rows, columns)
        schema = parse_arrow_schema(columns)
        lists = ([list(one.items()) if isinstance(one, dict) else one for one in row] for row in rows)
        batch = pa.RecordBatch.from_pylist(
            [dict(zip(schema.names, row, strict=True)) for row in lists], schema
        )
        return cast("DataFrame", LocalFrame(lambda: [batch]))

    def number_tasks(self, count: int) -> DataFrame:
        """Return the numbers from 0 in a column, each in a task."""
        if not self.in_process:
            return self.spark.range(0, count, 1, max(1, count))
        return self.spread([(number,) for number in range(count)], "id bigint")

    @property
    def cores(self) -> int:
        """Return the number of tasks that run at the same time."""
        return 1 if self.in_process else self.spark.sparkContext.defaultParallelism

    def label(self, subject: str, step: str | None = None) -> AbstractContextManager[None]:
        """Label the jobs that this thread starts in the block, if tasks of Spark do the work (`label_jobs`)."""
        return nullcontext() if self.in_process else label_jobs(self.spark, subject, step)

    def choose_codegen(self, rows: int) -> AbstractContextManager[None]:
        """Choose how Spark runs the plans of the block for a number of rows, if it runs them (`choose_codegen`)."""
        return nullcontext() if self.in_process else choose_codegen(self.spark, rows)

    def schema(self, table: str) -> StructType:
        """Return the columns of a table; the log has them unless only Spark can read the table."""
        log = open_plain_log(self, table)
        return (
            self.read(table).schema
            if log is None
            else StructType.fromJson(json.loads(log.schema().to_json()))
        )

    def setting(self, name: str) -> str | None:
        """Return a setting of the session; None if this version of Spark does not have the setting."""
        try:
            return str(self.spark.conf.get(name))
        except PySparkException:
            return None

    def read(self, table: str, version: int | None = None) -> DataFrame:
        """Read a table at the given version, or at the latest version."""
        reader = self.spark.read.format("delta")
        if version is not None:
            reader = reader.option("versionAsOf", version)
        return reader.load(self.path(table))

    def append(
        self,
        frame: DataFrame,
        table: str,
        transaction: tuple[str, int] | None = None,
        more_columns: bool = False,
    ) -> int | None:
        """Append rows in one commit; with a `transaction` (application, number), retries append the rows only once.

        After a kill before the commit the table is unchanged, because VACUUM removes the files that no commit names.

        Args:
            frame: rows with columns of the table; columns may be missing.
            table: name of the table; the table is made if it does not exist.
            transaction: application and number; the append is skipped if the table has this or a later number of the
                application. None means that the append is never skipped.
            more_columns: whether to add the columns that the table lacks.

        Returns:
            The version that the commit made; None if the append was skipped.

        Raises:
            UserError: the table does not take such rows, or the commit failed.
        """
        files = self._open_or_make(frame.schema, table)
        if transaction is not None and not files.is_due(transaction):
            return None
        return commit_or_remove(
            files,
            write_rows(frame, files, more_columns),
            lambda parts: files.commit(parts, transaction),
        )

    def mark(self, table: str, columns: StructType, transaction: tuple[str, int]) -> None:
        """Commit a transaction without rows, unless the table has this transaction or a later one of the application.

        Args:
            table: name of the table; the table is made with the columns if it does not exist.
            columns: columns of the rows that are usually appended.
            transaction: application and number.

        Raises:
            UserError: the table cannot be made or the commit failed.
        """
        self._open_or_make(columns, table).commit([], transaction)

    def replace(self, frame: DataFrame, table: str, rows: Filter, detail: str | None = None) -> int:
        """Replace the rows of a filter by other rows in one commit; return the version that the commit made.

        After a kill before the commit the table is unchanged, because VACUUM removes the files that no commit names. If
        there is nothing to add, remove or note, there is no commit, and the newest version is returned.

        Args:
            frame: the new rows. Columns that the table lacks are added.
            table: name of the table, which must exist.
            rows: filter of the rows to remove.
            detail: text stored in the commit (`LogEntry.detail` if it is JSON).

        Raises:
            Conflict: other commits changed the same rows before each attempt.
            UserError: the table does not take such rows, or the commit failed.
        """
        files = ReplacingTable(self, table)
        return self.replace_by(write_rows(frame, files, more_columns=True), files, rows, detail)

    def replace_by(
        self, parts: list[PartFile], files: ReplacingTable, rows: Filter, detail: str | None = None
    ) -> int:
        """Replace the rows of a filter by written files in one commit, as `replace` does."""
        metadata = {} if detail is None else {"userMetadata": detail}
        version = commit_or_remove(
            files,
            parts,
            lambda parts: files.replace_rows(parts, rows, keep_rows(self, files, rows), metadata),
        )
        assert version is not None
        return version

    def _open_or_make(self, columns: StructType, table: str) -> FileTable:
        """Return the log of a table; the table is made with the columns if it does not exist."""
        if not self.exists(table):
            self.create(table, Schema.from_json(columns.json()))
        return FileTable(self, table)

    def upsert(
        self,
        frame: DataFrame,
        table: str,
        condition: str,
        transaction: tuple[str, int],
    ) -> None:
        """Merge rows into a table by a condition on t (the table) and s (the rows), once per `transaction`.

        Columns that the table lacks are added.

        No other thread may use the frame's session meanwhile, because Delta reads a merge's transaction from the
        session.
        """
        session = frame.sparkSession
        merge = DeltaTable.forPath(session, self.path(table)).alias("t").merge(frame.alias("s"), condition)
        merge = merge.whenMatchedUpdateAll().whenNotMatchedInsertAll()
        with self.lock(table), set_transaction(session, *transaction):
            merge.withSchemaEvolution().execute()


def parse_struct(columns: str) -> StructType:
    """Return the Spark type of a row whose columns are given as DDL."""
    found = StructType.fromDDL(columns)
    assert isinstance(found, StructType)
    return found


def format_ddl(columns: StructType) -> str:
    """Return columns as DDL."""
    names = [one.name.replace("`", "``") for one in columns.fields]
    kinds = [one.dataType.simpleString() for one in columns.fields]
    return ", ".join(f"`{name}` {kind}" for name, kind in zip(names, kinds, strict=True))


@contextmanager
def set_transaction(session: SparkSession, application: str, number: int) -> Iterator[None]:
    """Attach a transaction to a merge in this session, so that retries merge the rows once.

    Delta reads the transaction from the settings of the session, so no other write may use the session meanwhile.
    """
    settings = {f"{_WRITE}.txnAppId": application, f"{_WRITE}.txnVersion": str(number)}
    try:
        for name, value in settings.items():
            session.conf.set(name, value)
        yield
    finally:
        for name in settings:
            session.conf.unset(name)
