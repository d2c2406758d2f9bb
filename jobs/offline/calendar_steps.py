"""Steps of whole months by the calendar: beginnings and ends of months, quarters and years."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.core.times import UNIT_US

Ints = NDArray[np.int64]
DAY = UNIT_US["day"]
SHORTEST, LONGEST = 28 * DAY, 31 * DAY
"""The shortest and the longest month, in microseconds."""
MOST = 0.9
"""The share of a file's steps that must be by the calendar."""
LAST = 30
"""The day from 0 that stands for the last day of any month."""
ROWS = 12
"""The number of a key's last rows that show its day of the month."""
_MONTHS = {"mo": 1, "q": 3, "y": 12}
_TEXT = re.compile(r"([1-9][0-9]{0,3})(mo|q|y)")
_functions = cast(Any, pc)


class CalendarStep(NamedTuple):
    """A step of some months in a time zone.

    days: (K,) the day of the month of each key, from 0; a month that lacks it has its last day instead. None means the
        day of the newest row, and a month's last day leads to last days.
    """

    months: int
    zone: str
    days: Ints | None = None

    def add(self, last: Ints, count: int) -> Ints:
        """Return the times (S, K) of 1 to `count` steps after times (K,), in microseconds."""
        month, day, clock = _split(_to_local(last, self.zone))
        later = month + self.months * np.arange(1, count + 1)[:, None]
        days = np.where(day == _count_days(month) - 1, LAST, day) if self.days is None else self.days
        day = np.minimum(days, _count_days(later) - 1)
        return _to_utc((later.astype("M8[D]") + day).astype("M8[us]").astype(np.int64) + clock, self.zone)

    def follow_rows(self, key: Ints, time: Ints, wanted: Ints) -> CalendarStep:
        """Return the step with the day of the month of each wanted key, from its last rows.

        A newest row before the month's last day has this day. Otherwise it is the latest day of the key's last rows, or
        the last day if all of them are at the end of a month.

        Args:
            key: (N,) codes of keys; the rows are ordered by key and time.
            time: (N,) microseconds.
            wanted: (K,) codes of the keys; each has a row.
        """
        first, stop = np.searchsorted(key, wanted), np.searchsorted(key, wanted, "right")
        rows = np.maximum(stop - 1 - np.arange(ROWS)[:, None], first)
        month, day, _ = _split(_to_local(time[rows.ravel()], self.zone))
        at_end, day = (one.reshape(rows.shape) for one in (day == _count_days(month) - 1, day))
        latest = np.where(at_end.all(axis=0), LAST, day.max(axis=0))
        return self._replace(days=np.where(at_end[0], latest, day[0]))

    def __str__(self) -> str:
        """Return the step in words, with the rule for the day if no rows give it."""
        rule = ", from one month's last day to the next" if self.days is None else ""
        return f"{self.months} month{'s'[: self.months > 1]} of the calendar{rule}"


def parse_calendar_step(text: str, zone: str) -> CalendarStep | None:
    """Return the step that a text such as 1mo, 2q or 1y means; None for any other text."""
    match = _TEXT.fullmatch(text)
    return None if match is None else CalendarStep(int(match[1]) * _MONTHS[match[2]], zone)


def find_calendar_step(before: Ints, after: Ints, zone: str) -> CalendarStep | None:
    """Return the step of pairs of times (N,) if nearly all are some months apart, on the same day and hour.

    A day that a month lacks may be its last day.
    """
    if not len(before) or np.median(after - before) < SHORTEST:
        return None
    (month, day, clock), (later, other, hour) = (_split(_to_local(one, zone)) for one in (before, after))
    at_end, ends = day == _count_days(month) - 1, other == _count_days(later) - 1
    same = (day == other) | (at_end & (other > day)) | (ends & (day > other))
    if (same & (clock == hour)).mean() < MOST:
        return None
    return CalendarStep(int(np.median((later - month).astype(np.int64))), zone)


def _split(local: Ints) -> tuple[NDArray[np.datetime64], Ints, Ints]:
    """Return month, day of the month from 0, and microseconds of the day of local times."""
    date = local.astype("M8[us]").astype("M8[D]")
    month = date.astype("M8[M]")
    return month, (date - month.astype("M8[D]")).astype(np.int64), local % DAY


def _count_days(month: NDArray[np.datetime64]) -> Ints:
    return ((month + 1).astype("M8[D]") - month.astype("M8[D]")).astype(np.int64)


def _to_local(time: Ints, zone: str) -> Ints:
    if zone == "UTC":
        return time
    return _functions.local_timestamp(pa.array(time, pa.timestamp("us", zone))).cast(pa.int64()).to_numpy()


def _to_utc(time: Ints, zone: str) -> Ints:
    if zone == "UTC":
        return time
    local = pa.array(time.ravel(), pa.timestamp("us"))
    found = _functions.assume_timezone(local, zone, ambiguous="earliest", nonexistent="latest")
    return found.cast(pa.int64()).to_numpy().reshape(time.shape)
