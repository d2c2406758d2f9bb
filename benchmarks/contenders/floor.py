"""The floor of warm work: rows from Parquet to estimates to Parquet without Spark, in one process and on two.

`python -m benchmarks.contenders.floor SPEC INPUT OUTPUT` prints the rows, the seconds of each part in one process, and
the seconds of two processes with half of the files each. No key may have rows in both halves. Processes first do a
few rows, so that imports and first calls do not count.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import kalman
from benchmarks.contenders.estimate_files import build_lists, read_readings, sort_readings
from jobs.state.kernel import load_checked_spec

PARTS = ("read", "sort", "filter", "write")
WARM_ROWS = 1_000


def filter_file(spec_path: str, source: str, target: str, most: int | None = None) -> dict[str, float]:
    """Filter the rows of a file, at most so many, and return the seconds of each part."""
    pa.set_cpu_count(1)
    spec = load_checked_spec(spec_path, Path(spec_path).parent)
    model = kalman.build(spec.definition(), {})
    marks = [time.perf_counter()]
    table = read_readings(Path(source), use_threads=False)
    table = table if most is None else table.slice(0, most)
    marks.append(time.perf_counter())
    keys, times, order = sort_readings(table)
    values = table.column("value").to_numpy()[order][None, :]
    rows = kalman.SortedRows(keys[order], times[order], values, np.empty((0, len(order))))
    marks.append(time.perf_counter())
    start = kalman.initial_states(model, int(keys.max()) + 1)
    _, outputs = kalman.run(model, start, rows, spec.unit_us)
    marks.append(time.perf_counter())
    size = len(spec.states)
    packed = [(max(i, j) * (max(i, j) + 1)) // 2 + min(i, j) for i in range(size) for j in range(size)]
    columns = {
        "sensor": table.column("sensor").take(pa.array(order)),
        "at": pa.array(rows.time, pa.timestamp("us", "UTC")),
        "mean": build_lists(outputs.mean),
        "covariance": build_lists(outputs.covariance[packed]),
        "log_likelihood": pa.array(outputs.log_likelihood),
        "nis": pa.array(outputs.nis),
    }
    pq.write_table(pa.table(columns), target)
    marks.append(time.perf_counter())
    return dict(zip(PARTS, np.diff(marks).tolist(), strict=True))


def main(spec: str, source: Path, target: Path) -> None:
    """Measure one process with all files, then two with half of them each."""
    target.mkdir(parents=True, exist_ok=True)
    files = sorted(str(file) for file in source.iterdir())
    tasks = [(spec, file, str(target / Path(file).name)) for file in files]
    filter_file(*tasks[0], WARM_ROWS)
    parts = [filter_file(*task) for task in tasks]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(filter_file, [(*task, WARM_ROWS) for task in tasks[:2]], chunksize=1)
        began = time.perf_counter()
        pool.starmap(filter_file, tasks, chunksize=1)
        seconds = time.perf_counter() - began
    found = {
        "rows": sum(pq.read_metadata(file).num_rows for file in target.iterdir()),
        "parts": {name: sum(part[name] for part in parts) for name in PARTS},
        "two_processes": seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
