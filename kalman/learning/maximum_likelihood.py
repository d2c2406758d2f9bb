"""Maximum likelihood of a linear model's parameters, pooled over all keys or for each key.

The log-likelihood is the filter's, with an exact gradient (`kalman.learning.score`) and unconstrained variables
(`kalman.learning.constraints`). Scoring finds the pooled maximum (`kalman.learning.scoring`) and, with many keys at
once, each key's maximum (`kalman.learning.key_search`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kalman.building.registry import build
from kalman.filters.linear import LinearFilter
from kalman.learning.bounds import search_within
from kalman.learning.em import Evaluate, Evaluation, Fit, Sample
from kalman.learning.fisher_information import compute_fisher_information
from kalman.learning.free_numbers import FreeNumbers, constrain_parameters, follows_scale, parse_request
from kalman.learning.key_fits import FitOutcome, KeyFit, Population
from kalman.learning.key_learning import Climbed, Model, build_key_model, fit_each
from kalman.learning.keys.points import drop_unseen, evaluate_each
from kalman.learning.optimisers import fit
from kalman.learning.score import score
from kalman.learning.scoring import Point, build_point, is_finite, maximise
from kalman.learning.tangents import list_learned_entries
from kalman.models import learned_entries
from kalman.models.structures import Parameter
from kalman.run import SortedRows
from kalman.types import Array, ModelError

STEP = 1e-5
"""Step of a free number for the differences of the information."""


class KeyEvaluations(NamedTuple):
    """Log-likelihood (K,), gradient and packed information (p + p(p+1)/2, K), and number of rows (K,) of K keys."""

    value: Array
    vector: Array
    used: np.ndarray


@dataclass(frozen=True)
class Learning(FreeNumbers):
    """Maximum likelihood of a linear model in free numbers theta (p,); a `kalman.learning.em.Learner`."""

    definition: Mapping[str, Any]
    names: tuple[str, ...]
    scope: str
    begin: Mapping[str, Any]
    """Initial values that replace the written values, by name of the parameter."""

    @cached_property
    def filter(self) -> LinearFilter:
        """The filter with the written parameters."""
        return _build_linear_filter({**self.definition, "learn": None}, self.begin)

    @cached_property
    def own_names(self) -> tuple[str, ...]:
        """Names of the learned parameters of the structure and R; the state of `each` holds them."""
        return tuple(name for name in self.names if name not in learned_entries.INITIAL)

    @cached_property
    def entries_of_matrices(self) -> tuple[tuple[str, int, int], ...]:
        """The entries of matrices that are learned: letter, row, column."""
        found = [
            learned_entries.parse_entry_name(p.name)
            for p in learned_entries.list_chosen_parameters(self.definition)
        ]
        return tuple(a for a in found if a is not None)

    @cached_property
    def each(self) -> LinearFilter:
        """The model with its learned parameters in the state, one filter for all values of the search."""
        learn = {"parameters": list(self.own_names), "scope": "key"}
        return _build_linear_filter({**self.definition, "learn": learn}, self.begin)

    @cached_property
    def learned(self) -> tuple[Parameter, ...]:
        """The learned parameters with their constraints: the structure's, R and entries of H, then the initial ones."""
        return constrain_parameters(self.definition, self.each.parameters, self.own_names)

    @property
    def measurements(self) -> int:
        """Number of components of a row."""
        return self.filter.measurements

    def follows_scale(self, parameter: Parameter, entry: int) -> float:
        """Return how a free number changes with the logarithm of all noise."""
        return follows_scale(self.filter, parameter, entry)

    def compute_gradient(
        self, theta: Array, rows: SortedRows, keys: int, unit: float
    ) -> tuple[float, Array, int]:
        """Return log-likelihood, its gradient (p,) by theta, and the number of rows, summed over keys.

        The sums are exactly rounded, so that they do not depend on the order of the keys.
        """
        value, slopes, used = self.compute_slopes(theta, rows, keys, unit)
        return value, np.array(self.pull_back_slopes(theta.tolist(), slopes), float), int(used.sum())

    def compute_slopes(
        self,
        theta: Array,
        rows: SortedRows,
        keys: int,
        unit: float,
        more: tuple[tuple[str, int, int], ...] = (),
    ) -> tuple[float, list[float], np.ndarray]:
        """Return log-likelihood, its derivatives by the packed learned entries, each key's rows (keys,).

        more: further entries of F and H, whose derivatives come last.
        """
        result = score(self.each, self.own_names, rows, keys, unit, self.begun(theta, keys), more)
        wanted = len(result.gradient) - len(more)
        parts = [result.gradient[:wanted]]
        parts += [result.mean] if "initial.mean" in self.names else []
        parts += [result.covariance] if "initial.covariance" in self.names else []
        parts.append(result.gradient[wanted:])
        slopes = [math.fsum(row) for part in parts for row in part.tolist()]
        return math.fsum(result.log_likelihood.tolist()), slopes, result.used

    def evaluate(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> Evaluation:
        """Return log-likelihood, a vector, and the number of rows, summed over keys.

        The vector is the gradient (p,) and the packed information (p(p+1)/2), the sums exactly rounded.
        """
        walked = self.evaluate_each(np.repeat(theta[:, None], keys, axis=1), rows, keys, unit)
        if walked is not None:
            sums = [math.fsum(row) for row in walked.vector.tolist()]
            vector = drop_unseen(np.array(sums), len(theta))
            return math.fsum(walked.value.tolist()), vector, int(walked.used.sum())
        value, gradient, used = self.compute_gradient(theta, rows, keys, unit)
        moved = [theta, *(theta + STEP * row for row in np.eye(len(theta)))]
        states = [self.begun(one, keys) for one in moved[: len(moved) if self.names else 0]]
        steps = np.full(len(theta), STEP)
        packed = compute_fisher_information(self.each, rows, keys, unit, states, steps) if states else []
        sums = [math.fsum(row) for row in np.asarray(packed).tolist()]
        return value, np.array([*gradient, *sums]), used

    def evaluate_each(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> KeyEvaluations | None:
        """Return the evaluations of keys at theta (p, keys) by compiled code.

        None where nothing is compiled, and where a row fails, since another pass must then leave out flagged rows.
        """
        if not self.names or len(self.own_names) < len(self.names):
            return None
        rows = self.key_model.usable(rows)
        found = evaluate_each(self.key_model, rows, keys, unit, theta)
        if found is None:
            return None
        vector = np.array([*found.gradient, *found.information[np.tril_indices(len(theta))]])
        if not (np.isfinite(found.value).all() and np.isfinite(vector).all()):
            return None
        return KeyEvaluations(found.value, vector, np.bincount(rows.key, minlength=keys))

    def fit(self, evaluate: Evaluate, sample: Sample, max_iterations: int) -> Fit:
        """Return the theta of the greatest log-likelihood, searched from the written parameters."""

        def point(theta: Array) -> Point:
            return build_point(theta, *evaluate(theta))

        begin = point(self.start)
        if not len(self.start):
            return Fit(self.start, begin.value, 0, FitOutcome.CONVERGED, used=begin.used)
        if not is_finite(begin):
            return fit(lambda theta: point(theta)[1:3], self.start, max_iterations)
        best = maximise(point, search_within(begin, self.variables, max_iterations))
        return self.fit_at(best, best.point)

    def begun(self, theta: Array, keys: int) -> Array:
        """Return the states (size, keys) of keys without rows at theta, shared (p,) or per key (p, keys)."""
        state = self.each.initial(keys)
        for place, values in self._values(theta):
            if place in self.each.places:
                state[self.each.places[place]] = [np.broadcast_to(a, keys) for a in values]
        return state

    def _values(self, theta: Array) -> list[tuple[str, list[Any]]]:
        """Return the learned values at theta, in order, each with its field of the state."""
        entries = iter(self.entries(theta))
        own = [next(entries) for p in self.learned if p.name in self.own_names for _ in p.value]
        begin = [p for p in self.learned if p.name not in self.own_names]
        others = [(p.name.removeprefix("initial."), [next(entries) for _ in p.value]) for p in begin]
        return [("parameters", own), *others]

    def fit_keys(
        self,
        rows: SortedRows,
        keys: int,
        unit: float,
        population: Population | None,
        climbed: Climbed | None = None,
    ) -> KeyFit:
        """Return each key's parameters, all keys at once, each from separate starts.

        With a population the result is the mode of the posterior, and a key without rows has the population's mean.
        climbed: another method, such as EM, that moves the starts before the search.
        """
        return fit_each(self.key_model, rows, keys, unit, population, climbed)

    @cached_property
    def key_model(self) -> Model:
        """The learned model for each key, with the searches of keys."""
        return build_key_model(list_learned_entries(self.each), self.learned, self.start)


def build_linear_learner(definition: Mapping[str, Any]) -> Learning:
    """Return the learner of a linear filter. Raises ModelError."""
    model = _build_linear_filter({**definition, "learn": None})
    result = Learning(definition, *parse_request(definition, model.parameters))
    _ = result.start  # raises here, before the cluster is used
    return result


def _build_linear_filter(
    definition: Mapping[str, Any], parameters: Mapping[str, Any] | None = None
) -> LinearFilter:
    # a fixed lag, a sliding sum or another form does not change the likelihood; gates, fading and adaptive noise do,
    # and learning uses the linear model (with heavy-tailed noise: `kalman.learning.filter_learning`)
    left_out = ("smoothing", "robust", "adaptive", "form", "storage", "sliding_log_likelihood")
    model = build({**definition, **dict.fromkeys(left_out)}, parameters)
    if not isinstance(model, LinearFilter):
        raise ModelError(
            "learn.parameters",
            f"nothing is learned for a filter of kind {definition.get('filter')}",
            "remove learn, or use a linear filter",
        )
    return model
