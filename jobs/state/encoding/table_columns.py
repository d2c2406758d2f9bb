"""Columns of the tables of estimates in Arrow, without Spark: typed columns of keys, and extra columns."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.state.encoding.arrow import build_lists
from jobs.state.encoding.arrow import build_texts as texts_of
from jobs.state.encoding.packets import CONTROL, MEASURED, STATE_INDEX
from jobs.storage.columns import parse_arrow_schema
from kalman.evaluation.row_figures import INNOVATION, RESIDUAL, RESIDUAL_COVARIANCE, SYSTEM, figures
from kalman.filters.sliding_likelihood import OUTPUT as SLIDING

if TYPE_CHECKING:
    from jobs.state.encoding.keys import KeyKind
    from kalman.types import Filter


COMPUTED = frozenset([INNOVATION, RESIDUAL, RESIDUAL_COVARIANCE, *SYSTEM, STATE_INDEX])
"""Names of the extras that are not outputs of the filter, and are computed in addition."""

SCALARS = {STATE_INDEX: ("bigint", pa.int64()), SLIDING: ("double", pa.float64())}
"""The extras with one number per row, with their types; all other extras are lists."""


def find_extra_widths(kernel: Filter) -> dict[str, int]:
    """Return the names and widths of the extras that a filter's estimates may have besides the filter's outputs."""
    return {**figures(kernel), MEASURED: kernel.measurements, CONTROL: kernel.controls, STATE_INDEX: 1}


def find_extra_type(name: str) -> str:
    """Return the SQL type of an extra's column."""
    return SCALARS[name][0] if name in SCALARS else "array<double>"


def build_extra_column(name: str, values: NDArray[np.float64]) -> pa.Array:
    """Return the column of an extra (d, N) as lists of d numbers, or as numbers for `SCALARS`, with null for NaN."""
    if name not in SCALARS:
        return build_lists(values)
    unknown = np.isnan(values[0])
    return pa.array(np.where(unknown, 0.0, values[0]), mask=unknown).cast(SCALARS[name][1])


def parse_key_columns(kind: KeyKind, text: pa.Array) -> dict[str, pa.Array]:
    """Return the columns of keys (N,) by name, from their texts.

    Raises:
        UserError: a column has a type that key columns cannot have.
    """
    distinct = text.dictionary_encode()
    values = split_keys(distinct.dictionary, len(kind.columns))
    return {
        name: _convert_texts(one, find_arrow_type(type_)).take(distinct.indices)
        for name, type_, one in zip(kind.columns, kind.types, values, strict=True)
    }


@cache
def find_arrow_type(name: str) -> pa.DataType:
    """Return the Arrow type for the name of a Spark type.

    Raises:
        UserError: no key has columns of this type.
    """
    try:
        found = parse_arrow_schema(f"key {name}").field("key").type
    except KeyError:
        found = None
    if found is None or pa.types.is_nested(found):
        raise UserError(f"a key column has the type {name}: convert it to string")
    return found


def _convert_texts(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the typed values of texts in Spark's notation."""
    # Arrow expects a time zone in the text of an instant, but Spark writes instants in UTC without a time zone.
    plain = pa.timestamp("us") if pa.types.is_timestamp(kind) else kind
    try:
        return texts.cast(plain).cast(kind)
    except pa.ArrowInvalid:
        if not pa.types.is_temporal(kind):
            raise
    # Arrow does not parse times before year 0 or after year 9999.
    unit, whole = ("D", pa.int32()) if pa.types.is_date(kind) else ("us", pa.int64())
    found = np.array(texts.to_pylist(), f"datetime64[{unit}]")
    return pa.array(found.astype(np.int64), mask=np.isnat(found)).cast(whole).cast(kind)


def split_keys(texts: pa.Array, count: int) -> list[pa.Array]:
    """Return the texts of each of the `count` key columns; the text of a key with several columns is a JSON array."""
    if count < 2:
        return [texts][:count]
    part = r'"([^"\\]*)"'
    pattern = r"^\[" + ",".join(part.replace("(", f"(?P<v{i}>") for i in range(count)) + r"\]$"
    found = pc.extract_regex(texts, pattern=pattern)  # type: ignore[attr-defined]
    values = [found.field(i) for i in range(count)]
    if found.null_count == 0:
        return values
    # These texts have an escaped character or a null.
    others = found.is_null()
    rows = [json.loads(one) for one in texts.filter(others).to_pylist()]
    functions: Any = pc
    return [
        functions.replace_with_mask(one, others, texts_of([row[i] for row in rows]))
        for i, one in enumerate(values)
    ]
