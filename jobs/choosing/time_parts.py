"""Find the columns that together make the time: a date and a time of day, or year, month, day and hour."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, tzinfo
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.choosing.table import InputTable
from jobs.choosing.times import (
    ENOUGH,
    HINT,
    TimeColumn,
    are_most,
    compute_usual_range,
    convert_to_times,
    sample_column_texts,
)
from jobs.core.errors import UserError
from jobs.core.time_readings import find_forms
from jobs.core.times import CLOCK_PARTS, DATE_PARTS, UNIT_US, parse_date_us, parse_time_of_day
from jobs.landing.values.times import combine_times, read_times
from jobs.specs.column_names import find_time_part, find_time_parts
from jobs.state.encoding import arrow

_MARKED = re.compile(r"[:h]|[.].*[.]")
"""A pattern that occurs in times of day, but not in numbers."""
_HAS_CLOCK = re.compile(r"(?<![:0-9A-Fa-f])[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?(?![:\w])")
_NUMBER = re.compile(r"\s*[0-9]+(?:[.]0*)?\s*")
LONGEST_DAY = 1500
"""The maximum number of rows for one key and time that a column may number: the minutes of a day, and a few more."""
FEW = 0.01
"""The maximum share of rows that may repeat key, time and number of another row."""


class DateForm(NamedTuple):
    """The format of a date beside a time of day (None: ISO 8601 or eight digits), and a doubt about this format."""

    time_format: str | None = None
    note: str | None = None


def join_given_parts(
    table: InputTable, columns: list[str], zone: tzinfo, time_format: str | None
) -> TimeColumn:
    """Return the time that the columns named by the user make together.

    Raises:
        UserError: the columns do not make a time.
    """
    try:
        parts = find_time_parts(columns)
    except ValueError as error:
        raise UserError(f"--time {','.join(columns)}: {error}") from error
    if len(columns) == 2 and "time" in parts and find_clock_part(table, parts["time"]) == "hour":
        parts = {"date": parts["date"], "hour": parts["time"]}
    date = (
        _find_date_form(table, parts["date"], is_given=True)
        if "date" in parts and time_format is None
        else None
    )
    found = _combine(table, parts, zone, date or DateForm(time_format))
    if found is None:
        raise UserError(
            f"--time {','.join(columns)}: the columns make a time in too few rows; give the format of the date with "
            "--time-format, or write the time into one column"
        )
    return found


def find_parts(table: InputTable, zone: tzinfo, time_format: str | None = None) -> TimeColumn | None:
    """Return the time that several columns make together; None if no columns make a time."""
    for parts, date in _list_candidates(table):
        found = _combine(table, parts, zone, date if time_format is None else DateForm(time_format))
        if found is not None:
            return found
    return None


def find_clock_part(table: InputTable, name: str) -> str | None:
    """Return the part of a time of day that a column's values and name suggest; None for any other column."""
    column, named = table.source.columns[name], find_time_part(name)
    if pa.types.is_time(column.type):
        return "time"
    is_text, is_clock = pa.types.is_string(column.type), named in CLOCK_PARTS
    if not is_text and not (is_clock and arrow.is_number(column.type)):
        return None
    texts = sample_column_texts(column)
    if is_text and are_most(
        texts, lambda text: parse_time_of_day(text.strip()) if _MARKED.search(text) else None
    ):
        return "time"
    if named is None or not is_clock:
        return None
    numbers = select_whole_numbers(column)
    if named in ("minute", "second") or named == "time" and numbers is None:
        return named if _can_be(texts, named) else None
    if numbers is None:
        return None
    if named != "hhmm" and (named == "hour" or numbers.max() <= 24) and _can_be(texts, "hour"):
        return "hour"
    return "hhmm" if (named == "hhmm" or numbers.max() >= 100) and _can_be(texts, "hhmm") else None


def has_clock(table: InputTable, name: str) -> bool:
    """Return whether a column has times of day, or spans of time such as 00:00-01:00."""
    if find_clock_part(table, name) is not None:
        return True
    column = table.source.columns[name]
    return pa.types.is_string(column.type) and are_most(sample_column_texts(column), _HAS_CLOCK.search)


def _can_be(texts: Sequence[str], part: str) -> bool:
    """Return whether nearly all texts can be read as a part of a time."""
    if part in CLOCK_PARTS:
        return are_most(texts, lambda text: parse_time_of_day(text.strip(), part))
    rest = {"year": "2000", "month": "1"}
    return are_most(texts, lambda text: parse_date_us({**rest, part: text.strip()}))


def select_whole_numbers(column: pa.Array) -> NDArray[np.float64] | None:
    """Return the whole numbers in a column (distinct for texts) if nearly all values are whole; None otherwise."""
    kind = column.type
    if pa.types.is_string(kind):
        if not are_most(sample_column_texts(column), _NUMBER.fullmatch):
            return None
        texts = [text for text in column.drop_null().unique().to_pylist() if text.strip()]
        values = np.array([float(text) if _NUMBER.fullmatch(text) else np.nan for text in texts])
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values = arrow.to_numpy(column.drop_null().cast(pa.float64(), safe=False), np.nan)
    else:
        return None
    whole = values[np.isfinite(values)]
    whole = whole[whole == np.floor(whole)]
    return whole if len(whole) and len(whole) >= ENOUGH * len(values) else None


