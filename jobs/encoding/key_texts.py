"""The typed columns of a key from its text, as `jobs.encoding.keys.columns_of` gives them, but in Arrow."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.encoding.keys import KeyKind

_TYPES = {
    "string": pa.string(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
}
"""Types whose texts Arrow and Spark write and read alike."""


def has_columns(kind: KeyKind) -> bool:
    """Tell if `key_columns` has all columns of such keys."""
    return kind.integer or kind.is_plain_key or all(one in _TYPES for one in kind.types)


def key_columns(kind: KeyKind, text: pa.Array) -> dict[str, pa.Array]:
    """Return the columns of keys (N,) by name, from their texts."""
    if not kind.columns:
        return {}
    distinct = text.dictionary_encode()
    values = (
        [distinct.dictionary] if len(kind.columns) == 1 else _parts(distinct.dictionary, len(kind.columns))
    )
    return {
        name: _typed(one, _TYPES[type_]).take(distinct.indices)
        for name, type_, one in zip(kind.columns, kind.types, values, strict=True)
    }


def _typed(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values of texts as Spark writes them."""
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        if not pa.types.is_date(kind):
            raise
    # Arrow reads no dates before year 0 or after 9999.
    days = np.array(texts.to_pylist(), "datetime64[D]")
    return pa.array(days.astype(np.int64), mask=np.isnat(days)).cast(pa.int32()).cast(kind)


def _parts(texts: pa.Array, count: int) -> list[pa.Array]:
    """Return the values of JSON arrays of `count` texts or nulls."""
    part = r'"([^"\\]*)"'
    pattern = r"^\[" + ",".join(part.replace("(", f"(?P<v{i}>") for i in range(count)) + r"\]$"
    found = pc.extract_regex(texts, pattern=pattern)  # type: ignore[attr-defined]
    values = [found.field(i) for i in range(count)]
    if found.null_count == 0:
        return values
    # Texts with an escaped character, or a null.
    others = found.is_null()
    rows = [json.loads(one) for one in texts.filter(others).to_pylist()]
    functions: Any = pc
    return [
        functions.replace_with_mask(one, others, pa.array([row[i] for row in rows], pa.string()))
        for i, one in enumerate(values)
    ]
