"""Maximum likelihood for groups of keys: each group has parameters of its own, all groups are searched together.

A group's log-likelihood is the sum over its keys, so that one evaluation of all keys, each at its group's theta, is one
of every group. Each group is searched by scoring (`kalman.learning.scoring`) from the pooled maximum, and all
unfinished searches are evaluated at once. A group's theta has a normal prior around the pooled one, so a group with
few rows stays near it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kalman.learning.fisher_information import information
from kalman.learning.maximum_likelihood import STEP, Learning
from kalman.learning.score import score
from kalman.learning.scoring import Maximum, Point, Search, covariance, finite, search
from kalman.linalg.packing import symmetric
from kalman.run import SortedRows
from kalman.types import Array

DEVIATION = 1.0
"""Standard deviation of the prior in free numbers without unit: a variance within a factor e^2 either way, at 95 %."""

Sums = tuple[Array, Array, np.ndarray]
"""Log-likelihood (J,), a vector (s, J), rows used (J,) of J groups; over several buckets: their sums."""
GroupEvaluate = Callable[[Array, np.ndarray], Sums]
"""Returns the sums of the groups `which` (J,) at theta (p, J)."""


class GroupFit(NamedTuple):
    """The result of learning for each of G groups.

    theta          (p, G) free numbers
    parameters     of each group by name, as `kalman.build` takes them; errors: their standard errors, None if not known
    log_likelihood (G,) without the prior; used (G,) rows; converged (G,) bool
    iterations     the largest number of any group
    """

    theta: Array
    parameters: list[dict[str, Any]]
    errors: list[dict[str, Any] | None]
    log_likelihood: Array
    used: np.ndarray
    converged: np.ndarray
    iterations: int


@dataclass(frozen=True)
class GroupLearning:
    """Maximum likelihood of a linear model for each group of keys."""

    model: Learning

    def evaluate(self, theta: Array, group: np.ndarray, rows: SortedRows, keys: int, unit: float) -> Sums:
        """Return the sums of J groups at theta (p, J) over rows of keys; `group` (keys,) is each key's group.

        The vector is the gradient and the packed information, as in `Learning.evaluate`; sums are exactly rounded.
        """
        model, groups = self.model, theta.shape[1]
        add = _adder(group, groups)
        own = theta[:, group]
        scored = score(model.each, model.own_names, rows, keys, unit, model.begun(own, keys))
        parts = [scored.gradient]
        parts += [scored.mean] if "initial.mean" in model.names else []
        parts += [scored.covariance] if "initial.covariance" in model.names else []
        slopes = [add(row) for part in parts for row in part]
        gradient = model.pulled(list(theta), slopes)
        starts = [
            model.begun(own + step[:, None], keys) for step in (0.0 * theta[:, 0], *STEP * np.eye(len(theta)))
        ]
        steps = np.full(len(theta), STEP)
        packed = information(model.each, rows, keys, unit, starts, steps, np.empty((0, len(starts))))
        vector = np.array([*gradient, *(add(row) for row in packed)])
        used = np.bincount(group, scored.used, minlength=groups).astype(np.int64)
        return add(scored.log_likelihood), vector, used

    def fit(self, evaluate: GroupEvaluate, pooled: Array, groups: int, max_iterations: int) -> GroupFit:
        """Return the modes of the groups' posteriors, searched from the pooled theta (p,)."""
        pooled = np.asarray(pooled, float)
        p = len(pooled)
        narrow = np.where(np.isfinite(self.model.limits), DEVIATION**-2.0, 0.0)

        def points(theta: Array, which: np.ndarray) -> list[Point]:
            value, vector, used = evaluate(theta, which)
            away = theta - pooled[:, None]
            value = value - 0.5 * (narrow[:, None] * away**2).sum(axis=0)
            gradient = vector[:p] - narrow[:, None] * away
            return [
                Point(
                    theta[:, j],
                    float(value[j]),
                    gradient[:, j],
                    np.array(symmetric(vector[p:, j].tolist())) + np.diag(narrow),
                    int(used[j]),
                )
                for j in range(len(which))
            ]

        starts = points(np.repeat(pooled[:, None], groups, axis=1), np.arange(groups))
        found = [Maximum(start, 0, False) for start in starts]
        searches = {
            g: search(start, self.model.limits, max_iterations)
            for g, start in enumerate(starts)
            if finite(start)
        }
        _together(searches, found, points)
        theta = np.array([one.point.theta for one in found]).reshape(groups, p).T
        return GroupFit(
            theta,
            [self.model.parameters(one.point.theta) for one in found],
            [
                self.model.errors(one.point.theta, covariance(one.point.information))
                if finite(one.point)
                else None
                for one in found
            ],
            np.array([one.point.value for one in found])
            + 0.5 * (narrow[:, None] * (theta - pooled[:, None]) ** 2).sum(axis=0),
            np.array([one.point.used for one in found], np.int64),
            np.array([one.converged for one in found], bool),
            max((one.iterations for one in found), default=0),
        )


def _together(
    searches: dict[int, Search],
    found: list[Maximum],
    points: Callable[[Array, np.ndarray], Sequence[Point]],
) -> None:
    """Run searches, evaluating the points of all of them at once, and put their maxima into `found`."""
    answers: dict[int, Point | None] = dict.fromkeys(searches)
    while answers:
        asked: dict[int, Array] = {}
        for g, answer in answers.items():
            try:
                asked[g] = next(searches[g]) if answer is None else searches[g].send(answer)
            except StopIteration as end:
                found[g] = end.value
        if not asked:
            return
        theta = np.array(list(asked.values())).T
        answers = dict(zip(asked, points(theta, np.array(list(asked))), strict=True))


def _adder(group: np.ndarray, groups: int) -> Callable[[Array], Array]:
    """Return a function that sums values (keys,) by group, (groups,), exactly rounded."""
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(groups + 1)).tolist()

    def add(values: Array) -> Array:
        ordered = values[order].tolist()
        return np.array([math.fsum(ordered[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)])

    return add


def group_learning(model: Any) -> GroupLearning:
    """Return the learner by group of keys of a learner from `kalman.learning.learners.learnable`."""
    assert isinstance(model, Learning)
    return GroupLearning(model)
