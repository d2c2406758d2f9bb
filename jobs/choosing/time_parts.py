"""Find the columns that make the time together: a date beside a time of day, or year, month, day and hour."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, tzinfo

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.choosing.table import Table
from jobs.choosing.times import ENOUGH, HINT, TimeColumn, sample_texts, time_of, usual_range
from jobs.core.errors import UserError
from jobs.core.time_readings import forms_of
from jobs.core.times import CLOCK_PARTS, DATE_PARTS, UNIT_US, date_us, time_of_day
from jobs.encoding import arrow
from jobs.landing.values.time_columns import combine_times
from jobs.landing.values.times import read_times
from jobs.specs.column_names import part_of_time, time_parts

_MARKED = re.compile(r"[:h]|[.].*[.]")
"""What a time of day has that no number has."""
_HAS_CLOCK = re.compile(r"\b[0-9]{1,2}:[0-9]{2}\b")
_NUMBER = re.compile(r"\s*[0-9]+(?:[.]0*)?\s*")
_DATE_DIGITS = ("%Y%m%d", "spreadsheet_days")
"""How dates are written as numbers beside a time of day."""
LONGEST_DAY = 1500
"""Rows of one key and time up to which a column may number them: those of a day by the minute, and some."""
FEW = 0.01
"""Share of rows that may repeat key, time and number of another."""


def given_parts(table: Table, columns: list[str], zone: tzinfo, time_format: str | None) -> TimeColumn:
    """Return the time that the columns that the user names make together.

    Raises:
        UserError: they do not make a time.
    """
    try:
        parts = time_parts(columns)
    except ValueError as error:
        raise UserError(f"--time {','.join(columns)}: {error}") from error
    if len(columns) == 2 and "time" in parts and clock_part(table, parts["time"]) == "hour":
        parts = {"date": parts["date"], "hour": parts["time"]}
    found = _combined(table, parts, zone, time_format)
    if found is None:
        raise UserError(
            f"--time {','.join(columns)}: the columns make a time in too few rows; give the format of the date with "
            "--time-format, or write the time into one column"
        )
    return found


def find_parts(table: Table, zone: tzinfo, time_format: str | None = None) -> TimeColumn | None:
    """Return the time that several columns make together; None if none do."""
    found = (_combined(table, parts, zone, time_format) for parts in _candidates(table))
    return next((one for one in found if one is not None), None)


def clock_part(table: Table, name: str) -> str | None:
    """Return which part of a time of day a column has, by its values and its name; None: it has none."""
    column, named = table.source.columns[name], part_of_time(name)
    if pa.types.is_time(column.type):
        return "time"
    is_text, is_clock = pa.types.is_string(column.type), named in CLOCK_PARTS
    if not is_text and not (is_clock and arrow.is_number(column.type)):
        return None
    texts = sample_texts(column)
    if is_text and _are_most(texts, lambda text: time_of_day(text.strip()) if _MARKED.search(text) else None):
        return "time"
    if named is None or not is_clock:
        return None
    numbers = whole_numbers(column)
    if named in ("minute", "second") or numbers is None:
        return named if named not in ("hour", "hhmm") and _can_be(texts, named) else None
    if named != "hhmm" and (named == "hour" or numbers.max() <= 24) and _can_be(texts, "hour"):
        return "hour"
    return "hhmm" if (named == "hhmm" or numbers.max() >= 100) and _can_be(texts, "hhmm") else None


def shows_clock(table: Table, name: str) -> bool:
    """Tell if a column has times of day, or spans of them such as 00:00-01:00."""
    if clock_part(table, name) is not None:
        return True
    column = table.source.columns[name]
    return pa.types.is_string(column.type) and _are_most(sample_texts(column), _HAS_CLOCK.search)


def _can_be(texts: Sequence[str], part: str) -> bool:
    """Tell if nearly all of some texts are read as a part of a time."""
    if part in CLOCK_PARTS:
        return _are_most(texts, lambda text: CLOCK_PARTS[part](text.strip()))
    rest = {"year": "2000", "month": "1"}
    return _are_most(texts, lambda text: date_us({**rest, part: text.strip()}))


def _are_most(texts: Sequence[str], read: Callable[[str], object]) -> bool:
    """Tell if nearly all of some texts are read as something, and there are any."""
    return bool(texts) and sum(read(text) is not None for text in texts) >= ENOUGH * len(texts)


def whole_numbers(column: pa.Array) -> NDArray[np.float64] | None:
    """Return the whole numbers in a column, of text each once, if nearly all of its values are such."""
    kind = column.type
    if pa.types.is_string(kind):
        if not _are_most(sample_texts(column), _NUMBER.fullmatch):
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


def column_within_times(
    table: Table, code: NDArray[np.int64], time: TimeColumn, taken: Sequence[str]
) -> str | None:
    """Return a column that numbers the rows of one key and time, as an hour does beside a date; None if none does.

    Args:
        table: N rows.
        code: (N,) number of each row's key.
        time: that was found.
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
            or whole_numbers(column) is None
            and not shows_clock(table, name)
        ):
            continue
        codes = arrow.to_numpy(encoded.indices, values).astype(np.int64)[known]
        if len(np.unique(place * (values + 1) + codes)) >= (1 - FEW) * len(place):
            return name
    return None


