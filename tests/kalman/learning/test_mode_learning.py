"""Learning of several models: the published maximum of Hamilton's filter, exact values of simulated modes, errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2

import kalman
from kalman.learning import learners
from kalman.learning.filter_learning import FilterLearning, build_mode_learner
from tests.kalman.filters.test_modes import hamilton, walk
from tests.kalman.support.oracles import UNIT
from tests.kalman.support.series import FEDFUNDS


def one_key(y):
    y = np.asarray(y, float)
    none = np.empty((0, len(y)))
    return kalman.SortedRows(np.zeros(len(y), np.int64), np.arange(len(y)) * 1_000_000, y[None], none)


def fitted(learn, rows, keys, iterations=100):
    return learn.fit(
        lambda theta: learn.evaluate(theta, rows, keys, UNIT), lambda: np.empty((1, 0)), iterations
    )


def test_the_gradient_vanishes_at_the_published_maximum():
    """The federal funds rate, two means: Stata 14, manual of mswitch, example 1, where the start is the steady state.

    Of the free numbers a = log((1 - stay) / stay), b = log(leave / (1 - leave)) and c = log((1 - stay) / leave), the
    last, of the start, depends on the others.
    """
    stay, leave, low, high, variance = 0.9820939, 0.0503587, 3.70877, 9.556793, 2.107562**2
    definition = hamilton(stay, leave, (low, high), variance)
    definition["learn"] = {"parameters": ["transition", "initial.mode_probabilities", "R"]}
    learn = learners.learnable(definition)
    assert isinstance(learn, FilterLearning)
    value, (a, b, c, r, *_), used = learn.evaluate(learn.start, one_key(FEDFUNDS), 1, UNIT)
    assert value == pytest.approx(-508.63592, abs=5e-6) and used == len(FEDFUNDS)
    assert abs(a) > 0.01 and abs(b) > 0.01
    # the published digits leave about 1e-4 of these
    np.testing.assert_allclose([a + stay * c, b - (1 - leave) * c, r], 0.0, atol=2e-4)


def switching_rows(rng, keys, length, transition, variances):
    mode = np.zeros(keys, int)
    x, y = np.zeros(keys), np.empty((keys, length))
    for t in range(length):
        if t:
            mode = (rng.random(keys) < np.array(transition)[mode, 1]).astype(int)
            x = x + np.sqrt(np.array(variances)[mode]) * rng.normal(size=keys)
        y[:, t] = x + rng.normal(size=keys)
    key = np.repeat(np.arange(keys), length)
    time = np.tile(np.arange(length) * 1_000_000, keys)
    return kalman.SortedRows(key, time, y.reshape(1, -1), np.empty((0, len(key))))


def test_modes_that_made_the_rows_are_found():
    rng = np.random.default_rng(3)
    transition = [[0.95, 0.05], [0.3, 0.7]]
    rows = switching_rows(rng, 300, 15, transition, (0.01, 25.0))
    definition = walk(
        transition=[[0.9, 0.1], [0.4, 0.6]],
        learn={"parameters": ["fast.variance", "R", "transition"]},
        initial={"mean": [0.0], "covariance": [[1e-6]], "mode_probabilities": [1.0, 0.0]},
    )
    definition["modes"][1]["process"]["variance"] = 15.0
    learn = build_mode_learner(definition)
    found = fitted(learn, rows, 300, 12)
    learned = learn.parameters(found.theta)
    definition["modes"][1]["process"]["variance"], definition["transition"] = 25.0, transition
    truth = build_mode_learner(definition)
    value = truth.evaluate(truth.start, rows, 300, UNIT)[0]
    assert 0.0 < 2.0 * (found.log_likelihood - value) < chi2.ppf(0.999, 4)
    np.testing.assert_allclose(learned["transition"], transition, atol=0.08)
    assert learned["fast.variance"] == pytest.approx(25.0, rel=0.25)
    assert learned["R"][0][0] == pytest.approx(1.0, rel=0.05)


def test_the_gradient_and_sums_over_buckets():
    """By fourth-order differences with another step; an mmae, with a mode of another kind and zeros that stay."""
    rng = np.random.default_rng(4)
    rows = switching_rows(rng, 6, 10, [[0.9, 0.1], [0.5, 0.5]], (0.1, 4.0))
    for definition in (
        walk(
            transition=[[0.9, 0.1], [0.0, 1.0]],
            learn={"parameters": ["transition", "fast.variance", "slow.R"]},
        ),
        walk(filter="mmae", transition=None, learn={"parameters": ["R", "initial.mode_probabilities"]}),
    ):
        definition["modes"][1]["filter"] = "unscented"
        learn = build_mode_learner(definition)
        assert len(learn.start) == (3 if definition["filter"] == "imm" else 2)
        value, gradient, used = learn.evaluate(learn.start, rows, 6, UNIT)
        gradient = gradient[: len(learn.start)]
        assert used == 60
        h = 1e-2
        for i, slope in enumerate(gradient):
            step = h * np.eye(len(gradient))[i]
            at = [learn.evaluate(learn.start + k * step, rows, 6, UNIT)[0] for k in (-2, -1, 1, 2)]
            assert slope == pytest.approx(
                (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * h), rel=1e-5, abs=1e-6
            )
        half = len(rows.key) // 2
        halves = [
            kalman.SortedRows(rows.key[s] - rows.key[s][0], rows.time[s], rows.y[:, s], rows.u[:, s])
            for s in (slice(half), slice(half, None))
        ]
        parts = [learn.evaluate(learn.start, part, 3, UNIT) for part in halves]
        assert parts[0][0] + parts[1][0] == pytest.approx(value, rel=1e-12)
        both = (parts[0][1] + parts[1][1])[: len(learn.start)]
        np.testing.assert_allclose(both, gradient, rtol=1e-6, atol=1e-6)
    assert kalman.build(definition, learn.parameters(learn.start)) == kalman.build(definition)


WRONG = [
    (["fast.rate"], {}, "learn.parameters[0]", "no parameter 'fast.rate'"),
    (["variance"], {}, "learn.parameters[0]", "no parameter 'variance'"),
    ([{"name": "R", "form": "full"}], {}, "learn.parameters[0]", "neither forms nor bounds"),
    (["initial.mode_probabilities"], {"scope": "key"}, "learn.scope", "a key begins once"),
    (["R"], {"scope": "tribe"}, "learn.scope", "not known"),
    (["R"], {"method": "em"}, "learn.method", "maximum likelihood"),
    (["R"], {"prior": True}, "learn.prior", "not learned with modes"),
]


@pytest.mark.parametrize(("names", "changes", "field", "problem"), WRONG)
def test_a_parameter_that_cannot_be_learned_is_refused(names, changes, field, problem):
    with pytest.raises(kalman.ModelError, match=problem) as error:
        learners.learnable(walk(learn={"parameters": names, **changes}))
    assert error.value.field == field
