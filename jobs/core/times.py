"""Durations, and event times as text: one rule for the offline command (Python) and for `ingest` (Spark).

A time format becomes a regular expression that Java and Python read alike. Both take the parts of a time from its
groups, so that no second parser can disagree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import NamedTuple

from jobs.core.errors import UserError

AVAILABLE_NOW = "available-now"


class Epoch(NamedTuple):
    """Times as numbers: a number counts `micros / parts` microseconds.

    A count from 1970-01-01 UTC is cut off at whole microseconds. That of a spreadsheet, in days from 1899-12-30 on the
    local clock, has some 10 digits after the point and is rounded to milliseconds.
    """

    micros: int
    parts: int = 1
    is_spreadsheet: bool = False

    def wall_us(self, digits: int, scale: int) -> int:
        """Return the microseconds of the number digits / scale, of a spreadsheet on the local clock."""
        if not self.is_spreadsheet:
            size = abs(digits) * self.micros // (scale * self.parts)
            return -size if digits < 0 else size
        millis = (2 * digits * (self.micros // 1000) + scale) // (2 * scale)
        return millis * 1000 + SPREADSHEET_US


EPOCH_FORMATS = {
    "epoch_seconds": Epoch(1_000_000),
    "epoch_milliseconds": Epoch(1_000),
    "epoch_microseconds": Epoch(1),
    "epoch_nanoseconds": Epoch(1, 1_000),
    "spreadsheet_days": Epoch(86_400_000_000, 1, True),
}
_CLOCKS = ("", " %H:%M:%S.%f", " %H:%M:%S", " %H:%M")
_DATES = ("%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y%m%d")
_NAMED = ("%d-%b-%Y", "%d %b %Y", "%b-%d-%Y", "%b %d, %Y", "%b %d %Y")
USUAL_FORMATS = (
    *(f"{date}{clock}" for date in (*_DATES, *_NAMED) for clock in _CLOCKS),
    "%Y%m%d%H%M%S",
    "%Y%m%d%H%M",
    "%Y%m%dT%H%M%S%z",
)
"""Formats of text beside ISO 8601, the ones of spreadsheets among them."""
EPOCH_RANGES = (
    ("epoch_seconds", 1e8, 4.2e9),
    ("epoch_milliseconds", 1e11, 4.2e12),
    ("epoch_microseconds", 1e14, 4.2e15),
    ("epoch_nanoseconds", 1e17, 4.2e18),
)
"""Formats of numbers, and the range of times from 1973 to 2103 in each."""
SPREADSHEET_US = -2_209_161_600_000_000  # 1899-12-30, day 0 of a spreadsheet
UNIT_US = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_DURATIONS = {"ms": "millisecond", "s": "second", "min": "minute", "h": "hour", "d": "day", "w": "week"}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|h|d|w)\s*")

MIN_US = -62_135_596_800_000_000  # 0001-01-01
MAX_US = 253_402_300_799_999_999  # the end of 9999-12-31

# Group order: year, month, day, hour, minute, second, fraction, zone; each may be absent in a given time.
PARTS = ("year", "month", "day", "hour", "minute", "second", "fraction", "zone")
_MONTHS = tuple(
    f"{name[:3]}(?:{name[3:]})?"
    for name in "january february march april may june july august sept september october november december".split()
)
"""English names of months, whole or their first three letters (of September also four), as regular expressions."""
_DIRECTIVES = {
    "Y": ("year", "([0-9]{4})"),
    "m": ("month", "([0-9]{1,2})"),
    "b": ("month", f"((?i:{'|'.join(_MONTHS)}))"),
    "d": ("day", "([0-9]{1,2})"),
    "H": ("hour", "([0-9]{1,2})"),
    "M": ("minute", "([0-9]{1,2})"),
    "S": ("second", "([0-9]{1,2})"),
    "f": ("fraction", "([0-9]{1,9})"),
    "z": ("zone", "(Z|[+-][0-9]{2}(?::?[0-9]{2})?)"),
}
ISO = (
    "([0-9]{4})-([0-9]{2})-([0-9]{2})"
    "(?:[T ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.]([0-9]{1,9}))?)?[ ]?(Z|[+-][0-9]{2}(?::?[0-9]{2})?)?)?"
)


@dataclass(frozen=True, slots=True)
class TimePattern:
    """The pattern of a time as text: `regex` matches all of it, trimmed; `groups` has each part's group, from 1."""

    regex: str
    groups: dict[str, int]


def duration_us(text: str) -> int:
    """Return the microseconds of a duration such as 90d, 12h, 30min, 45s, 500ms or 2w.

    Raises:
        ValueError: `text` is not a duration above zero.
    """
    match = _DURATION.fullmatch(text)
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a duration")
    return round(float(match[1]) * UNIT_US[_DURATIONS[match[2]]])


