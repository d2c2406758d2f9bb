"""Describe how files are read: the first rows as written and as parsed, and the role of each column."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jobs.choosing.columns import NumericColumn, Wishes
from jobs.choosing.finding import Columns, find_columns
from jobs.choosing.table import read_table
from jobs.core.errors import UserError
from jobs.core.redaction import shorten_text
from jobs.core.stopwatch import Stopwatch
from jobs.core.time_counts import COUNTS
from jobs.landing.checking import ParsedRows, parse
from jobs.landing.file_rows import describe_dialect, list_input_files, read_first_rows
from jobs.landing.raw_rows import RawRows, take_columns
from jobs.landing.reading import ALWAYS_READ, list_endings
from jobs.landing.remarks import list_remarks
from jobs.specs.model_spec import ModelSpec

SHOWN = 5
"""The number of first rows to show."""
MOST_ROWS = 100_000
"""The maximum number of rows of a file that are read with a spec."""
_LONGEST = 40
_EPOCH = datetime(1970, 1, 1)


class ColumnReading(NamedTuple):
    """How a column is read.

    example: the first value as written.
    role: the role of the column.
    why: the reason for this role.
    otherwise: another possible role.
    setting: the spec's setting for the role, and the options of `init` that change it.
    """

    name: str
    example: str
    role: str
    why: str
    otherwise: str
    setting: str


class Description(NamedTuple):
    """How files are read.

    files: number of files.
    dialect: notation of CSV files.
    written, understood: the first rows, as written and as parsed.
    rows: number of rows read.
    rejected: number of rejected rows for each reason.
    notes: remedies and doubts.
    refusal: why the files cannot be read without a spec; None if they can.
    """

    first: Path
    files: int
    dialect: list[str]
    columns: list[ColumnReading]
    written: list[dict[str, str]]
    understood: list[dict[str, Any]]
    rows: int
    rejected: dict[str, int]
    notes: list[str]
    refusal: str | None = None


def describe(input: str) -> Description:
    """Describe files as `init` reads them.

    Raises:
        UserError: a file cannot be read, or there is no row.
    """
    table = read_table(list_input_files(input, ALWAYS_READ))
    names = list(table.source.columns)
    shown = Description(
        table.files[0],
        table.found,
        describe_dialect(table.files[0], table.written),
        [ColumnReading(name, _find_example(table.source, name), "", "", "", "") for name in names],
        _list_written(table.source, names),
        understood=[],
        rows=table.source.rows,
        rejected={},
        notes=[],
    )
    try:
        found = find_columns(input, table, Wishes(), Stopwatch())
    except UserError as refusal:
        return shown._replace(refusal=str(refusal))
    doubt = found.roles.time.note
    notes = [*found.notes, *([] if doubt is None else [doubt])]
    return shown._replace(
        dialect=describe_dialect(table.files[0], found.files),
        columns=_list_found_readings(found),
        understood=_list_understood(found.spec, take_columns(found.spec, found.source), found.parsed),
        rejected=_count_rejected(found.parsed),
        notes=[
            *(f"note: {note}" for note in notes),
            *list_remarks(found.spec, found.source, found.parsed, table.files),
        ],
    )


def describe_by_spec(input: str, spec: ModelSpec) -> Description:
    """Describe files as a spec reads them; of a long file only the beginning is read.

    Raises:
        UserError: a file cannot be read, or lacks a column of the spec.
    """
    files = list_input_files(input, list_endings(spec))
    source = read_first_rows(spec, files[0], MOST_ROWS)
    taken = take_columns(spec, source)
    parsed = parse(spec, taken, str(files[0]))
    return Description(
        files[0],
        len(files),
        describe_dialect(files[0], spec.files, spec.file_columns),
        _list_spec_readings(spec, taken),
        _list_written(source, list(source.columns)),
        _list_understood(spec, taken, parsed),
        source.rows,
        _count_rejected(parsed),
        list_remarks(spec, source, parsed, files[:1]),
    )


def _list_found_readings(found: Columns) -> list[ColumnReading]:
    """Return how the found columns are read, in the files' order; a key from the file's name comes last."""
    table, roles, keys = found.table, found.roles, found.keys
    numbers = {one.name: one for one in roles.measurements}
    others = [name for name in roles.keys if name not in keys.columns]
    readings: list[ColumnReading] = []
    for name in [*table.source.columns, *table.partial]:
        if name in roles.time.columns:
            role = "time"
            why = _format_time(found.spec)
            otherwise = (roles.time.note or "").partition("; ")[2]
            setting = "time, time_format, time_zone; --time, --time-format, --time-zone"
        elif name in keys.columns:
            role, why, otherwise = "key", keys.why, _format_keys(others)
            setting = "key; --key, --no-key"
        elif name in numbers:
            role, why = "measurement", _format_range(numbers[name])
            otherwise = "a key" if name in roles.keys else ""
            setting = "measurement, missing_values; --measurement"
        else:
            role = "left out"
            why = roles.refused.get(name, f"there are {len(numbers)} measurements without it")
            otherwise = "a key" if name in roles.keys else "" if name in table.partial else "a measurement"
            option = "--key" if name in roles.keys else "--measurement"
            setting = f"{option} {shlex.quote(name)}" if otherwise else ""
        readings.append(ColumnReading(name, _find_example(table.source, name), role, why, otherwise, setting))
    if keys.from_name is not None:
        example = str(found.source.columns[keys.from_name][0])
        setting = "key_from_name; --key, --no-key"
        readings.append(
            ColumnReading(keys.from_name, example, "key", keys.why, _format_keys(others), setting)
        )
    if not keys.columns:
        setting = "--key, --key-from-name"
        readings.append(ColumnReading("(no key)", "", "key", keys.why, _format_keys(others), setting))
    return readings


def _format_keys(others: Sequence[str]) -> str:
    return f"{', '.join(others[:3])} could be the key" if others else ""


def _list_spec_readings(spec: ModelSpec, source: RawRows) -> list[ColumnReading]:
    """Return how a spec's columns are read."""
    missing = ", ".join(map(repr, spec.missing_values))
    roles = (
        ("time", [spec.time], _format_time(spec), "time, time_format, time_zone"),
        ("key", spec.key, "names the series", "key"),
        ("measurement", spec.measurement, f"numbers; missing are {missing}", "measurement"),
        ("control", spec.control, "numbers, none of which may be missing", "control"),
        ("id", spec.id_columns, "by which duplicates are found", "duplicates"),
    )
    by_name = {spec.key_from_name: ("the file's name", "key_from_name")}
    return [
        ColumnReading(name, _find_example(source, name), role, said, "", settings)
        for role, names, why, setting in roles
        for name in names
        for said, settings in [by_name.get(name, (why, setting))]
    ]


