"""Find each column's role (time, key, measurement, or why it is none of these).

Also find the numbers that mark missing measurements, such as -999.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import tzinfo
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.choosing.table import InputTable
from jobs.choosing.times import HINT, TimeColumn, convert_to_times, find_parts, join_given_parts
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.core.times import load_zone
from jobs.landing.file_parts import check_columns
from jobs.landing.values.number_reading import ABSENT, NUMERIC, build_rules, parse_numbers
from jobs.specs.column_names import find_time_part
from jobs.specs.model_spec import DEFAULT_MISSING
from jobs.state.encoding import arrow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST = 8
"""The minimum number of other values that a judgement about a number needs."""
FEW_TIMES = 3
"""The minimum count of a mark that programs do not commonly use for missing values."""
MOST = 0.3
"""The largest share of the values that such a mark may have."""
USUAL_GAP, OTHER_GAP = 0.5, 3.0
"""The minimum distance of a mark from the other values, relative to their range: for a common mark, for any other."""
_NINES = re.compile(r"-?(?:9{2,}(?:[.]9+)?|9[.]9+|[78]{3,}(?:[.][78]+)?|6999|-?1e\+?(?:20|30|35|36|37|38))")
_LIMITS = (32767.0, -32768.0, 65535.0, 2147483647.0, -2147483648.0, 4294967295.0, 9.96921e36, 3.4028235e38)


class NumericColumn(NamedTuple):
    """A column as numbers.

    values: (N,) numbers, NaN where missing.
    absent: texts in the column that mean missing.
    marks: numbers that stand for missing values, with their counts.
    """

    name: str
    values: Floats
    absent: tuple[str, ...]
    marks: Mapping[float, int] = MappingProxyType({})


def find_marks(measurements: Sequence[NumericColumn], group: Ints) -> tuple[list[NumericColumn], list[str]]:
    """Return the measurements with all their marks, and notes on these marks.

    A spec's mark applies to all measurements, so a number that is a real value of another measurement is not a mark.

    Args:
        measurements: M columns of N values.
        group: (N,) number of each row's series.
    """
    found: list[NumericColumn] = []
    notes: list[str] = []
    for one in measurements:
        values, more = drop_marks(one.values, group)
        marks = {**one.marks, **more}
        known = values[np.isfinite(values)]
        for mark, count in list(marks.items()):
            other = next(
                (it.name for it in measurements if it is not one and (it.values == mark).any()), None
            )
            end = ", and taken for missing; if it is measured, take it out of missing_values"
            if other is not None:
                end = f"; {other} has it too, so it stays: name one of them alone with --measurement"
                del marks[mark]
            notes.append(
                f"{one.name}: {mark:.15g} in {format_count(count, 'row')} is far outside of the others, "
                f"{known.min():g} to {known.max():g}{end}"
            )
        found.append(one._replace(values=values, marks=marks))
    return found, notes


def drop_marks(values: Floats, group: Ints | None = None) -> tuple[Floats, dict[float, int]]:
    """Return values with NaN in place of marks for missing values, and these marks with their counts.

    Args:
        values: (N,) numbers, NaN where missing.
        group: (N,) number of each row's series. With these numbers, any frequent value may be a mark if in every series
            with the mark other values are more frequent. Without them, only common marks are found.
    """
    marks: dict[float, int] = {}
    while (mark := _find_outermost(values, group)) is not None:
        marks[mark] = int((values == mark).sum())
        values = np.where(values == mark, np.nan, values)
    return values, marks


def _find_outermost(values: Floats, group: Ints | None) -> float | None:
    """Return the smallest or largest value if it stands for a missing value, else None."""
    known = values[np.isfinite(values)]
    if len(known) <= LEAST:
        return None
    for mark in (float(known.min()), float(known.max())):
        others = known[known != mark]
        if len(others) < LEAST:
            continue
        low, high = np.quantile(others, [0.001, 0.999])
        gap = np.abs(others - mark).min()
        times = len(known) - len(others)
        if is_usual(mark):
            far = gap > USUAL_GAP * max(high - low, 1e-12 * abs(mark))
            if far and not low <= mark <= high:
                return mark
        elif (
            group is not None
            and FEW_TIMES <= times <= MOST * len(known)
            and len(np.unique(others)) >= LEAST  # fewer distinct values are states, such as on and off
        ):
            far = gap > OTHER_GAP * max(others.max() - others.min(), 1e-9 * abs(mark))
            if far and _is_scattered(values == mark, np.isfinite(values), group):
                return mark
    return None


def is_usual(number: float) -> bool:
    """Return whether programs often write a number for a missing value: -999, 9999, 999.9, 1e20, or a type's limit."""
    nearest = any(abs(number - limit) <= 1e-6 * abs(limit) for limit in _LIMITS)
    return nearest or _NINES.fullmatch(f"{number:.15g}") is not None


