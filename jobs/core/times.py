"""Parse and compute durations, the current time, and event times as text, by the same rules in every command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from jobs.core.errors import UserError
from jobs.core.time_counts import EPOCH_DAY, MAX_US, MIN_US, UNIT_US, count_of, count_us, to_datetime

AVAILABLE_NOW = "available-now"

_DURATIONS = {"ms": "millisecond", "s": "second", "min": "minute", "h": "hour", "d": "day", "w": "week"}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|h|d|w)\s*")

_MONTHS = tuple(
    f"{name[:3]}(?:{name[3:]})?"
    for name in "january february march april may june july august sept(?:ember)? october november december".split()
)
"""Regular expressions for English month names: whole, or the first three letters (for September also four)."""
_MONTH_NAMES = "janfebmaraprmayjunjulaugsepoctnovdec"
_DAY_NAMES = "montuewedthufrisatsun"
MONTH_NAME = f"(?i:(?:{'|'.join(_MONTHS)})[.]?)"
"""Regular expression of a month's name."""
_TWO = "[0-9]{1,2}"
_HALF = "[AaPp][.]?[Mm][.]?"
_ZONE = "(?:[Uu][Tt][Cc]|[Gg][Mm][Tt])?[+-][0-9]{2}(?::?[0-9]{2})?|[Zz]|[A-Z]{3,5}"
"""An offset, Z, or an abbreviation. Valid abbreviations are UTC, GMT, and those of the spec's time zone."""
_DIRECTIVES = {
    "Y": ("year", "[0-9]{4}"),
    "m": ("month", _TWO),
    "b": ("month", MONTH_NAME),
    "d": ("day", _TWO),
    "H": ("hour", _TWO),
    "M": ("minute", _TWO),
    "S": ("second", _TWO),
    "f": ("fraction", "[0-9]{1,9}"),
    "z": ("zone", _ZONE),
    "I": ("hour12", _TWO),
    "p": ("half", _HALF),
    "y": ("short_year", "[0-9]{2}"),
    "j": ("day_of_year", "[0-9]{1,3}"),
    "G": ("week_year", "[0-9]{4}"),
    "V": ("week", _TWO),
    "u": ("weekday", "[1-7]"),
    "a": ("day_name", "(?i:(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?[.]?)"),
    "q": ("quarter", "[1-4]"),
    "s": ("epoch", "[0-9]{1,12}"),
}
DIRECTIVES = " ".join(f"%{one}" for one in _DIRECTIVES)
_WIDTHS = {"Y": 4, "G": 4, "j": 3, "u": 1, "q": 1, **dict.fromkeys("mdHMSIyV", 2)}
"""Number of digits of a directive that is followed by another directive without a separator."""
_ALIASES = {
    **{"B": "%b", "h": "%b", "A": "%a", "e": "%d", "k": "%H", "l": "%I", "L": "%f", "N": "%f", "Z": "%z"},
    **{"P": "%p", "F": "%Y-%m-%d", "T": "%H:%M:%S", "R": "%H:%M", "D": "%m/%d/%y", "r": "%I:%M:%S %p"},
    **{"c": "%a %b %d %H:%M:%S %Y", "n": " ", "t": " "},
}
"""The text by which a directive is replaced, such as other directives, with the same meanings as in C."""
_NEEDS = (
    ("day", "month", "%m is missing"),
    ("week_year", "week", "%V is missing"),
    ("hour12", "half", "%p is missing, as %I is an hour from 1 to 12"),
    ("half", "hour12", "%I is missing, as %p is for an hour from 1 to 12"),
)
"""Parts of a time that require another part, and the error message if the other part is missing."""


