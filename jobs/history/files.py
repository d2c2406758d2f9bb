"""Estimates of history as files of their table, written by the tasks that make them (decision 0045)."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.encoding.key_texts import has_columns
from jobs.encoding.table_rows import table_batch
from jobs.history.bucket import Plan, estimator
from jobs.storage.part_files import PartFile, attempt_name, remove_of, write_parts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from jobs.storage.table_log import FileTable

OUTPUT = "file binary"


class Target(NamedTuple):
    """What tasks write: below which folder, into files up to which size, with which columns.

    attempt: of the run to write these rows, part of the names of its files; constants: values of columns by name.
    """

    folder: str
    file_bytes: int
    attempt: str
    schema: pa.Schema
    constants: dict[str, Any]


def can_be_files(plan: Plan) -> bool:
    """Tell if tasks can make all columns of the estimates' table."""
    return has_columns(plan.estimates.kind)


def write_files(
    packed: DataFrame, plan: Plan, table: FileTable, schema: StructType, constants: dict[str, Any]
) -> list[PartFile]:
    """Let tasks estimate the rows of packets and write them; return the files, which no commit names yet.

    Args:
        packed: the packets, those of a bucket in one partition.
        plan: how to estimate them.
        table: that takes the files.
        schema: of the table's rows.
        constants: values of columns that the plan does not give.
    """
    columns = to_arrow_schema(schema, timezone="UTC")
    target = Target(table.path, table.file_bytes, uuid.uuid4().hex, columns, constants)
    try:
        found = packed.mapInArrow(_writer(plan, target), OUTPUT).collect()
    except BaseException:
        remove_of(table.path, target.attempt)
        raise
    return [PartFile.decode(bytes(row["file"])) for row in found]


def _writer(plan: Plan, target: Target) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    estimates = estimator(plan)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        name = attempt_name(task.partitionId(), target.attempt, task.stageId(), task.taskAttemptId())
        rows = (
            table_batch(plan.estimates.kind, found, target.schema, target.constants)
            for found in estimates(batches)
        )
        done = write_parts(target.folder, name, rows, full=target.file_bytes)
        if done:
            yield pa.RecordBatch.from_arrays(
                [pa.array([one.encode() for one in done], pa.binary())], ["file"]
            )

    return write
