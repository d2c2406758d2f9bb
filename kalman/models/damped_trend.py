"""The damped trend in closed form: a level along a slope that decays to zero."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from kalman.linalg.entries import Entry, plus, times
from kalman.models import checks
from kalman.models.structure import Parameter, Plain, Transition, Values, parse_variance, with_noise
from kalman.types import Array

NEAR = 0.5
"""Below this value of damping * dt, closed forms lose digits to cancellation and are replaced by power series."""
TERMS = 20


@dataclass(frozen=True)
class DampedTrend(Plain):
    """A level that drifts along a slope that decays: dx = s dt + dW1, ds = -damping s dt + dW2.

    The slope halves in the time log(2) / damping, so that a forecast levels off. The variances are per unit of time, as
    in `local_linear_trend`, which is the limit without damping. This is the trend of Gardner and McKenzie (1985) in
    continuous time; their phi is exp(-damping dt).
    """

    level_variance: float
    slope_variance: float
    damping: float
    size = 2

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "level_variance", "slope_variance", "damping"))
        return cls(
            parse_variance(field, definition, "level_variance"),
            parse_variance(field, definition, "slope_variance"),
            checks.parse_positive(f"{field}.damping", checks.require_key(field, definition, "damping")),
        )

    @property
    def observes(self) -> checks.Numbers:
        return ((1.0, 0.0),)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (
            Parameter("level_variance", "positive", (self.level_variance,)),
            Parameter("slope_variance", "positive", (self.slope_variance,)),
            Parameter("damping", "positive", (self.damping,)),
        )

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        damping = values["damping"][0]
        F = [[1.0, dt * _compute_mean(damping * dt).value], [0.0, np.exp(-(damping * dt))]]
        slope = [times(values["slope_variance"][0], a) for a in _integrate_noise(damping, dt)]
        level = times(values["level_variance"][0], dt)
        return Transition(F, [plus(level, slope[0]), *slope[1:]], [0.0, 0.0])

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        damping = values["damping"][0]
        if name == "level_variance":
            return [with_noise([dt, 0.0, 0.0], 2)]
        if name == "slope_variance":
            return [with_noise(_integrate_noise(damping, dt), 2)]
        x, square = damping * dt, dt * dt
        one, two, area = _compute_mean(x), _compute_mean(2.0 * x), _compute_area(x)
        F = [[0.0, square * one.slope], [0.0, -(dt * np.exp(-x))]]
        by_damping = [
            square * square * area.slope,
            square * dt * one.value * one.slope,
            2.0 * square * two.slope,
        ]
        return [Transition(F, [times(values["slope_variance"][0], a) for a in by_damping], [0.0, 0.0])]


class Curve(NamedTuple):
    """A function and its derivative at x (K,)."""

    value: Array
    slope: Array


def _integrate_noise(damping: Entry, dt: Array) -> list[Entry]:
    """Return the packed covariance of level and slope after dt, from a slope noise of unit variance."""
    x = damping * dt
    one, two = _compute_mean(x).value, _compute_mean(2.0 * x).value
    square = dt * dt
    return [square * dt * _compute_area(x).value, 0.5 * square * (one * one), dt * two]


def _compute_mean(x: Entry) -> Curve:
    """Return (1 - exp(-x)) / x, the mean of exp(-s) over 0 < s < x."""
    far = np.maximum(x, NEAR)
    gone = -np.expm1(-far)
    return _stitch_series(
        x,
        [(-1.0) ** k / math.factorial(k + 1) for k in range(TERMS)],
        Curve(gone / far, (far * np.exp(-far) - gone) / (far * far)),
    )


def _compute_area(x: Entry) -> Curve:
    """Return (x - 2 (1 - exp(-x)) + (1 - exp(-2 x)) / 2) / x^3, the level's variance from slope noise of variance 1."""
    far = np.maximum(x, NEAR)
    gone = -np.expm1(-far)
    total = far - 2.0 * gone - 0.5 * np.expm1(-2.0 * far)
    cube = far * far * far
    return _stitch_series(
        x,
        [(-1.0) ** k * (2.0 - 2.0 ** (k - 1)) / math.factorial(k) for k in range(3, 3 + TERMS)],
        Curve(total / cube, (gone * gone - 3.0 * total / far) / cube),
    )


def _stitch_series(x: Entry, series: Sequence[float], far: Curve) -> Curve:
    """Return the value and derivative of the power series where x is near zero, and `far` elsewhere."""
    near = np.minimum(x, NEAR)
    value: Any = series[-1]
    slope: Any = (len(series) - 1) * series[-1]
    for k in reversed(range(len(series) - 1)):
        value = value * near + series[k]
        if k > 0:
            slope = slope * near + k * series[k]
    is_far = np.greater(x, NEAR)
    return Curve(np.where(is_far, far.value, value), np.where(is_far, far.slope, slope))
