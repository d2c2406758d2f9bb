"""Scoring with quasi-Newton corrections: maximise a log-likelihood in few, expensive evaluations.

Each evaluation includes the information J (`kalman.learning.fisher_information`): the scale and dependence of the
variables. An optimiser with gradients alone needs more evaluations to find them. Under a misspecified model J differs
from the curvature; the gradient changes of the last steps correct it.
"""

import math
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

import numpy as np

from kalman.linalg.packing import unpack_symmetric
from kalman.types import Array

TOLERANCE = 1e-12
"""Gain in log-likelihood per row below which the search stops."""
ROUNDING = 1e-13
"""Gain relative to the log-likelihood below which the search stops, since rounding of the sums dominates."""
SMALL = 1e-5
"""An insignificant gain, less than a hundredth of a standard error; a significant one is about one half."""
HIDDEN = 0.01
"""A significant gain; if rounding hides gains of this size, the search has not converged."""
FLAT = 0.05
"""Information about the logarithm of a parameter below which its standard error is a factor of ninety."""
FAR, HIGHEST = 4.0, 16.0
"""Limits on steps of a variance's logarithm: above FAR the variance itself takes the step, by at most HIGHEST."""
FALL = 1e-3
"""A loss in log-likelihood that separates a bound from an inner maximum: 1e-3 is 1/20 of a standard error."""
PAIRS = 6
"""Number of last steps whose gradient changes correct the information."""


class Point(NamedTuple):
    """An evaluation at theta (p,): log-likelihood, gradient (p,), information J (p, p) and number of rows used."""

    theta: Array
    value: float
    gradient: Array
    information: Array
    used: int


def build_point(theta: Array, value: float, vector: Array, used: int) -> Point:
    """Return an evaluation at theta (p,) as a point; vector: gradient (p,) and packed information (p(p+1)/2,)."""
    p = len(theta)
    information = np.array(unpack_symmetric(vector[p:].tolist())).reshape(p, p)
    return Point(theta, value, vector[:p], information, used)


class Maximum(NamedTuple):
    """The best point of a search and the number of steps.

    held: the bound of each variable (p,): -1 lower, 1 upper, 0 free.
    problem: why the search did not converge, None for a converged search.
    """

    point: Point
    iterations: int
    held: np.ndarray
    problem: str | None


def is_finite(point: Point) -> bool:
    """Return whether value, gradient and information are finite."""
    return bool(
        np.isfinite(point.value)
        and np.isfinite(point.gradient).all()
        and np.isfinite(point.information).all()
    )


Search = Generator[Array, Point, Maximum]
"""Yields a theta, receives the theta's point, and returns the maximum, so that many searches share an evaluation."""


T = TypeVar("T")


def maximise(evaluate: Callable[[Array], Point], asking: Generator[Array, Point, T]) -> T:
    """Return the result of a search (`search`, or one of `kalman.learning.bounds`)."""
    try:
        theta = next(asking)
        while True:
            theta = asking.send(evaluate(theta))
    except StopIteration as end:
        return end.value


def search(
    start: Point, limits: Array, power: Array, max_iterations: int, held: np.ndarray | None = None
) -> Search:
    """Search the maximum from `start`, a finite point.

    limits: largest step in each variable (p,). power: a variable's variance is exp(power * theta) (p,), 0 if it is not
    a variance. held: nonzero for fixed variables (p,). A point at which rows fall out is refused. The search ends when
    the expected or actual gain of a step is below `TOLERANCE` a row; in parameters that is sqrt(2 * rows * TOLERANCE)
    of a standard error from the maximum. A variable without information (`FLAT`) rests while its step exceeds its limit
    or promises little, and the others continue: `kalman.learning.bounds` then checks whether it is at a bound.

    References: Harvey (1989), section 4.5, for scoring; Nocedal and Wright (2006), section 7.2, for quasi-Newton steps
    that begin from any matrix, here J's inverse.
    """
    point, pairs = start, []
    held = np.zeros(len(limits), np.int8) if held is None else held
    rise = math.inf
    for iteration in range(max_iterations):
        least = compute_least_gain(point)
        step, rise, far = _compute_step(point, limits, power, held, pairs)
        if not rise > least or (rise < SMALL and far > 0.2):
            return Maximum(point, iteration, held, _describe_hidden(least))
        following, length = yield from _search_along(point, step, start.used)
        if following is None:
            if not pairs:
                problem = f"no step gains, and {rise:.3g} of log-likelihood is expected"
                return Maximum(point, iteration, held, None if rise < SMALL else problem)
            pairs = []
            continue
        s, y = following.theta - point.theta, point.gradient - following.gradient
        gain = following.value - point.value
        if s @ y > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y):
            pairs = [*pairs, (s, y)][-PAIRS:]
        point = following
        if gain < least and length == 1.0 and far <= 1.0:
            return Maximum(point, iteration + 1, held, _describe_hidden(least))
    problem = f"it stopped after {max_iterations} steps, and the next promises {rise:.3g} of log-likelihood"
    return Maximum(point, max_iterations, held, problem)


