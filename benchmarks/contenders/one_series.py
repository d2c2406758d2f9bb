"""Filter, smooth or forecast one series with statsmodels, from Parquet to Parquet, as a program of a new process.

`python -m benchmarks.contenders.one_series filter|smooth|forecast INPUT OUTPUT` prints the seconds of the filter alone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from statsmodels.tsa.statespace.kalman_smoother import KalmanSmoother

from benchmarks.contenders.estimate_files import Floats, build_lists, read_readings
from benchmarks.workloads.filter_models import Model, build_trend

STEPS = 10


def build_filter(model: Model, values: Floats) -> KalmanSmoother:
    """Build the filter of a model, with its measurements."""
    size = len(model.mean)
    built = KalmanSmoother(k_endog=len(model.R), k_states=size, k_posdef=size)
    built.bind(np.ascontiguousarray(values[None, :]))
    built["transition"], built["selection"], built["state_cov"] = model.F, np.eye(size), model.Q
    built["design"], built["obs_cov"] = model.H, model.R
    built.initialize_known(model.mean, model.covariance)
    return built


def forecast(model: Model, mean: Floats, covariance: Floats) -> dict[str, pa.Array]:
    """Return mean and covariance of the state for the steps after a state."""
    means, covariances = [], []
    for _ in range(STEPS):
        mean, covariance = model.F @ mean, model.F @ covariance @ model.F.T + model.Q
        means.append(mean)
        covariances.append(covariance.ravel())
    return {"mean": build_lists(np.array(means).T), "covariance": build_lists(np.array(covariances).T)}


def build_columns(done: Any) -> dict[str, pa.Array]:
    """Build the columns of estimates from statsmodels' results."""
    size, rows = done.filtered_state.shape
    columns = {
        "mean": build_lists(done.filtered_state),
        "covariance": build_lists(done.filtered_state_cov.reshape(size * size, rows)),
        "log_likelihood": pa.array(done.llf_obs),
    }
    smoothed = getattr(done, "smoothed_state", None)
    if smoothed is not None:
        covariance = done.smoothed_state_cov.reshape(size * size, rows)
        columns |= {"smoothed_mean": build_lists(smoothed), "smoothed_covariance": build_lists(covariance)}
    return columns


def main(mode: str, source: Path, target: Path) -> None:
    """Read, filter and write."""
    table, model = read_readings(source), build_trend()
    built = build_filter(model, table.column("value").to_numpy())
    began = time.perf_counter()
    done = built.smooth() if mode == "smooth" else built.filter()
    inside = time.perf_counter() - began
    if mode == "forecast":
        columns = forecast(model, done.filtered_state[:, -1], done.filtered_state_cov[:, :, -1])
    else:
        columns = {"sensor": table.column("sensor"), "at": table.column("at"), **build_columns(done)}
    pq.write_table(pa.table(columns), target)
    print(json.dumps({"inside": inside}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
