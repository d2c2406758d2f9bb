"""The reorder buffer of a bucket, with rows that wait for the watermark, and the bucket's clock.

Time is cut into slots of a quarter of the watermark's delay. The rows of one micro-batch and slot form a part, which is
one value in the store. The clock, also one value, has the watermark, and indexes that find due parts and silent keys.
So a row is written about once, and read when it is due. The cost of a micro-batch depends neither on the number of
waiting rows nor on the number of keys.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.block_format import StateFormat, build_format
from jobs.state.block_store import Store
from jobs.state.encoding.packets import NEVER, Layout, PacketColumn, Records, join_records
from jobs.state.encoding.routing import compute_blocks
from jobs.state.encoding.rows import RowFormat

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec


SLOTS = 4
"""Number of slots in the watermark's delay."""
MANY = 32
"""Number of parts in a slot from which the parts are joined into one part."""

PARTS = Layout(
    (
        PacketColumn("part", "<i8"),
        PacketColumn("slot", "<i8"),
        PacketColumn("first", "<i8"),
        PacketColumn("rows", "<i8"),
    ),
    text=False,
)
"""The index with, for each part, its number in the store, its slot, its earliest event time and its number of rows."""


@dataclass
class ReorderBuffer:
    """The waiting rows of a bucket.

    Attributes:
        store: store of the parts.
        fmt: storage format of rows.
        delay: delay of the watermark, in microseconds.
        parts: index (`PARTS`) of the P parts.
    """

    store: Store
    fmt: StateFormat
    delay: int
    parts: Records

    @property
    def count(self) -> int:
        """Return the number of waiting rows."""
        return int(self.parts.arrays["rows"].sum())

    def add(self, rows: Records) -> None:
        """Add rows, in any order."""
        if rows.size == 0:
            return
        slot = rows.arrays["time"] // max(self.delay // SLOTS, 1)
        order = np.argsort(slot, kind="stable")
        slots, starts = np.unique(slot[order], return_index=True)
        stops = [*starts[1:].tolist(), len(order)]
        ordered = rows.take(order)
        for number, start, stop in zip(slots.tolist(), starts.tolist(), stops, strict=True):
            part = ordered.slice(start, stop)
            same_slot = self.parts.arrays["slot"] == number
            if np.count_nonzero(same_slot) >= MANY:
                part = join_records([*self._remove(same_slot), part])
            self._put(number, part)

    def release(self, before: int) -> Records:
        """Remove the rows whose event time is before `before`, and return these rows in any order."""
        due = self.parts.arrays["first"] < before
        if not due.any():
            return self.fmt.layout.empty()
        slots = self.parts.arrays["slot"][due].tolist()
        ready: list[Records] = []
        early: dict[int, list[Records]] = {}
        for slot, rows in zip(slots, self._remove(due), strict=True):
            passed = rows.arrays["time"] < before
            ready.append(rows.take(np.flatnonzero(passed)))
            if not passed.all():
                early.setdefault(slot, []).append(rows.take(np.flatnonzero(~passed)))
        for slot, left in early.items():
            self._put(slot, join_records(left))
        return join_records(ready)

    def _remove(self, which: NDArray[np.bool_]) -> list[Records]:
        """Read and remove the parts under the mask `which` (P,)."""
        removed = []
        for number in self.parts.arrays["part"][which].tolist():
            value = self.store.get(number)
            if value is None:
                raise ValueError(f"part {number} of the waiting rows is missing from the state")
            removed.append(self.fmt.decode(value))
            self.store.remove(number)
        self.parts = self.parts.take(np.flatnonzero(~which))
        return removed

    def _put(self, slot: int, rows: Records) -> None:
        number = int(self.parts.arrays["part"].max(initial=-1)) + 1
        self.store.put(number, self.fmt.encode(rows))
        entry = {"part": number, "slot": slot, "first": rows.arrays["time"].min(), "rows": rows.size}
        one = Records({name: np.array([value], np.int64) for name, value in entry.items()}, None)
        self.parts = join_records([self.parts, one])


def build_waiting_format(spec: ModelSpec, fmt: RowFormat) -> StateFormat:
    """Return the storage format of a model's waiting rows in the stream's state."""
    meaning = {
        "model": spec.name,
        "version": spec.version,
        "waiting": [
            fmt.time,
            *fmt.measurement,
            *fmt.control,
            *([] if fmt.row_id is None else [fmt.row_id.column]),
        ],
        "key": dict(zip(fmt.kind.columns, fmt.kind.types, strict=True)),
    }
    return build_format(meaning, fmt.layout)


