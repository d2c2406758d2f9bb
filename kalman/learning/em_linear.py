"""Expectation maximisation for the linear filter: noise, initial distribution, entries of F and H.

The E-step needs the smoothed second moments of the noise, which follow from the exact gradient of the log-likelihood.
By Fisher's identity, this gradient is the expected gradient of the complete data's log-likelihood: for N terms w ~ N(0,
Q) whose
smoothed squares sum to S, dL/dQ = (Q^-1 S Q^-1 - N Q^-1) / 2, so that the M-step's S / N is Q + (2 / N) Q (dL/dQ) Q.
Irregular times and missing components need no special case: N may count terms without data, whose expectation is Q.
Entries of F and H are in `kalman.learning.em_entries`.

References: Dempster, Laird and Rubin (1977); Shumway and Stoffer (1982); Koopman (1993).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kalman.filters.robust.adaptive import rank_parameter
from kalman.learning import constraints
from kalman.learning.bounds import search_within
from kalman.learning.em import Evaluate, Evaluation, Fit, Sample, climb, climb_each
from kalman.learning.em_entries import (
    MatrixRegression,
    compute_second_moments,
    regress_entries,
    select_entries,
)
from kalman.learning.key_fits import KeyFit, Population
from kalman.learning.score import score
from kalman.learning.scoring import Point, build_point, is_finite, maximise
from kalman.linalg.packing import pack_lower, packed_size, unpack_symmetric
from kalman.models.columns import find_columns, require_numbers, resolve
from kalman.models.learned_entries import learn_requests
from kalman.models.structure import Parameter
from kalman.run import SortedRows
from kalman.types import Array, ModelError

if TYPE_CHECKING:
    from kalman.learning.maximum_likelihood import Learning

TOLERANCE = 1e-10
"""Gain in log-likelihood per row below which EM stops."""


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
        """Return "pooled", "group" or "key"."""
        return self.model.scope

    def evaluate(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> Evaluation:
        """Return log-likelihood, a vector, and the number of rows, summed over keys, exactly rounded.

        The vector is the E-step of `statistics`. If theta has one more entry, the vector is gradient and information
        instead.
        """
        if len(theta) > len(self.model.start):
            return self.model.evaluate(theta[: len(self.model.start)], rows, keys, unit)
        value, vector, used_rows = self.statistics(theta, rows, keys, unit)
        sums = [math.fsum(row) for row in vector.tolist()]
        return math.fsum(value.tolist()), np.array(sums), int(used_rows.sum())

    def statistics(
        self, theta: Array, rows: SortedRows, keys: int, unit: float
    ) -> tuple[Array, Array, Array]:
        """Return log-likelihood (keys,), the E-step (s, keys) and the rows used (keys,) at theta (p,) or (p, keys).

        The E-step is the derivative by the packed entries; where entries of F or H are learned, the derivative by all
        entries of these matrices and the second moments of the states; then the numbers of transitions, measurements
        and keys.
        """
        model, each = self.model, self.model.each
        begun = model.begun(theta, keys)
        found = score(each, model.own_names, rows, keys, unit, begun, self._all_entries)
        own = len(found.gradient) - len(self._all_entries)
        parts = [found.gradient[:own]]
        parts += [found.mean] if "initial.mean" in model.names else []
        parts += [found.covariance] if "initial.covariance" in model.names else []
        parts.append(found.gradient[own:])
        if self._all_entries:
            (scale,) = resolve([each.noise_scale], list(rows.u))
            scale = np.broadcast_to(np.asarray(scale, float), rows.key.shape)
            sums = compute_second_moments(each, begun, rows, keys, unit, scale)
            parts += [part for matrix, part in zip("FH", sums, strict=True) if self._find_shape(matrix)]
        some = (found.used > 0).astype(float)
        measured = np.bincount(rows.key[~np.isnan(rows.y).all(axis=0)], minlength=keys)
        parts.append(np.array([found.used - some, measured, some], float))
        return found.log_likelihood, np.concatenate(parts), found.used

    def fit(self, evaluate: Evaluate, sample: Sample, max_iterations: int) -> Fit:
        """Return the maximum found by EM from the written parameters; scoring replaces the slow last steps of EM."""
        climbed = climb(evaluate, self.maximise, self.model.start, max_iterations, TOLERANCE)

        def point(theta: Array) -> Point:
            return build_point(theta, *evaluate(np.append(theta, 1.0)))

        begin = point(climbed.theta)
        if not is_finite(begin):
            return climbed
        best = maximise(point, search_within(begin, self.model.variables, max_iterations))
        return self.model.fit_at(best, best.point)._replace(iterations=climbed.iterations)  # those of EM

    def maximise(self, theta: Array, vector: Array) -> Array:
        """Return the theta (p, J) of the M-step of J keys or groups from vectors (s, J), or (p,) from a vector (s,)."""
        if theta.ndim == 1:
            return self.maximise(theta[:, None], vector[:, None])[:, 0]
        transitions, measured, begun = vector[-3:]
        counts = {"R": measured, "initial.mean": begun, "initial.covariance": begun}
        count = {
            p.name: np.maximum(1.0, counts.get(p.name, self.terms.get(p.name, 1) * transitions))
            for p in self.model.learned
        }
        entries = np.array([np.broadcast_to(a, theta.shape[1:]) for a in self.model.entries(theta)])
        learned: dict[str, tuple[Array, Array]] = {}
        at = 0
        for p in self.model.learned:
            learned[p.name] = entries[at : at + len(p.value)], vector[at : at + len(p.value)]
            at += len(p.value)
        P = self._build_covariance("initial.covariance", learned)
        moved_entries, more_squares = self._regress_matrices(learned, vector[at:-3])
        result: list[Any] = []
        for p in self.model.learned:
            value, slope = learned[p.name]
            if p.name in moved_entries:
                new = moved_entries[p.name][None]
            elif p.name == "initial.mean":
                new = value + _apply_matrices(P, slope) / count[p.name]
            elif p.kind == "covariance":
                Q = _unpack_matrices(value)
                moved = Q + 2.0 * (Q @ _symmetrise_slope(slope) @ Q) / count[p.name][:, None, None]
                if p.name in more_squares:
                    moved = moved + more_squares[p.name] / count[p.name][:, None, None]
                if p.name == "initial.covariance" and "initial.mean" in learned:
                    step = _apply_matrices(P, learned["initial.mean"][1]) / count[p.name]
                    moved = moved - step.T[:, :, None] * step.T[:, None, :]
                new = np.array(pack_lower(list(np.moveaxis(moved, 0, -1))))
            else:
                new = value + 2.0 / count[p.name] * value**2 * slope
            result += constraints.invert_entries(p, list(new))
        return np.array(result)

    def _find_shape(self, matrix: str) -> tuple[int, int] | None:
        """Return the shape of F or H if some of its entries are learned, else None."""
        n = len(self.model.filter.states)
        found = any(letter == matrix for letter, _, _ in self.model.entries_of_matrices)
        return (n if matrix == "F" else self.model.filter.measurements, n) if found else None

    @cached_property
    def _all_entries(self) -> tuple[tuple[str, int, int], ...]:
        """All entries of the matrices with learned entries."""
        shapes = [(matrix, self._find_shape(matrix)) for matrix in "FH"]
        return tuple(
            (a, i, j) for a, shape in shapes if shape for i in range(shape[0]) for j in range(shape[1])
        )

    def _regress_matrices(
        self, learned: Mapping[str, tuple[Array, Array]], rest: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the new entries (J,) of F and H by name, and the changes (J, q, q) in the squares of Q and R.

        rest: the part of an evaluation's vector between the derivatives by learned parameters and the counts.
        """
        n = len(self.model.filter.states)
        shapes = [(matrix, shape) for matrix in "FH" if (shape := self._find_shape(matrix))]
        gradients: list[Array] = []
        for _, shape in shapes:
            size = shape[0] * shape[1]
            gradients.append(np.moveaxis(rest[:size].reshape(*shape, -1), -1, 0))
            rest = rest[size:]
        new: dict[str, Array] = {}
        squares: dict[str, Array] = {}
        for (matrix, _), gradient in zip(shapes, gradients, strict=True):
            moments, rest = _unpack_matrices(rest[: packed_size(n)]), rest[packed_size(n) :]
            noise = "Q" if matrix == "F" else "R"
            known = MatrixRegression(self._build_covariance(noise, learned), gradient, moments)
            free = [p for p in self.model.learned if select_entries([p.name], matrix)]
            now = np.array([learned[p.name][0][0] for p in free])
            slots = select_entries([p.name for p in free], matrix)
            change = regress_entries(known, free, now, slots)
            new |= {
                p.name: value + change[:, i, j] for p, value, (_, i, j) in zip(free, now, slots, strict=True)
            }
            squares[noise] = known.squares(change)
        return new, squares

    def _build_covariance(self, name: str, learned: Mapping[str, tuple[Array, Array]]) -> Array:
        """Return Q, R or the initial covariance (J, q, q)."""
        if name in learned:
            return _unpack_matrices(learned[name][0])
        keys = next(iter(learned.values()))[0].shape[1]
        model = self.model.filter
        packed = model.covariance if name == "initial.covariance" else _list_written_entries(self.model, name)
        return _unpack_matrices(np.repeat(np.array(packed)[:, None], keys, axis=1))

    def parameters(self, theta: Array) -> Mapping[str, Any]:
        """Return learned parameters by name, plain numbers and lists, as `kalman.build` takes them."""
        return self.model.parameters(theta)

    def fit_keys(self, rows: SortedRows, keys: int, unit: float, population: Population | None) -> KeyFit:
        """Return each key's parameters, by EM and then by the search of maximum likelihood."""
        return self.model.fit_keys(rows, keys, unit, population, self.climb_keys)

    def climb_keys(self, start: Array, rows: SortedRows, keys: int, unit: float) -> Array:
        """Return the theta (p, keys) at the end of EM from `start` (p, keys); each key uses its rows alone."""

        def evaluate(theta: Array, which: np.ndarray) -> tuple[Array, Array, Array]:
            kept, number = np.zeros(keys, bool), np.zeros(keys, np.int64)
            kept[which], number[which] = True, np.arange(len(which))
            some = rows if kept.all() else rows.take(kept[rows.key])
            return self.statistics(theta, some._replace(key=number[some.key]), len(which), unit)

        return climb_each(evaluate, self.maximise, start)

    def check(self, theta: Array, rows: SortedRows, keys: int, unit: float) -> tuple[Array, Array]:
        """Return each key's mean NIS (K,) and p-value of Ljung and Box."""
        return self.model.check(theta, rows, keys, unit)

    @property
    def places(self) -> Mapping[str, Any]:
        """Return the positions in `KeyFit.parameters` of the entries of each parameter."""
        return self.model.places

    def population(self, fits: Sequence[KeyFit]) -> Population:
        """Return the population of keys."""
        return self.model.population(fits)


