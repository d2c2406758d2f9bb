"""Parse raw rows into columns of the measurements table, or reject them with a reason."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.landing.raw_rows import RawRows, join_parts, reject, take_columns
from jobs.landing.values.keys import assign_id_codes, assign_key_codes, convert_key
from jobs.landing.values.number_reading import build_rules, parse_numbers
from jobs.landing.values.times import (
    AFTER_LANDING,
    BEFORE_RANGE,
    ClockChanges,
    Times,
    find_times,
    is_after_landing,
    is_before_range,
)
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import PAYLOAD, REASON

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ParsedRows(NamedTuple):
    """Rows as numbers, in input order.

    key    (N,) code of the key of each row, from 0 to `keys` - 1
    keys   number of keys
    time   (N,) microseconds since 1970-01-01 UTC
    y      (m, N) measurements, NaN where missing
    u      (c, N) controls
    reason (N,) reason why each row is rejected, None for accepted rows; other values of a rejected row are undefined
    ids    (N,) code of the id that identifies duplicates, -1 if the id is missing or the spec has no id
    clocks numbers of local times at clock changes
    """

    key: Ints
    keys: int
    time: Ints
    y: Floats
    u: Floats
    reason: NDArray[np.object_]
    ids: Ints
    clocks: ClockChanges = ClockChanges()

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """Return a mask (N,) of the accepted rows."""
        return self.reason == None  # noqa: E711 - elementwise


def parse(spec: ModelSpec, source: RawRows, file: str) -> ParsedRows:
    """Parse the columns of rows; a row with several errors is rejected with the first reason.

    Raises:
        UserError: the type of a column is not suitable for the values that the spec expects.
    """
    reason = source.reasons()
    key, keys = assign_key_codes(spec, source, file, reason)
    times = _parse_times(spec, source, key, file)
    time = times.micros
    reject(reason, times.missing, f"time {spec.time}: missing")
    reject(reason, ~times.known, f"time {spec.time}: not a time")
    reject(reason, is_after_landing(spec, time, source.landed), f"time {spec.time}: {AFTER_LANDING}")
    reject(reason, is_before_range(spec, time), f"time {spec.time}: {BEFORE_RANGE}")
    rules = build_rules(spec.missing_values, spec.files)
    y = parse_numbers(spec.measurement, "measurement", source, rules, file, reason)
    u = parse_numbers(spec.control, "control", source, rules, file, reason)
    for name, values in zip(spec.control, u, strict=True):
        reject(reason, np.isnan(values), f"control {name}: missing")
    ids = np.broadcast_to(np.int64(-1), source.rows)
    for name in spec.id_columns:
        ids = assign_id_codes(source.columns[name], rules, f"{file}: id column '{name}'")
    return ParsedRows(key, keys, time, y, u, reason, ids, times.clocks)


def _parse_times(spec: ModelSpec, source: RawRows, key: Ints, file: str) -> Times:
    """Return the times of a part of a file.

    If the part begins within a repeated hour of the local clock, earlier parts are read until the pass is known.
    """
    found = find_times(spec, source.columns[spec.time], key, file)
    earlier = iter(()) if source.before is None or not found.clocks.is_cut else source.before()
    both, rows, met = source, source.rows, found.clocks.repeated
    for part in earlier:
        both = join_parts([part, both._replace(before=None)], list(spec.columns))
        codes, _ = assign_key_codes(spec, both, file, np.full(both.rows, None, object))
        whole = find_times(spec, both.columns[spec.time], codes, file)
        found = Times(whole.micros[-rows:], whole.known[-rows:], whole.missing[-rows:], whole.clocks)
        if not whole.clocks.is_cut or whole.clocks.repeated == met:
            break
        met = whole.clocks.repeated
    return found


ROWS_A_FILE = 2_000_000
"""Approximate number of rows of each data file in a commit to the measurements table."""


def refuse_types(spec: ModelSpec, schema: pa.Schema, file: str) -> None:
    """Raise an error if a column of a file has a type that is not suitable for the spec.

    Raises:
        UserError: a type is not suitable; the message names the column and the remedy.
    """
    names = spec.file_columns if spec.key_from_name is None else [*spec.file_columns, spec.key_from_name]
    empty = {name: pa.nulls(0, schema.field(name).type) for name in names}
    parse(spec, take_columns(spec, RawRows(empty, 0)), file)


def check_rows(spec: ModelSpec, source: RawRows, key_types: KeyTypes, file: str) -> pa.RecordBatch:
    """Return checked rows with `_reason`, `_payload` (the raw row as JSON) and the spec's columns.

    `_reason` and `_payload` are null in accepted rows.

    Args:
        spec: spec of the model.
        source: rows with the column names of the file.
        key_types: types of the key and id columns.
        file: name of the file, used in errors.
    """
    written, source = source, take_columns(spec, source)
    rows = parse(spec, source, file)
    reason = rows.reason
    keys = [convert_key(f"key {name}", source.columns[name], key_types[name], reason) for name in spec.key]
    ids = [
        convert_key(
            f"id {name}",
            _clear_missing(source.columns[name], rows.ids < 0),
            key_types[name],
            reason,
            rows.ids < 0,
        )
        for name in spec.id_columns
    ]
    fits = rows.accepted
    numbers = [arrow.build_numbers(np.where(fits, values, np.nan)) for values in (*rows.y, *rows.u)]
    columns = [
        pa.nulls(len(reason), pa.string()) if fits.all() else arrow.build_texts(reason.tolist()),
        build_payloads(written, ~fits),
        *keys,
        arrow.build_times(np.where(fits, rows.time, 0), fits),
        *numbers,
        *ids,
    ]
    names = [REASON, PAYLOAD, *spec.columns]
    return pa.RecordBatch.from_arrays(columns, names)


def build_columns_ddl(spec: ModelSpec, key_types: KeyTypes) -> str:
    """Return the DDL of the spec's columns, with the types that checked rows have."""
    types = {name: "double" for name in spec.columns} | key_types | {spec.time: "timestamp"}
    return ", ".join(f"`{name}` {types[name]}" for name in spec.columns)


def build_payloads(source: RawRows, wanted: NDArray[np.bool_]) -> pa.Array:
    """Return the quarantine payloads of the wanted rows; null for all other rows.

    A payload is the original text of the row, or a JSON object of the row's columns without null members.
    """
    places = np.flatnonzero(wanted)
    if not len(places):
        return pa.nulls(source.rows, pa.string())
    texts: list[str | None] = [None] * source.rows
    if source.payload is not None:
        for place in places.tolist():
            texts[place] = source.payload(place)
        return arrow.build_texts(texts)
    taken = {
        name: _list_values(column.take(arrow.build_integers(places)))
        for name, column in source.columns.items()
    }
    for at, place in enumerate(places.tolist()):
        row = {name: values[at] for name, values in taken.items() if values[at] is not None}
        texts[place] = json.dumps(row, default=str, ensure_ascii=False)
    return arrow.build_texts(texts)


def _list_values(column: pa.Array) -> list[Any]:
    """Return the values of a column for payloads; a time outside Python's range becomes its stored number and type."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        if not pa.types.is_temporal(column.type):
            raise
        return [_convert_time(column[place]) for place in range(len(column))]


def _convert_time(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):  # the time is outside the years 1 to 9999
        return f"{value.value} ({value.type})"


def _clear_missing(column: pa.Array, missing: NDArray[np.bool_]) -> pa.Array:
    """Return a column with null in place of the values that mean a missing value."""
    return column.take(arrow.build_integers(np.arange(len(column)), ~missing)) if missing.any() else column
