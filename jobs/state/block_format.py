"""The format of a block: the states of some hundreds of keys as one binary value, with a header.

The header names the model, its version, its states and the layout of its numbers. Spark checks the shape of a state but
not its meaning, so every block is checked here when it is read.

After the header comes a packet whose eight-byte numbers are split by bytes: the first bytes of all numbers, then the
second bytes, and so on. The bytes of similar numbers are similar, so that they compress well
(`jobs.state.spark_values`).
Routes do not, so integer keys are stored instead. Both together shrink a key of 2 states from 72 bytes to 52
(docs/decisions/0052). Blocks of earlier releases are read too: with routes (`KSB2`), and with unsplit numbers (`KSB1`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jobs.state.encoding.keys import CHECK, ROUTE, KeyKind
from jobs.state.encoding.packets import (
    HEADER_BYTES,
    Layout,
    PacketColumn,
    Records,
    count_records,
    join_records,
)
from jobs.state.encoding.routing import compute_identities, compute_routes

_MAGIC, _ROUTES, _WHOLE = b"KSB3", b"KSB2", b"KSB1"
FLOAT64 = "<f8"
_PREFIX = struct.Struct("<4sI")  # magic, bytes of the header (padded to 8)


class StateMismatch(Exception):
    """A block holds the states of another model, version or layout."""


class StateFormat(NamedTuple):
    """The storage format of one model's states: the header of every block, and the packet's layout."""

    header: bytes
    layout: Layout

    def encode(self, records: Records) -> bytes:
        """Return the block of `records`, which are ordered by route."""
        (block,) = self.encode_each(records, [(0, records.size)])
        return block

    def encode_each(self, records: Records, ranges: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield one block of the records start..stop-1 for each range (start, stop); `records` are ordered by route."""
        if self._integer:
            keys = compute_identities(records.arrays[ROUTE.name]).view(ROUTE.dtype)
            records = records._replace(arrays={**records.arrays, ROUTE.name: keys})
        prefix = _PREFIX.pack(_MAGIC, len(self.header)) + self.header
        for begin, end in ranges:
            packet = self.layout.encode(records.slice(begin, end))
            start, stop = self._numbers(end - begin)
            split = np.frombuffer(packet, np.uint8, stop - start, start).reshape(-1, 8).T.tobytes()
            yield b"".join([prefix, packet[:start], split, packet[stop:]])

    def decode(self, block: bytes) -> Records:
        """Return the records of a block.

        Raises:
            StateMismatch: the value is not a block of this format.
        """
        return self.decode_all([block])

    def decode_all(self, blocks: Iterable[bytes]) -> Records:
        """Return the records of blocks, joined.

        Raises:
            StateMismatch: a block is not of this format.
        """
        parts = [self._packet(block) for block in blocks]
        if not parts:
            return self.layout.empty()
        records = join_records([part for part, _ in parts])
        keyed = [by_key for _, by_key in parts]
        if not any(keyed):
            return records
        # Compute routes once for all blocks: a call per block would cost as much as all the rest of this method.
        found = records.arrays[ROUTE.name]
        route = compute_routes(found.view(np.int64))
        if not all(keyed):
            route = np.where(np.repeat(keyed, [part.size for part, _ in parts]), route, found)
        return records._replace(arrays={**records.arrays, ROUTE.name: route})

    def count_records_in(self, block: bytes) -> int:
        """Return the number of records in a block; the header is not checked.

        Raises:
            StateMismatch: the value is too short for a block.
        """
        if len(block) >= _PREFIX.size:
            start = _PREFIX.size + _PREFIX.unpack_from(block)[1]
            if len(block) >= start + HEADER_BYTES:
                return count_records(block, start)
        raise StateMismatch(f"a state block has {len(block)} bytes: it is cut short")

    def _packet(self, block: bytes) -> tuple[Records, bool]:
        """Return the records of a block as stored, and whether they have integer keys in place of routes."""
        if len(block) < _PREFIX.size:
            raise StateMismatch(f"a state block has {len(block)} bytes: it is cut short")
        magic, length = _PREFIX.unpack_from(block)
        if magic not in (_MAGIC, _ROUTES, _WHOLE):
            raise StateMismatch(f"a state block begins with {magic!r}, not with {_MAGIC!r}")
        end = _PREFIX.size + length
        if block[_PREFIX.size : end] != self.header:
            raise StateMismatch(_difference(block[_PREFIX.size : end], self.header))
        if magic == _WHOLE:
            return self.layout.decode(block, end), False
        start, stop = (end + offset for offset in self._numbers(count_records(block, end)))
        whole = np.frombuffer(block, np.uint8, stop - start, start).reshape(8, -1).T.tobytes()
        records = self.layout.decode(b"".join([block[end:start], whole, block[stop:]]))
        return records, magic == _MAGIC and self._integer

    @property
    def _integer(self) -> bool:
        """Return whether keys are integers; `compute_identities` recovers them from their routes."""
        return CHECK not in self.layout.columns

    def _numbers(self, records: int) -> tuple[int, int]:
        """Return the byte range of the eight-byte columns, which come first, in a packet of `records` records."""
        width = 0
        for column in self.layout.columns:
            if np.dtype(column.dtype).itemsize != 8:
                break
            width += 1 if column.width is None else column.width
        return HEADER_BYTES, HEADER_BYTES + 8 * width * records


def build_state_layout(kind: KeyKind, size: int, dtype: str = FLOAT64) -> Layout:
    """Return the layout of states with `size` numbers per key of NumPy type `dtype` (`kalman.filters.rounded`)."""
    columns = (
        *kind.identity_columns,
        PacketColumn("event_time", "<i8"),
        PacketColumn("count", "<i8"),
        PacketColumn("log_likelihood", "<f8"),
        PacketColumn("values", dtype, size),
    )
    return Layout(columns, text=not kind.integer)


def build_state_format(
    model: str,
    version: int,
    states: list[str],
    fields: Mapping[str, tuple[int, ...]],
    kind: KeyKind,
    size: int,
    dtype: str = FLOAT64,
) -> StateFormat:
    """Return the storage format of the states of one model version."""
    meaning = {
        "model": model,
        "version": version,
        "states": list(states),
        "fields": {name: list(shape) for name, shape in fields.items()},
        "key": dict(zip(kind.columns, kind.types, strict=True)),
    }
    if dtype != FLOAT64:
        meaning["numbers"] = dtype
    return build_format(meaning, build_state_layout(kind, size, dtype))


def build_format(meaning: Mapping[str, Any], layout: Layout) -> StateFormat:
    """Return the format of records of a layout; the header is `meaning` as JSON."""
    header = json.dumps(meaning, separators=(",", ":")).encode()
    return StateFormat(header + b" " * (-len(header) % 8), layout)


def _difference(found: bytes, wanted: bytes) -> str:
    """Return a sentence that lists the differences of two headers."""
    have, want = json.loads(found), json.loads(wanted)
    parts = [
        f"{name} is {have.get(name)!r}, not {want[name]!r}" for name in want if have.get(name) != want[name]
    ]
    return (
        "the checkpoint holds the state of something else: "
        + "; ".join(parts)
        + ". Start a new generation from a snapshot of this version (stream --adopt SNAPSHOT)"
    )
