"""Compare the stream's estimates with those of one batch pass, row by row, key by key. No Spark here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

VALUES = ("mean", "covariance", "log_likelihood", "nis")


class Rows(NamedTuple):
    """N estimates in the order of (key, time, the order in which they were applied).

    key (N,): number of the key in `names`; time (N,): microseconds; occurrence (N,): how many rows of the
    same key and time come before; mean (n, N); covariance (n*n, N), or (n, N) where only variances are
    kept; log_likelihood and nis (N,), NaN without a measurement; flagged (N,): whether the row has a flag.
    """

    key: Ints
    time: Ints
    occurrence: Ints
    mean: Floats
    covariance: Floats
    log_likelihood: Floats
    nis: Floats
    flagged: NDArray[np.bool_]

    @property
    def size(self) -> int:
        """Return N."""
        return len(self.key)

    def take(self, index: Ints) -> Rows:
        """Return the rows at `index`."""
        arrays: list[Any] = [array[..., index] for array in self]
        return Rows(*arrays)


class Differences(NamedTuple):
    """The result of a comparison: the largest absolute difference of each column, and rows missing on one side."""

    compared: int
    missing: int
    surplus: int
    largest: dict[str, float]
    unequal: dict[str, int]

    @property
    def worst(self) -> float:
        """Return the largest absolute difference of all; infinite if one side lacks anything."""
        if self.missing or self.surplus or any(self.unequal.values()) or not self.compared:
            return math.inf
        return max(self.largest.values())


class States(NamedTuple):
    """The last states of K keys, in the order of `names`.

    mean (n, K); covariance (n*n, K); log_likelihood, event_time (microseconds), count (of rows): (K,).
    """

    names: list[str]
    mean: Floats
    covariance: Floats
    log_likelihood: Floats
    event_time: Ints
    count: Ints


def key_names(tables: Iterable[pa.Table]) -> list[str]:
    """Return the texts of all keys in the column `key` of some tables, sorted."""
    found: set[str] = set()
    for table in tables:
        found.update(table.column("key").unique().to_pylist())
    return sorted(found)


def rows_of(table: pa.Table, names: list[str], ordered: bool) -> Rows:
    """Read estimates from a table: key, event_time, mean, covariance, log_likelihood, nis, flags.

    Rows of one key and time have no number in the table. With `ordered` the table has them in order of application.
    Else they are sorted by value, so that both sides of a comparison agree.
    """
    key = codes(table.column("key"), names)
    time = _micros(table.column("event_time"))
    mean, covariance = _matrix(table.column("mean")), _matrix(table.column("covariance"))
    log_likelihood, nis = _numbers(table.column("log_likelihood")), _numbers(table.column("nis"))
    flagged = table.column("flags").combine_chunks().is_valid().to_numpy(zero_copy_only=False)
    ties = () if ordered else (nis, log_likelihood, *mean[::-1], *covariance[::-1])
    order = np.lexsort((*ties, time, key))
    rows = Rows(key, time, np.zeros(len(key), np.int64), mean, covariance, log_likelihood, nis, flagged).take(
        order
    )
    return rows._replace(occurrence=_occurrence(rows.key, rows.time))


def by_values(rows: Rows) -> Rows:
    """Put rows of one key and time in the order of their values, as `rows_of` does with unordered ones."""
    ties = (rows.nis, rows.log_likelihood, *rows.mean[::-1], *rows.covariance[::-1])
    return rows.take(np.lexsort((*ties, rows.time, rows.key)))._replace(occurrence=rows.occurrence)


def compare_rows(ours: Rows, wanted: Rows) -> Differences:
    """Compare estimates with the expected ones. Both are in the order of (key, time, values)."""
    left, right = _positions(ours, wanted)
    a, b = ours.take(left), wanted.take(right)
    largest = {name: largest_difference(getattr(a, name), getattr(b, name)) for name in VALUES}
    flags = int(np.count_nonzero(a.flagged != b.flagged))
    return Differences(len(left), wanted.size - len(right), ours.size - len(left), largest, {"flags": flags})


def compare_states(ours: States, wanted: States) -> Differences:
    """Compare the states of keys with the expected ones."""
    there = {name: i for i, name in enumerate(ours.names)}
    pairs = [(there[name], i) for i, name in enumerate(wanted.names) if name in there]
    left, right = (
        (np.array(side, np.int64) for side in zip(*pairs, strict=True)) if pairs else (_none(), _none())
    )
    largest = {
        name: largest_difference(getattr(ours, name)[..., left], getattr(wanted, name)[..., right])
        for name in ("mean", "covariance", "log_likelihood")
    }
    unequal = {
        name: int(np.count_nonzero(getattr(ours, name)[left] != getattr(wanted, name)[right]))
        for name in ("event_time", "count")
    }
    missing, surplus = len(wanted.names) - len(pairs), len(ours.names) - len(pairs)
    return Differences(len(pairs), missing, surplus, largest, unequal)


def largest_difference(a: Floats, b: Floats) -> float:
    """Return the largest absolute difference: NaN equals only NaN, and an infinity only itself."""
    if a.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def codes(column: pa.ChunkedArray, names: list[str]) -> Ints:
    """Return each text's number in `names`."""
    encoded = column.cast(pa.string()).combine_chunks().dictionary_encode()
    number = {name: i for i, name in enumerate(names)}
    places = np.array([number[text] for text in encoded.dictionary.to_pylist()], np.int64)
    return places[encoded.indices.to_numpy(zero_copy_only=False)]


def _positions(ours: Rows, wanted: Rows) -> tuple[Ints, Ints]:
    """Return the positions, on each side, of the rows found on both."""
    both = [np.concatenate(pair) for pair in zip(ours[:3], wanted[:3], strict=True)]
    side = np.repeat([0, 1], [ours.size, wanted.size])
    order = np.lexsort((side, *both[::-1]))
    same = np.ones(len(order) - 1 if len(order) else 0, bool)
    for array in both:
        same &= array[order][1:] == array[order][:-1]
    first = order[:-1][same]
    return first, order[1:][same] - ours.size


def _occurrence(key: Ints, time: Ints) -> Ints:
    """Number the rows within each run of equal (key, time)."""
    new = np.ones(len(key), bool)
    new[1:] = (key[1:] != key[:-1]) | (time[1:] != time[:-1])
    place = np.arange(len(key))
    return place - np.maximum.accumulate(np.where(new, place, 0))


def _micros(column: pa.ChunkedArray) -> Ints:
    zoned = column.cast(pa.timestamp("us", getattr(column.type, "tz", None)))
    return zoned.cast(pa.int64()).combine_chunks().to_numpy(zero_copy_only=False)


def _numbers(column: pa.ChunkedArray) -> Floats:
    return column.combine_chunks().to_numpy(zero_copy_only=False).astype(np.float64)


def _matrix(column: pa.ChunkedArray) -> Floats:
    """Return lists of d numbers each as (d, N)."""
    if len(column) == 0:
        return np.empty((0, 0))
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    return np.ascontiguousarray(values.reshape(len(column), -1).T)


def _none() -> Ints:
    return np.empty(0, np.int64)


def states_of(table: pa.Table) -> States:
    """Read states from a table: key, mean, covariance, log_likelihood, event_time, state_index."""
    table = table.sort_by("key")
    return States(
        table.column("key").to_pylist(),
        _matrix(table.column("mean")),
        _matrix(table.column("covariance")),
        _numbers(table.column("log_likelihood")),
        _micros(table.column("event_time")),
        table.column("state_index").combine_chunks().to_numpy(zero_copy_only=False).astype(np.int64),
    )
