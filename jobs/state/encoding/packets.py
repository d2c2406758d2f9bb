"""Packets: columns of numbers and texts packed into one binary value.

A packet holds N records. The number columns are stored one after the other, so that unpacking is a view and packing a
copy. Texts (of keys that are not integers) and labels (row ids that are texts) come last, in Arrow's layout. Packets
cross Spark's shuffle and live in its state store; a tuple for each row costs many times more (docs/decisions/0052).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_HEADER = struct.Struct("<QQ")  # records, bytes of text; the columns after it stay aligned to 8 bytes
HEADER_BYTES = _HEADER.size


class PacketColumn(NamedTuple):
    """A number column of a packet: `width` numbers per record as (width, N), or (N,) if the width is None."""

    name: str
    dtype: str
    width: int | None = None


class Records(NamedTuple):
    """N records: arrays by column name with records on the last axis, and texts and labels if the layout has them."""

    arrays: Mapping[str, NDArray]
    text: pa.StringArray | None
    label: pa.StringArray | None = None

    @property
    def size(self) -> int:
        """Return N."""
        return next(iter(self.arrays.values())).shape[-1]

    def take(self, index: NDArray[np.int64]) -> Records:
        """Return the records at `index`, in that order."""
        arrays = {name: array[..., index] for name, array in self.arrays.items()}
        return Records(arrays, *(None if one is None else one.take(pa.array(index)) for one in self.texts))

    def slice(self, start: int, stop: int) -> Records:
        """Return records start..stop-1, as views."""
        arrays = {name: array[..., start:stop] for name, array in self.arrays.items()}
        return Records(
            arrays, *(None if one is None else one.slice(start, stop - start) for one in self.texts)
        )

    @property
    def texts(self) -> tuple[pa.StringArray | None, pa.StringArray | None]:
        """Return the texts and the labels."""
        return self.text, self.label


class Layout(NamedTuple):
    """The columns of a packet. Columns of one byte go last, so that the others stay aligned."""

    columns: tuple[PacketColumn, ...]
    text: bool
    label: bool = False

    def encode(self, records: Records) -> bytes:
        """Return the packet of `records`."""
        parts: list[bytes] = []
        size = records.size
        for column in self.columns:
            parts.append(np.ascontiguousarray(records.arrays[column.name], dtype=column.dtype).tobytes())
        text_bytes = 0
        if self.text:
            offsets, data = _split_text_buffers(records.text)
            text_bytes = len(data)
            parts += [bytes(_compute_padding(sum(map(len, parts)))), offsets.tobytes(), data]
        if self.label:
            offsets, data = _split_text_buffers(records.label)
            parts += [bytes(_compute_padding(sum(map(len, parts)))), offsets.tobytes(), data]
        return b"".join([_HEADER.pack(size, text_bytes), *parts])

    def decode(self, packet: bytes | memoryview, start: int = 0) -> Records:
        """Return the records of a packet that begins at byte `start`, as views of it."""
        size, text_bytes = _HEADER.unpack_from(packet, start)
        at = start + _HEADER.size
        arrays: dict[str, NDArray] = {}
        for column in self.columns:
            count = size * (1 if column.width is None else column.width)
            flat = np.frombuffer(packet, column.dtype, count, at)
            arrays[column.name] = flat if column.width is None else flat.reshape(column.width, size)
            at += flat.nbytes
        text = label = None
        if self.text:
            at += _compute_padding(at - start - _HEADER.size)
            text = _read_texts(packet, at, size, text_bytes)
            at += 4 * (size + 1) + text_bytes
        if self.label:
            at += _compute_padding(at - start - _HEADER.size)
            label_bytes = int(np.frombuffer(packet, np.int32, 1, at + 4 * size)[0])
            label = _read_texts(packet, at, size, label_bytes)
        return Records(arrays, text, label)

    def empty(self) -> Records:
        """Return an empty set of records."""
        shapes = {c.name: (0,) if c.width is None else (c.width, 0) for c in self.columns}
        arrays = {c.name: np.empty(shapes[c.name], c.dtype) for c in self.columns}
        return Records(
            arrays, *(pa.array([], pa.string()) if there else None for there in (self.text, self.label))
        )


def count_records(packet: bytes | memoryview, start: int = 0) -> int:
    """Return the number of records of a packet that begins at byte `start`."""
    return _HEADER.unpack_from(packet, start)[0]


def join_records(parts: Sequence[Records]) -> Records:
    """Return the records of all parts, of which there must be one or more, in order."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([part.arrays[name] for part in parts], -1) for name in parts[0].arrays}
    joined = (
        [one for one in some if one is not None] for some in zip(*(part.texts for part in parts), strict=True)
    )
    return Records(arrays, *(pa.concat_arrays(some) if some else None for some in joined))


def merge_records(*parts: Records) -> Records:
    """Return the records of all parts (one or more), ordered by route; records of one route keep their order."""
    joined = join_records(parts)
    return joined.take(np.argsort(joined.arrays["route"], kind="stable"))


def _compute_padding(size: int) -> int:
    """Return the number of bytes that pad `size` to a multiple of 8."""
    return -size % 8


def _read_texts(packet: bytes | memoryview, at: int, size: int, length: int) -> pa.StringArray:
    """Return the texts whose offsets begin at a byte, as views."""
    buffer = pa.py_buffer(packet)
    offsets = buffer.slice(at, 4 * (size + 1))
    return pa.StringArray.from_buffers(size, offsets, buffer.slice(at + 4 * (size + 1), length))


def _split_text_buffers(text: pa.StringArray | None) -> tuple[NDArray[np.int32], bytes]:
    """Return the offsets (N + 1, from 0) and the bytes of a text column without nulls."""
    if text is None or len(text) == 0:
        return np.zeros(1, np.int32), b""
    _, offset_buffer, data = text.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[text.offset : text.offset + len(text) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    return offsets - np.int32(first), b"" if data is None else data[first:last].to_pybytes()