_LAYOUT = Layout((PacketColumn("block", "<i8"), PacketColumn("oldest", "<i8")), text=False)


class LastSeenIndex(NamedTuple):
    """The `block` numbers of a bucket and the `oldest` time in each, in microseconds; empty blocks have no entry."""

    blocks: Records = _LAYOUT.empty()

    @property
    def oldest(self) -> int | None:
        """Return the oldest time of all blocks, None if there is no block."""
        times = self.blocks.arrays["oldest"]
        return int(times.min()) if len(times) else None

    def update(
        self, present: NDArray[np.int64], route: NDArray[np.uint64], last: NDArray[np.int64], blocks: int
    ) -> LastSeenIndex:
        """Return the index after the blocks `present` were written.

        Args:
            present: numbers of the written blocks.
            route: (K,) ordered routes of all keys in these blocks.
            last: (K,) time of each key.
            blocks: number of blocks in a bucket.
        """
        block = compute_blocks(route, blocks)
        others = self.blocks.take(np.flatnonzero(~np.isin(self.blocks.arrays["block"], present)))
        if len(block) == 0:
            return LastSeenIndex(others)
        numbers, starts = np.unique(block, return_index=True)
        oldest = np.minimum.reduceat(last, starts)
        return LastSeenIndex(join_records([others, Records({"block": numbers, "oldest": oldest}, None)]))

    def expired_before(self, time: int) -> NDArray[np.int64]:
        """Return the ordered numbers of the blocks with an entry older than a time."""
        return np.sort(self.blocks.arrays["block"][self.blocks.arrays["oldest"] < time])

    def encode(self) -> bytes:
        """Return the index as one value."""
        return _LAYOUT.encode(self.blocks)

    @classmethod
    def decode(cls, value: bytes, start: int) -> LastSeenIndex:
        """Return the index that begins at byte `start` of a value."""
        return cls(_LAYOUT.decode(value, start))


_MAGIC, _BLOCKS_ALONE = b"KCL2", b"KCL1"
"""The magic of clocks, and that of releases that see no changes beside blocks: these refuse a clock of this release."""
_PREFIX = struct.Struct("<4s4xqqqq")  # magic, watermark, maximum event time, last arrival, bytes of the parts


class Clock(NamedTuple):
    """The times of a bucket, in microseconds.

    watermark: never goes back; parts: index of the reorder buffer (`PARTS`); last_seen: index of the keys' blocks if
    keys expire; max_event_time: maximum over all rows; last_arrival: processing time of the last micro-batch with rows;
    row_ids: index of the row ids' blocks if rows have ids.
    """

    watermark: int
    parts: Records = PARTS.empty()
    last_seen: LastSeenIndex = LastSeenIndex()
    max_event_time: int = NEVER
    last_arrival: int = NEVER
    row_ids: LastSeenIndex = LastSeenIndex()

    def encode(self) -> bytes:
        """Return the clock as one value."""
        parts = PARTS.encode(self.parts)
        prefix = _PREFIX.pack(_MAGIC, self.watermark, self.max_event_time, self.last_arrival, len(parts))
        ids = self.row_ids.encode() if self.row_ids.blocks.size else b""
        return b"".join([prefix, parts, self.last_seen.encode(), ids])

    @classmethod
    def decode(cls, value: bytes) -> Clock:
        """Return the clock that is encoded in a value.

        Raises:
            ValueError: the value is not a clock.
        """
        magic, watermark, max_event_time, last_arrival, length = _PREFIX.unpack_from(value)
        if magic not in (_MAGIC, _BLOCKS_ALONE):
            raise ValueError(f"a bucket's clock begins with {magic!r}, not with {_MAGIC!r}")
        at = _PREFIX.size + length
        last_seen = LastSeenIndex.decode(value, at)
        at += len(last_seen.encode())
        row_ids = LastSeenIndex.decode(value, at) if len(value) > at else LastSeenIndex()
        parts = PARTS.decode(value, _PREFIX.size)
        return cls(watermark, parts, last_seen, max_event_time, last_arrival, row_ids)