def _build_clock_pattern(marks: str) -> str:
    """Return the pattern of a time of day with its zone; `marks` are the separators between its numbers."""
    return (
        f"(?P<hour>[0-9]{{2}}|[0-9](?=[{marks}]| ?[AaPp]))(?:[{marks}](?P<minute>[0-9]{{2}})"
        f"(?:[{marks}](?P<second>[0-9]{{2}})(?:[.,](?P<fraction>[0-9]{{1,9}}))?)?)?(?: ?(?P<half>{_HALF}))?"
        f"(?: ?(?P<zone>{_ZONE})(?:\\[[A-Za-z0-9_/+-]+\\])?)?"
    )


_ISO = (
    "(?P<year>[0-9]{4})(?:-(?P<month>[0-9]{2})(?:-(?P<day>[0-9]{2}))?|-(?P<day_of_year>[0-9]{3})"
    "|-?W(?P<week>[0-9]{2})(?:-?(?P<weekday>[1-7]))?|[- ]?[Qq](?P<quarter>[1-4]))"
    f"(?:(?:[Tt]| {{1,2}}){_build_clock_pattern(':')})?"
)
"""ISO 8601 and similar forms, with AM and PM, a comma before fractions, UTC, months and quarters."""
_WHOLE = "(?:[.]0*)?"
"""Fraction of zeros that a whole number may have."""
DATE_PARTS: Mapping[str, re.Pattern[str]] = {
    "year": re.compile(f"(?:(?P<year>[0-9]{{3,4}})|(?P<short_year>{_TWO})){_WHOLE}"),
    "quarter": re.compile(f"(?:[Qq] *)?(?P<quarter>[1-4]){_WHOLE}"),
    "month": re.compile(f"(?P<month>{_TWO}|{MONTH_NAME}){_WHOLE}"),
    "day": re.compile(f"(?P<day>{_TWO}){_WHOLE}"),
    "day_of_year": re.compile(f"(?P<day_of_year>[0-9]{{1,3}}){_WHOLE}"),
    "week": re.compile(f"(?:[WwKk]+ *)?(?P<week>{_TWO}){_WHOLE}"),
}
"""Patterns of the parts of a date in separate columns."""
_DAY_PART = "(?P<day_part>0?[.][0-9]*[1-9][0-9]*(?:[eE]-[0-9]+)?)"
_MARKED_CLOCK = f"(?:(?:1899-12-3[01]|1900-01-0[01])[ T])?[ T]*(?=.*[:.hAaPp]){_build_clock_pattern(':.h')}"
"""A time of day with separators. Spreadsheets may write the date of their day 0 before the time."""
_DIGITS = f"(?P<hour>{_TWO})(?P<minute>[0-9]{{2}})(?P<second>[0-9]{{2}})?{_WHOLE}"
_HOUR, _MINUTE = f"(?P<hour>{_TWO})", f"(?P<minute>{_TWO}){_WHOLE}"
CLOCK_PARTS: Mapping[str, tuple[re.Pattern[str], ...]] = {
    part: tuple(map(re.compile, patterns))
    for part, patterns in (
        (
            "time",
            (_DAY_PART, _MARKED_CLOCK, _DIGITS, f"(?P<hour>00?){_WHOLE}"),
        ),  # the text `5` may mean 5 hours or 5 minutes
        ("hhmm", (_DAY_PART, _MARKED_CLOCK, _DIGITS, _MINUTE)),
        ("hour", (f"{_HOUR}(?:00)?{_WHOLE}", f"(?=.*:){_MARKED_CLOCK}")),
        ("minute", (_MINUTE,)),
        ("second", ("(?P<second_count>[0-5]?[0-9](?:[.][0-9]*)?)",)),
        ("minute_of_day", ("(?P<minute_count>[0-9]{1,4}(?:[.][0-9]*)?)",)),
        ("second_of_day", ("(?P<second_count>[0-9]{1,5}(?:[.][0-9]*)?)",)),
    )
}
"""Patterns of the parts of a time of day in separate columns. The sum of the parts is the time. Of several patterns of
a part, the first that matches is used.
"""


_Parts = Mapping[str, str | None]


