"""Regressions, whose states are coefficients and whose regressors come from columns; shared by RLS, LMS and NLMS."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kalman.models import checks, columns, definition
from kalman.models.definition import Definition
from kalman.types import ModelError


class Regression(NamedTuple):
    """y = H b + offset; states: names of the coefficients b; the entries of H may come from the controls."""

    states: tuple[str, ...]
    measurements: int
    controls: int
    H: columns.Cells
    offset: tuple[columns.Cell, ...]


def parse_regression(
    given: Definition, kind: str, allowed: Sequence[str] = (), used: set[int] | None = None
) -> Regression:
    """Return the regression of a definition. Raises ModelError.

    Without H, the regressors are the control columns in their order; a constant regressor 1.0 comes first if there is
    one more state than columns.
    allowed: fields that the observation may have besides H and offset; used: controls that have another use.
    """
    if given.get("process") is not None:
        raise ModelError("process", f"{kind} has none: its coefficients are not moved", "remove it")
    states = definition.parse_names("states", given.get("states"))
    measurements = len(definition.parse_names("measurement", given.get("measurement")))
    controls = definition.parse_names("control", given.get("control") or (), empty=True)
    observation = given.get("observation") or {}
    checks.check_keys("observation", observation, ("H", "offset", *allowed))
    H = observation.get("H")
    if H is None:
        row = [*([1.0] if len(states) == len(controls) + 1 else []), *controls]
        if len(row) != len(states) or measurements != 1:
            raise ModelError(
                "observation.H",
                f"is missing, and {len(controls)} control columns are not {len(states)} regressors",
                "name a state for each control column (and one before them for the intercept), or write H",
            )
        H = [row]
    cells = columns.parse_matrix_cells("observation.H", H, measurements, len(states), controls)
    offset = observation.get("offset") or [0.0] * measurements
    shifts = columns.parse_vector_cells("observation.offset", offset, measurements, controls)
    definition.check_controls(controls, columns.find_columns([cells, shifts]) | (used or set()))
    return Regression(states, measurements, len(controls), cells, shifts)


def parse_section(given: Definition, kind: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the options in the section named after the filter. Raises ModelError."""
    found = given.get(kind)
    checks.check_keys(kind, {} if found is None else found, known)
    return {name: value for name, value in (found or {}).items() if value is not None}
