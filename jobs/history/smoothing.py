"""Smooth the rows of a bucket: each row's state given all rows of its key that the run has read."""

from __future__ import annotations

from jobs.encoding.estimates import full_of_packed
from jobs.encoding.packet_kinds import INNOVATION
from jobs.state.expiry import lives_from
from jobs.state.row_filter import RowFilter
from kalman.evaluation.diagnostics import Watch
from kalman.run import KeyStates, Outputs, SortedRows
from kalman.smoothers.smooth import smooth, smoother
from kalman.types import Filter

PREFIX = "smoothed_"
"""Begins the names of the outputs given all rows, as in the output of `filter --smooth`."""


def smoothed_widths(kernel: Filter) -> tuple[tuple[str, int], ...]:
    """Return the names of the outputs given all rows, and how many numbers a row has in each.

    Raises:
        ModelError: the filter cannot be smoothed.
    """
    n, backwards = len(kernel.states), smoother(kernel)
    extra = backwards.extra(backwards.begin(kernel.initial(1)))
    return (
        (f"{PREFIX}mean", n),
        (f"{PREFIX}covariance", n * n),
        *((f"{PREFIX}{name}", len(values)) for name, values in extra.items()),
    )


def smoothed(
    row_filter: RowFilter, before: KeyStates, fresh: KeyStates, rows: SortedRows, idle: int | None
) -> Outputs:
    """Return the filter's outputs, with those given all rows of a key among the extras.

    A key that was silent for longer than `idle` begins anew, and what comes before is not smoothed by what comes after.

    Args:
        row_filter: the filter.
        before: states of the K keys before the rows.
        fresh: states in which a new life of each key begins.
        rows: sorted.
        idle: microseconds, None: never.
    """
    if idle is not None:
        rows, before = lives_from(row_filter, before, fresh, rows, idle)
    kernel = row_filter.kernel
    watch = Watch(kernel, before, rows) if row_filter.with_innovations else None
    _, outputs, found = smooth(kernel, before, rows, row_filter.unit, watch)
    extra = {
        f"{PREFIX}mean": found.mean,
        f"{PREFIX}covariance": found.covariance[full_of_packed(len(kernel.states))],
        **{f"{PREFIX}{name}": values for name, values in found.extra.items()},
    }
    if watch is not None:
        extra[INNOVATION] = watch.normalised()
    return outputs._replace(extra={**outputs.extra, **extra})
