"""Process structures: how the state moves in a time dt, in closed form.

A structure gives F(dt), Q(dt) and the offset c(dt), their derivatives by its parameters, and the measurement
matrix that goes with it. The kinds that use time are exact for any dt: moving a, then b, is moving a + b.
To add one, write such a class and put it into STRUCTURES.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from kalman import checks
from kalman.entries import Entry, dot, plus, times
from kalman.packing import packed_index, packed_size
from kalman.recursions import Transition
from kalman.types import Array, ModelError


class Parameter(NamedTuple):
    """A parameter that can be learned: its value as packed entries, and what keeps it valid.

    kind "positive" and "real" are one number; "covariance" is a packed lower triangle.
    """

    name: str
    kind: str
    value: tuple[float, ...]


Values = Mapping[str, Sequence[Entry]]
"""The packed entries of each parameter, by name."""


class Structure(Protocol):
    """What moves the state."""

    @property
    def size(self) -> int: ...
    @property
    def controlled(self) -> bool: ...
    @property
    def observes(self) -> checks.Numbers | None: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: int) -> Self:
        """Build it from a model definition. Raises ModelError."""
        ...

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        """Return F, Q, c of a step that takes dt (K,) under the control u."""
        ...

    def tangents(self, name: str, dt: Array, values: Values) -> list[Transition]:
        """Return the derivative of the transition by each packed entry of a parameter."""
        ...


@dataclass(frozen=True)
class RandomWalk:
    """A level without direction: dx = dW, of variance `variance` a unit of time."""

    variance: float
    size = 1
    controlled = False
    observes = ((1.0,),)

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: int) -> Self:
        checks.known(field, definition, ("kind", "name", "variance"))
        return cls(_variance(field, definition, "variance"))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("variance", "positive", (self.variance,)),)

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        return Transition([[1.0]], [times(values["variance"][0], dt)], [0.0])

    def tangents(self, name: str, dt: Array, values: Values) -> list[Transition]:
        return [Transition([[0.0]], [dt], [0.0])]


@dataclass(frozen=True)
class LocalLinearTrend:
    """A level that drifts along a slope that drifts: dx = s dt + dW1, ds = dW2.

    In continuous time, so that any dt is exact; the discrete model of the textbooks (Durbin and Koopman,
    section 3.2) has no slope noise in the level over one step, and is `explicit`.
    """

    level_variance: float
    slope_variance: float
    size = 2
    controlled = False
    observes = ((1.0, 0.0),)

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: int) -> Self:
        checks.known(field, definition, ("kind", "name", "level_variance", "slope_variance"))
        return cls(
            _variance(field, definition, "level_variance"), _variance(field, definition, "slope_variance")
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (
            Parameter("level_variance", "positive", (self.level_variance,)),
            Parameter("slope_variance", "positive", (self.slope_variance,)),
        )

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        level = times(values["level_variance"][0], dt)
        slope = [times(values["slope_variance"][0], a) for a in _integrated(dt)]
        return Transition([[1.0, dt], [0.0, 1.0]], [plus(level, slope[0]), *slope[1:]], [0.0, 0.0])

    def tangents(self, name: str, dt: Array, values: Values) -> list[Transition]:
        still = [[0.0, 0.0], [0.0, 0.0]]
        return [
            Transition(still, [dt, 0.0, 0.0] if name == "level_variance" else _integrated(dt), [0.0, 0.0])
        ]


@dataclass(frozen=True)
class ConstantVelocity:
    """Position and velocity, of each dimension in turn, under white-noise acceleration: dv = dW.

    `acceleration_variance` is the noise's power, the variance of the velocity's change in a unit of time.
    References: Bar-Shalom, Li and Kirubarajan (2001), section 6.2.2.
    """

    acceleration_variance: float
    dimensions: int = 1
    controlled = False

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: int) -> Self:
        checks.known(field, definition, ("kind", "name", "acceleration_variance", "dimensions"))
        dimensions = checks.whole(f"{field}.dimensions", definition.get("dimensions", 1), 1, 3)
        return cls(_variance(field, definition, "acceleration_variance"), dimensions)

    @property
    def size(self) -> int:
        return 2 * self.dimensions

    @property
    def observes(self) -> checks.Numbers:
        return tuple(
            tuple(float(column == 2 * row) for column in range(self.size)) for row in range(self.dimensions)
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("acceleration_variance", "positive", (self.acceleration_variance,)),)

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        one = [times(values["acceleration_variance"][0], a) for a in _integrated(dt)]
        return block_diagonal([Transition([[1.0, dt], [0.0, 1.0]], one, [0.0, 0.0])] * self.dimensions)

    def tangents(self, name: str, dt: Array, values: Values) -> list[Transition]:
        still = [[0.0, 0.0], [0.0, 0.0]]
        return [block_diagonal([Transition(still, _integrated(dt), [0.0, 0.0])] * self.dimensions)]


@dataclass(frozen=True)
class OrnsteinUhlenbeck:
    """A value drawn back to its mean: dx = rate (mean - x) dt + dW, with `variance` the stationary one."""

    rate: float
    variance: float
    mean: float = 0.0
    size = 1
    controlled = False
    observes = ((1.0,),)

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: int) -> Self:
        checks.known(field, definition, ("kind", "name", "rate", "variance", "mean"))
        return cls(
            checks.positive(f"{field}.rate", checks.needed(field, definition, "rate")),
            _variance(field, definition, "variance"),
            checks.number(f"{field}.mean", definition.get("mean", 0.0)),
        )

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
        spread = -np.expm1(-2.0 * (rate * dt))  # 1 - exp(-2 rate dt), right for small dt too
        return Transition([[kept]], [times(variance, spread)], [times(mean, -np.expm1(-(rate * dt)))])

    def tangents(self, name: str, dt: Array, values: Values) -> list[Transition]:
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


@dataclass(frozen=True)
class Explicit:
    """x' = F x + B u + w, w ~ N(0, Q): one step a row, whatever the time between the rows."""

    F: checks.Numbers
    Q: tuple[float, ...]
    B: checks.Numbers | None = None
    observes = None

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: int) -> Self:
        checks.known(field, definition, ("kind", "name", "F", "Q", "B"))
        F = checks.matrix(f"{field}.F", checks.needed(field, definition, "F"))
        n = len(F)
        F = checks.matrix(f"{field}.F", definition["F"], n, n)
        Q = checks.covariance(f"{field}.Q", checks.needed(field, definition, "Q"), n)
        if definition.get("B") is None:
            return cls(F, Q)
        if controls == 0:
            raise ModelError(
                f"{field}.B", "there is no control for it", "name the control columns, or remove B"
            )
        return cls(F, Q, checks.matrix(f"{field}.B", definition["B"], n, controls))

    @property
    def size(self) -> int:
        return len(self.F)

    @property
    def controlled(self) -> bool:
        return self.B is not None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("Q", "covariance", self.Q),)

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        offset = [0.0] * self.size if self.B is None else [dot(row, u) for row in self.B]
        return Transition(self.F, values["Q"], offset)

    def tangents(self, name: str, dt: Array, values: Values) -> list[Transition]:
        n = self.size
        still, rest = [[0.0] * n for _ in range(n)], [0.0] * n
        return [
            Transition(still, [float(i == e) for i in range(packed_size(n))], rest)
            for e in range(packed_size(n))
        ]


