"""Find the column of the event time and its format, or the columns that together make the time."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, tzinfo
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.choosing.table import InputTable
from jobs.core.errors import UserError
from jobs.core.redaction import show_name
from jobs.core.time_counts import COUNTS
from jobs.core.time_readings import (
    EPOCHS,
    USUAL_FORMATS,
    YEARS,
    TimeReading,
    describe_readings,
    find_forms,
    lacks_date,
)
from jobs.core.times import CLOCK_PARTS, DATE_PARTS, UNIT_US, TimeParser, parse_date_us, parse_time_of_day
from jobs.landing.values.time_forms import explain_texts
from jobs.landing.values.times import as_texts, combine_times, read_now_us, read_times
from jobs.specs.column_names import find_time_part, find_time_parts
from jobs.state.encoding import arrow

_COUNTED = {
    "modified_julian_days": "mjd",
    "julian_days": "jd|julian|juliandate",
    "matlab_days": "datenum|matlab",
    "decimal_years": "dec_?year|decimal_?(year|date)|year_?(dec|frac|decimal)|year",
    "windows_filetime": "filetime",
    "dotnet_ticks": "ticks",
    "gps_seconds": "gps_?(time|seconds|sec|s)|tow",
    "ntp_seconds": "ntp(_?time)?",
    "cocoa_seconds": "cocoa|nsdate|cf_?absolute_?time|zdate",
    "labview_seconds": "labview",
    "sas_seconds": "sas(_?(datetime|time|dt))?",
    "sas_days": "sas(_?date)?",
    "spreadsheet_days": "excel(_?(date|time|serial))?|serial_?date|date_?serial|ole_?date|oadate",
    "webkit_microseconds": "chrome_?time|webkit_?time",
    "epoch_minutes": "epoch_?min(utes)?|unix_?min(utes)?",
    "epoch_hours": "epoch_?h(ours?)?|unix_?h(ours?)?",
    "epoch_days": "epoch_?days?|unix_?days?",
}
_NAMES = {
    form: re.compile(rf"(^|[^a-z])({words})([^a-z]|$)", re.IGNORECASE) for form, words in _COUNTED.items()
}
"""Patterns of the names of columns that hold counts of a time unit."""
_COUNTS_BY_NAME = "|".join(words for form, words in _COUNTED.items() if form != "decimal_years")
HINT = re.compile(
    r"(^|[^a-z])(time|timestamp|ts|t|date|datetime|at|when|day|epoch|utc|sec|secs|seconds|created|month|quarter"
    rf"|yyyy[a-z]*|yymm[a-z]*|{_COUNTS_BY_NAME})([^a-z]|$)"
    r"|(time|date|timestamp|stamp)$",
    re.IGNORECASE,
)
_DATE_PART = re.compile(
    r"(^|[^a-z])(day|hour|hours|month|week|year|minute|quarter|doy|dow)([^a-z]|$)", re.IGNORECASE
)
ENOUGH = 0.95
"""The minimum share of values that must be times."""
NEAR_START = 0.1
"""Up to this quantile of a column's values, a series may restart."""
FAR_AHEAD_US = 5 * 366 * UNIT_US["day"]
"""How far stored times may lie in the future: no stored forecast reaches further."""
TRIED = 500
LOOKED_AT = 10
"""Every tenth of the sampled texts is tried first."""
SURE_DIGITS = 10_000_101
"""The smallest eight-digit number that is a date under any column name."""
FIRST, LONGEST = 1, 1e8
"""Limits in seconds for a count from the beginning of a series: the largest first value, and the largest value (about
three years).
"""
_PLAIN = re.compile(r"\s*[+-]?[0-9]+(?:[.][0-9]*)?(?:[eE][+-]?[0-9]+)?\s*")