class TimePattern(NamedTuple):
    """The pattern of a time as text: `regex` matches the whole trimmed text and has a named group for each part.

    width: number of digits of a format without any other character, such as %Y%m%d; 0 for other formats. lost: maximum
    number of leading zeros that may be missing because the time was stored as a number.
    """

    regex: re.Pattern[str]
    width: int = 0
    lost: int = 0


class TimeOfDay(NamedTuple):
    """Microseconds since 0:00, and the microseconds by which the clock is ahead of UTC (None without an offset)."""

    micros: int
    offset: int | None = None


def parse_duration_us(text: str) -> int:
    """Return the microseconds in a duration such as 90d, 12h, 30min, 45s, 500ms or 2w.

    Raises:
        ValueError: `text` is not a duration above zero.
    """
    match = _DURATION.fullmatch(text)
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a duration")
    return round(float(match[1]) * UNIT_US[_DURATIONS[match[2]]])


@cache
def _compile_pattern(time_format: str | None) -> TimePattern:
    """Compile a time format to a regular expression; the format None means ISO 8601.

    Raises:
        ValueError: a directive is unknown or repeated, or the date is incomplete; the message names the error.
    """
    if time_format is None:
        return TimePattern(re.compile(_ISO))
    tokens = _split_format(time_format)
    codes = [code for code, _ in tokens]
    _check_complete([_DIRECTIVES[code][0] for code in codes if code])
    regex = ""
    for place, (code, literal) in enumerate(tokens):
        if not code:
            regex += " +" if literal == " " else re.escape(literal)
            continue
        part, expression = _DIRECTIVES[code]
        beside = (*codes[max(place - 1, 0) : place], *codes[place + 1 : place + 2])
        if code in _WIDTHS and any(one in _WIDTHS for one in beside):
            expression = f"[0-9]{{{_WIDTHS[code]}}}"
        regex += f"(?P<{part}>{expression})"
        if code == "S" and "f" not in codes:
            regex += "(?:[.,](?P<fraction>[0-9]{1,9}))?"
    digits = all(code in _WIDTHS or code == "f" for code in codes)
    width = sum(_WIDTHS.get(code, 0) for code in codes) if digits else 0
    lost = {"Y": 0, "G": 0, "y": width - 1}.get(codes[0], 1) if width else 0
    return TimePattern(re.compile(regex), width, lost)


def _split_format(time_format: str) -> list[tuple[str, str]]:
    """Return the letter of each directive, or "" and a literal character; %S and the fraction after it are one part.

    Raises:
        ValueError: a directive is unknown.
    """
    plain = re.sub("%[-_#]?(.?)", lambda found: _ALIASES.get(found[1], f"%{found[1]}"), time_format)
    tokens: list[tuple[str, str]] = re.findall("%(.?)|(.)", re.sub("(?<!%)%S[.,]%f", "%S", plain), re.DOTALL)
    unknown = next(
        (code for code, literal in tokens if not literal and code not in ("%", *_DIRECTIVES)), None
    )
    if unknown is not None:
        raise ValueError(f"%{unknown} is not known; there are {DIRECTIVES}")
    return [("", "%") if code == "%" else (code, literal) for code, literal in tokens]


def _check_complete(parts: list[str]) -> None:
    """Refuse a format that repeats a part of a time, or lacks a part of the date.

    Raises:
        ValueError: a part is repeated or missing; the message names the error.
    """
    for part in parts:
        if parts.count(part) > 1:
            raise ValueError(f"the {part.replace('_', ' ')} is given twice")
    if {"year", "short_year"}.issubset(parts):
        raise ValueError("the year is given twice")
    if {"year", "short_year", "week_year", "epoch"}.isdisjoint(parts):
        raise ValueError("%Y is missing")
    for part, other, problem in _NEEDS:
        if part in parts and other not in parts:
            raise ValueError(problem)


