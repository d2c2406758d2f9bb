"""Find the time formats that fit a text or a number, and the time that the value means in each format."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from jobs.core.time_counts import COUNTS, UNIT_US, compute_wall_us, to_datetime
from jobs.core.times import TimeParser

_CLOCKS = (
    "",
    " %H:%M:%S",
    " %H:%M",
    "T%H:%M:%S",
    " %I:%M:%S %p",
    " %I:%M %p",
    ", %H:%M:%S",
    ", %I:%M:%S %p",
    " %H:%M:%S %Z",
    "-%H:%M:%S",
    ":%H:%M:%S",
)
_DATES = (
    "%Y-%m-%d %Y/%m/%d %Y.%m.%d %d.%m.%Y %d/%m/%Y %m/%d/%Y %d-%m-%Y %m-%d-%Y %Y%m%d "
    "%d.%m.%y %d/%m/%y %m/%d/%y %d-%m-%y %m-%d-%y %y-%m-%d %y/%m/%d"
).split()
_NAMED = (
    *(
        "%d-%b-%Y",
        "%d %b %Y",
        "%d/%b/%Y",
        "%b-%d-%Y",
        "%b %d, %Y",
        "%b %d %Y",
        "%Y %b %d",
        "%Y-%b-%d",
        "%d%b%Y",
    ),
    *("%d-%b-%y", "%d %b %y", "%a %d %b %Y", "%a, %d %b %Y", "%a, %b %d, %Y", "%a %b %d %Y"),
)
USUAL_FORMATS = (
    *(f"{date}{clock}" for date in (*_DATES, *_NAMED) for clock in _CLOCKS),
    *("%d/%b/%Y:%H:%M:%S %z", "%a, %d %b %Y %H:%M:%S %z", "%a %b %d %H:%M:%S %Y", "%a %b %d %H:%M:%S %Z %Y"),
    *("%d%b%Y:%H:%M:%S", "%d%b%y:%H:%M:%S", "%H:%M:%S %d.%m.%Y", "%H:%M %d.%m.%Y"),
    *("%b %Y", "%b-%Y", "%Y %b", "%b-%y", "%b %y", "%m/%Y", "%m.%Y", "%Y/%m"),
    *("Q%q %Y", "Q%q-%Y", "Q%q/%Y", "%Y/Q%q", "%YM%m", "%Y Week %V", "%G/W%V", "%Y/%j", "%j/%Y"),
    *"%Y%m%d%H%M%S %Y%m%d%H%M %Y%m%d%H %Y%m%dT%H%M%S%z %Y%m%dT%H%M%S %Y%m%d-%H%M%S %Y%m%d_%H%M%S".split(),
    *("%Y%m%d %H%M%S", "%Y%m%d %H%M", "%Y%m%dT%H%M", "%Y%m%dT%H%M%z", "%Y-%m-%dT%H%M%S", "%Y-%m-%d_%H:%M:%S"),
    *("%Y.%m.%d %H.%M", "%Y.%m.%d %H.%M.%S", "%d-%b-%y %I.%M.%S.%f %p", "%d-%b-%y %H.%M.%S", "%Y/%j %H:%M"),
    *(
        "%Y/%j %H:%M:%S",
        "%Y:%m",
        "%Y:%q",
        "%Y年%m月%d日 %H:%M:%S",
        "%Y年%m月%d日 %H:%M",
        "%Y年%m月%d日",
        "@%s",
    ),
    *("%Y-%m-%d %H-%M-%S", "%Y-%m-%d %H.%M.%S", "%Y-%m-%d_%H-%M-%S", "%d.%m.%Y %H.%M", "%Y-%m-%d-%H.%M.%S"),
)
"""Formats of text besides ISO 8601, including the formats of spreadsheets."""
COMPACT_FORMATS = {
    4: ("%Y",),
    6: ("%y%m%d", "%Y%m", "%m%d%y", "%d%m%y"),
    7: ("%Y%j",),
    8: ("%Y%m%d", "%m%d%Y", "%d%m%Y"),
    10: ("%y%m%d%H%M", "%Y%m%d%H"),
    12: ("%Y%m%d%H%M", "%y%m%d%H%M%S"),
    14: ("%Y%m%d%H%M%S",),
    17: ("%Y%m%d%H%M%S%f",),
}
"""Formats that consist only of digits, by their number of digits."""
EPOCHS = ("epoch_seconds", "epoch_milliseconds", "epoch_microseconds", "epoch_nanoseconds")
_OTHER_COUNTS = tuple(name for name in COUNTS if name not in (*EPOCHS, "stata_days"))  # equal to sas_days
EARLY_US = 94_694_400_000_000
"""Three years in microseconds. Times so close to a count's origin are rare, but numbers read in too small a unit all
fall there.
"""
_RECENT_US = compute_wall_us(datetime(1990, 1, 1))
_FINE_US = compute_wall_us(datetime(2000, 1, 1))
_FINE = ("epoch_microseconds", "epoch_nanoseconds")
"""Counts that programs have written only since the year 2000, so that earlier times are not plausible."""
_RARE = ("epoch_minutes", "epoch_hours")
_FEWEST_DAYS = 10_000
"""Minimum number of days since a program's origin. Smaller numbers are probably years, or days since another origin."""
_OLD_US, _FAR_US = compute_wall_us(datetime(1900, 1, 1)), compute_wall_us(datetime(2103, 1, 1))
YEARS = (1500, 2200)
"""Plausible years of dates that are written as digits."""
_PLAIN = re.compile(r"[+-]?[0-9]{1,19}(?:[.][0-9]*)?")
_MOST = 4
"""Maximum number of readings that a sentence names."""


