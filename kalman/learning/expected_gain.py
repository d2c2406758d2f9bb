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
    fixed = held * gradient > 0.0
    fixed |= (held != 0) & ~(gradient != 0.0)
    step = np.zeros(gradient.shape)
    for _ in range(len(gradient) + 1):
        H = inverse(information, fixed)
        slope = np.where(fixed, 0.0, gradient - _applied(information, np.where(fixed, step, 0.0)))
        moved = np.where(fixed, step, _applied(H, slope))
        beyond = ~fixed & ((moved < lowest) | (moved > highest))
        step = np.clip(moved, lowest, highest)
        if not beyond.any():
            break
        fixed |= beyond
    return dot(gradient, step) - 0.5 * dot(step, _applied(information, step))


def still_expected(gain: float) -> str:
    """Return why a search whose end still promises a gain has not converged."""
    return f"{gain:.3g} of log-likelihood is still expected where the search ended"


def _applied(matrix: Array, vector: Array) -> Array:
    """Return the products (p, J) of matrices (p, p, J) and vectors (p, J)."""
    return np.array([dot(row, vector) for row in matrix])
