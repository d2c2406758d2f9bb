"""Tell the hours apart that the clocks of a time zone repeat, and count the rows that meet a change of the clocks."""

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
    """A change of the clocks: its moment in microseconds UTC, and by how much they were put forward."""

    at: int
    forward: int


def changes_on(zone: tzinfo, days: Iterable[int]) -> list[Change]:
    """Return the changes of clocks on some days, counted from 1970 in UTC, and on those before and after each."""
    around = sorted({day + one for day in days for one in (-1, 0, 1)})
    found = (_change_on(zone, day) for day in around)
    return [one for one in found if one is not None]


@cache
def _change_on(zone: tzinfo, day: int) -> Change | None:
    """Return the change of clocks on a day of UTC, or None."""
    low, high = day * _DAY, (day + 1) * _DAY
    if not (MIN_US + _DAY < low and high < MAX_US - _DAY):
        return None
    first, last = offset_us(zone, low), offset_us(zone, high)
    if first == last:
        return None
    while high - low > _SECOND:
        middle = (low + high) // 2 // _SECOND * _SECOND
        low, high = (middle, high) if offset_us(zone, middle) == first else (low, middle)
    return Change(high, last - first)


def offset_us(zone: tzinfo, micros: int) -> int:
    """Return by how many microseconds the clocks are ahead of UTC at a moment."""
    offset = to_datetime(micros).replace(tzinfo=UTC).astimezone(zone).utcoffset() or timedelta(0)
    return offset // timedelta(microseconds=1)


def repeats_between(zone: tzinfo, first: int, last: int) -> list[datetime]:
    """Return when the clocks of a zone repeated an hour from the first to the last time, on the local clock."""
    days = range(max(first, last - 20_000 * _DAY) // _DAY, last // _DAY + 1)
    found = [
        one for one in changes_on(zone, days) if one.forward < 0 and first <= one.at <= last - one.forward
    ]
    return [to_datetime(one.at + offset_us(zone, one.at)) for one in found]


class ClockChanges(NamedTuple):
    """How many rows met a change of the clocks.

    repeated rows of an hour that came twice
    second   rows of the second pass of an hour that came twice
    unclear  rows of such an hour, taken for the first pass, though their order fits neither one pass nor two
    skipped  rows with a time that the clocks skipped
    is_cut   rows of such an hour begin a part of a file, so that only the rows before it tell the pass
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
    """Return times of which the second pass of a repeated hour is told from the first, and what was met.

    Within a key rows come in the order of time. So a step back within a repeated hour begins its second pass.

    Args:
        zone: of the times.
        micros: (N,) microseconds UTC, in repeated hours those of the first pass.
        known: (N,) which of them are times.
        key: (N,) codes of the keys.
        walls: returns the local clock of some rows, and which of them have no offset of their own.
    """
    if zone is UTC or not known.any():
        return micros, ClockChanges()
    found = ClockChanges()
    for change in changes_on(zone, np.unique(micros[known] // _DAY).tolist()):
        start, end = sorted((change.at, change.at + change.forward))
        rows = np.flatnonzero(known & (micros >= start) & (micros < end))
        clock, is_local = walls(rows)
        rows, clock = rows[is_local], clock[is_local]
        if not len(rows):
            continue
        if change.forward > 0:
            # A skipped time was moved on by the gap: its own clock differs from the one after the change.
            moved = int((clock - micros[rows] != offset_us(zone, change.at)).sum())
            found = found._replace(skipped=found.skipped + moved)
            continue
        micros = micros.copy()
        found = found._replace(repeated=found.repeated + len(rows))
        for those, before, after in _by_key(rows, key, micros, known):
            second, is_unclear = _second_pass(micros[those], before, after, -change.forward)
            micros[those[second]] -= change.forward
            found = found._replace(
                second=found.second + len(second),
                unclear=found.unclear + is_unclear * len(those),
                is_cut=found.is_cut or (before is None and not len(second)),
            )
    return micros, found


def _by_key(
    rows: Ints, key: Ints, micros: Ints, known: Bools
) -> Iterator[tuple[Ints, int | None, int | None]]:
    """Yield the rows of each key in the order of time, and the times of the key's rows just before and after them."""
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


def _second_pass(times: Ints, before: int | None, after: int | None, length: int) -> tuple[Ints, bool]:
    """Return which rows of a repeated hour are of its second pass, and whether that is unclear.

    Args:
        times: of a key's rows in that hour, as those of the first pass.
        before: the key's time before them.
        after: the key's time after them.
        length: of the hour.
    """
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back) == 1:
        return np.arange(back[0] + 1, len(times)), False
    if len(times) == 2 and times[0] == times[1]:
        # Rows by the hour have the same clock twice; other rows are copies.
        steps = (
            None if before is None else times[0] - before,
            None if after is None else after - times[0] - length,
        )
        if any(step is not None and step >= length for step in steps):
            return np.array([1]), False
    return np.zeros(0, np.int64), len(back) > 1
