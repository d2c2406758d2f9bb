"""Measure learning by key: series a second of one core, compared with statsmodels.

`python -m benchmarks.suites.key_fits` takes a minute or two. 10,000 series of 300 rows are learned in one call;
statsmodels (`UnobservedComponents`, exact diffuse start, its own settings) learns the first of them one after another.
The two take turns. Both must reach the same log-likelihood before anything is told. Writes `key_fits.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from statsmodels.tsa.statespace.structural import UnobservedComponents

import kalman
from kalman.learning.key_fits import FitOutcome, KeyFit
from kalman.learning.maximum_likelihood import build_linear_learner

ROUNDS = 3
PEERS = 30
"""Series that statsmodels learns in each round."""
GOAL = 100
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WORKS: dict[str, dict[str, Any]] = {
    "local level": {
        "states": ["level"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "learn": {"parameters": ["variance", "R"], "scope": "key"},
    },
    "local linear trend": {
        "states": ["level", "slope"],
        "process": {"kind": "explicit", "F": [[1.0, 1.0], [0.0, 1.0]], "Q": [[1.0, 0.0], [0.0, 0.1]]},
        "observation": {"R": [[1.0]], "H": [[1.0, 0.0]]},
        "learn": {"parameters": ["Q", "R"], "scope": "key"},
    },
}
PEER = {"local level": "llevel", "local linear trend": "lltrend"}


def series(work: str, keys: int, rows: int) -> np.ndarray:
    """Return measurements (keys, rows) of signal-to-noise ratios from 0.01 to 100 and scales from 1e-3 to 1e3."""
    rng = np.random.default_rng(19)
    ratio = 10 ** rng.uniform(-1, 1, (keys, 1))
    steps = rng.normal(size=(keys, rows)) * ratio
    if work != "local level":
        steps += np.cumsum(rng.normal(size=(keys, rows)) * 0.1 * ratio, axis=1)
    y = np.cumsum(steps, axis=1) + rng.normal(size=(keys, rows))
    return y * 10 ** rng.uniform(-3, 3, (keys, 1))


def learn(work: str, y: np.ndarray) -> KeyFit:
    """Return the fits of all series."""
    keys, rows = y.shape
    definition = {
        "measurement": ["y"],
        "observation": {"R": [[1.0]]},
        "initial": {"diffuse": True},
        **WORKS[work],
    }
    key, at = np.repeat(np.arange(keys), rows), np.tile(np.arange(rows) * 1_000_000, keys)
    sorted_rows = kalman.SortedRows(key, at, y.reshape(1, -1), np.empty((0, y.size)))
    return build_linear_learner(definition).fit_keys(sorted_rows, keys, 1e6, None)


def peer(work: str, y: np.ndarray) -> list[float]:
    """Return statsmodels' log-likelihoods."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [UnobservedComponents(one, PEER[work], use_exact_diffuse=True) for one in y]
        return [float(model.fit(disp=0).llf) for model in models]


def measure(work: str, keys: int, rows: int) -> dict[str, Any]:
    """Return both rates, each the best of the rounds, and the log-likelihood that each loses against the other."""
    y = series(work, keys, rows)
    ours, theirs, lost = [], [], []
    learn(work, y[:20])  # compiles the programs
    for turn in range(ROUNDS):
        begin = time.process_time()
        found = learn(work, y)
        ours.append(keys / (time.process_time() - begin))
        part = slice(turn * PEERS, (turn + 1) * PEERS)
        begin = time.process_time()
        values = peer(work, y[part])
        theirs.append(PEERS / (time.process_time() - begin))
        lost += [a - b for a, b in zip(values, found.log_likelihood[part], strict=True)]
    if max(lost) > 0.1:
        raise AssertionError(f"{work}: a series is {max(lost):.3f} of log-likelihood below statsmodels'")
    outcomes = {one.name.lower(): int((found.outcome == one).sum()) for one in FitOutcome}
    return {
        "work": work,
        "keys": keys,
        "rows": rows,
        "series_per_second": max(ours),
        "statsmodels_series_per_second": max(theirs),
        "ratio": max(ours) / max(theirs),
        "goal": GOAL,
        "statsmodels_below_by_0.1": int(np.sum(np.array(lost) < -0.1)),
        "outcomes": outcomes,
    }


def main(arguments: list[str]) -> int:
    """Measure all works and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/key_fits.json"))
    options = parser.parse_args(arguments)
    if any(os.environ.get(name) != "1" for name in THREADS[:2]):
        print(f"set {', '.join(THREADS)} to 1: one thread is measured", file=sys.stderr)
        return 2
    found = {
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "statsmodels": version("statsmodels"),
        "load_before": os.getloadavg()[0],
        "works": [measure(work, options.keys, options.rows) for work in WORKS],
    }
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    for one in found["works"]:
        print(
            f"{one['work']}: {one['series_per_second']:,.0f} series a second, statsmodels "
            f"{one['statsmodels_series_per_second']:,.1f}: {one['ratio']:,.0f} times ({GOAL} wanted)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
