"""Match landed rows with what became of them: refused, waiting, or accepted with an estimate. NumPy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.order import starts_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Part(NamedTuple):
    """N rows of one kind: landed rows, refused rows, waiting rows, or estimates.

    code: number of each row's key; time: microseconds; batch: micro-batch; place: where the row was landed (a version
    or an offset); numbers: (d, N).
    """

    code: Ints
    time: Ints
    batch: Ints
    place: Ints
    numbers: Floats

    def take(self, which: Ints | Bools) -> Part:
        """Return some of the rows."""
        return Part(
            self.code[which],
            self.time[which],
            self.batch[which],
            self.place[which],
            self.numbers[:, which],
        )


class Fates(NamedTuple):
    """What became of N landed rows, E estimates and R refused rows.

    refusal, estimate: (N,) position of each row's refusal and estimate, -1: none
    waits: (N,) which rows wait for the watermark
    batch: (N,) the micro-batch that applied each row, as its estimate says
    doubled, strange: (E,) which estimates come after the first of their row, and which have no row
    baseless: (R,) which refusals are of no landed row
    """

    refusal: Ints
    estimate: Ints
    waits: Bools
    batch: Ints
    doubled: Bools
    strange: Bools
    baseless: Bools


def fates(rows: Part, refused: Part, bad: Bools, waiting: Part, estimates: Part) -> Fates:
    """Match rows with their fates.

    Args:
        rows: landed ones.
        refused: with the leading numbers of a row; of equal rows the ones that were landed last were refused.
        bad: (R,) which refusals are of rows that the filter has taken, and whose key has no valid state.
        waiting: rows that wait at the end.
        estimates: of a key and time, the first micro-batch has the row that was landed first.
    """
    width = len(refused.numbers)
    refusal = paired(
        (rows.code, rows.time, *bits(rows.numbers[:width])),
        (refused.code, refused.time, *bits(refused.numbers)),
        -rows.place,
        -refused.batch,
    )
    left = np.flatnonzero(refusal < 0)
    some = rows.take(left)
    waits = np.zeros(len(rows.code), bool)
    waits[left] = (
        paired(
            (some.code, some.time, *bits(some.numbers)),
            (waiting.code, waiting.time, *bits(waiting.numbers)),
            -some.place,
            -waiting.place,
        )
        >= 0
    )
    expects = np.flatnonzero((refusal < 0) & ~waits)
    estimate = np.full(len(rows.code), -1)
    estimate[expects] = paired(
        (rows.code[expects], rows.time[expects]),
        (estimates.code, estimates.time),
        rows.place[expects],
        estimates.batch,
    )
    free = np.ones(len(estimates.code), bool)
    free[estimate[estimate >= 0]] = False
    has_row = _among((estimates.code, estimates.time), (rows.code[estimate >= 0], rows.time[estimate >= 0]))
    baseless = np.ones(len(refused.code), bool)
    baseless[refusal[refusal >= 0]] = False
    taken = (estimate >= 0) | (refusal >= 0) & _at(bad, refusal)
    batch = np.where(estimate >= 0, _at(estimates.batch, estimate), _at(refused.batch, refusal))
    batch = _filled(batch, taken, rows.place)
    return Fates(refusal, estimate, waits, batch, free & has_row, free & ~has_row, baseless)


def with_corrections(known: Fates, rows: Part, estimates: Part, first: Ints) -> Fates:
    """Return fates by the first estimate of each row as fates by the last one: that of the latest micro-batch.

    estimates: all of them; first: (E,) places of those that are no corrections, by which `known` was made.
    """
    accepted = np.flatnonzero(known.estimate >= 0)
    estimate = known.estimate.copy()
    estimate[accepted] = paired(
        (rows.code[accepted], rows.time[accepted]),
        (estimates.code, estimates.time),
        -rows.place[accepted],
        -estimates.batch,
    )
    doubled, strange = (np.zeros(len(estimates.code), bool) for _ in range(2))
    doubled[first], strange[first] = known.doubled, known.strange
    return known._replace(
        estimate=estimate, batch=_at(estimates.batch, estimate), doubled=doubled, strange=strange
    )


def paired(left: Sequence[Ints], right: Sequence[Ints], left_by: Ints, right_by: Ints) -> Ints:
    """Return the position of each left element's partner among the right ones, or -1.

    Partners agree in all columns; of several, the first by `left_by` belongs to the first by `right_by`, and so on.
    """
    size = len(left_by)
    group = numbered([np.concatenate(pair) for pair in zip(left, right, strict=True)])
    rank = np.concatenate([_rank(group[:size], left_by), _rank(group[size:], right_by)])
    place = numbered([group, rank])
    partner = np.full(int(place.max(initial=-1)) + 1, -1)
    partner[place[size:]] = np.arange(len(right_by))
    return partner[place[:size]]


def numbered(columns: Sequence[Ints]) -> Ints:
    """Return a number for each element (N,), the same for those that agree in all columns."""
    order = np.lexsort(tuple(columns))
    result = np.empty(len(order), np.int64)
    result[order] = np.cumsum(starts_of(*(column[order] for column in columns))) - 1
    return result


def bits(values: Floats) -> Ints:
    """Return the bits of numbers, the same for every NaN."""
    return np.where(np.isnan(values), np.nan, values).view(np.int64)


def _rank(group: Ints, by: Ints) -> Ints:
    """Return the rank (N,) of each element within its group."""
    order = np.lexsort((by, group))
    starts = starts_of(group[order])
    first = np.flatnonzero(starts)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - first[np.cumsum(starts) - 1] if len(order) else 0
    return rank


def _among(these: Sequence[Ints], those: Sequence[Ints]) -> Bools:
    """Return which of these elements are among those."""
    size = len(these[0])
    group = numbered([np.concatenate(pair) for pair in zip(these, those, strict=True)])
    return np.isin(group[:size], group[size:])


def _at(values: NDArray, index: Ints) -> NDArray:
    """Return the values at an index that may be -1, there 0."""
    none = np.zeros(len(index), values.dtype)
    return np.where(index >= 0, values[index], none) if len(values) else none


def _filled(batch: Ints, known: Bools, place: Ints) -> Ints:
    """Return micro-batches, those that are unknown being that of the nearest row that was landed no later."""
    if known.all() or not known.any():
        return np.where(known, batch, 0)
    order = np.lexsort((batch[known], place[known]))
    places, batches = place[known][order], batch[known][order]
    nearest = np.maximum(np.searchsorted(places, place[~known], "right") - 1, 0)
    result = batch.copy()
    result[~known] = batches[nearest]
    return result
