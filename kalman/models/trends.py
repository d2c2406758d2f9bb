"""Structures of levels, slopes and motion in closed form, exact for any dt: steps of a and b equal a step of a + b."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from kalman.linalg.entries import Entry, plus, times
from kalman.models import checks
from kalman.models.structure import (
    Parameter,
    Plain,
    Transition,
    Values,
    block_diagonal,
    parse_variance,
    with_noise,
)
from kalman.types import Array


@dataclass(frozen=True)
class RandomWalk(Plain):
    """A level without direction: dx = dW, whose variance grows by `variance` per unit of time."""

    variance: float
    size = 1

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "variance"))
        return cls(parse_variance(field, definition, "variance"))

    @property
    def observes(self) -> checks.Numbers:
        return ((1.0,),)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("variance", "positive", (self.variance,)),)

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        return Transition([[1.0]], [times(values["variance"][0], dt)], [0.0])

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        return [Transition([[0.0]], [dt], [0.0])]


@dataclass(frozen=True)
class LocalLinearTrend(Plain):
    """A level that drifts along a slope, which drifts too: dx = s dt + dW1, ds = dW2.

    The model is in continuous time, so it is exact for any dt. The discrete model of textbooks (Durbin and Koopman,
    section 3.2) has no slope noise in the level within a step; use the kind `explicit` for the discrete model.
    """

    level_variance: float
    slope_variance: float
    size = 2

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "level_variance", "slope_variance"))
        return cls(
            parse_variance(field, definition, "level_variance"),
            parse_variance(field, definition, "slope_variance"),
        )

    @property
    def observes(self) -> checks.Numbers:
        return ((1.0, 0.0),)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (
            Parameter("level_variance", "positive", (self.level_variance,)),
            Parameter("slope_variance", "positive", (self.slope_variance,)),
        )

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        level = times(values["level_variance"][0], dt)
        slope = [times(values["slope_variance"][0], a) for a in compute_integrated_noise(dt)]
        return Transition([[1.0, dt], [0.0, 1.0]], [plus(level, slope[0]), *slope[1:]], [0.0, 0.0])

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        still = [[0.0, 0.0], [0.0, 0.0]]
        return [
            Transition(
                still,
                [dt, 0.0, 0.0] if name == "level_variance" else compute_integrated_noise(dt),
                [0.0, 0.0],
            )
        ]


@dataclass(frozen=True)
class Motion(Plain, ABC):
    """A position and its derivatives, one dimension after another; white noise drives the last derivative.

    variance: power of the noise, which is the variance of the last derivative's change per unit of time
    noise: name of the field with this variance
    """

    variance: float
    dimensions: int = 1
    order: ClassVar[int]
    noise: ClassVar[str]

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", cls.noise, "dimensions"))
        dimensions = checks.parse_integer(f"{field}.dimensions", definition.get("dimensions", 1), 1, 3)
        return cls(parse_variance(field, definition, cls.noise), dimensions)

    @property
    def size(self) -> int:
        return self.order * self.dimensions

    @property
    def observes(self) -> checks.Numbers:
        positions = [self.order * dimension for dimension in range(self.dimensions)]
        return tuple(tuple(float(column == place) for column in range(self.size)) for place in positions)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter(self.noise, "positive", (self.variance,)),)

    @staticmethod
    @abstractmethod
    def moved(dt: Array) -> list[list[Entry]]:
        """Return F of one dimension."""

    @staticmethod
    @abstractmethod
    def driven(dt: Array) -> list[Entry]:
        """Return the packed Q of one dimension for a noise of unit power."""

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        Q = [times(values[self.noise][0], a) for a in self.driven(dt)]
        one = Transition(self.moved(dt), Q, [0.0] * self.order)
        return block_diagonal([one] * self.dimensions)

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        return [block_diagonal([with_noise(self.driven(dt), self.order)] * self.dimensions)]


class ConstantVelocity(Motion):
    """Position and velocity, one dimension after another, with white-noise acceleration: dv = dW.

    References: Bar-Shalom, Li and Kirubarajan (2001), section 6.2.2.
    """

    order, noise = 2, "acceleration_variance"

    @staticmethod
    def moved(dt: Array) -> list[list[Entry]]:
        return [[1.0, dt], [0.0, 1.0]]

    @staticmethod
    def driven(dt: Array) -> list[Entry]:
        return compute_integrated_noise(dt)


@dataclass(frozen=True)
class OrnsteinUhlenbeck(Plain):
    """A value that returns to its mean: dx = rate (mean - x) dt + dW; `variance` is the stationary variance of x."""

    rate: float
    variance: float
    mean: float = 0.0
    size = 1

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "rate", "variance", "mean"))
        return cls(
            checks.parse_positive(f"{field}.rate", checks.require_key(field, definition, "rate")),
            parse_variance(field, definition, "variance"),
            checks.parse_number(f"{field}.mean", definition.get("mean", 0.0)),
        )

    @property
    def observes(self) -> checks.Numbers:
        return ((1.0,),)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (
            Parameter("rate", "positive", (self.rate,)),
            Parameter("variance", "positive", (self.variance,)),
            Parameter("mean", "real", (self.mean,)),
        )

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        rate, variance, mean = (values[name][0] for name in ("rate", "variance", "mean"))
        kept = np.exp(-(rate * dt))
        spread = -np.expm1(-2.0 * (rate * dt))  # 1 - exp(-2 rate dt), accurate also for a small dt
        return Transition([[kept]], [times(variance, spread)], [times(mean, -np.expm1(-(rate * dt)))])

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        rate, variance, mean = (values[name][0] for name in ("rate", "variance", "mean"))
        if name == "variance":
            return [Transition([[0.0]], [-np.expm1(-2.0 * (rate * dt))], [0.0])]
        if name == "mean":
            return [Transition([[0.0]], [0.0], [-np.expm1(-(rate * dt))])]
        slope = dt * np.exp(-(rate * dt))
        return [
            Transition(
                [[-slope]], [times(variance, 2.0 * dt * np.exp(-2.0 * (rate * dt)))], [times(mean, slope)]
            )
        ]


def compute_integrated_noise(dt: Array) -> list[Entry]:
    """Return the packed covariance of an integrated Wiener process and the Wiener process, of unit variance."""
    half = 0.5 * (dt * dt)
    return [half * dt * (2.0 / 3.0), half, dt]


class ConstantAcceleration(Motion):
    """Position, velocity and acceleration, one dimension after another, with white-noise jerk: da = dW.

    References: Bar-Shalom, Li and Kirubarajan (2001), section 6.2.3.
    """

    order, noise = 3, "jerk_variance"

    @staticmethod
    def moved(dt: Array) -> list[list[Entry]]:
        return [[1.0, dt, 0.5 * (dt * dt)], [0.0, 1.0, dt], [0.0, 0.0, 1.0]]

    @staticmethod
    def driven(dt: Array) -> list[Entry]:
        return compute_twice_integrated_noise(dt)


def compute_twice_integrated_noise(dt: Array) -> list[Entry]:
    """Return the packed covariance of the double integral, the integral, and the Wiener process, of unit variance."""
    square = dt * dt
    cube = square * dt
    return [cube * square / 20.0, square * square / 8.0, cube / 3.0, cube / 6.0, 0.5 * square, dt]
