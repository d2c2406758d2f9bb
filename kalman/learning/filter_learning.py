"""Maximum likelihood of non-linear filters, filters with heavy-tailed noise, and several models.

The likelihood is the filter's, including Student-t or Huber noise. The gradient comes from central differences
(`kalman.learning.filter_pass`), and the search is the same as for linear models. Gates, fading memory and adaptive
noise do not affect learning.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kalman.building.modes import MODE_CHANCES, list_known_parameters
from kalman.building.registry import build
from kalman.filters.gaussian import GaussianFilter
from kalman.filters.linear import LinearFilter
from kalman.filters.mixture_moments import normalise_weights
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.robust.linear import RobustLinearFilter
from kalman.learning import constraints
from kalman.learning.bounds import fit_scale, search_within
from kalman.learning.em import Evaluate, Evaluation, Fit, Sample
from kalman.learning.filter_pass import Differences, Weights, compute_differences, compute_likelihoods
from kalman.learning.filter_searches import FilterModel, compute_observed_curvature, list_starts
from kalman.learning.free_numbers import FreeNumbers, constrain_parameters, follows_scale, parse_request
from kalman.learning.key_fits import FitOutcome, KeyFit, Population
from kalman.learning.key_learning import STARTS, fit_each
from kalman.learning.key_starts import Free
from kalman.learning.scoring import Point, build_point, is_finite, maximise
from kalman.linalg.packing import packed_index, unpack, unpack_symmetric
from kalman.models import columns, learned_entries
from kalman.models.definition import learn_request
from kalman.models.structure import Parameter
from kalman.run import SortedRows
from kalman.types import Array, ModelError

STEP = 1e-4
"""Step of a free number in each direction for a central difference; the slope's relative error is about 1e-8."""
LEFT_OUT = ("smoothing", "adaptive", "storage", "sliding_log_likelihood")
"""Sections without effect on learning."""
NOISES = ("student_t", "huber")
"""Parts of the section `robust` that change a row's likelihood, and thereby the learned parameters."""


