"""Durations, and event times as text: one rule for every command.

A time format becomes a regular expression, whose named groups have the parts of a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo

from jobs.core.errors import UserError
from jobs.core.time_counts import MAX_US, MIN_US, Count, count_of, count_us, to_datetime, wall_us

AVAILABLE_NOW = "available-now"


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
    *(
        "%Y-%m-%d",
        "%Y/%m/%d",
        "%Y.%m.%d",
        "%d.%m.%Y",
        "%d/%m/%Y",
        "%m/%d/%Y",
        "%d-%m-%Y",
        "%m-%d-%Y",
        "%Y%m%d",
    ),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%y", "%m-%d-%y", "%y-%m-%d", "%y/%m/%d"),
)
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
    *(
        "%Y%m%d%H%M%S",
        "%Y%m%d%H%M",
        "%Y%m%d%H",
        "%Y%m%dT%H%M%S%z",
        "%Y%m%dT%H%M%S",
        "%Y%m%d-%H%M%S",
        "%Y%m%d_%H%M%S",
    ),
    *("%Y%m%d %H%M%S", "%Y%m%d %H%M", "%Y%m%dT%H%M", "%Y%m%dT%H%M%z", "%Y-%m-%dT%H%M%S", "%Y-%m-%d_%H:%M:%S"),
    *("%Y-%m-%d %H-%M-%S", "%Y-%m-%d %H.%M.%S", "%Y-%m-%d_%H-%M-%S", "%d.%m.%Y %H.%M", "%Y-%m-%d-%H.%M.%S"),
)
"""Formats of text beside ISO 8601, the ones of spreadsheets among them."""
COMPACT_FORMATS = {
    4: ("%Y",),
    6: ("%y%m%d", "%Y%m"),
    7: ("%Y%j",),
    8: ("%Y%m%d",),
    10: ("%y%m%d%H%M", "%Y%m%d%H"),
    12: ("%Y%m%d%H%M", "%y%m%d%H%M%S"),
    14: ("%Y%m%d%H%M%S",),
    17: ("%Y%m%d%H%M%S%f",),
}
"""Formats of digits alone, by the number of digits."""
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

_MONTHS = tuple(
    f"{name[:3]}(?:{name[3:]})?"
    for name in "january february march april may june july august sept september october november december".split()
)
"""English names of months, whole or their first three letters (of September also four), as regular expressions."""
_MONTH_NAMES = "janfebmaraprmayjunjulaugsepoctnovdec"
_DAY_NAMES = "montuewedthufrisatsun"
_TWO = "[0-9]{1,2}"
_ZONE = "(?:[Uu][Tt][Cc]|[Gg][Mm][Tt])?[+-][0-9]{2}(?::?[0-9]{2})?|[Zz]|[A-Z]{3,5}"
"""An offset, Z, or an abbreviation: UTC, GMT, or one that the spec's time zone has."""
_DIRECTIVES = {
    "Y": ("year", "[0-9]{4}"),
    "m": ("month", _TWO),
    "b": ("month", f"(?i:(?:{'|'.join(_MONTHS)})[.]?)"),
    "d": ("day", _TWO),
    "H": ("hour", _TWO),
    "M": ("minute", _TWO),
    "S": ("second", _TWO),
    "f": ("fraction", "[0-9]{1,9}"),
    "z": ("zone", _ZONE),
    "I": ("hour12", _TWO),
    "p": ("half", "[AaPp][.]?[Mm][.]?"),
    "y": ("short_year", "[0-9]{2}"),
    "j": ("day_of_year", "[0-9]{1,3}"),
    "G": ("week_year", "[0-9]{4}"),
    "V": ("week", _TWO),
    "u": ("weekday", "[1-7]"),
    "a": ("day_name", "(?i:(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?[.]?)"),
    "q": ("quarter", "[1-4]"),
    "s": ("epoch", "[0-9]{1,12}"),
}
_WIDTHS = {"Y": 4, "G": 4, "j": 3, "u": 1, "q": 1, **dict.fromkeys("mdHMSIyV", 2)}
"""Digits of a directive where no other character stands between it and the next one."""
_SAME = {
    **{"B": "b", "h": "b", "A": "a", "e": "d", "k": "H", "l": "I", "L": "f", "N": "f", "Z": "z", "P": "p"},
}
_SHORT = {
    **{"F": "%Y-%m-%d", "T": "%H:%M:%S", "R": "%H:%M", "D": "%m/%d/%y", "r": "%I:%M:%S %p"},
    **{"c": "%a %b %d %H:%M:%S %Y", "n": " ", "t": " "},
}
"""Directives that stand for others, as in C."""
DIRECTIVES = " ".join(f"%{one}" for one in _DIRECTIVES)
_DATE = (
    "(?P<year>[0-9]{4})(?:-(?P<month>[0-9]{2})(?:-(?P<day>[0-9]{2}))?|-(?P<day_of_year>[0-9]{3})"
    "|-?W(?P<week>[0-9]{2})(?:-?(?P<weekday>[1-7]))?|[- ]?[Qq](?P<quarter>[1-4]))"
)
_CLOCK = (
    "(?:[Tt]| {1,2})(?P<hour>[0-9]{2}|[0-9](?=:| ?[AaPp]))(?::(?P<minute>[0-9]{2})"
    "(?::(?P<second>[0-9]{2})(?:[.,](?P<fraction>[0-9]{1,9}))?)?)?(?: ?(?P<half>[AaPp][.]?[Mm][.]?))?"
)
ISO = f"{_DATE}(?:{_CLOCK}(?: ?(?P<zone>{_ZONE})(?:\\[[A-Za-z0-9_/+-]+\\])?)?)?"
"""ISO 8601, and what is written like it: AM and PM, a comma before fractions, UTC, months and quarters."""