def _is_scattered(marked: NDArray[np.bool_], known: NDArray[np.bool_], group: Ints) -> bool:
    """Return whether in every series at most half of the values are marked."""
    count = int(group.max()) + 1
    own, all_of = np.bincount(group[marked], minlength=count), np.bincount(group[known], minlength=count)
    return bool((own <= 0.5 * all_of).all())


ID = re.compile(
    r"(^|[^a-z])(id|uid|uuid|guid|key|code|no|nr|number|index|row|rownames|rowid|seq|sequence|serial|zip|postcode"
    r"|imei|imsi|iccid|msisdn|mmsi|mac|bssid|vin|(dev_?)?eui(64|48)?|icao(24)?)([^a-z]|$)|(^|[a-z])(_id|Id|ID)$",
    re.IGNORECASE,
)
KEY = re.compile(
    r"(^|[^a-z])(id|key|name|code|sensor|station|device|host|server|site|river|meter|region|country|city|state|"
    r"store|shop|product|item|sku|symbol|ticker|tag|channel|node|machine|unit|asset|customer|user|account|origin|"
    r"dest|destination|route|line|carrier|tailnum|series|firm|company|location|place|metric|instance|pod|group|type)"
    r"([^a-z]|$)",
    re.IGNORECASE,
)
SERIES = re.compile(
    r"(^|[^a-z])(sensor|probe|station|device|host|server|site|river|meter|city|town|entity|room|zone|node|machine|asset|"
    r"location|place|gauge|buoy|well|pump|inverter|panel|plant|turbine|vehicle|truck|patient|subject|logger|instance|"
    r"symbol|ticker|variable|parameter|metric|element|quantity|channel|tag|uuid|guid|imei|imsi|iccid|msisdn|mmsi|mac|"
    r"bssid|vin|(dev_?)?eui(64|48)?|icao(24)?)(s|_?(id|name|no|nr|key|code|addr|address))?([^a-z]|$)",
    re.IGNORECASE,
)
"""Names of columns whose texts name devices, places or measured quantities."""
DESCRIBES = re.compile(
    r"(^|[^a-z])(state|status|type|unit|units|quality|flag|class|kind|mode|level|severity)([^a-z]|$)|"
    r"unit_of_measurement",
    re.IGNORECASE,
)
"""Names of columns that describe a row, not the system to which the row belongs."""
USUAL = {text.casefold() for text in DEFAULT_MISSING}
BY_NAME = "looks like an id, by its name"
VALUE = re.compile(r"(^|[^a-z])(state|value|metric|unit|reading|count|level)([^a-z]|$)", re.IGNORECASE)
"""Names that make a column a measurement rather than a key if its values could be either."""


class Wishes(NamedTuple):
    """The user's choices: column roles, time zone and format, structure, and the size of the sample.

    keys, rows: the number of sampled keys, and of each key's last rows to which structures are fitted.
    """

    time: str | None = None
    time_format: str | None = None
    time_zone: str = "UTC"
    key: Sequence[str] = ()
    key_from_name: str | None = None
    measurement: Sequence[str] = ()
    structure: str | None = None
    keys: int = 32
    rows: int = 400
    no_key: bool = False

    @property
    def zone(self) -> tzinfo:
        """Return the time zone of times without an offset."""
        return load_zone(self.time_zone)


