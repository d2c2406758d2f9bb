"""Estimates of history as files of their table, written by the tasks that make them (decision 0045)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from jobs.encoding.estimates import ROWS_A_PACKET
from jobs.encoding.table_rows import table_batch
from jobs.history.bucket import Plan, estimator
from jobs.storage.part_files import PartFile, attempt_name, remove_of, write_parts
from jobs.storage.table_rows import open_parquet, plain_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs.history.table import Part
    from jobs.storage.table_log import FileTable

_OUTPUT = "file binary"

Make = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def write_files(
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

    return _written(packed, rows, table)


def keep_rows(spark: SparkSession, table: FileTable, names: Collection[str], part: Part) -> list[PartFile]:
    """Let tasks write the rows of some files that are not of a part; return the files, which no commit names yet.

    The new files have all columns of the table, of which files of earlier versions of the model may lack some.
    """
    folder, schema = table.path, table.columns()

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in batch.column("name").to_pylist():
                with open_parquet(folder, name) as file:
                    for one in file.iter_batches(batch_size=ROWS_A_PACKET):
                        yield part.without(plain_rows(one, schema))

    if not names:
        return []
    return _written(spark.createDataFrame([(name,) for name in sorted(names)], "name string"), rows, table)


def _written(source: DataFrame, rows: Make, table: FileTable) -> list[PartFile]:
    """Let tasks make rows of those of a source, and write them as files of a table."""
    folder, full, attempt = table.path, table.file_bytes, uuid.uuid4().hex

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        name = attempt_name(task.partitionId(), attempt, task.stageId(), task.taskAttemptId())
        done = write_parts(folder, name, rows(batches), full=full)
        if done:
            yield pa.RecordBatch.from_arrays(
                [pa.array([one.encode() for one in done], pa.binary())], ["file"]
            )

    try:
        found = source.mapInArrow(write, _OUTPUT).collect()
    except BaseException:
        remove_of(folder, attempt)
        raise
    return [PartFile.decode(bytes(row["file"])) for row in found]
