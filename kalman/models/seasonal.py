"""Seasonal structures: dummies that advance by one season a row, and waves that rotate with time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kalman.linalg.entries import Entry, times
from kalman.linalg.packing import packed_size
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

LONGEST = 366


@dataclass(frozen=True)
class SeasonalDummy(Plain):
    """Seasonal effects whose sum is noise: g' = -(g_1 + ... + g_{s-1}) + w, w ~ N(0, variance), one step a row.

    The states are the effects of this row and of the s - 2 rows before it. The time between rows has no influence:
    every row is the next season, so a season without a measurement needs a row with missing values.
    References: Harvey (1989), equation 2.3.39; Durbin and Koopman (2012), section 3.2.2.
    """

    period: int
    variance: float

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "period", "variance"))
        period = checks.require_key(field, definition, "period")
        return cls(
            checks.parse_integer(f"{field}.period", period, 2, LONGEST),
            parse_variance(field, definition, "variance"),
        )

    @property
    def size(self) -> int:
        return self.period - 1

    @property
    def observes(self) -> checks.Numbers:
        return (tuple(float(i == 0) for i in range(self.size)),)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("variance", "positive", (self.variance,)),)

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        n = self.size
        F = [[-1.0] * n, *([float(j == i) for j in range(n)] for i in range(n - 1))]
        return Transition(F, [values["variance"][0], *[0.0] * (packed_size(n) - 1)], [0.0] * n)

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        n = self.size
        return [with_noise([1.0, *[0.0] * (packed_size(n) - 1)], n)]


@dataclass(frozen=True)
class SeasonalTrigonometric(Plain):
    """Waves of a period and its fractions, each a pair of states that rotates with time; exact for any dt.

    Harmonic j rotates by 2 pi j dt / period, and the variance of each of its two states grows by `variance` per unit of
    time. The two states of a harmonic are the wave now, and the wave a quarter of its period later.
    References: Harvey (1989), equation 2.3.50, in continuous time as in his section 9.2.
    """

    period: float
    variance: float
    harmonics: int

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "period", "variance", "harmonics"))
        return cls(
            checks.parse_positive(f"{field}.period", checks.require_key(field, definition, "period")),
            parse_variance(field, definition, "variance"),
            checks.parse_integer(f"{field}.harmonics", definition.get("harmonics", 1), 1, LONGEST // 2),
        )

    @property
    def size(self) -> int:
        return 2 * self.harmonics

    @property
    def observes(self) -> checks.Numbers:
        return ((1.0, 0.0) * self.harmonics,)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (
            Parameter("period", "positive", (self.period,)),
            Parameter("variance", "positive", (self.variance,)),
        )

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        noise = times(values["variance"][0], dt)
        parts: list[Transition] = []
        for angle in self._compute_angles(dt, values):
            cos, sin = np.cos(angle), np.sin(angle)
            parts.append(Transition([[cos, sin], [-sin, cos]], [noise, 0.0, noise], [0.0, 0.0]))
        return block_diagonal(parts)

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        if name == "variance":
            return [block_diagonal([with_noise([dt, 0.0, dt], 2)] * self.harmonics)]
        parts: list[Transition] = []
        period = values["period"][0]
        for j, angle in enumerate(self._compute_angles(dt, values), start=1):
            slower = np.divide(-2.0 * math.pi * j * dt, period * period)
            cos, sin = slower * np.cos(angle), slower * np.sin(angle)
            parts.append(Transition([[-sin, cos], [-cos, -sin]], [0.0] * 3, [0.0, 0.0]))
        return [block_diagonal(parts)]

    def _compute_angles(self, dt: Array, values: Values) -> list[Entry]:
        turns = np.divide(dt, values["period"][0])
        turned = np.subtract(
            turns, np.floor(turns)
        )  # subtract whole periods first, so that they cause no rounding errors
        return [2.0 * math.pi * j * turned for j in range(1, self.harmonics + 1)]
