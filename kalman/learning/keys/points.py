"""Likelihood, gradient and information of many keys by the free numbers theta."""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from kalman.learning import constraints
from kalman.learning.key_rows import RoundRows, sort_by_rounds
from kalman.learning.key_search import KeyPoints
from kalman.learning.keys.values import evaluate
from kalman.learning.keys.walks import has_enough_rows, is_compiled
from kalman.learning.tangents import LearnedEntries
from kalman.models.structure import Parameter
from kalman.run import SortedRows
from kalman.types import Array

UNSEEN = 1e-11
"""Information about a number below which its correlations would steer a search by rounding errors alone."""


class Parametrised(Protocol):
    """A model with learned parameters: the filter whose state holds them, and written theta (p,)."""

    @property
    def of(self) -> LearnedEntries: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...
    @property
    def written(self) -> Array: ...


class Points:
    """Evaluations for a search of problems 0 to V - 1; each problem is the rows of one key."""

    def __init__(self, model: Parametrised, rows: RoundRows) -> None:
        self.model, self.rows, self.problems = model, rows, rows.keys
        self._left = rows
        self._entries = np.zeros((len(model.written), rows.keys))

    # Equal values have no likelihood where the variances between them are zero: derivatives there are NaN or inf * 0.
    # The value is minus infinity then, and the search refuses the step.
    @np.errstate(over="ignore", invalid="ignore")
    def point(self, theta: Array, zero: np.ndarray, which: np.ndarray) -> KeyPoints:
        """Return the points of the problems `which`, by theta, or by the variance where it is zero."""
        model = self.model
        self._entries[:, which] = compute_free_entries(model, theta, zero)
        rows = self._select_problems(which)
        values = evaluate(model.of, rows, self._entries[:, rows.number])
        place = np.empty(self.problems, np.int64)
        place[rows.number] = np.arange(rows.keys)
        here = place[which]
        jacobian = _compute_jacobian(model, theta, zero)
        p = len(theta)
        slopes, J = values.gradient[:, here], values.information[:, :, here]
        gradient = np.array([add_in_order(slopes[k] * jacobian[k, i] for k in range(p)) for i in range(p)])
        half = [
            [add_in_order(J[k, j] * jacobian[k, i] for k in range(p)) for j in range(p)] for i in range(p)
        ]
        whole = [
            [add_in_order(half[i][k] * jacobian[k, j] for k in range(p)) for j in range(p)] for i in range(p)
        ]
        value = np.where(np.isfinite(values.log_likelihood[here]), values.log_likelihood[here], -np.inf)
        return KeyPoints(value, gradient, np.array(whole).reshape(p, p, len(which)))

    def _select_problems(self, which: np.ndarray) -> RoundRows:
        """Return the rows of these problems, possibly with the rows of further problems."""
        asked = np.zeros(self.problems, bool)
        asked[which] = True
        kept = asked[self._left.number]
        if np.count_nonzero(kept) < len(which):
            self._left, kept = self.rows, asked[self.rows.number]
        if len(which) < 0.8 * self._left.keys:
            self._left = self._left.at(np.flatnonzero(kept), self._left.number[kept])
        return self._left


def compute_free_entries(model: Parametrised, theta: Array, zero: np.ndarray) -> Array:
    """Return the learned entries (p, J) at theta (p, J)."""
    found: list[Any] = []
    at = 0
    for p in model.parameters:
        entries = constraints.list_free_entries(p)
        values = constraints.compute_entries(p, list(theta[at : at + len(entries)]))
        found += [values[e] for e in entries]
        at += len(entries)
    return np.where(zero, 0.0, np.array(found))


def _compute_jacobian(model: Parametrised, theta: Array, zero: np.ndarray) -> Array:
    """Return the derivatives (p, p, J) of the learned entries by theta, or by the entry itself where `zero` is true."""
    p = len(theta)
    result = np.zeros((p, p, theta.shape[1]))
    at = 0
    for one in model.parameters:
        entries = constraints.list_free_entries(one)
        width = len(entries)
        for row, e in enumerate(entries):
            unit = [float(e == other) for other in range(len(one.value))]
            slopes = constraints.pull_back(one, list(theta[at : at + width]), unit)
            for column, slope in enumerate(slopes):
                result[at + row, at + column] = slope
        at += width
    for i in range(p):
        result[i, i] = np.where(zero[i], 1.0, result[i, i])
    return result


class Problems(Protocol):
    """Evaluations for a search; each problem is the rows of one key."""

    def point(self, theta: Array, zero: np.ndarray, which: np.ndarray) -> KeyPoints:
        """Return the points of the problems `which`, by theta, or by the variance where it is zero."""
        ...


def evaluate_each(
    model: Parametrised, rows: SortedRows, keys: int, unit: float, theta: Array
) -> KeyPoints | None:
    """Return the points of keys 0 to `keys` - 1 at theta (p, keys), zero for a key without rows.

    None where no step is compiled. The rows are those that the filter does not flag whatever the parameters are.
    """
    present, number = np.unique(rows.key, return_inverse=True)
    own = sort_by_rounds(rows._replace(key=number), unit)
    if not len(present) or not has_enough_rows(own) or not is_compiled(model.of, own):
        return None
    none = np.zeros((len(theta), len(present)), bool)
    with np.errstate(all="ignore"):  # the caller refuses numbers that are not finite
        found = Points(model, own).point(theta[:, present], none, np.arange(len(present)))
    whole = KeyPoints(*(np.zeros((*a.shape[:-1], keys)) for a in found))
    for a, here in zip(whole, found, strict=True):
        a[..., present] = here
    return whole


def drop_unseen(vector: Array, p: int) -> Array:
    """Return p gradients and packed information, (p + p(p+1)/2, ...), without information below UNSEEN."""
    i, j = np.tril_indices(p)
    low = ~(vector[p:][i == j] >= UNSEEN)
    return np.concatenate([vector[:p], np.where(low[i] | low[j], 0.0, vector[p:])])


def add_in_order(parts: Iterable[Array]) -> Array:
    """Return the sum of arrays, added in their order."""
    total: Array | None = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None
    return total
