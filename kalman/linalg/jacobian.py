"""Jacobians by differences, for functions of many keys at once."""

from collections.abc import Callable

import numpy as np

from kalman.types import Array

STEP = 2.0**-10
"""The step as a part of the scale: near eps^(1/5), where truncation and rounding of four points balance."""


def numerical_steps(n: int) -> int:
    """Return how many points `numerical` asks a function of n states for at once."""
    return 4 * n


def numerical(function: Callable[[Array], Array], x: Array, spread: Array, rows: int) -> Array:
    """Return the Jacobian (rows, n, K) at x (n, K) of a function from (n, 4 n K) to (rows, 4 n K).

    Central differences of fourth order. The steps are fitted to the standard deviations `spread` (n, K), the
    scale on which a first-order filter takes the function for a straight line; where those are very small or
    large beside x they are bounded by it.

    References: Abramowitz and Stegun (1964), 25.3.6.
    """
    n, keys = x.shape
    size = np.abs(x)
    scale = np.clip(spread, 0.01 * size, np.maximum(size, 1.0))
    step = STEP * np.where(scale > 0.0, scale, 1.0)
    points = np.repeat(x[:, None, :], 4 * n, axis=1)
    wide = np.empty((n, keys))
    for j in range(n):
        upper, lower = x[j] + step[j], x[j] - step[j]
        points[j, 4 * j], points[j, 4 * j + 1] = upper, lower
        points[j, 4 * j + 2], points[j, 4 * j + 3] = x[j] + 2.0 * step[j], x[j] - 2.0 * step[j]
        wide[j] = upper - lower  # as it came out after rounding
    found = function(points.reshape(n, 4 * n * keys)).reshape(rows, n, 4, keys)
    near, far = found[:, :, 0] - found[:, :, 1], found[:, :, 2] - found[:, :, 3]
    return (8.0 * near - far) / (6.0 * wide)