def find_column_within_times(
    table: InputTable, code: NDArray[np.int64], time: TimeColumn, taken: Sequence[str]
) -> str | None:
    """Return a column that numbers the rows of one key and time, as an hour beside a date does; None without one.

    Args:
        table: N rows.
        code: (N,) number of each row's key.
        time: the found time.
        taken: columns of the key and the time.
    """
    known = time.known
    _, place, size = np.unique(
        np.stack([code[known], time.micros[known]]), axis=1, return_inverse=True, return_counts=True
    )
    usual = float(np.median(size)) if len(size) else 0.0
    if usual < 2 or usual > LONGEST_DAY:
        return None
    for name, column in table.source.columns.items():
        if name in taken or pa.types.is_nested(column.type) or pa.types.is_date(column.type):
            continue
        encoded = column.dictionary_encode()
        values = len(encoded.dictionary)
        if (
            abs(values - usual) > 0.1 * usual + 2
            or select_whole_numbers(column) is None
            and not has_clock(table, name)
        ):
            continue
        codes = arrow.to_numpy(encoded.indices, values).astype(np.int64)[known]
        if len(np.unique(place * (values + 1) + codes)) >= (1 - FEW) * len(place):
            return name
    return None


def _list_candidates(table: InputTable) -> Iterator[tuple[dict[str, str], DateForm]]:
    """Yield columns that may make a time together, by part, with the format of the date; times of day come first."""
    names = list(table.source.columns)
    clocks = {name: part for name in names if (part := find_clock_part(table, name)) is not None}
    dates = {name: form for name in names if (form := _find_date_form(table, name)) is not None}
    days = [(parts, DateForm()) for parts in _list_days(table)]
    hinted = sorted(dates, key=lambda name: HINT.search(name) is None)
    for date, form in (*(({"date": name}, dates[name]) for name in hinted), *days):
        rest = [name for name in clocks if name not in date.values() and _is_varying(table, name)]
        for wanted in ("time", "hhmm", "hour"):
            name = next((name for name in rest if clocks[name] == wanted), None)
            if name is None:
                continue
            parts = {**date, wanted: name}
            for larger, smaller in (("hour", "minute"), ("minute", "second")):
                inner = next((name for name, part in clocks.items() if part == smaller), None)
                if larger in parts and inner is not None:
                    parts[smaller] = inner
            yield parts, form
    yield from days


def _list_days(table: InputTable) -> Iterator[dict[str, str]]:
    """Yield columns that together make days, weeks, months or quarters."""
    found: dict[str, str] = {}
    for name, column in table.source.columns.items():
        part = find_time_part(name)
        if part is None or part not in DATE_PARTS or part in found:
            continue
        if pa.types.is_string(column.type) or arrow.is_number(column.type):
            texts = sample_column_texts(column)
            is_flag = part == "year" and "0" in texts
            if not is_flag and _can_be(texts, part):
                found[part] = name
    for wanted in (
        ("year", "month", "day"),
        ("year", "day_of_year"),
        ("year", "month"),
        ("year", "quarter"),
        ("year", "week"),
    ):
        if all(part in found for part in wanted):
            yield {part: found[part] for part in wanted}
            return


def _find_date_form(table: InputTable, name: str, is_given: bool = False) -> DateForm | None:
    """Return the format of a column's dates; None if it has no dates.

    is_given: whether the user named the column as the date. If so, its name need not look like a date, and its times of
    day may differ.
    """
    column = table.source.columns[name]
    numbers = select_whole_numbers(column)
    if numbers is not None:
        if not is_given and find_time_part(name) != "date" and HINT.search(name) is None:
            return None
        fitting = find_forms(*compute_usual_range(numbers))
        if "%Y%m%d" in fitting:
            return DateForm()
        return DateForm("spreadsheet_days") if "spreadsheet_days" in fitting else None
    if arrow.is_number(column.type) and not is_given:
        return None
    found = convert_to_times(table, name, UTC, is_given=is_given)
    if isinstance(found, str):
        return None
    is_day = len(np.unique(found.micros[found.known] % UNIT_US["day"])) == 1
    return DateForm(found.time_format, found.note) if is_given or is_day else None


def _is_varying(table: InputTable, name: str) -> bool:
    return len(table.source.columns[name].drop_null().unique()) > 1


def _combine(table: InputTable, parts: dict[str, str], zone: tzinfo, date: DateForm) -> TimeColumn | None:
    """Return the time that columns make together; None if too few rows have a time."""
    columns = {part: table.source.columns[name] for part, name in parts.items()}
    combined = combine_times(columns, parts, date.time_format)
    micros, known = read_times(combined, None, zone, "time")
    present = ~arrow.to_numpy(combined.is_null())
    if not present.any() or known[present].mean() < ENOUGH:
        return None
    return TimeColumn("time", date.time_format, micros, known, date.note, parts)
