"""Delete rows of a table, or count those that would be deleted without Spark."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column
from pyspark.sql import functions as F

from jobs.spark.warehouse import Warehouse
from jobs.storage.table_rows import open_log, parts_of, plain_rows

Filter = Sequence[Sequence[tuple[str, str, Any]]]
"""The rows that meet all conditions of one of these lists, as `filters` of `pyarrow.parquet`.

A condition is a column, a comparison (=, <, <=, >, >=, in, not in) and a value. A null meets no condition but `not in`.
"""
_COMPARISONS = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda column, values: column.isin(*values),
    "not in": lambda column, values: ~F.coalesce(column.isin(*values), F.lit(False)),
}


def delete_rows(warehouse: Warehouse, table: str, rows: Filter, dry: bool = False) -> int:
    """Delete rows of a table, if it exists, in one commit, and return their number.

    Args:
        warehouse: of the table.
        table: its name.
        rows: to delete.
        dry: count the rows without Spark, and delete none.

    Raises:
        UserError: the table cannot be read.
    """
    if not dry:
        _ = warehouse.spark  # which conditions on columns need
        return warehouse.delete(table, _condition(rows))
    if not warehouse.exists(table):
        return 0
    met = pq.filters_to_expression(rows)  # type: ignore[arg-type]
    columns = {name for conditions in rows for name, _, _ in conditions}
    log: Any = open_log(warehouse.root, table).schema().to_arrow()
    schema = pa.schema([field for field in pa.schema(log) if field.name in columns])
    parts = parts_of(warehouse.root, table, list(columns))
    return sum(
        plain_rows(batch, schema).filter(met).num_rows for part in parts for batch in part.to_batches()
    )


def _condition(rows: Filter) -> Column:
    def met(conditions: Sequence[tuple[str, str, Any]]) -> Column:
        tests = [_COMPARISONS[how](F.col(name), value) for name, how, value in conditions]
        return reduce(operator.and_, tests)

    return reduce(operator.or_, map(met, rows))