@dataclass(frozen=True)
class FilterLearning(FreeNumbers):
    """Maximum likelihood by differences of the likelihood; a `kalman.learning.em.Learner`."""

    definition: Mapping[str, Any]
    names: tuple[str, ...]
    scope: str
    begin: Mapping[str, Any]
    """Initial values that replace the written values, by name of the parameter."""

    @cached_property
    def each(self) -> GaussianFilter | RobustLinearFilter | MultipleModels:
        """The model with its learned parameters in the state, one filter for all values of the search."""
        own = [name for name in self.names if name not in learned_entries.INITIAL]
        model = build({**self.definition, "learn": {"parameters": own, "scope": "key"}}, self.begin)
        assert isinstance(model, (GaussianFilter, RobustLinearFilter, MultipleModels))
        return model

    @property
    def base(self) -> GaussianFilter | LinearFilter | MultipleModels:
        """The filter that has the parameters; for a linear filter with heavy-tailed noise, the plain linear filter."""
        return self.each.base if isinstance(self.each, RobustLinearFilter) else self.each

    @cached_property
    def learned(self) -> tuple[Parameter, ...]:
        """The learned parameters with their constraints, the initial distribution last."""
        if isinstance(self.base, MultipleModels):
            return self.base.own
        return constrain_parameters(self.definition, self.base.parameters, self.base.own)

    @property
    def measurements(self) -> int:
        """Number of components of a row."""
        return self.each.measurements

    def find_field(self, parameter: Parameter) -> str:
        """Return the field of the definition in which a parameter is written."""
        return parameter.name if isinstance(self.each, MultipleModels) else super().find_field(parameter)

    def follows_scale(self, parameter: Parameter, entry: int) -> float:
        """Return the change of a free number with the logarithm of all noise; 0 for a number that is not a variance."""
        base = self.base
        if parameter.kind != "positive" or not isinstance(base, MultipleModels):
            return follows_scale(base, parameter, entry)
        mode, inner = base.modes[0], parameter
        for label, one in zip(base.names, base.modes, strict=True):
            if parameter.name.startswith(f"{label}."):
                mode, inner = one, parameter._replace(name=parameter.name.removeprefix(f"{label}."))
        return follows_scale(getattr(mode, "base", mode), inner, entry)

    def begun(self, theta: Array, keys: int, instead: Array | None = None) -> Array:
        """Return the states (size, keys) of keys without rows at theta (p,) or (p, keys).

        instead: (p, keys) variances that replace the variances of theta; NaN keeps the number of theta.
        """
        each, base, rows = self.each, self.base, dict[str, list[Any]]()
        at = 0
        for p in self.learned:
            free = constraints.list_free_entries(p)
            values = constraints.compute_entries(p, list(theta[at : at + len(free)]))
            if instead is not None:
                for place, e in enumerate(free):
                    values[e] = np.where(np.isnan(instead[at + place]), values[e], instead[at + place])
            rows[p.name] = [np.broadcast_to(a, keys) for a in values]
            at += len(free)
        state = each.initial(keys)
        if isinstance(base, MultipleModels):
            if MODE_CHANCES in rows:
                with np.errstate(divide="ignore"):
                    logs = normalise_weights([np.log(a) for a in rows[MODE_CHANCES]], base.floor)
                state[base.places["log_probabilities"]] = np.array(logs)
        elif any(name in rows for name in learned_entries.INITIAL):
            mean = np.array(rows.pop("initial.mean", [np.full(keys, a) for a in base.mean]))
            spread = rows.pop("initial.covariance", [np.full(keys, a) for a in base.covariance])
            state = each.from_moments(mean, unpack(np.array(spread)))
        own = [a for values in rows.values() for a in values]
        return each.with_parameters(state, np.array(own)) if own else state

    def sizes(self, theta: Array) -> Array:
        """Return the size of each free number (p,) or (p, keys), by which steps are multiplied; 1 for a logarithm."""
        united = np.isinf(self.limits)
        united = united.reshape(-1, *[1] * (theta.ndim - 1))
        written = np.abs(self.start).reshape(united.shape)
        least = np.where(written > 0.0, written, 1.0)
        return np.where(united, np.maximum(np.abs(theta), least), 1.0)

    def values(self, thetas: list[Array], rows: SortedRows, keys: int, unit: float) -> Array:
        """Return the log-likelihoods (c, keys) at each of c theta (p, keys)."""
        starts = [self.begun(theta, keys) for theta in thetas]
        return compute_likelihoods(self.each, rows, keys, unit, starts)[0]

    def differences(
        self,
        theta: Array,
        rows: SortedRows,
        keys: int,
        unit: float,
        zero: np.ndarray | None = None,
        small: Array | None = None,
    ) -> Differences:
        """Return value, gradient and information of each key at theta (p, keys) or (p,).

        Where a variance is zero, the derivative is a one-sided difference by the variance, with steps `small` (p,
        keys).
        """
        p = len(theta)
        theta = theta if theta.ndim == 2 else np.repeat(theta[:, None], keys, axis=1)
        step = STEP * self.sizes(theta)
        held = np.zeros((p, keys), bool) if zero is None else zero
        small = np.ones((p, keys)) if small is None else small
        at_zero = np.where(held, 0.0, np.nan)
        states = [self.begun(theta, keys, at_zero)]
        for side, times in ((1.0, 1.0), (-1.0, 2.0)):
            for i in range(p):
                moved, off = theta.copy(), at_zero.copy()
                moved[i] += side * step[i]
                off[i] = np.where(held[i], times * small[i], np.nan)
                states.append(self.begun(moved, keys, off))
        weights = Weights(
            np.where(held, -1.5 / small, 0.0),
            np.where(held, 2.0 / small, 0.5 / step),
            np.where(held, -0.5 / small, -0.5 / step),
        )
        return compute_differences(self.each, rows, keys, unit, states, weights)

    def evaluate_each(
        self, theta: Array, rows: SortedRows, keys: int, unit: float
    ) -> tuple[Array, Array, np.ndarray]:
        """Return log-likelihood (keys,), gradient and packed information (s, keys), and number of rows used (keys,)."""
        found = self.differences(theta, rows, keys, unit)
        i, j = np.tril_indices(len(theta))
        return found.log_likelihood, np.concatenate([found.gradient, found.information[i, j]]), found.used

    def evaluate(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> Evaluation:
        """Return log-likelihood, gradient and packed information, and the number of rows, summed over keys."""
        value, vector, used = self.evaluate_each(theta, rows, keys, unit)
        if not np.isfinite(value).all():
            return -math.inf, np.zeros(len(vector)), int(used.sum())
        return (
            math.fsum(value.tolist()),
            np.array([math.fsum(row) for row in vector.tolist()]),
            int(used.sum()),
        )

    def fit(self, evaluate: Evaluate, sample: Sample, max_iterations: int) -> Fit:
        """Return the theta of the greatest log-likelihood, searched from the written parameters."""

        def point(theta: Array) -> Point:
            return build_point(theta, *evaluate(theta))

        starts = [point(theta) for theta, _ in list_starts(self.key_model.free, self.start, (0.0,))]
        sound = [one for one in starts if is_finite(one) and one.used]
        if not sound:
            reason = "the log-likelihood at the written parameters is not finite, or no row can be used"
            return Fit(self.start, starts[0].value, 0, FitOutcome.FAILED, reason, starts[0].used)
        most = max(one.used for one in sound)
        scale, measurements = self.variables.scale, self.variables.measurements
        scaled = [maximise(point, fit_scale(one, scale, measurements)) for one in sound if one.used == most]
        scaled.sort(key=lambda one: -one.value)
        ends = [
            maximise(point, search_within(one, self.variables, max_iterations)) for one in scaled[:STARTS]
        ]
        best = max(ends, key=lambda one: one.point.value)
        end = best.point
        known = compute_observed_curvature(
            lambda theta: point(theta[:, 0]).gradient[:, None],
            end.theta[:, None],
            self.sizes(end.theta)[:, None],
            best.held[:, None] != 0,
            end.information[:, :, None],
        )[:, :, 0]
        return self.fit_at(best, end._replace(information=known))

    @cached_property
    def key_model(self) -> FilterModel:
        """The learned model for each key, with the searches of keys."""
        free: list[Free] = []
        for p in self.learned:
            entries = constraints.list_free_entries(p)
            n = len(unpack_symmetric(p.value)) if p.kind == "covariance" else 0
            for e in entries:
                power = round(1.0 / a) if (a := self.follows_scale(p, e)) else 0
                linked = any(
                    packed_index(i, k) in entries and e in (packed_index(i, i), packed_index(k, k))
                    for i in range(n)
                    for k in range(i)
                )
                free.append(Free(p, e, power, bool(power) and not linked))
        return FilterModel(self, self.learned, self.start, free)

    def fit_keys(self, rows: SortedRows, keys: int, unit: float, population: Population | None) -> KeyFit:
        """Return each key's parameters, as `Learning.fit_keys` does; all keys are searched at once."""
        return fit_each(self.key_model, rows, keys, unit, population)


def select_heavy_tailed(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a definition's section `robust` that change a row's likelihood."""
    section = definition.get("robust") or {}
    return {name: section[name] for name in NOISES if section.get(name) is not None}


def filter_learner(definition: Mapping[str, Any]) -> FilterLearning:
    """Return the learner of an extended, unscented, cubature or heavy-tailed filter. Raises ModelError.

    With heavy-tailed noise a linear filter has no EM steps. EM only leads to the maximum, so the search runs without
    EM.
    """
    learn = definition.get("learn") or {}
    kind = definition.get("filter", "linear")
    if learn.get("method") == "em" and kind != "linear":
        problem = f"em has no closed form for the {kind} filter"
        raise ModelError("learn.method", problem, "write mle, or remove it")
    left_out = (*LEFT_OUT, "form") if kind == "linear" else LEFT_OUT
    definition = {**definition, **dict.fromkeys(left_out), "robust": select_heavy_tailed(definition) or None}
    model = build({**definition, "learn": None})
    base = model.base if isinstance(model, RobustLinearFilter) else model
    if not isinstance(base, (GaussianFilter, LinearFilter)):
        raise ModelError(
            "learn.parameters", f"nothing is learned for a filter of kind {kind}", "remove learn"
        )
    result = FilterLearning(definition, *parse_request(definition, base.parameters))
    _ = result.start  # raises here, before the cluster is used
    return result


def build_mode_learner(definition: Mapping[str, Any]) -> FilterLearning:
    """Return the learner of an IMM or MMAE. Raises ModelError."""
    learn = definition.get("learn") or {}
    scope = learn.get("scope") or "pooled"
    if learn.get("prior"):
        raise ModelError("learn.prior", "the initial distribution is not learned with modes", "remove it")
    if learn.get("method") == "em":
        raise ModelError("learn.method", "modes are learned by maximum likelihood", "write mle, or remove it")
    left_out = ("smoothing", "storage", "sliding_log_likelihood")
    definition = {**definition, **dict.fromkeys(left_out)}
    model = build({**definition, "learn": None})
    assert isinstance(model, MultipleModels)
    known = list_known_parameters(model)
    learn_request({**definition, "learn": {**learn, "parameters": []}}, ())
    requests = learned_entries.learn_requests(definition)
    for request in requests:
        part = known.get(request.name)
        if part is None:
            remedy = f"choose from {', '.join(known)}"
            raise ModelError(request.field, f"the modes have no parameter {request.name!r}", remedy)
        if request.form is not None or request.bounds is not None:
            raise ModelError(request.field, "modes have neither forms nor bounds", "write the name alone")
        if columns.find_columns(part.value):
            raise ModelError(request.field, f"{request.name} comes from a column", "learn others")
        if scope == "key" and request.name == MODE_CHANCES:
            problem = f"{request.name} is learned for all keys together or for groups: a key begins once"
            raise ModelError("learn.scope", problem, "write pooled or group, or learn others")
    result = FilterLearning(definition, tuple(request.name for request in requests), scope, {})
    _ = result.start  # raises here, before the cluster is used
    return result