@dataclass(frozen=True, slots=True)
class TimePattern:
    """The pattern of a time as text: `regex` matches all of it, trimmed, with a named group for each part.

    width: digits of a format without any other character, such as %Y%m%d; 0 of other formats.
    lost: how many zeros at its beginning may be missing, as in a number.
    """

    regex: str
    width: int = 0
    lost: int = 0


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
        return TimePattern(ISO)
    tokens = list(_tokens(time_format))
    codes = [code for code, _ in tokens if code]
    parts = [_DIRECTIVES[code][0] for code in codes]
    for part in parts:
        if parts.count(part) > 1:
            raise ValueError(f"the {part.replace('_', ' ')} is given twice")
    _check_complete(frozenset(parts))
    regex = ""
    for place, (code, literal) in enumerate(tokens):
        before, after = (tokens[at] if 0 <= at < len(tokens) else ("", "") for at in (place - 1, place + 1))
        if not code:
            optional = literal in ".," and (before[0], after[0]) == ("S", "f")
            regex += "" if optional else _literal(literal)
            continue
        part, expression = _DIRECTIVES[code]
        if code in _WIDTHS and (before[0] in _WIDTHS or after[0] in _WIDTHS and after[0]):
            expression = f"[0-9]{{{_WIDTHS[code]}}}"
        if code == "f" and place > 1 and before[1] in (".", ",") and tokens[place - 2][0] == "S":
            regex += f"(?:[.,](?P<fraction>{expression}))?"
        else:
            regex += f"(?P<{part}>{expression})"
        if code == "S" and "f" not in codes and after[1] not in (".", ","):
            regex += "(?:[.,](?P<fraction>[0-9]{1,9}))?"
    digits = all(code in _WIDTHS or code == "f" for code, _ in tokens)
    width = sum(_WIDTHS.get(code, 0) for code in codes) if digits else 0
    lost = {"Y": 0, "G": 0, "y": width - 1}.get(codes[0], 1) if width else 0
    return TimePattern(regex, width, lost)


