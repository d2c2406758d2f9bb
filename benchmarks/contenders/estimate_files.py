"""Read files of readings and write estimates as `kalman-pipeline filter` does, for programs that do its work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import csv

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def read_readings(path: Path, use_threads: bool = True) -> pa.Table:
    """Read sensor, time and value from a file, or from all files of a folder in the order of their names."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    wanted = ["sensor", "at", "value"]
    tables = []
    for file in files:
        if file.suffix == ".parquet":
            tables.append(pq.read_table(file, columns=wanted, use_threads=use_threads))
        else:
            types = {"at": pa.timestamp("us", "UTC")}
            options = csv.ConvertOptions(include_columns=wanted, column_types=types)
            tables.append(csv.read_csv(file, csv.ReadOptions(use_threads=use_threads), None, options))
    return pa.concat_tables(tables)


def sort_readings(table: pa.Table) -> tuple[Integers, Integers, Integers]:
    """Return key numbers and times in microseconds of all rows, and the order by key and time."""
    encoded = table.column("sensor").combine_chunks().dictionary_encode()
    keys = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    times = table.column("at").cast(pa.int64()).to_numpy()
    ages = times - times.min()
    span = int(ages.max()) + 1
    if (int(keys.max()) + 1) * span < 2**63:
        return keys, times, np.argsort(keys * span + ages)
    return keys, times, np.lexsort((times, keys))


def build_lists(values: Floats) -> pa.Array:
    """Build a column with a list of d numbers for each of N rows; values (d, N)."""
    count, width = values.shape[1], len(values)
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values.T).ravel()))


def compare_files(path: Path, other: Path, columns: tuple[str, ...]) -> float:
    """Return the largest difference between columns of two Parquet files, relative to values above 1.

    Raises:
        ValueError: the files have different numbers of rows.
    """
    largest = 0.0
    for name in columns:
        values, others = (
            pq.read_table(file, columns=[name]).column(name).combine_chunks().flatten().to_numpy()
            for file in (path, other)
        )
        if len(values) != len(others):
            raise ValueError(f"{name}: {len(values)} numbers in {path.name}, {len(others)} in {other.name}")
        scale = np.maximum(1.0, np.abs(values))
        largest = max(largest, float(np.max(np.abs(values - others) / scale)))
    return largest