def time_pattern(time_format: str | None) -> TimePattern:
    """Compile a time format (None: ISO 8601) to a regular expression.

    Raises:
        ValueError: a directive is unknown or repeated, or the date is incomplete; the message says which.
    """
    if time_format is None:
        return TimePattern(ISO, {part: number for number, part in enumerate(PARTS, start=1)})
    regex, groups, position = "", {}, 0
    while position < len(time_format):
        char = time_format[position]
        position += 1
        if char != "%":
            regex += char if char.isalnum() else f"[{char}]" if char not in "\\^[]" else f"\\{char}"
            continue
        code = time_format[position : position + 1]
        position += 1
        if code == "%":
            regex += "[%]"
            continue
        if code not in _DIRECTIVES:
            known = " ".join(f"%{one}" for one in _DIRECTIVES)
            raise ValueError(f"%{code} is not known; there are {known}")
        part, expression = _DIRECTIVES[code]
        if part in groups:
            raise ValueError(f"the {part} is given twice")
        groups[part] = len(groups) + 1
        regex += expression
    for part, code in (("year", "Y"), ("month", "m"), ("day", "d")):
        if part not in groups:
            raise ValueError(f"%{code} is missing")
    return TimePattern(regex, groups)


class TimeParser:
    """Parse times as text to microseconds since 1970-01-01 UTC.

    Args:
        time_format: None for ISO 8601, an epoch format, or directives %Y %m %b %d %H %M %S %f %z.
        zone: the time zone of a time without an offset of its own.
    """

    def __init__(self, time_format: str | None, zone: tzinfo) -> None:
        self._zone = zone
        self._epoch = EPOCH_FORMATS.get(time_format or "")
        if self._epoch is None:
            pattern = time_pattern(time_format)
            self._regex = re.compile(pattern.regex)
            self._groups = [pattern.groups.get(part) for part in PARTS]

    def __call__(self, text: str) -> int | None:
        """Return the microseconds, or None if `text` is not a time in this format."""
        text = text.strip(" ")
        if self._epoch is not None:
            return _epoch_us(text, self._epoch, self._zone)
        match = self._regex.fullmatch(text)
        if not match:
            return None
        year, month, day, hour, minute, second, fraction, zone = (
            match[group] if group else None for group in self._groups
        )
        micros = int((fraction or "0").ljust(6, "0")[:6])
        try:
            clock = (int(hour or 0), int(minute or 0), int(second or 0))
            moment = datetime(int(year or 0), _month(month or "0"), int(day or 0), *clock, micros)
        except ValueError:
            return None
        if zone is not None:
            offset = _offset(zone)
            if offset is None:
                return None
            value = wall_us(moment) - offset
        else:
            value = local_us(moment, self._zone)
        return value if MIN_US <= value <= MAX_US else None


def _month(text: str) -> int:
    """Return a month's number, of its number or its English name."""
    return (
        int(text)
        if text[0].isdigit()
        else "janfebmaraprmayjunjulaugsepoctnovdec".index(text[:3].lower()) // 3 + 1
    )


def wall_us(moment: datetime) -> int:
    """Return the microseconds from 1970-01-01 00:00 to a naive time, both read on the same clock."""
    days = moment.toordinal() - date(1970, 1, 1).toordinal()
    seconds = days * 86_400 + moment.hour * 3600 + moment.minute * 60 + moment.second
    return seconds * 1_000_000 + moment.microsecond


def local_us(moment: datetime, zone: tzinfo) -> int:
    """Return the microseconds since the epoch of a naive time in `zone`.

    A time that occurs twice, as clocks go back, is the earlier one; one that is skipped, as they go forward, moves on
    by the gap. Java does the same.
    """
    if zone is UTC:
        return wall_us(moment)
    offset = moment.replace(tzinfo=zone).utcoffset() or timedelta(0)
    return wall_us(moment) - offset // timedelta(microseconds=1)


def _epoch_us(text: str, epoch: Epoch, zone: tzinfo) -> int | None:
    match = re.fullmatch(r"([+-]?)([0-9]{1,19})(?:[.]([0-9]*))?", text)
    if not match:
        return None
    fraction = (match[3] or "")[:18]
    digits = int(match[2] + fraction)
    value = epoch.wall_us(-digits if match[1] == "-" else digits, 10 ** len(fraction))
    if not MIN_US <= value <= MAX_US:
        return None
    if not epoch.is_spreadsheet or zone is UTC:
        return value
    value = local_us(datetime(1970, 1, 1) + timedelta(microseconds=value), zone)
    return value if MIN_US <= value <= MAX_US else None


def _offset(zone: str) -> int | None:
    if zone == "Z":
        return 0
    hours, minutes = int(zone[1:3]), int(zone[3:].replace(":", "") or "0")
    if minutes > 59 or hours * 60 + minutes > 18 * 60:  # Java's limit
        return None
    value = (hours * 60 + minutes) * 60_000_000
    return -value if zone[0] == "-" else value


def trigger_seconds(trigger: str) -> float | None:
    """Return the seconds between micro-batches; None for `available-now`: process the present rows, then end.

    Raises:
        UserError: the option is neither `available-now` nor a number of seconds.
    """
    if trigger == AVAILABLE_NOW:
        return None
    try:
        seconds = float(trigger)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UserError(f"--trigger {trigger}: give {AVAILABLE_NOW}, or a number of seconds")
    return seconds
