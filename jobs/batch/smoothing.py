"""Smooth the rows of a bucket: each row's state given all rows of its key that the run has read."""

from __future__ import annotations

from collections.abc import Iterator

from jobs.encoding.estimates import diagonal_of_packed, full_of_packed
from jobs.state.expiry import lives_from
from jobs.state.row_filter import Indices, RowFilter
from kalman.run import KeyStates, Outputs, SortedRows
from kalman.smoothers.kinds import smoother, to_smooth
from kalman.types import Filter

PREFIX = "smoothed_"
"""Begins the names of the outputs given all rows, as in the output of `filter --smooth`."""


def smoothed_widths(kernel: Filter, diagonal: bool = False) -> tuple[tuple[str, int], ...]:
    """Return the names of the outputs given all rows, and how many numbers a row has in each.

    diagonal: only variances instead of the whole covariance, as in `EstimateFormat`.

    Raises:
        ModelError: the filter cannot be smoothed.
    """
    n, backwards = len(kernel.states), smoother(kernel)
    extra = backwards.extra(backwards.begin(to_smooth(kernel).initial(1)))
    return (
        (f"{PREFIX}mean", n),
        (f"{PREFIX}covariance", n if diagonal else n * n),
        *((f"{PREFIX}{name}", len(values)) for name, values in extra.items()),
    )


def smoothed(
    row_filter: RowFilter,
    before: KeyStates,
    fresh: KeyStates,
    rows: SortedRows,
    idle: int | None,
    diagonal: bool = False,
) -> Iterator[tuple[Indices, Outputs]]:
    """Yield the filter's outputs, with those given all rows of a key among the extras, and the indices of their rows.

    They come in pieces, so that the memory does not grow with the history, apart from the rows themselves. A key that
    was silent for longer than `idle` begins anew, and what comes before is not smoothed by what comes after.

    Args:
        row_filter: the filter.
        before: states of the K keys before the rows.
        fresh: states in which a new life of each key begins.
        rows: sorted.
        idle: microseconds, None: never.
        diagonal: only variances instead of the whole covariance.
    """
    if idle is not None:
        rows, before = lives_from(row_filter, before, fresh, rows, idle)
    n = len(row_filter.kernel.states)
    kept = diagonal_of_packed(n) if diagonal else full_of_packed(n)
    for indices, outputs, found in row_filter.smoothed_pieces(before, rows):
        extra = {
            f"{PREFIX}mean": found.mean,
            f"{PREFIX}covariance": found.covariance[kept],
            **{f"{PREFIX}{name}": values for name, values in found.extra.items()},
        }
        yield indices, outputs._replace(extra={**outputs.extra, **extra})
