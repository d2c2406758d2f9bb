"""Find columns beside the found time that may hold a part of it, such as an hour, AM and PM, or a zone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, timedelta, timezone, tzinfo

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.choosing.table import InputTable
from jobs.choosing.times import (
    TimeColumn,
    are_equal_times,
    are_most,
    find_clock_part,
    read_column,
    sample_column_texts,
    select_whole_numbers,
)
from jobs.core.redaction import show_name
from jobs.state.encoding import arrow

_HAS_CLOCK = re.compile(r"(?<![:0-9A-Fa-f])[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?(?![:\w])")
_HALF_DAY = re.compile(r"\s*[ap][.]?\s?m[.]?\s*", re.IGNORECASE)
_ZONE = re.compile(
    r"\s*(?:(?:UTC|GMT)?[+-](?:1[0-9]|0?[0-9])(?::[0-9]{2}|[0-9]{2})?|UTC|GMT|[A-Z]{3,4}T|CET|"
    r"(?:Africa|America|Antarctica|Asia|Atlantic|Australia|Europe|Indian|Pacific)(?:/[A-Za-z_-]+){1,2})\s*"
)
_AHEAD = timezone(timedelta(hours=1))
_OF_UTC = re.compile(r"\s*(?:UTC|GMT)?(?:[+-]0?0(?::?00)?)?\s*")
LONGEST_DAY = 1500
"""The maximum number of rows for one key and time that a column may number: the minutes of a day, and a few more."""
FEW = 0.01
"""The maximum share of rows that may repeat key, time and number of another row."""


def has_clock(table: InputTable, name: str) -> bool:
    """Return whether a column has times of day, or spans of time such as 00:00-01:00."""
    if find_clock_part(table, name) is not None:
        return True
    column = table.source.columns[name]
    return pa.types.is_string(column.type) and are_most(sample_column_texts(column), _HAS_CLOCK.search)


def find_half_day(table: InputTable, time: TimeColumn) -> str | None:
    """Return a column beside the time that has AM and PM; None without one."""
    beside = _sample_texts_beside(table, time).items()
    return next((name for name, texts in beside if are_most(texts, _HALF_DAY.fullmatch)), None)


def note_zones(table: InputTable, time: TimeColumn, zone: tzinfo) -> list[str]:
    """Return a note on a column of time zones or of offsets from UTC beside times without an offset."""
    ahead = None if time.parts else read_column(table, time.name, time.time_format, _AHEAD)
    if zone is not UTC or isinstance(ahead, TimeColumn) and are_equal_times(time, ahead):
        return []
    return [
        f"{name} holds {', '.join(map(show_name, texts[:2]))}, and the times are read as UTC; if they are local, name "
        "their zone with --time-zone, such as --time-zone Europe/Vienna"
        for name, texts in _sample_texts_beside(table, time).items()
        if are_most(texts, _ZONE.fullmatch) and not are_most(texts, _OF_UTC.fullmatch)
    ]


def _sample_texts_beside(table: InputTable, time: TimeColumn) -> dict[str, list[str]]:
    """Return samples of the columns of texts that are not part of the time."""
    columns = table.source.columns.items()
    texts = {name: column for name, column in columns if pa.types.is_string(column.type)}
    return {name: sample_column_texts(column) for name, column in texts.items() if name not in time.columns}


def find_column_within_times(
    table: InputTable, code: NDArray[np.int64], time: TimeColumn, taken: Sequence[str]
) -> str | None:
    """Return a column that numbers the rows of one key and time, as an hour beside a date does; None without one.

    Args:
        table: N rows.
        code: (N,) number of each row's key.
        time: the found time.
        taken: columns of the key and the time.
    """
    known = time.known
    _, place, size = np.unique(
        np.stack([code[known], time.micros[known]]), axis=1, return_inverse=True, return_counts=True
    )
    usual = float(np.median(size)) if len(size) else 0.0
    if usual < 2 or usual > LONGEST_DAY:
        return None
    for name, column in table.source.columns.items():
        if name in taken or pa.types.is_nested(column.type) or pa.types.is_date(column.type):
            continue
        encoded = column.dictionary_encode()
        values = len(encoded.dictionary)
        if (
            abs(values - usual) > 0.1 * usual + 2
            or select_whole_numbers(column) is None
            and not has_clock(table, name)
        ):
            continue
        codes = arrow.to_numpy(encoded.indices, values).astype(np.int64)[known]
        if len(np.unique(place * (values + 1) + codes)) >= (1 - FEW) * len(place):
            return name
    return None
