"""Learn a mixture from history by batch EM, from the start with the best held-out likelihood.

Each key can learn by batch EM, too, with its mixture shrunk towards the pooled mixture.

References: Biernacki, Celeux and Govaert (2003) for short runs before a long one; Smyth (2000) for held-out likelihood.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kalman.learning.em import Evaluate, Evaluation, Fit, Sample, climb
from kalman.learning.key_fits import FitOutcome, KeyFit, Population, build_unexamined
from kalman.linalg.packing import unpack_symmetric
from kalman.mixtures.batch import (
    MixtureSums,
    add_prior_rows,
    maximise_components,
    pool_sums,
    select_usable,
    sort_components,
    sum_rows,
)
from kalman.mixtures.building import Request, compute_least_bounds, request, split
from kalman.mixtures.seeds import draw_seeds
from kalman.run import SortedRows
from kalman.types import Array, ModelError

SHORT = 15
"""Number of iterations from each start before the best start is chosen."""
STRENGTH = 20.0
"""Weight of the pooled mixture in a key's mixture, as a number of rows."""
KEY_ITERATIONS = 50
ALONE_ITERATIONS = 500
AT_REST = 1e-4
"""If no weight changes by this much in an iteration, a key's EM has converged."""
ENOUGH = 5
"""Smallest number of usable rows per number of a mixture; a key with fewer rows has too few rows."""


