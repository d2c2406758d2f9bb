"""Filter series of equal length and equal steps with simdkalman, from files to Parquet, as a program of a new process.

`python -m benchmarks.contenders.equal_lengths INPUT OUTPUT` prints the seconds of the filter alone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from simdkalman import KalmanFilter

from benchmarks.contenders.estimate_files import build_lists, read_readings, sort_readings
from benchmarks.workloads.filter_models import build_trend


def main(source: Path, target: Path) -> None:
    """Read, sort, filter and write in the order of the input."""
    table, model = read_readings(source), build_trend()
    keys, _, order = sort_readings(table)
    counts = np.bincount(keys)
    if counts.min() != counts.max():
        raise ValueError(
            f"{source}: the series have {counts.min()} to {counts.max()} rows, not equal lengths"
        )
    series = table.column("value").to_numpy()[order].reshape(len(counts), -1)
    built = KalmanFilter(model.F, model.Q, model.H, model.R)
    began = time.perf_counter()
    done = built.compute(
        series,
        0,
        initial_value=model.mean,
        initial_covariance=model.covariance,
        smoothed=False,
        filtered=True,
        observations=False,
    )
    inside = time.perf_counter() - began
    size, rows = len(model.mean), len(keys)
    means, covariances = np.empty((rows, size)), np.empty((rows, size * size))
    means[order] = done.filtered.states.mean.reshape(rows, size)
    covariances[order] = done.filtered.states.cov.reshape(rows, size * size)
    columns = {
        "sensor": table.column("sensor"),
        "at": table.column("at"),
        "mean": build_lists(means.T),
        "covariance": build_lists(covariances.T),
    }
    pq.write_table(pa.table(columns), target)
    print(json.dumps({"inside": inside}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
