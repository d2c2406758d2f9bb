"""Join several columns into one column of times: a date and a time of day, or year, month, day and hour.

Each distinct value is read once, by the rules of `jobs.core.times`. If each row has a time, the result is stored
timestamps. Else it is texts: times in ISO 8601, and the raw parts of the other rows, which never parse as a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jobs.core.times import CLOCK_PARTS, DATE_PARTS, UNIT_US, TimeParser, parse_date_us, parse_time_of_day
from jobs.landing.values.clock_changes import Bools, Ints
from jobs.landing.values.times import format_digits, read_times, spread_results
from jobs.state.encoding import arrow

_DAY = UNIT_US["day"]
_CLOCK_DIRECTIVE = re.compile(r"%[HIMSfpzZ]")


class _ClockValues(NamedTuple):
    """Times of day (N), or parts of them.

    micros (N,) microseconds
    valid  (N,) which values can be read
    offset (N,) offset of the clock from UTC in microseconds
    zoned  (N,) which values have an offset
    """

    micros: Ints
    valid: Bools
    offset: Ints
    zoned: Bools


def combine_times(columns: Mapping[str, pa.Array], names: Mapping[str, str], form: str | None) -> pa.Array:
    """Return N times as timestamps; as texts if some rows have parts that are not a time.

    A row that lacks a part has no time. The hour 24 is the next day's 0:00.

    Args:
        columns: N values of each part of the time (`jobs.specs.column_names.TIME_PARTS`).
        names: column name of each part, for the text of a row without a time.
        form: `time_format` of the spec: for the date, or for date and time joined by a blank; None: any usual format.
    """
    present = np.logical_and.reduce([_are_present(column) for column in columns.values()])
    if form is not None and _find_date_form(form) is None:
        micros, valid = _read_joined(columns, form)
        zoned = np.full(len(micros), "%z" in form)
    else:
        micros, valid = _read_dates(columns, form)
        clock, zoned = np.zeros(len(micros), np.int64), np.zeros(len(micros), bool)
        for part in columns.keys() & CLOCK_PARTS.keys():
            read = _read_clock(columns[part], part)
            clock, valid, zoned = clock + read.micros, valid & read.valid, zoned | read.zoned
            micros = micros - read.offset
        micros, valid = micros + clock, valid & (clock <= _DAY)
    valid &= present
    same_zone = bool(zoned[present].all() or not zoned[present].any())
    if bool((valid == present).all()) and same_zone:
        stamps = arrow.build_times(np.where(valid, micros, 0), valid)
        return stamps if zoned[present].any() else stamps.cast(pa.timestamp("us"))
    written = np.datetime_as_string(np.where(valid, micros, 0).astype("datetime64[us]")).tolist()
    texts: list[str | None] = [
        f"{time}Z" if has_zone else time for time, has_zone in zip(written, zoned.tolist(), strict=True)
    ]
    bad = np.flatnonzero(present & ~valid)
    shown = {part: as_texts(column.take(arrow.build_integers(bad))) for part, column in columns.items()}
    for at, place in enumerate(bad.tolist()):
        texts[place] = ", ".join(f"{names[part]}={shown[part][at]}" for part in columns)
    for place in np.flatnonzero(~present).tolist():
        texts[place] = None
    return arrow.build_texts(texts)


def _read_clock(column: pa.Array, part: str) -> _ClockValues:
    """Return the times of day in a column, or the hours, minutes or seconds (`jobs.core.times.CLOCK_PARTS`)."""
    kind = column.type
    if not pa.types.is_temporal(kind):
        texts, which = _find_distinct_texts(column)
        found = [parse_time_of_day(text, part) for text in texts]
        micros, valid = spread_results([None if one is None else one.micros for one in found], which)
        return _ClockValues(
            micros, valid, *spread_results([None if one is None else one.offset for one in found], which)
        )
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        unit = pa.time64("us") if pa.types.is_time(kind) else pa.duration("us")
        micros = arrow.to_numpy(column.cast(unit, safe=False).cast(pa.int64()))
        valid = (micros >= 0) & (micros <= _DAY)
    else:
        micros, valid = read_times(column, None, UTC, "a column of the time")
        micros = micros % _DAY
    return _ClockValues(
        np.where(valid, micros, 0), valid, np.zeros(len(micros), np.int64), np.zeros(len(micros), bool)
    )


def _find_distinct_texts(column: pa.Array) -> tuple[list[str], Ints]:
    """Return the distinct values as trimmed texts, and each row's index into them; "" stands for a missing value."""
    is_number = arrow.is_number(column.type)
    if pa.types.is_nested(column.type):
        column = arrow.build_texts(as_texts(column))
    values, places = arrow.find_distinct_values(column)
    if is_number:
        return [*("" if value != value else format_digits(value) for value in values), ""], places
    return [*(str(value).strip() for value in values), ""], places


