"""Measured components that are angles: known up to whole turns, so innovations are taken within half a turn.

`observation.wrap` gives the period of such components: bearings in radians have 2 pi, in degrees 360.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kalman.linalg.entries import Entry, Vector, minus, times
from kalman.models import checks
from kalman.types import Array, ModelError

UNITS = {"radians": 2.0 * math.pi, "degrees": 360.0}
"""Periods by name."""


def parse_wrap(definition: Any, measurements: Sequence[str]) -> tuple[float, ...]:
    """Return the period of each measured component of a section `observation`, 0 without one; () without any.

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
    """Return an angle moved by whole periods to (centre - period / 2, centre + period / 2]; 0: unchanged."""
    if period == 0.0:
        return value
    turns = np.ceil(np.divide(minus(value, centre), period) - 0.5)
    return minus(value, times(period, turns))


def turn_angles(periods: Sequence[float], values: Vector, centres: Vector) -> list[Entry]:
    """Return each component by `beside`; periods () for none."""
    if not periods:
        return list(values)
    return [turn_angle(a, b, period) for a, b, period in zip(values, centres, periods, strict=True)]


def turn_differences(periods: Sequence[float], differences: Array) -> Array:
    """Return differences (m, ..., K) of measurements, with angles brought within half a period."""
    if not periods:
        return differences
    return np.array([turn_angle(a, 0.0, period) for a, period in zip(differences, periods, strict=True)])
