"""Expectation maximisation for the linear filter: noise and the distribution in which keys begin.

The E-step needs the smoothed second moments of the noise, and the exact gradient of the log-likelihood holds them. By
Fisher's identity it is the expected gradient of the complete data's log-likelihood: for N terms w ~ N(0, Q) whose
smoothed squares sum to S, dL/dQ = (Q^-1 S Q^-1 - N Q^-1) / 2, so that the M-step's S / N is Q + (2 / N) Q (dL/dQ) Q.
Irregular times and missing components need no care of their own: N may count terms that no row tells of, whose
expectation is Q.

References: Dempster, Laird and Rubin (1977); Shumway and Stoffer (1982); Koopman (1993).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kalman import constraints
from kalman.adaptive import scaled
from kalman.chosen import wishes
from kalman.em import Evaluate, Evaluation, Fit, KeyFit, Sample, climb
from kalman.packing import lower, symmetric
from kalman.run import SortedRows
from kalman.structure import Parameter
from kalman.types import Array, ModelError

if TYPE_CHECKING:
    from kalman.learning import Learning

TOLERANCE = 1e-10
"""Of the log-likelihood: a step that gains less is the last."""


@dataclass(frozen=True)
class ExpectationMaximisation:
    """What a linear model learns by EM; a `kalman.em.Learner`."""

    model: "Learning"
    terms: Mapping[str, int]
    """Of each parameter: how many squares of its noise a transition has."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are learned."""
        return self.model.names

    @property
    def scope(self) -> str:
        """All keys together."""
        return "pooled"

    def evaluate(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> Evaluation:
        """Return log-likelihood, a vector, and the number of rows, summed over keys.

        The vector is the derivative by the packed entries, then how many transitions, measurements and keys there are.
        """
        value, slopes, used = self.model.value_and_slopes(theta, rows, keys, unit)
        begun = np.count_nonzero(used)
        counts = [used.sum() - begun, np.count_nonzero(~np.isnan(rows.y).all(axis=0)), begun]
        return value, np.array([*slopes, *counts], float), int(used.sum())

    def fit(self, evaluate: Evaluate, sample: Sample, max_iterations: int) -> Fit:
        """Return the theta to which EM comes from the written parameters; the log-likelihood never falls."""
        return climb(evaluate, self.maximise, self.model.start, max_iterations, TOLERANCE)

    def maximise(self, theta: Array, vector: Array) -> Array:
        """Return the theta of the M-step."""
        slopes, (transitions, measured, begun) = list(vector[:-3]), vector[-3:]
        entries = [float(a) for a in self.model.entries(theta)]
        counts = {"R": measured, "initial.mean": begun, "initial.covariance": begun}
        result: list[float] = []
        told: dict[str, tuple[list[float], list[float]]] = {}
        for p in self.model.learned:
            width = len(p.value)
            told[p.name] = entries[:width], slopes[:width]
            entries, slopes = entries[width:], slopes[width:]
        P = self._beginning(told)
        for p in self.model.learned:
            value, slope = told[p.name]
            count = max(1.0, float(counts.get(p.name, self.terms.get(p.name, 1) * transitions)))
            if p.name == "initial.mean":
                new = (np.array(value) + P @ slope / count).tolist()
            elif p.kind == "covariance":
                Q = np.array(symmetric(value))
                moved = Q + 2.0 / count * Q @ _symmetric_slope(slope) @ Q
                if p.name == "initial.covariance" and "initial.mean" in told:
                    step = P @ told["initial.mean"][1] / count
                    moved = moved - np.outer(step, step)
                new = [a if b != 0.0 else 0.0 for a, b in zip(lower(moved.tolist()), p.value, strict=True)]
            else:
                new = [value[0] + 2.0 / count * value[0] ** 2 * slope[0]]
            result += constraints.start(p._replace(value=tuple(new)), p.name)
        return np.array(result)

    def _beginning(self, told: Mapping[str, tuple[list[float], list[float]]]) -> Array:
        """Return the covariance in which keys begin."""
        if "initial.covariance" in told:
            return np.array(symmetric(told["initial.covariance"][0]))
        n = len(self.model.filter.states)
        return np.array(symmetric(self.model.filter.covariance)).reshape(n, n)

    def parameters(self, theta: Array) -> Mapping[str, Any]:
        """Return learned parameters by name, plain numbers and lists, as `kalman.build` takes them."""
        return self.model.parameters(theta)

    def fit_keys(self, rows: SortedRows, keys: int, unit: float, pooled: Array) -> KeyFit:
        """Return each key's own parameters, as maximum likelihood finds them."""
        return self.model.fit_keys(rows, keys, unit, pooled)


def expectation_maximisation(model: "Learning") -> ExpectationMaximisation:
    """Return what learns by EM what the model wants learned. Raises ModelError where EM has no closed form."""
    if model.scope != "pooled":
        raise ModelError(
            "learn.method", "em learns for all keys together only", "write pooled, or method: mle"
        )
    fields = {wish.name: wish.field for wish in wishes(model.definition)}
    terms = {p.name: _terms(model, p) for p in model.learned}
    for name, count in terms.items():
        if count == 0:
            raise ModelError(
                fields.get(name, "learn.parameters"),
                f"em has no closed form for {name}",
                "write learn.method: mle, or learn Q, R, variances and the initial distribution",
            )
    return ExpectationMaximisation(model, terms)


def _terms(model: "Learning", parameter: Parameter) -> int:
    """Return how many squares of its noise a transition has, 0 where a parameter is nothing that EM learns."""
    if parameter.name in ("R", "initial.mean", "initial.covariance"):
        return 1
    if parameter.name == "Q" and parameter.kind == "covariance":
        return 1
    if parameter.kind != "positive" or parameter.name.startswith(("F[", "H[")):
        return 0
    return scaled(model.filter.process, parameter, model.filter.controls).rank


def _symmetric_slope(packed: Sequence[float]) -> Array:
    """Return G with dL = trace(G dQ), from the derivatives by packed entries."""
    full = np.array(symmetric(packed))
    return 0.5 * (full + np.diag(np.diag(full)))
