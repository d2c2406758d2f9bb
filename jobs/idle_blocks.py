"""Which blocks hold keys that have been silent for long: an index of the earliest sign of life in each block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jobs.packets import Records, concat
from jobs.routing import block_of


def touched(
    index: Records,
    present: NDArray[np.int64],
    route: NDArray[np.uint64],
    last: NDArray[np.int64],
    blocks: int,
) -> Records:
    """Return the index after the blocks `present` have come to hold keys of these ordered routes and signs of life."""
    block = block_of(route, blocks)
    others = index.take(np.flatnonzero(~np.isin(index.arrays["block"], present)))
    if len(block) == 0:
        return others
    numbers, starts = np.unique(block, return_index=True)
    oldest = np.minimum.reduceat(last, starts)
    return concat([others, Records({"block": numbers, "oldest": oldest}, None)])


def due(index: Records, before: int) -> NDArray[np.int64]:
    """Return the ordered numbers of the blocks that hold keys whose last sign of life was before a time."""
    return np.sort(index.arrays["block"][index.arrays["oldest"] < before])
