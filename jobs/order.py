"""The one order in which a key's rows are applied, in batch, in the stream and in the offline command."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def order_rows(key_codes: Ints, time_us: Ints, y: Floats, u: Floats | None = None) -> Ints:
    """Return the order of rows by key, time, measurements (NaN last), controls, then position.

    Rows of one key at one time have no order of their own: sorting them by their values makes the result the
    same however the rows were cut into files, partitions and micro-batches.

    Args:
        key_codes: (N,) the key of each row as a number.
        time_us: (N,) event time in microseconds.
        y: (m, N) measurements, NaN = missing.
        u: (c, N) controls.

    Returns:
        (N,) positions of the rows in sorted order.
    """
    order = np.lexsort((time_us, key_codes))
    key, time = key_codes[order], time_us[order]
    ties = (key[1:] == key[:-1]) & (time[1:] == time[:-1])
    if not ties.any():
        return order
    values = [*y] if u is None else [*y, *u]
    # Only the tied rows are sorted again, in their places: ties are few and values many.
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] |= ties
    tied[:-1] |= ties
    places = np.flatnonzero(tied)
    rows = order[places]
    again = np.lexsort((*(column[rows] for column in reversed(values)), time_us[rows], key_codes[rows]))
    order[places] = rows[again]
    return order
