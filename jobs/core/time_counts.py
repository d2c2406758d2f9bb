"""Times written as a count of units since an origin, named after the programs that write such counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import NamedTuple

MIN_US = -62_135_596_800_000_000  # 0001-01-01
MAX_US = 253_402_300_799_999_999  # the end of 9999-12-31
EPOCH_DAY = date(1970, 1, 1).toordinal()
UNIT_US = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_SECOND, _DAY = UNIT_US["second"], UNIT_US["day"]
_SINCE = re.compile(
    r"(microsecond|millisecond|second|minute|hour|day)s since ([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})"
    r"(?:[T ]([0-9]{1,2}):([0-9]{1,2})(?::([0-9]{1,2})(?:[.]0*)?)?)?(?: ?(Z|UTC))?"
)
_COUNT = re.compile(r"([+-]?)([0-9]{1,19})(?:[.,]([0-9]*))?")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_SCIENTIFIC = re.compile(r"[+-]?[0-9](?:[.][0-9]{7,})[eE][+]?[0-9]{1,2}")
"""A number with an exponent and at least eight digits; with fewer digits a spreadsheet has rounded the time."""


def compute_wall_us(moment: datetime) -> int:
    """Return the microseconds from 1970-01-01 00:00 to a naive time; both times are on the same clock."""
    seconds = (
        (moment.toordinal() - EPOCH_DAY) * 86_400 + moment.hour * 3600 + moment.minute * 60 + moment.second
    )
    return seconds * 1_000_000 + moment.microsecond


class Count(NamedTuple):
    """Times as numbers: the number n means the time `origin` plus n times `micros / parts`, in microseconds.

    origin     time, in microseconds since 1970, that the number 0 means
    is_local   the time is on the clock of the spec's time zone, and not in UTC
    is_rounded the numbers have about 10 digits, so times are rounded to milliseconds, else cut to microseconds
    is_years   the number is a year plus the elapsed fraction of that year
    """

    micros: int
    parts: int = 1
    origin: int = 0
    is_local: bool = False
    is_rounded: bool = False
    is_years: bool = False

    def to_us(self, digits: int, scale: int) -> int:
        """Return the microseconds since 1970 of the number digits / scale, on the count's clock."""
        if self.is_years:
            return _compute_year_us(digits, scale)
        if self.is_rounded:
            millis = (2 * digits * (self.micros // 1000) + scale) // (2 * scale)
            return millis * 1000 + self.origin
        size = abs(digits) * self.micros // (scale * self.parts)
        return (-size if digits < 0 else size) + self.origin

    def convert_us(self, micros: int) -> float:
        """Return the number that means a time in microseconds since 1970; for years the number is approximate."""
        if self.is_years:
            return 1970.0 + micros / (365.2425 * _DAY)
        return (micros - self.origin) * self.parts / self.micros


def _compute_year_us(digits: int, scale: int) -> int:
    """Return the microseconds of a year with a fraction, rounded to milliseconds; an invalid time if out of range."""
    year, part = divmod(digits, scale)
    if not 1 <= year <= 9998:
        return MAX_US + 1
    start = compute_wall_us(datetime(year, 1, 1))
    length = (compute_wall_us(datetime(year + 1, 1, 1)) - start) // 1000
    return start + (2 * part * length + scale) // (2 * scale) * 1000


def _compute_origin(year: int, month: int = 1, day: int = 1) -> int:
    return compute_wall_us(datetime(year, month, day))


COUNTS: Mapping[str, Count] = {
    "epoch_seconds": Count(_SECOND),
    "epoch_milliseconds": Count(1_000),
    "epoch_microseconds": Count(1),
    "epoch_nanoseconds": Count(1, 1_000),
    "spreadsheet_days": Count(_DAY, 1, _compute_origin(1899, 12, 30), True, True),
    "epoch_days": Count(_DAY, is_local=True, is_rounded=True),
    "julian_days": Count(_DAY, 1, -210_866_760_000 * _SECOND, False, True),
    "matlab_days": Count(_DAY, 1, -719_529 * _DAY, True, True),
    "modified_julian_days": Count(_DAY, 1, _compute_origin(1858, 11, 17), False, True),
    "decimal_years": Count(1, is_local=True, is_years=True),
    "windows_filetime": Count(1, 10, _compute_origin(1601)),
    "dotnet_ticks": Count(1, 10, MIN_US, True),
    "webkit_microseconds": Count(1, 1, _compute_origin(1601)),
    "sas_seconds": Count(_SECOND, 1, _compute_origin(1960), True),
    "sas_days": Count(_DAY, 1, _compute_origin(1960), True, True),
    "stata_days": Count(_DAY, 1, _compute_origin(1960), True, True),
    "stata_milliseconds": Count(1_000, 1, _compute_origin(1960), True),
    "cocoa_seconds": Count(_SECOND, 1, _compute_origin(2001)),
    "gps_seconds": Count(_SECOND, 1, _compute_origin(1980, 1, 6)),
    "ntp_seconds": Count(_SECOND, 1, _compute_origin(1900)),
    "labview_seconds": Count(_SECOND, 1, _compute_origin(1904)),
    "spss_seconds": Count(_SECOND, 1, _compute_origin(1582, 10, 14), True),
    "python_ordinal_days": Count(_DAY, 1, MIN_US - _DAY, True, True),
    "spreadsheet_days_1904": Count(_DAY, 1, _compute_origin(1904), True, True),
    "epoch_minutes": Count(60 * _SECOND),
    "epoch_hours": Count(3_600 * _SECOND),
}
"""The counts by their names in `time_format`, the most common first.

The counts contain no leap seconds: gps_seconds are ahead of UTC by the leap seconds, which are 18 s since 2017.
"""


@cache
def count_of(time_format: str | None) -> Count | None:
    """Return the count of a time format, such as epoch_days or `hours since 1900-01-01`; None for other formats."""
    known = COUNTS.get(time_format or "")
    match = _SINCE.fullmatch(time_format or "")
    if known is not None or match is None:
        return known
    try:
        begin = datetime(*(int(part or 0) for part in match.groups()[1:-1]))  # pyright: ignore[reportArgumentType]
    except ValueError:
        return None
    return Count(UNIT_US[match[1]], 1, compute_wall_us(begin), match[8] is None, match[1] == "day")


def count_us(text: str, count: Count) -> int | None:
    """Return the microseconds of a count given as text, on the count's clock; None if not valid or out of range."""
    if _SCIENTIFIC.fullmatch(text):
        text = format(Decimal(text), "f")
    match = _COUNT.fullmatch(text)
    if not match or _THOUSANDS.fullmatch(text):
        return None
    fraction = (match[3] or "")[:18]
    digits = int(match[2] + fraction)
    value = count.to_us(-digits if match[1] == "-" else digits, 10 ** len(fraction))
    return value if MIN_US <= value <= MAX_US else None


def to_datetime(micros: int) -> datetime:
    """Convert microseconds since 1970 to a naive time."""
    return datetime(1970, 1, 1) + timedelta(microseconds=micros)