def as_texts(column: pa.Array) -> list[str]:
    """Return values as texts: a whole number without a fraction, a missing value as ""."""
    write = format_digits if arrow.is_number(column.type) else str
    return ["" if value is None else write(value) for value in column.to_pylist()]


def _are_present(column: pa.Array) -> Bools:
    if pa.types.is_temporal(column.type):
        return arrow.to_numpy(column.is_valid())
    texts, places = _find_distinct_texts(column)
    return np.array([text != "" for text in texts])[places]


def _find_date_form(form: str) -> str | None:
    """Return the date part of a format that has a date, a blank and a time of day; None for any other format."""
    found = _CLOCK_DIRECTIVE.search(form)
    if found is None:
        return form
    date, clock = form[: found.start()], form[found.start() :]
    is_usual = date.endswith(" ") and re.fullmatch(r"(%[HIMSp]|%S[.,]?%f|%f|%z|[:. ])*", clock)
    return date.rstrip() if is_usual else None


def _read_rows(
    columns: Mapping[str, pa.Array], read: Callable[[dict[str, str]], int | None]
) -> tuple[Ints, Bools]:
    """Read each distinct row of texts once; return the time (N,) of each row, and which rows have a time."""
    rows: list[dict[str, str]] = [{}]
    which = np.zeros(len(next(iter(columns.values()))), np.int64)
    for part, column in columns.items():
        texts, places = _find_distinct_texts(column)
        size = len(texts)
        pairs, which = arrow.find_distinct_values(arrow.build_integers(which * size + places))
        rows = [{**rows[pair // size], part: texts[pair % size]} for pair in pairs]
    return spread_results([read(row) for row in rows], which)


def _read_joined(columns: Mapping[str, pa.Array], form: str) -> tuple[Ints, Bools]:
    """Return the times for a format that is not a date followed by a time of day."""
    parser, blank = TimeParser(form, UTC), " " if " " in form else ""
    return _read_rows(columns, lambda row: parser(blank.join(row.values())))


def _read_dates(columns: Mapping[str, pa.Array], form: str | None) -> tuple[Ints, Bools]:
    """Return the days, in microseconds since 1970."""
    if "date" not in columns:
        return _read_rows({part: columns[part] for part in DATE_PARTS if part in columns}, parse_date_us)
    column = columns["date"]
    if pa.types.is_string(column.type) or arrow.is_number(column.type):
        # A date may have a time of day too, such as 00:00.
        forms = (None, "%Y%m%d") if form is None else dict.fromkeys((_find_date_form(form), form))
        parsers = [TimeParser(one, UTC) for one in forms]
        micros, valid = _read_rows({"date": column}, lambda row: _parse_first(row["date"], parsers))
    else:
        micros, valid = read_times(column, None, UTC, "a column of the time")
    return micros // _DAY * _DAY, valid


def _parse_first(text: str, parsers: Sequence[TimeParser]) -> int | None:
    return next((micros for parser in parsers if (micros := parser(text)) is not None), None)