class Roles(NamedTuple):
    """The roles of the columns.

    time: the event time.
    measurements: candidates for measurements, in the files' order.
    keys: names of columns that may be keys, in the files' order.
    texts: the columns of `keys` that hold texts.
    refused: for each name of another column, the reason why the column is not a measurement.
    """

    time: TimeColumn
    measurements: list[NumericColumn]
    keys: list[str]
    texts: frozenset[str]
    refused: dict[str, str]


def find_roles(table: InputTable, wishes: Wishes) -> Roles:
    """Find the roles of a table's columns, and check the roles that the user gives.

    Raises:
        UserError: no column is a time, no column is a number, or a given column does not fit its role.
    """
    measurement, key = wishes.measurement, wishes.key
    for name in (*measurement, *key):
        _check_there(table, name)
    found = _find_time(table, wishes)
    refused = dict(table.partial)
    numbers: list[NumericColumn] = []
    keys: list[str] = []
    texts: set[str] = set()
    for name in table.source.columns:
        if name in found.columns or name in key:
            if found.parts and name in found.columns:
                refused[name] = "is a part of the time"
            continue
        one = convert_to_numbers(table, name)
        if name in measurement:
            if isinstance(one, str):
                raise UserError(f"--measurement {name}: {one}")
            numbers.append(one)
            continue
        reason = one if isinstance(one, str) else _explain_no_measurement(one, table)
        is_text = isinstance(one, str) or name in table.numbers.verbal
        if reason is not None and _may_be_key(table, name, is_text):
            keys.append(name)
            texts |= {name} if is_text else set()
        if reason is not None:
            refused[name] = reason
        elif not measurement and not isinstance(one, str):
            numbers.append(one)
        else:
            refused[name] = "another was asked for"
    if not numbers and (name := _find_last_resort(table, refused)) is not None:
        one = convert_to_numbers(table, name)
        numbers = [] if isinstance(one, str) else [one]
        keys = [key for key in keys if key != name]
        refused = {other: reason for other, reason in refused.items() if other != name}
    if not numbers:
        listed = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
        raise UserError(f"{table.files[0]}: no column is a measurement; name one with --measurement{listed}")
    return Roles(found, numbers, keys, frozenset(texts), refused)


def _find_last_resort(table: InputTable, refused: Mapping[str, str]) -> str | None:
    """Return the likeliest measurement of a table whose numbers all look like keys; None if no column fits."""

    def merit(name: str) -> tuple[bool, bool, int]:
        is_value = VALUE.search(name) is not None
        return name not in table.numbers.verbal, is_value, len(table.source.columns[name].unique())

    able = [name for name, reason in refused.items() if reason == BY_NAME or name in table.numbers.verbal]
    return max(able, key=merit, default=None)


def _check_there(table: InputTable, name: str) -> None:
    if name in table.partial:
        raise UserError(f"column '{name}' {table.partial[name]}")
    check_columns(table.files[0], list(table.source.columns), [name])


def _find_time(table: InputTable, wishes: Wishes) -> TimeColumn:
    zone, form = wishes.zone, wishes.time_format
    taken = {*wishes.measurement, *wishes.key}
    if wishes.time is not None:
        columns = [wishes.time] if wishes.time in table.source.columns else wishes.time.split(",")
        for name in columns:
            _check_there(table, name)
        if len(columns) > 1:
            return join_given_parts(table, columns, zone, form)
        found = convert_to_times(table, wishes.time, zone, form, is_given=True)
        if isinstance(found, str):
            raise UserError(f"--time {wishes.time}: {found}")
        return found
    why: dict[str, str] = dict(table.partial)
    times: list[TimeColumn] = []
    for name in table.source.columns:
        if name in taken:
            continue
        one = convert_to_times(table, name, zone, form)
        if isinstance(one, str):
            why[name] = one
        else:
            times.append(one)
    parts = find_parts(table, zone, form)
    if parts is not None and not taken & {*parts.columns}:
        # A column with the whole time is preferred to several columns with parts of it.
        whole = [one for one in times if one.name not in parts.columns and one.note is None]
        if max(map(_count_distinct, whole), default=0) < _count_distinct(parts):
            return parts
        times = whole
    if not times:
        listed = "".join(f"\n  {name}: {reason}" for name, reason in why.items())
        raise UserError(
            f"{table.files[0]}: no column is a time; name one with --time, and its format with --time-format{listed}"
        )
    return max(
        times, key=lambda one: (one.known.mean() > 0.99, bool(HINT.search(one.name)), _count_distinct(one))
    )


