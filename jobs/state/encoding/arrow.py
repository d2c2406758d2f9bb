"""Convert between Arrow and NumPy through buffers.

`pyarrow.array` and `to_numpy` do the same, but import pandas, which takes longer than the rest of the offline command.
Only `build_lists` and `build_matrix` use these two, because they run on Spark's workers, which load pandas anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray


def load_compute() -> Any:
    """Return Arrow's compute functions."""
    return pyarrow.compute


def build_texts(values: Sequence[str | None]) -> pa.Array:
    """Return N texts as Arrow strings; None becomes null."""
    coded = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(len(coded) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, coded), np.int64, len(coded)), out=offsets[1:])
    valid = np.fromiter((value is not None for value in values), bool, len(coded))
    buffers = [_pack_bits(valid), pa.py_buffer(offsets), pa.py_buffer(b"".join(coded))]
    return pa.Array.from_buffers(pa.large_string(), len(coded), buffers).cast(pa.string())


def repeat_text(text: str, count: int) -> pa.Array:
    """Return one text `count` times as Arrow strings."""
    coded = text.encode()
    offsets = np.arange(count + 1, dtype=np.int64) * len(coded)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(coded * count)]
    return pa.Array.from_buffers(pa.large_string(), count, buffers).cast(pa.string())


def build_numbers(values: NDArray[np.float64]) -> pa.Array:
    """Return N numbers as an Arrow array; NaN becomes null."""
    return _build_primitive(pa.float64(), np.ascontiguousarray(values), ~np.isnan(values))


def build_integers(values: NDArray[np.int64], valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return N integers as an Arrow array; values that are not `valid` become null."""
    known = np.ones(len(values), dtype=bool) if valid is None else valid
    return _build_primitive(pa.int64(), np.ascontiguousarray(values), known)


def build_times(micros: NDArray[np.int64], valid: NDArray[np.bool_]) -> pa.Array:
    """Return N times, in microseconds UTC, as Arrow timestamps; times that are not `valid` become null."""
    return _build_primitive(pa.timestamp("us", "UTC"), np.ascontiguousarray(micros), valid)


def build_vectors(values: NDArray[np.float64], valid: NDArray[np.bool_]) -> pa.Array:
    """Return (d, N) values as N Arrow lists of d numbers; lists that are not `valid` become null."""
    width, length = values.shape
    flat = np.ascontiguousarray(values.T).ravel()
    offsets = np.arange(length + 1, dtype=np.int64) * width
    child = _build_primitive(pa.float64(), flat, np.ones(len(flat), dtype=bool))
    kind = pa.large_list(pa.float64())
    whole = pa.Array.from_buffers(kind, length, [_pack_bits(valid), pa.py_buffer(offsets)], children=[child])
    return whole.cast(pa.list_(pa.float64()))


def to_numpy(array: pa.Array, null: float | bool = 0) -> NDArray[Any]:
    """Return N Arrow numbers or booleans as an array, in which the value `null` replaces each null."""
    if pa.types.is_boolean(array.type):
        return to_numpy(array.cast(pa.uint8()), null).astype(bool)
    if not array.null_count:
        return np.from_dlpack(array)
    # `fill_null` is not used, because it imports pandas, too.
    values = pa.Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], offset=array.offset)
    return np.where(to_numpy(array.is_valid()), np.from_dlpack(values), null)


def look_up_entries(maps: pa.MapArray, name: str) -> pa.Array:
    """Return the entry of a name in each of N Arrow maps; null for a map without the entry."""
    return load_compute().map_lookup(maps, pa.scalar(name), "first")


def convert_to_micros(times: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
    """Return N times as microseconds since 1970."""
    micros = times.cast(pa.timestamp("us")).cast(pa.int64())
    return to_numpy(micros.combine_chunks() if isinstance(micros, pa.ChunkedArray) else micros)


def find_distinct_values(column: pa.Array) -> tuple[list[Any], NDArray[np.int64]]:
    """Return the distinct values, and the index of the value of each row; a null has the index after the last value."""
    encoded = column.dictionary_encode()
    found = encoded.dictionary.to_pylist()
    return found, to_numpy(encoded.indices, len(found)).astype(np.int64)


def measure_lists(column: pa.ListArray) -> NDArray[np.int64]:
    """Return the length of each of N lists as (N,); 0 for a missing list."""
    return to_numpy(load_compute().list_value_length(column).cast(pa.int64()))


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type is numeric: integer, floating-point or decimal."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _build_primitive(kind: pa.DataType, values: NDArray[np.generic], valid: NDArray[np.bool_]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [_pack_bits(valid), pa.py_buffer(values)])


def _pack_bits(valid: NDArray[np.bool_]) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def build_lists(values: NDArray[np.float64]) -> pa.ListArray:
    """Return (d, N) values as N Arrow lists of d numbers, without nulls."""
    width, size = values.shape
    offsets = np.arange(size + 1, dtype=np.int32) * np.int32(width)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values.T).ravel()))


def build_matrix(column: pa.ListArray, width: int, name: str) -> NDArray[np.float64]:
    """Return N Arrow lists of `width` numbers as (width, N).

    Raises:
        ValueError: a list is missing or has another length.
    """
    size = len(column)
    lengths = np.diff(column.offsets.to_numpy()) if size else np.empty(0, np.int32)
    if column.null_count or (lengths != width).any():
        raise ValueError(
            f"a snapshot row's {name} has not {width} numbers: the snapshot belongs to another model, or is damaged"
        )
    return np.ascontiguousarray(column.flatten().to_numpy(zero_copy_only=False).reshape(size, width).T)
