"""Keys that end when no row of theirs has come for some event time: each comes back as a new key. Pure functions.

A key ends between two rows that are further apart than that, wherever micro-batches were cut; so it is decided by the
rows alone, and the watermark only says when the end of a silent key is known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.filtering import filter_rows
from kalman.run import KeyStates, Outputs, SortedRows, initial_states
from kalman.types import Filter


class Lives(NamedTuple):
    """K keys after some rows, each in the last of its lives.

    ended: the last states of the lives that ended among the rows, E of them; whose: (E,) the key of each.
    """

    after: KeyStates
    outputs: Outputs
    ended: KeyStates
    whose: NDArray[np.int64]


def run_lives(
    kernel: Filter,
    before: KeyStates,
    fresh: KeyStates,
    rows: SortedRows,
    unit: float,
    idle: int,
    watched: bool = False,
) -> Lives:
    """Filter rows as `kalman.run` does, and begin a key anew where it has been silent for longer than `idle`.

    Args:
        kernel: the filter.
        before: where the keys stand.
        fresh: where they begin anew.
        rows: the rows, sorted.
        unit: microseconds in the model's unit of time.
        idle: microseconds.
        watched: also put out the normalised innovations (`jobs.state.filtering`).
    """
    _, whose, begins, after, outputs = _settled(kernel, before, fresh, rows, unit, idle, watched)
    final = before.take(np.arange(len(before.count)))
    last = np.ones(len(whose), bool)
    last[:-1] = whose[1:] != whose[:-1]
    for field, new in zip(final, after, strict=True):
        field[..., whose[last]] = new[..., last]
    # A life that ended before the first of these rows is one, too: it is the state that was held.
    first = np.flatnonzero(begins & np.concatenate([[True], whose[1:] != whose[:-1]]))
    held = first[before.count[whose[first]] > 0]
    through = np.flatnonzero(~last & (after.count > 0))
    ended = [before.take(whose[held]), after.take(through)]
    keys = np.concatenate([whose[held], whose[through]])
    joined = KeyStates(*(np.concatenate(pair, axis=-1) for pair in zip(*ended, strict=True)))
    order = np.lexsort((joined.event_time, keys))
    return Lives(final, outputs, joined.take(order), keys[order])


def lives(kernel: Filter, keys: int, rows: SortedRows, unit: float, idle: int) -> tuple[SortedRows, int]:
    """Return the rows of `keys` keys that begin with them, with each life of a key as one, and how many there are."""
    fresh = initial_states(kernel, keys)
    life, whose, *_ = _settled(kernel, fresh, fresh, rows, unit, idle)
    return rows._replace(key=life), len(whose)


def _settled(
    kernel: Filter,
    before: KeyStates,
    fresh: KeyStates,
    rows: SortedRows,
    unit: float,
    idle: int,
    watched: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], KeyStates, Outputs]:
    """Return what `_lives` says, and the states of the lives after the rows with what the filter says of these."""
    good = np.ones(len(rows.key), bool)
    while True:
        # A flagged row does not count as a sign of life, and which are flagged shows only as the filter runs. Each
        # pass has one more life of every key right, the first one at once, so few passes are many.
        anew = _silent(before, rows, good, idle)
        life, whose, begins = _lives(rows, anew)
        states = before.take(whose)
        for field, new in zip(states, fresh.take(whose), strict=True):
            field[..., begins] = new[..., begins]
        after, outputs = filter_rows(kernel, states, rows._replace(key=life), unit, watched)
        good = (outputs.flag == 0) & ~outputs.late
        if np.array_equal(_silent(before, rows, good, idle), anew):
            return life, whose, begins, after, outputs


def _silent(before: KeyStates, rows: SortedRows, good: NDArray[np.bool_], idle: int) -> NDArray[np.bool_]:
    """Return before which rows (N,) their key had been silent for longer than `idle`."""
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


def _lives(
    rows: SortedRows, anew: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the number of each row's life, whose each life is, and which of them begin anew."""
    starts = np.ones(len(rows.key), bool)
    starts[1:] = (rows.key[1:] != rows.key[:-1]) | anew[1:]
    return np.cumsum(starts) - 1, rows.key[starts], anew[starts]
