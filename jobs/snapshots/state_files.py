"""A snapshot's state rows as files of their table, written and hashed by the tasks that make them (decision 0045)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from jobs.snapshots.row_sums import SUMS, Measured, Sums, hashed_columns, total_of
from jobs.snapshots.state_rows import TABLE, Make, StateRows
from jobs.storage.part_files import PartFile, attempt_name, remove, remove_of, write_parts
from jobs.storage.table_log import FileTable, takes_files
from jobs.warehouse.tables import SNAPSHOTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest
    from jobs.warehouse.delta import Warehouse

PARTITION = ("model", "snapshot_id")
NO_STATISTICS = {"delta.dataSkippingNumIndexedCols": "0"}
"""A snapshot is always read as a whole, so per-file minima and maxima of columns would be no use."""
APPLICATION = "snapshot"
"""The transactions of writers of state rows: of two that have not seen each other, one fails and looks again."""
_OUTPUT = f"files array<binary>, {SUMS}"
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")


class Written(NamedTuple):
    """State rows that were committed: the version of their table, and what `measure` says of them."""

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


def write_files(warehouse: Warehouse, manifest: Manifest, states: StateRows | DataFrame) -> Written | None:
    """Let tasks write a snapshot's state rows, and commit the files in one commit.

    Killed before the commit, the files are no part of the table, and VACUUM removes them.

    Args:
        warehouse: of the snapshot, whose table exists.
        manifest: of the snapshot.
        states: its rows, with the columns of their table behind `model_version`.

    Returns:
        What was committed, or None if Java has to write the rows: the table is not local, or has other columns or
        features, or has rows of the snapshot already, which are to be replaced.

    Raises:
        UserError: the commit failed.
    """
    if not takes_files(warehouse):
        return None
    values = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    if not all(_PLAIN.fullmatch(value) for value in values.values()):
        return None  # Delta would escape it in the name of the folder
    table = FileTable(warehouse, TABLE, frozenset(NO_STATISTICS), values)
    schema = _columns()
    if not table.takes(schema) or not _is_absent(table.bounds(), values):
        return None
    folder = "/".join(f"{name}={value}" for name, value in values.items())
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
    placed = [part._replace(path=f"{folder}/{part.path}") for part in parts]
    version = table.add(placed, APPLICATION, lambda bounds: _is_absent(bounds, values), {})
    if version is None:
        remove(target.folder, parts)
        return None
    return Written(version, total_of(found))


def _columns() -> pa.Schema:
    """Return the columns that the files have: all but those of the partition."""
    fields = StructType.fromDDL(SNAPSHOTS)
    assert isinstance(fields, StructType)
    kept = StructType([field for field in fields if field.name not in PARTITION])
    return to_arrow_schema(kept, timezone="UTC")


def _is_absent(bounds: pa.Table | None, values: dict[str, str]) -> bool:
    """Tell from the table's files (`FileTable.bounds`) that none is of a partition."""
    if bounds is None or bounds.num_rows == 0:
        return True
    texts = [bounds.column(f"partition.{name}").to_pylist() for name in values]
    return tuple(values.values()) not in set(zip(*texts, strict=True))


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
