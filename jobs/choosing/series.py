"""The rows that structures are tried on: a sample of keys, each measurement of each key brought to standard size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.choosing.held_out import Sample, enough, held_out

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Series(NamedTuple):
    """The sampled rows of K keys and their sizes.

    rows   (N rows) sorted, keys numbered 0 to K - 1, measurements (m, N) in the files' units
    keys   (K,) number of each key among all
    middle, size (m, K): a standard measurement is (y - middle) / size
    """

    rows: kalman.SortedRows
    keys: Ints
    middle: Floats
    size: Floats

    def standard(self) -> kalman.SortedRows:
        """Return the rows with measurements of standard size."""
        of = self.rows.key
        return self.rows._replace(y=(self.rows.y - self.middle[:, of]) / self.size[:, of])

    def single(self, unit: float) -> Sample:
        """Return each measurement of each key as a series of its own: measurement m of key k is key m K + k."""
        rows, count = self.standard(), len(self.keys)
        m = len(rows.y)
        key = np.concatenate([rows.key + i * count for i in range(m)])
        y = rows.y.reshape(1, -1)
        seen = np.isfinite(y[0])
        rows = kalman.SortedRows(key, np.tile(rows.time, m), y, np.empty((0, y.size)))
        return Sample(rows, m * count, held_out(key, m * count, seen), unit)


class Sampled(NamedTuple):
    """A sample: keys (K,) among all, places (N,) of their rows among all, and the number (N,) of each row's key."""

    keys: Ints
    places: Ints
    number: Ints


def sample_rows(rows: kalman.SortedRows, keys: int, most_keys: int, most_rows: int) -> Sampled | None:
    """Return the last rows of an even sample of the keys whose measurements all have enough values; None: no key has.

    Args:
        rows: sorted.
        keys: how many there are.
        most_keys: to sample.
        most_rows: of each key.
    """
    fit = np.ones(keys, bool)
    for values in rows.y:
        fit &= enough(rows.key, keys, np.isfinite(values))
    able = np.flatnonzero(fit)
    if not len(able):
        return None
    chosen = able[np.unique(np.linspace(0, len(able) - 1, min(most_keys, len(able))).round().astype(int))]
    number = np.full(keys, -1)
    number[chosen] = np.arange(len(chosen))
    ends = np.searchsorted(rows.key, np.arange(keys), "right")
    from_end = ends[rows.key] - np.arange(len(rows.key))
    places = np.flatnonzero((number[rows.key] >= 0) & (from_end <= most_rows))
    return Sampled(chosen, places, number[rows.key[places]])


def sample_series(rows: kalman.SortedRows, keys: int, most_keys: int, most_rows: int) -> Series | None:
    """Return the sample of `sample_rows` with the sizes of its series."""
    found = sample_rows(rows, keys, most_keys, most_rows)
    if found is None:
        return None
    taken = rows.take(found.places)._replace(key=found.number)
    middle, size = _sizes(taken, len(found.keys))
    return Series(taken, found.keys, middle, size)


def _sizes(rows: kalman.SortedRows, keys: int) -> tuple[Floats, Floats]:
    """Return median, and the size of the changes (m, K), both robust to outliers."""
    middle, size = np.zeros((len(rows.y), keys)), np.ones((len(rows.y), keys))
    ends = np.searchsorted(rows.key, np.arange(keys + 1))
    for k in range(keys):
        for m, values in enumerate(rows.y[:, ends[k] : ends[k + 1]]):
            known = values[np.isfinite(values)]
            if len(known):
                middle[m, k] = np.median(known)
                size[m, k] = _size(known)
    return middle, size


def _size(values: Floats) -> float:
    """Return a positive size of a series' changes, or of its values where it hardly changes."""
    changes = np.diff(values)
    for one in (changes, values - np.median(values)):
        for quantile in (0.5, 0.9):
            found = float(np.quantile(np.abs(one), quantile)) if len(one) else 0.0
            if found > 1e-9 * max(float(np.abs(values).max()), 1e-300):
                return found / 0.6745
    return max(float(np.abs(values).max()), 1e-12)
