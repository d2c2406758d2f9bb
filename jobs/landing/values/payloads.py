"""Unchecked rows as JSON, which is what the quarantine keeps of a rejected one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.encoding import arrow
from jobs.landing.raw_rows import Source


def payloads(source: Source, wanted: NDArray[np.bool_]) -> pa.Array:
    """Return the wanted raw rows as they were written, or as JSON objects without null members; null for others."""
    places = np.flatnonzero(wanted)
    if not len(places):
        return pa.nulls(source.rows, pa.string())
    texts: list[str | None] = [None] * source.rows
    if source.payload is not None:
        for place in places.tolist():
            texts[place] = source.payload(place)
        return arrow.texts(texts)
    taken = {name: _values(column.take(arrow.integers(places))) for name, column in source.columns.items()}
    for at, place in enumerate(places.tolist()):
        row = {name: values[at] for name, values in taken.items() if values[at] is not None}
        texts[place] = json.dumps(row, default=str, ensure_ascii=False)
    return arrow.texts(texts)


def _values(column: pa.Array) -> list[Any]:
    """Return values for a payload; a time that Python cannot hold is the number that is stored, and its type."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        if not pa.types.is_temporal(column.type):
            raise
        return [_time(column[place]) for place in range(len(column))]


def _time(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):  # outside of the years 1 to 9999
        return f"{value.value} ({value.type})"
