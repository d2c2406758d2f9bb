"""Parse raw rows into numbers, or reject them with a reason, by the rules of docs/models.md, "What a row may hold"."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.core.times import (
    EPOCH_FORMATS,
    MAX_US,
    MIN_US,
    SPREADSHEET_US,
    UNIT_US,
    Epoch,
    TimeParser,
    local_us,
)
from jobs.encoding import arrow
from jobs.landing.raw_rows import Source, reject
from jobs.landing.values.keys import codes_of_ids, codes_of_keys
from jobs.landing.values.numbers import numbers_of, rules_of
from jobs.specs.model_spec import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PLAIN_TIME = "[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.][0-9]{1,6})?"
ARROW_FROM = 5_000
"""From so many rows on, Arrow parses times faster than Python."""
_DIGITS = {"epoch_seconds": 10, "epoch_milliseconds": 13, "epoch_microseconds": 16, "epoch_nanoseconds": 19}


class ParsedRows(NamedTuple):
    """Rows as numbers, in input order.

    key    (N,) codes from 0 below `keys`
    time   (N,) microseconds since 1970-01-01 UTC
    y, u   (m, N) measurements, NaN = missing; (c, N) controls
    reason (N,) why a row is rejected, None where it is accepted; the numbers of a rejected row are undefined
    ids    (N,) codes of the ids by which duplicates are found, -1 where missing or where the spec names no id
    """

    key: Ints
    keys: int
    time: Ints
    y: Floats
    u: Floats
    reason: NDArray[np.object_]
    ids: Ints


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
    key, keys = codes_of_keys(spec, source, file, reason)
    time = _times(spec, source.columns[spec.time], file, reason)
    rules = rules_of(spec.missing_values, spec.files)
    y = numbers_of(spec.measurement, "measurement", source, rules, file, reason)
    u = numbers_of(spec.control, "control", source, rules, file, reason)
    for name, values in zip(spec.control, u, strict=True):
        reject(reason, np.isnan(values), f"control {name}: missing")
    ids = np.full(source.rows, -1)
    for name in spec.id_columns:
        ids = codes_of_ids(source.columns[name], rules, f"{file}: id column '{name}'")
    return ParsedRows(key, keys, time, y, u, reason, ids)


def _times(spec: ModelSpec, column: pa.Array, file: str, reason: NDArray[np.object_]) -> Ints:
    zone: tzinfo = UTC if spec.time_zone == "UTC" else ZoneInfo(spec.time_zone)
    missing = arrow.to_numpy(column.is_null()).copy()
    micros, known = read_times(column, spec.time_format, zone, f"{file}: time column '{spec.time}'")
    if pa.types.is_string(column.type):
        unknown = np.flatnonzero(~known)
        texts = column.take(arrow.integers(unknown)).to_pylist()
        missing[unknown] |= np.array([not text for text in texts], bool)
    reject(reason, missing, f"time {spec.time}: missing")
    reject(reason, ~known, f"time {spec.time}: not a time")
    return micros


def read_times(
    column: pa.Array, time_format: str | None, zone: tzinfo, what: str
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the times (N,) of a column in microseconds since 1970 UTC, and which values are times.

    Args:
        column: N values.
        time_format: as in a spec.
        zone: of times without an offset.
        what: names the column in errors.

    Raises:
        UserError: the column's type cannot hold times, or holds numbers and the format is none of numbers.
    """
    kind = column.type
    if pa.types.is_string(kind):
        return _written_times(column, TimeParser(time_format, zone), time_format, zone)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros, known = _stored_times(column)
        is_local = pa.types.is_date(kind) or kind.tz is None
    elif arrow.is_number(kind):
        epoch = EPOCH_FORMATS.get(time_format or "")
        if epoch is None:
            digits = ", ".join(f"{name} ({count} digits today)" for name, count in _DIGITS.items())
            remedy = f"set time_format in the spec to one of {digits}, or spreadsheet_days (5 digits)"
            raise UserError(f"{what} holds numbers ({kind}); {remedy}")
        micros, known = _from_epoch(column, epoch)
        is_local = epoch.is_spreadsheet
    else:
        raise UserError(f"{what} holds {kind}; it must hold timestamps, dates or text")
    if zone is not UTC and is_local:
        micros = _from_local(micros, zone)
        known &= (micros >= MIN_US) & (micros <= MAX_US)
    return micros, known


