"""Sample and scale the series on which models are tried.

Models are fitted to the first part of each key's rows, and scored on the other rows by one-step prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from kalman.learning.learners import learnable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHARE = 0.7
"""The share of a key's rows to which models are fitted."""
FEWEST = 16
"""The minimum number of rows of a usable key."""
PIECES = 4
"""The number of pieces of a long series to which models are fitted; the filter steps over the time between them."""
MOST_ITERATIONS = 100


class SplitRows(NamedTuple):
    """Sorted rows of K keys, and which rows (N,) are held out: the last rows of each key.

    unit: microseconds per unit of the model's time.
    jump: (N,) rows that do not count, because a piece that was left out lies before them; None means that all count.
    """

    rows: kalman.SortedRows
    keys: int
    held: NDArray[np.bool_]
    unit: float
    jump: NDArray[np.bool_] | None = None

    def take(self, which: NDArray[np.bool_]) -> SplitRows:
        """Return some rows (N,)."""
        jump = None if self.jump is None else self.jump[which]
        return self._replace(rows=self.rows.take(which), held=self.held[which], jump=jump)

    @property
    def first(self) -> kalman.SortedRows:
        """Return the rows to which models are fitted."""
        return self.rows.take(~self.held)


def mark_held_out(key: Ints, keys: int, has_value: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which sorted rows (N,) are held out: each key's rows after SHARE of its rows with a measurement."""
    seen = np.cumsum(has_value)
    counts = np.bincount(key, has_value, minlength=keys)
    before = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return seen - before[key] > np.ceil(SHARE * counts)[key]


class Fitted(NamedTuple):
    """Parameters learned from the first rows: per key (d, K), or by name if all keys have the same values."""

    of_keys: Floats | None
    pooled: Mapping[str, Any]


def fit(definition: Mapping[str, Any], sample: SplitRows) -> Fitted:
    """Learn the parameters in a definition's `learn` from the rows that are not held out.

    Without `learn` nothing is learned.

    Raises:
        kalman.ModelError: the parameters cannot be learned.
    """
    if definition.get("learn") is None:
        return Fitted(None, {})
    learner = learnable(definition)
    rows = sample.first
    if learner.scope == "key":
        return Fitted(learner.fit_keys(rows, sample.keys, sample.unit, None).parameters, {})
    measured = rows.y[:, np.linspace(0, len(rows.key) - 1, 4_000).astype(int)]
    found = learner.fit(
        lambda theta: learner.evaluate(theta, rows, sample.keys, sample.unit),
        lambda: measured,
        MOST_ITERATIONS,
    )
    return Fitted(None, learner.parameters(found.theta))


def predict(definition: Mapping[str, Any], fitted: Fitted, sample: SplitRows) -> Floats:
    """Return the predictive log-likelihood (N,) of each row given the earlier rows.

    It is NaN for a row that has no measurement, is late, does not count, or has a flag (gated, for example).
    """
    model = kalman.build(definition, dict(fitted.pooled) or None)
    states = kalman.initial_states(model, sample.keys)
    if fitted.of_keys is not None:
        states = states._replace(values=model.with_parameters(states.values, fitted.of_keys))
    _, out = kalman.run(model, states, sample.rows, sample.unit)
    absent = np.isnan(sample.rows.y).all(axis=0)
    return np.where(absent if sample.jump is None else absent | sample.jump, np.nan, out.log_likelihood)


def score_held_out(definition: Mapping[str, Any], fitted: Fitted, sample: SplitRows) -> Floats:
    """Return the predictive log-likelihood of the held-out rows (H,), in the order of the rows."""
    return predict(definition, fitted, sample)[sample.held]


class SampledSeries(NamedTuple):
    """Sampled rows of K keys, and the sizes of their series.

    rows: N sorted rows with keys numbered 0 to K - 1, and measurements (m, N) in the files' units.
    keys: (K,) number of each sampled key among all keys.
    middle, size: (m, K); a standard measurement is (y - middle) / size.
    jump: (N,) the first row of each piece but the first of a key.
    """

    rows: kalman.SortedRows
    keys: Ints
    middle: Floats
    size: Floats
    jump: NDArray[np.bool_]

    def standardize(self) -> kalman.SortedRows:
        """Return the rows with measurements of standard size."""
        of = self.rows.key
        return self.rows._replace(y=(self.rows.y - self.middle[:, of]) / self.size[:, of])

    def single(self, unit: float) -> SplitRows:
        """Return each measurement of each key as a separate series: measurement m of key k is key m K + k."""
        rows, count = self.standardize(), len(self.keys)
        m = len(rows.y)
        key = np.concatenate([rows.key + i * count for i in range(m)])
        y = rows.y.reshape(1, -1)
        seen = np.isfinite(y[0])
        rows = kalman.SortedRows(key, np.tile(rows.time, m), y, np.empty((0, y.size)))
        return SplitRows(rows, m * count, mark_held_out(key, m * count, seen), unit, np.tile(self.jump, m))


class Sampled(NamedTuple):
    """A sample: keys (K,) among all keys, indices (N,) of their rows among all rows, and each row's key number (N,)."""

    keys: Ints
    places: Ints
    number: Ints


def sample_rows(
    rows: kalman.SortedRows, keys: int, most_keys: int, most_rows: int, pieces: int = 1
) -> Sampled | None:
    """Return rows of an even sample of the keys with enough values of each measurement.

    None means that no key has enough values.

    Args:
        rows: sorted rows.
        keys: number of keys.
        most_keys: number of keys to sample.
        most_rows: number of rows to use of each key.
        pieces: number of pieces of adjacent rows, spread evenly over each key's rows; one piece is the last rows.
    """
    fit = np.ones(keys, bool)
    for values in rows.y:
        fit &= np.bincount(rows.key, np.isfinite(values), minlength=keys) >= FEWEST
    able = np.flatnonzero(fit)
    if not len(able):
        return None
    chosen = able[np.unique(np.linspace(0, len(able) - 1, min(most_keys, len(able))).round().astype(int))]
    number = np.full(keys, -1)
    number[chosen] = np.arange(len(chosen))
    counts = np.bincount(rows.key, minlength=keys)
    from_end = (np.cumsum(counts)[rows.key] - np.arange(len(rows.key)))[None]
    size = np.maximum(most_rows // pieces, 1)
    first = np.arange(pieces)[:, None] * ((counts - size) // max(pieces - 1, 1))[rows.key]
    taken = ((from_end > first) & (from_end <= first + size)).any(axis=0) | (counts <= most_rows)[rows.key]
    places = np.flatnonzero((number[rows.key] >= 0) & taken)
    return Sampled(chosen, places, number[rows.key[places]])


def sample_series(rows: kalman.SortedRows, keys: int, most_keys: int, most_rows: int) -> SampledSeries | None:
    """Sample rows with `sample_rows`, in PIECES, and compute the sizes of the series."""
    found = sample_rows(rows, keys, most_keys, most_rows, PIECES)
    if found is None:
        return None
    taken = rows.take(found.places)._replace(key=found.number)
    middle, size = _measure_sizes(taken, len(found.keys))
    jump = (np.diff(found.places, prepend=-1) > 1) & (np.diff(found.number, prepend=-1) == 0)
    return SampledSeries(taken, found.keys, middle, size, jump)


def _measure_sizes(rows: kalman.SortedRows, keys: int) -> tuple[Floats, Floats]:
    """Return the median and the size of the changes (m, K) of each series, both robust to outliers."""
    middle, size = np.zeros((len(rows.y), keys)), np.ones((len(rows.y), keys))
    ends = np.searchsorted(rows.key, np.arange(keys + 1))
    for k in range(keys):
        for m, values in enumerate(rows.y[:, ends[k] : ends[k + 1]]):
            known = values[np.isfinite(values)]
            if len(known):
                middle[m, k] = np.median(known)
                size[m, k] = _measure_size(known)
    return middle, size


def _measure_size(values: Floats) -> float:
    """Return the (positive) size of a series' changes, or of its values if it hardly changes."""
    changes = np.diff(values)
    for one in (changes, values - np.median(values)):
        for quantile in (0.5, 0.9):
            found = float(np.quantile(np.abs(one), quantile)) if len(one) else 0.0
            if found > 1e-9 * max(float(np.abs(values).max()), 1e-300):
                return found / 0.6745
    return max(float(np.abs(values).max()), 1e-12)
