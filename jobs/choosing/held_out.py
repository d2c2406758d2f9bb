"""Fit models on the first part of each key's rows, and score the rest by one-step prediction."""

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
"""Share of a key's rows for fitting a model."""
FEWEST = 16
"""Minimum number of rows of a key that can be used."""
MOST_ITERATIONS = 100


class SplitRows(NamedTuple):
    """Sorted rows of K keys, and which rows (N,) are held out: the last rows of each key.

    unit: microseconds per unit of the model's time.
    """

    rows: kalman.SortedRows
    keys: int
    held: NDArray[np.bool_]
    unit: float

    @property
    def first(self) -> kalman.SortedRows:
        """Return the rows for fitting."""
        return self.rows.take(~self.held)


def mark_held_out(key: Ints, keys: int, has_value: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which sorted rows (N,) are held out: each key's rows after SHARE of its rows with a measurement."""
    seen = np.cumsum(has_value)
    counts = np.bincount(key, has_value, minlength=keys)
    before = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return seen - before[key] > np.ceil(SHARE * counts)[key]


def mark_usable_keys(key: Ints, keys: int, has_value: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which keys (K,) have enough measurements to be used."""
    return np.bincount(key, has_value, minlength=keys) >= FEWEST


class Fitted(NamedTuple):
    """Parameters learned from the first rows: per key (d, K), or None and one value for all keys by name."""

    of_keys: Floats | None
    pooled: Mapping[str, Any]


def fit(definition: Mapping[str, Any], sample: SplitRows) -> Fitted:
    """Learn the parameters in a definition's `learn` from the rows that are not held out; nothing without `learn`.

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

    NaN where a row has no measurement, is late, or is flagged (gated, for example).
    """
    model = kalman.build(definition, dict(fitted.pooled) or None)
    states = kalman.initial_states(model, sample.keys)
    if fitted.of_keys is not None:
        states = states._replace(values=model.with_parameters(states.values, fitted.of_keys))
    _, out = kalman.run(model, states, sample.rows, sample.unit)
    return np.where(np.isnan(sample.rows.y).all(axis=0), np.nan, out.log_likelihood)


def score_held_out(definition: Mapping[str, Any], fitted: Fitted, sample: SplitRows) -> Floats:
    """Return the predictive log-likelihood of the held-out rows (H,), in the order of the rows."""
    return predict(definition, fitted, sample)[sample.held]
