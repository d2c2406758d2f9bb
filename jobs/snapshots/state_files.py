"""A snapshot's state rows as files of their table; tasks write, read and sum up these rows (decision 0045).

The checksum of rows is the sum, modulo 2^64, of the 64-bit hashes of all rows, so the order of rows does not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from jobs.snapshots.row_hash import compute_row_hashes
from jobs.snapshots.state_rows import STATE_COLUMNS, StateRows
from jobs.snapshots.verified_rows import PARTITION, STATES
from jobs.spark.conf import choose_codegen
from jobs.spark.warehouse import Warehouse, parse_struct
from jobs.spark.written_rows import keep_rows, write_files
from jobs.storage.row_changes import ReplacingTable
from jobs.storage.table_rows import list_partition_files, open_parquet, read_parts
from jobs.storage.tables import SNAPSHOTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest
    from jobs.storage.warehouse import Tables

NO_STATISTICS = {"delta.dataSkippingNumIndexedCols": "0"}
"""Table property without statistics: a snapshot is read as a whole, so minima and maxima per file would be useless."""
_COLUMNS = ["key", *(field.name for field in STATE_COLUMNS)]
_BATCH_ROWS = 65_536
SUMS = "keys bigint, hash bigint, rows bigint"
"""Columns with the sums of a task, as DDL."""


def select_hashed_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the columns that the hash of a state row covers, in the order of hashing."""
    columns = {field.name: batch.column(field.name).cast(field.type) for field in STATE_COLUMNS}
    return {"key": batch.column("key").cast(pa.string()), **columns}


class StateRowSums:
    """The sums of the state rows that a task has processed so far."""

    def __init__(self) -> None:
        self.keys = self._hash = self._rows = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows with the key and `STATE_COLUMNS`, or the same columns with a table's types."""
        columns = select_hashed_columns(rows)
        self.keys += len(columns["key"])
        self._rows += int(np.sum(columns["state_index"].to_numpy()))
        self._hash += int(np.sum(compute_row_hashes([*columns.values()]), dtype=np.uint64))

    def numbers(self) -> dict[str, int]:
        """Return the values of the columns `SUMS`; the sum of hashes is a signed 64-bit integer."""
        signed = (self._hash + (1 << 63)) % (1 << 64) - (1 << 63)
        return {"keys": self.keys, "hash": signed, "rows": self._rows}


class Measured(NamedTuple):
    """The number of keys in state rows, their checksum, and the number of measurements that they reflect."""

    keys: int
    checksum: str
    rows: int


def add_sums(parts: Iterable[Any]) -> Measured:
    """Return the total of the sums of all tasks; parts: rows with the columns `SUMS`."""
    found = list(parts)
    keys, hashes, rows = (sum(one[name] for one in found) for name in ("keys", "hash", "rows"))
    return Measured(keys, f"{hashes % (1 << 64):016x}", rows)


class CommittedStates(NamedTuple):
    """The table version in which state rows were committed, and the sums of these rows."""

    version: int
    measured: Measured


def write_states(warehouse: Warehouse, manifest: Manifest, states: StateRows | DataFrame) -> CommittedStates:
    """Write a snapshot's state rows in tasks, and replace the snapshot's former files by the new files in one commit.

    After a kill before the commit, the new files are not part of the table, and VACUUM removes them.

    Args:
        warehouse: warehouse of the snapshot.
        manifest: manifest of the snapshot.
        states: state rows of the snapshot, with the columns that their table has after `model_version`.

    Raises:
        UserError: the table cannot take the files, or the commit failed.
    """
    warehouse.create(STATES, SNAPSHOTS, PARTITION, NO_STATISTICS)
    table = ReplacingTable(warehouse, STATES)
    schema = to_arrow_schema(parse_struct(SNAPSHOTS), timezone="UTC")
    table.ready(schema, by_partition=True)
    made = states if isinstance(states, StateRows) else StateRows.of(states)
    make = made.make  # a local name, because the tasks must not get the DataFrame in `made`
    values = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    constants = {**values, "model_version": manifest.model_version}

    def typed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in make(batches):
            columns = select_hashed_columns(batch)
            arrays = [
                columns[field.name].cast(field.type)
                if field.name in columns
                else pa.repeat(pa.scalar(constants[field.name], field.type), batch.num_rows)
                for field in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    written = write_files(made.source, typed, table, StateRowSums)
    mine = [[(name, "=", value) for name, value in values.items()]]
    version = table.replace_rows(written.parts, mine, keep_rows(warehouse.spark, table, mine))
    assert version is not None
    return CommittedStates(version, add_sums(written.sums))


def read_stored_rows(warehouse: Warehouse, manifest: Manifest, version: int) -> StateRows:
    """Return a snapshot's state rows at a version of their table, as `StateRows` that the reading tasks can process.

    Raises:
        UserError: the log does not have the version, or the rows cannot be read from the table's files.
    """
    mine = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    names = list_partition_files(warehouse.root, STATES, mine, version)
    folder = warehouse.path(STATES)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in batch.column("name").to_pylist():
                with open_parquet(folder, name) as file:
                    yield from map(_convert_batch, file.iter_batches(_BATCH_ROWS, columns=_COLUMNS))

    frame = warehouse.spark.createDataFrame([(name,) for name in names], "name string")
    return StateRows(frame, read, False)


def read_stored_batches(tables: Tables, manifest: Manifest, version: int) -> Iterator[pa.RecordBatch]:
    """Read a snapshot's state rows at a version of their table in this process, without Spark; yield the batches.

    Raises:
        UserError: the log does not have the version, or the rows cannot be read from the table's files.
    """
    mine = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    for part in read_parts(tables.root, STATES, _COLUMNS, mine, version):
        yield from map(_convert_batch, part.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS))


def measure_rows(rows: StateRows) -> Measured:
    """Return the number of keys, the checksum and the number of measurements of state rows, computed by Spark tasks."""
    return add_sums(rows.through(_sum, SUMS).collect())


def measure_stored(warehouse: Warehouse, manifest: Manifest, version: int) -> Measured:
    """Return the result of `measure_rows` for a snapshot's rows at a version of their table."""
    with choose_codegen(warehouse.spark, manifest.key_count):
        return measure_rows(read_stored_rows(warehouse, manifest, version))


def measure_batches(tables: Tables, manifest: Manifest, version: int) -> Measured:
    """Return the result of `measure_stored`, computed in this process."""
    return add_sums(
        row for part in _sum(read_stored_batches(tables, manifest, version)) for row in part.to_pylist()
    )


def _sum(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    sums = StateRowSums()
    for batch in batches:
        sums.add(batch)
    if sums.keys:
        yield pa.RecordBatch.from_pylist([sums.numbers()])


def _convert_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a file with the key column first, then the columns and types of `STATE_COLUMNS`."""
    columns = [batch.column("key").cast(pa.string())]
    for field in STATE_COLUMNS:
        column = batch.column(field.name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, _COLUMNS)