def _candidates(table: Table) -> Iterator[dict[str, str]]:
    """Yield columns that may make a time together, by parts: those with a time of day first."""
    names = list(table.source.columns)
    clocks = {name: part for name in names if (part := clock_part(table, name)) is not None}
    dates = sorted(
        (name for name in names if _is_date(table, name)), key=lambda name: HINT.search(name) is None
    )
    days = list(_days(table))
    for date in (*({"date": name} for name in dates), *days):
        rest = {
            name: part for name, part in clocks.items() if name not in date.values() and _varies(table, name)
        }
        for wanted in ("time", "hhmm", "hour"):
            name = next((name for name, part in rest.items() if part == wanted), None)
            if name is None:
                continue
            parts = {**date, wanted: name}
            if wanted == "hour":
                for smaller in ("minute", "second"):
                    inner = next((name for name, part in clocks.items() if part == smaller), None)
                    if inner is None:
                        break
                    parts[smaller] = inner
            yield parts
    yield from days


def _days(table: Table) -> Iterator[dict[str, str]]:
    """Yield columns that make days, or months, together."""
    found: dict[str, str] = {}
    for name, column in table.source.columns.items():
        part = part_of_time(name)
        if part is None or part not in DATE_PARTS or part in found:
            continue
        if pa.types.is_string(column.type) or arrow.is_number(column.type):
            texts = sample_texts(column)
            is_flag = part == "year" and "0" in texts
            if not is_flag and _can_be(texts, part):
                found[part] = name
    for wanted in (("year", "month", "day"), ("year", "day_of_year"), ("year", "month"), ("year", "quarter")):
        if all(part in found for part in wanted):
            yield {part: found[part] for part in wanted}
            return


def _is_date(table: Table, name: str) -> bool:
    """Tell if a column has dates, with one time of day in all of its rows."""
    column = table.source.columns[name]
    numbers = whole_numbers(column)
    if numbers is not None:
        named = part_of_time(name) == "date" or HINT.search(name) is not None
        return named and _digits_form(numbers) is not None
    if arrow.is_number(column.type):
        return False
    found = time_of(table, name, UTC)
    return isinstance(found, TimeColumn) and len(np.unique(found.micros[found.known] % UNIT_US["day"])) == 1


def _digits_form(numbers: NDArray[np.float64]) -> str | None:
    """Return the format of numbers that may be dates beside a time of day, or None."""
    return next((form for form in forms_of(*usual_range(numbers)) if form in _DATE_DIGITS), None)


def _form_of(table: Table, parts: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the format of the date among the parts of a time, and a doubt to tell of.

    No format stands for ISO 8601, or eight digits.
    """
    if "date" not in parts:
        return None, None
    numbers = whole_numbers(table.source.columns[parts["date"]])
    if numbers is not None:
        form = _digits_form(numbers)
        return (None if form == "%Y%m%d" else form), None
    found = time_of(table, parts["date"], UTC, is_given=True)
    return (found.time_format, found.note) if isinstance(found, TimeColumn) else (None, None)


def _varies(table: Table, name: str) -> bool:
    return len(table.source.columns[name].drop_null().unique()) > 1


def _combined(
    table: Table, parts: dict[str, str], zone: tzinfo, time_format: str | None
) -> TimeColumn | None:
    """Return the time that columns make together; None if they make one in too few rows.

    time_format: that the user says the date is in; None: find it.
    """
    form, note = _form_of(table, parts) if time_format is None else (time_format, None)
    columns = {part: table.source.columns[name] for part, name in parts.items()}
    combined = combine_times(columns, parts, form)
    micros, known = read_times(combined, None, zone, "time")
    present = ~arrow.to_numpy(combined.is_null())
    if not present.any() or known[present].mean() < ENOUGH:
        return None
    return TimeColumn("time", form, micros, known, note, parts)
