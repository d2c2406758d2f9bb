"""The M-step for entries of F and H: regress a state on the previous state, and a measurement on the state.

Of N terms w = x' - F x with w ~ N(0, Q), whose expectations given all rows are C = sum E[w x'] and S = sum E[x x'],
the expected log-likelihood changes with F + D by trace(Q^-1 (C D' - D S D' / 2)). The slope at D = 0 is Q^-1 C. By
Fisher's identity, this slope is the gradient of the log-likelihood, which the filter's adjoint gives, so that only S is
summed from the smoother. Missing components of a measurement are hidden variables, like the states.

References: Shumway and Stoffer (1982); Meng and Rubin (1993), for maximising part by part; Holmes (2013), for fixed
entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.filters.linear import LinearFilter
from kalman.linalg.packing import pack
from kalman.models.learned_entries import parse_entry_name
from kalman.models.structure import Parameter
from kalman.run import KeyStates, SortedRows
from kalman.smoothers.smooth import smooth
from kalman.types import Array

Slots = Sequence[tuple[str, int, int]]
"""Entries of matrices: "F" or "H", row, column."""

SWEEPS = 100
"""Number of passes over the entries of a regression within bounds."""
INSIDE = 1e-9
"""Smallest distance of a learned entry from a bound, relative to the width between two bounds, or to the bound."""


class MatrixRegression(NamedTuple):
    """The statistics of one matrix at its old value, for J keys or groups, or for all keys together.

    noise (J, q, q) covariance; gradient (J, q, n) by all entries of the matrix; S = sum E[x x'] (J, n, n)
    """

    noise: Array
    gradient: Array
    S: Array

    @property
    def C(self) -> Array:
        """The sum of E[w x'] (J, q, n)."""
        return self.noise @ self.gradient

    def squares(self, change: Array) -> Array:
        """Return the change (J, q, q) in the sum of E[w w'] for a change of the matrix."""
        turned = np.swapaxes(change, -1, -2)
        half = self.C @ turned
        return change @ self.S @ turned - half - np.swapaxes(half, -1, -2)


def compute_second_moments(
    model: LinearFilter, begun: Array, rows: SortedRows, keys: int, unit: float, scale: Array
) -> tuple[Array, Array]:
    """Return the packed sums (s, keys) of E[x x'] given all rows, over each of two sets of states.

    The first set are the states before transitions. The second set are the measured states, where E[x x'] is divided by
    the row's `scale` (N,) of the measurement noise.
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
    went = good.copy()  # rows after a transition: all good rows of a key except the first
    went[np.flatnonzero(good)[np.diff(rows.key[good], prepend=-1) > 0]] = False
    starts = np.flatnonzero(went) - 1  # a flagged row repeats the last good row
    measured = good & ~np.isnan(rows.y).all(axis=0)
    seen = both[:, measured] / scale[measured]

    def summed(key: np.ndarray, values: Array) -> Array:
        return np.array([np.bincount(key, row, minlength=keys) for row in values], float)

    return summed(rows.key[starts], both[:, starts]), summed(rows.key[measured], seen)


def regress_entries(
    regression: MatrixRegression, entries: Sequence[Parameter], value: Array, slots: Slots
) -> Array:
    """Return the change (J, rows, columns) of the matrix, which is zero except in `entries` and respects their bounds.

    value: (e, J) present values of the entries.
    """
    weight = np.linalg.pinv(regression.noise, hermitian=True)
    A = np.array([[weight[:, i, k] * regression.S[:, j, c] for _, k, c in slots] for _, i, j in slots])
    slope = np.array([regression.gradient[:, i, j] for _, i, j in slots])
    diagonal = np.array([A[i, i] for i in range(len(slots))])
    unit = 1.0 / np.sqrt(np.maximum(diagonal, 1e-300))
    scaled = np.moveaxis(A * unit[:, None] * unit[None, :], -1, 0)
    inverse = np.linalg.pinv(scaled, rcond=1e-14, hermitian=True)
    free = (inverse @ (unit * slope).T[:, :, None])[:, :, 0].T
    low, high = (
        np.array(a)[:, None] - value for a in zip(*(_narrow_bounds(p) for p in entries), strict=True)
    )
    step = free * unit
    outside = ((step < low) | (step > high)).any(axis=0)
    if outside.any():
        step[:, outside] = _maximise_within(
            A[..., outside], slope[:, outside], low[:, outside], high[:, outside]
        )
    change = np.zeros_like(regression.gradient)
    for (_, i, j), moved in zip(slots, np.clip(step, low, high), strict=True):
        change[:, i, j] = moved
    return change


def _maximise_within(A: Array, slope: Array, low: Array, high: Array) -> Array:
    """Return the steps (e, J) between bounds that maximise slope'd - d'A d / 2, one entry after the other."""
    step = np.zeros_like(slope)
    for _ in range(SWEEPS):
        for i in range(len(step)):
            others = (A[i] * step).sum(axis=0) - A[i, i] * step[i]
            best = (slope[i] - others) / np.maximum(A[i, i], 1e-300)
            step[i] = np.clip(best, low[i], high[i])
    return step


def select_entries(names: Sequence[str], letter: str) -> list[tuple[str, int, int]]:
    """Return the entries of one matrix among the names of parameters."""
    found = [parse_entry_name(name) for name in names]
    return [a for a in found if a is not None and a[0] == letter]


def _narrow_bounds(p: Parameter) -> tuple[float, float]:
    """Return the parameter's bounds, moved inwards a little, so that a value between them has a finite free number."""
    low, high = p.bounds or (None, None)
    if low is not None and high is not None:
        margin = INSIDE * (high - low)
        return low + margin, high - margin
    return (
        -np.inf if low is None else low + INSIDE * max(1.0, abs(low)),
        np.inf if high is None else high - INSIDE * max(1.0, abs(high)),
    )
