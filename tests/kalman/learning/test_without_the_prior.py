"""Priors draw the logarithms of variances alone, and log-likelihoods are told without them."""

import numpy as np
import pytest

import kalman
from kalman.learning import maximum_likelihood
from kalman.learning.em import Fit
from kalman.learning.groups import GroupLearning
from kalman.learning.key_fits import FitOutcome
from tests.kalman.learning.test_learning import level, simulated
from tests.kalman.support.oracles import UNIT

GROUPS = 3


def test_a_key_s_log_likelihood_is_that_of_the_filter_at_its_parameters():
    """Keys whose noise is far from the prior's middle, of a few rows each: the prior's share is large."""
    rng = np.random.default_rng(31)
    keys = 8
    rows, _, _ = simulated(rng, keys, 12)
    rows = rows._replace(y=rows.y * np.repeat(10.0 ** np.linspace(-2, 2, keys), 12))
    learn = maximum_likelihood.build_linear_learner(
        level({"parameters": ["variance", "R"], "scope": "key"}, 1.0, 1.0)
    )
    prior = learn.population([learn.fit_keys(rows, keys, UNIT, None)])
    found = learn.fit_keys(rows, keys, UNIT, prior)
    away = found.theta - prior.mean[:, None]
    assert (0.5 * (away**2).sum(axis=0)).max() > 3.0, "the prior says little here"
    for key in range(keys):
        here = rows.key == key
        variance, R = found.parameters[:, key]
        model = kalman.build(level(None, float(variance), float(R)))
        own = kalman.SortedRows(np.zeros(12, np.int64), rows.time[here], rows.y[:, here], rows.u[:, here])
        states, _ = kalman.run(model, kalman.initial_states(model, 1), own, UNIT)
        assert found.log_likelihood[key] == pytest.approx(float(states.log_likelihood[0]), rel=1e-11)


@pytest.mark.parametrize("names", [["mean", "R"], ["mean"]])
def test_a_group_s_level_is_its_own(names):
    """White noise around each group's mean: the mean is the average of the group's rows, whatever the others are."""
    rng = np.random.default_rng(32)
    length = 15
    truth = np.array([-3.0, 40.0, 2000.0])
    y = truth[:, None] + np.array([1.0, 3.0, 0.5])[:, None] * rng.normal(size=(GROUPS, length))
    rows = kalman.SortedRows(
        np.repeat(np.arange(GROUPS), length),
        np.tile(np.arange(length) * 1_000_000, GROUPS),
        y.reshape(1, -1),
        np.empty((0, GROUPS * length)),
    )
    definition = {
        "states": ["x"],
        "measurement": ["y"],
        "process": {"kind": "ornstein_uhlenbeck", "rate": 1e4, "variance": 1e-12, "mean": 700.0},
        "observation": {"R": [[2.0]]},
        "initial": {"mean": [0.0], "covariance": [[1e-12]]},
        "learn": {"parameters": names, "scope": "group", "by": ["region"]},
    }
    first = np.arange(GROUPS) * length  # the initial distribution's rows say nothing of the mean
    rows.y[0, first] = np.nan
    learn = maximum_likelihood.build_linear_learner(definition)
    assert np.isinf(learn.limits).tolist() == [name == "mean" for name in names]
    groups = GroupLearning(learn)

    def evaluate(theta, which):
        place = np.full(GROUPS, -1)
        place[which] = np.arange(len(which))
        kept = place[rows.key] >= 0
        part = kalman.SortedRows(place[rows.key[kept]], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
        return groups.evaluate(theta, np.arange(len(which)), part, len(which), UNIT)

    found = groups.fit(evaluate, Fit(learn.start, 0.0, 0, FitOutcome.CONVERGED), GROUPS, 200)
    assert found.converged.all()
    averages = y[:, 1:].mean(axis=1)
    means = np.array([one["mean"] for one in found.parameters])
    np.testing.assert_allclose(means, averages, atol=1e-4)
    if names == ["mean"]:
        assert found.own.tolist() == [1.0] * GROUPS, "nothing is drawn"
        return
    assert ((found.own > 0.5) & (found.own < 1.0)).all()
    for g in range(GROUPS):  # R is drawn: at the posterior's mode the likelihood's slope is the prior's
        squares = ((y[g, 1:] - averages[g]) ** 2).sum()
        R = found.parameters[g]["R"][0][0]
        slope = 0.5 * (squares / R - (length - 1))
        assert slope != pytest.approx(0.0, abs=1e-3)
        expected = -0.5 * ((length - 1) * np.log(2 * np.pi * R) + squares / R)
        assert found.log_likelihood[g] == pytest.approx(expected, rel=1e-6)
