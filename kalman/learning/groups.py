"""Maximum likelihood for groups of keys: each group has separate parameters, and all groups are searched together.

A group's log-likelihood is the sum over its keys, so that one evaluation of all keys, each key at its group's theta,
evaluates every group. Each group is searched by scoring (`kalman.learning.scoring`), at first along the scale of all
noise, and all unfinished searches are evaluated at once. The start is inside the bounds even if the pooled maximum is
at a bound, where a group's likelihood would be flat. A group's theta has a normal prior around the start, so that a
group with few rows stays near the pooled theta. The prior is wider if the groups differ more in scale.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kalman.learning.bounds import (
    Variables,
    compute_free_covariance,
    fit_scale,
    search_outcome,
    search_within,
)
from kalman.learning.em import Fit, climb_each
from kalman.learning.em_linear import ExpectationMaximisation
from kalman.learning.filter_learning import FilterLearning
from kalman.learning.filter_searches import compute_observed_curvature
from kalman.learning.fisher_information import compute_fisher_information
from kalman.learning.key_fits import FitOutcome, find_row_shortage
from kalman.learning.keys.points import drop_unseen
from kalman.learning.maximum_likelihood import STEP, Learning
from kalman.learning.score import score
from kalman.learning.scoring import Maximum, Point, build_point, is_finite
from kalman.run import SortedRows
from kalman.types import Array

FEW = 0.5
"""If a group's rows make less than this share of its result, the group has too few rows."""
DEVIATION = 1.0
"""Standard deviation of the prior of a free number without unit: 95 % of variances are within a factor e^2."""

Sums = tuple[Array, Array, np.ndarray]
"""Log-likelihood (J,), a vector (s, J) and number of rows used (J,) of J groups, summed over the buckets."""
GroupEvaluate = Callable[[Array, np.ndarray], Sums]
"""Returns the sums of the groups `which` (J,) at theta (p, J)."""


class GroupFit(NamedTuple):
    """The result of learning for each of G groups.

    theta          (p, G) free numbers
    parameters     parameters of each group by name, as `kalman.build` takes them
    errors         standard errors of each group's parameters; None if not known, NaN for a parameter at its bound
    log_likelihood (G,) log-likelihood without the prior
    used           (G,) number of rows used
    outcome        outcome of each group
    reason         why each group did not converge, None for a converged group
    own            (G,) share of the group's rows, not of the prior, in the result, 0 to 1
    precision      (p, p) precision of the prior, whose mean is the theta at which the search began
    iterations     the largest number of iterations of a group
    """

    theta: Array
    parameters: list[dict[str, Any]]
    errors: list[dict[str, Any] | None]
    log_likelihood: Array
    used: np.ndarray
    outcome: list[FitOutcome]
    reason: list[str | None]
    own: Array
    precision: Array
    iterations: int

    @property
    def converged(self) -> np.ndarray:
        """Mask (G,) of groups that ended at a maximum inside the bounds."""
        return np.array(self.outcome) == FitOutcome.CONVERGED

    def of_rows(self, rows: np.ndarray) -> "GroupFit":
        """Return the fits; a group that used far fewer than its number of `rows` (G,) is marked as failed."""
        short = [find_row_shortage(*pair) for pair in zip(self.used.tolist(), rows.tolist(), strict=True)]
        short = [
            a if outcome <= FitOutcome.AT_BOUND else None
            for a, outcome in zip(short, self.outcome, strict=True)
        ]
        outcome = [FitOutcome.FAILED if a else b for a, b in zip(short, self.outcome, strict=True)]
        return self._replace(
            outcome=outcome, reason=[a or b for a, b in zip(short, self.reason, strict=True)]
        )


