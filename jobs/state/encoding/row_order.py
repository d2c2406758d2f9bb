"""The order in which the filter applies the rows of a key, and the search for duplicates.

This module does not use Spark, so that the offline commands start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kalman.run import SortedRows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def order_rows(key_codes: Ints, time_us: Ints, y: Floats, u: Floats | None = None) -> Ints:
    """Return the order of rows by key, time, measurements (NaN last), controls, then position.

    Rows with the same key and time have no natural order. They are sorted by their values, so that the result does not
    depend on the cuts between files, partitions and micro-batches.

    Args:
        key_codes: (N,) key number of each row.
        time_us: (N,) event time in microseconds.
        y: (m, N) measurements; NaN means missing.
        u: (c, N) controls.

    Returns:
        (N,) positions of the rows in sorted order.
    """
    order = _sort_by_key_and_time(key_codes, time_us)
    key, time = key_codes[order], time_us[order]
    ties = (key[1:] == key[:-1]) & (time[1:] == time[:-1])
    if not ties.any():
        return order
    values = [*y] if u is None else [*y, *u]
    # Only the tied rows are sorted again, because there are few ties and many values.
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] |= ties
    tied[:-1] |= ties
    places = np.flatnonzero(tied)
    rows = order[places]
    columns = (column[rows] for column in reversed(values))
    again = np.lexsort((rows, *columns, time_us[rows], key_codes[rows]))
    order[places] = rows[again]
    return order


def find_starts(*columns: NDArray) -> NDArray[np.bool_]:
    """Return a mask (N,) of the ordered rows that are the first row with their values in the columns (N,)."""
    starts = np.ones(len(columns[0]), bool)
    starts[1:] = False
    for column in columns:
        starts[1:] |= column[1:] != column[:-1]
    return starts


def _sort_by_key_and_time(key: NDArray, time: Ints) -> Ints:
    """Return an order by key and time; rows with the same key and time may come in any order.

    Two sorts of plain integers use NumPy's vector instructions, and take a quarter of the time of `lexsort`.
    """
    if len(key) == 0:
        return np.empty(0, np.int64)
    follows = (key[1:] > key[:-1]) | (key[1:] == key[:-1]) & (time[1:] >= time[:-1])
    if follows.all():
        return np.arange(len(key))
    by_key = np.argsort(key)
    ordered = key[by_key]
    code = np.zeros(len(key), np.int64)
    np.cumsum(ordered[1:] != ordered[:-1], out=code[1:])
    least = int(time.min())
    span = int(time.max()) - least + 1
    if (int(code[-1]) + 1) * span > np.iinfo(np.int64).max:
        return np.lexsort((time, key))
    return by_key[np.argsort(code * span + (time[by_key] - least))]


def count_repeats(key: Ints, time: Ints) -> int:
    """Return the number of rows that have the same key (N,) and time (N,) as another row before."""
    order = _sort_by_key_and_time(key, time)
    return len(order) - int(find_starts(key[order], time[order]).sum())


Bools = NDArray[np.bool_]

REASON = "duplicate: of the same key and time as another row"
SAME_ID = "duplicate: of the same key and id as another row"
"""Reasons for the quarantine of duplicates."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Marks(NamedTuple):
    """N rows with ids: code of the key (N,), id (w, N), and time (N,) in microseconds."""

    key: Ints
    id: Ints
    time: Ints

    def take(self, which: Bools | Ints) -> Marks:
        """Return the marks at the positions, or under the mask, `which`."""
        return Marks(self.key[which], self.id[:, which], self.time[which])


def find_repeated(rows: SortedRows, newest: Ints | None = None) -> Bools:
    """Return a mask (N,) of the rows that repeat the time of the previous row, or the newest time in their key's state.

    The first of several rows with one key and time is accepted. Rows are sorted by their values, so the accepted row
    does not depend on the order of arrival.

    Args:
        rows: the rows, sorted.
        newest: (K,) time of the newest row in each key's state, `NEVER` for a state without rows.
    """
    again = ~find_starts(rows.key, rows.time)
    if newest is not None:
        again |= rows.time == newest[rows.key]
    return again


def find_resent(rows: Marks, within: int, known: Marks | None = None, late: Bools | None = None) -> Bools:
    """Return a mask (N,) of the rows that repeat a row of the same key and id, at most `within` earlier or later.

    Each row is compared with the preceding row, in time, of the same key and id, even if the preceding row is a
    duplicate. So the result does not depend on the cuts between micro-batches. Rows of earlier micro-batches come
    first.

    Args:
        rows: the rows in the order in which the filter applies them: by time for each key.
        within: maximum difference of the times in microseconds.
        known: rows of earlier micro-batches, or None.
        late: (N,) mask of the rows that are refused in any case; they may repeat other rows, but no row repeats them.
    """
    again = np.zeros(len(rows.key), bool)
    if len(again) == 0:
        return again
    parts = [rows] if known is None else [known, rows]
    key, time = (np.concatenate([getattr(one, name) for one in parts]) for name in ("key", "time"))
    ident = np.concatenate([one.id for one in parts], axis=1)
    held = len(key) - len(again)
    # Most ids occur once. A hash of key and id finds the rows whose id may occur again, and only these are compared.
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
    # Among rows with the same time, known rows come first, then new rows in their order, then refused rows.
    rank = np.where(row < 0, -1, row + np.where(refused, len(again), 0))
    by = np.lexsort((rank, time[some], *ident[:, some], key[some]))
    some, row, refused = some[by], row[by], refused[by]
    group, at = np.cumsum(find_starts(key[some], *ident[:, some])), time[some]
    before = _find_previous(~refused)
    near = (before >= 0) & (group[before] == group) & (at - at[before] <= within)
    # A known row may be later than the row that repeats it. The row that a late row repeats may also be later.
    for counts, whose in ((row < 0, ~refused), (~refused, refused)):
        after = len(some) - 1 - _find_previous(counts[::-1])[::-1]
        inside = np.minimum(after, len(some) - 1)
        near |= whose & (after < len(some)) & (group[inside] == group) & (at[inside] - at <= within)
    again[row[near & (row >= 0)]] = True
    return again


def _find_previous(counts: Bools) -> Ints:
    """Return, for each position (N,), the last earlier position at which `counts` is set, or -1."""
    last = np.maximum.accumulate(np.where(counts, np.arange(len(counts)), -1))
    return np.concatenate([[-1], last[:-1]]).astype(np.int64)
