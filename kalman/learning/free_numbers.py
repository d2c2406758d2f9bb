"""The learned parameters of a model as free numbers theta: names, values, bounds, standard errors and population."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from kalman.filters.robust.adaptive import rank_parameter
from kalman.learning import constraints
from kalman.learning.bounds import Variables, compute_free_covariance, search_outcome
from kalman.learning.em import Fit
from kalman.learning.key_fits import FitOutcome, KeyFit, Population
from kalman.learning.key_learning import Searched, check
from kalman.learning.key_population import estimate_population
from kalman.learning.scoring import Maximum, Point
from kalman.linalg.packing import packed_index
from kalman.models import learned_entries
from kalman.models.definition import convert_to_definition, learn_request
from kalman.models.structures import Parameter
from kalman.run import SortedRows
from kalman.types import Array


class FreeNumbers:
    """Base class of learners; a subclass defines the learned parameters, their names and scales."""

    @property
    def learned(self) -> tuple[Parameter, ...]:
        """The learned parameters with their constraints."""
        raise NotImplementedError

    @property
    def measurements(self) -> int:
        """Number of components of a row."""
        raise NotImplementedError

    @property
    def key_model(self) -> Searched:
        """The learned model for each key, with the searches of keys."""
        raise NotImplementedError

    def find_field(self, parameter: Parameter) -> str:
        """Return the field of the definition in which a parameter is written."""
        if learned_entries.is_chosen(parameter.name):
            return parameter.name
        return "observation.R" if parameter.name == "R" else f"process.{parameter.name}"

    def follows_scale(self, parameter: Parameter, entry: int) -> float:
        """Return the change of a free number with the logarithm of all noise: 0 if it is not a variance."""
        raise NotImplementedError

    @cached_property
    def start(self) -> Array:
        """Free numbers (p,) of the written parameters. Raises ModelError where a parameter cannot be learned."""
        return np.array([t for p in self.learned for t in constraints.start(p, self.find_field(p))])

    @cached_property
    def _spans(self) -> list[slice]:
        ends = np.cumsum([0, *(len(constraints.list_free_entries(p)) for p in self.learned)]).tolist()
        return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def entries(self, theta: Array) -> list[Any]:
        """Return the packed entries of all learned parameters for theta (p,) or (p, K)."""
        pairs = zip(self.learned, self._spans, strict=True)
        return [a for p, span in pairs for a in constraints.compute_entries(p, list(theta[span]))]

    def parameters(self, theta: Array) -> dict[str, Any]:
        """Return learned parameters by name, plain numbers and lists, as `kalman.build` takes them."""
        pairs = zip(self.learned, self._spans, strict=True)
        return {
            p.name: convert_to_definition(
                p._replace(
                    value=tuple(float(a) for a in constraints.compute_entries(p, theta[span].tolist()))
                )
            )
            for p, span in pairs
        }

    @cached_property
    def variables(self) -> Variables:
        """Description of the free numbers for a search with bounds."""
        names: list[str] = []
        scale: list[float] = []
        low: list[str | None] = []
        high: list[str | None] = []
        for p in self.learned:
            for e in constraints.list_free_entries(p):
                names.append(format_entry_name(p, e))
                below, above = _describe_bounds(p)
                low.append(below)
                high.append(above)
                scale.append(self.follows_scale(p, e))
        ends = tuple(low), tuple(high)
        return Variables(tuple(names), self.limits, np.array(scale), self.measurements, *ends)

    @property
    def limits(self) -> Array:
        """Largest step of each free number: unlimited for a number with a unit, else 2, a factor e^2 of a variance."""
        kinds = [p.kind for p in self.learned for _ in constraints.list_free_entries(p)]
        return np.array([np.inf if kind in ("real", "vector") else 2.0 for kind in kinds])

    def errors(self, theta: Array, covariance: Array) -> dict[str, Any]:
        """Return the standard errors of the learned parameters by name, in their shape, by the delta method."""
        result: dict[str, Any] = {}
        for p, span in zip(self.learned, self._spans, strict=True):
            free = list(theta[span])
            slopes = np.array([constraints.pull_back(p, free, list(row)) for row in np.eye(len(p.value))])
            spread = covariance[span, span]
            with np.errstate(invalid="ignore"):  # a fixed entry gives 0 * inf
                variances = [sum(a * a * spread[i, i] for i, a in enumerate(row) if a) for row in slopes]
                own = np.einsum("ki,ij,kj->k", slopes, np.where(np.isinf(spread), 0.0, spread), slopes)
            errors = np.sqrt(np.where(np.isinf(variances), np.inf, np.maximum(own, 0.0)))
            result[p.name] = convert_to_definition(p._replace(value=tuple(errors.tolist())))
        return result

    def fit_at(self, best: Maximum, end: Point) -> Fit:
        """Return the fit of a search; end: the search's best point, with the information for standard errors."""
        outcome, reason = search_outcome(best, self.variables)
        spread = compute_free_covariance(end, best.held)
        errors = self.errors(end.theta, spread)
        return Fit(end.theta, end.value, best.iterations, outcome, reason, end.used, None, spread, errors)

    def check(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> tuple[Array, Array]:
        """Return each key's mean NIS (K,) and p-value of Ljung and Box (K,) at theta (p, K), NaN where undefined."""
        return check(self.key_model, rows, keys, unit, theta)

    def pull_back_slopes(self, theta: Any, slopes: Any) -> list[Any]:
        """Return the derivatives by the free numbers, given the derivatives by the packed entries."""
        result: list[Any] = []
        at = 0
        for p, span in zip(self.learned, self._spans, strict=True):
            width = len(p.value)
            result += constraints.pull_back(p, list(theta[span]), list(slopes[at : at + width]))
            at += width
        return result

    @property
    def places(self) -> dict[str, Any]:
        """Return for each parameter the positions of its entries in `KeyFit.parameters`, in the parameter's shape."""
        result: dict[str, Any] = {}
        at = 0
        for p in self.learned:
            numbered = convert_to_definition(
                p._replace(value=tuple(float(at + e) for e in range(len(p.value))))
            )
            result[p.name] = numbered
            at += len(p.value)
        return result

    def population(self, fits: Sequence[KeyFit]) -> Population:
        """Return the population of keys that were fitted without a prior, by empirical Bayes."""
        sound = [one.take(np.flatnonzero(one.outcome <= FitOutcome.AT_BOUND)) for one in fits]
        theta = np.concatenate([one.theta for one in sound], axis=1)
        information = np.concatenate([one.information for one in sound], axis=2)
        places = np.cumsum([0, *(len(p.value) for p in self.learned)]).tolist()
        free = [
            at + e
            for at, p in zip(places, self.learned, strict=False)
            for e in constraints.list_free_entries(p)
        ]
        zero = np.concatenate([one.parameters[free] == 0.0 for one in sound], axis=1)
        return estimate_population(theta, information, zero, self.start)


def parse_request(
    definition: Mapping[str, Any], parameters: Sequence[Parameter]
) -> tuple[tuple[str, ...], str, dict[str, Any]]:
    """Return the names, the scope and the initial values of a definition's request to learn.

    The initial values replace the written values: a parameter with a requested form begins in this form.
    parameters: the parameters of the written model.

    Raises:
        ModelError: a requested parameter cannot be learned.
    """
    names, scope = learn_request(
        definition, (*parameters, *learned_entries.list_chosen_parameters(definition))
    )
    forms = {one.name: one for one in learned_entries.learn_requests(definition) if one.form is not None}
    formed = [learned_entries.constrain_parameter(p, forms[p.name]) for p in parameters if p.name in forms]
    return names, scope, {p.name: convert_to_definition(p) for p in formed}


def constrain_parameters(
    definition: Mapping[str, Any], parameters: Sequence[Parameter], own: Sequence[str]
) -> tuple[Parameter, ...]:
    """Return the learned parameters with the constraints of the definition, the initial distribution last.

    parameters: the filter's parameters; own: names of the parameters in the filter's state.
    """
    requests = {one.name: one for one in learned_entries.learn_requests(definition)}
    kept = [learned_entries.constrain_parameter(p, requests[p.name]) for p in parameters if p.name in own]
    chosen = learned_entries.list_chosen_parameters(definition)
    return (*kept, *(p for p in chosen if p.name in learned_entries.INITIAL))


def format_entry_name(parameter: Parameter, entry: int) -> str:
    """Return the name of a packed entry of a parameter, such as R[1][0]."""
    if len(parameter.value) == 1:
        return parameter.name
    if parameter.kind != "covariance":
        return f"{parameter.name}[{entry}]"
    i = math.isqrt(8 * entry + 1) - 1
    i //= 2
    return f"{parameter.name}[{i}][{entry - packed_index(i, 0)}]"


def _describe_bounds(parameter: Parameter) -> tuple[str | None, str | None]:
    """Return the phrases for a parameter at its lower and at its upper bound; None for a bound that it lacks."""
    low, high = parameter.bounds or (None, None)
    below = "is zero" if low is None and parameter.kind != "bounded" else f"is at its bound {low}"
    above = "grows without bound" if high is None else f"is at its bound {high}"
    if parameter.kind == "bounded" and low is None:  # the free number belongs to the distance below the bound
        return above, "falls without bound"
    return below, above


def follows_scale(model: Any, parameter: Parameter, entry: int) -> float:
    """Return the change of a free number with the logarithm of all noise: 0 if it is not a variance."""
    if parameter.kind == "covariance":
        row = (math.isqrt(8 * entry + 1) - 1) // 2
        return 0.5 if entry == packed_index(row, row) else 0.0
    if parameter.kind != "positive":
        return 0.0
    return 1.0 if rank_parameter(model.process, parameter, model.controls).rank else 0.0
