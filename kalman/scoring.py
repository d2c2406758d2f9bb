"""Maximise a log-likelihood of which an evaluation is dear, in few of them: quasi-Newton steps from the keys' scores.

The keys are independent, so the sum J of the outer products of their gradients estimates the information, and comes with
each evaluation for nothing. J says how the variables are scaled and how they depend on each other, which an optimiser that
sees gradients alone has to find out by evaluations. Where the model is not quite right, J is not quite the curvature:
the last steps' changes of the gradient correct it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kalman.types import Array

PAIRS = 6
"""Steps whose change of the gradient corrects the information; older ones tell of a place far away."""


class Point(NamedTuple):
    """What is known at theta (p,): log-likelihood, gradient (p,), J (p, p), rows used and keys that have rows."""

    theta: Array
    value: float
    gradient: Array
    information: Array
    used: int
    keys: int


class Maximum(NamedTuple):
    """The best point, how many steps led to it, and whether it is the maximum."""

    point: Point
    iterations: int
    converged: bool


def informative(point: Point) -> bool:
    """Tell whether the keys are enough for J to estimate the information."""
    p = len(point.theta)
    if not np.isfinite(point.information).all() or point.keys < 3 * p:
        return False
    scale = np.sqrt(np.diag(point.information))
    return bool((scale > 0.0).all()) and bool(
        np.linalg.cond(point.information / np.outer(scale, scale)) < 1e10
    )


def maximise(
    evaluate: Callable[[Array], Point],
    start: Point,
    limits: Array,
    max_iterations: int,
    tolerance: float = 1e-7,
) -> Maximum:
    """Maximise from `start`, an informative point.

    limits: how far one step may go in each variable (p,). A point at which rows fall out is refused. It ends when the
    next step is expected to gain less than `tolerance`, in units of the log-likelihood, or gains less: parameters are
    then within sqrt(2 * tolerance) of a standard error of the maximum.

    References: Berndt, Hall, Hall and Hausman (1974) for J; Nocedal and Wright (2006), section 7.2, for quasi-Newton
    steps that begin from any matrix, here J's inverse.
    """
    point, pairs = start, []
    ridge = 1e-6 * np.diag(start.information)
    least = max(tolerance, 1e-14 * abs(start.value))  # below it the sums' rounding rules
    for iteration in range(max_iterations):
        H = _inverse(point.information, ridge, pairs)
        step = H @ point.gradient
        rise = float(point.gradient @ step)
        if not 0.5 * rise > least:
            return Maximum(point, iteration, True)
        step *= min(1.0, float(np.min(limits / np.maximum(np.abs(step), 1e-300))))
        following, length = _search(evaluate, point, step, start.used)
        if following is None:
            if not pairs:
                return Maximum(point, iteration, rise < 1e-4)
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


def _search(
    evaluate: Callable[[Array], Point], point: Point, step: Array, used: int
) -> tuple[Point | None, float]:
    """Return a point along the step that gains enough (Armijo), with the share of the step; None if there is none."""
    length, slope = 1.0, float(point.gradient @ step)
    for _ in range(12):
        tried = evaluate(point.theta + length * step)
        sound = np.isfinite(tried.value) and np.isfinite(tried.gradient).all() and tried.used >= used
        gain = tried.value - point.value
        if sound and gain >= 1e-4 * length * slope:
            return tried, length
        if not sound:
            length *= 0.25
            continue
        if length * slope < 1e-9 * max(1.0, abs(point.value)):
            break  # rounding hides what there is to gain
        # the parabola through the value and slope here and the value there
        top = slope * length**2 / (2.0 * (slope * length - gain))
        length = float(np.clip(top, 0.1 * length, 0.5 * length))
    return None, length


def _inverse(information: Array, ridge: Array, pairs: list[tuple[Array, Array]]) -> Array:
    """Return the inverse of J, corrected by steps s and changes of the negative gradient y, oldest first."""
    J = information + np.diag(ridge)
    scale = np.sqrt(np.diag(J))
    H = np.linalg.inv(J / np.outer(scale, scale)) / np.outer(scale, scale)
    for s, y in pairs:
        rho = 1.0 / float(s @ y)
        left = np.eye(len(s)) - rho * np.outer(s, y)
        H = left @ H @ left.T + rho * np.outer(s, s)
    return 0.5 * (H + H.T)
