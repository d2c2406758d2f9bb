"""A bucket's clock: the watermark, and the indexes that find due rows and silent keys. One value in the state."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.encoding.packets import NEVER, Layout, PacketColumn, Records, join_records
from jobs.state.encoding.routing import compute_blocks
from jobs.state.reorder_buffer import PARTS

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
