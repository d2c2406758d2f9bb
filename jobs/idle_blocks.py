"""Which blocks hold keys that have been silent for long: an index of the earliest event time of each block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jobs.packets import Records, concat
from jobs.routing import block_of


def touched(index: Records, present: NDArray[np.int64], records: Records, blocks: int) -> Records:
    """Return the index after the blocks `present` have become these records, ordered by route."""
    block = block_of(records.arrays["route"], blocks)
    others = index.take(np.flatnonzero(~np.isin(index.arrays["block"], present)))
    if len(block) == 0:
        return others
    numbers, starts = np.unique(block, return_index=True)
    oldest = np.minimum.reduceat(records.arrays["event_time"], starts)
    return concat([others, Records({"block": numbers, "oldest": oldest}, None)])


def due(index: Records, before: int) -> NDArray[np.int64]:
    """Return the ordered numbers of the blocks that hold keys whose last row was before a time."""
    return np.sort(index.arrays["block"][index.arrays["oldest"] < before])
