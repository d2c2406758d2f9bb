"""Log-likelihood, gradient and information of any filter for every key, by differences of the filter's likelihood.

Copies of each key run side by side in the same rounds: one copy at theta, and two copies for each free number, one on
each side of theta. The differences of a row's log-likelihood l between the two sides are the row's score g. The
gradient is the sum of g, and the information is the sum of g g', the estimate of Berndt, Hall, Hall and Hausman (1974).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kalman import flags
from kalman.run import SortedRows, build_rounds
from kalman.types import Array, Filter, Rows

WIDTH = 8192
"""Number of copies stepped at once, so that their states stay in the processor's cache."""


class Differences(NamedTuple):
    """For each of K keys: log-likelihood (K,), gradient (p, K), information (p, p, K), rows used (K,).

    If a copy's filter breaks down, the key's log-likelihood is not finite.
    """

    log_likelihood: Array
    gradient: Array
    information: Array
    used: np.ndarray


class Weights(NamedTuple):
    """Weights of l at theta, above and below, whose weighted sum is a row's score: each (p, K)."""

    here: Array
    above: Array
    below: Array


def compute_likelihoods(
    model: Filter, rows: SortedRows, keys: int, unit: float, starts: Sequence[Array]
) -> tuple[Array, np.ndarray]:
    """Return log-likelihoods (c, keys) of keys that start in each of c states (size, keys), and rows used (keys,)."""
    total = np.zeros((len(starts), keys))
    found = _run_copies(model, rows, keys, unit, starts, lambda which, value: _add(total, which, value))
    return total, found


def compute_differences(
    model: Filter, rows: SortedRows, keys: int, unit: float, starts: Sequence[Array], weights: Weights
) -> Differences:
    """Return value, gradient and information; starts: states (size, keys) at theta, above it p times, below p times."""
    p = (len(starts) - 1) // 2
    value, gradient, outer = np.zeros(keys), np.zeros((p, keys)), np.zeros((p, p, keys))

    def on_row(which: np.ndarray, logs: Array) -> None:
        here, above, below = (a[:, which] for a in weights)
        with np.errstate(all="ignore"):  # a failed copy is refused by its value
            g = here * logs[0] + above * logs[1 : p + 1] + below * logs[p + 1 :]
            value[which] += np.where(np.isfinite(logs).all(axis=0), logs[0], np.nan)
        gradient[:, which] += g
        outer[:, :, which] += g[:, None] * g[None, :]

    used = _run_copies(model, rows, keys, unit, starts, on_row)
    return Differences(np.where(np.isfinite(value), value, -np.inf), gradient, outer, used)


def _add(total: Array, which: np.ndarray, logs: Array) -> None:
    total[:, which] += logs


def _run_copies(
    model: Filter,
    rows: SortedRows,
    keys: int,
    unit: float,
    starts: Sequence[Array],
    on_row: Callable[[np.ndarray, Array], None],
) -> np.ndarray:
    """Run all copies; after each round, call on_row(which (k,) keys, logs (c, k)) for rows not flagged at theta."""
    plan = build_rounds(rows.key)
    time, y, u = rows.time[plan.order], rows.y[:, plan.order], rows.u[:, plan.order]
    used = np.zeros(keys, np.int64)
    copies = len(starts)
    width = max(1, WIDTH // copies)
    for begin in range(0, len(plan.keys), width):
        block = plan.keys[begin : begin + width]
        values = np.stack([np.asarray(start)[:, block] for start in starts], axis=1)
        event_time, count = np.zeros(len(block), np.int64), np.zeros(len(block), np.int64)
        for part in plan.slices():
            k = min(part.stop - part.start - begin, len(block))
            if k <= 0:
                break
            at = slice(part.start + begin, part.start + begin + k)
            first = count[:k] == 0
            dt = np.where(first, 0, time[at] - event_time[:k]) / unit
            many = Rows(dt, first, y[:, at], u[:, at]).repeated(copies)
            before = values[:, :, :k].reshape(len(values), -1)
            after, step = model.step(before, many)
            good = step.flag[:k] == flags.WELL
            well = step.flag.reshape(copies, k) == flags.WELL
            logs = np.where(well, step.log_likelihood.reshape(copies, k), np.nan)
            went = np.flatnonzero(good)
            on_row(block[went], logs[:, went])
            values[:, :, :k] = np.where(good, after.reshape(-1, copies, k), values[:, :, :k])
            event_time[:k] = np.where(good, time[at], event_time[:k])
            count[:k] += good
        used[block] = count
    return used
