"""Process structures: how the state moves over a time dt, in closed form.

A structure gives F(dt), Q(dt) and the offset c(dt), their derivatives by the parameters, and the measurement matrix.
Kinds that use time are exact for any dt, because a step of a followed by a step of b equals a step of a + b. To add a
kind, write such a class and add it to STRUCTURES.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kalman.linalg.entries import Entry, times
from kalman.linalg.packing import packed_size
from kalman.models import checks, columns
from kalman.models.columns import Cell, Cells, Column, resolve, resolve_matrix
from kalman.models.continuous import Continuous
from kalman.models.damped_trend import DampedTrend
from kalman.models.inputs import compute_input, noise_scale, parse_inputs
from kalman.models.learned_entries import insert_entries, parse_entry_name
from kalman.models.seasonal import SeasonalDummy, SeasonalTrigonometric
from kalman.models.structure import (
    Around,
    Parameter,
    Plain,
    Structure,
    Transition,
    Values,
    block_diagonal,
    build_zero_transition,
    with_noise,
)
from kalman.models.trends import (
    ConstantAcceleration,
    ConstantVelocity,
    LocalLinearTrend,
    OrnsteinUhlenbeck,
    RandomWalk,
)
from kalman.models.varying import Varying, named_columns
from kalman.types import Array, ModelError

__all__ = ["STRUCTURES", "Parameter", "Structure", "Values", "parse"]


@dataclass(frozen=True)
class Explicit(Plain):
    """x' = F x + B u + offset + w, w ~ N(0, Q), one step a row for any time between the rows.

    entries: the entries of F that groups or keys learn, which are therefore parameters.
    """

    F: Cells
    Q: tuple[Cell, ...]
    B: Cells | None = None
    offset: tuple[Cell, ...] | None = None
    entries: tuple[Parameter, ...] = ()

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "F", "Q", "B", "offset"))
        F = columns.parse_matrix_cells(
            f"{field}.F", checks.require_key(field, definition, "F"), names=controls
        )
        n = len(F)
        F = columns.parse_matrix_cells(f"{field}.F", definition["F"], n, n, controls)
        Q = columns.parse_covariance_cells(
            f"{field}.Q", checks.require_key(field, definition, "Q"), n, controls
        )
        B, offset = parse_inputs(field, definition, n, controls)
        return cls(F, Q, B, offset)

    @property
    def size(self) -> int:
        return len(self.F)

    @property
    def controlled(self) -> bool:
        return self.B is not None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("Q", "covariance", self.Q), *self.entries)

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        c = compute_input(self.B, self.offset, self.size, u)
        return Transition(insert_entries("F", resolve_matrix(self.F, u), values), resolve(values["Q"], u), c)

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        entry = parse_entry_name(name)
        if entry is not None:
            slope = [[float((i, j) == entry[1:]) for j in range(self.size)] for i in range(self.size)]
            return [build_zero_transition(self.size)._replace(F=slope)]
        size = packed_size(self.size)
        return [with_noise([float(i == e) for i in range(size)], self.size) for e in range(size)]

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        return [columns.compute_lowest_pivot(resolve(self.Q, u))] if columns.find_columns(self.Q) else []


@dataclass(frozen=True)
class Sum:
    """A process of independent parts; by default, the measurement is the sum of the parts' observations.

    A parameter of a part is called `<name>.<parameter>`; the default name of a part is its kind.
    """

    names: tuple[str, ...]
    parts: tuple[Structure, ...]

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "parts"))
        parts = checks.require_key(field, definition, "parts")
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

    def _own(self, name: str, part: Structure, values: Values) -> dict[str, Sequence[Any]]:
        return {parameter.name: values[f"{name}.{parameter.name}"] for parameter in part.parameters}

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        pairs = zip(self.names, self.parts, strict=True)
        return block_diagonal([part.transition(dt, u, self._own(name, part, values)) for name, part in pairs])

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        which, _, inner = next(
            (i, own, name.removeprefix(f"{own}."))
            for i, (own, part) in enumerate(zip(self.names, self.parts, strict=True))
            if any(f"{own}.{parameter.name}" == name for parameter in part.parameters)
        )
        part = self.parts[which]
        still = [build_zero_transition(other.size) for other in self.parts]
        moved = part.tangents(inner, dt, u, self._own(self.names[which], part, values))
        return [block_diagonal([*still[:which], tangent, *still[which + 1 :]]) for tangent in moved]

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        return [guard for part in self.parts for guard in part.guards(u)]


@dataclass(frozen=True)
class Scaled(Around):
    """A structure whose noise covariance is multiplied by `scale`, a number or a column."""

    scale: Cell

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        plain = {name: value for name, value in definition.items() if name != "noise_scale"}
        return cls(parse(field, plain, controls), noise_scale(field, definition, controls))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.inner.parameters

    def _scale_noise(self, transition: Transition, u: Sequence[Entry]) -> Transition:
        (scale,) = resolve([self.scale], u)
        return transition._replace(Q=[times(scale, q) for q in transition.Q])

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        return self._scale_noise(self.inner.transition(dt, u, values), u)

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        return [self._scale_noise(tangent, u) for tangent in self.inner.tangents(name, dt, u, values)]

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        own = resolve([self.scale], u) if isinstance(self.scale, Column) else []
        return [*own, *self.inner.guards(u)]


STRUCTURES: dict[str, type[Structure]] = {
    "random_walk": RandomWalk,
    "local_linear_trend": LocalLinearTrend,
    "damped_trend": DampedTrend,
    "constant_velocity": ConstantVelocity,
    "constant_acceleration": ConstantAcceleration,
    "ornstein_uhlenbeck": OrnsteinUhlenbeck,
    "seasonal_dummy": SeasonalDummy,
    "seasonal_trigonometric": SeasonalTrigonometric,
    "continuous": Continuous,
    "explicit": Explicit,
    "sum": Sum,
}


def parse(field: str, definition: Any, controls: Sequence[str] = ()) -> Structure:
    """Build the structure of the kind that a definition names; controls: the names of u. Raises ModelError."""
    kinds = ", ".join(STRUCTURES)
    if not isinstance(definition, Mapping) or "kind" not in definition:
        raise ModelError(f"{field}.kind", "is missing", f"choose one of {kinds}")
    kind = definition["kind"]
    if kind == "function":
        raise ModelError(
            f"{field}.kind",
            "this filter takes no function",
            f"choose filter: extended, unscented or cubature, or one of {kinds}",
        )
    if not isinstance(kind, str) or kind not in STRUCTURES:
        raise ModelError(f"{field}.kind", f"{kind!r} is not a process structure", f"choose one of {kinds}")
    if definition.get("noise_scale") is not None:
        return Scaled.parse(field, definition, controls)
    if named_columns(definition) and kind not in ("explicit", "continuous", "sum"):
        varying: Any = Varying.of(STRUCTURES[kind], field, definition, controls)
        return varying  # a structure without `parse`, which belongs to the kind
    return STRUCTURES[kind].parse(field, definition, controls)
