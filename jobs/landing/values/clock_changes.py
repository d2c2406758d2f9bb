"""Resolve the two passes of an hour that clocks repeat, and count the rows at clock changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.time_counts import MAX_US, MIN_US, UNIT_US, to_datetime

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_DAY, _SECOND = UNIT_US["day"], UNIT_US["second"]


class Change(NamedTuple):
    """Clock change: its moment in microseconds UTC, and the step forward in microseconds (negative: back)."""

    at: int
    forward: int


def find_changes(zone: tzinfo, days: Iterable[int]) -> list[Change]:
    """Return the clock changes on days (counted from 1970 in UTC), and on the day before and after each."""
    around = sorted({day + one for day in days for one in (-1, 0, 1)})
    found = (_find_change(zone, day) for day in around)
    return [one for one in found if one is not None]


@cache
def _find_change(zone: tzinfo, day: int) -> Change | None:
    """Return the clock change on a UTC day, or None."""
    low, high = day * _DAY, (day + 1) * _DAY
    if not (MIN_US + _DAY < low and high < MAX_US - _DAY):
        return None
    first, last = compute_offset_us(zone, low), compute_offset_us(zone, high)
    if first == last:
        return None
    while high - low > _SECOND:
        middle = (low + high) // 2 // _SECOND * _SECOND
        low, high = (middle, high) if compute_offset_us(zone, middle) == first else (low, middle)
    return Change(high, last - first)


def compute_offset_us(zone: tzinfo, micros: int) -> int:
    """Return the offset of a zone from UTC at a moment, in microseconds."""
    offset = to_datetime(micros).replace(tzinfo=UTC).astimezone(zone).utcoffset() or timedelta(0)
    return offset // timedelta(microseconds=1)


def find_repeats(zone: tzinfo, first: int, last: int) -> list[datetime]:
    """Return the beginnings (local clock) of repeated hours of a zone between two times."""
    days = range(max(first, last - 20_000 * _DAY) // _DAY, last // _DAY + 1)
    found = [
        one for one in find_changes(zone, days) if one.forward < 0 and first <= one.at <= last - one.forward
    ]
    return [to_datetime(one.at + compute_offset_us(zone, one.at)) for one in found]


class ClockChanges(NamedTuple):
    """Numbers of rows at clock changes.

    repeated rows in a repeated hour
    second   rows in the second pass of a repeated hour
    unclear  rows in a repeated hour whose order fits neither one pass nor two; they count as the first pass
    skipped  rows with a local time that the clocks skipped
    is_cut   a part of a file begins in a repeated hour, so only the rows before the part show the pass
    """

    repeated: int = 0
    second: int = 0
    unclear: int = 0
    skipped: int = 0
    is_cut: bool = False


def settle(
    zone: tzinfo,
    micros: Ints,
    known: Bools,
    key: Ints,
    walls: Callable[[Ints], tuple[Ints, Bools]],
) -> tuple[Ints, ClockChanges]:
    """Return times with the second pass of repeated hours resolved, and the counts of clock changes.

    The rows of a key are in the order of time. So a step back within a repeated hour begins the second pass.

    Args:
        zone: time zone of the times.
        micros: (N,) microseconds UTC, in repeated hours as of the first pass.
        known: (N,) which values are times.
        key: (N,) codes of the keys.
        walls: returns the local clock of given rows, and which of these rows have no explicit offset.
    """
    if zone is UTC or not known.any():
        return micros, ClockChanges()
    found = ClockChanges()
    for change in find_changes(zone, np.unique(micros[known] // _DAY).tolist()):
        start, end = sorted((change.at, change.at + change.forward))
        rows = np.flatnonzero(known & (micros >= start) & (micros < end))
        clock, is_local = walls(rows)
        rows, clock = rows[is_local], clock[is_local]
        if not len(rows):
            continue
        if change.forward > 0:
            # A skipped time was moved forward by the gap: its clock differs from the clock after the change.
            moved = int((clock - micros[rows] != compute_offset_us(zone, change.at)).sum())
            found = found._replace(skipped=found.skipped + moved)
            continue
        micros = micros.copy()
        found = found._replace(repeated=found.repeated + len(rows))
        for those, before, after in _split_by_key(rows, key, micros, known):
            second, is_unclear = _find_second_pass(micros[those], before, after, -change.forward)
            micros[those[second]] -= change.forward
            found = found._replace(
                second=found.second + len(second),
                unclear=found.unclear + is_unclear * len(those),
                is_cut=found.is_cut or (before is None and not len(second)),
            )
    return micros, found


def _split_by_key(
    rows: Ints, key: Ints, micros: Ints, known: Bools
) -> Iterator[tuple[Ints, int | None, int | None]]:
    """Yield each key's rows in the order of time, with the times of the key's neighbouring rows before and after."""
    near, has = np.zeros(len(key), bool), np.zeros(int(key.max()) + 1, bool)
    near[rows], has[key[rows]] = True, True
    wanted = np.flatnonzero(has[key] & known)
    ordered = wanted[np.argsort(key[wanted], kind="stable")]
    for of_key in np.split(ordered, np.flatnonzero(np.diff(key[ordered])) + 1):
        steps = np.diff(micros[of_key])
        if (steps < 0).sum() > (steps > 0).sum():  # newest first
            of_key = of_key[::-1]
        places = np.flatnonzero(near[of_key])
        first, last = int(places[0]), int(places[-1])
        before = int(micros[of_key[first - 1]]) if first else None
        after = int(micros[of_key[last + 1]]) if last + 1 < len(of_key) else None
        yield of_key[places], before, after


def _find_second_pass(times: Ints, before: int | None, after: int | None, length: int) -> tuple[Ints, bool]:
    """Return which rows of a repeated hour are in the second pass, and whether that is unclear.

    Args:
        times: times of a key's rows in that hour, as of the first pass.
        before: the key's last time before these rows, or None.
        after: the key's first time after these rows, or None.
        length: length of the repeated hour in microseconds.
    """
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back) == 1:
        return np.arange(back[0] + 1, len(times)), False
    if len(times) == 2 and times[0] == times[1]:
        # Hourly rows have the same clock time twice; other equal rows are copies.
        steps = (
            None if before is None else times[0] - before,
            None if after is None else after - times[0] - length,
        )
        if any(step is not None and step >= length for step in steps):
            return np.array([1]), False
    return np.zeros(0, np.int64), len(back) > 1
