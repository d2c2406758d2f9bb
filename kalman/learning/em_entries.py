"""The M-step for entries of F and H: the regression of a state on its predecessor, and of a measurement on the state.

Of N terms w = x' - F x with w ~ N(0, Q), whose expectations given all rows are C = sum E[w x'] and S = sum E[x x'],
the expected log-likelihood changes with F + D by trace(Q^-1 (C D' - D S D' / 2)). Its slope at D = 0 is Q^-1 C, by
Fisher's identity the log-likelihood's own gradient: the filter's adjoint gives it, and only S is summed from the
smoother. Missing components of a measurement are hidden variables, as the states are.

References: Shumway and Stoffer (1982); Meng and Rubin (1993), maximising over one part after another; Holmes (2013),
fixed entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from kalman.filters.linear import LinearFilter
from kalman.linalg.packing import pack
from kalman.models.learned_entries import ENTRY
from kalman.models.structure import Parameter
from kalman.run import KeyStates, SortedRows
from kalman.smoothers.smooth import smooth
from kalman.types import Array

Slots = Sequence[tuple[str, int, int]]
"""Entries of matrices: "F" or "H", row, column."""

INSIDE = 1e-9
"""Smallest distance of a learned entry from its bounds, relative to their distance or to the number."""


class Regression(NamedTuple):
    """The statistics of one matrix at its old value: noise covariance, gradient by all its entries, S = sum E[x x']."""

    noise: Array
    gradient: Array
    S: Array

    @property
    def C(self) -> Array:
        """sum E[w x']."""
        return self.noise @ self.gradient

    def squares(self, change: Array) -> Array:
        """Return by how much sum E[w w'] changes when the matrix does."""
        half = self.C @ change.T
        return change @ self.S @ change.T - half - half.T


def second_moments(
    model: LinearFilter, begun: Array, rows: SortedRows, keys: int, unit: float, scale: Array
) -> tuple[Array, Array]:
    """Return the packed sums of E[x x'] given all rows, over two sets of states.

    These are the states that transitions start from, and the measured states, each divided by the row's `scale`
    (N,) of the measurement noise.
    """
    none = np.zeros(keys, np.int64)
    _, outputs, smoothed = smooth(model, KeyStates(begun, none, none.copy(), np.zeros(keys)), rows, unit)
    n = len(model.states)
    P = np.array(
        [
            smoothed.covariance[max(i, j) * (max(i, j) + 1) // 2 + min(i, j)]
            for i in range(n)
            for j in range(n)
        ]
    )
    both = pack(P + np.array([smoothed.mean[i] * smoothed.mean[j] for i in range(n) for j in range(n)]))
    good = outputs.flag == 0
    went = good.copy()  # rows after a transition: all good rows of a key but the first
    went[np.flatnonzero(good)[np.diff(rows.key[good], prepend=-1) > 0]] = False
    starts = both[:, np.flatnonzero(went) - 1]  # a flagged row repeats the last good one
    measured = good & ~np.isnan(rows.y).all(axis=0)
    return starts.sum(axis=1), (both[:, measured] / scale[measured]).sum(axis=1)


def regressed(regression: Regression, entries: Sequence[Parameter], slots: Slots) -> Array:
    """Return the change of the matrix, (rows, columns): only in `entries`, and each within its bounds."""
    weight = np.linalg.pinv(regression.noise, hermitian=True)
    A = np.array([[weight[i, k] * regression.S[j, c] for _, k, c in slots] for _, i, j in slots])
    slope = np.array([regression.gradient[i, j] for _, i, j in slots])
    value = np.array([p.value[0] for p in entries], float)
    bounds = [_inside(p) for p in entries]
    low, high = (np.array(a) - value for a in zip(*bounds, strict=True))
    # in units of each entry's own standard deviation: A = U U', and the nearest U' d to U^-1 slope is the maximum
    unit = 1.0 / np.sqrt(np.maximum(np.diag(A), 1e-300))
    sizes, axes = np.linalg.eigh(A * np.outer(unit, unit))
    root = np.sqrt(np.maximum(sizes, 1e-14 * sizes[-1]))
    found = lsq_linear(
        (axes * root).T, axes.T @ (unit * slope) / root, (low / unit, high / unit), method="bvls"
    )
    change = np.zeros_like(regression.gradient)
    for (_, i, j), step in zip(slots, np.clip(found.x * unit, low, high), strict=True):
        change[i, j] = step
    return change


def of_letter(names: Sequence[str], letter: str) -> list[tuple[str, int, int]]:
    """Return the entries of one matrix among names."""
    found = [ENTRY.fullmatch(name) for name in names]
    return [(a[1], int(a[2]), int(a[3])) for a in found if a is not None and a[1] == letter]


def _inside(p: Parameter) -> tuple[float, float]:
    """Return the bounds, moved inwards a little, so that a value between them has a finite free number."""
    low, high = p.bounds or (None, None)
    if low is not None and high is not None:
        margin = INSIDE * (high - low)
        return low + margin, high - margin
    return (
        -np.inf if low is None else low + INSIDE * max(1.0, abs(low)),
        np.inf if high is None else high - INSIDE * max(1.0, abs(high)),
    )