class TimeReading(NamedTuple):
    """A time format, and the time that a value means in this format, in microseconds."""

    form: str
    micros: int

    def __str__(self) -> str:
        moment = to_datetime(self.micros)
        return str(moment.date() if moment == datetime(moment.year, moment.month, moment.day) else moment)


def find_forms(low: float, high: float) -> list[str]:
    """Return the formats in which numbers from `low` to `high` are plausible times, the most probable first.

    Recent years are more probable than older times. Future times are considered only if no other format fits.
    """
    now = compute_wall_us(datetime.now(UTC).replace(tzinfo=None)) + UNIT_US["day"]
    tiers: dict[str, int] = {}
    for form in (*EPOCHS, *_compact(low, high), *_OTHER_COUNTS):
        ends = [one for one in (_compute_micros(form, low), _compute_micros(form, high)) if one is not None]
        if len(ends) == 2 and _is_plausible(form, low, min(ends), max(ends)):
            recent = _FINE_US if form in _FINE else _RECENT_US
            tiers[form] = 2 if max(ends) > now or form in _RARE else 1 if min(ends) < recent else 0
    best = min(tiers.values(), default=0)
    return sorted((form for form, tier in tiers.items() if tier < 2 or best == 2), key=tiers.__getitem__)


def _is_plausible(form: str, low: float, first: int, last: int) -> bool:
    """Return whether numbers of at least `low` can mean times from `first` to `last` in a format."""
    count = COUNTS.get(form)
    if count is None:
        return YEARS[0] <= to_datetime(first).year and to_datetime(last).year < YEARS[1]
    earliest = _OLD_US
    if not count.is_years:
        earliest = max(earliest, count.origin + EARLY_US)
        if count.micros == UNIT_US["day"] and low < _FEWEST_DAYS:
            return False
    return earliest <= first and last <= _FAR_US


def lacks_date(text: str) -> bool:
    """Return whether a text begins with a time of day, so that the date may be in another column."""
    return re.match(r"\s*[0-9]{1,2}:[0-9]{2}(?![0-9])", text) is not None


def find_readings(text: str) -> list[TimeReading]:
    """Return the formats other than ISO 8601 in which a text is a time, the most probable first."""
    if re.fullmatch(r"[0-9]{4}", text) or TimeParser(None, UTC)(text) is not None:
        return []
    forms = find_forms(float(text), float(text)) if _PLAIN.fullmatch(text) else USUAL_FORMATS
    found = ((form, TimeParser(form, UTC)(text)) for form in forms)
    return [TimeReading(form, micros) for form, micros in found if micros is not None]


def describe_readings(readings: list[TimeReading]) -> str:
    """Describe readings in words: each format, and the time that the value means in it."""
    return ", ".join(f"{one.form} ({one})" for one in readings[:_MOST])


def suggest_number_formats(first: float | None) -> str:
    """Return the remedy for a time column of numbers: each format that fits, with the first number's time in it."""
    setting = "set time_format in the spec to one of"
    readings = [] if first is None else find_readings(f"{first:.9f}".rstrip("0").rstrip("."))
    if readings:
        return f"{first} may be {describe_readings(readings)}: {setting} these"
    return (
        f"{setting} epoch_seconds (10 digits today), epoch_milliseconds (13), epoch_microseconds (16), "
        f"epoch_nanoseconds (19), spreadsheet_days (5), %Y%m%d (8) or {', '.join(_OTHER_COUNTS[1:])}"
    )


def _compact(low: float, high: float) -> tuple[str, ...]:
    """Return the formats of digits that fit whole numbers; a two-digit year may have lost its leading zeros."""
    if low != int(low) or high != int(high) or low < 0:
        return ()
    sizes = {len(str(int(low))), len(str(int(high)))} - {4}
    most = max(sizes, default=0)
    whole = COMPACT_FORMATS.get(most, ()) if len(sizes) == 1 else ()
    shortened = (*COMPACT_FORMATS.get(most, ()), *COMPACT_FORMATS.get(most + 1, ()))
    return tuple(dict.fromkeys((*whole, *(form for form in shortened if not form.startswith("%Y")))))


def _compute_micros(form: str, value: float) -> int | None:
    count = COUNTS.get(form)
    if count is None:
        return TimeParser(form, UTC)(str(int(value)))
    micros = count.to_us(round(value * 1_000_000), 1_000_000)
    return micros if abs(micros) < 10 * _FAR_US else None