class TimeColumn(NamedTuple):
    """The column of the event time.

    name, time_format: as in a spec.
    micros: (N,) microseconds since 1970 UTC.
    known: (N,) which values are times.
    note: a doubt for the user, or None.
    parts: if several columns make the time, the column of each part; `name` is then the name of the joint column.
    """

    name: str
    time_format: str | None
    micros: NDArray[np.int64]
    known: NDArray[np.bool_]
    note: str | None = None
    parts: Mapping[str, str] = MappingProxyType({})

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the file columns that contain the time."""
        return tuple(self.parts.values()) or (self.name,)

    @property
    def written(self) -> str | list[str] | dict[str, str]:
        """Return the column or columns in the form in which a spec names them."""
        if not self.parts:
            return self.name
        try:
            by_name = find_time_parts(list(self.columns))
        except ValueError:
            return dict(self.parts)
        return list(self.columns) if by_name == self.parts else dict(self.parts)


def convert_to_times(
    table: InputTable, name: str, zone: tzinfo = UTC, time_format: str | None = None, is_given: bool = False
) -> TimeColumn | str:
    """Return a column as times, or the reason why it does not hold times.

    Args:
        table: N rows.
        name: name of the column.
        zone: time zone of times without an offset.
        time_format: the format that the user gave; None means to find the format.
        is_given: whether the user named this column as the time, so that its name need not look like a time.
    """
    column = table.source.columns[name]
    kind = column.type
    if time_format is not None and not pa.types.is_temporal(kind):
        return read_column(table, name, time_format, zone)
    hinted = is_given or HINT.search(name) is not None
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return read_column(table, name, None, zone)
    if pa.types.is_string(kind):
        return _convert_texts(table, name, zone, hinted)
    if arrow.is_number(kind):
        return _convert_numbers(table, name, zone, hinted, column.cast(pa.float64(), safe=False))
    return f"holds {kind}"


def sample_column_texts(column: pa.Array) -> list[str]:
    """Return an even sample of a column's distinct values as texts, without blank texts."""
    values = column.drop_null().unique()
    if not len(values):
        return []
    rows = np.unique(np.linspace(0, len(values) - 1, TRIED).astype(np.int64))
    return [text for text in as_texts(values.take(arrow.build_integers(rows))) if text.strip()]


def _convert_texts(table: InputTable, name: str, zone: tzinfo, hinted: bool) -> TimeColumn | str:
    column = table.source.columns[name]
    tried = sample_column_texts(column)
    if not tried:
        return "is empty"
    if are_most(tried, _PLAIN.fullmatch):
        values = [float(text) if text and _PLAIN.fullmatch(text) else np.nan for text in column.to_pylist()]
        return _convert_numbers(table, name, zone, hinted, arrow.build_numbers(np.array(values)))
    usual = [form for form in USUAL_FORMATS if _count_read(tried[::LOOKED_AT], TimeParser(form, zone))]
    fitting = [form for form in (None, *usual) if are_most(tried, TimeParser(form, zone))]
    if not fitting:
        if lacks_date(tried[0]):
            return f"holds a time of day without a date, such as '{show_name(tried[0])}'"
        mixed = _find_mixed_forms(table, column, tried, zone, usual)
        advice = explain_texts(tried, zone, lambda form, zone: _write_options(name, form, zone))
        text = f"holds text that is no time, such as '{show_name(tried[0])}'"
        return mixed or (f"{text}; {advice}" if advice else text)
    forms = fitting[:1] if fitting[0] is None else fitting
    return _choose_best(
        table, name, forms, zone, lambda one: (-one.known.mean(), _compute_disorder(table, one))
    )


def _write_options(name: str, form: str | None, zone: str | None) -> str:
    options = {"--time": name, "--time-zone": zone, "--time-format": form}
    return " ".join(f"{option} {shlex.quote(text)}" for option, text in options.items() if text is not None)


def _find_mixed_forms(
    table: InputTable, column: pa.Array, tried: list[str], zone: tzinfo, usual: list[str]
) -> str | None:
    """Return a sentence on a column that mixes two forms of times, with examples; None for any other column."""
    rest, named = tried, []
    for _ in range(2):
        form = max((None, *usual), key=lambda one: _count_read(rest, TimeParser(one, zone)))
        parser = TimeParser(form, zone)
        first = next((text for text in rest if parser(text) is not None), None)
        if first is None:
            return None
        file = table.files[int(table.file[column.index(first).as_py()])].name
        named.append(f"'{show_name(first)}' ({form or 'ISO 8601'}) in {file}")
        rest = [text for text in rest if parser(text) is None]
        if len(rest) <= (1 - ENOUGH) * len(tried):
            return f"holds times in two forms, {' and '.join(named)}; write all in one"
    return None


def are_most(texts: Sequence[str], read: Callable[[str], object]) -> bool:
    """Return whether there are texts, and `read` accepts nearly all of them."""
    return bool(texts) and _count_read(texts, read) >= ENOUGH * len(texts)


def _count_read(texts: Sequence[str], read: Callable[[str], object]) -> int:
    return sum(read(text) is not None for text in texts)


