"""Parse raw rows into numbers, or reject them with a reason, by the rules of docs/models.md, "What a row may hold"."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.encoding import arrow
from jobs.landing.raw_rows import Source, joined
from jobs.landing.times import (
    AFTER_LANDING,
    BEFORE_RANGE,
    ClockChanges,
    Times,
    after_landing,
    before_range,
    find_times,
)
from jobs.specs.model_spec import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:[.][0-9]*)?|[.][0-9]+)(?:[eE][+-]?[0-9]+)?")
_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)
_OK, _NOT_A_NUMBER, _NOT_FINITE = 0, 1, 2
_REASONS = {_NOT_A_NUMBER: "not a number", _NOT_FINITE: "not finite"}


class ParsedRows(NamedTuple):
    """Rows as numbers, in input order.

    key    (N,) codes from 0 below `keys`
    time   (N,) microseconds since 1970-01-01 UTC
    y, u   (m, N) measurements, NaN = missing; (c, N) controls
    reason (N,) why a row is rejected, None where it is accepted; the numbers of a rejected row are undefined
    ids    (N,) codes of the ids by which duplicates are found, -1 where missing or where the spec names no id
    clocks how local times met changes of the clocks
    """

    key: Ints
    keys: int
    time: Ints
    y: Floats
    u: Floats
    reason: NDArray[np.object_]
    ids: Ints
    clocks: ClockChanges = ClockChanges()


def parse(spec: ModelSpec, source: Source, file: str) -> ParsedRows:
    """Parse the columns; a rejected row keeps its first reason.

    Raises:
        UserError: a column's type cannot hold the values that the spec expects.
    """
    reason = np.full(source.rows, None, dtype=object)
    reject(reason, source.misshapen, "row: not as many fields as the header")
    if source.not_utf8 is not None:
        reject(reason, source.not_utf8, "row: not UTF-8 text")
    if source.unmatched is not None:
        reject(reason, source.unmatched, "line: does not match line_pattern")
    key, keys = _keys(spec, source, file, reason)
    times = _times(spec, source, key, file)
    time = times.micros
    reject(reason, times.missing, f"time {spec.time}: missing")
    reject(reason, ~times.known, f"time {spec.time}: not a time")
    reject(reason, after_landing(spec, time, source.landed), f"time {spec.time}: {AFTER_LANDING}")
    reject(reason, before_range(spec, time), f"time {spec.time}: {BEFORE_RANGE}")
    missing = {text.strip(" ").casefold() for text in spec.missing_values}
    y = numbers_of(spec.measurement, "measurement", source, missing, file, reason)
    u = numbers_of(spec.control, "control", source, missing, file, reason)
    for name, values in zip(spec.control, u, strict=True):
        reject(reason, np.isnan(values), f"control {name}: missing")
    ids = np.full(source.rows, -1)
    for name in spec.id_columns:
        ids = _ids(source.columns[name], missing, f"{file}: id column '{name}'")
    return ParsedRows(key, keys, time, y, u, reason, ids, times.clocks)


def _times(spec: ModelSpec, source: Source, key: Ints, file: str) -> Times:
    """Return the times of a part of a file, with the parts before it as far as a repeated hour needs them."""
    found = find_times(spec, source.columns[spec.time], key, file)
    earlier = iter(()) if source.before is None or not found.clocks.is_cut else source.before()
    both, rows, met = source, source.rows, found.clocks.repeated
    for part in earlier:
        both = joined([part, both._replace(before=None)], list(spec.columns))
        codes, _ = _keys(spec, both, file, np.full(both.rows, None, object))
        whole = find_times(spec, both.columns[spec.time], codes, file)
        found = Times(whole.micros[-rows:], whole.known[-rows:], whole.missing[-rows:], whole.clocks)
        if not whole.clocks.is_cut or whole.clocks.repeated == met:
            break
        met = whole.clocks.repeated
    return found


_NO_KEYS = (
    pa.types.is_nested,
    pa.types.is_null,
    pa.types.is_fixed_size_binary,
    lambda kind: isinstance(kind, pa.BaseExtensionType),  # such as a UUID
)


def _keys(spec: ModelSpec, source: Source, file: str, reason: NDArray[np.object_]) -> tuple[Ints, int]:
    codes = np.zeros(source.rows, dtype=np.int64)
    count = 1
    for name in spec.key:
        column = source.columns[name]
        if any(is_kind(column.type) for is_kind in _NO_KEYS):
            raise UserError(
                f"{file}: key column '{name}' holds {column.type}; a key is text, a number or a date"
            )
        encoded = column.dictionary_encode()
        part = arrow.to_numpy(encoded.indices).astype(np.int64)
        bad = arrow.to_numpy(encoded.indices.is_null())
        if pa.types.is_string(column.type):
            bad |= np.array([text == "" for text in encoded.dictionary.to_pylist()] or [True])[part]
        elif pa.types.is_floating(column.type):
            bad |= np.isnan(arrow.to_numpy(column.cast(pa.float64()), math.nan))
        reject(reason, bad, f"key {name}: missing")
        # Codes are made dense after every column, so that the product of the columns' sizes cannot overflow.
        values, codes = np.unique(codes * max(len(encoded.dictionary), 1) + part, return_inverse=True)
        count = len(values)
    return codes.astype(np.int64, copy=False), count


def _ids(column: pa.Array, missing: set[str], what: str) -> Ints:
    """Return codes (N,) of a column's ids, -1 where missing.

    Raises:
        UserError: the column's type cannot hold ids.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), -1)
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind)):
        raise UserError(f"{what} holds {kind}; an id is text or a whole number")
    encoded = column.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    absent = [isinstance(value, str) and value.strip(" ").casefold() in missing for value in values]
    codes = np.where(np.array(absent, bool), -1, np.arange(len(values)))
    return np.append(codes, -1)[arrow.to_numpy(encoded.indices, len(values)).astype(np.int64)]