@dataclass(frozen=True)
class MixtureLearner:
    """Batch EM of a mixture; theta is `Components.flat` (c,).

    `evaluate` also takes a number n followed by the thetas of several starts, (1 + starts * c,). Then every n-th row of
    a bucket is held out, and the vector begins for each theta with log-likelihood and number of the held-out rows.
    """

    definition: Mapping[str, Any]

    @cached_property
    def _asked(self) -> Request:
        return request(self.definition)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are learned."""
        return self._asked.learn

    @property
    def scope(self) -> str:
        """Return "pooled", or "key"."""
        return self._asked.scope

    @property
    def _width(self) -> int:
        asked = self._asked
        return asked.count * (1 + asked.n + asked.family.spreads(asked.m))

    def evaluate(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> Evaluation:
        """Return log-likelihood, expected sufficient statistics and number of usable rows."""
        asked, width = self._asked, self._width
        rows = select_usable(asked, rows)
        if len(theta) == width:
            found = pool_sums(sum_rows(asked, theta, rows, keys))
            return float(found.log_likelihood), _pack_sums(found), int(found.rows)
        every = int(theta[0])
        out = np.arange(len(rows.key)) % every == every - 1
        kept, held = _select_part(rows, ~out), _select_part(rows, out)
        vectors: list[Array] = []
        values: list[float] = []
        for one in theta[1:].reshape(-1, width):
            judged = pool_sums(sum_rows(asked, one, held, keys))
            found = pool_sums(sum_rows(asked, one, kept, keys))
            vectors += [np.array([judged.log_likelihood, judged.rows]), _pack_sums(found)]
            values.append(float(found.log_likelihood))
        return max(values), np.concatenate(vectors), len(kept.key)

    def fit(self, evaluate: Evaluate, sample: Sample, max_iterations: int, tolerance: float = 1e-11) -> Fit:
        """Return the mixture at the end of batch EM, from the written mixture or else from the best of several starts.

        Raises ModelError where no row is usable.
        """
        asked = self._asked
        start, held_out = np.array(asked.start), None
        if not asked.start:
            y = select_usable(asked, _build_rows(sample())).y
            if y.shape[1] == 0:
                raise ModelError("measurement", "no row of a sample is possible", "choose another filter")
            start, held_out = self._chosen(
                evaluate, draw_seeds(asked, y, 1 if asked.count == 1 else asked.starts)
            )
        bounds = compute_least_bounds(asked, start.tolist())
        found = climb(evaluate, lambda a, b: self._step(a, b, bounds), start, max_iterations, tolerance)
        return (
            found
            if asked.start
            else found._replace(theta=sort_components(asked, found.theta), held_out=held_out)
        )

    def _chosen(self, evaluate: Evaluate, starts: Array) -> tuple[Array, float | None]:
        """Return the best of the starts (S, c) after a short run, and its log-likelihood per held-out row."""
        asked = self._asked
        if len(starts) == 1 and asked.count == 1:
            return starts[0], None
        every = round(1.0 / asked.holdout) if asked.holdout else 2**53
        bounds = [compute_least_bounds(asked, start.tolist()) for start in starts]
        held, own = self._split_trials(evaluate, every, starts)
        for _ in range(SHORT):
            starts = np.array(
                [self._step(a, b, c) for a, b, c in zip(starts, own, bounds, strict=True)], float
            )
            held, own = self._split_trials(evaluate, every, starts)
        if held[:, 1].min() == 0:
            return starts[int(np.argmax(own[:, 0]))], None
        scores = held[:, 0] / held[:, 1]
        return starts[int(np.argmax(scores))], float(scores.max())

    def _split_trials(self, evaluate: Evaluate, every: int, starts: Array) -> tuple[Array, Array]:
        """Return log-likelihood and number of the held-out rows (S, 2) for each start, and the other rows' sums."""
        _, vector, _ = evaluate(np.concatenate([[every], starts.ravel()]))
        table = vector.reshape(len(starts), -1)
        return table[:, :2], table[:, 2:]

    def _step(self, theta: Array, vector: Array, bounds: tuple[float, ...]) -> Array:
        return maximise_components(self._asked, theta, self._sums(vector), bounds)

    def _sums(self, vector: Array) -> MixtureSums:
        k, m = self._asked.count, self._asked.n
        cuts = [2, 2 + k, 2 + k + k * m]
        first, weights, means, spreads = np.split(vector, cuts)
        return MixtureSums(first[0], first[1], weights, means, spreads)

    def parameters(self, theta: Array) -> dict[str, Any]:
        """Return all parameters of the mixture by name, with the fixed parameters, for `kalman.build`."""
        mixture = split(self._asked, [float(a) for a in theta])
        family = self._asked.family
        found: dict[str, Any] = {"weights": mixture.weights, family.mean: mixture.means}
        if family.spread:
            found[family.spread] = [unpack_symmetric(a) for a in mixture.spreads]
        return found

    def fit_keys(self, rows: SortedRows, keys: int, unit: float, population: Population | None) -> KeyFit:
        """Return each key's mixture: the mode of a posterior in which the population counts as `STRENGTH` rows.

        A key without rows gets the population's mixture, and a key with few rows stays near this mixture. Components
        keep their order.
        """
        asked = self._asked
        rows = select_usable(asked, rows)
        count = np.bincount(rows.key, minlength=keys)
        if population is None:
            return self._fit_each(rows, keys, count)
        prior = np.asarray(population.mean, float)
        bounds = compute_least_bounds(asked, prior.tolist())
        theta = np.repeat(prior[:, None], keys, axis=1)
        found, moved = sum_rows(asked, theta, rows, keys), np.zeros(keys)
        for _ in range(KEY_ITERATIONS):
            following = maximise_components(
                asked, theta, add_prior_rows(asked, theta, found, prior, STRENGTH), bounds
            )
            moved = np.abs(following[: asked.count] - theta[: asked.count]).max(axis=0)
            theta = following
            found = sum_rows(asked, theta, rows, keys)
        used = found.rows.astype(int)
        own = found.rows / (found.rows + STRENGTH)
        return _judge_fits(theta, found.log_likelihood, used, moved < AT_REST, own < 0.5)._replace(own=own)

    def _fit_each(self, rows: SortedRows, keys: int, count: np.ndarray) -> KeyFit:
        """Return each key's mixture without a prior; NaN for a key without usable rows."""
        theta, values = np.full((self._width, keys), np.nan), np.zeros(keys)
        rested = np.ones(keys, bool)
        for key in np.flatnonzero(count).tolist():
            own = rows.take(rows.key == key)
            own = own._replace(key=np.zeros_like(own.key))
            found = self._fit_one(own)
            theta[:, key], values[key], rested[key] = found.theta, found.log_likelihood, found.converged
        return _judge_fits(theta, values, count, rested, count < ENOUGH * self._width)

    def _fit_one(self, rows: SortedRows) -> Fit:
        return self.fit(lambda theta: self.evaluate(theta, rows, 1, 1.0), lambda: rows.y, ALONE_ITERATIONS)

    def check(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> tuple[Array, Array]:
        """Return NaN for each figure, since a mixture has no series of innovations."""
        return np.full(keys, np.nan), np.full(keys, np.nan)

    @property
    def places(self) -> Mapping[str, Any]:
        """Return the positions in `KeyFit.parameters` of the entries of each parameter."""
        return dict(self.parameters(np.arange(self._width, dtype=float)))

    def population(self, fits: Sequence[KeyFit]) -> Population:
        """Return the mixture of all keys' rows, provided that the components of the keys correspond.

        Raises ModelError if no key has a mixture.
        """
        theta = np.concatenate([one.theta for one in fits], axis=1)
        used = np.concatenate([one.used for one in fits]).astype(float)
        sound = np.isfinite(theta).all(axis=0) & (used > 0)
        if not sound.any():
            raise ModelError("measurement", "no row of a sample of keys is possible", "choose another filter")
        theta, weight = theta[:, sound], used[sound] / used[sound].sum()
        mean = theta @ weight
        away = theta - mean[:, None]
        return Population(mean, (weight * away) @ away.T, len(weight))


def _judge_fits(theta: Array, values: Array, used: np.ndarray, rested: np.ndarray, few: np.ndarray) -> KeyFit:
    """Return fits with their outcomes, given masks of keys whose EM came to rest and of keys with few rows."""
    found = build_unexamined(theta, theta, values, used)
    for key in np.flatnonzero(few | ~rested).tolist():
        found.outcome[key] = FitOutcome.TOO_FEW_ROWS if few[key] else FitOutcome.FAILED
        found.reason[key] = f"{used[key]} usable rows" if few[key] else "EM did not come to rest"
    return found


def build_mixture_learner(definition: Mapping[str, Any]) -> MixtureLearner:
    """Return the learner of a mixture definition. Raises ModelError."""
    result = MixtureLearner(definition)
    _ = result.names  # raises here, before the cluster is used
    return result


def _pack_sums(found: MixtureSums) -> Array:
    return np.concatenate([[found.log_likelihood, found.rows], found.weights, found.means, found.spreads])


def _select_part(rows: SortedRows, mask: np.ndarray) -> SortedRows:
    return SortedRows(rows.key[mask], rows.time[mask], rows.y[:, mask], rows.u[:, mask])


def _build_rows(y: Array) -> SortedRows:
    zeros = np.zeros(y.shape[1], np.int64)
    return SortedRows(zeros, zeros, np.asarray(y, float), np.empty((0, y.shape[1])))
