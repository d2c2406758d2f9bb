"""Searches whose maximum may be at a bound, from a start that may have the wrong unit.

The likelihood becomes flat in the logarithm of a variance that tends to zero, so that a search takes ever smaller steps
and stops before the bound. Here such a variable is moved to its bound at once, in one evaluation. The variable stays
there if the likelihood does not fall, and is released if the likelihood rises inwards at the maximum of the other
variables.
"""

import math
from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from kalman.learning.key_fits import ARRIVED, FitOutcome, compute_expected_gain, describe_missing_gain
from kalman.learning.scoring import (
    FALL,
    FLAT,
    Maximum,
    Point,
    Search,
    invert_to_covariance,
    is_finite,
    search,
    select_known,
)
from kalman.types import Array

JUMP = 12.0
"""Step from a flat place to a bound, in free numbers: a factor of 160,000 leaves no visible effect."""
GONE, VISIBLE, UNSEEN, ROUNDED = 1e-14, 1e-12, 1e-16, 1e-17
"""Limits on the information about a variance's logarithm. Below GONE the variance may be zero. A variance below UNSEEN
is raised to VISIBLE, where gradient and information are usable. Below ROUNDED it is rounding."""
RELEASES = 8
"""Maximum number of moves to bounds and releases from them."""
WAY = 4
"""Number of upward jumps from a flat place after which the flat place counts as endless."""
SCALINGS = 4
"""Maximum number of steps along the scale of the noise."""


class Variables(NamedTuple):
    """The properties of p free numbers theta.

    names  name of each number's entry, such as R[1][0]
    limits (p,) largest step of each number, infinite for a number with a unit
    scale  change (p,) with the logarithm of all learned noise; measurements: components of a row
    low    lower bound of each, None without a bound; high: upper bound
    """

    names: tuple[str, ...]
    limits: Array
    scale: Array
    measurements: int
    low: tuple[str | None, ...]
    high: tuple[str | None, ...]

    @property
    def power(self) -> Array:
        """The variance of each number is exp(power * theta) (p,); 0 where it is not a variance."""
        return np.where(self.scale > 0.0, 1.0 / np.where(self.scale > 0.0, self.scale, 1.0), 0.0)


def search_within(start: Point, variables: Variables, max_iterations: int) -> Search:
    """Search the maximum from `start`, a finite point, at first along the scale of the noise.

    The variables that ended at a bound are `held` in the result.
    """
    point = yield from fit_scale(start, variables.scale, variables.measurements)
    point = yield from _raise_hidden(point, variables.power)
    steps = 0
    found = Maximum(point, 0, np.zeros(len(variables.names), np.int8), None)
    settled = np.zeros(len(variables.names), bool)
    for _ in range(RELEASES):
        found = yield from search(
            found.point, variables.limits, variables.power, max_iterations - steps, found.held
        )
        steps += found.iterations
        point = yield from _raise_hidden(found.point, variables.power)
        found = found._replace(point=point, iterations=steps)
        if found.problem is not None or steps >= max_iterations:
            return found
        before = found
        found = yield from _release_variable(found, variables, start.used)
        if found is before:
            found = yield from _move_to_bounds(found, variables, settled, start.used)
        if found is before:
            return found
    return found._replace(problem=f"it went to and from bounds {RELEASES} times")


def fit_scale(point: Point, scale: Array, measurements: int) -> Generator[Array, Point, Point]:
    """Return the point with all learned noise multiplied by the factor that fits the rows. This is scoring in the
    factor itself. Where all noise is learned and the start is diffuse, the factor is the mean squared standardised
    innovation, so that one step corrects a unit wrong by any power of ten.
    """
    for _ in range(SCALINGS):
        # where innovations are huge, rounding hides their differences
        known = min(float(scale @ point.information @ scale), 0.5 * point.used * measurements)
        if not known > 0.0:
            break
        shift = math.log(max(1.0 + float(scale @ point.gradient) / known, 1e-8))
        if abs(shift) < 1.0:
            break
        tried = yield point.theta + shift * scale
        if not (is_finite(tried) and tried.used >= point.used and tried.value > point.value):
            break
        point = tried
    return point


def _raise_hidden(point: Point, power: Array) -> Generator[Array, Point, Point]:
    """Raise the variances that rounding hides, unless the likelihood falls."""
    for _ in range(SCALINGS):
        known = np.diag(point.information)
        hidden = (power > 0.0) & (known < UNSEEN)
        if not hidden.any():
            break
        up = 0.5 * np.log(VISIBLE / np.maximum(known, ROUNDED)) / np.maximum(power, 1.0)
        tried = yield point.theta + np.where(hidden, up, 0.0)
        if not (is_finite(tried) and tried.used >= point.used and tried.value > point.value - FALL):
            break
        point = tried
    return point


