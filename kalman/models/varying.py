"""A named structure with fields from columns, so that each row may have another variance, rate, mean or period."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kalman.linalg.entries import Entry
from kalman.models.columns import Column, parse_cell, resolve
from kalman.models.structure import Around, Parameter, Structure, Transition, Values
from kalman.types import Array, ModelError

PLACE = 1.0
"""Placeholder for the value of a column while the structure is parsed."""


@dataclass(frozen=True)
class Varying(Around):
    """A structure with fields that take the value of a control column in each row."""

    cells: tuple[tuple[str, Column], ...]

    @classmethod
    def of(
        cls, kind: type[Structure], field: str, definition: Mapping[str, Any], controls: Sequence[str]
    ) -> Self:
        """Return a structure of the class `kind` with columns in its fields. Raises ModelError."""
        texts = named_columns(definition)
        try:
            found = kind.parse(field, {**definition, **dict.fromkeys(texts, PLACE)}, controls)
        except ModelError as error:
            name = error.field.removeprefix(f"{field}.")
            if name not in texts or name not in getattr(kind, "__dataclass_fields__", {}):
                raise
            problem = f"{texts[name]!r} names a column, and this is the same for all rows"
            raise ModelError(error.field, problem, "write a number") from error
        numbers = [p.name for p in found.parameters if p.kind != "covariance"]
        cells: list[tuple[str, Column]] = []
        for name, text in texts.items():
            if name not in numbers:
                problem = f"{text!r} names a column, and this is the same for all rows"
                remedy = f"write a number; from columns come {', '.join(numbers)}"
                raise ModelError(f"{field}.{name}", problem, remedy)
            found_cell = parse_cell(f"{field}.{name}", text, controls)
            assert isinstance(found_cell, Column)
            cells.append((name, found_cell))
        return cls(found, tuple(cells))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        own = dict(self.cells)
        return tuple(p._replace(value=(own[p.name],)) if p.name in own else p for p in self.inner.parameters)

    def _resolve_values(self, u: Sequence[Entry], values: Values) -> Values:
        return {**values, **{name: resolve(values[name], u) for name, _ in self.cells}}

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        return self.inner.transition(dt, u, self._resolve_values(u, values))

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        return self.inner.tangents(name, dt, u, self._resolve_values(u, values))

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        """Return entries that are zero or more where variances are not negative and rates and periods are positive."""
        kinds = {p.name: p.kind for p in self.inner.parameters}
        guards = list(self.inner.guards(u))
        for name, column in self.cells:
            (value,) = resolve([column], u)
            if kinds[name] == "positive":
                zero_too = name.endswith("variance")
                guards.append(value if zero_too else np.where(np.greater(value, 0.0), value, -1.0))
        return guards


def named_columns(definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a named structure whose values are texts, except `kind` and `name`."""
    return {
        name: value
        for name, value in definition.items()
        if isinstance(value, str) and name not in ("kind", "name")
    }
