"""Tests of a filter's consistency: innovations of the predicted size (NIS, NEES) and without autocorrelation.

Reference: Bar-Shalom, Li and Kirubarajan (2001), section 5.4, for NIS, NEES and their bounds; Ljung and Box (1978).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc, chdtri

from kalman.evaluation.row_figures import INNOVATION, RowFigures
from kalman.linalg.entries import dot, minus, times
from kalman.linalg.ldl import factor, whiten
from kalman.run import Integers, KeyStates, Outputs, SortedRows, run
from kalman.types import Array, Filter


class Consistency(NamedTuple):
    """For each of K keys: mean NIS per component (1 expected), its bounds, and the number of components (K,)."""

    ratio: Array
    low: Array
    high: Array
    components: Array

    def outside(self) -> npt.NDArray[np.bool_]:
        """Return a mask (K,) of keys outside their bounds; a key without components is not outside."""
        return (self.ratio < self.low) | (self.ratio > self.high)


class LjungBox(NamedTuple):
    """For each of K series: the statistic, its p-value (NaN where too short), number of values used (K,)."""

    statistic: Array
    p_value: Array
    count: Integers


class Watch(RowFigures):
    """Records the normalised innovations of a run: pass it to `run` as `on_round`, its class to `smooth_observed`.

    Under the right model they are independent N(0, 1). Component i of a row is normalised given components
    0 to i - 1.
    """

    def __init__(self, model: Filter, states: KeyStates, rows: SortedRows) -> None:
        """Prepare for rows after these states. Raises ModelError where the filter predicts no measurement."""
        super().__init__(model, states, rows, (INNOVATION,))

    def normalised(self) -> Array:
        """Return the normalised innovations (m, N).

        NaN where a component is missing or depends on a diffuse state, and where a row is late or flagged.
        """
        return self.found()[INNOVATION]


def innovations(
    model: Filter, states: KeyStates, rows: SortedRows, unit: float
) -> tuple[KeyStates, Outputs, Array]:
    """Return the results of `run`, and the normalised innovations (m, N) of `Watch`."""
    watch = Watch(model, states, rows)
    states, outputs = run(model, states, rows, unit, watch)
    return states, outputs, watch.normalised()


def nees(mean: Array, covariance: Array, truth: Array) -> Array:
    """Return the normalised estimation error squared (N,) of means (n, N), packed covariances and true states.

    NaN where a variance is infinite; a direction without variance is left out.
    """
    known = np.isfinite(covariance).all(axis=0)
    P = [
        np.where(known, a, 1.0 * (k in _list_diagonal_indices(len(covariance))))
        for k, a in enumerate(covariance)
    ]
    with np.errstate(all="ignore"):
        factors = factor(P)
        white = whiten(factors.L, [minus(a, b) for a, b in zip(truth, mean, strict=True)])
        square = dot([times(a, a) for a in white], factors.inverse)
    return np.where(known, square, np.nan)


def mean_bounds(dimension: int, count: int | Array, probability: float = 0.95) -> tuple[Array, Array]:
    """Return the bounds that contain the mean of `count` chi-squares of this dimension with this probability."""
    degrees = np.asarray(count, float) * dimension
    tail = 0.5 * (1.0 - probability)
    with np.errstate(all="ignore"):
        low, high = chdtri(degrees, 1.0 - tail), chdtri(degrees, tail)
        return low * dimension / degrees, high * dimension / degrees


def consistency(
    key: Integers, nis: Array, components: Integers, keys: int, probability: float = 0.95
) -> Consistency:
    """Return the mean NIS of each of K keys and its chi-square bounds.

    key, nis, components (N,): rows in any order; a row whose NIS is NaN does not count.
    """
    seen = np.isfinite(nis)
    total = np.bincount(key[seen], nis[seen], minlength=keys)
    degrees = np.bincount(key[seen], components[seen], minlength=keys).astype(float)
    low, high = mean_bounds(1, degrees, probability)
    with np.errstate(all="ignore"):
        return Consistency(total / degrees, low, high, degrees)


def inside(
    nis: Array, components: int | Array | Integers, probability: float = 0.95
) -> npt.NDArray[np.bool_]:
    """Return a mask (N,) of rows inside the interval (of several components, the ellipsoid) of a probability."""
    return nis <= chdtri(np.maximum(np.asarray(components, float), 1.0), 1.0 - probability)


def coverage(nis: Array, components: int | Array | Integers = 1, probability: float = 0.95) -> float:
    """Return the share of rows `inside` among rows with a NIS (N,) and a component; NaN without such rows."""
    seen = ~np.isnan(nis) & (np.asarray(components) > 0)
    return float(inside(nis, components, probability)[seen].mean()) if seen.any() else float("nan")


def ljung_box(key: Integers, values: Array, keys: int, lags: int = 10, fitted: int = 0) -> LjungBox:
    """Return the test of each key's series for autocorrelation up to a lag.

    key (N,) non-decreasing; values (N,) in the order of time; NaN is skipped. The p-value is NaN where a series has no
    more values than lags, or does not vary. fitted: degrees of freedom spent on parameters learned from the same
    values.

    References: Ljung and Box (1978), equation 1.1, with the mean removed; Harvey (1989), section 5.4.2.
    """
    seen = np.isfinite(values)
    key, values = key[seen], values[seen]
    count = np.bincount(key, minlength=keys)
    with np.errstate(all="ignore"):
        away = values - (np.bincount(key, values, minlength=keys) / count)[key]
        power = np.bincount(key, away * away, minlength=keys)
        statistic = np.zeros(keys)
        for lag in range(1, min(lags, len(key) - 1) + 1):
            pairs = away[lag:] * away[:-lag] * (key[lag:] == key[:-lag])
            product = np.bincount(
                key[lag:], pairs, minlength=keys
            )  # added in order, so that other series do not change the sum
            statistic += np.where(count > lag, (product / power) ** 2 / (count - lag), 0.0)
        statistic *= count * (count + 2.0)
        p_value = np.where((count > lags) & (power > 0.0), chdtrc(max(1, lags - fitted), statistic), np.nan)
    return LjungBox(np.where(np.isfinite(p_value), statistic, np.nan), p_value, count)


def _list_diagonal_indices(size: int) -> set[int]:
    return {i * (i + 3) // 2 for i in range(size)}