def _choose_best(
    table: InputTable,
    name: str,
    forms: Sequence[str | None],
    zone: tzinfo,
    merit: Callable[[TimeColumn], tuple[Any, ...]],
) -> TimeColumn | str:
    """Return the times in the format with the smallest merit, or the reason why there are none.

    A note names other formats that are equally good.

    merit: a function of the times. Formats with the same first item are equally good; the next items, and then the
    order of the formats, choose among them.
    """
    read = [read_column(table, name, form, zone) for form in forms]
    found = [one for one in read if not isinstance(one, str)]
    if not found:
        return next(one for one in read if isinstance(one, str))
    best = min(found, key=merit)
    as_good = [one for one in found if merit(one)[0] == merit(best)[0]]
    return best._replace(note=_note_alternatives(best, as_good))


def _note_alternatives(best: TimeColumn, found: Sequence[TimeColumn]) -> str | None:
    """Return a note on formats that read another time from the values than the chosen format; None without such
    formats.
    """
    first = int(best.known.argmax())
    readings = [TimeReading(str(one.time_format), int(one.micros[first])) for one in (best, *found)]
    others = [
        one for one, column in zip(readings[1:], found, strict=True) if not are_equal_times(best, column)
    ]
    if not others:
        return None
    return (
        f"{best.name}: read as {describe_readings(readings[:1])}; {describe_readings(others)} would fit too: "
        "--time-format says which"
    )


def are_equal_times(one: TimeColumn, other: TimeColumn) -> bool:
    """Return whether two readings of a column give the same times in the rows that both read."""
    both = one.known & other.known
    return bool((one.micros[both] == other.micros[both]).all())


def _compute_disorder(table: InputTable, found: TimeColumn) -> tuple[int, float, int]:
    """Return how often time goes back within a file, the spread of ordered steps, and the number of distinct steps."""
    steps = np.diff(found.micros)[np.diff(table.file) == 0]
    orders = np.log10(np.maximum(steps, 1))
    return int((steps < 0).sum()), round(float(orders.std()), 1) if len(steps) else 0.0, len(np.unique(steps))


def read_column(table: InputTable, name: str, form: str | None, zone: tzinfo) -> TimeColumn | str:
    """Return a column as times in a format, or the reason why too few of its values are times."""
    column = table.source.columns[name]
    try:
        micros, known = read_times(column, form, zone, name)
    except (UserError, ValueError) as error:
        return str(error).removeprefix(f"{name} ")
    present = ~arrow.to_numpy(column.is_null())
    if not present.any() or known[present].mean() < ENOUGH:
        return f"holds times in {known.sum():,} of {present.sum():,} rows only"
    return TimeColumn(name, form, micros, known)


def _convert_numbers(
    table: InputTable, name: str, zone: tzinfo, hinted: bool, column: pa.Array
) -> TimeColumn | str:
    values = arrow.to_numpy(column, np.nan)
    known = values[np.isfinite(values)]
    if not len(known):
        return "is empty"
    low, high = compute_usual_range(known)
    rising = _is_rising(values, table.file)
    whole = bool((known == np.floor(known)).all())
    if whole and YEARS[0] <= low and high <= YEARS[1] and (rising or re.search("year", name, re.IGNORECASE)):
        return f"holds years; to read each as its first day, give --time {shlex.quote(name)} --time-format %Y"
    hints = [
        form
        for form, names in _NAMES.items()
        if names.search(name) and not (whole and form == "decimal_years")
    ]
    hinted = hinted or bool(hints)
    forms = [
        form for form in find_forms(low, high) if hinted and rising or form in EPOCHS and (hinted or rising)
    ]
    if rising and whole and low >= SURE_DIGITS:
        forms += [form for form in find_forms(low, high) if form not in COUNTS and form not in forms]
    forms = [form for form in forms if form in hints] or forms
    if forms:
        # Dates written as digits, read as a count, have irregular steps at month ends. So only formats with the same
        # steps are alternatives.
        found = _choose_best(table, name, forms, zone, lambda one: (_compute_disorder(table, one),))
        return found if isinstance(found, str) else _explain_far_ahead(found) or found
    if hinted and rising and 0 <= low <= FIRST and high < LONGEST and not _DATE_PART.search(name):
        found = read_column(table, name, "epoch_seconds", zone)
        note = f"{name}: read as seconds, counted from 1970-01-01"
        return found if isinstance(found, str) else found._replace(note=note)
    if not hinted:
        return "holds numbers that are no times"
    return (
        f"holds numbers that are no times ({low:g} to {high:g}); known are {', '.join(COUNTS)}, and counts such as "
        f"'hours since 1900-01-01'; a count of days or steps can be read as if it were of seconds: --time {name} "
        "--time-format epoch_seconds"
    )


