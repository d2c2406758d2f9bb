"""When the clocks of a time zone are put forward or back."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache
from typing import NamedTuple

from jobs.core.time_counts import MAX_US, MIN_US, to_datetime

_DAY = 86_400_000_000
_SECOND = 1_000_000


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
