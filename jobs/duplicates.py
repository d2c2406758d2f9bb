"""Rows that repeat another: of one key and one time. Pure functions of arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jobs.packed_rows import KeyedRows
from kalman.run import SortedRows

REASON = "duplicate: of the same key and time as another row"
"""Why such a row is refused."""


def repeated(
    rows: SortedRows, has: NDArray[np.bool_] | None = None, newest: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """Return which rows (N,) repeat the time of the row before, or the newest time of their key.

    Of the rows of one key and time the first counts, which is the same one however they were ordered before.

    Args:
        rows: sorted.
        has: (K,) which keys have a state.
        newest: (K,) the time of the newest row that it reflects.
    """
    again = np.zeros(len(rows.key), bool)
    again[1:] = (rows.key[1:] == rows.key[:-1]) & (rows.time[1:] == rows.time[:-1])
    if has is not None and newest is not None:
        again |= has[rows.key] & (rows.time == newest[rows.key])
    return again


def distinct(keyed: KeyedRows) -> KeyedRows:
    """Return rows without those that repeat another."""
    again = repeated(keyed.rows)
    return chosen(keyed, np.flatnonzero(~again)) if again.any() else keyed


def chosen(keyed: KeyedRows, which: NDArray[np.int64]) -> KeyedRows:
    """Return some of the rows, in their order, and the keys that still have rows."""
    rows = keyed.rows
    present, code = np.unique(rows.key[which], return_inverse=True)
    keys = keyed.keys if len(present) == keyed.keys.size else keyed.keys.take(present)
    return KeyedRows(keys, rows.take(which)._replace(key=code.astype(np.int64)))