def _tokens(time_format: str) -> Iterator[tuple[str, str]]:
    """Yield each directive's letter, or "" and a literal character.

    Raises:
        ValueError: a directive is unknown.
    """
    position = 0
    while position < len(time_format):
        if time_format[position] != "%":
            yield "", time_format[position]
            position += 1
            continue
        position += 1
        if time_format[position : position + 1] in ("-", "_", "#"):  # as in %-d: without a zero before it
            position += 1
        code = time_format[position : position + 1]
        position += 1
        if code == "%":
            yield "", "%"
        elif code in _SHORT:
            yield from _tokens(_SHORT[code])
        elif _SAME.get(code, code) in _DIRECTIVES:
            yield _SAME.get(code, code), ""
        else:
            raise ValueError(f"%{code} is not known; there are {DIRECTIVES}")


def _literal(char: str) -> str:
    if char == " ":
        return " +"
    return char if char.isalnum() else f"[{char}]" if char not in "\\^[]" else f"\\{char}"


def _check_complete(parts: frozenset[str]) -> None:
    """Refuse a format without a whole date.

    Raises:
        ValueError: the message says what is missing.
    """
    if {"year", "short_year"} <= parts:
        raise ValueError("the year is given twice")
    dated = parts & {"year", "short_year", "week_year", "epoch"}
    if not dated:
        raise ValueError("%Y is missing")
    needs = (
        ("day", "month", "%m is missing"),
        ("week_year", "week", "%V is missing"),
        ("hour12", "half", "%p is missing, as %I is an hour from 1 to 12"),
        ("half", "hour12", "%I is missing, as %p is for an hour from 1 to 12"),
    )
    for part, other, problem in needs:
        if part in parts and other not in parts:
            raise ValueError(problem)


class TimeParser:
    """Parse times as text to microseconds since 1970-01-01 UTC.

    Args:
        time_format: None for ISO 8601, a count of `jobs.core.time_counts`, or directives such as %Y %m %d %H %M %S.
        zone: the time zone of a time without an offset of its own.
    """

    def __init__(self, time_format: str | None, zone: tzinfo) -> None:
        self._zone = zone
        self._count = count_of(time_format)
        self._pattern = TimePattern("") if self._count else time_pattern(time_format)
        self._match = re.compile(self._pattern.regex).fullmatch

    def __call__(self, text: str) -> int | None:
        """Return the microseconds, or None if `text` is not a time in this format."""
        text = text.strip(" ")
        if self._count is not None:
            return self._of_count(text, self._count)
        match = self._match(self._whole(text) if self._pattern.width else text)
        if not match:
            return None
        parts = match.groupdict()
        try:
            value = _wall_of(parts)
        except ValueError:
            return None
        zone = parts.get("zone")
        if zone is not None:
            offset = _offset(zone, value, self._zone)
            value = MAX_US + 1 if offset is None else value - offset
        elif self._zone is not UTC and MIN_US <= value <= MAX_US and not parts.get("epoch"):
            value = local_us(to_datetime(value), self._zone)
        return value if MIN_US <= value <= MAX_US else None

    def is_local(self, text: str) -> bool:
        """Tell if a text that is a time in this format has no offset of its own."""
        if self._count is not None:
            return self._count.is_local
        match = self._match(self._whole(text.strip(" ")) if self._pattern.width else text.strip(" "))
        parts = match.groupdict() if match else {}
        return parts.get("zone") is None and parts.get("epoch") is None

    def _whole(self, text: str) -> str:
        """Return a time of digits alone with the zeros that a number has lost, and without a fraction of zeros."""
        digits, _, fraction = text.partition(".")
        if not digits.isdigit() or fraction.strip("0"):
            return text
        short = self._pattern.width - len(digits)
        return digits.zfill(self._pattern.width) if 0 < short <= self._pattern.lost else digits

    def _of_count(self, text: str, count: Count) -> int | None:
        value = count_us(text, count)
        if value is None or not count.is_local or self._zone is UTC:
            return value
        value = local_us(to_datetime(value), self._zone)
        return value if MIN_US <= value <= MAX_US else None