class TimeParser:
    """Parser that converts times as text to microseconds since 1970-01-01 UTC.

    Args:
        time_format: None for ISO 8601, a count of `jobs.core.time_counts`, or directives such as %Y %m %d %H %M %S.
        zone: time zone of times without an offset.

    Raises:
        ValueError: a directive is unknown or repeated, or the date is incomplete; the message names the error.
    """

    def __init__(self, time_format: str | None, zone: tzinfo) -> None:
        self._zone = zone
        self._count = count_of(time_format)
        self._pattern = TimePattern(re.compile("")) if self._count else _compile_pattern(time_format)
        self._match = self._pattern.regex.fullmatch

    @property
    def reads_numbers(self) -> bool:
        """Return whether times in this format may be stored as numbers."""
        return self._count is not None or self._pattern.width > 0

    def __call__(self, text: str) -> int | None:
        """Return the microseconds since 1970, or None if `text` is not a time in this format."""
        text = text.strip(" ")
        if self._count is not None:
            value, zone, is_local = count_us(text, self._count), None, self._count.is_local
        else:
            match = self._match(self._whole(text) if self._pattern.width else text)
            if not match:
                return None
            parts = match.groupdict()
            value, zone, is_local = _compute_wall_us(parts), parts.get("zone"), not parts.get("epoch")
        if value is None:
            return None
        if zone is not None:
            offset = _parse_offset(zone, value, self._zone)
            value = MAX_US + 1 if offset is None else value - offset
        elif is_local and self._zone is not UTC and MIN_US <= value <= MAX_US:
            value = convert_local_us(value, self._zone)
        return value if MIN_US <= value <= MAX_US else None

    def _whole(self, text: str) -> str:
        """Return a time of digits without a fraction of zeros, and with the leading zeros that a number has lost."""
        digits, _, fraction = text.partition(".")
        if not digits.isdigit() or fraction.strip("0"):
            return text
        short = self._pattern.width - len(digits)
        return digits.zfill(self._pattern.width) if 0 < short <= self._pattern.lost else digits


def parse_date_us(texts: Mapping[str, str]) -> int | None:
    """Return the microseconds from 1970 to a date whose parts are in separate columns; None if the date is not valid.

    texts: trimmed values of the columns, by name of the part (`DATE_PARTS`).
    """
    parts: dict[str, str | None] = {}
    for part, text in texts.items():
        match = DATE_PARTS[part].fullmatch(text)
        if match is None:
            return None
        parts |= match.groupdict()
    return _compute_wall_us(parts)


def parse_time_of_day(text: str, part: str = "time") -> TimeOfDay | None:
    """Parse a trimmed text from a separate column as a time of day or a part of the time; None if it is not valid.

    part: part of the time that the column contains, a name in `CLOCK_PARTS`.
    """
    match = next((found for one in CLOCK_PARTS[part] if (found := one.fullmatch(text))), None)
    if match is None:
        return None
    parts = match.groupdict()
    if day_part := parts.get("day_part"):
        return TimeOfDay(round(float(day_part) * UNIT_US["day"] / 1000) * 1000)  # a fraction of a day
    for unit in ("minute", "second"):
        if count := parts.get(f"{unit}_count"):
            micros = round(float(count) * UNIT_US[unit])
            return TimeOfDay(micros) if micros <= UNIT_US["day"] else None
    micros, zone = _compute_clock_us(parts), parts.get("zone")
    offset = None if zone is None else _parse_offset(zone, 0, UTC)
    return None if micros is None or offset is None and zone is not None else TimeOfDay(micros, offset)


def _compute_wall_us(parts: _Parts) -> int | None:
    """Return the microseconds from 1970 to a date and time, both on the same clock; None if these do not exist."""
    epoch = parts.get("epoch")
    if epoch:
        return int(epoch) * 1_000_000 + _parse_fraction(parts)
    clock = _compute_clock_us(parts)
    try:
        return (
            None if clock is None else (_compute_day(parts).toordinal() - EPOCH_DAY) * UNIT_US["day"] + clock
        )
    except (ValueError, OverflowError):
        return None


