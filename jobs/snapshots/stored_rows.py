"""A snapshot's state rows as tasks read them from the files of their table by Arrow, without Java's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from jobs.snapshots.row_sums import SUMS, Measured, Sums, total_of
from jobs.snapshots.state_rows import STATE_COLUMNS, StateRows
from jobs.snapshots.verified_rows import STATES
from jobs.spark.conf import codegen_for
from jobs.storage.table_rows import files_of, open_parquet, parts_of

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest
    from jobs.spark.warehouse import Warehouse
    from jobs.storage.warehouse import Tables

_COLUMNS = ["key", *(field.name for field in STATE_COLUMNS)]
_BATCH_ROWS = 65_536


def stored_rows(warehouse: Warehouse, manifest: Manifest, version: int) -> StateRows:
    """Return a snapshot's state rows at a version of their table, to go on with in the tasks that read them.

    Raises:
        UserError: the log does not have the version, or the table's files do not tell its rows.
    """
    mine = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    names = files_of(warehouse.root, STATES, mine, version)
    folder = warehouse.path(STATES)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in batch.column("name").to_pylist():
                with open_parquet(folder, name) as file:
                    yield from map(_plain, file.iter_batches(_BATCH_ROWS, columns=_COLUMNS))

    frame = warehouse.spark.createDataFrame([(name,) for name in names], "name string")
    return StateRows(frame, read, False)


def stored_batches(tables: Tables, manifest: Manifest, version: int) -> Iterator[pa.RecordBatch]:
    """Yield a snapshot's state rows at a version of their table, as this process reads them, without Spark.

    Raises:
        UserError: the log does not have the version, or the table's files do not tell its rows.
    """
    mine = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    for part in parts_of(tables.root, STATES, _COLUMNS, mine, version):
        yield from map(_plain, part.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS))


def measure_rows(rows: StateRows) -> Measured:
    """Return the number, the checksum and the measurements of rows that tasks make."""
    return total_of(rows.through(_sum, SUMS).collect())


def measure_stored(warehouse: Warehouse, manifest: Manifest, version: int) -> Measured:
    """Return what `measure_rows` does, of a snapshot's rows at a version of their table."""
    with codegen_for(warehouse.spark, manifest.key_count):
        return measure_rows(stored_rows(warehouse, manifest, version))


def measure_batches(tables: Tables, manifest: Manifest, version: int) -> Measured:
    """Return what `measure_stored` does, measured in this process."""
    return total_of(
        row for part in _sum(stored_batches(tables, manifest, version)) for row in part.to_pylist()
    )


def _sum(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    sums = Sums()
    for batch in batches:
        sums.add(batch)
    if sums.keys:
        yield pa.RecordBatch.from_pylist([sums.numbers()])


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a file with the columns and types of `STATE_COLUMNS` behind the key."""
    columns = [batch.column("key").cast(pa.string())]
    for field in STATE_COLUMNS:
        column = batch.column(field.name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, _COLUMNS)
