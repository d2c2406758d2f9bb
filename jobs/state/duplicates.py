"""Duplicates: rows of one key and time, or of one key and id. Pure functions of arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.order import starts_of
from kalman.run import SortedRows

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

REASON = "duplicate: of the same key and time as another row"
SAME_ID = "duplicate: of the same key and id as another row"
"""Reasons for which duplicates are quarantined."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Marks(NamedTuple):
    """N rows with ids: key (N,) codes, id (w, N), time (N,) in microseconds."""

    key: Ints
    id: Ints
    time: Ints

    def take(self, which: Bools | Ints) -> Marks:
        """Return some of them."""
        return Marks(self.key[which], self.id[:, which], self.time[which])


def repeated(rows: SortedRows, newest: Ints | None = None) -> Bools:
    """Return which rows (N,) repeat the time of the previous row, or the newest time of their key.

    Of the rows of one key and time the first counts; since rows are sorted by their values, it is the same one in
    whatever order they came.

    Args:
        rows: sorted.
        newest: (K,) the time of the newest row that each key's state reflects, `NEVER` where it has none.
    """
    again = ~starts_of(rows.key, rows.time)
    if newest is not None:
        again |= rows.time == newest[rows.key]
    return again


def resent(rows: Marks, within: int, known: Marks | None = None, late: Bools | None = None) -> Bools:
    """Return which rows (N,) repeat a row of the same key and id whose time differs by at most `within`.

    In the order of their times each row is compared with the previous row of its key and id, whether or not that one is
    a duplicate itself. So the result does not depend on how rows are cut into micro-batches. Rows of earlier
    micro-batches come before the new ones.

    Args:
        rows: in the order in which they are applied: those of a key by time.
        within: microseconds.
        known: rows of earlier micro-batches.
        late: (N,) rows that are refused in any case; they may repeat others, and no other row repeats them.
    """
    again = np.zeros(len(rows.key), bool)
    if len(again) == 0:
        return again
    parts = [rows] if known is None else [known, rows]
    key, time = (np.concatenate([getattr(one, name) for one in parts]) for name in ("key", "time"))
    ident = np.concatenate([one.id for one in parts], axis=1)
    held = len(key) - len(again)
    # Most ids occur once. A hash of key and id finds the rows whose id may occur again; only these are compared.
    mixed = (ident[0].view(np.uint64) ^ (key.view(np.uint64) * _ODD)) * _ODD
    order = np.argsort(mixed)
    same = mixed[order][1:] == mixed[order][:-1]
    if not same.any():
        return again
    alike = np.zeros(len(order), bool)
    alike[1:] |= same
    alike[:-1] |= same
    some = order[alike]
    row = some - held
    refused = np.zeros(len(some), bool)
    if late is not None:
        refused[row >= 0] = late[row[row >= 0]]
    # Of one time, known rows come first, then the new ones in their order, then the refused ones.
    rank = np.where(row < 0, -1, row + np.where(refused, len(again), 0))
    by = np.lexsort((rank, time[some], *ident[:, some], key[some]))
    some, row, refused = some[by], row[by], refused[by]
    group, at = np.cumsum(starts_of(key[some], *ident[:, some])), time[some]
    before = _previous(~refused)
    near = (before >= 0) & (group[before] == group) & (at - at[before] <= within)
    # A known row may have a later time, and so may the row that a late row repeats.
    for counts, whose in ((row < 0, ~refused), (~refused, refused)):
        after = len(some) - 1 - _previous(counts[::-1])[::-1]
        inside = np.minimum(after, len(some) - 1)
        near |= whose & (after < len(some)) & (group[inside] == group) & (at[inside] - at <= within)
    again[row[near & (row >= 0)]] = True
    return again


def _previous(counts: Bools) -> Ints:
    """Return for each position (N,) the last position before it that `counts` marks, -1 where there is none."""
    last = np.maximum.accumulate(np.where(counts, np.arange(len(counts)), -1))
    return np.concatenate([[-1], last[:-1]]).astype(np.int64)
