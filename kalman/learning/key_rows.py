"""Rows of many keys in the order of the rounds, from which keys can be left out as their searches end."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kalman.run import SortedRows, build_rounds
from kalman.types import Array

RowOf = tuple[bool, Array, Array, Array, bool]
"""One round: whether it is the first round, dt (k,), y (m, k), u (c, k), whether any component is missing."""


class RoundRows(NamedTuple):
    """N rows of J keys in rounds; round t has the t-th row of every key with at least t rows.

    Each key has at least one row. The keys are in descending order of their number of rows.
    number (J,) the caller's number of each key; starts (rounds + 1,) position at which each round begins
    dt (N,) time since the key's previous row, in the model's unit; y (m, N); u (c, N)
    missing (rounds,) whether any component is missing in each round
    """

    number: np.ndarray
    starts: np.ndarray
    dt: Array
    y: Array
    u: Array
    missing: np.ndarray

    @property
    def keys(self) -> int:
        """Number of keys."""
        return len(self.number)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.dt)

    def count_rounds(self) -> np.ndarray:
        """Return the number of rows of each key (J,) int64."""
        return np.searchsorted(-np.diff(self.starts), -np.arange(self.keys)).astype(np.int64)

    def places(self) -> list[slice]:
        """Return the positions of each round's rows."""
        starts = self.starts.tolist()
        return [slice(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]

    def within(self, keys: slice) -> Iterator[RowOf]:
        """Yield the rounds of the keys at these positions; the keys of each round are a prefix of these keys."""
        starts, missing = self.starts.tolist(), self.missing.tolist()
        dt, y, u = self.dt, self.y, self.u
        for t, absent in enumerate(missing):
            begin, end = starts[t] + keys.start, min(starts[t] + keys.stop, starts[t + 1])
            if begin >= end:
                return
            yield t == 0, dt[begin:end], y[:, begin:end], u[:, begin:end], absent

    def at(self, positions: np.ndarray, number: np.ndarray) -> "RoundRows":
        """Return the rows of the keys at these ascending positions, which may repeat; number: their new numbers."""
        widths = np.diff(self.starts)
        left = np.searchsorted(positions, widths)
        left = left[left > 0]
        begins = self.starts[: len(left)]
        starts = np.concatenate([[0], np.cumsum(left)]).astype(np.int64)
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], left)
        whole = np.repeat(begins, left) + positions[within]
        y = self.y[:, whole]
        return RoundRows(number, starts, self.dt[whole], y, self.u[:, whole], _find_missing(y, starts))


def sort_by_rounds(rows: SortedRows, unit: float) -> RoundRows:
    """Return rows by rounds; unit: microseconds in the model's unit of time."""
    plan = build_rounds(rows.key)
    new = np.diff(rows.key, prepend=-1) > 0
    dt = np.where(new, 0, np.diff(rows.time, prepend=0)) / unit
    y = rows.y[:, plan.order]
    starts = np.array(plan.starts, np.int64)
    return RoundRows(plan.keys, starts, dt[plan.order], y, rows.u[:, plan.order], _find_missing(y, starts))


def _find_missing(y: Array, starts: np.ndarray) -> np.ndarray:
    """Return for each round whether any component of any row is missing."""
    absent = np.isnan(y).any(axis=0)
    if not absent.any():
        return np.zeros(len(starts) - 1, bool)
    return np.logical_or.reduceat(absent, starts[:-1])
