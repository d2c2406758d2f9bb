"""Lists of numbers in Arrow, to and from arrays with the rows on the last axis."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def lists(values: NDArray[np.float64]) -> pa.ListArray:
    """Turn (d, N) into N lists of d numbers."""
    width, size = values.shape
    offsets = np.arange(size + 1, dtype=np.int32) * np.int32(width)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values.T).ravel()))


def matrix(column: pa.ListArray, width: int, name: str) -> NDArray[np.float64]:
    """Turn N lists of `width` numbers into (width, N).

    Raises:
        ValueError: a list is missing or has another length.
    """
    size = len(column)
    lengths = np.diff(column.offsets.to_numpy()) if size else np.empty(0, np.int32)
    if column.null_count or (lengths != width).any():
        raise ValueError(
            f"a snapshot row's {name} has not {width} numbers: the snapshot is of another model, or damaged"
        )
    return np.ascontiguousarray(column.flatten().to_numpy(zero_copy_only=False).reshape(size, width).T)
