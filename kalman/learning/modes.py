"""Maximum likelihood for an IMM or MMAE: parameters of the modes, transition and initial probabilities.

The log-likelihood is the filter's own, of the predicted mixture. Its gradient is by central differences, each a pass
over the rows, since multiple models have no adjoint here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kalman.building.registry import build
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.sliding_likelihood import OUTPUT
from kalman.learning import constraints
from kalman.learning.em import Evaluate, Evaluation, Fit, Sample
from kalman.learning.key_fits import KeyFit, Population
from kalman.learning.optimisers import fit
from kalman.models import learned_entries
from kalman.models.columns import used
from kalman.models.definition import natural
from kalman.models.structure import Parameter
from kalman.run import SortedRows, initial_states, run
from kalman.types import Array, ModelError

STEP = 1e-4
"""Step of a free number, each way, for a difference; the relative error of the slope is about 1e-8."""


class Chances(NamedTuple):
    """Rows of probabilities that are learned together; zeros stay zero.

    The free numbers are the logarithms of a row's probabilities relative to its greatest.
    """

    name: str
    rows: tuple[tuple[float, ...], ...]

    @property
    def free(self) -> list[tuple[int, int]]:
        """The entries that have a free number."""
        return [
            (i, j)
            for i, row in enumerate(self.rows)
            for j, a in enumerate(row)
            if a > 0.0 and j != row.index(max(row))
        ]

    def start(self) -> list[float]:
        """Return the free numbers."""
        return [math.log(self.rows[i][j] / max(self.rows[i])) for i, j in self.free]

    def value(self, theta: Sequence[float]) -> list[list[float]]:
        """Return the probabilities."""
        logs = np.array([[0.0 if a > 0.0 else -np.inf for a in row] for row in self.rows])
        for (i, j), a in zip(self.free, theta, strict=True):
            logs[i, j] = a
        shares = np.exp(logs - logs.max(axis=1, keepdims=True))
        return (shares / shares.sum(axis=1, keepdims=True)).tolist()


@dataclass(frozen=True)
class ModeLearning:
    """Maximum likelihood of multiple models, pooled over all keys; a `kalman.learning.em.Learner`."""

    definition: Mapping[str, Any]
    names: tuple[str, ...]

    @property
    def scope(self) -> str:
        """All keys together."""
        return "pooled"

    @cached_property
    def _parts(self) -> list[Parameter | Chances]:
        model = build(self.definition)
        assert isinstance(model, MultipleModels)
        known = _known(model)
        return [known[name] for name in self.names]

    @cached_property
    def start(self) -> Array:
        """Free numbers (p,) of the written parameters. Raises ModelError where one cannot be learned."""
        found = [p.start() if isinstance(p, Chances) else constraints.start(p, p.name) for p in self._parts]
        return np.array([a for part in found for a in part])

    def parameters(self, theta: Array) -> dict[str, Any]:
        """Return learned parameters by name, plain numbers and lists, as `kalman.build` takes them."""
        result: dict[str, Any] = {}
        rest = np.asarray(theta, float).tolist()
        for p in self._parts:
            width = len(p.free) if isinstance(p, Chances) else len(constraints.free_entries(p))
            own, rest = rest[:width], rest[width:]
            if isinstance(p, Chances):
                rows = p.value(own)
                result[p.name] = rows if p.name == "transition" else rows[0]
            else:
                value = tuple(float(a) for a in constraints.value(p, own))
                result[p.name] = natural(p._replace(value=value))
        return result

    def evaluate(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> Evaluation:
        """Return log-likelihood, gradient (p,) by theta, and the number of rows, summed over keys."""
        value, count = self._value(theta, rows, keys, unit)
        gradient = []
        for step in STEP * np.eye(len(theta)):
            forward, backward = (
                self._value(theta + sign * step, rows, keys, unit)[0] for sign in (1.0, -1.0)
            )
            gradient.append((forward - backward) / (2.0 * STEP))
        return value, np.array(gradient), count

    def _value(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> tuple[float, int]:
        model = build(self.definition, self.parameters(theta))
        states, _ = run(model, initial_states(model, keys), rows, unit)
        return math.fsum(states.log_likelihood.tolist()), int(states.count.sum())

    def fit(self, evaluate: Evaluate, sample: Sample, max_iterations: int) -> Fit:
        """Return the theta of the greatest log-likelihood, found from the written parameters on."""
        return fit(evaluate, self.start, max_iterations)

    def fit_keys(self, rows: SortedRows, keys: int, unit: float, population: Population | None) -> KeyFit:
        """Refuse: modes are learned for all keys together."""
        raise NotImplementedError("modes are learned for all keys together")

    def check(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> tuple[Array, Array]:
        """Return no figures: the rows of a key are no series of innovations here."""
        return np.full(keys, np.nan), np.full(keys, np.nan)

    @property
    def places(self) -> Mapping[str, Any]:
        """Return the positions in `KeyFit.parameters` of the entries of each parameter."""
        return {}

    def population(self, fits: Sequence[KeyFit]) -> Population:
        """Refuse: modes are learned for all keys together."""
        raise NotImplementedError("modes are learned for all keys together")


def mode_learner(definition: Mapping[str, Any]) -> ModeLearning:
    """Return the learner of an IMM or MMAE. Raises ModelError."""
    learn = definition.get("learn") or {}
    if (learn.get("scope") or "pooled") != "pooled" or learn.get("by"):
        raise ModelError("learn.scope", "modes are learned for all keys together", "write pooled")
    if learn.get("prior"):
        raise ModelError("learn.prior", "the initial distribution is not learned with modes", "remove it")
    if learn.get("method") == "em":
        raise ModelError("learn.method", "modes are learned by maximum likelihood", "write mle, or remove it")
    definition = {**definition, OUTPUT: None}  # the sum over a window changes no likelihood
    model = build(definition)
    assert isinstance(model, MultipleModels)
    known = _known(model)
    requests = learned_entries.learn_requests(definition)
    for request in requests:
        part = known.get(request.name)
        if part is None:
            remedy = f"choose from {', '.join(known)}"
            raise ModelError(request.field, f"the modes have no parameter {request.name!r}", remedy)
        if request.form is not None or request.bounds is not None:
            raise ModelError(request.field, "modes have neither forms nor bounds", "write the name alone")
        if isinstance(part, Parameter) and used(part.value):
            raise ModelError(request.field, f"{request.name} comes from a column", "learn others")
    result = ModeLearning(definition, tuple(request.name for request in requests))
    _ = result.start  # raises here, before the cluster is used
    return result


def _known(model: MultipleModels) -> dict[str, Parameter | Chances]:
    """Return the learnable parameters by name: `R` where all modes share it, `<mode>.R` of one mode."""
    found: dict[str, Parameter | Chances] = {}
    each: list[dict[str, Parameter]] = [
        {p.name: p for p in getattr(mode, "parameters", ())} for mode in model.modes
    ]
    for name, p in each[0].items():
        if all(own.get(name) == p for own in each):
            found[name] = p
    for mode, own in zip(model.names, each, strict=True):
        found |= {f"{mode}.{name}": p._replace(name=f"{mode}.{name}") for name, p in own.items()}
    if model.transition is not None:
        found["transition"] = Chances("transition", model.transition)
    found["initial.mode_probabilities"] = Chances("initial.mode_probabilities", (model.start,))
    return found
