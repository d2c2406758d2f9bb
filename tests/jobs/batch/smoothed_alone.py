"""Smooth a bucket of long histories, and print by how many bytes the process has grown: `smoothed_alone ROWS IDLE`."""

from __future__ import annotations

import resource
import sys

import numpy as np

import kalman
from jobs.batch.bucket_estimates import EstimatingPlan, estimate_bucket, list_smoothed_widths
from jobs.state.block_format import build_state_layout
from jobs.state.encoding.estimates import EstimateFormat
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.rows import KeyedRows, RowFormat

KEYS, HOUR = 20, 3_600_000_000


def smooth(rows: int, idle: int | None) -> int:
    """Smooth so many rows a key; return how many estimates there were."""
    spec = {
        "states": ["level", "speed"],
        "measurement": ["a"],
        "process": {"kind": "local_linear_trend", "level_variance": 0.1, "slope_variance": 0.01},
        "observation": {"H": [[1.0, 0.0]], "R": [[1.0]]},
        "initial": {"mean": [0.0, 0.0], "covariance": [[100.0, 0.0], [0.0, 100.0]]},
    }
    kernel = kalman.build(spec)
    kind = KeyKind(("id",), ("bigint",), True)
    n = KEYS * rows
    time = np.tile(np.arange(rows) * HOUR, KEYS)
    y = np.random.default_rng(3).normal(size=(1, n))
    sorted_rows = kalman.SortedRows(np.repeat(np.arange(KEYS), rows), time, y, np.empty((0, n)))
    routes = np.sort(compute_routes(np.arange(KEYS)))
    estimates = EstimateFormat(kind, 2, False, list_smoothed_widths(kernel))
    layout = build_state_layout(kind, kernel.size)
    fmt = RowFormat(kind, "at", ("a",), ())
    plan = EstimatingPlan(kernel, HOUR, fmt, layout, estimates, None, idle, smooth=True)
    keyed = KeyedRows(Records({"route": routes}, None), sorted_rows)
    return sum(batch.num_rows for batch in estimate_bucket(plan, keyed, layout.empty()))


if __name__ == "__main__":
    rows, idle = int(sys.argv[1]), int(sys.argv[2]) or None
    smooth(10, idle)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = smooth(rows, idle)
    print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