def _compute_step(
    point: Point, limits: Array, power: Array, held: np.ndarray, pairs: list[tuple[Array, Array]]
) -> tuple[Array, float, float]:
    """Return the next step (p,), its expected gain, and its unlimited length in units of the limits. A variance far too
    small takes the scoring step of the variance itself, which is short in the logarithm. A variance that would fall
    below zero falls by its limit. The other steps are computed with these variables fixed.
    """
    gradient = point.gradient
    whole = _compute_newton_step(point, held != 0, pairs)
    far, little = np.abs(whole) > limits, (power > 0.0) & (gradient > -FALL * power) & (gradient < 0.0)
    flat = (np.diag(point.information) < FLAT) & (far | little) & np.isfinite(limits)
    resting = (held != 0) | flat & ~((power > 0.0) & (gradient > 0.0) & (whole > 0.0))
    whole = _compute_newton_step(point, resting, pairs)
    size = power * whole
    above, below = (size > FAR) & (gradient > 0.0), (size < -1.0) & (gradient < 0.0)
    step = _compute_newton_step(point, resting | above | below, pairs)
    step *= min(1.0, 1.0 / max(float(np.max(np.abs(step) / limits)), 1e-300))
    up = np.minimum(np.log1p(np.where(above, size, 0.0)), HIGHEST) / np.maximum(power, 1.0)
    step = np.where(above, up, np.where(below, -limits, step))
    return step, 0.5 * float(gradient @ whole), float(np.max(np.abs(whole) / limits))


def _compute_newton_step(point: Point, still: np.ndarray, pairs: list[tuple[Array, Array]]) -> Array:
    """Return the step (p,) of scoring with quasi-Newton corrections, with some variables fixed."""
    corrections = [(np.where(still, 0.0, s), np.where(still, 0.0, y)) for s, y in pairs]
    ridge = 1e-6 * np.diag(point.information)
    H = _invert_information(select_known(point, still), np.where(still, 0.0, ridge), corrections)
    return np.where(still, 0.0, H @ np.where(still, 0.0, point.gradient))


def compute_least_gain(point: Point) -> float:
    """Return the gain in log-likelihood below which a search stops: a row's, and not below rounding."""
    return max(min(TOLERANCE * point.used, SMALL), ROUNDING * abs(point.value))


def _describe_hidden(least: float) -> str | None:
    """Return the problem of a log-likelihood so large that its rounding hides significant gains."""
    return f"rounding hides gains in log-likelihood below {least:.3g}" if least > HIDDEN else None


def select_known(point: Point, held: np.ndarray) -> Array:
    """Return the information about the free variables, with a unit matrix for the others."""
    free = held == 0
    return np.where(np.outer(free, free), point.information, np.diag((~free).astype(float)))


def _search_along(
    point: Point, step: Array, used: int
) -> Generator[Array, Point, tuple[Point | None, float]]:
    """Return a point along the step that gains enough (Armijo), or None, and the last tried share of the step."""
    length, slope = 1.0, float(point.gradient @ step)
    for _ in range(12):
        tried = yield point.theta + length * step
        sound = is_finite(tried) and tried.used >= used
        gain = tried.value - point.value
        if sound and gain >= 1e-4 * length * slope:
            return tried, length
        if not sound:
            length *= 0.25
            continue
        if length * slope < ROUNDING * abs(point.value):
            break  # rounding hides any gain
        # the parabola through the value and slope here and the value there
        top = slope * length**2 / (2.0 * (slope * length - gain))
        length = float(np.clip(top, 0.1 * length, 0.5 * length))
    return None, length


def invert_to_covariance(information: Array) -> Array:
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


def _invert_information(information: Array, ridge: Array, pairs: list[tuple[Array, Array]]) -> Array:
    """Return the inverse of J, corrected by steps s and changes of the negative gradient y, oldest first."""
    J = information + np.diag(ridge)
    scale = np.sqrt(np.where(np.diag(J) > 0.0, np.diag(J), 1.0))
    unit = J / np.outer(scale, scale)
    H = np.linalg.inv(unit + np.diag(np.diag(unit) <= 0.0)) / np.outer(scale, scale)
    for s, y in pairs:
        if not s @ y > 1e-10 * np.linalg.norm(s) * np.linalg.norm(y):
            continue
        rho = 1.0 / float(s @ y)
        left = np.eye(len(s)) - rho * np.outer(s, y)
        H = left @ H @ left.T + rho * np.outer(s, s)
    return 0.5 * (H + H.T)
