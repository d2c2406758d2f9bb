"""Make one column of times from several: a date beside a time of day, or year, month, day and hour.

Whole columns are computed at once. Where each row has a time, the result is stored timestamps; else it is text: a time
in ISO 8601, or the parts of a row that make no time, which no reader of times takes for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.times import UNIT_US
from jobs.encoding import arrow
from jobs.landing.values.times import read_times

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Marks = NDArray[np.bool_]

DAY, HOUR, MINUTE = (UNIT_US[unit] for unit in ("day", "hour", "minute"))
NO_ZONE = np.iinfo(np.int64).min
"""The offset of a time of day that is written without one."""
_EIGHT = re.compile(r"\s*([0-9]{4})([0-9]{2})([0-9]{2})(?:[.]0*)?\s*")
_CLOCK = re.compile(
    r"\s*(?:1899-12-3[01]|1900-01-0[01])?[ T]*([0-9]{1,2})[:.h]([0-9]{2})(?:[:.]([0-9]{2})(?:[.,]([0-9]{1,9}))?)?"
    r"\s*(?:([AaPp])[.]?\s?[Mm][.]?)?\s*(Z|UTC|GMT|[+-][0-9]{2}:?[0-9]{2})?\s*"
)
_FRACTION = re.compile(r"\s*0?[.][0-9]*[1-9][0-9]*(?:[eE]-[0-9]+)?\s*")
_DIGITS = re.compile(r"(?:([0-9]{1,2})([0-9]{2})([0-9]{2})?)")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_CLOCK_DIRECTIVE = re.compile(r"%[HIMSfpzZ]")


class _Part(NamedTuple):
    """N values of a part of the time: numbers, which of them are valid, and offsets from UTC in microseconds."""

    values: Ints
    valid: Marks
    offset: Ints | None = None


def combine_times(columns: Mapping[str, pa.Array], names: Mapping[str, str], form: str | None) -> pa.Array:
    """Return N times as timestamps, or as text where some rows have parts that make no time.

    A row that lacks a part has no time. The hour 24 is the next day's 0:00.

    Args:
        columns: N values of each part of the time (`jobs.specs.column_names.TIME_PARTS`).
        names: what the column of each part is called, for the text of a row that has no time.
        form: `time_format` of the spec: of the date, or of date and time joined with a blank; None: any usual one.
    """
    present = np.ones(len(next(iter(columns.values()))), bool)
    for column in columns.values():
        present &= _present(column)
    joined = _read_joined(columns, form, present)
    if joined is None:
        date = _dates(columns, form, present)
        clock = _clocks(columns, present)
        time = date.values + clock.values
        zoned = np.zeros(len(time), bool) if clock.offset is None else clock.offset != NO_ZONE
        if clock.offset is not None:
            time = time - np.where(zoned, clock.offset, 0)
        valid = date.valid & clock.valid & present
    else:
        time, valid = joined.values, joined.valid & present
        zoned = np.full(len(time), "%z" in (form or ""))
    same_zone = bool(zoned[present].all() or not zoned[present].any())
    if bool((valid == present).all()) and same_zone:
        stamps = arrow.times(np.where(valid, time, 0), valid)
        return stamps if len(zoned) and zoned[present].any() else stamps.cast(pa.timestamp("us"))
    return _as_texts(columns, names, _Part(time, valid), zoned, present)


def _as_texts(
    columns: Mapping[str, pa.Array], names: Mapping[str, str], times: _Part, zoned: Marks, present: Marks
) -> pa.Array:
    """Return times in ISO 8601, and the columns with their values where they make none; null where one is missing."""
    written = np.datetime_as_string(np.where(times.valid, times.values, 0).astype("datetime64[us]")).tolist()
    marks = np.where(zoned, "Z", "").tolist()
    texts: list[str | None] = [time + mark for time, mark in zip(written, marks, strict=True)]
    bad = np.flatnonzero(present & ~times.valid)
    shown = {part: _texts(column.take(arrow.integers(bad))) for part, column in columns.items()}
    for at, place in enumerate(bad.tolist()):
        texts[place] = ", ".join(f"{names[part]}={shown[part][at]}" for part in columns)
    for place in np.flatnonzero(~present).tolist():
        texts[place] = None
    return arrow.texts(texts)


def _present(column: pa.Array) -> Marks:
    there = ~arrow.to_numpy(column.is_null())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        pc = arrow.compute()
        there &= arrow.to_numpy(pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(column), ""), False))
    elif pa.types.is_floating(column.type):
        there &= ~np.isnan(arrow.to_numpy(column.cast(pa.float64()), np.nan))
    return there


def _read_joined(columns: Mapping[str, pa.Array], form: str | None, present: Marks) -> _Part | None:
    """Return the times in a format that has date and time of day otherwise than side by side; None: it has not."""
    if form is None or not _CLOCK_DIRECTIVE.search(form) or _date_form(form) is not None:
        return None
    each = [_texts(column) for column in columns.values()]
    rows = zip(*each, strict=True)
    blank = " " if " " in form else ""
    texts = [
        blank.join(map(str, row)) if there else None
        for row, there in zip(rows, present.tolist(), strict=True)
    ]
    values, valid = _read(arrow.texts(texts), form)
    return _Part(values, valid)


def _date_form(form: str) -> str | None:
    """Return the format of the date in one of a date, a blank and a time of day; None if it is another one."""
    found = _CLOCK_DIRECTIVE.search(form)
    if found is None:
        return form
    date, clock = form[: found.start()], form[found.start() :]
    return (
        date.rstrip()
        if date.endswith(" ") and re.fullmatch(r"(%[HIMSp]|%S[.,]?%f|%f|%z|[:. ])*", clock)
        else None
    )


def _read(column: pa.Array, form: str | None) -> tuple[Ints, Marks]:
    return read_times(column, form, UTC, "a column of the time")


def _dates(columns: Mapping[str, pa.Array], form: str | None, present: Marks) -> _Part:
    """Return the days, in microseconds since 1970."""
    if "date" in columns:
        date = _whole_dates(columns["date"], None if form is None else _date_form(form))
        if form is None or date.valid[present].all() or not _CLOCK_DIRECTIVE.search(form):
            return date
        other = _whole_dates(columns["date"], form)  # the date has a time of day too, such as 00:00
        return _Part(np.where(date.valid, date.values, other.values), date.valid | other.valid)
    year = _numbers(columns["year"])
    years = np.where(year.values < 100, year.values + np.where(year.values < 69, 2000, 1900), year.values)
    month = _Part(np.ones_like(years), np.ones_like(present))
    if "month" in columns:
        month = _months(columns["month"])
    elif "quarter" in columns:
        month = _quarters(columns["quarter"])
    valid = year.valid & (years >= 1) & (years <= 9999) & (year.values >= 0)
    valid &= month.valid & (month.values >= 1) & (month.values <= 12)
    months = np.where(valid, (years - 1970) * 12 + month.values - 1, 0)
    first = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    if "day_of_year" in columns:
        day = _numbers(columns["day_of_year"])
        after = (months + 12).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    elif "day" in columns:
        day = _numbers(columns["day"])
        after = (months + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    else:
        return _Part(first * DAY, valid)
    valid &= day.valid & (day.values >= 1) & (day.values <= after - first)
    return _Part(np.where(valid, first + day.values - 1, 0) * DAY, valid)


def _whole_dates(column: pa.Array, form: str | None) -> _Part:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        column = arrow.texts(_texts(column))
    if pa.types.is_string(column.type) and form is None:
        column = _mapped(
            column, lambda text: _EIGHT.sub(r"\1-\2-\3", text) if _EIGHT.fullmatch(text) else text
        )
    elif form is not None and not pa.types.is_temporal(kind):
        column = _mapped(column, str.strip)
    values, valid = _read(column, form)
    return _Part(values // DAY * DAY, valid)  # beside a column of times of day, that of a date is empty


def _clocks(columns: Mapping[str, pa.Array], present: Marks) -> _Part:
    """Return the times of day, in microseconds."""
    none = _Part(np.zeros(len(present), np.int64), np.ones_like(present))
    if "time" in columns:
        return _times_of_day(columns["time"], is_compact=False)
    if "hhmm" in columns:
        return _times_of_day(columns["hhmm"], is_compact=True)
    if "hour" not in columns:
        return none
    hour = _hours(columns["hour"])
    minute = _numbers(columns["minute"]) if "minute" in columns else none
    second = _micros(columns["second"]) if "second" in columns else none
    time = hour.values + minute.values * MINUTE + second.values
    valid = hour.valid & minute.valid & (minute.values >= 0) & (minute.values < 60)
    valid &= second.valid & (second.values >= 0) & (second.values < MINUTE) & (time >= 0) & (time <= DAY)
    return _Part(np.where(valid, time, 0), valid)


def _hours(column: pa.Array) -> _Part:
    """Return hours 0 to 24 in microseconds: numbers, 1 to 24 hundreds, or times of day."""
    if pa.types.is_temporal(column.type):
        return _times_of_day(column, is_compact=True)
    if pa.types.is_string(column.type):
        texts, places = arrow.distinct_values(column)
        read = [_time_of_day(text, True) if ":" in text else None for text in texts]
        if any(one is not None for one in read):
            known = np.array([one is not None for one in read] + [False])[places]
            time = np.array([0 if one is None else one[0] for one in read] + [0])[places]
            rest = _hours(_mapped(column, lambda text: "" if ":" in text else text))
            return _Part(np.where(known, time, rest.values), known | rest.valid)
    hour = _numbers(column)
    hundreds = (hour.values >= 100) & (hour.values % 100 == 0)
    hours = np.where(hundreds, hour.values // 100, hour.values)
    valid = hour.valid & (hours >= 0) & (hours <= 24)
    return _Part(np.where(valid, hours, 0) * HOUR, valid)


def _times_of_day(column: pa.Array, is_compact: bool) -> _Part:
    """Return times of day in microseconds. is_compact: 5 and 15 are minutes after 0:00, as in a column of HHMM."""
    kind = column.type
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        raw = (
            column.cast(pa.int32()).cast(pa.int64()) if pa.types.is_time32(kind) else column.cast(pa.int64())
        )
        stored = arrow.to_numpy(raw).astype(np.int64)
        scale = {"s": 1_000_000, "ms": 1000, "us": 1, "ns": 1}[kind.unit]
        values = stored // 1000 if kind.unit == "ns" else stored * scale
        valid = (values >= 0) & (values <= DAY)
        return _Part(np.where(valid, values, 0), valid)
    if pa.types.is_temporal(kind):
        values, valid = _read(column, None)
        return _Part(values % DAY, valid)
    if not pa.types.is_string(kind):
        column = arrow.texts(_texts(column))
    texts, places = arrow.distinct_values(column)
    read = [_time_of_day(text, is_compact) for text in texts]
    values = np.array([0 if one is None else one[0] for one in read] + [0], np.int64)[places]
    offset = np.array([NO_ZONE if one is None else one[1] for one in read] + [NO_ZONE], np.int64)[places]
    return _Part(values, np.array([one is not None for one in read] + [False])[places], offset)


def _time_of_day(text: str, is_compact: bool) -> tuple[int, int] | None:
    """Return a time of day and its offset in microseconds; None if it is none."""
    if _FRACTION.fullmatch(text):  # of a day, as spreadsheets have it; to the millisecond, as their days
        return round(float(text) * DAY / 1000) * 1000, NO_ZONE
    match = _CLOCK.fullmatch(text)
    if match is None:
        number = re.sub(r"[.]0*$", "", text.strip())
        if not is_compact and len(number) < 3 and number.strip("0"):
            return None  # 5 may be an hour or minutes
        digits = _DIGITS.fullmatch(number.rjust(3, "0"))
        if digits is None:
            return None
        groups: tuple[Any, ...] = (*digits.groups(), None, None, None)
    else:
        groups = match.groups()
    hour, minute, second = (int(one or 0) for one in groups[:3])
    micros = int((groups[3] or "").ljust(6, "0")[:6])
    if groups[4] is not None:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if groups[4] in "pP" else 0)
    time = hour * HOUR + minute * MINUTE + second * 1_000_000 + micros
    if minute > 59 or second > 59 or time > DAY:
        return None
    zone = groups[5]
    if zone is None:
        return time, NO_ZONE
    if zone in ("Z", "UTC", "GMT"):
        return time, 0
    size = int(zone[1:3]) * HOUR + int(zone[-2:]) * MINUTE
    return time, -size if zone[0] == "-" else size


def _months(column: pa.Array) -> _Part:
    """Return months as numbers, also of English names."""
    if not pa.types.is_string(column.type):
        return _numbers(column)

    def number(text: str) -> str:
        name = text.strip().casefold()
        return str(_MONTHS.index(name[:3]) + 1) if name[:3] in _MONTHS and name.isalpha() else text

    return _numbers(_mapped(column, number))


def _quarters(column: pa.Array) -> _Part:
    """Return the first months of quarters, 1 to 4, which may be written as Q1."""
    if pa.types.is_string(column.type):
        column = _mapped(column, lambda text: re.sub(r"^\s*[Qq]\s*", "", text))
    quarter = _numbers(column)
    return _Part(quarter.values * 3 - 2, quarter.valid & (quarter.values >= 1) & (quarter.values <= 4))


def _numbers(column: pa.Array) -> _Part:
    """Return whole numbers."""
    values, valid = _floats(column)
    valid &= values == np.floor(values)
    return _Part(np.where(valid, values, 0).astype(np.int64), valid)


def _micros(column: pa.Array) -> _Part:
    """Return seconds in microseconds."""
    values, valid = _floats(column)
    return _Part(np.rint(np.where(valid, values, 0.0) * 1e6).astype(np.int64), valid)


def _floats(column: pa.Array) -> tuple[Floats, Marks]:
    """Return numbers of a size that dates and times can have, and which values are such."""
    kind = column.type
    if pa.types.is_string(kind):
        texts, places = arrow.distinct_values(column)
        plain = [re.fullmatch(r"\s*[0-9]+(?:[.][0-9]*)?\s*", text, re.ASCII) is not None for text in texts]
        read = [float(text) if is_plain else np.nan for text, is_plain in zip(texts, plain, strict=True)]
        values = np.array([*read, np.nan])[places]
    elif pa.types.is_null(kind) or pa.types.is_temporal(kind) or pa.types.is_nested(kind):
        values = np.full(len(column), np.nan)
    else:
        values = arrow.to_numpy(column.cast(pa.float64(), safe=False), np.nan).astype(np.float64)
    valid = np.abs(values) < 1e6
    return np.where(valid, values, 0.0), valid


def _mapped(column: pa.Array, change: Callable[[str], str]) -> pa.Array:
    """Return texts changed one distinct text at a time."""
    encoded = column.dictionary_encode()
    changed = arrow.texts([change(text) for text in encoded.dictionary.to_pylist()])
    return changed.take(encoded.indices)


def _texts(column: pa.Array) -> list[str]:
    """Return values as texts; a whole number without a fraction."""
    return [
        str(int(one)) if isinstance(one, float) and one.is_integer() else str(one)
        for one in column.to_pylist()
    ]