def build_em_learner(model: "Learning") -> ExpectationMaximisation:
    """Return the EM learner of a model. Raises ModelError where EM has no closed form."""
    fields = {request.name: request.field for request in learn_requests(model.definition)}
    terms = {p.name: _count_terms(model, p) for p in model.learned}
    for name, count in terms.items():
        problem = _find_regression_problem(model, name)
        if count == 0 or problem is not None:
            raise ModelError(
                fields.get(name, "learn.parameters"),
                problem or f"em has no closed form for {name}",
                "write learn.method: mle, or learn Q, R, variances, entries of F and H and the initial distribution",
            )
    return ExpectationMaximisation(model, terms)


def _count_terms(model: "Learning", parameter: Parameter) -> int:
    """Return the number of squares of a parameter's noise in a transition; 0 for a parameter that EM cannot learn."""
    if parameter.name in ("R", "initial.mean", "initial.covariance"):
        return 1
    if parameter.name == "Q" and parameter.kind == "covariance":
        return 1
    if select_entries([parameter.name], "F") or select_entries([parameter.name], "H"):
        return 1
    if parameter.kind != "positive":
        return 0
    return rank_parameter(model.filter.process, parameter, model.filter.controls).rank


def _find_regression_problem(model: "Learning", name: str) -> str | None:
    """Return why EM cannot regress an entry of F or H; None if EM can, and for other parameters."""
    found = select_entries([name], "F") + select_entries([name], "H")
    if not found:
        return None
    matrix, i, _ = found[0]
    noise = "Q" if matrix == "F" else "R"
    if find_columns(next(p.value for p in model.filter.parameters if p.name == noise)):
        return (
            f"em regresses {name} on a {noise} that is the same for all rows, and this one comes from columns"
        )
    if _list_written_entries(model, noise)[i * (i + 3) // 2] == 0.0:
        return f"em regresses {name} on noise, and {noise}[{i}][{i}] is zero"
    if model.filter.diffuse:
        return f"em for {name} needs a proper initial distribution, and initial.diffuse gives none"
    return None


def _list_written_entries(model: "Learning", noise: str) -> list[float]:
    """Return the packed entries of Q or R in the definition."""
    return list(require_numbers(next(p.value for p in model.filter.parameters if p.name == noise)))


def _unpack_matrices(packed: Array) -> Array:
    """Return symmetric matrices (J, q, q) from packed entries (s, J)."""
    return np.moveaxis(np.array(unpack_symmetric(list(packed))), -1, 0)


def _apply_matrices(P: Array, vector: Array) -> Array:
    """Return P (J, n, n) times vectors (n, J), as (n, J)."""
    return (P @ vector.T[:, :, None])[:, :, 0].T


def _symmetrise_slope(packed: Array) -> Array:
    """Return G (J, q, q) with dL = trace(G dQ), from the derivatives (s, J) by packed entries."""
    full = _unpack_matrices(packed)
    return 0.5 * (full + full * np.eye(full.shape[-1]))
