"""Optimisers of log-likelihoods of which value and gradient are known: one problem, or many small ones at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from kalman.learning.em import Fit
from kalman.learning.key_fits import Outcome
from kalman.types import Array

REACH = 25.0
"""How far a free number may go from its start: a factor e^25 for a variance."""
STEEP = 1e-4
"""Slope of the log-likelihood a row by a free number above which a search has not arrived."""


def fit(
    objective: Callable[[Array], tuple[Any, ...]],
    start: Array,
    max_iterations: int = 100,
    progress: Callable[[int, float], None] | None = None,
) -> Fit:
    """Maximise a log-likelihood by L-BFGS-B (scipy), from `start` (p,).

    objective: theta -> (log-likelihood, gradient, ...). progress: called with (evaluations, log-likelihood).
    A theta at which the filter breaks down, so that rows fall out, is refused: the third item, if the
    objective returns it, is the number of rows used.
    """
    start = np.asarray(start, float)
    evaluations = 0
    rows = 1
    worst = 0.0

    def negative(theta: Array) -> tuple[float, Array]:
        nonlocal evaluations, rows, worst
        log_likelihood, gradient, *rest = objective(theta)
        evaluations += 1
        if progress is not None:
            progress(evaluations, float(log_likelihood))
        if evaluations == 1:
            rows = max(1, rest[0] if rest else 1)
            worst = 1e3 + 2.0 * abs(float(log_likelihood)) / rows if np.isfinite(log_likelihood) else 1e3
        lost = bool(rest) and rest[0] < rows
        if lost or not np.isfinite(log_likelihood) or not np.isfinite(gradient).all():
            return worst, np.zeros(len(theta))
        return -float(log_likelihood) / rows, -np.asarray(gradient, float) / rows

    if len(start) == 0:
        log_likelihood = float(objective(start)[0])
        return Fit(start, log_likelihood, 0, Outcome.CONVERGED)
    found = minimize(
        negative,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(a - REACH, a + REACH) for a in start],
        options={"maxiter": max_iterations, "ftol": 1e-13, "gtol": 1e-9},
    )
    theta = np.asarray(found.x, float)
    outcome, reason = _ended(found, np.abs(theta - start))
    return Fit(theta, -float(found.fun) * rows, int(found.nit), outcome, reason, rows)


def _ended(found: Any, moved: Array) -> tuple[Outcome, str | None]:
    """Return how a search by L-BFGS-B ended, in log-likelihood a row, and why it did not converge."""
    if (moved > REACH - 1e-6).any():
        return Outcome.AT_BOUND, f"a parameter moved by a factor of e^{REACH:g} from where it is written"
    steepest = float(np.abs(found.jac).max())
    # "abnormal" is a line search that rounding stops: the optimum, as far as float64 can tell
    if (found.status == 0 or "ABNORMAL" in str(found.message)) and steepest < STEEP:
        return Outcome.CONVERGED, None
    return Outcome.FAILED, f"it stopped where the log-likelihood a row still has a slope of {steepest:.3g}"


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
