"""Compute the speed of the streams from the times of micro-batches in their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from demo.killer import Checkpoint, Killed

if TYPE_CHECKING:
    from demo.check import MicroBatch


class Rate(NamedTuple):
    """Rows that a stream estimated in its uninterrupted micro-batches, and their seconds."""

    rows: int
    seconds: float
    best: float

    @property
    def rows_per_second(self) -> float:
        """Return rows per second over all of them."""
        return self.rows / self.seconds if self.seconds > 0 else 0.0


def busy_rate(
    checkpoint: Checkpoint, batches: Mapping[int, MicroBatch], killed: Mapping[str, Killed]
) -> Rate:
    """Measure each micro-batch from its plan to its commit. The micro-batch in which the driver was killed is left out:
    its time includes the pause.
    """
    planned, committed = checkpoint.times("offsets"), checkpoint.times("commits")
    interrupted = killed[checkpoint.model].batch if checkpoint.model in killed else None
    whole = {
        n: committed[n] - planned[n] for n in committed if n in planned and n in batches and n != interrupted
    }
    rows = sum(batches[n].rows for n in whole)
    best = max((batches[n].rows / seconds for n, seconds in whole.items() if seconds > 0), default=0.0)
    return Rate(rows, sum(whole.values()), best)
