"""The log-likelihood that a maximum is still expected to gain: whether a search has arrived, whatever it was.

To second order a step u gains g'u - u'Ju/2, with the gradient g and the information J, half of g' J^-1 g at the most. A
variance cannot fall by more than all of it, and what is at a bound moves from there only inwards.
"""

import numpy as np

from kalman.learning.key_search import dot, inverse
from kalman.types import Array

ARRIVED = 0.01
"""Log-likelihood that a maximum may still promise: a tenth of a standard error is worth half of it."""


def expected_gain(gradient: Array, information: Array, held: np.ndarray, power: Array) -> Array:
    """Return the log-likelihood (J,) that each of J points is expected to lack to its maximum.

    Args:
        gradient: g (p, J), by free numbers; by the variance itself where that is zero.
        information: J (p, p, J), in the same unit.
        held: at which bound each number is (p, J): -1 the lower, 1 the upper, 0 none.
        power: the variance of a number is exp(power * theta) (p,); 0 of a number that is none.
    """
    lowest = np.where(held < 0, 0.0, np.where(power[:, None] > 0.0, -1.0, -np.inf))
    lowest = lowest / np.where(power > 0.0, power, 1.0)[:, None]
    highest = np.where(held > 0, 0.0, np.inf)
    step, gain = np.zeros(gradient.shape), np.zeros(gradient.shape[1])
    known = np.array([information[i, i] for i in range(len(gradient))])
    for _ in range(2 * len(gradient) + 2):
        slope = gradient - _applied(information, step)
        fixed = (step <= lowest) & (slope <= 0.0) | (step >= highest) & (slope >= 0.0)
        newton = step + np.where(
            fixed, 0.0, _applied(inverse(information, fixed), np.where(fixed, 0.0, slope))
        )
        tried = np.clip(newton, lowest, highest)
        step = np.where(_gain(gradient, information, tried) > gain, tried, step)
        for i in range(len(gradient)):  # each by itself never loses, and finds which bounds hold
            up = (gradient[i] - dot(information[i], step)) / np.where(known[i] > 0.0, known[i], np.inf)
            step[i] = np.clip(step[i] + up, lowest[i], highest[i])
        before, gain = gain, np.maximum(gain, _gain(gradient, information, step))
        if not (gain > before + 1e-4 * ARRIVED).any():
            break
    return gain


def _gain(gradient: Array, information: Array, step: Array) -> Array:
    return dot(gradient, step) - 0.5 * dot(step, _applied(information, step))


def still_expected(gain: float) -> str:
    """Return why a search whose end still promises a gain has not converged."""
    return f"{gain:.3g} of log-likelihood is still expected where the search ended"


def _applied(matrix: Array, vector: Array) -> Array:
    """Return the products (p, J) of matrices (p, p, J) and vectors (p, J)."""
    return np.array([dot(row, vector) for row in matrix])
