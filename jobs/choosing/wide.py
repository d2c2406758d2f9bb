"""Find out whether files are wide: one kind of measurement, with a column for each series or for each time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC

import numpy as np

from jobs.choosing.columns import Wishes, convert_to_numbers
from jobs.choosing.table import InputTable
from jobs.choosing.times import TimeColumn, convert_to_times, find_parts
from jobs.core.times import MONTH_NAME
from jobs.landing.wide_files import HOUR_NAME, build_long_rows, find_wide_columns
from jobs.specs.column_names import find_time_part
from jobs.specs.files import Wide
from jobs.state.encoding import arrow

FEWEST = 3
"""The minimum number of columns that are series of one kind."""
FEWEST_CODES = 5
"""The minimum number of columns whose names are codes of capital letters, such as ticker symbols."""
FEWEST_TIMES = 4
NEAR = 4.0
"""The largest ratio of the usual sizes of series of one kind, if their names agree only in part."""
_TIME_NAME = re.compile(r"X?[0-9]{4}( \[YR[0-9]{4}\])?|X?[0-9]{1,4}[-./][0-9]{1,2}([-./][0-9]{1,4})?")
_PARTS = (
    ("time", re.compile(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?"), FEWEST_TIMES),
    ("hour", HOUR_NAME, 23),  # 23 on a day on which clocks go forward
    ("month", re.compile(MONTH_NAME), 12),
)
"""Columns for parts of a time: the part, the pattern of column names, and the minimum number of columns."""
_CODE = re.compile(r"[A-Z^][A-Z0-9.^-]{0,5}")
_QUANTITIES = frozenset(
    "OPEN HIGH LOW CLOSE VOLUME ADJ TMAX TMIN TAVG PRCP SNOW SNWD AWND TEMP HUM PM10 CO CO2 NO2 O3".split()
)
_UNIT = re.compile(r"[\[(]([^\])]+)[\])]\s*$")


def convert_to_long(table: InputTable, given: Wishes) -> InputTable:
    """Return a table of wide files as long rows, with the setting for wide files; any other table unchanged.

    given: the user's choices; if a key or a measurement is given, the files are not wide; without a key, no column is a
        series.
    """
    if given.key or given.measurement:
        return table
    names = [name for name in table.source.columns if name != given.time]
    found = (
        _find_time_columns(table, names)
        or _find_part_columns(table, names)
        or (None if given.no_key else _find_series_columns(table, names, given))
    )
    if found is None:
        return table
    wide, series = found
    kept = [given.time] if given.time else []
    if wide.key is not None:
        kept = [name for name in names if isinstance(convert_to_times(table, name), TimeColumn)][:1] or kept
        dropped = [name for name in table.source.columns if name not in (*series, *kept)]
    else:
        others = [name for name in names if name not in series]
        # Leave out, for example, the mean of a year's months.
        dropped = [name for name in others if _is_measured(table, name)]
        kept = [name for name in others if name not in dropped]
    columns = find_wide_columns(
        table.written.model_copy(update={"wide": wide}), [*kept, wide.names, wide.measurement]
    )
    assert columns is not None
    columns = columns._replace(listed=tuple(series))
    number = arrow.build_integers(table.file)
    source = table.source._replace(columns={**table.source.columns, _FILE: number})
    rows = build_long_rows(source, columns, [*kept, wide.names, wide.measurement, _FILE])
    file = arrow.to_numpy(rows.columns.pop(_FILE))
    long = table._replace(
        source=rows,
        file=file,
        partial={
            **table.partial,
            **dict.fromkeys(dropped, "is none of the series that the other columns are"),
        },
        written=table.written.model_copy(update={"wide": wide}),
    )
    if (
        wide.time is not None
        and isinstance(convert_to_times(long, wide.time), str)
        and find_parts(long, UTC) is None
    ):
        return table
    return long


_FILE = "\0file"


def _find_time_columns(table: InputTable, names: Sequence[str]) -> tuple[Wide, list[str]] | None:
    """Return the setting for files with a column for each time (named by years or dates), and these columns."""
    series = [name for name in names if _TIME_NAME.fullmatch(name)]
    others = [name for name in names if name not in series]
    if len(series) < FEWEST_TIMES or not all(_has_numbers(table, name) for name in series):
        return None
    if any(isinstance(convert_to_times(table, name), TimeColumn) for name in others):
        return None
    time, value = _choose_free_name("time", names), _choose_free_name("value", names)
    listed = [] if all(name[0].isdigit() for name in series) else series
    return Wide(time=time, measurement=value, columns=listed), series


def _find_part_columns(table: InputTable, names: Sequence[str]) -> tuple[Wide, list[str]] | None:
    """Return the setting for files with a column for each hour of a date or month of a year, and these columns."""
    for part, pattern, fewest in _PARTS:
        series = [name for name in names if pattern.fullmatch(name.strip())]
        others = [name for name in names if name not in series]
        if (
            fewest <= len(series)
            and part not in names
            and any(
                find_time_part(name) in ("date", "year")
                or isinstance(convert_to_times(table, name), TimeColumn)
                for name in others
            )
            and all(_has_numbers(table, name) for name in series)
        ):
            return Wide(time=part, measurement=_choose_free_name("value", names), columns=series), series
    return None


def _find_series_columns(
    table: InputTable, names: Sequence[str], given: Wishes
) -> tuple[Wide, list[str]] | None:
    """Return the setting for files with a column for each series, and these columns."""
    times = [name for name in names if isinstance(convert_to_times(table, name), TimeColumn)]
    if len(times) + (given.time is not None) != 1:
        return None
    numbers = [name for name in names if name not in times]
    series = [name for name in numbers if name and _has_numbers(table, name)]
    texts = [
        name
        for name in numbers
        if name not in series and table.source.columns[name].null_count < table.source.rows
    ]
    if texts or not _are_of_one_kind(table, series):
        return None
    time = given.time or times[0]
    listed = [] if len(series) == len(numbers) else series
    key, value = _choose_free_name("series", [time, *names]), _choose_free_name("value", [time, *names])
    return Wide(key=key, measurement=value, columns=listed), series


def _are_of_one_kind(table: InputTable, series: Sequence[str]) -> bool:
    """Return whether columns look like series of one kind: similar sizes, names that differ in part or by a number."""
    if len(series) < FEWEST:
        return False
    skeletons = {re.sub(r"[0-9]+|(?<=[^A-Za-z])[A-Z](?=$|[^A-Za-z])", "#", name) for name in series}
    if len(skeletons) == 1 and "#" in next(iter(skeletons)):
        return _are_sizes_near(table, series, 1000.0)
    if len(series) >= FEWEST_CODES and all(
        _CODE.fullmatch(name) and name not in _QUANTITIES for name in series
    ):
        return True
    units = {match[1] if (match := _UNIT.search(name)) else None for name in series}
    parts = [re.split(r"[_\-. :]+", name.casefold()) for name in series]
    shared = all(len(one) > 1 for one in parts) and any(
        len({one[place] for one in parts}) == 1 for place in (0, -1)
    )
    return (shared or len(units) == 1 and None not in units) and _are_sizes_near(table, series, NEAR)


def _are_sizes_near(table: InputTable, series: Sequence[str], factor: float) -> bool:
    sizes = []
    for name in series:
        found = convert_to_numbers(table, name)
        if isinstance(found, str):
            continue  # an empty column
        sizes.append(float(np.median(np.abs(found.values[np.isfinite(found.values)]))))
    return bool(sizes) and max(sizes) <= factor * max(min(sizes), 1e-300)


def _is_measured(table: InputTable, name: str) -> bool:
    """Return whether a column has numbers with fractions; keys and parts of a time have none."""
    found = convert_to_numbers(table, name)
    if isinstance(found, str):
        return False
    values = found.values[np.isfinite(found.values)]
    return bool((values != np.floor(values)).any())


def _has_numbers(table: InputTable, name: str) -> bool:
    return (
        not isinstance(convert_to_numbers(table, name), str)
        or not table.source.columns[name].null_count < table.source.rows
    )


def _choose_free_name(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name = f"{name}_"
    return name