def numbers_of(
    names: Sequence[str], what: str, source: Source, missing: set[str], file: str, reason: NDArray[np.object_]
) -> Floats:
    """Return the numbers (d, N) in columns, NaN where missing; rows with anything else are rejected.

    Raises:
        UserError: a column's type cannot hold numbers.
    """
    result = np.full((len(names), source.rows), np.nan)
    for row, name in enumerate(names):
        column = source.columns[name]
        kind = column.type
        if pa.types.is_string(kind):
            texts, places = arrow.distinct_values(column)
            parsed = [_number(text, missing, source.decimal) for text in texts]
            values = np.array([value for value, _ in parsed] + [math.nan])[places]
            codes = np.array([code for _, code in parsed] + [_OK])[places]
            for code, text in _REASONS.items():
                reject(reason, codes == code, f"{what} {name}: {text}")
        elif arrow.is_number(kind):
            values = arrow.to_numpy(column.cast(pa.float64(), safe=False), math.nan)
            reject(reason, np.isinf(values), f"{what} {name}: {_REASONS[_NOT_FINITE]}")
        elif pa.types.is_null(kind):
            values = np.full(source.rows, np.nan)
        else:
            raise UserError(f"{file}: {what} column '{name}' holds {kind}; it must hold numbers")
        result[row] = values
    return result


def _number(text: str, missing: set[str], decimal: str) -> tuple[float, int]:
    text = text.strip(" ")
    if text.casefold() in missing:
        return math.nan, _OK
    if decimal == ",":
        if "." in text:
            return math.nan, _NOT_A_NUMBER  # 1.234 may be a thousand and more
        text = text.replace(",", ".")
    if _NUMBER.fullmatch(text):
        value = float(text)
        return value, _OK if math.isfinite(value) else _NOT_FINITE
    return math.nan, _NOT_FINITE if _INFINITE.fullmatch(text) else _NOT_A_NUMBER


def reject(reason: NDArray[np.object_], bad: NDArray[np.bool_], text: str) -> None:
    """Reject the bad rows (N,) that have no reason yet with `text`."""
    if bad.any():
        bad = bad & (reason == None)  # noqa: E711 - elementwise
        reason[bad] = text
