"""Measured components that are angles, whose values are equal up to whole turns.

Innovations of angles therefore lie within half a turn. `observation.wrap` gives the period of each angle: 2 pi for
bearings in radians, 360 for bearings in degrees.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kalman.linalg.entries import Entry, Vector, minus, times
from kalman.models import checks
from kalman.types import Array, ModelError

UNITS = {"radians": 2.0 * math.pi, "degrees": 360.0}
"""Period of an angle, by the name of its unit."""


def parse_wrap(definition: Any, measurements: Sequence[str]) -> tuple[float, ...]:
    """Return the period of each measured component, 0 for a component that is not an angle; () without angles.

    Raises ModelError.
    """
    written = definition.get("wrap") if isinstance(definition, Mapping) else None
    if written is None:
        return ()
    field = "observation.wrap"
    if not isinstance(written, Mapping) or not written:
        example = f"{measurements[0]}: radians"
        raise ModelError(
            field, f"{written!r} names no measured component", f"write one, such as {{{example}}}"
        )
    for name in written:
        if name not in measurements:
            known = ", ".join(measurements)
            raise ModelError(f"{field}.{name}", "is not a measured component", f"choose from {known}")
    return tuple(
        _parse_period(f"{field}.{name}", written[name]) if name in written else 0.0 for name in measurements
    )


def _parse_period(field: str, value: Any) -> float:
    if isinstance(value, str) and value in UNITS:
        return UNITS[value]
    if isinstance(value, str):
        raise ModelError(field, f"{value!r} is no period", f"write {' or '.join(UNITS)}, or a number")
    return checks.parse_positive(field, value)


def turn_angle(value: Entry, centre: Entry, period: float) -> Entry:
    """Return an angle moved by whole periods to (centre - period / 2, centre + period / 2]; period 0: no change."""
    if period == 0.0:
        return value
    turns = np.ceil(np.divide(minus(value, centre), period) - 0.5)
    return minus(value, times(period, turns))


def turn_angles(periods: Sequence[float], values: Vector, centres: Vector) -> list[Entry]:
    """Return the components, each moved by `turn_angle`; periods: () if no component is an angle."""
    if not periods:
        return list(values)
    return [turn_angle(a, b, period) for a, b, period in zip(values, centres, periods, strict=True)]


def turn_differences(periods: Sequence[float], differences: Array) -> Array:
    """Return differences (m, ..., K) of measurements, with those of angles moved to within half a period of 0."""
    if not periods:
        return differences
    return np.array([turn_angle(a, 0.0, period) for a, period in zip(differences, periods, strict=True)])
