"""Read the numbers of raw rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.encoding import arrow
from jobs.landing.raw_rows import Source, is_number, reject

Floats = NDArray[np.float64]

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:[.][0-9]*)?|[.][0-9]+)(?:[eE][+-]?[0-9]+)?")
_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)
_OK, _NOT_A_NUMBER, _NOT_FINITE = 0, 1, 2
_REASONS = {_NOT_A_NUMBER: "not a number", _NOT_FINITE: "not finite"}


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
        elif is_number(kind):
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
