"""Filters of a table's rows: conditions on columns, decided for whole files by statistics where these suffice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.storage.columns import UTC_MICROSECONDS

_compute: Any = pc

Filter = Sequence[Sequence[tuple[str, str, Any]]]
"""Row filter in the form of `filters` of `pyarrow.parquet`: a row must meet all conditions of one of the lists.

A condition is a column, a comparison (=, <, <=, >, >=, in, not in) and a value. A null meets no condition except
`not in`.
"""
_ROUNDED_US = 1000
"""Statistics of times are in whole milliseconds, which Delta in Java rounds down."""


class Met(NamedTuple):
    """Files that may contain rows of a filter: those with only such rows, and the rest."""

    whole: frozenset[str]
    across: frozenset[str]


def find_files(files: pa.Table, rows: Filter) -> Met:
    """Return the files of a table (`live_files`) that may contain rows of a filter, by their statistics."""
    whole, beside = _select_none(files), _compute.invert(_select_none(files))
    for conditions in rows:
        every, some_none = _compute.invert(_select_none(files)), _select_none(files)
        for one in conditions:
            fits, fails = _decide(files, *one)
            every, some_none = _compute.and_(every, fits), _compute.or_(some_none, fails)
        whole, beside = _compute.or_(whole, every), _compute.and_(beside, some_none)
    across = _compute.invert(_compute.or_(whole, beside))
    whole = _compute.and_(whole, _compute.invert(beside))
    return Met(*(frozenset(files["path"].filter(one).to_pylist()) for one in (whole, across)))


def select_rows(rows: pa.RecordBatch, filters: Filter) -> pa.RecordBatch:
    """Return the rows that meet a filter."""
    return rows.filter(pq.filters_to_expression(filters))  # type: ignore[arg-type]


def drop_rows(rows: pa.RecordBatch, filters: Filter) -> pa.RecordBatch:
    """Return the rows that do not meet a filter."""
    met: Any = pq.filters_to_expression(filters)  # type: ignore[arg-type]
    return rows.filter(~_compute.coalesce(met, pa.scalar(False)))


def convert_time(micros: int) -> pa.Scalar:
    """Return a time, in microseconds since 1970, as the value of a condition."""
    return pa.scalar(micros, pa.int64()).cast(UTC_MICROSECONDS)


def _select_none(files: pa.Table) -> Any:
    return pa.repeat(False, files.num_rows)


def _decide(files: pa.Table, name: str, compare: str, value: Any) -> tuple[Any, Any]:
    """Return two masks of files: all rows meet the condition; no row meets it."""
    names = files.column_names
    if f"partition.{name}" in names:
        least = greatest = files[f"partition.{name}"].combine_chunks()
        filled, empty = least.is_valid(), least.is_null()
    elif f"min.{name}" in names and f"null_count.{name}" in names:
        least, greatest = (files[f"{side}.{name}"].combine_chunks() for side in ("min", "max"))
        nulls = files[f"null_count.{name}"].combine_chunks()
        filled = _compute.equal(nulls, 0)
        empty = _compute.equal(nulls, files["num_records"].combine_chunks())
    else:
        return _select_none(files), _select_none(files)
    if pa.types.is_timestamp(least.type):
        least, greatest = (
            least.cast(UTC_MICROSECONDS),
            _compute.add(greatest.cast(UTC_MICROSECONDS), pa.scalar(_ROUNDED_US, pa.duration("us"))),
        )
    wanted = pa.array(list(value) if "in" in compare else [value]).cast(least.type)
    first, last = (_compute.min_max(wanted)[side] for side in ("min", "max"))
    below, above = _compute.less(greatest, first), _compute.greater(least, last)
    if compare == "<":
        fits, fails = below, _compute.greater_equal(least, last)
    elif compare == "<=":
        fits, fails = _compute.less_equal(greatest, last), above
    elif compare == ">":
        fits, fails = above, _compute.less_equal(greatest, first)
    elif compare == ">=":
        fits, fails = _compute.greater_equal(least, first), below
    else:
        same = _compute.and_(_compute.equal(least, greatest), _compute.is_in(least, wanted))
        fits, fails = same, _compute.or_(below, above)
    fits, fails, filled, empty = (_compute.fill_null(one, False) for one in (fits, fails, filled, empty))
    fits, fails = _compute.and_(fits, filled), _compute.or_(fails, empty)
    return (fails, fits) if compare == "not in" else (fits, fails)
