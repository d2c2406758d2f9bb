"""Assign integer codes to the keys and ids of raw rows, and convert them to the measurements table's types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.landing.raw_rows import RawRows, reject
from jobs.landing.values.number_reading import NumberRules
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import KeyTypes

Ints = NDArray[np.int64]

NOT_WHOLE = "not a whole number"
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}")
"""Pattern of a whole number in its usual notation; 007 and +7 do not match, because such keys may differ from 7."""
_INT64 = range(-(2**63), 2**63)

_NO_KEYS = (
    pa.types.is_nested,
    pa.types.is_null,
    pa.types.is_fixed_size_binary,
    lambda kind: isinstance(kind, pa.BaseExtensionType),  # for example, a UUID
)


def assign_key_codes(
    spec: ModelSpec, source: RawRows, file: str, reason: NDArray[np.object_]
) -> tuple[Ints, int]:
    """Return the code (N,) of the key of each row, from 0, and the number of keys; reject rows without a key.

    Raises:
        UserError: the type of a column is not suitable for keys.
    """
    parts: list[Ints] = []
    for name in spec.key:
        column = source.columns[name]
        if any(is_kind(column.type) for is_kind in _NO_KEYS):
            raise UserError(
                f"{file}: key column '{name}' holds {column.type}; a key is text, a number or a date"
            )
        encoded = column.dictionary_encode()
        part = arrow.to_numpy(encoded.indices).astype(np.int64)
        parts.append(part)
        bad = arrow.to_numpy(encoded.indices.is_null())
        if pa.types.is_string(column.type):
            empty = arrow.to_numpy(arrow.load_compute().binary_length(encoded.dictionary)) == 0
            bad = bad | empty[part] if empty.any() else bad
        elif pa.types.is_floating(column.type):
            bad = bad | np.isnan(arrow.to_numpy(column.cast(pa.float64()), math.nan))
        reject(reason, bad, f"key {name}: missing")
    codes = join_codes(parts or [np.zeros(source.rows, np.int64)])
    return codes, int(codes.max(initial=-1)) + 1 if spec.key else 1


def assign_codes(column: pa.Array) -> Ints:
    """Return the code (N,) of each value of a column, from 0; null counts as a distinct value."""
    encoded = column.dictionary_encode()
    return arrow.to_numpy(encoded.indices, len(encoded.dictionary)).astype(np.int64)


def join_codes(parts: Iterable[Ints]) -> Ints:
    """Join arrays of codes (N,) into one array; two rows get the same code if their codes are equal in all arrays."""
    first, *others = parts
    for part in others:
        # After each array the codes are numbered without gaps, so that the products cannot overflow.
        joined = arrow.build_integers(first * (int(part.max(initial=0)) + 1) + part).dictionary_encode()
        rank = np.argsort(np.argsort(arrow.to_numpy(joined.dictionary)))
        first = rank[arrow.to_numpy(joined.indices)]
    return first.astype(np.int64, copy=False)


def find_places(
    keys: Sequence[pa.Array], among: Sequence[pa.Array], size: int, known: int
) -> NDArray[np.int64]:
    """Return the index (N,) of each key among K known keys; -1 for an unknown key.

    Args:
        keys: key columns, as texts, with N values each.
        among: key columns of the known keys, as texts, with K values each.
        size: number N of keys. Without key columns all N keys are the same.
        known: number K of known keys.
    """
    both = [assign_codes(pa.concat_arrays([a, b])) for a, b in zip(among, keys, strict=True)]
    code = join_codes([np.zeros(known + size, np.int64), *both])
    place = np.full(int(code.max(initial=-1)) + 1, -1)
    place[code[:known]] = np.arange(known)
    return place[code[known:]]


def assign_id_codes(column: pa.Array, missing: NumberRules, what: str) -> Ints:
    """Return the code (N,) of each id of a column; -1 for a missing id.

    Raises:
        UserError: the type of the column is not suitable for ids.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), -1)
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind)):
        raise UserError(f"{what} holds {kind}; an id is text or a whole number")
    values, codes = arrow.find_distinct_values(column)
    absent = [
        value.strip(" ").casefold() in missing.texts if isinstance(value, str) else value in missing.numbers
        for value in values
    ]
    return np.where(np.array([*absent, True])[codes], -1, codes)


def derive_key_types(names: Sequence[str], schema: pa.Schema) -> KeyTypes:
    """Return the types of key and id columns in the table: bigint for integers, string for all other types."""
    return {name: "bigint" if _is_whole(schema.field(name).type) else "string" for name in names}


def _is_whole(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) and not pa.types.is_uint64(kind)


def convert_key(
    what: str,
    column: pa.Array,
    wanted: str,
    reason: NDArray[np.object_],
    missing: NDArray[np.bool_] | None = None,
) -> pa.Array:
    """Return a column of keys or ids in the type of the table; reject values that have no exact equivalent.

    A text is a whole number only in the usual notation of this number, so that two texts never become the same key.

    Args:
        what: role and name of the column, used in the reasons.
        column: N values.
        wanted: type of the table's column, which is bigint or string.
        reason: (N,) reason why each row is rejected; updated in place.
        missing: (N,) mask of the values that may be missing. None means that no value may be missing.
    """
    kind = column.type
    if wanted == "string":
        return column.cast(pa.string())
    if _is_whole(kind):
        return column.cast(pa.int64())
    texts = column.dictionary_encode() if pa.types.is_string(kind) else None
    found = [_parse_whole(value) for value in (column if texts is None else texts.dictionary).to_pylist()]
    whole = np.array([0 if one is None else one for one in found], np.int64)
    known = arrow.build_integers(whole, np.array([one is not None for one in found], bool))
    values = known if texts is None else known.take(texts.indices)
    bad = arrow.to_numpy(values.is_null())
    reject(reason, bad if missing is None else bad & ~missing, f"{what}: {NOT_WHOLE}")
    return values


def _parse_whole(value: Any) -> int | None:
    if isinstance(value, str):
        number = int(value) if _WHOLE.fullmatch(value) else None
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    elif value is None or isinstance(value, bool) or not hasattr(value, "__int__") or value != int(value):
        number = None
    else:
        number = int(value)
    return number if number is not None and number in _INT64 else None
