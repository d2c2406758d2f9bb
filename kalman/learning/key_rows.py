"""Rows of many keys in the order of the rounds, from which keys can be left out as their searches end."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kalman.run import SortedRows, rounds
from kalman.types import Array

RowOf = tuple[bool, Array, Array, Array, bool]
"""One round: whether it is the keys' first, dt (k,), y (m, k), u (c, k), whether some component is missing."""


class RoundRows(NamedTuple):
    """N rows of J keys, each with a row at least, in rounds: round t holds the t-th row of the keys that have one.

    The keys are in the order of their number of rows, the most first.
    number (J,) the key of the caller; starts (rounds + 1,) position at which each round begins
    dt (N,) time since the key's row before, in the model's unit; y (m, N); u (c, N); missing (rounds,) of each round
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

    def places(self) -> list[slice]:
        """Return where each round's rows are."""
        starts = self.starts.tolist()
        return [slice(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]

    def within(self, keys: slice) -> Iterator[RowOf]:
        """Yield the rounds of the keys at these positions; the keys of each are a prefix of them."""
        missing = self.missing.tolist()
        for t, place in enumerate(self.places()):
            begin, end = place.start + keys.start, min(place.start + keys.stop, place.stop)
            if begin >= end:
                return
            yield t == 0, self.dt[begin:end], self.y[:, begin:end], self.u[:, begin:end], missing[t]

    def counts(self) -> np.ndarray:
        """Return the number of rows of each key (J,)."""
        widths = np.diff(self.starts)
        return (widths[None, :] > np.arange(self.keys)[:, None]).sum(axis=1) if self.keys else widths[:0]

    def only(self, kept: np.ndarray) -> "RoundRows":
        """Return the rows of the keys where `kept` (J,) is true."""
        widths = np.diff(self.starts)
        whole = np.concatenate([kept[:width] for width in widths.tolist()]) if len(widths) else kept[:0]
        before = np.concatenate([[0], np.cumsum(kept)])
        left = before[widths]
        left = left[left > 0]
        starts = np.concatenate([[0], np.cumsum(left)]).astype(np.int64)
        y = self.y[:, whole]
        return RoundRows(self.number[kept], starts, self.dt[whole], y, self.u[:, whole], _missing(y, starts))


def by_rounds(rows: SortedRows, unit: float) -> RoundRows:
    """Return rows by rounds; unit: microseconds in the model's unit of time."""
    plan = rounds(rows.key)
    new = np.diff(rows.key, prepend=-1) > 0
    dt = np.where(new, 0, np.diff(rows.time, prepend=0)) / unit
    y = rows.y[:, plan.order]
    starts = np.array(plan.starts, np.int64)
    return RoundRows(plan.keys, starts, dt[plan.order], y, rows.u[:, plan.order], _missing(y, starts))


def _missing(y: Array, starts: np.ndarray) -> np.ndarray:
    """Return for each round whether some component of some row is missing."""
    absent = np.isnan(y).any(axis=0)
    if not absent.any():
        return np.zeros(len(starts) - 1, bool)
    return np.logical_or.reduceat(absent, starts[:-1])
