"""Parse the text of a key into its typed columns in Arrow, with the same results as `keys.build_key_columns`."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.core.errors import UserError
from jobs.state.encoding.arrow import build_texts as texts_of
from jobs.storage.columns import parse_arrow_schema

if TYPE_CHECKING:
    from jobs.state.encoding.keys import KeyKind


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