@dataclass(frozen=True)
class Sum:
    """Independent parts side by side; by default the measurement is the sum of what each part shows.

    A part's parameters are called `<name>.<parameter>`, its name being its kind unless it is given one.
    """

    names: tuple[str, ...]
    parts: tuple[Structure, ...]

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: int) -> Self:
        checks.known(field, definition, ("kind", "name", "parts"))
        parts = checks.needed(field, definition, "parts")
        if not isinstance(parts, (list, tuple)) or not parts:
            raise ModelError(
                f"{field}.parts", "it is not a list of structures", "list at least one, each with a kind"
            )
        built = tuple(parse(f"{field}.parts[{i}]", part, controls) for i, part in enumerate(parts))
        names = tuple(str(part.get("name", part["kind"])) for part in parts)
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ModelError(
                    f"{field}.parts[{i}].name", f"two parts are called {name}", "give each a name of its own"
                )
        return cls(names, built)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def controlled(self) -> bool:
        return any(part.controlled for part in self.parts)

    @property
    def observes(self) -> checks.Numbers | None:
        rows = [part.observes for part in self.parts]
        if any(row is None or len(row) != len(rows[0] or ()) for row in rows):
            return None
        return tuple(
            tuple(entry for part in rows if part is not None for entry in part[i])
            for i in range(len(rows[0] or ()))
        )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(
            parameter._replace(name=f"{name}.{parameter.name}")
            for name, part in zip(self.names, self.parts, strict=True)
            for parameter in part.parameters
        )

    def _own(self, name: str, part: Structure, values: Values) -> dict[str, Sequence[Entry]]:
        return {parameter.name: values[f"{name}.{parameter.name}"] for parameter in part.parameters}

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        pairs = zip(self.names, self.parts, strict=True)
        return block_diagonal([part.transition(dt, u, self._own(name, part, values)) for name, part in pairs])

    def tangents(self, name: str, dt: Array, values: Values) -> list[Transition]:
        which, _, inner = next(
            (i, own, name.removeprefix(f"{own}."))
            for i, (own, part) in enumerate(zip(self.names, self.parts, strict=True))
            if any(f"{own}.{parameter.name}" == name for parameter in part.parameters)
        )
        part = self.parts[which]
        quiet = [_quiet(other.size) for other in self.parts]
        moved = part.tangents(inner, dt, self._own(self.names[which], part, values))
        return [block_diagonal([*quiet[:which], tangent, *quiet[which + 1 :]]) for tangent in moved]


