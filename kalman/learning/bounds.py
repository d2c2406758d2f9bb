"""Searches whose maximum may be at a bound, from a start whose unit may be wrong by any factor.

The likelihood goes flat in the logarithm of a variance that tends to zero, so that a search creeps there, and stops
anywhere. Here such a variable is moved to its bound at once, in one evaluation; it stays if the likelihood does not
fall, and is released if the others' maximum makes it rise again.
"""

import math
from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from kalman.learning.em import Evaluate, Fit
from kalman.learning.key_fits import Outcome
from kalman.learning.scoring import FLAT, Maximum, Point, Search, covariance, finite, known_of, search
from kalman.types import Array

JUMP = 12.0
"""From a flat place to a bound, in free numbers: a factor of 160,000, of which nothing is left to see."""
RELEASES = 4
"""How often variables may be moved to bounds or released from them."""
WAY = 4
"""Jumps from a flat place upwards before it counts as endless."""
SCALINGS = 4
"""Most steps along the scale of the noise."""
FALL = 1e-3
"""A loss in log-likelihood that tells a bound from a maximum inside: one of 1e-3 is 1/20 of a standard error."""


class Variables(NamedTuple):
    """What p free numbers theta are.

    names  what each belongs to, such as R[1][0]
    limits largest step in each (p,), infinite where it has a unit
    scale  change (p,) with the logarithm of all learned noise; measurements: components of a row
    low    the bound below each, None where there is none; high: above
    """

    names: tuple[str, ...]
    limits: Array
    scale: Array
    measurements: int
    low: tuple[str | None, ...]
    high: tuple[str | None, ...]


def search_within(start: Point, variables: Variables, max_iterations: int) -> Search:
    """Search the maximum from `start`, a finite point, at first along the scale of the noise.

    The variables that ended at a bound are `held` in the result.
    """
    point = yield from to_scale(start, variables.scale, variables.measurements)
    steps = 0
    found = Maximum(point, 0, np.zeros(len(variables.names), np.int8), None)
    settled = np.zeros(len(variables.names), bool)
    for _ in range(RELEASES):
        found = yield from search(found.point, variables.limits, max_iterations - steps, found.held)
        steps += found.iterations
        found = found._replace(iterations=steps)
        if found.problem is not None or steps >= max_iterations:
            return found
        turned = _released(found)
        if turned is not None:
            point = yield turned[0]
            if finite(point) and point.used >= start.used and point.value > found.point.value + FALL:
                found = found._replace(point=point, held=turned[1])
                continue
        before = found
        found = yield from _to_bounds(found, variables, settled, start.used)
        if found is before:
            return found
    return found._replace(problem=f"it went to and from bounds {RELEASES} times")


def to_scale(point: Point, scale: Array, measurements: int) -> Generator[Array, Point, Point]:
    """Return the point with all learned noise multiplied by the factor that the rows ask for.

    That is scoring in the factor itself: where all noise is learned and the start is diffuse, the mean squared
    standardised innovation, so that one step finds a unit wrong by any power of ten.
    """
    for _ in range(SCALINGS):
        # where innovations are huge, differences of them drown in rounding, and only add
        known = min(float(scale @ point.information @ scale), 0.5 * point.used * measurements)
        if not known > 0.0:
            break
        shift = math.log(max(1.0 + float(scale @ point.gradient) / known, 1e-8))
        if abs(shift) < 1.0:
            break
        tried = yield point.theta + shift * scale
        if not (finite(tried) and tried.used >= point.used and tried.value > point.value):
            break
        point = tried
    return point


def _to_bounds(
    found: Maximum, variables: Variables, settled: np.ndarray, used: int
) -> Generator[Array, Point, Maximum]:
    """Return the maximum with the flat variables at their bounds, or a better point that one of them leads to.

    A flat variable for which both ways lose likelihood has its maximum where it is, and is noted as settled.
    """
    for i in range(len(variables.names)):
        point = found.point
        known = float(point.information[i, i])
        if found.held[i] or settled[i] or not np.isfinite(variables.limits[i]) or known >= FLAT:
            continue
        slope = 1 if point.gradient[i] > 0.0 else -1
        for side in (slope, -slope):
            tried, end = yield from _flat_way(point, i, side, used)
            if end == "bound":
                held = found.held.copy()
                held[i] = side
                found = found._replace(point=tried, held=held)
                break
            if end == "better":
                return found._replace(point=tried)
        else:
            settled[i] = True
    return found


def _flat_way(point: Point, i: int, side: int, used: int) -> Generator[Array, Point, tuple[Point, str]]:
    """Go from a flat place to a bound of variable i; return the last point and what it is: bound, better or worse.

    Downwards one step is enough, of which nothing is left to see; upwards the flat place may have an end.
    """
    best = point
    for _ in range(1 if side < 0 else WAY):
        moved = best.theta.copy()
        moved[i] += side * JUMP
        tried = yield moved
        if not finite(tried) or tried.used < used or tried.value < point.value - FALL:
            return best, "worse"
        if tried.value > point.value + FALL and tried.information[i, i] >= FLAT:
            return tried, "better"
        best = tried
    return best, "bound"


def _released(found: Maximum) -> tuple[Array, np.ndarray] | None:
    """Return theta and bounds with those variables back inside whose gradient points there; None if none does.

    At a bound the gradient by the logarithm is tiny, but its sign is that by the variance itself.
    """
    inward = found.held * found.point.gradient < 0.0
    if not inward.any():
        return None
    theta = np.where(inward, found.point.theta - found.held * JUMP, found.point.theta)
    return theta, np.where(inward, 0, found.held).astype(np.int8)


def search_outcome(found: Maximum, variables: Variables) -> tuple[Outcome, str | None]:
    """Return how a search ended, and why that is not inside the bounds."""
    if found.problem is not None:
        return Outcome.FAILED, found.problem
    ends = _ends(variables, found.held)
    return (Outcome.AT_BOUND, ", ".join(ends)) if ends else (Outcome.CONVERGED, None)


def spread_within(point: Point, held: np.ndarray) -> Array:
    """Return the covariance (p, p) of the free variables, the others being known; NaN for those at a bound."""
    free = held == 0
    return np.where(np.outer(free, free), covariance(known_of(point, held)), math.nan)


def at_zero(evaluate: Evaluate, found: Fit, variables: Variables) -> tuple[Fit, np.ndarray]:
    """Return a fit by a method without bounds with those variances at zero that lose nothing there, and which are (p,).

    Expectation maximisation tends to zero for ever, and its steps get small where nothing is left to gain.
    """
    held = np.zeros(len(found.theta), np.int8)
    for i in np.flatnonzero(variables.scale > 0.0).tolist():
        moved = found.theta.copy()
        moved[i] -= JUMP
        value, _, used = evaluate(moved)
        if np.isfinite(value) and used >= found.used and value > found.log_likelihood - FALL:
            found = found._replace(theta=moved, log_likelihood=value)
            held[i] = -1
    if not held.any():
        return found, held
    return found._replace(outcome=Outcome.AT_BOUND, reason=", ".join(_ends(variables, held))), held


def _ends(variables: Variables, held: np.ndarray) -> list[str]:
    """Return what is said of the variables at their bounds."""
    return [
        f"{name} {variables.low[i] if side < 0 else variables.high[i]}"
        for i, (name, side) in enumerate(zip(variables.names, held.tolist(), strict=True))
        if side
    ]
