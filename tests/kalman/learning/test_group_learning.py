"""Learning for groups of keys: each group as if it were alone, drawn towards all of them."""

from typing import Any

import numpy as np
import pytest

import kalman
from kalman.learning import learners, maximum_likelihood
from kalman.learning.em import Fit
from kalman.learning.groups import GroupLearning, group_learning
from kalman.learning.key_fits import FitOutcome
from kalman.models.groups import begin_states
from tests.kalman.learning.test_learning import level, simulated
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT

BY_GROUP = {"scope": "group", "by": ["region"]}


def of_group(rows, group, g):
    number = np.cumsum(group == g) - 1
    mask = group[rows.key] == g
    return kalman.SortedRows(number[rows.key[mask]], rows.time[mask], rows.y[:, mask], rows.u[:, mask])


def fit_all(learn: GroupLearning, rows, group, pooled, groups):
    """Evaluate as buckets of rows do: the groups asked for, and nothing of the others."""
    asked = []

    def evaluate(theta, which, of=learn.evaluate):
        asked.append(len(which))
        place = np.full(groups, -1)
        place[which] = np.arange(len(which))
        kept = place[group] >= 0
        number = np.cumsum(kept) - 1
        mask = kept[rows.key]
        part = kalman.SortedRows(number[rows.key[mask]], rows.time[mask], rows.y[:, mask], rows.u[:, mask])
        return of(theta, place[group[kept]], part, int(kept.sum()), UNIT)

    def statistics(theta, which):
        return evaluate(theta, which, learn.statistics)

    return learn.fit(evaluate, pooled, groups, 100, statistics), asked


