"""Expectation maximisation for the linear filter: noise, initial distribution, entries of F and H.

The E-step needs the smoothed second moments of the noise, and the exact gradient of the log-likelihood holds them. By
Fisher's identity it is the expected gradient of the complete data's log-likelihood: for N terms w ~ N(0, Q) whose
smoothed squares sum to S, dL/dQ = (Q^-1 S Q^-1 - N Q^-1) / 2, so that the M-step's S / N is Q + (2 / N) Q (dL/dQ) Q.
Irregular times and missing components need no special case: N may count terms without data, whose expectation
is Q. Entries of F and H are in `kalman.learning.em_entries`.

References: Dempster, Laird and Rubin (1977); Shumway and Stoffer (1982); Koopman (1993).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kalman.filters.robust.adaptive import scaled
from kalman.learning import constraints
from kalman.learning.em import Evaluate, Evaluation, Fit, Sample, climb
from kalman.learning.em_entries import Regression, of_letter, regressed, second_moments
from kalman.learning.key_fits import KeyFit, Population
from kalman.linalg.packing import lower, packed_size, symmetric
from kalman.models.columns import numbers, resolve, used
from kalman.models.learned_entries import learn_requests
from kalman.models.structure import Parameter
from kalman.run import SortedRows
from kalman.types import Array, ModelError

if TYPE_CHECKING:
    from kalman.learning.maximum_likelihood import Learning

TOLERANCE = 1e-10
"""Relative gain in log-likelihood below which EM stops."""


@dataclass(frozen=True)
class ExpectationMaximisation:
    """EM of a linear model; a `kalman.learning.em.Learner`."""

    model: "Learning"
    terms: Mapping[str, int]
    """For each parameter: the number of squares of its noise in a transition."""

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

        The vector is the derivative by the packed entries; where entries of F or H are learned, the derivative by all
        entries of these matrices and the second moments of the states; then the numbers of transitions, measurements
        and keys.
        """
        value, slopes, used_rows = self.model.value_and_slopes(theta, rows, keys, unit, self._all_entries)
        moments: list[Any] = []
        if self._all_entries:
            each, taken = self.model.each, self.model.with_inputs(theta, rows)
            (scale,) = resolve([each.noise_scale], list(taken.u))
            scale = np.broadcast_to(np.asarray(scale, float), taken.key.shape)
            sums = second_moments(each, self.model.begun(theta, keys), taken, keys, unit, scale)
            moments = [
                a for matrix, part in zip("FH", sums, strict=True) if self._shape(matrix) for a in part
            ]
        begun = np.count_nonzero(used_rows)
        counts = [used_rows.sum() - begun, np.count_nonzero(~np.isnan(rows.y).all(axis=0)), begun]
        return value, np.array([*slopes, *moments, *counts], float), int(used_rows.sum())

    def fit(self, evaluate: Evaluate, sample: Sample, max_iterations: int) -> Fit:
        """Return the theta of EM from the written parameters; the log-likelihood never falls."""
        return climb(evaluate, self.maximise, self.model.start, max_iterations, TOLERANCE)

    def maximise(self, theta: Array, vector: Array) -> Array:
        """Return the theta of the M-step."""
        slopes, (transitions, measured, begun) = list(vector[:-3]), vector[-3:]
        entries = [float(a) for a in self.model.entries(theta)]
        counts = {"R": measured, "initial.mean": begun, "initial.covariance": begun}
        result: list[float] = []
        learned: dict[str, tuple[list[float], list[float]]] = {}
        for p in self.model.learned:
            width = len(p.value)
            learned[p.name] = entries[:width], slopes[:width]
            entries, slopes = entries[width:], slopes[width:]
        P = self._beginning(learned)
        moved_entries, more_squares = self._regressions(learned, slopes)
        for p in self.model.learned:
            value, slope = learned[p.name]
            count = max(1.0, float(counts.get(p.name, self.terms.get(p.name, 1) * transitions)))
            if p.name in moved_entries:
                new = [moved_entries[p.name]]
            elif p.name == "initial.mean":
                new = (np.array(value) + P @ slope / count).tolist()
            elif p.kind == "covariance":
                Q = np.array(symmetric(value))
                moved = Q + 2.0 / count * Q @ _symmetric_slope(slope) @ Q
                if p.name in more_squares:
                    moved = moved + more_squares[p.name] / count
                if p.name == "initial.covariance" and "initial.mean" in learned:
                    step = P @ learned["initial.mean"][1] / count
                    moved = moved - np.outer(step, step)
                new = [a if b != 0.0 else 0.0 for a, b in zip(lower(moved.tolist()), p.value, strict=True)]
            else:
                new = [value[0] + 2.0 / count * value[0] ** 2 * slope[0]]
            result += constraints.start(p._replace(value=tuple(new)), p.name)
        return np.array(result)

    def _shape(self, matrix: str) -> tuple[int, int] | None:
        """Return the shape of F or H where entries of it are learned, else None."""
        n = len(self.model.filter.states)
        found = any(letter == matrix for letter, _, _ in self.model.entries_of_matrices)
        return (n if matrix == "F" else self.model.filter.measurements, n) if found else None

    @cached_property
    def _all_entries(self) -> tuple[tuple[str, int, int], ...]:
        """All entries of the matrices of which some are learned."""
        shapes = [(matrix, self._shape(matrix)) for matrix in "FH"]
        return tuple(
            (a, i, j) for a, shape in shapes if shape for i in range(shape[0]) for j in range(shape[1])
        )

    def _regressions(
        self, learned: Mapping[str, tuple[list[float], list[float]]], rest: list[float]
    ) -> tuple[dict[str, float], dict[str, Array]]:
        """Return the new entries of F and H by name, and the changes in the sums of squares of Q and R.

        rest: the part of an evaluation's vector after the derivatives by learned parameters.
        """
        n = len(self.model.filter.states)
        shapes = [(matrix, shape) for matrix in "FH" if (shape := self._shape(matrix))]
        gradients: list[Array] = []
        for _, shape in shapes:
            size = shape[0] * shape[1]
            gradients.append(np.array(rest[:size]).reshape(shape))
            rest = rest[size:]
        new: dict[str, float] = {}
        squares: dict[str, Array] = {}
        for (matrix, _), gradient in zip(shapes, gradients, strict=True):
            moments, rest = np.array(symmetric(rest[: packed_size(n)])), rest[packed_size(n) :]
            noise = "Q" if matrix == "F" else "R"
            covariance = learned[noise][0] if noise in learned else _written(self.model, noise)
            known = Regression(np.array(symmetric(covariance)), gradient, moments)
            free = [p for p in self.model.learned if of_letter([p.name], matrix)]
            now = [p._replace(value=(learned[p.name][0][0],)) for p in free]
            slots = of_letter([p.name for p in free], matrix)
            change = regressed(known, now, slots)
            new |= {
                p.name: learned[p.name][0][0] + float(change[i, j])
                for p, (_, i, j) in zip(now, slots, strict=True)
            }
            squares[noise] = known.squares(change)
        return new, squares

    def _beginning(self, learned: Mapping[str, tuple[list[float], list[float]]]) -> Array:
        """Return the initial covariance of keys."""
        if "initial.covariance" in learned:
            return np.array(symmetric(learned["initial.covariance"][0]))
        n = len(self.model.filter.states)
        return np.array(symmetric(self.model.filter.covariance)).reshape(n, n)

    def parameters(self, theta: Array) -> Mapping[str, Any]:
        """Return learned parameters by name, plain numbers and lists, as `kalman.build` takes them."""
        return self.model.parameters(theta)

    def fit_keys(self, rows: SortedRows, keys: int, unit: float, population: Population | None) -> KeyFit:
        """Return each key's own parameters, as maximum likelihood finds them."""
        return self.model.fit_keys(rows, keys, unit, population)

    def population(self, fits: Sequence[KeyFit]) -> Population:
        """Return the population of keys."""
        return self.model.population(fits)


