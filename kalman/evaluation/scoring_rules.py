"""Scoring rules of normal forecasts against the later measurement; lower is better."""

import numpy as np
from scipy.special import ndtr

from kalman.types import Array

_SQRT_PI = np.sqrt(np.pi)


def crps(mean: Array, variance: Array, y: Array) -> Array:
    """Return the continuous ranked probability score of N(mean, variance) for the measurement y.

    The score has the unit of y, and is the absolute error where the variance is 0. All arguments have the same shape.

    Reference: Gneiting and Raftery (2007), "Strictly proper scoring rules, prediction, and estimation", equation 21,
    with the sign turned.
    """
    error, spread = y - mean, np.sqrt(variance)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = error / spread
        score = spread * (z * (2.0 * ndtr(z) - 1.0) + 2.0 * _compute_density(z) - 1.0 / _SQRT_PI)
    return np.where(spread == 0.0, np.abs(error), score)


def log_score(mean: Array, variance: Array, y: Array) -> Array:
    """Return minus the logarithm of the density of N(mean, variance) at y; all arguments have the same shape.

    Reference: Gneiting and Raftery (2007), section 4.1, with the sign turned.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return 0.5 * (np.log(2.0 * np.pi * variance) + (y - mean) ** 2 / variance)


def _compute_density(z: Array) -> Array:
    return np.exp(-0.5 * z * z) / np.sqrt(2.0 * np.pi)
