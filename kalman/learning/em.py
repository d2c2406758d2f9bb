"""The protocol of learners, and expectation maximisation, over rows distributed in buckets.

A `Learner` learns a model on Spark in `pretrain`: each bucket of rows evaluates theta to a log-likelihood and a vector,
both additive over buckets, and `fit` iterates theta by the sums.
The vector may be a gradient (maximum likelihood) or expected sufficient statistics (EM).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kalman.learning.key_fits import KeyFit, Population
from kalman.run import SortedRows
from kalman.types import Array

Evaluation = tuple[float, Array, int]
"""Log-likelihood, a vector (s,), and the number of rows used; over several buckets: their sums."""
Evaluate = Callable[[Array], Evaluation]
Sample = Callable[[], Array]
"""Returns the measurements (m, N) of a fixed sample of all rows, a few thousand at most."""


class Fit(NamedTuple):
    """The result of learning: free numbers theta (p,), log-likelihood, iterations, whether it converged.

    held_out   log-likelihood per held-out row, by which a start was chosen; None without held-out rows
    covariance (p, p) of theta, and the standard errors of the parameters by name, in their shape; None if not known
    """

    theta: Array
    log_likelihood: float
    iterations: int
    converged: bool
    held_out: float | None = None
    covariance: Array | None = None
    errors: Mapping[str, Any] | None = None


class Learner(Protocol):
    """The parameters that a model learns, and the method: picklable, so that workers can evaluate buckets."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are learned."""
        ...

    @property
    def scope(self) -> str:
        """Return "pooled", "group" or "key"."""
        ...

    def evaluate(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> Evaluation:
        """Return the evaluation at theta of one bucket's rows."""
        ...

    def fit(self, evaluate: Evaluate, sample: Sample, max_iterations: int) -> Fit:
        """Return the fit to all buckets; `evaluate` returns the sums over them."""
        ...

    def parameters(self, theta: Array) -> Mapping[str, Any]:
        """Return learned parameters by name, plain numbers and lists, as `kalman.build` takes them."""
        ...

    def fit_keys(self, rows: SortedRows, keys: int, unit: float, population: Population | None) -> KeyFit:
        """Return each key's own parameters, with the population as their prior; None: by its own rows alone."""
        ...

    def population(self, fits: Sequence[KeyFit]) -> Population:
        """Return the population of keys that were fitted without a prior; odd keys count little."""
        ...


def climb(
    evaluate: Evaluate,
    maximise: Callable[[Array, Array], Array],
    start: Array,
    max_iterations: int,
    tolerance: float,
) -> Fit:
    """Return the limit of theta <- maximise(theta, evaluate(theta)'s vector).

    It has converged when a step gains less than `tolerance` of the log-likelihood's size. The best theta seen is
    kept: a step of EM never loses, but rounding and bounds may.

    Reference: Dempster, Laird and Rubin (1977).
    """
    theta = np.asarray(start, float)
    value, vector, _ = evaluate(theta)
    for iteration in range(1, max_iterations + 1):
        following = maximise(theta, vector)
        reached, vector, _ = evaluate(following)
        gain = reached - value
        if gain > 0.0:
            theta, value = following, reached
        if not gain > tolerance * max(1.0, abs(value)):
            return Fit(theta, value, iteration, True)
    return Fit(theta, value, max_iterations, False)
