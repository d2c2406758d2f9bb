"""An index of a bucket's blocks by the oldest entry in each: it says which blocks to read for expired entries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.packets import Column, Layout, Records, concat
from jobs.encoding.routing import block_of

_LAYOUT = Layout((Column("block", "<i8"), Column("oldest", "<i8")), text=False)


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
        """Return the index after some blocks were written.

        Args:
            present: the numbers of these blocks.
            route: (K,) the ordered routes of the keys that they hold now.
            last: (K,) the time of each.
            blocks: number of blocks in a bucket.
        """
        block = block_of(route, blocks)
        others = self.blocks.take(np.flatnonzero(~np.isin(self.blocks.arrays["block"], present)))
        if len(block) == 0:
            return LastSeenIndex(others)
        numbers, starts = np.unique(block, return_index=True)
        oldest = np.minimum.reduceat(last, starts)
        return LastSeenIndex(concat([others, Records({"block": numbers, "oldest": oldest}, None)]))

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