def _count_distinct(one: TimeColumn) -> int:
    return len(np.unique(one.micros[one.known]))


def convert_to_numbers(table: InputTable, name: str) -> NumericColumn | str:
    """Return a column as numbers, or the reason why it does not hold numbers."""
    column = table.source.columns[name]
    kind = column.type
    if pa.types.is_nested(kind) or pa.types.is_temporal(kind):
        return f"holds {kind}"
    if name in table.numbers.refused:
        return table.numbers.refused[name]
    present = ~arrow.to_numpy(column.is_null())
    if not present.any():
        return "is empty"
    absent: tuple[str, ...] = ()
    if pa.types.is_string(kind):
        texts = {text.strip(" ") for text in column.drop_null().unique().to_pylist()}
        absent = tuple(
            sorted(text for text in texts if text.casefold() in ABSENT and text.casefold() not in USUAL)
        )
    reason = np.full(table.source.rows, None, dtype=object)
    rules = build_rules([*DEFAULT_MISSING, *absent], table.written)
    try:
        (values,) = parse_numbers([name], "measurement", table.source, rules, name, reason)
    except UserError:
        return f"holds {kind}"
    bad = reason != None  # noqa: E711 - elementwise
    if bad[present].mean() > 1.0 - NUMERIC:
        if bad[present].mean() > 0.5:
            return "holds text"
        return f"holds numbers in {(~bad[present]).mean():.0%} of its rows only"
    values = np.where(bad, np.nan, values)
    if not np.isfinite(values).any():
        return "has no number"
    values, marks = drop_marks(values)
    return NumericColumn(name, values, absent, marks)


def _explain_no_measurement(one: NumericColumn, table: InputTable) -> str | None:
    if one.name in table.numbers.verbal:
        words = " and ".join(sorted(table.numbers.words[one.name]))
        return f"holds {words}; to measure it as 1 and 0, give --measurement {one.name}"
    values = one.values[np.isfinite(one.values)]
    if len(values) < 0.05 * len(one.values):
        return f"is missing in {1 - len(values) / len(one.values):.0%} of the rows"
    distinct = np.unique(values)
    if len(distinct) == 1:
        return f"is {distinct[0]:g} in every row"
    whole = bool((values == np.floor(values)).all())
    if not whole:
        return None
    same_file = np.diff(table.file) == 0
    steps = np.diff(one.values)[same_file]
    if len(steps) and bool((steps == 1.0).mean() > 0.99):
        return "counts the rows"
    if isinstance(convert_to_times(table, one.name), TimeColumn):
        return "holds times, and the time is another column"
    if ID.search(one.name) is not None and len(distinct) > 0.99 * len(values):
        return "numbers the rows"
    if (
        ID.search(one.name) is not None
        or KEY.search(one.name) is not None
        and len(distinct) < len(values) / 5
    ):
        return BY_NAME
    is_part = (
        find_time_part(one.name) in ("year", "month", "day", "day_of_year", "hour") and len(one.name) > 1
    )
    if is_part or re.search(r"^(minute|weekday|quarter|dow|week)$", one.name, re.IGNORECASE):
        return "is a part of the time"
    return None


def _may_be_key(table: InputTable, name: str, is_text: bool) -> bool:
    """Return whether values could name systems: texts or whole numbers, each repeated many times, few missing."""
    column = table.source.columns[name]
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind)):
        return False
    if column.null_count > 0.05 * len(column):
        return False
    distinct = len(column.unique())
    if distinct > max(1, len(column) / 4):
        return False
    return is_text or ID.search(name) is not None or KEY.search(name) is not None