def expectation_maximisation(model: "Learning") -> ExpectationMaximisation:
    """Return the EM learner of a model. Raises ModelError where EM has no closed form."""
    if model.scope != "pooled":
        raise ModelError(
            "learn.method", "em learns for all keys together only", "write pooled, or method: mle"
        )
    fields = {request.name: request.field for request in learn_requests(model.definition)}
    terms = {p.name: _terms(model, p) for p in model.learned}
    for name, count in terms.items():
        problem = _regression_problem(model, name)
        if count == 0 or problem is not None:
            raise ModelError(
                fields.get(name, "learn.parameters"),
                problem or f"em has no closed form for {name}",
                "write learn.method: mle, or learn Q, R, variances, entries of F and H and the initial distribution",
            )
    return ExpectationMaximisation(model, terms)


def _terms(model: "Learning", parameter: Parameter) -> int:
    """Return the number of squares of a parameter's noise in a transition, 0 where EM cannot learn it."""
    if parameter.name in ("R", "initial.mean", "initial.covariance"):
        return 1
    if parameter.name == "Q" and parameter.kind == "covariance":
        return 1
    if of_letter([parameter.name], "F") or of_letter([parameter.name], "H"):
        return 1
    if parameter.kind != "positive":
        return 0
    return scaled(model.filter.process, parameter, model.filter.controls).rank


def _regression_problem(model: "Learning", name: str) -> str | None:
    """Return why an entry of F or H has no regression; None where it has one, or for other parameters."""
    found = of_letter([name], "F") + of_letter([name], "H")
    if not found:
        return None
    matrix, i, _ = found[0]
    noise = "Q" if matrix == "F" else "R"
    if used(next(p.value for p in model.filter.parameters if p.name == noise)):
        return (
            f"em regresses {name} on a {noise} that is the same for all rows, and this one comes from columns"
        )
    if _written(model, noise)[i * (i + 3) // 2] == 0.0:
        return f"em regresses {name} on noise, and {noise}[{i}][{i}] is zero"
    if model.filter.diffuse:
        return f"em for {name} needs a proper initial distribution, and initial.diffuse gives none"
    return None


def _written(model: "Learning", noise: str) -> list[float]:
    """Return the packed entries of Q or R as they are written."""
    return list(numbers(next(p.value for p in model.filter.parameters if p.name == noise)))


def _symmetric_slope(packed: Sequence[float]) -> Array:
    """Return G with dL = trace(G dQ), from the derivatives by packed entries."""
    full = np.array(symmetric(packed))
    return 0.5 * (full + np.diag(np.diag(full)))
