"""Replay late rows: rewind a key to before its last rows, and apply these again with the late rows. Pure functions.

The last L rows of each key are kept, and the state before the first of them. States before each row would take L times
the space; the filter computes them again, with the same bits however the rows are cut into calls. A row that is later
than all kept rows is applied to the newest state, without a rewind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.encoding.packets import NEVER
from jobs.state.encoding.row_order import find_repeated, find_starts, order_rows
from jobs.state.row_filter import RowFilter
from kalman.run import KeyStates, Outputs, SortedRows, pick_outputs

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class RewoundRows(NamedTuple):
    """The replay window of K keys.

    head: newest states. base: states before the kept rows, or the newest state of a key without kept rows. rows: the
    kept rows, sorted.
    """

    head: KeyStates
    base: KeyStates
    rows: SortedRows


class Replayed(NamedTuple):
    """K keys after N new rows, of which some may be late.

    window: the window after the rows
    beyond, repeats: (N,) masks of the new rows that are older than the window, and that repeat another row
    rows, outputs: the rows with a new estimate, and the filter's outputs; corrects: mask of rows that had an estimate
    """

    window: RewoundRows
    beyond: Bools
    repeats: Bools
    rows: SortedRows
    outputs: Outputs
    corrects: Bools


def replay(
    row_filter: RowFilter, window: RewoundRows, new: SortedRows, length: int, distinct: bool = False
) -> Replayed:
    """Apply new rows, and apply the kept rows again that come after the new rows.

    A kept row at the same time as a new row, or later, gets a new estimate. Readers use the estimates of the latest
    micro-batch for each key and time.

    Args:
        row_filter: the filter.
        window: the window before the rows.
        new: new rows, sorted.
        length: number of rows per key that a window keeps.
        distinct: whether only the first row to arrive of each key and time is kept.
    """
    head, base, ring = window
    keys = len(head.count)
    beyond = (base.count[new.key] > 0) & (new.time < base.event_time[new.key])
    repeats = _find_repeats(base, ring, new, beyond) if distinct else np.zeros(len(new.key), bool)
    merged, seen = _merge_rows(ring, new.take(~(beyond | repeats)))
    fresh = merged.key[~seen]
    first = np.full(keys, np.iinfo(np.int64).max)
    np.minimum.at(first, fresh, merged.time[~seen])
    last = np.full(keys, NEVER)
    np.maximum.at(last, ring.key, ring.time)
    rewound = first <= last
    begin = KeyStates(*(np.where(rewound, b, h) for b, h in zip(base, head, strict=True)))
    again = rewound[merged.key] | ~seen
    applied = merged.take(again)
    after, outputs = row_filter.run(begin, applied)
    changed = np.zeros(keys, bool)
    changed[fresh] = True
    head_after = KeyStates(*(np.where(changed, a, h) for a, h in zip(after, head, strict=True)))
    estimated = np.flatnonzero(applied.time >= first[applied.key])
    kept = _is_newest(merged.key, keys, length)
    absorbed, _ = row_filter._replace(beside=()).run(base, merged.take(~kept))
    return Replayed(
        RewoundRows(head_after, absorbed, merged.take(kept)),
        beyond,
        repeats,
        applied.take(estimated),
        pick_outputs(outputs, estimated),
        seen[again][estimated],
    )


def _merge_rows(ring: SortedRows, new: SortedRows) -> tuple[SortedRows, Bools]:
    """Return kept and new rows together, sorted, and a mask of the kept rows."""
    key, time = np.concatenate([ring.key, new.key]), np.concatenate([ring.time, new.time])
    y, u = np.concatenate([ring.y, new.y], axis=1), np.concatenate([ring.u, new.u], axis=1)
    order = order_rows(key, time, y, u)
    seen = order < len(ring.key)
    return SortedRows(key[order], time[order], y[:, order], u[:, order]), seen


def _is_newest(key: Ints, keys: int, length: int) -> Bools:
    """Return a mask (N,) of the sorted rows that are among the last `length` rows of their key."""
    stop = np.cumsum(np.bincount(key, minlength=keys))
    return stop[key] - np.arange(len(key)) <= length


def _find_repeats(base: KeyStates, ring: SortedRows, new: SortedRows, beyond: Bools) -> Bools:
    """Return a mask of the new rows that repeat a kept row, the newest row of the base, or another new row."""
    again = find_repeated(new, np.where(base.count > 0, base.event_time, NEVER))
    key, time = np.concatenate([ring.key, new.key]), np.concatenate([ring.time, new.time])
    kept = np.arange(len(key)) < len(ring.key)
    order = np.lexsort((~kept, time, key))  # a kept row comes before the new rows with the same time
    starts = find_starts(key[order], time[order])
    leader = kept[order][np.flatnonzero(starts)][np.cumsum(starts) - 1]
    led = np.zeros(len(order), bool)
    led[order] = leader
    return (again | led[len(ring.key) :]) & ~beyond
