"""Turn raw rows of a file into the columns of the measurements table, or give the reason why a row is rejected.

One parser, `jobs.landing.parsing`, serves the offline commands, small files (read in the driver), large ones (read by
Spark's workers) and messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.encoding import arrow
from jobs.landing.parsing import parse, reject
from jobs.landing.payloads import payloads
from jobs.landing.raw_rows import Source
from jobs.landing.time_columns import combine_times
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import PAYLOAD, REASON

ROWS_A_FILE = 2_000_000
"""A commit to the measurements is written to one data file for each so many rows."""

_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,19}\s*", re.ASCII)
_INT64 = range(-(2**63), 2**63)


def take_columns(spec: ModelSpec, source: Source, names: Sequence[str] | None = None) -> Source:
    """Return unparsed rows with the columns of the spec alone, by the spec's names.

    This is the one place where the names of a file become those of the spec, and several columns become one time. A
    column that the rows do not have is left out. The key from the file's name has the spec's name already.

    Args:
        spec: with the names of the files' columns.
        source: N rows with the files' names.
        names: of the spec's columns to take; None: all that rows have.
    """
    if not spec.files.names:
        return source
    columns: dict[str, pa.Array] = {}
    for name in spec.columns if names is None else names:
        given = name if name == spec.key_from_name else spec.files.names.get(name, name)
        if isinstance(given, str):
            if given in source.columns:
                columns[name] = source.columns[given]
            continue
        parts = spec.time_parts
        if all(column in source.columns for column in parts.values()):
            found = {part: source.columns[column] for part, column in parts.items()}
            columns[name] = combine_times(found, parts, spec.time_format)
    return source._replace(columns=columns)


def spec_schema(spec: ModelSpec, schema: pa.Schema) -> pa.Schema:
    """Return the types of a file's columns by the spec's names; the time that several make is left out."""
    if not spec.files.names:
        return schema
    names = {name: spec.file_names([name])[0] for name in spec.columns if name != spec.key_from_name}
    if spec.time_parts:
        del names[spec.time]
    if spec.key_from_name is not None:
        names[spec.key_from_name] = spec.key_from_name
    return pa.schema([(name, schema.field(column).type) for name, column in names.items()])


def key_types_of(names: Sequence[str], schema: pa.Schema) -> KeyTypes:
    """Return the types of key and id columns: bigint for integers, string for everything else."""
    return {name: "bigint" if _is_whole(schema.field(name).type) else "string" for name in names}


def refuse_types(spec: ModelSpec, schema: pa.Schema, file: str) -> None:
    """Refuse a file with a column whose type cannot hold the values that the spec expects.

    Raises:
        UserError: a column has such a type; the message names it and the remedy.
    """
    names = spec.file_columns if spec.key_from_name is None else [*spec.file_columns, spec.key_from_name]
    empty = {name: pa.nulls(0, schema.field(name).type) for name in names}
    parse(spec, take_columns(spec, Source(empty, np.zeros(0, bool), 0)), file)


def check_rows(spec: ModelSpec, source: Source, key_types: KeyTypes, file: str) -> pa.RecordBatch:
    """Return `_reason` and `_payload` (the raw row as JSON), null where a row is accepted, and the spec's columns.

    source: the rows with the names that the file has.
    """
    written, source = source, take_columns(spec, source)
    rows = parse(spec, source, file)
    reason = rows.reason
    keys = [typed_key(f"key {name}", source.columns[name], key_types[name], reason) for name in spec.key]
    ids = [
        typed_key(
            f"id {name}", _blank(source.columns[name], rows.ids < 0), key_types[name], reason, rows.ids < 0
        )
        for name in spec.id_columns
    ]
    fits = np.array([one is None for one in reason], bool)
    numbers = [arrow.numbers(np.where(fits, values, np.nan)) for values in (*rows.y, *rows.u)]
    columns = [
        pa.array(reason.tolist(), pa.string()),
        payloads(written, ~fits),
        *keys,
        arrow.times(np.where(fits, rows.time, 0), fits),
        *numbers,
        *ids,
    ]
    names = [REASON, PAYLOAD, *spec.columns]
    return pa.RecordBatch.from_arrays(columns, names)


def typed_columns(spec: ModelSpec, key_types: KeyTypes) -> str:
    """Return the spec's columns as DDL, with the types of checked rows."""
    types = {name: "double" for name in spec.columns} | key_types | {spec.time: "timestamp"}
    return ", ".join(f"`{name}` {types[name]}" for name in spec.columns)


def _is_whole(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) and not pa.types.is_uint64(kind)


def typed_key(
    what: str,
    column: pa.Array,
    wanted: str,
    reason: NDArray[np.object_],
    missing: NDArray[np.bool_] | None = None,
) -> pa.Array:
    """Return a column of keys or ids in the table's type; a value that has no exact equivalent is rejected.

    Args:
        what: the column's role and name, for reasons.
        column: N values.
        wanted: bigint or string.
        reason: (N,) why each row is rejected; updated in place.
        missing: (N,) which values may be absent; None: none of them.
    """
    kind = column.type
    if wanted == "string":
        return column.cast(pa.string())
    if _is_whole(kind):
        return column.cast(pa.int64())
    values = [_whole(value) for value in column.to_pylist()]
    bad = np.array([value is None for value in values], bool)
    reject(reason, bad if missing is None else bad & ~missing, f"{what}: not a whole number")
    return pa.array(values, pa.int64())


def _blank(column: pa.Array, missing: NDArray[np.bool_]) -> pa.Array:
    """Return a column with null at the missing values."""
    return column.take(pa.array(np.arange(len(column)), mask=missing)) if missing.any() else column


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        number = int(value) if _WHOLE.fullmatch(value) else None
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    elif value is None or isinstance(value, bool) or not hasattr(value, "__int__") or value != int(value):
        number = None
    else:
        number = int(value)
    return number if number is not None and number in _INT64 else None