@pytest.mark.parametrize("kind", ["explicit", "local_linear_trend", "ornstein_uhlenbeck"])
def test_groups_add_up_their_keys_to_the_bit(kind):
    """Against the pooled evaluation of each group's keys alone."""
    rng = np.random.default_rng([3, len(kind)])
    names = {
        "explicit": ["Q"],
        "local_linear_trend": ["slope_variance"],
        "ornstein_uhlenbeck": ["rate", "mean"],
    }
    parameters = [*names[kind], "R", "initial.mean", "initial.covariance"]
    definition = random_definition(rng, kind, 2, 2)
    rows = random_rows(rng, definition, 11, 8)
    group = rng.permutation([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2])
    learn = maximum_likelihood.build_linear_learner(
        {**definition, "learn": {"parameters": parameters, **BY_GROUP}}
    )
    theta = learn.start[:, None] + 0.1 * rng.normal(size=(len(learn.start), 3))
    value, vector, used = GroupLearning(learn).evaluate(theta, group, rows, 11, UNIT)
    for g in range(3):
        alone = of_group(rows, group, g)
        expected = learn.evaluate(theta[:, g], alone, int((group == g).sum()), UNIT)
        assert (value[g], used[g]) == (expected[0], expected[2])
        p = len(theta)
        # the free numbers' own functions may round otherwise over many groups than for one
        np.testing.assert_allclose(vector[:p, g], expected[1][:p], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(vector[p:, g], expected[1][p:], rtol=1e-7, atol=1e-8)


def test_each_group_learns_as_it_would_alone():
    rng = np.random.default_rng(21)
    keys = 30
    rows, _, _ = simulated(rng, keys, 60)
    group = np.repeat([0, 1, 2], [5, 10, 15])[rng.permutation(keys)]
    y = rows.y * np.array([1.0, 4.0, 0.3])[group[rows.key]]
    rows = rows._replace(y=y)
    learn = maximum_likelihood.build_linear_learner(
        level({"parameters": ["variance", "R"], **BY_GROUP}, 1.0, 1.0)
    )
    pooled = learn.fit(lambda theta: learn.evaluate(theta, rows, keys, UNIT), lambda: rows.y, 100)
    found, asked = fit_all(group_learning(learn), rows, group, pooled, 3)
    # one unit of variance in the ratio of the two variances, and along their common scale as the groups differ in it
    np.testing.assert_allclose(np.linalg.eigvalsh(np.linalg.inv(found.precision))[0], 1.0)
    np.testing.assert_allclose(found.own, 1.0, atol=0.1)
    assert found.converged.all() and found.used.tolist() == [300, 600, 900] and len(asked) < 15
    for g in range(3):
        alone = of_group(rows, group, g)

        def objective(theta, alone=alone, members=group == g):
            value, gradient, used = learn.compute_gradient(theta, alone, int(members.sum()), UNIT)
            away = theta - pooled.theta
            drawn = found.precision @ away
            return value - 0.5 * away @ drawn, gradient - drawn, used

        expected = maximum_likelihood.fit(objective, pooled.theta)
        np.testing.assert_allclose(found.theta[:, g], expected.theta, atol=2e-5)
        away = found.theta[:, g] - pooled.theta
        value = found.log_likelihood[g] - 0.5 * away @ found.precision @ away
        assert value == pytest.approx(expected.log_likelihood, rel=1e-11)
        errors = found.errors[g]
        assert errors is not None and 0.0 < errors["R"][0][0] < 0.3 * found.parameters[g]["R"][0][0]


def test_groups_do_not_see_each_other_and_a_bad_one_stays_at_the_pooled_values():
    rng = np.random.default_rng(22)
    keys = 12
    rows, _, _ = simulated(rng, keys, 30)
    group = np.arange(keys) % 4
    y = rows.y.copy()
    y[:, group[rows.key] == 2] = np.nan  # nothing measured
    rows = rows._replace(y=y)
    learn = group_learning(learners.learnable(level({"parameters": ["variance", "R"], **BY_GROUP}, 1.0, 1.0)))
    pooled = Fit(np.array([0.2, -0.3]), 0.0, 0, FitOutcome.CONVERGED)
    found, _ = fit_all(learn, rows, group, pooled, 4)
    same(found.theta[:, 2], pooled.theta)
    assert found.outcome[2] == FitOutcome.TOO_FEW_ROWS and found.own[2] == 0.0
    # the others are at the maxima of their own posteriors: of the company they know the width of the prior alone
    model: Any = learn.model
    for g in (0, 1, 3):
        alone = of_group(rows, group, g)
        _, gradient, _ = model.compute_gradient(found.theta[:, g], alone, 3, UNIT)
        drawn = found.precision @ (found.theta[:, g] - pooled.theta)
        np.testing.assert_allclose(gradient, drawn, atol=1e-4)


def test_what_pooled_learning_left_at_a_bound_begins_as_written():
    """By the scale of what it did determine, if there is any."""
    learn = group_learning(learners.learnable(level({"parameters": ["variance", "R"], **BY_GROUP}, 1.0, 4.0)))
    start, scale = learn.model.start, learn.model.variables.scale
    np.testing.assert_allclose(start, [0.0, 0.5 * np.log(4.0)], rtol=1e-15)
    for known, shift in (
        (np.diag([0.1, 0.2]), None),
        (np.diag([np.nan, 0.2]), 7.0),
        (np.diag([np.nan] * 2), 0.0),
    ):
        free = np.isfinite(np.diag(known))
        theta = np.where(free, start + 7.0 * scale, -99.0)
        begin, determined = learn._move_inside(Fit(theta, 0.0, 0, FitOutcome.CONVERGED, covariance=known))
        np.testing.assert_allclose(begin, theta if shift is None else start + shift * scale, rtol=1e-14)
        np.testing.assert_array_equal(determined, free)


def test_keys_begin_with_the_parameters_of_their_group():
    definition = {
        **level({"parameters": ["R", "initial.mean", "initial.covariance"], **BY_GROUP}, 1.0, 2.0),
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
    }
    pooled = {"R": [[3.0]], "initial.mean": [1.0], "initial.covariance": [[2.0]]}
    own = {"R": [[5.0]], "initial.mean": [7.0], "initial.covariance": [[4.0]]}
    learned = {**pooled, "groups": {"by": ["region"], "values": [["a"]], "parameters": [own]}}
    states = begin_states(kalman.build, definition, learned)
    assert states.T.tolist() == [[7.0, 4.0, 5.0], [1.0, 2.0, 3.0]]
    same(kalman.build(definition, learned).initial(1)[:, 0], states[:, 1])
    for other in ({**BY_GROUP, "by": ["country"]}, {"scope": "key"}):
        with pytest.raises(kalman.ModelError, match="learned by region"):
            kalman.build(
                {**level({"parameters": ["R"], **other})}, {"R": [[1.0]], "groups": learned["groups"]}
            )


@pytest.mark.parametrize(
    ("learn", "field"),
    [
        ({"parameters": ["R"], "scope": "group"}, "learn.by"),
        ({"parameters": ["R"], "by": ["region"]}, "learn.by"),
        ({"parameters": ["H[0][1]"], **BY_GROUP}, "learn.parameters[0]"),
        ({"parameters": ["R"], "method": "ml", **BY_GROUP}, "learn.method"),
        ({"parameters": ["R"], "scope": "tribe"}, "learn.scope"),
    ],
)
def test_an_invalid_learn_request_of_groups_is_refused(learn, field):
    definition = level(learn)
    definition["observation"]["H"] = [[1.0]]
    with pytest.raises(kalman.ModelError) as error:
        learners.learnable(definition)
    assert error.value.field == field


def test_a_mixture_is_not_learned_by_group():
    definition = {
        "filter": "poisson_mixture",
        "measurement": ["count"],
        "mixture": {"components": 2},
        "learn": {"parameters": ["weights", "rates"], **BY_GROUP},
    }
    with pytest.raises(kalman.ModelError, match="not learned by group"):
        learners.learnable(definition)


def test_figures_of_fit_at_given_parameters_are_those_of_the_fit_itself():
    rng = np.random.default_rng(23)
    rows, _, _ = simulated(rng, 6, 50)
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"], "scope": "key"}))
    fits = learn.fit_keys(rows, 6, UNIT, None)
    assert (fits.outcome == FitOutcome.CONVERGED).all()
    nis, p_value = learn.check(fits.theta, rows, 7, UNIT)
    np.testing.assert_allclose(nis[:6], fits.nis, rtol=1e-12)
    # the same statistic, with the degree of freedom that a fit to the key alone would have cost
    assert (p_value[:6] > fits.ljung_box).all() and (p_value[:6] < 3.0 * fits.ljung_box + 0.1).all()
    assert np.isnan([nis[6], p_value[6]]).all()
    assert learn.places == {"variance": 0.0, "R": [[1.0]]}
