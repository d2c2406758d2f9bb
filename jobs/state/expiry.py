"""Keys that expire by event time: a key that was silent for too long begins again as a new key. Pure functions.

A key expires between two of its rows that are further apart than the idle time, wherever micro-batches were cut. So
only the rows decide where a life of a key ends. The watermark decides when the end of a silent key is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from jobs.state.encoding.row_order import find_starts
from jobs.state.row_filter import RowFilter
from kalman.run import KeyStates, Outputs, SortedRows
from kalman.smoothers.checkpoints import Lengths
from kalman.types import Filter

Good = NDArray[np.bool_]
Found = TypeVar("Found")

ROWS_AT_ONCE = 1 << 17
"""Number of rows that are filtered at once if only their flags are needed."""


class Lives(NamedTuple):
    """K keys after some rows, each with the state of its last life.

    ended: last states of the E lives that ended among the rows. ended_keys: (E,) key of each ended life.
    """

    after: KeyStates
    outputs: Outputs
    ended: KeyStates
    ended_keys: NDArray[np.int64]


def run_lives(
    row_filter: RowFilter, before: KeyStates, fresh: KeyStates, rows: SortedRows, idle: int
) -> Lives:
    """Filter rows; a key begins a new life after a silence longer than `idle`.

    Args:
        row_filter: the filter.
        before: states of the K keys.
        fresh: initial states for a new life of each key.
        rows: the rows, sorted.
        idle: maximum silence within a life, in microseconds.
    """

    def filtered(states: KeyStates, part: SortedRows) -> tuple[Good, tuple[KeyStates, Outputs]]:
        found = row_filter.run(states, part)
        return _find_good_rows(found[1]), found

    _, key_of_life, begins, (after, outputs) = _settle_lives(before, fresh, rows, idle, filtered)
    final = before.take(np.arange(len(before.count)))
    last = find_starts(key_of_life[::-1])[::-1]
    for field, new in zip(final, after, strict=True):
        field[..., key_of_life[last]] = new[..., last]
    # A life that ended before the first of these rows ended with the stored state of its key.
    first = np.flatnonzero(begins & find_starts(key_of_life))
    held = first[before.count[key_of_life[first]] > 0]
    through = np.flatnonzero(~last & (after.count > 0))
    ended = [before.take(key_of_life[held]), after.take(through)]
    keys = np.concatenate([key_of_life[held], key_of_life[through]])
    joined = KeyStates(*(np.concatenate(pair, axis=-1) for pair in zip(*ended, strict=True)))
    order = np.lexsort((joined.event_time, keys))
    return Lives(final, outputs, joined.take(order), keys[order])


def split_lives(
    kernel: Filter, fresh: KeyStates, rows: SortedRows, unit: float, idle: int
) -> tuple[SortedRows, NDArray[np.int64]]:
    """Return the rows of new keys, in which each life is a separate key, and the key (L,) of each life.

    fresh: initial states for the lives of each key.
    """
    life, key_of_life, *_ = _settle_lives(
        fresh, fresh, rows, idle, _build_sign_finder(RowFilter(kernel, unit))
    )
    return rows._replace(key=life), key_of_life


def split_lives_from(
    row_filter: RowFilter, before: KeyStates, fresh: KeyStates, rows: SortedRows, idle: int
) -> tuple[SortedRows, KeyStates]:
    """Return the rows, in which each life is a separate key, and the initial states of these L lives.

    The parameters are those of `run_lives`.
    """
    life, key_of_life, begins, _ = _settle_lives(before, fresh, rows, idle, _build_sign_finder(row_filter))
    states = before.take(key_of_life)
    for field, new in zip(states, fresh.take(key_of_life), strict=True):
        field[..., begins] = new[..., begins]
    return rows._replace(key=life), states


def _settle_lives(
    before: KeyStates,
    fresh: KeyStates,
    rows: SortedRows,
    idle: int,
    filtered: Callable[[KeyStates, SortedRows], tuple[Good, Found]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], Found]:
    """Return the lives (`_number_lives`), and the second result of `filtered` for their rows.

    filtered: function that filters rows from initial states; it returns which rows are good (a sign of life), and
    another result.
    """
    good = np.ones(len(rows.key), bool)
    while True:
        # A flagged row is not a sign of life, and only the filter decides which rows are flagged. Each pass settles
        # another life of every key, so the number of passes is small.
        restarts = _find_silent(before, rows, good, idle)
        life, key_of_life, begins = _number_lives(rows, restarts)
        states = before.take(key_of_life)
        for field, new in zip(states, fresh.take(key_of_life), strict=True):
            field[..., begins] = new[..., begins]
        good, found = filtered(states, rows._replace(key=life))
        if np.array_equal(_find_silent(before, rows, good, idle), restarts):
            return life, key_of_life, begins, found


def _find_good_rows(outputs: Outputs) -> Good:
    """Return a mask (N,) of the rows that have changed the state of their key."""
    return (outputs.flag == 0) & ~outputs.late


def _build_sign_finder(row_filter: RowFilter) -> Callable[[KeyStates, SortedRows], tuple[Good, None]]:
    """Return a function that finds the good rows, with memory that does not grow with the number of rows."""
    plain = row_filter._replace(beside=())

    def filtered(states: KeyStates, rows: SortedRows) -> tuple[Good, None]:
        good = np.zeros(len(rows.key), bool)
        if len(good) == 0:
            return good, None
        turn = np.arange(len(rows.key)) - np.searchsorted(rows.key, rows.key)
        bounds = Lengths(np.bincount(rows.key)).bounds(-(-len(rows.key) // ROWS_AT_ONCE))
        for first, stop in itertools.pairwise(bounds.tolist()):
            here = np.flatnonzero((turn >= first) & (turn < stop))
            states, outputs = plain.run(states, rows.take(here))
            good[here] = _find_good_rows(outputs)
        return good, None

    return filtered


def _find_silent(
    before: KeyStates, rows: SortedRows, good: NDArray[np.bool_], idle: int
) -> NDArray[np.bool_]:
    """Return a mask (N,) of the rows that follow a silence of their key longer than `idle`."""
    if len(rows.key) == 0:
        return np.zeros(0, bool)
    at = np.arange(len(rows.key))
    newest = np.maximum.accumulate(np.where(good, at, -1))
    newest = np.concatenate([[-1], newest[:-1]]).astype(np.int64)
    first = np.searchsorted(rows.key, rows.key)
    inside = newest >= first
    held = np.where(before.count[rows.key] > 0, before.event_time[rows.key], rows.time)
    since = np.where(inside, rows.time[newest], held)
    return rows.time - since > idle


def _number_lives(
    rows: SortedRows, restarts: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the life of each row (N,), the key of each life (L,), and a mask (L,) of lives that follow a silence."""
    starts = find_starts(rows.key) | restarts
    return np.cumsum(starts) - 1, rows.key[starts], restarts[starts]
