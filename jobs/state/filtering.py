"""Filter rows as `kalman.run` does, and note the normalised innovations where they are asked for."""

from __future__ import annotations

from jobs.encoding.packet_kinds import INNOVATION
from kalman.evaluation.diagnostics import Watch
from kalman.run import KeyStates, Outputs, SortedRows, run
from kalman.types import Filter


def filter_rows(
    kernel: Filter, states: KeyStates, rows: SortedRows, unit: float, watched: bool = False
) -> tuple[KeyStates, Outputs]:
    """Return what `kalman.run` does; with `watched` also `INNOVATION`, for which each row is predicted twice."""
    if not watched:
        return run(kernel, states, rows, unit)
    watch = Watch(kernel, states, rows)
    after, outputs = run(kernel, states, rows, unit, watch)
    return after, outputs._replace(extra={**outputs.extra, INNOVATION: watch.normalised()})
