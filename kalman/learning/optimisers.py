"""An optimiser of log-likelihoods of which value and gradient are known."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import minimize

from kalman.learning.em import Fit
from kalman.types import Array

REACH = 25.0
"""How far a free number may go from its start: a factor e^25 for a variance."""


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
    scale = 0.0
    rows_at_start = 0

    def negative(theta: Array) -> tuple[float, Array]:
        nonlocal evaluations, scale, rows_at_start
        log_likelihood, gradient, *rest = objective(theta)
        evaluations += 1
        if progress is not None:
            progress(evaluations, float(log_likelihood))
        if evaluations == 1:
            scale = max(1.0, abs(float(log_likelihood)))
            rows_at_start = rest[0] if rest else 0
        lost = bool(rest) and rest[0] < rows_at_start
        if lost or not np.isfinite(log_likelihood) or not np.isfinite(gradient).all():
            return 1e3, np.zeros(len(theta))
        return -float(log_likelihood) / scale, -np.asarray(gradient, float) / scale

    if len(start) == 0:
        log_likelihood = float(objective(start)[0])
        return Fit(start, log_likelihood, 0, True)
    found = minimize(
        negative,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(a - REACH, a + REACH) for a in start],
        options={"maxiter": max_iterations, "ftol": 1e-13, "gtol": 1e-9},
    )
    # "abnormal" is a line search that rounding stops: the optimum, as far as float64 can tell
    converged = found.status == 0 or "ABNORMAL" in str(found.message)
    return Fit(np.asarray(found.x, float), -float(found.fun) * scale, int(found.nit), bool(converged))
