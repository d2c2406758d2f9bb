"""The protocol of learners, and expectation maximisation, over rows distributed in buckets.

A `Learner` learns a model on Spark in `pretrain`: each bucket of rows evaluates theta to a log-likelihood and a vector,
both additive over buckets. `fit` iterates theta with the sums.
The vector may be a gradient (maximum likelihood) or expected sufficient statistics (EM).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kalman.learning.key_fits import FitOutcome, KeyFit, Population, find_row_shortage
from kalman.run import SortedRows
from kalman.types import Array

Evaluation = tuple[float, Array, int]
"""Log-likelihood, a vector (s,), and number of rows used; for several buckets, the sums over the buckets."""
Evaluate = Callable[[Array], Evaluation]
PROMISED = 1e-6
"""EM stops if all later steps are expected to gain at most this log-likelihood per row."""
ROUNDING = 1e-15
"""Share of the log-likelihood below which a gain is rounding."""
CYCLES = 25
"""Maximum number of cycles of EM for each key or group."""
FURTHEST = 64.0
"""Largest steplength of an accelerated cycle."""
SMALLEST = 1e-6
"""EM stops at a cycle that gains less log-likelihood per row than this; a search by scoring continues."""
Sample = Callable[[], Array]
"""Returns the measurements (m, N) of a fixed sample of all rows, a few thousand at most."""


class Fit(NamedTuple):
    """The result of learning: free numbers theta (p,), log-likelihood, iterations, and how the search ended.

    reason     why the search did not converge inside the bounds, None if it did; used: number of rows
    held_out   log-likelihood per held-out row, used to choose a start; None without held-out rows
    covariance (p, p) of theta, and the standard errors of the parameters by name, in their shape; None if not known.
               NaN for a parameter at its bound
    """

    theta: Array
    log_likelihood: float
    iterations: int
    outcome: FitOutcome
    reason: str | None = None
    used: int = 0
    held_out: float | None = None
    covariance: Array | None = None
    errors: Mapping[str, Any] | None = None

    @property
    def converged(self) -> bool:
        """Whether the search ended at a maximum inside the bounds."""
        return self.outcome == FitOutcome.CONVERGED

    def of_rows(self, rows: int) -> "Fit":
        """Return the fit, marked as failed if the fit used far fewer rows than this number."""
        short = find_row_shortage(self.used, rows)
        if short is None or self.outcome > FitOutcome.AT_BOUND:
            return self
        return self._replace(outcome=FitOutcome.FAILED, reason=short)


class Learner(Protocol):
    """The learned parameters of a model and the method; picklable, so that workers can evaluate buckets."""

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
        """Return learned parameters by name, plain numbers and lists for `kalman.build`."""
        ...

    def fit_keys(self, rows: SortedRows, keys: int, unit: float, population: Population | None) -> KeyFit:
        """Return each key's parameters with the population as prior; None means no prior, only the key's rows."""
        ...

    def check(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> tuple[Array, Array]:
        """Return each key's mean NIS (K,) and p-value of Ljung and Box at theta (p, K), NaN where undefined."""
        ...

    @property
    def places(self) -> Mapping[str, Any]:
        """Return the positions in `KeyFit.parameters` of the entries of each parameter, in its shape."""
        ...

    def population(self, fits: Sequence[KeyFit]) -> Population:
        """Return the population of keys fitted without a prior; outlying keys have little weight."""
        ...


def climb(
    evaluate: Evaluate,
    maximise: Callable[[Array, Array], Array],
    start: Array,
    max_iterations: int,
    tolerance: float,
) -> Fit:
    """Return the limit of theta <- maximise(theta, evaluate(theta)'s vector).

    The search has converged when a step gains less than `tolerance` of log-likelihood a row and the rate of decline
    promises less than `PROMISED` a row from all later steps. The best theta is kept: a step of EM never loses
    likelihood, but rounding and bounds may.

    Reference: Dempster, Laird and Rubin (1977).
    """
    theta = np.asarray(start, float)
    value, vector, used = evaluate(theta)
    gain, last = math.inf, math.inf
    for iteration in range(1, max_iterations + 1):
        following = maximise(theta, vector)
        reached, vector, used = evaluate(following)
        last, gain = gain, reached - value
        if gain > 0.0:
            theta, value = following, reached
        least = max(tolerance * used, ROUNDING * abs(value))
        if not gain > least and (gain <= 0.0 or not _extrapolate_gain(last, gain) > PROMISED * used):
            return Fit(theta, value, iteration, FitOutcome.CONVERGED, None, used)
    reason = f"it stopped after {max_iterations} steps, and the last gained {gain:.3g} of log-likelihood"
    return Fit(theta, value, max_iterations, FitOutcome.FAILED, reason, used)


def climb_each(
    evaluate: Callable[[Array, np.ndarray], tuple[Array, Array, Array]],
    maximise: Callable[[Array, Array], Array],
    start: Array,
    cycles: int = CYCLES,
) -> Array:
    """Return the result of EM from `start` (p, J), for each of J keys or groups separately, in cycles of two steps.

    evaluate: (theta (p, k), which (k,) of the J) -> log-likelihood (k,), vector (s, k), rows used (k,). The two steps
    of a cycle also give the limit of all steps if each is the same share of the previous one. The next cycle begins
    there if the log-likelihood is at least as large, else at the end of the steps. A search ends when a cycle gains
    less than `SMALLEST` a row, and fails when its log-likelihood is not finite.

    Reference: Varadhan and Roland (2008), SQUAREM with the steplength S3.
    """
    theta = np.array(start, float)
    active = np.arange(theta.shape[1])
    value, vector, used = evaluate(theta, active)
    for _ in range(cycles):
        sound = np.isfinite(value) & np.isfinite(vector).all(axis=0) & (used > 0)
        active, value, vector, used = active[sound], value[sound], vector[:, sound], used[sound]
        if not len(active):
            break
        here = theta[:, active]
        once = maximise(here, vector)
        between, vector, _ = evaluate(once, active)
        twice = maximise(once, np.where(np.isfinite(vector), vector, 0.0))
        step, bend = once - here, twice - 2.0 * once + here
        length = np.sqrt(_sum_squares(step) / np.maximum(_sum_squares(bend), 1e-300))
        length = np.clip(length, 1.0, FURTHEST)
        ahead = here + 2.0 * length * step + length**2 * bend
        reached, vector, used = evaluate(ahead, active)
        worse = np.flatnonzero(~(reached >= between) | ~np.isfinite(vector).all(axis=0))
        if len(worse):
            ahead[:, worse] = twice[:, worse]
            reached[worse], vector[:, worse], used[worse] = evaluate(twice[:, worse], active[worse])
        better = reached >= value
        theta[:, active] = np.where(better, ahead, here)
        going = better & (reached - value > SMALLEST * used)
        active, value, vector, used = active[going], reached[going], vector[:, going], used[going]
    return theta


def _sum_squares(a: Array) -> Array:
    """Return the sums of squares of columns (p, J), added in a fixed order."""
    total = a[0] * a[0]
    for row in a[1:]:
        total = total + row * row
    return total


def _extrapolate_gain(last: float, gain: float) -> float:
    """Return the sum of all further gains if each is the same share of the previous gain."""
    return math.inf if gain >= last else gain * gain / (last - gain)
