"""A snapshot's state rows as tasks read them from the files of their table by Arrow, without Java's rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.core.errors import UserError
from jobs.snapshots.row_sums import SUMS, Measured, Sums, hashed_columns, total_of
from jobs.snapshots.state_rows import STATE_COLUMNS, TABLE, StateRows, measure, read_rows
from jobs.storage.table_rows import files_of

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest
    from jobs.warehouse.delta import Warehouse


def stored_rows(warehouse: Warehouse, manifest: Manifest, version: int) -> StateRows:
    """Return a snapshot's state rows at a version of their table, to go on with in the tasks that read them.

    Of a warehouse that is no folder Java reads them.
    """
    mine = {"model": manifest.model, "snapshot_id": manifest.snapshot_id}
    try:
        files = files_of(warehouse.root, TABLE, mine, version) if warehouse.local else None
    except UserError:
        files = None  # Java may read what delta-rs cannot
    # Of a file that is gone, or whose name is spelled otherwise in the log, Java tells more.
    if files is None or not all(os.path.exists(path) for path in files):
        return StateRows.of(read_rows(warehouse, manifest.snapshot_id, manifest.model, version))
    paths = warehouse.spark.createDataFrame([(path,) for path in files], "path string")
    return StateRows(paths, _read, False)


def measure_rows(rows: StateRows) -> Measured:
    """Return what `measure` does, of rows that tasks make."""
    return total_of(rows.through(_sum, SUMS).collect())


def measure_stored(warehouse: Warehouse, manifest: Manifest, version: int) -> Measured:
    """Return what `measure` does, of a snapshot's rows at a version of their table."""
    if not warehouse.local:
        return Measured(*measure(read_rows(warehouse, manifest.snapshot_id, manifest.model, version)))
    return measure_rows(stored_rows(warehouse, manifest, version))


def _sum(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    sums = Sums()
    for batch in batches:
        sums.add(hashed_columns(batch))
    if sums.keys:
        yield pa.RecordBatch.from_pydict(sums.arrays())


def _read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the state rows of the files that batches name."""
    names = ["key", *(field.name for field in STATE_COLUMNS)]
    for batch in batches:
        for path in batch.column("path").to_pylist():
            # Java's files of earlier releases have times as INT96, which would become nanoseconds and overflow.
            file: Any = pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
            yield from map(_plain, file.iter_batches(65_536, columns=names))


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a file with the columns and types of `STATE_COLUMNS` behind the key."""
    columns = [batch.column("key").cast(pa.string())]
    for field in STATE_COLUMNS:
        column = batch.column(field.name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, ["key", *(field.name for field in STATE_COLUMNS)])
