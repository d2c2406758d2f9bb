"""The filter with the options that batch, stream, replay and offline share."""

from __future__ import annotations

from typing import NamedTuple

from jobs.encoding.packet_kinds import INNOVATION
from kalman.evaluation.diagnostics import Watch
from kalman.run import KeyStates, Outputs, SortedRows, run
from kalman.types import Filter


class RowFilter(NamedTuple):
    """A filter, the model's unit of time in microseconds, and whether it puts out normalised innovations too.

    Innovations take a second prediction of each row.
    """

    kernel: Filter
    unit: float
    with_innovations: bool = False

    def run(self, states: KeyStates, rows: SortedRows) -> tuple[KeyStates, Outputs]:
        """Return what `kalman.run` does, and `INNOVATION` among the extra outputs if the filter is to have it."""
        if not self.with_innovations:
            return run(self.kernel, states, rows, self.unit)
        watch = Watch(self.kernel, states, rows)
        after, outputs = run(self.kernel, states, rows, self.unit, watch)
        return after, outputs._replace(extra={**outputs.extra, INNOVATION: watch.normalised()})
