"""A snapshot's state rows as files of their table, written and hashed by the tasks that make them (decision 0045)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.snapshots.row_sums import SUMS, Measured, Sums, hashed_columns, total_of
from jobs.snapshots.state_rows import TABLE, Make, StateRows
from jobs.spark.warehouse import Warehouse, struct_of
from jobs.storage.part_files import PartFile, attempt_name, remove_of, write_parts
from jobs.storage.replaced_files import ReplacingTable
from jobs.storage.tables import SNAPSHOTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest

PARTITION = ("model", "snapshot_id")
NO_STATISTICS = {"delta.dataSkippingNumIndexedCols": "0"}
"""A snapshot is always read as a whole, so per-file minima and maxima of columns would be no use."""
_OUTPUT = f"files array<binary>, {SUMS}"


class Written(NamedTuple):
    """State rows that were committed: the version of their table, and their sums."""

    version: int
    measured: Measured


class _Target(NamedTuple):
    """What tasks write: into which folder, into files up to which size, named after which attempt, which columns.

    model_version: the same in all rows
    """

    folder: str
    file_bytes: int
    attempt: str
    schema: pa.Schema
    model_version: int


def write_files(warehouse: Warehouse, manifest: Manifest, states: StateRows | DataFrame) -> Written:
    """Let tasks write a snapshot's state rows, and put the files in the place of its former ones, in one commit.

    Killed before the commit, the files are no part of the table, and VACUUM removes them.

    Args:
        warehouse: of the snapshot.
        manifest: of the snapshot.
        states: its rows, with the columns of their table behind `model_version`.

    Raises:
        UserError: the table cannot take the files, or the commit failed.
    """
    warehouse.create(TABLE, SNAPSHOTS, PARTITION, NO_STATISTICS)
    table = ReplacingTable(warehouse, TABLE)
    columns = to_arrow_schema(struct_of(SNAPSHOTS), timezone="UTC")
    table.ready(columns, by_partition=True)
    schema = pa.schema([field for field in columns if field.name not in PARTITION])
    values = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    folder = "/".join(f"{name}={re.sub('[^A-Za-z0-9_.-]', '_', value)}" for name, value in values.items())
    target = _Target(
        f"{table.path}/{folder}", table.file_bytes, uuid.uuid4().hex, schema, manifest.model_version
    )
    made = states if isinstance(states, StateRows) else StateRows.of(states)
    try:
        found = made.through(_writer(target), _OUTPUT).collect()
    except BaseException:
        remove_of(target.folder, target.attempt)
        raise
    parts = [PartFile.decode(bytes(one)) for row in found for one in row["files"]]
    placed = [one._replace(path=f"{folder}/{one.path}", values=tuple(values.items())) for one in parts]
    version = table.replace(placed, lambda files: _names_of(files, values), {})
    assert version is not None
    return Written(version, total_of(found))


def _names_of(files: pa.Table, values: dict[str, str]) -> list[str]:
    """Return those of a table's files (`live_files`) that are of a partition."""
    for name, value in values.items():
        files = files.filter(pc.field(f"partition.{name}") == value) if files.num_rows else files
    return files["path"].to_pylist()


def _writer(target: _Target) -> Make:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        name = attempt_name(task.partitionId(), target.attempt, task.stageId(), task.taskAttemptId())
        sums = Sums()

        def typed() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                columns = hashed_columns(batch)
                sums.add(columns)
                yield _typed(columns, batch.num_rows, target)

        done = write_parts(target.folder, name, typed(), full=target.file_bytes, indexed=0)
        if sums.keys:
            texts = pa.array([[one.encode() for one in done]], pa.list_(pa.binary()))
            yield pa.RecordBatch.from_pydict({"files": texts, **sums.arrays()})

    return write


def _typed(columns: dict[str, pa.Array], size: int, target: _Target) -> pa.RecordBatch:
    """Return the columns of the table's files."""
    version = pa.repeat(pa.scalar(target.model_version, pa.int32()), size)
    values = {"model_version": version, **columns}
    arrays = [values[field.name].cast(field.type) for field in target.schema]
    return pa.RecordBatch.from_arrays(arrays, schema=target.schema)
