"""The filter with the options that batch, stream, replay and offline commands share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.encoding.packets import STATE_INDEX
from jobs.state.encoding.row_order import find_starts
from kalman.evaluation.row_figures import RowFigures
from kalman.run import KeyStates, Outputs, SortedRows, run
from kalman.smoothers.pieces import Pieces, Smoothed
from kalman.smoothers.smooth import smooth_observed
from kalman.types import Filter

Indices = NDArray[np.int64]


class RowFilter(NamedTuple):
    """A filter, the model's unit of time in microseconds, and the names of extra outputs.

    beside: names of extra outputs (`jobs.state.encoding.table_columns.COMPUTED`). All of these except the state's index
    need a second prediction of each row, which is computed once.
    """

    kernel: Filter
    unit: float
    beside: tuple[str, ...] = ()

    def run(self, states: KeyStates, rows: SortedRows) -> tuple[KeyStates, Outputs]:
        """Return the result of `kalman.run`, with the outputs `beside` among its extra outputs."""
        watch = RowFigures(self.kernel, states, rows, self._figures) if self._figures else None
        after, outputs = run(self.kernel, states, rows, self.unit, watch)
        return after, self._add_outputs(states, rows, outputs, {} if watch is None else watch.found())

    def smoothed(self, states: KeyStates, rows: SortedRows) -> tuple[Outputs, Smoothed]:
        """Return the result of `kalman.smoothers.smooth`, with `beside` among the filter's extra outputs.

        Raises:
            ModelError: the filter cannot be smoothed.
        """
        figures = partial(RowFigures, names=self._figures) if self._figures else None
        _, outputs, smoothed, found = smooth_observed(self.kernel, states, rows, self.unit, figures)
        return self._add_outputs(states, rows, outputs, found), smoothed

    def smooth_in_pieces(
        self, states: KeyStates, rows: SortedRows
    ) -> Iterator[tuple[Indices, Outputs, Smoothed]]:
        """Yield the results of `smoothed` in parts, each with the indices (N,) of its rows, with limited memory.

        Raises:
            ModelError: the filter cannot be smoothed.
        """
        figures = partial(RowFigures, names=self._figures) if self._figures else None
        for piece in Pieces(self.kernel, states, rows, self.unit, figures):
            outputs = self._add_outputs(piece.before, piece.taken, piece.outputs, dict(piece.found))
            yield piece.rows, outputs, piece.smoothed

    @property
    def _figures(self) -> list[str]:
        """Return the names of the extra outputs that need a second prediction of each row."""
        return [name for name in self.beside if name != STATE_INDEX]

    def _add_outputs(
        self, states: KeyStates, rows: SortedRows, outputs: Outputs, found: dict[str, NDArray[np.float64]]
    ) -> Outputs:
        """Return the outputs of rows, with the outputs `beside` added; states: the states before the rows."""
        if STATE_INDEX in self.beside:
            found = {**found, STATE_INDEX: compute_state_indices(states, rows, outputs)}
        return outputs._replace(extra={**outputs.extra, **found}) if found else outputs


def compute_state_indices(states: KeyStates, rows: SortedRows, outputs: Outputs) -> NDArray[np.float64]:
    """Return the number of the key's rows in the state after each row (1, N); NaN for a late row.

    states: states before the rows. A flagged row does not enter the state, so it has the number of the previous row.
    """
    applied = np.cumsum((outputs.flag == 0) & ~outputs.late)
    starts = np.flatnonzero(find_starts(rows.key))
    before = np.concatenate([[0], applied])[starts]
    lengths = np.diff(starts, append=len(rows.key))
    number = states.count[rows.key] + applied - np.repeat(before, lengths)
    return np.where(outputs.late, np.nan, number)[None]
