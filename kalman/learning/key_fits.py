"""Results and outcomes of learning for many keys, and the population that supports keys with few rows."""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from kalman.learning.keys.directions import dot, invert_information
from kalman.types import Array


class FitOutcome(IntEnum):
    """How the search of one key ended; stored by name in tables.

    CONVERGED     at a maximum inside the bounds
    AT_BOUND      at a maximum on a bound, such as a variance of zero; the reason names the bound
    TOO_FEW_ROWS  the key's rows do not determine the parameters, so the population replaces or supports the rows
    FAILED        no maximum was found, or too few of the rows could be used
    """

    CONVERGED = 0
    AT_BOUND = 1
    TOO_FEW_ROWS = 2
    FAILED = 3


ARRIVED = 0.01
"""Largest expected gain in log-likelihood at a point that counts as a maximum: a seventh of a standard error."""
ENOUGH_ROWS = 0.9
"""Smallest share of rows that a fit must use to represent all rows; gaps and outliers leave a larger share."""


def find_row_shortage(used: float, rows: float) -> str | None:
    """Return why a fit to `used` of `rows` rows has not converged; None if the fit used enough rows."""
    if used >= ENOUGH_ROWS * rows:
        return None
    return f"only {used:,.0f} of {rows:,.0f} rows could be used: the filter flags the others"


class Population(NamedTuple):
    """The distribution of the keys' free numbers theta, which is each key's prior: mean (p,), covariance (p, p).

    keys  the number of keys in the population
    zero  (p,) share of keys with a variance of zero, which mean and covariance leave out; None means hardly any key
    """

    mean: Array
    covariance: Array
    keys: int
    zero: Array | None = None


class KeyFit(NamedTuple):
    """The result of learning for each of K keys.

    theta          (p, K) free numbers; for a variance of zero, the lower bound of the search
    parameters     (d, K) as `Filter.with_parameters` takes them
    log_likelihood (K,) log-likelihood without the prior
    used           (K,) number of rows used
    outcome        (K,) int8 of `FitOutcome`
    reason         why each key is not CONVERGED, None for a converged key
    errors         (d, K) standard errors of the parameters, with the population as prior if there is one; NaN where
                   unknown, as at a bound
    information    (p, p, K) information of each key's rows about theta, zero for a variance of zero
    own            (K,) share of the key's rows, not of the population, in the result, 0 to 1
    nis            (K,) mean NIS per measured component after the fit, NaN without rows; 1 expected
    ljung_box      (K,) p-value of the test of the innovations for autocorrelation, NaN where too short
    """

    theta: Array
    parameters: Array
    log_likelihood: Array
    used: np.ndarray
    outcome: np.ndarray
    reason: list[str | None]
    errors: Array
    information: Array
    own: Array
    nis: Array
    ljung_box: Array

    @property
    def converged(self) -> np.ndarray:
        """Mask (K,) of keys that ended at a maximum inside the bounds."""
        return self.outcome == FitOutcome.CONVERGED

    def take(self, which: np.ndarray) -> "KeyFit":
        """Return the fits of the keys `which`, in the order of `which`."""
        reason = [self.reason[k] for k in which.tolist()]
        parts: list[Any] = [
            reason if name == "reason" else a[..., which] for name, a in self._asdict().items()
        ]
        return KeyFit(*parts)


def build_unexamined(theta: Array, parameters: Array, log_likelihood: Array, used: np.ndarray) -> KeyFit:
    """Return fits that count as converged, without errors, information and tests."""
    p, keys = theta.shape
    unknown = np.full(keys, np.nan)
    return KeyFit(
        theta,
        parameters,
        log_likelihood,
        used,
        np.full(keys, FitOutcome.CONVERGED, np.int8),
        [None] * keys,
        np.full(parameters.shape, np.nan),
        np.full((p, p, keys), np.nan),
        np.ones(keys),
        unknown,
        unknown.copy(),
    )


def compute_expected_gain(gradient: Array, information: Array, held: np.ndarray, power: Array) -> Array:
    """Return the expected gain in log-likelihood (J,) from each of J points to its maximum.

    To second order a step u gains g'u - u'Ju/2, at most half of g' J^-1 g. A variance cannot fall below zero, and a
    number at a bound can only move inwards.

    Args:
        gradient: g (p, J), by the free numbers, or by the variance itself for a variance of zero.
        information: J (p, p, J), in the same unit.
        held: (p, J) whether each number is at a bound: -1 at the lower, 1 at the upper, 0 at no bound.
        power: (p,) such that the variance is exp(power * theta); 0 for a number that is not a variance.
    """
    lowest = np.where(held < 0, 0.0, np.where(power[:, None] > 0.0, -1.0, -np.inf))
    lowest = lowest / np.where(power > 0.0, power, 1.0)[:, None]
    highest = np.where(held > 0, 0.0, np.inf)
    step, gain = np.zeros(gradient.shape), np.zeros(gradient.shape[1])
    known = np.array([information[i, i] for i in range(len(gradient))])
    for _ in range(2 * len(gradient) + 2):
        slope = gradient - _apply_matrices(information, step)
        fixed = (step <= lowest) & (slope <= 0.0) | (step >= highest) & (slope >= 0.0)
        newton = step + np.where(
            fixed, 0.0, _apply_matrices(invert_information(information, fixed), np.where(fixed, 0.0, slope))
        )
        tried = np.clip(newton, lowest, highest)
        step = np.where(_compute_gain(gradient, information, tried) > gain, tried, step)
        for i in range(len(gradient)):  # single steps never lose, and find the active bounds
            up = (gradient[i] - dot(information[i], step)) / np.where(known[i] > 0.0, known[i], np.inf)
            step[i] = np.clip(step[i] + up, lowest[i], highest[i])
        before, gain = gain, np.maximum(gain, _compute_gain(gradient, information, step))
        if not (gain > before + 1e-4 * ARRIVED).any():
            break
    return gain


def _compute_gain(gradient: Array, information: Array, step: Array) -> Array:
    return dot(gradient, step) - 0.5 * dot(step, _apply_matrices(information, step))


def describe_missing_gain(gain: float) -> str:
    """Return why a search has not converged that ended where further steps are expected to gain log-likelihood."""
    return f"{gain:.3g} of log-likelihood is still expected where the search ended"


def _apply_matrices(matrix: Array, vector: Array) -> Array:
    """Return the products (p, J) of matrices (p, p, J) and vectors (p, J)."""
    return np.array([dot(row, vector) for row in matrix])
