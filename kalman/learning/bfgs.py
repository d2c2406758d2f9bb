"""BFGS for many small independent problems at once, each with its own step and its own end."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kalman.types import Array

Objective = Callable[[Array, np.ndarray], tuple[Array, Array, np.ndarray]]
"""(theta (p, J), which (J,)) -> value (J,), gradient (p, J), rows used (J,) of the problems `which`."""


class Maxima(NamedTuple):
    """theta (p, K), value (K,), rows used there (K,), converged (K,) bool."""

    theta: Array
    value: Array
    used: np.ndarray
    converged: np.ndarray


def maximise_each(objective: Objective, start: Array, deviation: float, max_iterations: int) -> Maxima:
    """Maximise K concave-looking functions of p numbers, from start (p, K).

    Each has its own inverse Hessian and its own backtracking line search (Armijo); a finished problem takes
    no more part, and no problem sees another, so that results do not depend on the company.
    References: Nocedal and Wright (2006), algorithms 3.1 and 6.1.
    """
    p, keys = start.shape
    theta = start.copy()
    value, gradient, used = objective(theta, np.arange(keys))
    converged = np.zeros(keys, bool)
    active = np.arange(keys)
    # curvature: the prior's, and about half a unit a row in the logarithm of a variance
    inverse = np.zeros((p, p, keys))
    for i in range(p):
        inverse[i, i] = 1.0 / (1.0 / deviation**2 + 0.5 * used)
    length = np.ones(keys)
    for _ in range(max_iterations):
        steepest = np.abs(gradient[:, active]).max(axis=0, initial=0.0)
        done = steepest <= 1e-6 * (1.0 + used[active])
        converged[active[done]] = True
        active = active[~done]
        if not len(active):
            break
        g, H = gradient[:, active], inverse[:, :, active]
        ascent = np.array([_dot(H[i], g) for i in range(p)])
        step = length[active] * np.minimum(1.0, 2.0 / np.maximum(np.abs(ascent).max(axis=0), 1e-300)) * ascent
        tried = theta[:, active] + step
        new_value, new_gradient, new_used = objective(tried, active)
        better = (new_value >= value[active] + 1e-4 * _dot(step, g)) & (new_used >= used[active])
        better &= np.isfinite(new_value) & np.isfinite(new_gradient).all(axis=0)
        change = g - new_gradient  # of the negative's gradient
        curvature = _dot(step, change)
        bend = better & (curvature > 1e-12)
        inverse[:, :, active[bend]] = _bfgs(H[:, :, bend], step[:, bend], change[:, bend], curvature[bend])
        moved = active[better]
        theta[:, moved], value[moved], gradient[:, moved] = (
            tried[:, better],
            new_value[better],
            new_gradient[:, better],
        )
        length[active] = np.where(better, 1.0, 0.25 * length[active])
        stuck = length[active] < 1e-8  # rounding hides any further rise
        converged[active[stuck]] = True
        active = active[~stuck]
    return Maxima(theta, value, used, converged)


def _bfgs(H: Array, s: Array, y: Array, sy: Array) -> Array:
    """Return the inverse Hessians (p, p, J) after steps s, gradient changes y (p, J), with sy = s'y."""
    p = len(s)
    Hy = np.array([_dot(H[i], y) for i in range(p)])
    weight = (1.0 + _dot(y, Hy) / sy) / sy
    result = H.copy()
    for i in range(p):
        for j in range(p):
            result[i, j] += weight * s[i] * s[j] - (s[i] * Hy[j] + Hy[i] * s[j]) / sy
    return result


def _dot(a: Array, b: Array) -> Array:
    """Return the inner products (J,) of columns, added in a fixed order."""
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total
