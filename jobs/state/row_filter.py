"""The filter with the options that batch, stream, replay and offline share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.packet_kinds import STATE_INDEX
from kalman.evaluation.row_figures import RowFigures
from kalman.run import KeyStates, Outputs, Round, SortedRows, run
from kalman.types import Filter


class RowFilter(NamedTuple):
    """A filter, the model's unit of time in microseconds, and what it puts out beside its own outputs.

    beside: names of extra outputs (`jobs.encoding.extras.COMPUTED`). Each but the state's index takes a second
    prediction of each row, one for all of them.
    """

    kernel: Filter
    unit: float
    beside: tuple[str, ...] = ()

    def run(self, states: KeyStates, rows: SortedRows) -> tuple[KeyStates, Outputs]:
        """Return what `kalman.run` does, and `beside` among the extra outputs."""
        if not self.beside:
            return run(self.kernel, states, rows, self.unit)
        after, outputs = self.through(
            states, rows, lambda watch: run(self.kernel, states, rows, self.unit, watch)
        )
        return after[0], outputs

    def through(
        self,
        states: KeyStates,
        rows: SortedRows,
        work: Callable[[Callable[[Round], None] | None], tuple[Any, ...]],
    ) -> tuple[tuple[Any, ...], Outputs]:
        """Return what a run gives except for its outputs, the second item, and these with `beside` among the extras.

        work: takes what it is to call with every round, and returns states, outputs and whatever else.
        """
        names = [name for name in self.beside if name != STATE_INDEX]
        watch = RowFigures(self.kernel, states, rows, names) if names else None
        after, outputs, *more = work(watch)
        extra = dict(outputs.extra)
        if watch is not None:
            extra |= watch.found()
        if STATE_INDEX in self.beside:
            extra[STATE_INDEX] = state_indices(states, rows, outputs)
        return (after, *more), outputs._replace(extra=extra)


def state_indices(states: KeyStates, rows: SortedRows, outputs: Outputs) -> NDArray[np.float64]:
    """Return how many of its key's rows are in the state after each row, (1, N); NaN where the row is late.

    states: before the rows. A flagged row is not in the state, so that it has the number of the row before it.
    """
    applied = np.cumsum((outputs.flag == 0) & ~outputs.late)
    firsts = np.ones(len(rows.key), bool)
    firsts[1:] = rows.key[1:] != rows.key[:-1]
    starts = np.flatnonzero(firsts)
    before = np.concatenate([[0], applied])[starts]
    lengths = np.diff(starts, append=len(rows.key))
    number = states.count[rows.key] + applied - np.repeat(before, lengths)
    return np.where(outputs.late, np.nan, number)[None]
