"""Places where a forward pass keeps states, so that a backward pass over long histories takes little memory.

The rounds of a run (`kalman.run`) are cut into segments. The forward pass keeps the states before each segment, its
*checkpoints*; the backward pass filters one segment after another again, from the last to the first. With as many
segments as a segment has rows, r rows of a key take memory for about 2 sqrt(r) states, and every row outside the last
segment is filtered twice.

References: Griewank (1992), here with two levels; Chen, Xu, Zhang and Guestrin (2016).
"""

from typing import NamedTuple

import numpy as np

from kalman.filters.state_layout import BLOCK
from kalman.run import Integers


class Footprint(NamedTuple):
    """Bytes of a smoother: per row and round of the current segment, per state of a checkpoint, and per key."""

    row: int
    round: int
    state: int
    key: int


class KeySection(NamedTuple):
    """Keys that are smoothed together: positions `first` up to `stop` among the keys that have rows.

    bounds: the round with which each segment begins, and at the end the number of rounds
    """

    first: int
    stop: int
    bounds: list[int]


class Lengths:
    """Number of keys with a row in each round, from the number of rows of each of K keys."""

    def __init__(self, counts: Integers) -> None:
        """Prepare for keys that have at least one row each."""
        self._sorted = np.sort(counts)
        self._below = np.concatenate([[0], np.cumsum(self._sorted)])
        steps = np.unique(self._sorted)
        self._steps = np.concatenate([[0], steps])
        self._rows_at_steps = self.count_rows_before(self._steps)
        self.keys, self.rows, self.rounds = len(counts), int(counts.sum()), int(steps[-1])

    def active(self, rounds: Integers) -> Integers:
        """Return the number of keys with a row in each of these rounds."""
        return self.keys - np.searchsorted(self._sorted, rounds, "right")

    def count_rows_before(self, rounds: Integers) -> Integers:
        """Return the number of rows before each of these rounds."""
        ended = np.searchsorted(self._sorted, rounds, "right")
        return self._below[ended] + rounds * (len(self._sorted) - ended)

    def round_of(self, rows: Integers) -> Integers:
        """Return the round of each of these rows, numbers in the order of the rounds."""
        step = np.searchsorted(self._rows_at_steps, rows, "right") - 1
        first = self._steps[step]
        return first + (rows - self._rows_at_steps[step]) // np.maximum(self.active(first), 1)

    def bounds(self, segments: int) -> Integers:
        """Return the bounds of about `segments` segments of similar numbers of rows."""
        starts = np.arange(segments) * self.rows // segments
        return np.concatenate([np.unique(self.round_of(starts)), [self.rounds]])

    def bytes(self, bounds: Integers, footprint: Footprint) -> int:
        """Return the bytes needed to smooth in these segments."""
        segments = np.diff(self.count_rows_before(bounds)) * footprint.row + np.diff(bounds) * footprint.round
        kept = int(self.active(bounds[:-1]).sum())
        return int(segments.max()) + kept * footprint.state + self.keys * footprint.key


def split_sections(counts: Integers, footprint: Footprint, room: float) -> list[KeySection]:
    """Return the sections in which to smooth keys with these numbers of rows (K,), each at least one, in `room` bytes.
    To fit, first fewer keys are smoothed at a time, which costs nothing while they fill a block. Then checkpoints are
    added. A single key that needs more than `room` gets the least possible memory.
    """
    result: list[KeySection] = []
    waiting = [(0, len(counts))] if len(counts) else []
    while waiting:
        first, stop = waiting.pop()
        bounds = _find_bounds(Lengths(counts[first:stop]), footprint, room)
        if bounds is None:
            middle = (first + stop) // 2
            waiting += [(middle, stop), (first, middle)]
        else:
            result.append(KeySection(first, stop, bounds.tolist()))
    return result


def _find_bounds(lengths: Lengths, footprint: Footprint, room: float) -> Integers | None:
    """Return the bounds of the fewest segments that fit, or None if fewer keys must be smoothed together."""
    best, least, segments = None, np.inf, 1
    while segments <= lengths.rounds:
        bounds = lengths.bounds(segments)
        needed = lengths.bytes(bounds, footprint)
        if needed <= room:
            return bounds
        if needed >= least or (segments == 1 and lengths.keys > BLOCK):
            break
        best, least, segments = bounds, needed, 2 * segments
    return best if lengths.keys == 1 else None