def _explain_far_ahead(found: TimeColumn) -> str | None:
    """Return why numbers are not times if their format puts them in the distant future; None otherwise."""
    middle = int(np.median(found.micros[found.known]))
    if middle <= read_now_us() + FAR_AHEAD_US:
        return None
    reading = describe_readings([TimeReading(str(found.time_format), middle)])
    return (
        f"holds numbers that as {reading} are times of the future; if they "
        f"count from another beginning, name it, such as --time {found.name} --time-format 'hours since 1900-01-01'"
    )


def compute_usual_range(numbers: NDArray[np.float64]) -> tuple[float, float]:
    """Return the range that contains nearly all of the numbers."""
    ordered = np.sort(numbers)
    low, high = (float(ordered[round(q * (len(ordered) - 1))]) for q in (0.01, 0.99))
    return low, high


def _is_rising(values: NDArray[np.float64], file: NDArray[np.int64]) -> bool:
    """Return whether numbers rise from row to row within a file, or restart with each of several series."""
    steps = np.diff(values)[np.diff(file) == 0]
    if not (steps > 0).any():
        return False
    if (steps >= 0).mean() >= ENOUGH:
        return True
    landed = values[1:][np.diff(file) == 0][steps < 0]
    if not landed.size:  # the other steps are from or to a missing number
        return False
    return bool((steps >= 0).mean() > 0.5 and (landed <= np.nanquantile(values, NEAR_START)).mean() >= ENOUGH)


_MARKED = re.compile(r"[:h]|[.].*[.]")
"""A pattern that occurs in times of day, but not in numbers."""
_NUMBER = re.compile(r"\s*[0-9]+(?:[.]0*)?\s*")
_HOUR_NAME = re.compile(r"[^a-z](hour|hours|hr|hrs|stunde|heure|hora|ora|uur)$", re.IGNORECASE)
"""Names that end with the word for an hour, such as `Delivery Hour`; a whole name is in `jobs.specs.column_names`."""
_OF_DAY = {"minute": "minute_of_day", "second": "second_of_day"}
"""Parts of a time that are counted within the day if they reach 60."""
_SUMS = (*_OF_DAY, *_OF_DAY.values())


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
        parts = find_time_parts(_find_counts_of_day(table, columns) or columns)
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


def _find_counts_of_day(table: InputTable, columns: Sequence[str]) -> dict[str, str] | None:
    """Return the parts of a date and a count of minutes or seconds within the day; None for other columns."""
    if len(columns) != 2 or (part := _OF_DAY.get(find_time_part(columns[1]) or "")) is None:
        return None
    numbers = select_whole_numbers(table.source.columns[columns[1]])
    return None if numbers is None or numbers.max() < 60 else {"date": columns[0], part: columns[1]}


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
    if named is None and _HOUR_NAME.search(name):
        named = "hour"
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
    if named in _SUMS or named == "time" and numbers is None:
        return named if _can_be(texts, named) else None
    if numbers is None:
        return None
    if named != "hhmm" and (named == "hour" or numbers.max() <= 24) and _can_be(texts, "hour"):
        return "hour"
    return "hhmm" if (named == "hhmm" or numbers.max() >= 100) and _can_be(texts, "hhmm") else None


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


def _list_candidates(table: InputTable) -> Iterator[tuple[dict[str, str], DateForm]]:
    """Yield columns that may make a time together, by part, with the format of the date; times of day come first."""
    names = list(table.source.columns)
    clocks = {name: part for name in names if (part := find_clock_part(table, name)) is not None}
    dates = {name: form for name in names if (form := _find_date_form(table, name)) is not None}
    days = [(parts, DateForm()) for parts in _list_days(table)]
    hinted = sorted(dates, key=lambda name: HINT.search(name) is None)
    for date, form in (*(({"date": name}, dates[name]) for name in hinted), *days):
        rest = [name for name in clocks if name not in date.values() and _is_varying(table, name)]
        for wanted in ("time", "hhmm", "hour", *_OF_DAY.values()):
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