def _written_times(
    column: pa.Array, parser: TimeParser, time_format: str | None, zone: tzinfo
) -> tuple[Ints, NDArray[np.bool_]]:
    """Parse times written as text. Of many, Arrow parses the plainest ones, with the same result as the parser."""
    rest = np.ones(len(column), bool)
    micros, known = np.zeros(len(column), np.int64), np.zeros(len(column), bool)
    if time_format is None and len(column) >= ARROW_FROM:
        pc = arrow.compute()
        pattern = f"^{PLAIN_TIME}{'Z?' if zone is UTC else 'Z'}$"
        plain = pc.match_substring_regex(column, pattern)
        cut = pc.replace_substring(pc.utf8_replace_slice(column, 10, 11, " "), "Z", "")
        try:
            wanted = pc.if_else(plain, cut, pa.nulls(len(column), pa.string()))
            read = wanted.cast(pa.timestamp("us")).cast(pa.int64())
            micros, rest = arrow.to_numpy(read).copy(), ~arrow.to_numpy(plain, False)
            known = ~rest & (micros >= MIN_US) & (micros <= MAX_US)
        except pa.ArrowInvalid:
            pass  # an impossible date such as the 31st of June, which the parser below finds
    if rest.any():
        places = np.flatnonzero(rest)
        texts, which = arrow.distinct_values(column.take(arrow.integers(places)))
        parsed = [parser(text) for text in texts]
        micros[places] = np.array([0 if value is None else value for value in parsed] + [0])[which]
        known[places] = np.array([value is not None for value in parsed] + [False])[which]
    return micros, known


def _stored_times(column: pa.Array) -> tuple[Ints, NDArray[np.bool_]]:
    """Return stored timestamps or dates in microseconds, and which of them are within the years 1 to 9999."""
    kind = column.type
    if pa.types.is_date32(kind):
        return _scaled(arrow.to_numpy(column.cast(pa.int32())).astype(np.int64), UNIT_US["day"])
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    stored = arrow.to_numpy(column.cast(pa.int64()))
    if unit == "ns":
        return _scaled(stored // 1000, 1)  # digits beyond microseconds are cut off
    return _scaled(stored, {"s": UNIT_US["second"], "ms": UNIT_US["millisecond"], "us": 1}[unit])


def _scaled(values: Ints, scale: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Multiply by `scale`, and tell which products are times; the others are 0, as they might not fit 64 bits."""
    known = (values <= MAX_US // scale) & (values >= -(-MIN_US // scale))
    return np.where(known, values, 0) * scale, known


def _from_epoch(column: pa.Array, epoch: Epoch) -> tuple[Ints, NDArray[np.bool_]]:
    if epoch.is_spreadsheet:
        days = arrow.to_numpy(column.cast(pa.float64(), safe=False), 0.0)
        low, high = ((limit - SPREADSHEET_US) / epoch.micros for limit in (MIN_US, MAX_US))
        known = (days >= low) & (days <= high)
        millis = np.floor(np.where(known, days, 0.0) * (epoch.micros // 1000) + 0.5)
        return millis.astype(np.int64) * 1000 + SPREADSHEET_US, known
    scale, parts = epoch.micros, epoch.parts
    if pa.types.is_integer(column.type):
        whole = arrow.to_numpy(column)
        # Of an unsigned column the limits below are beyond its range or within it, but never wrap.
        known = (whole <= MAX_US * parts // scale) & (whole >= MIN_US * parts // scale)
        values = np.where(known, whole, 0).astype(np.int64)
        cut = values // parts + ((values < 0) & (values % parts != 0))  # towards 0, as in text
        return cut * scale, known
    values = arrow.to_numpy(column.cast(pa.float64()), 0.0)
    known = (values <= MAX_US / scale * parts) & (values >= MIN_US / scale * parts)
    return np.trunc(np.where(known, values, 0.0) * scale / parts).astype(np.int64), known


def _from_local(micros: Ints, zone: tzinfo) -> Ints:
    values, places = np.unique(micros, return_inverse=True)
    start = datetime(1970, 1, 1)
    moments = (local_us(start + timedelta(microseconds=int(value)), zone) for value in values)
    return np.fromiter(moments, np.int64, len(values))[places]
