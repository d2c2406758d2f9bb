"""Measure the possible gain of computing the covariance once for all keys that share it.

`python -m benchmarks.suites.shared_gain`.

If F, H, Q, R, the time step, the missing pattern and the covariance are the same for many keys, so are the gains;
only the means differ. The shared way groups the rows by (time step, pattern, covariance), takes the filter's step for
one key per group, and updates the means of all with gathered gains. This is its best case: a single group,
and means updated without any bookkeeping. The greatest saving is `step` minus `grouping` and `means`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.results import spread
from benchmarks.workloads.work import DENSE, KINDS, Work
from kalman import build
from kalman.types import Rows

KEYS, ROUNDS = 100_000, 9
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def groups_of(numbers: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the group of each of N columns (d, N) of equal bits, and one column of each group; hashes are verified."""
    hashed = np.zeros(numbers.shape[1], np.uint64)
    for place, row in enumerate(numbers):
        hashed = (hashed ^ row.view(np.uint64)) * _FACTORS[place % 3]
        hashed ^= hashed >> np.uint64(29)
    order = np.argsort(hashed)
    new = np.ones(len(order), bool)
    new[1:] = hashed[order][1:] != hashed[order][:-1]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(new) - 1
    first = order[new]
    if (numbers[:, first][:, group] != numbers).any():
        raise ArithmeticError("two covariances share a hash")
    return group, first


def means(
    x: NDArray[np.float64], y: NDArray[np.float64], H: NDArray[np.float64], group: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Move means (n, K) as a scalar-sequential update does, by gains and variances gathered from their groups."""
    n, m = len(x), len(y)
    gains, variance = np.full((m, n, group.max() + 1), 0.5), np.full((m, group.max() + 1), 2.0)
    x, nis = x + x[::-1], np.zeros(x.shape[1])
    for i in range(m):
        error = y[i] - sum(H[i, j] * x[j] for j in range(n) if H[i, j])
        nis += error * error / variance[i][group]
        for j in range(n):
            x[j] += gains[i, j][group] * error
    return nis


def measure(work: Work) -> dict[str, dict[str, float]]:
    """Return nanoseconds a row of the filter's step, of grouping by covariance, and of moving the means."""
    kernel = build(work.spec.definition(), {})
    rng = np.random.default_rng(0)
    values, m = kernel.initial(KEYS), kernel.measurements
    rows = Rows(np.ones(KEYS), np.zeros(KEYS, bool), rng.normal(size=(m, KEYS)), np.empty((0, KEYS)))
    for _ in range(3):
        values, _ = kernel.step(values, rows)
    mean, covariance = kernel.moments(values)
    asked = np.vstack([rows.dt[None], np.isnan(rows.y), covariance])
    group, _ = groups_of(asked)
    H = np.eye(m, len(mean))
    ways: dict[str, Callable[[], object]] = {
        "step": lambda: kernel.step(values, rows),
        "grouping": lambda: groups_of(asked),
        "means": lambda: means(mean, rows.y, H, group),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):  # the first warms up
        for name, way in ways.items():
            began = time.process_time()
            way()
            if number:
                found[name].append((time.process_time() - began) / KEYS * 1e9)
    return {name: spread(taken) for name, taken in found.items()}


def main() -> int:
    """Measure and print."""
    print("| nanoseconds a row | step | grouping | means | saved at best |\n|---|---:|---:|---:|---:|")
    for work in (DENSE[1], KINDS[0]):
        step, grouping, moved = (one["median"] for one in measure(work).values())
        print(f"| {work.name} | {step:.0f} | {grouping:.0f} | {moved:.0f} | {step - grouping - moved:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
