"""Make the rows of a work: a micro-batch is a few parquet files, the same for every contender."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.workloads.work import Work

CORES = int(os.environ.get("KALMAN_BENCH_CORES", "2"))
FILES = CORES
"""Files of a micro-batch: one a core."""
ROWS_OF_FILLING = 2_000_000
START_US = 1_704_067_200_000_000  # 2024-01-01 in microseconds
MINUTE_US = 60_000_000


def fill(work: Work, folder: Path) -> int:
    """Write one micro-batch with a row for every key, which creates the state; return the number of rows."""
    ids = np.random.default_rng(1).permutation(work.keys)
    _write(work, folder, 0, ids, np.zeros(work.keys, np.int64), seed=1)
    return work.keys


def batch(work: Work, folder: Path, number: int) -> int:
    """Write measured micro-batch `number`, counted from 1; return the number of rows."""
    rng = np.random.default_rng(1000 + number)
    if work.touched is None:
        alive = np.arange(work.keys)
    else:
        alive = rng.choice(work.keys, work.touched, replace=False)
    ids = np.repeat(alive, work.rows)
    minute = np.tile(np.arange(work.rows), len(alive)) + number * work.rows
    order = rng.permutation(len(ids))  # rows are in random order, not by key
    _write(work, folder, number, ids[order], minute[order], seed=number)
    return len(ids)


def row_of_each(folder: Path, keys: int, minute: int) -> Path:
    """Write a file with a row of each of the first `keys` keys at `minute`, and return its path."""
    rng = np.random.default_rng(minute)
    columns = {
        "id": pa.array(rng.permutation(keys)),
        "at": pa.array(np.full(keys, START_US + minute * MINUTE_US), pa.timestamp("us", tz="UTC")),
        "y": pa.array(rng.normal(size=keys)),
    }
    path = folder / f"{minute:04d}.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def _write(work: Work, folder: Path, number: int, ids: np.ndarray, minute: np.ndarray, seed: int) -> None:
    """Write rows as `FILES` files; their modification times make Spark read them in the order of their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    columns = {"id": pa.array(names(ids)) if work.text else pa.array(ids.astype(np.int64))}
    columns["at"] = pa.array(START_US + minute * MINUTE_US, pa.timestamp("us", tz="UTC"))
    for name in work.spec.measurement:
        columns[name] = pa.array(rng.normal(size=len(ids)))
    table = pa.table(columns)
    step = -(-len(ids) // FILES)
    for part in range(FILES):
        path = folder / f"{number:05d}-{part}.parquet"
        pq.write_table(table.slice(part * step, step), path, compression="snappy")
        os.utime(path, (START_US // 1_000_000 + number, START_US // 1_000_000 + number))


def names(ids: np.ndarray) -> list[str]:
    """Return keys as text of 8 to 20 characters."""
    return [f"{'sensor-'}{number:0{1 + number % 13}d}" for number in ids.tolist()]