@dataclass(frozen=True)
class GroupLearning:
    """Maximum likelihood of a model for each group of keys; em: the EM learner that makes the first steps, or None."""

    model: Learning | FilterLearning
    em: ExpectationMaximisation | None = None

    def evaluate(self, theta: Array, group: np.ndarray, rows: SortedRows, keys: int, unit: float) -> Sums:
        """Return the sums of J groups at theta (p, J) over the rows of the keys; `group` (keys,) is each key's group.

        The vector is the gradient and the packed information, as in `Learning.evaluate`. The sums are exactly rounded.
        """
        model, groups = self.model, theta.shape[1]
        add = _build_adder(group, groups)
        own = theta[:, group]
        if isinstance(model, FilterLearning):
            value, vector, rows_used = model.evaluate_each(own, rows, keys, unit)
            count = np.bincount(group, rows_used, minlength=groups).astype(np.int64)
            finite = np.where(np.isfinite(vector), vector, 0.0)
            return _sum_groups(add, value), np.array([add(row) for row in finite]), count
        walked = model.evaluate_each(own, rows, keys, unit)
        if walked is not None:
            count = np.bincount(group, walked.used, minlength=groups).astype(np.int64)
            vector = drop_unseen(np.array([add(row) for row in walked.vector]), len(theta))
            return add(walked.value), vector, count
        scored = score(model.each, model.own_names, rows, keys, unit, model.begun(own, keys))
        parts = [scored.gradient]
        parts += [scored.mean] if "initial.mean" in model.names else []
        parts += [scored.covariance] if "initial.covariance" in model.names else []
        slopes = [add(row) for part in parts for row in part]
        gradient = model.pull_back_slopes(list(theta), slopes)
        starts = [
            model.begun(own + step[:, None], keys) for step in (0.0 * theta[:, 0], *STEP * np.eye(len(theta)))
        ]
        steps = np.full(len(theta), STEP)
        packed = compute_fisher_information(model.each, rows, keys, unit, starts, steps)
        vector = np.array([*gradient, *(add(row) for row in packed)])
        used = np.bincount(group, scored.used, minlength=groups).astype(np.int64)
        return add(scored.log_likelihood), vector, used

    def statistics(self, theta: Array, group: np.ndarray, rows: SortedRows, keys: int, unit: float) -> Sums:
        """Return the sums of J groups, as `evaluate` does, with EM's statistics as the vector."""
        assert self.em is not None
        groups = theta.shape[1]
        add = _build_adder(group, groups)
        value, vector, used = self.em.statistics(theta[:, group], rows, keys, unit)
        count = np.bincount(group, used, minlength=groups).astype(np.int64)
        return add(value), np.array([add(row) for row in vector]), count

    def fit(
        self,
        evaluate: GroupEvaluate,
        pooled: Fit,
        groups: int,
        max_iterations: int,
        statistics: GroupEvaluate | None = None,
    ) -> GroupFit:
        """Return the modes of the groups' posteriors.

        statistics: returns the sums of `GroupLearning.statistics`; if given, EM first moves each group towards its
            maximum.
        """
        middle, free = self._move_inside(pooled)
        variables, p = self.model.variables, len(middle)

        def points(theta: Array, which: np.ndarray) -> list[Point]:
            value, vector, used = evaluate(theta, which)
            return [
                build_point(theta[:, j], float(value[j]), vector[:, j], int(used[j]))
                for j in range(len(which))
            ]

        starts = points(np.repeat(middle[:, None], groups, axis=1), np.arange(groups))
        able = [g for g, start in enumerate(starts) if is_finite(start) and start.used]
        scaled = _search_together(
            {g: fit_scale(starts[g], variables.scale, variables.measurements) for g in able}, points
        )
        precision = _build_precision(middle, variables, free, [scaled[g].theta for g in able])
        prior = _Prior(middle, precision)
        if self.em is not None and statistics is not None and able:
            climbed = self._climb_groups(statistics, [scaled[g] for g in able], able)
            scaled = dict(zip(able, points(climbed, np.array(able)), strict=True))
        found = _search_together(
            {g: search_within(prior.apply_prior(scaled[g]), variables, max_iterations) for g in able},
            lambda theta, which: [prior.apply_prior(point) for point in points(theta, which)],
        )
        still = np.zeros(p, np.int8)
        all_found = [
            found.get(g) or Maximum(prior.apply_prior(starts[g]), 0, still, None) for g in range(groups)
        ]
        if isinstance(self.model, FilterLearning):
            all_found = self._replace_curvature(all_found, prior, points)
        return self._build_result(all_found, prior)

    def _replace_curvature(
        self,
        found: list[Maximum],
        prior: "_Prior",
        points: Callable[[Array, np.ndarray], list[Point]],
    ) -> list[Maximum]:
        """Return the maxima with the observed curvature as information."""
        assert isinstance(self.model, FilterLearning)
        theta = np.array([one.point.theta for one in found]).T
        held = np.array([one.held for one in found]).T != 0
        which = np.arange(len(found))

        def gradient(moved: Array) -> Array:
            at = [prior.apply_prior(one).gradient for one in points(moved, which)]
            return np.array(at).T

        known = np.moveaxis(np.array([one.point.information for one in found]), 0, -1)
        known = compute_observed_curvature(gradient, theta, self.model.sizes(theta), held, known)
        pairs = zip(found, np.moveaxis(known, -1, 0), strict=True)
        return [one._replace(point=one.point._replace(information=J)) for one, J in pairs]

    def _climb_groups(self, statistics: GroupEvaluate, starts: Sequence[Point], able: Sequence[int]) -> Array:
        """Return the result of EM (p, J) for the groups `able` from their starts."""
        assert self.em is not None
        which = np.array(able)
        begin = np.array([one.theta for one in starts]).T
        return climb_each(lambda theta, some: statistics(theta, which[some]), self.em.maximise, begin)

    def _move_inside(self, pooled: Fit) -> tuple[Array, Array]:
        """Return a theta inside the bounds near the pooled theta, and a mask (p,) of numbers inside the bounds there.

        A variable at its bound begins at its written value, moved by the mean change in scale of the other variables.
        """
        theta, start, scale = np.asarray(pooled.theta, float), self.model.start, self.model.variables.scale
        if pooled.covariance is None:
            return theta, np.ones(len(theta), bool)
        free = ~np.isnan(np.diag(pooled.covariance))
        moved = free & (scale > 0.0)
        shift = float(np.mean((theta - start)[moved] / scale[moved])) if moved.any() else 0.0
        return np.where(free, theta, start + shift * scale), free

    def _build_result(self, found: list[Maximum], prior: "_Prior") -> GroupFit:
        variables = self.model.variables
        ends = [_judge_group(one, variables, prior) for one in found]
        errors = [
            self.model.errors(one.point.theta, compute_free_covariance(one.point, one.held))
            if is_finite(one.point)
            else None
            for one in found
        ]
        theta = np.array([one.point.theta for one in found]).reshape(len(found), len(prior.mean)).T
        return GroupFit(
            theta,
            [self.model.parameters(one.point.theta) for one in found],
            errors,
            np.array([one.point.value - prior.value(one.point.theta) for one in found]),
            np.array([one.point.used for one in found], np.int64),
            [outcome for outcome, _, _ in ends],
            [reason for _, reason, _ in ends],
            np.array([own for _, _, own in ends]),
            prior.precision,
            max((one.iterations for one in found), default=0),
        )


