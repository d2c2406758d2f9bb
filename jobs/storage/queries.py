"""Query Delta tables by SQL in this process, without Spark: delta-rs reads logs and files, DataFusion runs the SQL.

The SQL dialect is DataFusion's (https://datafusion.apache.org/user-guide/sql).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from jobs.storage.table_rows import (
    cast_rows,
    cast_schema,
    open_log,
    read_columns,
    refuse_unreadable,
    report_unreadable_table,
)

MEMORY = "1G"
"""Memory of all queries together. Larger sorts and groups use temporary files, but one side of a join must fit."""

_SETTINGS = {
    "datafusion.execution.target_partitions": str(min(os.cpu_count() or 1, 4)),  # partitions share the memory
    # A union loses the column comments of one of its tables, and the schema check would then fail the query.
    "datafusion.execution.skip_physical_aggregate_schema_check": "true",
}


class Queries:
    """SQL queries over the tables of one root; `open_queries` makes the object."""

    def __init__(self, root: str, folder: str) -> None:
        self._root, self._folder = root, folder
        self._builder = QueryBuilder(_SETTINGS)
        self.run(f"SET datafusion.runtime.memory_limit = '{MEMORY}'")

    def add(self, name: str, table: str) -> pa.Schema | None:
        """Register a table's newest version under a name; return its columns, or None if the table does not exist.

        Raises:
            UserError: the table cannot be read without Spark.
        """
        with report_unreadable_table(f"{self._root}/{table}"), suppress(TableNotFoundError):
            log: DeltaTable = open_log(self._root, table)
            refuse_unreadable(f"{self._root}/{table}", log)
            self._builder.register(name, log)
            return read_columns(log)
        return None

    def keep(self, name: str, sql: str) -> None:
        """Compute a query once, into files in the temporary folder, and register the result under a name.

        Raises:
            UserError: a table cannot be read.
        """
        place = quote_text(f"{self._folder}/{name}.parquet")
        self.run(f"COPY ({sql}) TO {place}")
        self.run(f"CREATE EXTERNAL TABLE {quote_name(name)} STORED AS PARQUET LOCATION {place}")

    def register_view(self, name: str, sql: str) -> None:
        """Register a query under a name as a view, so that each later query computes its rows again."""
        self.run(f"CREATE VIEW {quote_name(name)} AS {sql}")

    def run(self, sql: str) -> pa.Table:
        """Return all rows of a query.

        Raises:
            UserError: a table cannot be read.
        """
        with report_unreadable_table(self._root):
            found = self._execute(sql).read_all()
            return found.cast(cast_schema(found.schema))

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query in batches of some thousands of rows.

        Raises:
            UserError: a table cannot be read.
        """
        with report_unreadable_table(self._root):
            for one in self._execute(sql):
                yield cast_rows(one, one.schema)

    def _execute(self, sql: str) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_stream(self._builder.execute(sql))


@contextmanager
def open_queries(root: str) -> Iterator[Queries]:
    """Open queries over the tables of a warehouse, with a temporary folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="kalman-queries-") as folder:
        yield Queries(root, folder)


def quote_name(name: str) -> str:
    """Return the name of a table or column in quotes for SQL."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def build_in_condition(column: str, texts: Iterable[str]) -> str:
    """Return the SQL condition that a column equals one of the given texts; there must be at least one text."""
    return f"{column} IN ({', '.join(map(quote_text, texts))})"
