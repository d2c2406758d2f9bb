"""Query Delta tables by SQL in this process, without Spark: delta-rs reads their logs and files, DataFusion computes.

The dialect is that of DataFusion (https://datafusion.apache.org/user-guide/sql).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from jobs.storage.table_rows import open_log, plain_rows, plain_schema, reading, refuse_unreadable

MEMORY = "1G"
"""Sorts and groups that need more than this use temporary files; of a join one side is in memory."""

_SETTINGS = {
    "datafusion.execution.target_partitions": str(min(os.cpu_count() or 1, 4)),  # which share the memory
    # The comments of columns of one table in a union get lost on the way, which stops the query.
    "datafusion.execution.skip_physical_aggregate_schema_check": "true",
}


class Queries:
    """SQL over tables of one root. `open_queries` makes it."""

    def __init__(self, root: str, folder: str) -> None:
        self._root, self._folder = root, folder
        self._builder = QueryBuilder(_SETTINGS)
        self.run(f"SET datafusion.runtime.memory_limit = '{MEMORY}'")

    def add(self, name: str, table: str) -> pa.Schema | None:
        """Let queries name a table at its newest version; return its columns, None if there is no such table.

        Raises:
            UserError: the table cannot be read without Spark.
        """
        with reading(f"{self._root}/{table}"), suppress(TableNotFoundError):
            log: DeltaTable = open_log(self._root, table)
            refuse_unreadable(f"{self._root}/{table}", log)
            self._builder.register(name, log)
            return pa.schema(log.schema().to_arrow())  # type: ignore[arg-type]
        return None

    def keep(self, name: str, sql: str) -> None:
        """Compute the rows of a query once, into files of the temporary folder, and let later queries name them.

        Raises:
            UserError: a table cannot be read.
        """
        place = literal(f"{self._folder}/{name}.parquet")
        self.run(f"COPY ({sql}) TO {place}")
        self.run(f"CREATE EXTERNAL TABLE {quoted(name)} STORED AS PARQUET LOCATION {place}")

    def name_rows(self, name: str, sql: str) -> None:
        """Let later queries name the rows of a query, which each of them computes."""
        self.run(f"CREATE VIEW {quoted(name)} AS {sql}")

    def run(self, sql: str) -> pa.Table:
        """Return all rows of a query.

        Raises:
            UserError: a table cannot be read.
        """
        with reading(self._root):
            found = self._execute(sql).read_all()
            return found.cast(plain_schema(found.schema))

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query, some thousands at a time.

        Raises:
            UserError: a table cannot be read.
        """
        with reading(self._root):
            for one in self._execute(sql):
                yield plain_rows(one, one.schema)

    def _execute(self, sql: str) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_stream(self._builder.execute(sql))


@contextmanager
def open_queries(root: str) -> Iterator[Queries]:
    """Open queries over the tables of a warehouse, with a temporary folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="kalman-queries-") as folder:
        yield Queries(root, folder)


def quoted(name: str) -> str:
    """Return the name of a table or column as SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as SQL."""
    return "'" + text.replace("'", "''") + "'"


def among(column: str, texts: Iterable[str]) -> str:
    """Return the condition that an expression has one of some texts, at least one."""
    return f"{column} IN ({', '.join(map(literal, texts))})"