@dataclass(frozen=True)
class _Prior:
    """A normal prior of theta (p,)."""

    mean: Array
    precision: Array

    def value(self, theta: Array) -> float:
        """Return the logarithm of the prior's density at theta, without the constant."""
        away = theta - self.mean
        return -0.5 * float(away @ self.precision @ away)

    def apply_prior(self, point: Point) -> Point:
        """Return the point of the posterior, given a point of the likelihood."""
        return point._replace(
            value=point.value + self.value(point.theta),
            gradient=point.gradient - self.precision @ (point.theta - self.mean),
            information=point.information + self.precision,
        )


def _build_precision(middle: Array, variables: Variables, free: Array, scaled: Sequence[Array]) -> Array:
    """Return the precision of the groups' prior.

    The prior's standard deviation is DEVIATION, and larger along the scale of the noise if the groups differ in scale.
    Variables that have a unit, or are at a bound in the pooled fit, have no prior.
    """
    known = np.flatnonzero(np.isfinite(variables.limits) & free)
    scale = variables.scale[known]
    result = np.zeros((len(middle), len(middle)))
    length = float(scale @ scale)
    apart = [float(scale @ (one - middle)[known]) / length for one in scaled] if length else []
    covariance = DEVIATION**2.0 * np.eye(len(known))
    if apart:
        covariance = covariance + np.mean(np.square(apart)) * np.outer(scale, scale)
    result[np.ix_(known, known)] = np.linalg.inv(covariance)
    return result


def _judge_group(found: Maximum, variables: Variables, prior: _Prior) -> tuple[FitOutcome, str | None, float]:
    """Return a group's outcome, why it did not converge, and the share of the group's rows in the result."""
    held = np.diag(prior.precision) > 0.0
    whole = np.diag(found.point.information)[held]
    own = 1.0 - float(np.mean(np.diag(prior.precision)[held] / whole)) if held.any() else 1.0
    if not found.point.used:
        return FitOutcome.TOO_FEW_ROWS, "no row can be used: it has the values of all groups", 0.0
    if not is_finite(found.point):
        return FitOutcome.FAILED, "the log-likelihood is not finite: it has the values of all groups", 0.0
    outcome, reason = search_outcome(found, variables)
    if outcome == FitOutcome.CONVERGED and own < FEW:
        reason = f"its own rows make {own:.0%} of the result, the other groups the rest"
        return FitOutcome.TOO_FEW_ROWS, reason, own
    return outcome, reason, own


T = TypeVar("T")


def _search_together(
    searches: dict[int, Generator[Array, Point, T]],
    points: Callable[[Array, np.ndarray], Sequence[Point]],
) -> dict[int, T]:
    """Return the results of searches by group; the points of all groups are evaluated at once."""
    found: dict[int, T] = {}
    answers: dict[int, Point | None] = dict.fromkeys(searches)
    while answers:
        asked: dict[int, Array] = {}
        for g, answer in answers.items():
            try:
                asked[g] = next(searches[g]) if answer is None else searches[g].send(answer)
            except StopIteration as end:
                found[g] = end.value
        if not asked:
            break
        theta = np.array(list(asked.values())).T
        answers = dict(zip(asked, points(theta, np.array(list(asked))), strict=True))
    return found


def _sum_groups(add: Callable[[Array], Array], value: Array) -> Array:
    """Return the sums by group of the keys' values; minus infinity for a group with a value that is not finite."""
    good = np.isfinite(value)
    return np.where(add((~good).astype(float)) > 0.0, -np.inf, add(np.where(good, value, 0.0)))


def _build_adder(group: np.ndarray, groups: int) -> Callable[[Array], Array]:
    """Return a function that adds values (keys,) to exactly rounded sums by group (groups,)."""
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(groups + 1)).tolist()

    def add(values: Array) -> Array:
        ordered = values[order].tolist()
        return np.array([math.fsum(ordered[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)])

    return add


def group_learning(model: Any) -> GroupLearning:
    """Return the learner for groups of keys, given a learner from `kalman.learning.learners.learnable`."""
    if isinstance(model, ExpectationMaximisation):
        return GroupLearning(model.model, model)
    assert isinstance(model, (Learning, FilterLearning))
    return GroupLearning(model)
