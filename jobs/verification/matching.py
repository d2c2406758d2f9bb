"""Match each landed row with its outcome: refused, waiting, or accepted with an estimate. Uses only NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.encoding.row_order import find_starts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class CodedRows(NamedTuple):
    """N rows of one kind: landed rows, refused rows, waiting rows, or estimates.

    code: the number of each row's key.
    time: microseconds.
    batch: the micro-batch.
    place: the version or offset at which the row landed.
    numbers: (d, N) values.
    """

    code: Ints
    time: Ints
    batch: Ints
    place: Ints
    numbers: Floats

    def take(self, which: Ints | Bools) -> CodedRows:
        """Return the rows that `which` selects."""
        return CodedRows(*(one[which] for one in self[:4]), numbers=self.numbers[:, which])

    def identify(self, width: int | None = None) -> tuple[Ints, ...]:
        """Return what tells rows apart: key, time, and the bits of the first `width` numbers."""
        return self.code, self.time, *convert_to_bits(self.numbers[:width])


class Fates(NamedTuple):
    """Outcomes of N landed rows, E estimates and R refused rows.

    refusal, estimate: (N,) position of each row's refusal and of its estimate; -1 means that it has none.
    waits: (N,) whether each row waits for the watermark.
    batch: (N,) the micro-batch that applied each row, according to its estimate.
    doubled: (E,) whether each estimate follows another estimate of its row.
    strange: (E,) whether each estimate has no landed row.
    baseless: (R,) whether each refusal has no landed row.
    """

    refusal: Ints
    estimate: Ints
    waits: Bools
    batch: Ints
    doubled: Bools
    strange: Bools
    baseless: Bools


def match_fates(
    rows: CodedRows, refused: CodedRows, bad: Bools, waiting: CodedRows, estimates: CodedRows
) -> Fates:
    """Match rows with their outcomes.

    Args:
        rows: landed rows.
        refused: refused rows, with the first numbers of a row. Of several equal rows, the last landed ones were
            refused.
        bad: (R,) whether the filter applied the refused row and left the key without a valid state.
        waiting: rows that wait at the segment's end.
        estimates: estimates. For a key and time, the earliest micro-batch has the row that landed first.
    """
    width = len(refused.numbers)
    refusal = pair_elements(rows.identify(width), refused.identify(), -rows.place, -refused.batch)
    left = np.flatnonzero(refusal < 0)
    some = rows.take(left)
    waits = np.zeros(len(rows.code), bool)
    waits[left] = pair_elements(some.identify(), waiting.identify(), -some.place, -waiting.place) >= 0
    expects = np.flatnonzero((refusal < 0) & ~waits)
    estimate = np.full(len(rows.code), -1)
    estimate[expects] = pair_elements(
        (rows.code[expects], rows.time[expects]),
        (estimates.code, estimates.time),
        rows.place[expects],
        estimates.batch,
    )
    free = np.ones(len(estimates.code), bool)
    free[estimate[estimate >= 0]] = False
    has_row = _are_among(
        (estimates.code, estimates.time), (rows.code[estimate >= 0], rows.time[estimate >= 0])
    )
    baseless = np.ones(len(refused.code), bool)
    baseless[refusal[refusal >= 0]] = False
    taken = (estimate >= 0) | (refusal >= 0) & _take_or_zero(bad, refusal)
    batch = np.where(
        estimate >= 0, _take_or_zero(estimates.batch, estimate), _take_or_zero(refused.batch, refusal)
    )
    batch = _fill_batches(batch, taken, rows.place)
    return Fates(refusal, estimate, waits, batch, free & has_row, free & ~has_row, baseless)


def apply_corrections(known: Fates, rows: CodedRows, estimates: CodedRows, first: Ints) -> Fates:
    """Match each row with its last estimate, from the latest micro-batch, instead of its first estimate.

    known: outcomes by the first estimates.
    estimates: all estimates.
    first: (E,) positions of the uncorrected estimates.
    """
    accepted = np.flatnonzero(known.estimate >= 0)
    estimate = known.estimate.copy()
    estimate[accepted] = pair_elements(
        (rows.code[accepted], rows.time[accepted]),
        (estimates.code, estimates.time),
        -rows.place[accepted],
        -estimates.batch,
    )
    doubled, strange = (np.zeros(len(estimates.code), bool) for _ in range(2))
    doubled[first], strange[first] = known.doubled, known.strange
    return known._replace(
        estimate=estimate, batch=_take_or_zero(estimates.batch, estimate), doubled=doubled, strange=strange
    )


def pair_elements(left: Sequence[Ints], right: Sequence[Ints], left_by: Ints, right_by: Ints) -> Ints:
    """Return the position of each left element's partner among the right elements; -1 if it has no partner.

    Partners agree in all columns. If several elements agree, the first left one by `left_by` is the partner of the
    first right one by `right_by`, the second left one that of the second right one, and so on.
    """
    size = len(left_by)
    group = number_elements([np.concatenate(pair) for pair in zip(left, right, strict=True)])
    rank = np.concatenate([_rank(group[:size], left_by), _rank(group[size:], right_by)])
    place = number_elements([group, rank])
    partner = np.full(int(place.max(initial=-1)) + 1, -1)
    partner[place[size:]] = np.arange(len(right_by))
    return partner[place[:size]]


def number_elements(columns: Sequence[Ints]) -> Ints:
    """Return a number for each element (N,), which is the same for elements that agree in all columns."""
    order = np.lexsort(tuple(columns))
    result = np.empty(len(order), np.int64)
    result[order] = np.cumsum(find_starts(*(column[order] for column in columns))) - 1
    return result


def convert_to_bits(values: Floats) -> Ints:
    """Return the bits of numbers; all NaNs get the same bits."""
    return np.where(np.isnan(values), np.nan, values).view(np.int64)


def _rank(group: Ints, by: Ints) -> Ints:
    """Return the rank (N,) of each element within its group."""
    order = np.lexsort((by, group))
    starts = find_starts(group[order])
    first = np.flatnonzero(starts)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - first[np.cumsum(starts) - 1] if len(order) else 0
    return rank


def _are_among(these: Sequence[Ints], those: Sequence[Ints]) -> Bools:
    """Return whether each element of `these` is among the elements of `those`."""
    size = len(these[0])
    group = number_elements([np.concatenate(pair) for pair in zip(these, those, strict=True)])
    return np.isin(group[:size], group[size:])


def _take_or_zero(values: NDArray, index: Ints) -> NDArray:
    """Return the values at the indices, with 0 for an index of -1."""
    none = np.zeros(len(index), values.dtype)
    return np.where(index >= 0, values[index], none) if len(values) else none


def _fill_batches(batch: Ints, known: Bools, place: Ints) -> Ints:
    """Fill unknown micro-batches with the micro-batch of the nearest row that did not land later."""
    if known.all() or not known.any():
        return np.where(known, batch, 0)
    order = np.lexsort((batch[known], place[known]))
    places, batches = place[known][order], batch[known][order]
    nearest = np.maximum(np.searchsorted(places, place[~known], "right") - 1, 0)
    result = batch.copy()
    result[~known] = batches[nearest]
    return result