def _wall_of(parts: Mapping[str, str | None]) -> int:
    """Return the microseconds from 1970 to a time on its own clock.

    Raises:
        ValueError: there is no such date, or no such time of day.
    """
    part = parts.get
    fraction = part("fraction")
    micros = int(fraction.ljust(6, "0")[:6]) if fraction else 0
    if part("epoch"):
        return int(part("epoch") or 0) * 1_000_000 + micros
    hour, minute, second = int(part("hour") or 0), int(part("minute") or 0), int(part("second") or 0)
    half = part("half")
    if half:
        hour = int(part("hour12") or hour)
        if not 1 <= hour <= 12:
            raise ValueError
        hour = hour % 12 + 12 * (half[0] in "Pp")
    if minute > 59 or second > 59 or hour > 23 and (hour, minute, second, micros) != (24, 0, 0, 0):
        raise ValueError
    month, day = part("month"), part("day")
    if month and day:
        date_of = date(int(part("year") or _whole_year(part("short_year"))), _month(month), int(day))
    else:
        date_of = _first_day(part)
    days = date_of.toordinal() - _EPOCH_DAY
    return (days * 86_400 + hour * 3600 + minute * 60 + second) * 1_000_000 + micros


_EPOCH_DAY = date(1970, 1, 1).toordinal()


def _first_day(part: Callable[[str], str | None]) -> date:
    """Return the day of a time without month and day: by default the first of its week, month, quarter or year.

    Raises:
        ValueError: there is no such day.
    """
    year = int(part("year") or part("week_year") or _whole_year(part("short_year")))
    week, day_of_year, quarter = part("week"), part("day_of_year"), part("quarter")
    if week:
        name = part("day_name")
        number = _DAY_NAMES.index(name[:3].lower()) // 3 + 1 if name else int(part("weekday") or 1)
        return date.fromisocalendar(year, int(week), number)
    if day_of_year:
        found = date(year, 1, 1) + timedelta(days=int(day_of_year) - 1)
        if found.year != year:
            raise ValueError
        return found
    if quarter:
        return date(year, 3 * int(quarter) - 2, 1)
    return date(year, _month(part("month") or "1"), 1)


def _whole_year(text: str | None) -> int:
    """Return the year of two digits: 1969 to 2068, as in C."""
    number = int(text or 0)
    return number + (1900 if number >= 69 else 2000)


def _month(text: str) -> int:
    """Return a month's number, of its number or its English name."""
    return int(text) if text.isdigit() else _MONTH_NAMES.index(text[:3].lower()) // 3 + 1


def local_us(moment: datetime, zone: tzinfo) -> int:
    """Return the microseconds since the epoch of a naive time in `zone`.

    A time that occurs twice, as clocks go back, is the earlier one; one that is skipped, as they go forward, moves on
    by the gap. Java does the same.
    """
    if zone is UTC:
        return wall_us(moment)
    offset = moment.replace(tzinfo=zone).utcoffset() or timedelta(0)
    return wall_us(moment) - offset // timedelta(microseconds=1)


def _offset(zone: str, wall: int, local: tzinfo) -> int | None:
    """Return the microseconds by which a clock is ahead of UTC; None if the offset cannot be, or has no meaning.

    Args:
        zone: an offset or an abbreviation.
        wall: the time on that clock, for abbreviations.
        local: the time zone whose abbreviations are known.
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
    if minutes > 59 or hours * 60 + minutes > 18 * 60:  # Java's limit
        return None
    value = (hours * 60 + minutes) * 60_000_000
    return -value if text[0] == "-" else value


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