def _parse_fraction(parts: _Parts) -> int:
    fraction = parts.get("fraction")
    return int(fraction.ljust(6, "0")[:6]) if fraction else 0


def _compute_clock_us(parts: _Parts) -> int | None:
    """Return the microseconds of a time of day; None if the time does not exist."""
    part = parts.get
    hour, minute, second = int(part("hour") or 0), int(part("minute") or 0), int(part("second") or 0)
    half = part("half")
    if half:
        hour = int(part("hour12") or hour)
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + 12 * (half[0] in "Pp")
    clock = (hour * 3600 + minute * 60 + second) * 1_000_000 + _parse_fraction(parts)
    return clock if minute <= 59 and second <= 59 and clock <= UNIT_US["day"] else None


def _compute_day(parts: _Parts) -> date:
    """Return the day of a time; without a day in the text, return the first day of the week, month, quarter or year.

    Raises:
        ValueError, OverflowError: the day does not exist.
    """
    part = parts.get
    year, month, day = part("year") or part("week_year"), part("month"), part("day")
    number = int(year) if year else _complete_year(part("short_year"))
    if month and not month.isdigit():
        month = _MONTH_NAMES.index(month[:3].lower()) // 3 + 1
    if month and day:
        return date(number, int(month), int(day))
    week, day_of_year, quarter = part("week"), part("day_of_year"), part("quarter")
    if week:
        name = part("day_name")
        weekday = _DAY_NAMES.index(name[:3].lower()) // 3 + 1 if name else int(part("weekday") or 1)
        return date.fromisocalendar(number, int(week), weekday)
    if day_of_year:
        found = date(number, 1, 1) + timedelta(days=int(day_of_year) - 1)
        if found.year != number:
            raise ValueError
        return found
    return date(number, 3 * int(quarter) - 2 if quarter else int(month or 1), 1)


def _complete_year(text: str | None) -> int:
    """Return the full year for a year of two digits, between 1969 and 2068, as in C."""
    number = int(text or 0)
    return number + (1900 if number >= 69 else 2000)


def load_zone(name: str) -> tzinfo:
    """Return the time zone of an IANA name; UTC is always the same object, so that `is` can compare it."""
    return UTC if name == "UTC" else ZoneInfo(name)


def convert_local_us(wall: int, zone: tzinfo) -> int:
    """Convert a local time in `zone` to UTC; both times are in microseconds since 1970.

    A time that occurs twice, when clocks go back, means the earlier moment. A time that clocks skip, when they go
    forward, is moved forward by the length of the gap.
    """
    offset = to_datetime(wall).replace(tzinfo=zone).utcoffset() or timedelta(0)
    return wall - offset // timedelta(microseconds=1)


def _parse_offset(zone: str, wall: int, local: tzinfo) -> int | None:
    """Return the microseconds by which a clock is ahead of UTC; None if the offset is impossible or unknown.

    Args:
        zone: an offset or an abbreviation.
        wall: local time, which determines the offset of an abbreviation.
        local: time zone whose abbreviations are valid.
    """
    name = zone.upper()
    if name in ("Z", "UTC", "GMT"):
        return 0
    if name.isalpha():
        moment = to_datetime(wall).replace(tzinfo=local) if MIN_US <= wall <= MAX_US else None
        folds = [] if moment is None else [moment, moment.replace(fold=1)]
        offset = next((one.utcoffset() for one in folds if one.tzname() == name), None)
        return None if offset is None else offset // timedelta(microseconds=1)
    text = name.removeprefix("UTC").removeprefix("GMT")
    hours, minutes = int(text[1:3]), int(text[3:].replace(":", "") or "0")
    if minutes > 59 or hours * 60 + minutes > 18 * 60:
        return None
    value = (hours * 60 + minutes) * UNIT_US["minute"]
    return -value if text[0] == "-" else value


def trigger_seconds(trigger: str) -> float | None:
    """Return the seconds between micro-batches; None for `available-now`, which processes the available rows and ends.

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


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)
