"""Find the columns that make the time together: a date beside a time of day, or year, month, day and hour."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, tzinfo

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.choosing.table import Table
from jobs.choosing.times import ENOUGH, HINT, TRIED, TimeColumn, time_of
from jobs.core.errors import UserError
from jobs.core.times import UNIT_US
from jobs.encoding import arrow
from jobs.landing.values.time_columns import combine_times
from jobs.landing.values.times import read_times
from jobs.specs.column_names import part_of_time, time_parts

DAY = UNIT_US["day"]
_CLOCK = re.compile(
    r"\s*[0-9]{1,2}(:[0-9]{2}(:[0-9]{2}([.,][0-9]+)?)?|[.][0-9]{2}[.][0-9]{2})(\s*[AaPp][.]?[Mm][.]?)?\s*"
)
_HAS_CLOCK = re.compile(r"(?<![:0-9A-Fa-f])[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?(?![:\w])")
_FRACTION = re.compile(r"\s*(0?[.][0-9]+|0)\s*")
_NUMBER = re.compile(r"\s*[0-9]+(?:[.]0*)?\s*")
SPREADSHEET_DAYS = (10_000, 80_000)
"""Days from 1927 to 2119, as a spreadsheet counts them."""
LONGEST_DAY = 1500
"""Rows of one key and time up to which a column may number them: those of a day by the minute, and some."""
FEW = 0.01
"""Share of rows that may repeat key, time and number of another."""
_RANGES = {
    "year": (1, 2200),
    "quarter": (1, 4),
    "month": (1, 12),
    "day": (1, 31),
    "day_of_year": (1, 366),
    "minute": (0, 59),
    "second": (0, 59),
}


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
    found = _combined(table, parts, zone, time_format or _form_of(table, parts))
    if found is None:
        raise UserError(
            f"--time {','.join(columns)}: the columns make a time in too few rows; give the format of the date with "
            "--time-format, or write the time into one column"
        )
    return found


def find_parts(table: Table, zone: tzinfo, time_format: str | None = None) -> TimeColumn | None:
    """Return the time that several columns make together; None if none do."""
    for parts in _candidates(table):
        found = _combined(table, parts, zone, time_format or _form_of(table, parts))
        if found is not None:
            return found
    return None


def clock_part(table: Table, name: str) -> str | None:
    """Return which part of a time of day a column has, by its values and its name; None: it has none."""
    column = table.source.columns[name]
    kind, named = column.type, part_of_time(name)
    if pa.types.is_time(kind):
        return "time"
    if pa.types.is_string(kind):
        texts = [text for text in column.unique().to_pylist() if text and text.strip()]
        if texts and sum(_CLOCK.fullmatch(text) is not None for text in texts) >= ENOUGH * len(texts):
            return "time"
    if named not in ("time", "hour", "hhmm", "minute", "second"):
        return None
    numbers = whole_numbers(column)
    if numbers is None:
        return "time" if named == "time" and _are_fractions(column) else None
    if named in _RANGES:
        return named if _is_within(numbers, named) else None
    if named != "hhmm" and numbers.min() >= 0 and numbers.max() <= 24:
        return "hour"
    is_compact = named == "hhmm" or numbers.max() >= 100
    if not is_compact or numbers.min() < 0 or numbers.max() > 2400 or (numbers % 100 > 59).any():
        return None
    return "hour" if named == "hour" and not (numbers % 100).any() else "hhmm"


def shows_clock(table: Table, name: str) -> bool:
    """Tell if a column has times of day, or spans of them such as 00:00-01:00."""
    column = table.source.columns[name]
    if clock_part(table, name) is not None or not pa.types.is_string(column.type):
        return clock_part(table, name) is not None
    texts = [text for text in column.unique().to_pylist() if text and text.strip()]
    return bool(texts) and sum(_HAS_CLOCK.search(text) is not None for text in texts) >= ENOUGH * len(texts)


def _are_fractions(column: pa.Array) -> bool:
    """Tell if a column has fractions of a day, as spreadsheets store times of day."""
    if pa.types.is_string(column.type):
        texts = [text for text in column.drop_null().unique().to_pylist() if text.strip()]
        return bool(texts) and all(_FRACTION.fullmatch(text) for text in texts)
    if not pa.types.is_floating(column.type):
        return False
    values = arrow.to_numpy(column.drop_null().cast(pa.float64()))
    return bool(len(values)) and bool(((values >= 0) & (values < 1)).all())


def whole_numbers(column: pa.Array) -> NDArray[np.float64] | None:
    """Return the whole numbers in a column, of text each once, if nearly all of its values are such."""
    kind = column.type
    if pa.types.is_string(kind):
        texts = [text for text in column.drop_null().unique().to_pylist() if text.strip()]
        tried = texts[:: max(1, len(texts) // TRIED)]
        if sum(_NUMBER.fullmatch(text) is not None for text in tried) < ENOUGH * len(tried):
            return None
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
        if part not in ("year", "quarter", "month", "day", "day_of_year") or part in found:
            continue
        numbers = whole_numbers(column)
        if (numbers is not None and _is_within(numbers, part)) or (
            part == "month" and pa.types.is_string(column.type) and numbers is None
        ):
            found[part] = name
    for wanted in (("year", "month", "day"), ("year", "day_of_year"), ("year", "month"), ("year", "quarter")):
        if all(part in found for part in wanted):
            yield {part: found[part] for part in wanted}
            return


def _is_within(numbers: NDArray[np.float64], part: str) -> bool:
    least, most = _RANGES[part]
    return bool(numbers.min() >= least and numbers.max() <= most)


def _is_date(table: Table, name: str) -> bool:
    """Tell if a column has dates, with one time of day in all of its rows."""
    column = table.source.columns[name]
    numbers = whole_numbers(column)
    if numbers is not None:
        day, month = numbers % 100, numbers // 100 % 100
        named = part_of_time(name) == "date" or HINT.search(name) is not None
        dates = (
            (numbers >= 15000101)
            & (numbers <= 22001231)
            & (month >= 1)
            & (month <= 12)
            & (day >= 1)
            & (day <= 31)
        )
        return named and bool(dates.mean() >= ENOUGH or _are_days(numbers))
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return False
    found = time_of(table, name, UTC)
    return isinstance(found, TimeColumn) and len(np.unique(found.micros[found.known] % DAY)) == 1


def _are_days(numbers: NDArray[np.float64]) -> bool:
    """Tell if numbers may be days as a spreadsheet counts them."""
    return bool(numbers.min() >= SPREADSHEET_DAYS[0] and numbers.max() <= SPREADSHEET_DAYS[1])


def _form_of(table: Table, parts: Mapping[str, str]) -> str | None:
    """Return the format of the date among the parts of a time; None: ISO 8601, or eight digits."""
    if "date" not in parts:
        return None
    numbers = whole_numbers(table.source.columns[parts["date"]])
    if numbers is not None:
        return "spreadsheet_days" if _are_days(numbers) else None
    found = time_of(table, parts["date"], UTC, is_given=True)
    return found.time_format if isinstance(found, TimeColumn) else None


def _varies(table: Table, name: str) -> bool:
    return len(table.source.columns[name].drop_null().unique()) > 1


def _combined(table: Table, parts: dict[str, str], zone: tzinfo, form: str | None) -> TimeColumn | None:
    """Return the time that columns make together; None if they make one in too few rows."""
    columns = {part: table.source.columns[name] for part, name in parts.items()}
    combined = combine_times(columns, parts, form)
    micros, known = read_times(combined, None, zone, "time")
    present = ~arrow.to_numpy(combined.is_null())
    if not present.any() or known[present].mean() < ENOUGH:
        return None
    note = None
    if "date" in parts and form is not None:
        date = time_of(table, parts["date"], UTC, is_given=True)
        note = date.note if isinstance(date, TimeColumn) else None
    return TimeColumn("time", form, micros, known, note, parts)
