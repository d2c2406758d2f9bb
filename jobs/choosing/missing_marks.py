"""Find numbers that stand for a missing measurement, such as -999: far outside of all others, and frequent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.report import plural

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST = 8
"""Other values that are needed to judge by."""
FEW_TIMES = 3
"""How often a number that nobody uses for missing values must be there."""
MOST = 0.3
"""Largest share of the values that such a number has."""
USUAL_GAP, OTHER_GAP = 0.5, 3.0
"""Distance from the others, as a share of their range, of a number that many use for missing values, and of another."""
_NINES = re.compile(r"-?(?:9{2,}(?:[.]9+)?|9[.]9+|[78]{3,}(?:[.][78]+)?|6999|-?1e\+?(?:20|30|35|36|37|38))")
_LIMITS = (32767.0, -32768.0, 65535.0, 2147483647.0, -2147483648.0, 4294967295.0, 9.96921e36, 3.4028235e38)


class Numbers(NamedTuple):
    """A column as numbers.

    values (N,) with NaN where missing
    absent texts in it that mean missing
    marks  numbers that stand for missing ones, with their counts
    """

    name: str
    values: Floats
    absent: tuple[str, ...]
    marks: Mapping[float, int] = MappingProxyType({})


def name_marks(measurements: Sequence[Numbers], group: Ints) -> tuple[list[Numbers], list[str]]:
    """Return measurements with all their marks, and notes on these.

    A spec names a mark for all measurements, so one that another measurement has rightly is not among them.

    Args:
        measurements: M columns of N values.
        group: (N,) number of each row's series.
    """
    found: list[Numbers] = []
    notes: list[str] = []
    for one in measurements:
        values, more = without_marks(one.values, group)
        marks = {**one.marks, **more}
        known = values[np.isfinite(values)]
        for mark, count in list(marks.items()):
            other = next(
                (it.name for it in measurements if it is not one and (it.values == mark).any()), None
            )
            what = (
                f"{one.name}: {mark:.15g} in {plural(count, 'row')} is far outside of the others, {known.min():g} to "
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


def without_marks(values: Floats, group: Ints | None = None) -> tuple[Floats, dict[float, int]]:
    """Return values with NaN in place of numbers that stand for missing ones, and these numbers with their counts.

    Args:
        values: (N,), NaN where missing.
        group: (N,) number of each row's series. With it any frequent number may be such a mark, if every series that
            has it has others more often; without it those alone that many programs use.
    """
    marks: dict[float, int] = {}
    while (mark := _outermost(values, group)) is not None:
        marks[mark] = int((values == mark).sum())
        values = np.where(values == mark, np.nan, values)
    return values, marks


def _outermost(values: Floats, group: Ints | None) -> float | None:
    """Return the smallest or largest of some values if it stands for a missing one."""
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
            and len(np.unique(others)) >= LEAST  # else they are states, such as on and off
        ):
            far = gap > OTHER_GAP * max(others.max() - others.min(), 1e-9 * abs(mark))
            if far and _is_scattered(values == mark, np.isfinite(values), group):
                return mark
    return None


def is_usual(number: float) -> bool:
    """Tell if many programs write a number for a missing value: -999, 9999, 999.9, 1e20, the largest of a type."""
    nearest = any(abs(number - limit) <= 1e-6 * abs(limit) for limit in _LIMITS)
    return nearest or _NINES.fullmatch(f"{number:.15g}") is not None


def _is_scattered(marked: NDArray[np.bool_], known: NDArray[np.bool_], group: Ints) -> bool:
    """Tell if no series consists mostly of a mark."""
    count = int(group.max()) + 1
    own, all_of = np.bincount(group[marked], minlength=count), np.bincount(group[known], minlength=count)
    return bool((own <= 0.5 * all_of).all())
