"""Late rows in their place: rewind a key to before its last rows, and take these again with the late ones. Pure.

Of each key a ring of its last L rows is kept, and the state before the first of them. The state before every one of
them would be as many times as large, and it is what the filter gives again: cut into calls as you like, it gives the
same bits. A row that no kept row has overtaken is taken from the newest state, so nothing is rewound for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.order import order_rows
from jobs.state.duplicates import repeated
from jobs.state.filtering import filter_rows
from kalman.run import KeyStates, Outputs, SortedRows, picked, run
from kalman.types import Filter

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Replayed(NamedTuple):
    """K keys after some rows, of which some were late.

    head, base: newest states, and those before the rings
    ring: the kept rows, sorted
    beyond, repeats: (N,) which of the new rows are older than the ring reaches, and which repeat another
    rows, outputs: the rows that have an estimate now; corrects: which of them had one before
    """

    head: KeyStates
    base: KeyStates
    ring: SortedRows
    beyond: Bools
    repeats: Bools
    rows: SortedRows
    outputs: Outputs
    corrects: Bools


def replay(
    kernel: Filter,
    head: KeyStates,
    base: KeyStates,
    ring: SortedRows,
    new: SortedRows,
    unit: float,
    length: int,
    distinct: bool = False,
    watched: bool = False,
) -> Replayed:
    """Take new rows, and again those kept rows that they precede.

    Each estimate of a kept row at or behind the first new row's time is given again, so that of a key and time those
    of the latest micro-batch count.

    Args:
        kernel: the filter.
        head: newest states of K keys.
        base: their states before the ring's rows; of a key without kept rows the newest one.
        ring: kept rows, sorted.
        new: rows, sorted.
        unit: microseconds in the model's unit of time.
        length: rows that a ring keeps.
        distinct: of rows of one key and time the first to come counts.
        watched: also put out the normalised innovations (`jobs.state.filtering`).
    """
    keys = len(head.count)
    beyond = (base.count[new.key] > 0) & (new.time < base.event_time[new.key])
    repeats = _repeats(base, ring, new, beyond) if distinct else np.zeros(len(new.key), bool)
    merged, seen = _merged(ring, new.take(~(beyond | repeats)))
    fresh = merged.key[~seen]
    first = np.full(keys, np.iinfo(np.int64).max)
    np.minimum.at(first, fresh, merged.time[~seen])
    last = np.full(keys, np.iinfo(np.int64).min)
    np.maximum.at(last, ring.key, ring.time)
    rewound = first <= last
    begin = KeyStates(*(np.where(rewound, b, h) for b, h in zip(base, head, strict=True)))
    again = rewound[merged.key] | ~seen
    taken = merged.take(again)
    after, outputs = filter_rows(kernel, begin, taken, unit, watched)
    touched = np.zeros(keys, bool)
    touched[fresh] = True
    head_after = KeyStates(*(np.where(touched, a, h) for a, h in zip(after, head, strict=True)))
    told = np.flatnonzero(taken.time >= first[taken.key])
    kept = _newest(merged.key, keys, length)
    absorbed, _ = run(kernel, base, merged.take(~kept), unit)
    return Replayed(
        head_after,
        absorbed,
        merged.take(kept),
        beyond,
        repeats,
        taken.take(told),
        picked(outputs, told),
        seen[again][told],
    )


def _merged(ring: SortedRows, new: SortedRows) -> tuple[SortedRows, Bools]:
    """Return kept and new rows together, sorted, and which of them are kept ones."""
    key, time = np.concatenate([ring.key, new.key]), np.concatenate([ring.time, new.time])
    y, u = np.concatenate([ring.y, new.y], axis=1), np.concatenate([ring.u, new.u], axis=1)
    order = order_rows(key, time, y, u)
    seen = order < len(ring.key)
    return SortedRows(key[order], time[order], y[:, order], u[:, order]), seen


def _newest(key: Ints, keys: int, length: int) -> Bools:
    """Return which of sorted rows (N,) are among the last `length` of their key."""
    stop = np.cumsum(np.bincount(key, minlength=keys))
    return stop[key] - np.arange(len(key)) <= length


def _repeats(base: KeyStates, ring: SortedRows, new: SortedRows, beyond: Bools) -> Bools:
    """Return which new rows repeat a kept one, the last one before those, or another new one."""
    again = repeated(new, base.count > 0, base.event_time)
    merged = np.concatenate([ring.key, new.key]), np.concatenate([ring.time, new.time])
    kept = np.arange(len(merged[0])) < len(ring.key)
    order = np.lexsort((~kept, merged[1], merged[0]))  # a kept row comes before the new ones of its time
    starts = np.ones(len(order), bool)
    starts[1:] = (np.diff(merged[0][order]) != 0) | (np.diff(merged[1][order]) != 0)
    leader = kept[order][np.flatnonzero(starts)][np.cumsum(starts) - 1]
    led = np.zeros(len(order), bool)
    led[order] = leader
    return (again | led[len(ring.key) :]) & ~beyond
