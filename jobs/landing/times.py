"""Read a column of times: text, stored times, or counts of a unit."""

from __future__ import annotations

import math
from datetime import UTC, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.core.time_counts import MAX_US, MIN_US, Count, count_of, to_datetime
from jobs.core.times import UNIT_US, TimeParser, local_us, time_pattern
from jobs.encoding import arrow
from jobs.landing.time_readings import numbers_remedy
from jobs.specs.model_spec import ModelSpec

Ints = NDArray[np.int64]

PLAIN_TIME = "[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.][0-9]{1,6})?"
ARROW_FROM = 5_000
"""From so many rows on, Arrow parses times faster than Python."""


def find_times(
    spec: ModelSpec, column: pa.Array, file: str
) -> tuple[Ints, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the times (N,) of a spec's time column in microseconds, which are times, and which are missing.

    Raises:
        UserError: as of `read_times`.
    """
    zone: tzinfo = UTC if spec.time_zone == "UTC" else ZoneInfo(spec.time_zone)
    missing = arrow.to_numpy(column.is_null()).copy()
    form = None if spec.time_parts else spec.time_format  # which `combine_times` has applied
    micros, known = read_times(column, form, zone, f"{file}: time column '{spec.time}'")
    if pa.types.is_string(column.type):
        unknown = np.flatnonzero(~known)
        texts = column.take(arrow.integers(unknown)).to_pylist()
        missing[unknown] |= np.array([not text for text in texts], bool)
    return micros, known, missing


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
        count = count_of(time_format)
        if count is None or count.is_years:
            return _written_numbers(column, time_format, zone, what)
        micros, known = _counted(column, count)
        is_local = count.is_local
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
        micros[places], known[places] = _parsed(texts, which, parser)
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


def _counted(column: pa.Array, count: Count) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the times of numbers that count a unit, in microseconds on the count's clock."""
    scale, parts, origin = count.micros, count.parts, count.origin
    low, high = (-(-(MIN_US - origin) * parts // scale), (MAX_US - origin) * parts // scale)
    if pa.types.is_integer(column.type):
        whole = arrow.to_numpy(column)
        # Of an unsigned column the limits are beyond its range or within it, but never wrap.
        known = (whole <= high) & (whole >= low)
        values = np.where(known, whole, 0).astype(np.int64)
        cut = values // parts + ((values < 0) & (values % parts != 0))  # towards 0, as in text
        return cut * scale + origin, known
    numbers = arrow.to_numpy(column.cast(pa.float64()), 0.0)
    known = (numbers <= high) & (numbers >= low)
    numbers = np.where(known, numbers, 0.0)
    if count.is_rounded:
        return np.floor(numbers * (scale // 1000) + 0.5).astype(np.int64) * 1000 + origin, known
    return np.trunc(numbers * scale / parts).astype(np.int64) + origin, known


def _written_numbers(
    column: pa.Array, time_format: str | None, zone: tzinfo, what: str
) -> tuple[Ints, NDArray[np.bool_]]:
    """Parse numbers whose digits are a date, or decimal years, as the same text would be.

    Raises:
        UserError: the time format is none of numbers.
    """
    if count_of(time_format) is None and (time_format is None or not time_pattern(time_format).width):
        values = column.drop_null()
        raise UserError(
            f"{what} holds numbers ({column.type}); {numbers_remedy(values[0].as_py() if values else None)}"
        )
    values, which = arrow.distinct_values(column)
    return _parsed([digits_of(value) for value in values], which, TimeParser(time_format, zone))


def digits_of(value: Any) -> str:
    """Return a number as the text of a file would have it, without the fraction of a whole one."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)


def _parsed(texts: list[str], which: Ints, parser: TimeParser) -> tuple[Ints, NDArray[np.bool_]]:
    """Parse distinct texts; return the time of each row, and which rows are times."""
    found = [parser(text) for text in texts]
    micros = np.array([0 if value is None else value for value in found] + [0])[which]
    return micros, np.array([value is not None for value in found] + [False])[which]


def _from_local(micros: Ints, zone: tzinfo) -> Ints:
    values, places = np.unique(micros, return_inverse=True)
    moments = (local_us(to_datetime(int(value)), zone) for value in values)
    return np.fromiter(moments, np.int64, len(values))[places]
