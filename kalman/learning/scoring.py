"""Scoring with quasi-Newton corrections: maximise a log-likelihood in few, expensive evaluations.

Each evaluation includes the information J (`kalman.learning.fisher_information`), the scale and dependence of the
variables, which an optimiser with gradients alone has to find by further evaluations. Under a misspecified model J
differs from the curvature; the gradient changes of the last steps correct it.
"""

from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np

from kalman.types import Array

TOLERANCE = 1e-10
"""Gain in log-likelihood below which the search stops; a significant gain is about one half."""
ROUNDING = 1e-13
"""The same relative to the log-likelihood: below it rounding of the sums dominates."""
SMALL = 1e-5
"""An insignificant gain, less than a hundredth of a standard error, not worth a long step."""
PAIRS = 6
"""Number of last steps whose gradient changes correct the information."""


class Point(NamedTuple):
    """An evaluation at theta (p,): log-likelihood, gradient (p,), J (p, p), rows used."""

    theta: Array
    value: float
    gradient: Array
    information: Array
    used: int


class Maximum(NamedTuple):
    """The best point, the number of steps, and whether the search converged."""

    point: Point
    iterations: int
    converged: bool


def finite(point: Point) -> bool:
    """Tell whether value, gradient and information are finite."""
    return bool(
        np.isfinite(point.value)
        and np.isfinite(point.gradient).all()
        and np.isfinite(point.information).all()
    )


Search = Generator[Array, Point, Maximum]
"""Yields a theta, is sent its point, and returns the maximum; so many searches can be evaluated together."""


def maximise(
    evaluate: Callable[[Array], Point],
    start: Point,
    limits: Array,
    max_iterations: int,
    tolerance: float = TOLERANCE,
) -> Maximum:
    """Maximise from `start`, a finite point, as `search` says."""
    asking = search(start, limits, max_iterations, tolerance)
    try:
        theta = next(asking)
        while True:
            theta = asking.send(evaluate(theta))
    except StopIteration as end:
        return end.value


def search(start: Point, limits: Array, max_iterations: int, tolerance: float = TOLERANCE) -> Search:
    """Search the maximum from `start`, a finite point.

    limits: how far one step may go in each variable (p,). A point at which rows fall out is refused. It ends when the
    next step is expected to gain less than `tolerance`, in units of the log-likelihood, or gains less: parameters are
    then within sqrt(2 * tolerance) of a standard error of the maximum.

    References: Harvey (1989), section 4.5, for scoring; Nocedal and Wright (2006), section 7.2, for quasi-Newton steps
    that begin from any matrix, here J's inverse.
    """
    point, pairs = start, []
    ridge = 1e-6 * np.diag(start.information)
    least = max(tolerance, ROUNDING * abs(start.value))
    for iteration in range(max_iterations):
        H = _inverse(point.information, ridge, pairs)
        step = H @ point.gradient
        rise = 0.5 * float(point.gradient @ step)
        if not rise > least or (rise < SMALL and float(np.max(np.abs(step) / limits)) > 0.2):
            return Maximum(point, iteration, True)
        step *= min(1.0, float(np.min(limits / np.maximum(np.abs(step), 1e-300))))
        following, length = yield from _along(point, step, start.used)
        if following is None:
            if not pairs:
                return Maximum(point, iteration, rise < SMALL)
            pairs = []
            continue
        s, y = following.theta - point.theta, point.gradient - following.gradient
        gain = following.value - point.value
        if s @ y > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y):
            pairs = [*pairs, (s, y)][-PAIRS:]
        point = following
        if gain < least and length == 1.0:
            return Maximum(point, iteration + 1, True)
    return Maximum(point, max_iterations, False)


def _along(point: Point, step: Array, used: int) -> Generator[Array, Point, tuple[Point | None, float]]:
    """Return a point along the step that gains enough (Armijo), with the share of the step; None if there is none."""
    length, slope = 1.0, float(point.gradient @ step)
    for _ in range(12):
        tried = yield point.theta + length * step
        sound = finite(tried) and tried.used >= used
        gain = tried.value - point.value
        if sound and gain >= 1e-4 * length * slope:
            return tried, length
        if not sound:
            length *= 0.25
            continue
        if length * slope < 1e-9 * max(1.0, abs(point.value)):
            break  # rounding hides any gain
        # the parabola through the value and slope here and the value there
        top = slope * length**2 / (2.0 * (slope * length - gain))
        length = float(np.clip(top, 0.1 * length, 0.5 * length))
    return None, length


def covariance(information: Array) -> Array:
    """Return the inverse of the information (p, p); infinite variances where it is zero or singular."""
    diagonal = np.diag(information)
    scale = np.sqrt(np.where(diagonal > 0.0, diagonal, 1.0))
    unit = information / np.outer(scale, scale)
    values, vectors = np.linalg.eigh(unit)
    informative = values > 1e-12
    inverse = (
        (vectors[:, informative] / values[informative]) @ vectors[:, informative].T / np.outer(scale, scale)
    )
    lost = (vectors[:, ~informative] ** 2).sum(axis=1) > 1e-6
    inverse[lost, lost] = np.inf
    return inverse


def _inverse(information: Array, ridge: Array, pairs: list[tuple[Array, Array]]) -> Array:
    """Return the inverse of J, corrected by steps s and changes of the negative gradient y, oldest first."""
    J = information + np.diag(ridge)
    scale = np.sqrt(np.where(np.diag(J) > 0.0, np.diag(J), 1.0))
    unit = J / np.outer(scale, scale)
    H = np.linalg.inv(unit + np.diag(np.diag(unit) <= 0.0)) / np.outer(scale, scale)
    for s, y in pairs:
        rho = 1.0 / float(s @ y)
        left = np.eye(len(s)) - rho * np.outer(s, y)
        H = left @ H @ left.T + rho * np.outer(s, s)
    return 0.5 * (H + H.T)
