"""Find numbers that stand for a missing measurement, such as -999: frequent, and far outside all other values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.report import format_count

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST = 8
"""Minimum number of other values for a judgement."""
FEW_TIMES = 3
"""Minimum count of a number that programs do not commonly use for missing values."""
MOST = 0.3
"""Largest share of the values that such a number may have."""
USUAL_GAP, OTHER_GAP = 0.5, 3.0
"""Minimum distance from the other values, as a share of their range: for a commonly used mark, for another number."""
_NINES = re.compile(r"-?(?:9{2,}(?:[.]9+)?|9[.]9+|[78]{3,}(?:[.][78]+)?|6999|-?1e\+?(?:20|30|35|36|37|38))")
_LIMITS = (32767.0, -32768.0, 65535.0, 2147483647.0, -2147483648.0, 4294967295.0, 9.96921e36, 3.4028235e38)


class NumericColumn(NamedTuple):
    """Column as numbers.

    values (N,) numbers, NaN where missing
    absent texts in the column that mean missing
    marks  numbers that stand for missing values, with their counts
    """

    name: str
    values: Floats
    absent: tuple[str, ...]
    marks: Mapping[float, int] = MappingProxyType({})


def find_marks(measurements: Sequence[NumericColumn], group: Ints) -> tuple[list[NumericColumn], list[str]]:
    """Return measurements with all their marks, and notes on these.

    A spec's mark holds for all measurements, so a number that is a real value of another measurement is not a mark.

    Args:
        measurements: M columns of N values.
        group: (N,) number of each row's series.
    """
    found: list[NumericColumn] = []
    notes: list[str] = []
    for one in measurements:
        values, more = drop_marks(one.values, group)
        marks = {**one.marks, **more}
        known = values[np.isfinite(values)]
        for mark, count in list(marks.items()):
            other = next(
                (it.name for it in measurements if it is not one and (it.values == mark).any()), None
            )
            what = (
                f"{one.name}: {mark:.15g} in {format_count(count, 'row')} is far outside of the others, {known.min():g} to "
                f"{known.max():g}"
            )
            if other is None:
                notes.append(
                    f"{what}, and taken for missing; if it is measured, take it out of missing_values"
                )
            else:
                notes.append(
                    f"{what}; {other} has it too, so it stays: name one of them alone with --measurement"
                )
                del marks[mark]
        found.append(one._replace(values=values, marks=marks))
    return found, notes


def drop_marks(values: Floats, group: Ints | None = None) -> tuple[Floats, dict[float, int]]:
    """Return values with NaN in place of marks for missing values, and these marks with their counts.

    Args:
        values: (N,), NaN where missing.
        group: (N,) number of each row's series. With it, any frequent number may be a mark if every series that has it
            has other numbers more often; without it, only commonly used marks.
    """
    marks: dict[float, int] = {}
    while (mark := _find_outermost(values, group)) is not None:
        marks[mark] = int((values == mark).sum())
        values = np.where(values == mark, np.nan, values)
    return values, marks


def _find_outermost(values: Floats, group: Ints | None) -> float | None:
    """Return the smallest or largest value if it stands for a missing value, else None."""
    known = values[np.isfinite(values)]
    if len(known) <= LEAST:
        return None
    for mark in (float(known.min()), float(known.max())):
        others = known[known != mark]
        if len(others) < LEAST:
            continue
        low, high = np.quantile(others, [0.001, 0.999])
        gap = np.abs(others - mark).min()
        times = len(known) - len(others)
        if is_usual(mark):
            far = gap > USUAL_GAP * max(high - low, 1e-12 * abs(mark))
            if far and not low <= mark <= high:
                return mark
        elif (
            group is not None
            and FEW_TIMES <= times <= MOST * len(known)
            and len(np.unique(others)) >= LEAST  # fewer distinct values are states, such as on and off
        ):
            far = gap > OTHER_GAP * max(others.max() - others.min(), 1e-9 * abs(mark))
            if far and _is_scattered(values == mark, np.isfinite(values), group):
                return mark
    return None


def is_usual(number: float) -> bool:
    """Tell if programs commonly write a number for a missing value: -999, 9999, 999.9, 1e20, a type's maximum."""
    nearest = any(abs(number - limit) <= 1e-6 * abs(limit) for limit in _LIMITS)
    return nearest or _NINES.fullmatch(f"{number:.15g}") is not None


def _is_scattered(marked: NDArray[np.bool_], known: NDArray[np.bool_], group: Ints) -> bool:
    """Tell if no series consists mostly of marked values."""
    count = int(group.max()) + 1
    own, all_of = np.bincount(group[marked], minlength=count), np.bincount(group[known], minlength=count)
    return bool((own <= 0.5 * all_of).all())
