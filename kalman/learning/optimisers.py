"""An optimiser of log-likelihoods with known gradient."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import minimize

from kalman.learning.em import Fit
from kalman.learning.key_fits import FitOutcome
from kalman.types import Array

REACH = 25.0
"""Largest distance of a free number from its start, a factor e^25 of a variance."""
STEEP = 1e-4
"""Largest slope of the log-likelihood per row by a free number at which a search counts as converged."""


def fit(
    objective: Callable[[Array], tuple[Any, ...]],
    start: Array,
    max_iterations: int = 100,
    progress: Callable[[int, float], None] | None = None,
) -> Fit:
    """Maximise a log-likelihood by L-BFGS-B (scipy), from `start` (p,).

    objective: theta -> (log-likelihood, gradient, ...). progress: called with (evaluations, log-likelihood).
    If the objective returns a third item, this is the number of rows used. A theta is refused if the filter breaks down
    or uses fewer rows.
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
        return Fit(start, log_likelihood, 0, FitOutcome.CONVERGED)
    found = minimize(
        negative,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(a - REACH, a + REACH) for a in start],
        options={"maxiter": max_iterations, "ftol": 1e-13, "gtol": 1e-9},
    )
    theta = np.asarray(found.x, float)
    outcome, reason = _judge_end(found, np.abs(theta - start))
    return Fit(theta, -float(found.fun) * rows, int(found.nit), outcome, reason, rows)


def _judge_end(found: Any, moved: Array) -> tuple[FitOutcome, str | None]:
    """Return the outcome of a search by L-BFGS-B, whose objective is per row, and why the search did not converge."""
    if (moved > REACH - 1e-6).any():
        return FitOutcome.AT_BOUND, f"a parameter moved by a factor of e^{REACH:g} from where it is written"
    steepest = float(np.abs(found.jac).max())
    # "abnormal" is a line search that rounding stopped, so the end is the optimum within float64
    if (found.status == 0 or "ABNORMAL" in str(found.message)) and steepest < STEEP:
        return FitOutcome.CONVERGED, None
    return FitOutcome.FAILED, f"it stopped where the log-likelihood a row still has a slope of {steepest:.3g}"
