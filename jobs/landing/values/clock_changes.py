"""Assign rows in an hour that the local clock repeats to its two passes, and count the rows at clock changes."""

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
    """Clock change: its time in microseconds UTC, and the step of the clock in microseconds (negative for back)."""

    at: int
    forward: int


def find_changes(zone: tzinfo, days: Iterable[int]) -> list[Change]:
    """Return the clock changes on days (counted from 1970 in UTC), and on the day before and after each day."""
    around = sorted({day + one for day in days for one in (-1, 0, 1)})
    found = (_find_change(zone, day) for day in around)
    return [one for one in found if one is not None]


@cache
def _find_change(zone: tzinfo, day: int) -> Change | None:
    """Return the clock change on a UTC day; None if the clock does not change on this day."""
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
    """Return the offset of a zone from UTC, in microseconds, at a time in microseconds since 1970."""
    offset = to_datetime(micros).replace(tzinfo=UTC).astimezone(zone).utcoffset() or timedelta(0)
    return offset // timedelta(microseconds=1)


def find_repeats(zone: tzinfo, first: int, last: int) -> list[datetime]:
    """Return the beginnings, in local time, of the hours that a zone repeats between two times."""
    days = range(max(first, last - 20_000 * _DAY) // _DAY, last // _DAY + 1)
    found = [
        one for one in find_changes(zone, days) if one.forward < 0 and first <= one.at <= last - one.forward
    ]
    return [to_datetime(one.at + compute_offset_us(zone, one.at)) for one in found]


class ClockChanges(NamedTuple):
    """Numbers of rows at clock changes.

    repeated number of rows in a repeated hour
    second   number of rows in the second pass of a repeated hour
    unclear  number of rows in a repeated hour whose order fits neither one nor two passes; first pass is assumed
    skipped  number of rows with a local time that the clock skipped
    is_cut   whether rows of a key begin in a repeated hour, so that only earlier rows of the file show the pass
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
    """Return times with corrected times in the second pass of repeated hours, and the numbers of affected rows.

    The rows of each key are assumed to be in the order of time. Therefore a step back of the local time within a
    repeated hour is the beginning of the second pass.

    Args:
        zone: time zone of the times.
        micros: (N,) microseconds UTC; in a repeated hour, the time in the first pass.
        known: (N,) mask of the valid times.
        key: (N,) code of the key of each row.
        walls: function that returns, for given rows, the local times in microseconds, and a mask of the rows without an
            explicit offset.
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
            # A skipped local time was moved forward by the gap, and therefore differs from the local time of the
            # resulting moment.
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
    """Yield the given rows of each key in the order of time, and the times of the key's nearest rows before and after.

    The time before or after is None if the key has no row there.
    """
    near, has = np.zeros(len(key), bool), np.zeros(int(key.max()) + 1, bool)
    near[rows], has[key[rows]] = True, True
    wanted = np.flatnonzero(has[key] & known)
    ordered = wanted[np.argsort(key[wanted], kind="stable")]
    for of_key in np.split(ordered, np.flatnonzero(np.diff(key[ordered])) + 1):
        steps = np.diff(micros[of_key])
        if (steps < 0).sum() > (steps > 0).sum():  # the newest row is first
            of_key = of_key[::-1]
        places = np.flatnonzero(near[of_key])
        first, last = int(places[0]), int(places[-1])
        before = int(micros[of_key[first - 1]]) if first else None
        after = int(micros[of_key[last + 1]]) if last + 1 < len(of_key) else None
        yield of_key[places], before, after


def _find_second_pass(times: Ints, before: int | None, after: int | None, length: int) -> tuple[Ints, bool]:
    """Return the indices of a key's rows in the second pass of a repeated hour, and whether the pass is unclear.

    Args:
        times: times of the key's rows in the repeated hour, as if all rows were in the first pass.
        before: last time of the key before these rows; None without an earlier row.
        after: first time of the key after these rows; None without a later row.
        length: length of the repeated hour in microseconds.
    """
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back) == 1:
        return np.arange(back[0] + 1, len(times)), False
    if len(times) == 2 and times[0] == times[1]:
        # Hourly rows have the same local time in both passes. All other rows with equal times are copies.
        steps = (
            None if before is None else times[0] - before,
            None if after is None else after - times[0] - length,
        )
        if any(step is not None and step >= length for step in steps):
            return np.array([1]), False
    return np.zeros(0, np.int64), len(back) > 1
