"""Estimates of history as files of their table, written by the tasks that make them (decision 0045)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jobs.encoding.estimates import table_batch
from jobs.history.bucket import Plan, estimator
from jobs.spark.written_rows import write_files
from jobs.storage.part_files import PartFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.storage.table_log import FileTable


def write_estimates(
    packed: DataFrame, plan: Plan, table: FileTable, schema: pa.Schema, constants: dict[str, Any]
) -> list[PartFile]:
    """Let tasks estimate the rows of packets and write them; return the files, which no commit names yet.

    Args:
        packed: the packets, those of a bucket in one partition.
        plan: how to estimate them.
        table: that takes the files.
        schema: of the table's rows.
        constants: values of columns that the plan does not give.
    """
    estimates = estimator(plan)

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (table_batch(found, schema, constants) for found in estimates(batches))

    return write_files(packed, rows, table).parts