def _move_to_bounds(
    found: Maximum, variables: Variables, settled: np.ndarray, used: int
) -> Generator[Array, Point, Maximum]:
    """Return the maximum with the flat variables at their bounds, or a better point found on the way. If both
    directions lose likelihood, the flat variable is at its maximum and counts as settled.
    """
    for i in range(len(variables.names)):
        point = found.point
        known = float(point.information[i, i])
        if found.held[i] or settled[i] or not np.isfinite(variables.limits[i]) or known >= FLAT:
            continue
        slope = 1 if point.gradient[i] > 0.0 else -1
        for side in (slope, -slope):
            tried, end = yield from _follow_flat_way(
                point, i, side * _compute_jump(known, variables.power[i]), used
            )
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


def _compute_jump(known: float, power: float) -> float:
    """Return the distance from a flat place to a place where the variable has no visible effect."""
    return 0.5 * math.log(max(known, GONE) / GONE) / power if power > 0.0 else JUMP


def _follow_flat_way(
    point: Point, i: int, jump: float, used: int
) -> Generator[Array, Point, tuple[Point, str]]:
    """Go from a flat place to a bound of variable i; return the last point and its kind: bound, better or worse.
    Downwards one step is enough to remove the effect; upwards the flat place may end.
    """
    best = point
    for _ in range(1 if jump < 0.0 else WAY):
        moved = best.theta.copy()
        moved[i] += jump
        tried = yield moved
        if not is_finite(tried) or tried.used < used or tried.value < point.value - FALL:
            return best, "worse"
        if tried.value > point.value + FALL and tried.information[i, i] >= FLAT:
            return tried, "better"
        best = tried
    return best, "bound"


def _release_variable(found: Maximum, variables: Variables, used: int) -> Generator[Array, Point, Maximum]:
    """Release the most promising variable from its bound and return the new maximum, if likelihood is gained. At a
    bound, gradient and information by the logarithm are tiny, but scoring in the variance itself keeps its step. If the
    step is too long, a shorter one is tried.
    """
    point = found.point
    known = np.maximum(np.diag(point.information), ROUNDED)
    low = (found.held == 0) & (variables.power > 0.0) & (known < FLAT)
    side = np.where(low, -1, found.held)
    inward = np.where(side * point.gradient < 0.0, np.abs(point.gradient), 0.0)
    i = int(np.argmax(inward**2 / known))
    if inward[i] ** 2 / known[i] < ARRIVED:  # half of a gain that would not count as converged
        return found
    power = variables.power[i]
    way = math.log1p(power * inward[i] / known[i]) / power if power > 0.0 else JUMP
    held = found.held.copy()
    held[i] = 0
    for share in (1.0, 0.8, 0.6):
        moved = point.theta.copy()
        moved[i] -= side[i] * share * way
        tried = yield moved
        if is_finite(tried) and tried.used >= used and tried.value > point.value:
            return found._replace(point=tried, held=held)
    return found


def search_outcome(found: Maximum, variables: Variables) -> tuple[FitOutcome, str | None]:
    """Return how a search ended, and the reason if it did not end inside the bounds."""
    if found.problem is not None:
        return FitOutcome.FAILED, found.problem
    point = found.point
    held, known = found.held[:, None], point.information[:, :, None]
    gain = float(compute_expected_gain(point.gradient[:, None], known, held, variables.power)[0])
    if not gain < ARRIVED:
        return FitOutcome.FAILED, describe_missing_gain(gain)
    ends = _describe_ends(variables, found.held)
    return (FitOutcome.AT_BOUND, ", ".join(ends)) if ends else (FitOutcome.CONVERGED, None)


def compute_free_covariance(point: Point, held: np.ndarray) -> Array:
    """Return the covariance (p, p) of the free variables, given the others; NaN for variables at a bound."""
    free = held == 0
    return np.where(np.outer(free, free), invert_to_covariance(select_known(point, held)), math.nan)


def _describe_ends(variables: Variables, held: np.ndarray) -> list[str]:
    """Return a phrase for each variable at a bound."""
    return [
        f"{name} {variables.low[i] if side < 0 else variables.high[i]}"
        for i, (name, side) in enumerate(zip(variables.names, held.tolist(), strict=True))
        if side
    ]