def _format_time(spec: ModelSpec) -> str:
    form = "ISO 8601" if spec.time_format is None else spec.time_format
    if form in COUNTS:
        return f"numbers, {form}"
    return f"{form}; without an offset in {spec.time_zone}"


def _format_range(one: NumericColumn) -> str:
    good = one.values[np.isfinite(one.values)]
    missing = f", missing in {len(one.values) - len(good):,} rows" if len(good) < len(one.values) else ""
    texts = f" (written {', '.join(map(repr, one.absent))})" if one.absent else ""
    return f"numbers from {good.min():g} to {good.max():g}{missing}{texts}"


def _find_example(source: RawRows, name: str) -> str:
    """Return a column's first value as text."""
    column = source.columns.get(name)
    values = [] if column is None else column.slice(0, MOST_ROWS).drop_null().slice(0, 1).to_pylist()
    return _shorten(values[0]) if values else ""


def _shorten(value: Any) -> str:
    return "" if value is None else shorten_text(str(value), _LONGEST)


def _list_written(source: RawRows, names: list[str]) -> list[dict[str, str]]:
    columns = {name: source.columns[name].slice(0, SHOWN).to_pylist() for name in names}
    count = min(source.rows, SHOWN)
    return [{name: _shorten(values[i]) for name, values in columns.items()} for i in range(count)]


def _list_understood(spec: ModelSpec, source: RawRows, parsed: ParsedRows) -> list[dict[str, Any]]:
    """Return the first rows as parsed: key, time in UTC and numbers, or the reason for rejection."""
    rows: list[dict[str, Any]] = []
    keys = {name: source.columns[name].slice(0, SHOWN).to_pylist() for name in spec.key}
    for i in range(min(source.rows, SHOWN)):
        if parsed.reason[i] is not None:
            rows.append({"rejected": str(parsed.reason[i])})
            continue
        at = _EPOCH + timedelta(microseconds=int(parsed.time[i]))
        numbers = zip((*spec.measurement, *spec.control), (*parsed.y[:, i], *parsed.u[:, i]), strict=True)
        rows.append(
            {
                **{name: _shorten(values[i]) for name, values in keys.items()},
                spec.time: f"{at.isoformat()}Z",
                **{name: None if np.isnan(value) else float(value) for name, value in numbers},
            }
        )
    return rows


def _count_rejected(parsed: ParsedRows) -> dict[str, int]:
    return dict(Counter(str(one) for one in parsed.reason if one is not None).most_common())
