"""Packets: one binary value with columns of numbers and texts; and the kinds of packets that Spark passes on."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum, unique
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_HEADER = struct.Struct("<QQ")  # record count, text bytes; keeps the columns aligned to 8 bytes
HEADER_BYTES = _HEADER.size


class PacketColumn(NamedTuple):
    """A number column of a packet: `width` numbers per record as (width, N), or (N,) if the width is None."""

    name: str
    dtype: str
    width: int | None = None


class Records(NamedTuple):
    """N records: arrays by column name, with records on the last axis; texts and labels if the layout has them."""

    arrays: Mapping[str, NDArray]
    text: pa.StringArray | None
    label: pa.StringArray | None = None

    @property
    def size(self) -> int:
        """Return N, the number of records."""
        return next(iter(self.arrays.values())).shape[-1]

    def take(self, index: NDArray[np.int64]) -> Records:
        """Return the records at the positions `index`, in the order of `index`."""
        arrays = {name: array[..., index] for name, array in self.arrays.items()}
        return Records(arrays, *(None if one is None else one.take(pa.array(index)) for one in self.texts))

    def slice(self, start: int, stop: int) -> Records:
        """Return views of the records start..stop-1."""
        arrays = {name: array[..., start:stop] for name, array in self.arrays.items()}
        return Records(
            arrays, *(None if one is None else one.slice(start, stop - start) for one in self.texts)
        )

    @property
    def texts(self) -> tuple[pa.StringArray | None, pa.StringArray | None]:
        """Return the texts and the labels."""
        return self.text, self.label


class Layout(NamedTuple):
    """The columns of a packet. Columns of one byte are last, so that all other columns stay aligned."""

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
        """Return the records of a packet that begins at byte `start`; they are views of the packet."""
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
    """Return the records of all parts (at least one part) in order."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate([part.arrays[name] for part in parts], -1) for name in parts[0].arrays}
    joined = (
        [one for one in some if one is not None] for some in zip(*(part.texts for part in parts), strict=True)
    )
    return Records(arrays, *(pa.concat_arrays(some) if some else None for some in joined))


def merge_records(*parts: Records) -> Records:
    """Return the records of one or more parts, ordered by route; records with equal routes keep their order."""
    joined = join_records(parts)
    return joined.take(np.argsort(joined.arrays["route"], kind="stable"))


def _compute_padding(size: int) -> int:
    """Return the number of bytes that pad `size` bytes to a multiple of 8."""
    return -size % 8


def _read_texts(packet: bytes | memoryview, at: int, size: int, length: int) -> pa.StringArray:
    """Return the texts whose offsets begin at byte `at`; they are views of the packet."""
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


MEASURED, STATE_INDEX = "measured", "state_index"
"""Names of two extras of an estimate: the measurement of the row, and the number of rows in the state of the key."""
CONTROL = "control"
"""Name of an extra of an estimate: the controls of the row and the inputs of its key."""

NEVER = np.iinfo(np.int64).min
"""An event time before all other event times; it is the watermark before the first row."""

ROW_PACKETS = "bucket int, payload binary"
"""Columns of the input packets of an operator that takes only rows."""

TYPED_ROW_PACKETS = "bucket int, kind int, payload binary"
"""Columns of the input packets of an operator that takes more than rows; `kind` is a `RowPacket`."""

OUTPUT_PACKETS = "kind int, rows bigint, payload binary"
"""Columns of an operator's output packets; `kind` is an `OutputPacket`."""


@unique
class RowPacket(IntEnum):
    """Kind of an input packet of the stateful operator."""

    MAX_EVENT_TIME = 0
    """The maximum event time of an Arrow batch; every bucket gets this packet."""
    ROWS = 1
    """Measurement rows; in the initial state, the rows that wait for the watermark."""
    STATES = 2
    """States of keys: the initial state, or states of new keys while the stream runs."""
    ROW_IDS = 3
    """Row ids of the initial state, for the detection of duplicates."""


@unique
class OutputPacket(IntEnum):
    """Kind of an output packet of the stateful operator. Unless noted otherwise, the payload has measurement rows."""

    ESTIMATES = 0
    """Estimates of accepted rows."""
    LATE = 1
    """Rows that are older than the state of their key."""
    BAD_STATE = 2
    """Rows of a key whose state has NaN; such a key must not end the stream of all other keys."""
    LATE_BY_WATERMARK = 3
    WAITING = 4
    """Number of rows in the reorder buffer; there is no payload."""
    DUPLICATE = 5
    """Rows that have the same key and time as another row."""
    DROPPED = 6
    """Number of dropped duplicates; there is no payload."""
    EXPIRED = 7
    """Last states of expired keys."""
    BEYOND_REPLAY_WINDOW = 8
    """Rows that are older than the rows kept for replay."""
    REJECTED_MESSAGES = 9
    """Messages that do not fit the measurements table; the payload is an Arrow stream."""
    CORRECTION = 10
    """Estimates that replace earlier estimates."""
    WATERMARK = 11
    """The watermark, in the column of the number of rows; there is no payload."""
    MISSING_INPUTS = 12
    """Rows whose key has no inputs."""
    DUPLICATE_ID = 13
    """Rows that have the same key and id as another row."""
    KEYS_TAKEN = 14
    """Number of offered keys that were new; there is no payload."""
    KEYS_HELD = 15
    """Number of offered keys that already had a state; there is no payload."""
    ESTIMATES_FILE = 16
    """Estimates of accepted rows, written to a file of their table; the payload is the file's name."""
    CORRECTION_FILE = 17
    """Estimates that replace earlier estimates, written to a file of their table; the payload is the file's name."""


REJECTED_MESSAGES, MISSING_INPUTS = -1, -2
"""Buckets of packets that pass through the operator unchanged; the buckets of the filter are not negative."""


class StateVariable(StrEnum):
    """Name of a state variable of the operator. Checkpoints contain these names."""

    STATES = "blocks"
    WAITING_ROWS = "waiting"
    CLOCK = "clock"
    ENDED = "ended"
    REPLAY_ROWS = "ring"
    REPLAY_BASE = "base"
    LAST_SEEN = "seen"
    ROW_IDS = "remembered"


STATES_BY_BLOCK = ("block", "states")
"""Columns of a state variable with blocks of states."""


def build_packet_batch(buckets: pa.Array, payloads: pa.Array, kind: RowPacket | None) -> pa.RecordBatch:
    """Return packets with the columns of `TYPED_ROW_PACKETS`, or of `ROW_PACKETS` if the kind is None."""
    if kind is None:
        return pa.RecordBatch.from_arrays([buckets, payloads], ["bucket", "payload"])
    kinds = pa.array(np.full(len(buckets), kind, np.int32))
    return pa.RecordBatch.from_arrays([buckets, kinds, payloads], ["bucket", "kind", "payload"])