STRUCTURES: dict[str, type[Structure]] = {
    "random_walk": RandomWalk,
    "local_linear_trend": LocalLinearTrend,
    "constant_velocity": ConstantVelocity,
    "ornstein_uhlenbeck": OrnsteinUhlenbeck,
    "explicit": Explicit,
    "sum": Sum,
}


def parse(field: str, definition: Any, controls: int) -> Structure:
    """Build the structure that a definition's `kind` names. Raises ModelError."""
    kinds = ", ".join(STRUCTURES)
    if not isinstance(definition, Mapping) or "kind" not in definition:
        raise ModelError(f"{field}.kind", "is missing", f"choose one of {kinds}")
    kind = definition["kind"]
    if not isinstance(kind, str) or kind not in STRUCTURES:
        raise ModelError(f"{field}.kind", f"{kind!r} is not a process structure", f"choose one of {kinds}")
    return STRUCTURES[kind].parse(field, definition, controls)


def block_diagonal(parts: Sequence[Transition]) -> Transition:
    """Return the transition of independent parts side by side."""
    sizes = [len(part.c) for part in parts]
    n = sum(sizes)
    F: list[list[Entry]] = [[0.0] * n for _ in range(n)]
    Q: list[Entry] = [0.0] * packed_size(n)
    c: list[Entry] = []
    for part, size in zip(parts, sizes, strict=True):
        start = len(c)
        for i in range(size):
            for j in range(size):
                F[start + i][start + j] = part.F[i][j]
                if j <= i:
                    Q[packed_index(start + i, start + j)] = part.Q[packed_index(i, j)]
        c.extend(part.c)
    return Transition(F, Q, c)


def _quiet(n: int) -> Transition:
    return Transition([[0.0] * n for _ in range(n)], [0.0] * packed_size(n), [0.0] * n)


def _integrated(dt: Array) -> list[Entry]:
    """Return the packed covariance of an integrated Wiener process and its driver, of unit variance."""
    half = 0.5 * (dt * dt)
    return [half * dt * (2.0 / 3.0), half, dt]


def _variance(field: str, definition: Mapping[str, Any], name: str) -> float:
    return checks.positive(f"{field}.{name}", checks.needed(field, definition, name), zero=True)
