"""Learning of extended, unscented and cubature filters and of modes: for all keys, groups and keys, with errors."""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from statsmodels.tools.numdiff import approx_hess3

import kalman
from kalman import flags
from kalman.filters.own_parameters import find_key_parameters, with_key_parameters
from kalman.learning import learners
from kalman.learning.filter_learning import FilterLearning
from kalman.learning.filter_pass import Weights, compute_differences
from kalman.learning.filter_searches import list_starts
from kalman.learning.groups import group_learning
from kalman.learning.key_fits import FitOutcome
from kalman.learning.key_starts import Free
from kalman.models.groups import begin_states
from kalman.models.structure import Parameter
from tests.kalman.filters.test_modes import walk
from tests.kalman.learning.test_group_learning import fit_all, of_group
from tests.kalman.learning.test_mode_learning import switching_rows
from tests.kalman.learning.test_own_entries import rows_of
from tests.kalman.support.models import same, states_with
from tests.kalman.support.oracles import UNIT

HERE = "tests.kalman.learning.test_filter_learning"
KINDS = ["extended", "unscented", "cubature"]
BY_KEY = {"scope": "key"}
BY_GROUP = {"scope": "group", "by": ["region"]}


def stay(x, dt, u):
    return 0.9 * x


def pushed(x, dt, u, w):
    return 0.9 * x + w


def bent(x):
    return x + 0.1 * x**2


def level(kind, learn, **changes):
    return {
        "filter": kind,
        "states": ["x"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 0.5},
        "observation": {"H": [[1.0]], "R": [[0.5]]},
        "initial": {"mean": [0.0], "covariance": [[4.0]]},
        "learn": learn,
        **changes,
    }


def walks(rng, variances, length):
    """Random walks of these variances, measured with unit variance."""
    steps = np.sqrt(np.array(variances))[:, None] * rng.normal(size=(len(variances), length))
    steps[:, 0] = 2.0 * rng.normal(size=len(variances))
    return np.cumsum(steps, axis=1) + rng.normal(size=steps.shape)


def joint(y, variance, R):
    """The log density of a measured random walk at once."""
    t = np.arange(len(y))
    cov = 4.0 + variance * np.minimum.outer(t, t) + R * np.eye(len(y))
    return multivariate_normal(np.zeros(len(y)), cov).logpdf(y)


def test_a_key_beyond_all_numbers_warns_nobody_and_leaves_the_others_alone():
    learn = learners.learnable(
        level("linear", {"parameters": ["variance", "R"], **BY_KEY}, robust={"huber": {}})
    )
    assert isinstance(learn, FilterLearning)
    points = learn.key_model.searches(rows_of(np.ones((2, 5))), UNIT).points()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = points.point(np.array([[800.0, 0.0], [0.0, 0.0]]), np.zeros((2, 2), bool), np.arange(2))
    alone = points.point(np.zeros((2, 2)), np.zeros((2, 2), bool), np.arange(2))
    assert found.value[1] == alone.value[1] and (found.gradient[:, 1] == alone.gradient[:, 1]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_linear_model_each_key_finds_what_the_linear_filter_does(kind):
    """The likelihood of the linear learner, whose gradient is exact; errors by the curvature of the joint density."""
    rng = np.random.default_rng(1)
    y = walks(rng, [0.1, 0.5, 4.0, 0.0, 0.0, 0.0], 60)
    learn = {"parameters": ["variance", "R"], **BY_KEY}
    found = learners.learnable(level(kind, learn)).fit_keys(rows_of(y), 6, UNIT, None)
    exact = learners.learnable(level("linear", learn)).fit_keys(rows_of(y), 6, UNIT, None)
    np.testing.assert_allclose(found.log_likelihood, exact.log_likelihood, atol=1e-4)
    assert found.outcome.tolist() == exact.outcome.tolist() and found.reason == exact.reason
    assert (found.outcome == FitOutcome.AT_BOUND).any() and (found.outcome == FitOutcome.CONVERGED).any()
    np.testing.assert_allclose(found.parameters, exact.parameters, rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(found.nis, exact.nis, rtol=1e-3)
    np.testing.assert_allclose(found.ljung_box, exact.ljung_box, rtol=0.05)
    for k in np.flatnonzero(found.outcome == FitOutcome.CONVERGED)[:2]:
        curvature = approx_hess3(found.parameters[:, k], lambda p, k=k: -joint(y[k], *p))
        np.testing.assert_allclose(found.errors[:, k], np.sqrt(np.diag(np.linalg.inv(curvature))), rtol=5e-3)
    alone = learners.learnable(level(kind, learn)).fit_keys(rows_of(y[2:3]), 1, UNIT, None)
    same(alone.parameters, found.parameters[:, 2:3])


def extended(y, Q, R):
    """The textbook's extended filter of `stay` and `bent`, one key: its log-likelihood."""
    m, P, total = 0.5, 1.0, 0.0
    for t, value in enumerate(y):
        if t:
            m, P = 0.9 * m, 0.81 * P + Q
        slope = 1.0 + 0.2 * m
        S = slope * P * slope + R
        v = value - m - 0.1 * m**2
        total -= 0.5 * (np.log(2 * np.pi * S) + v * v / S)
        m, P = m + P * slope * v / S, P - (P * slope) ** 2 / S
    return total


CURVED = {
    "process": {"kind": "function", "f": f"{HERE}:stay", "Q": [[0.3]]},
    "observation": {"h": f"{HERE}:bent", "R": [[0.3]]},
    "initial": {"mean": [0.5], "covariance": [[1.0]]},
}


def curved_rows(rng, Q, length):
    x, seen = 0.5 + rng.normal(size=len(Q)), []
    for t in range(length):
        x = 0.9 * x + np.sqrt(Q) * rng.normal(size=len(Q)) if t else x
        seen.append(x + 0.1 * x**2 + 0.5 * rng.normal(size=len(Q)))
    return np.array(seen).T


def best_extended(y):
    """The maximum by SciPy over several series of one Q and R, and the curvature there."""

    def negative(free):
        return -sum(extended(one, *np.exp(free)) for one in y)

    end = minimize(negative, np.log([0.3, 0.3]), method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9})
    point = np.exp(end.x)
    return -end.fun, point, approx_hess3(point, lambda p: -sum(extended(one, *p) for one in y))


def test_functions_by_key_and_for_all_keys_against_a_textbook_filter_and_scipy():
    rng = np.random.default_rng(2)
    y = curved_rows(rng, np.array([0.2, 1.0, 3.0]), 120)
    rows = rows_of(y)
    definition = level("extended", {"parameters": ["Q", "R"], **BY_KEY}, **CURVED)
    found = learners.learnable(definition).fit_keys(rows, 3, UNIT, None)
    for k in range(3):
        value, point, curvature = best_extended(y[k : k + 1])
        assert found.log_likelihood[k] == pytest.approx(value, abs=1e-4)
        np.testing.assert_allclose(found.parameters[:, k], point, rtol=5e-3)
        np.testing.assert_allclose(found.errors[:, k], np.sqrt(np.diag(np.linalg.inv(curvature))), rtol=0.02)
    pooled = learners.learnable({**definition, "learn": {"parameters": ["Q", "R"]}})
    fit = pooled.fit(lambda theta: pooled.evaluate(theta, rows, 3, UNIT), lambda: y, 100)
    value, point, curvature = best_extended(y)
    assert fit.converged and fit.log_likelihood == pytest.approx(value, abs=1e-5)
    assert fit.errors is not None
    errors = [fit.errors["Q"][0][0], fit.errors["R"][0][0]]
    np.testing.assert_allclose(errors, np.sqrt(np.diag(np.linalg.inv(curvature))), rtol=5e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["covariance", "square_root"])
def test_a_key_filters_with_what_it_learned(kind, form):
    """Each key's own values in its state, to the bit of a model that is written with them; noise inside f too."""
    rng = np.random.default_rng(3)
    y = curved_rows(rng, np.array([0.2, 1.0]), 20)
    inside = {**CURVED, "process": {"kind": "function", "f": f"{HERE}:pushed", "Q": [[0.3]]}}
    for sections in (CURVED, inside):
        definition = level(kind, {"parameters": ["Q", "R"], **BY_KEY}, form=form, **sections)
        found = learners.learnable(definition).fit_keys(rows_of(y), 2, UNIT, None)
        model = kalman.build(definition)
        after, _ = kalman.run(model, states_with(model, found.parameters), rows_of(y), UNIT)
        np.testing.assert_allclose(after.log_likelihood, found.log_likelihood, rtol=1e-11)
        for k in range(2):
            Q, R = ([[float(a)]] for a in found.parameters[:, k])
            plain = kalman.build({**definition, "learn": None}, {"Q": Q, "R": R})
            alone, _ = kalman.run(plain, kalman.initial_states(plain, 1), rows_of(y[k : k + 1]), UNIT)
            assert alone.log_likelihood[0] == pytest.approx(after.log_likelihood[k], rel=1e-13)


@pytest.mark.slow
def test_groups_of_a_cubature_filter_and_their_start():
    rng = np.random.default_rng(4)
    group = rng.permutation(np.repeat([0, 1], 10))
    y = curved_rows(rng, np.array([0.2, 3.0])[group], 60)
    names = ["Q", "R", "initial.mean", "initial.covariance"]
    definition = level("cubature", {"parameters": names, **BY_GROUP}, **CURVED)
    learn = learners.learnable(definition)
    rows = rows_of(y)
    pooled = learn.fit(lambda theta: learn.evaluate(theta, rows, 20, UNIT), lambda: y, 100)
    found, _ = fit_all(group_learning(learn), rows, group, pooled, 2)
    assert all(outcome in (FitOutcome.CONVERGED, FitOutcome.TOO_FEW_ROWS) for outcome in found.outcome)
    assert found.parameters[0]["Q"][0][0] < 0.6 < 1.5 < found.parameters[1]["Q"][0][0]
    for g in range(2):
        alone = of_group(rows, group, g)
        assert isinstance(learn, FilterLearning)
        _, vector, _ = learn.evaluate(found.theta[:, g], alone, 10, UNIT)
        drawn = found.precision @ (found.theta[:, g] - pooled.theta)
        np.testing.assert_allclose(vector[:4], drawn, atol=5e-3)
        errors = found.errors[g]
        assert errors is not None and 0.0 < errors["R"][0][0] < found.parameters[g]["R"][0][0]
    values = {**learn.parameters(pooled.theta)}
    values["groups"] = {"by": ["region"], "values": [["a"], ["b"]], "parameters": found.parameters}
    states = begin_states(kalman.build, definition, values)
    assert states[-2:, 1].tolist() == [found.parameters[1][name][0][0] for name in ("Q", "R")]
    assert states[0, 0] == found.parameters[0]["initial.mean"][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["imm", "mmae"])
def test_each_key_learns_its_own_modes(kind):
    """Against SciPy over the filter's likelihood, one key at a time; errors by its curvature."""
    rng = np.random.default_rng(5)
    keys, length = 2, 50
    rows = switching_rows(rng, keys, length, [[0.95, 0.05], [0.2, 0.8]], (0.01, 9.0))
    names = ["fast.variance", "R"] + (["transition"] if kind == "imm" else [])
    changes = {} if kind == "imm" else {"transition": None}
    definition = walk(filter=kind, learn={"parameters": names, **BY_KEY}, **changes)
    learn = learners.learnable(definition)
    found = learn.fit_keys(rows, keys, UNIT, None)
    assert isinstance(learn, FilterLearning)
    for k in range(keys):
        alone = rows_of(rows.y[:, rows.key == k])

        def negative(theta, alone=alone):
            states = kalman.initial_states(learn.each, 1)._replace(values=learn.begun(theta, 1))
            states, _ = kalman.run(learn.each, states, alone, UNIT)
            return -states.log_likelihood[0]

        theta = found.theta[:, k]
        assert found.log_likelihood[k] == pytest.approx(-negative(theta), rel=1e-10)
        if k == 0:
            end = minimize(
                negative, learn.start, method="Nelder-Mead", options={"maxiter": 60, "fatol": 1e-2}
            )
            assert found.log_likelihood[k] > -end.fun - 0.01
            if kind == "mmae" and found.outcome[k] == FitOutcome.CONVERGED:
                curvature = np.linalg.inv(approx_hess3(theta, negative))
                logs = np.log(found.parameters[:, k])
                np.testing.assert_allclose(
                    found.errors[0, k] / np.exp(logs[0]), np.sqrt(curvature[0, 0]), rtol=0.05
                )
    shown = learn.places
    assert shown["fast.variance"] == 0.0 and shown["R"] == [[1.0]]
    if kind == "imm":
        rows_sum = found.parameters[2:].reshape(2, 2, keys).sum(axis=1)
        np.testing.assert_allclose(rows_sum, 1.0, rtol=1e-12)
        assert np.isfinite(found.errors[2:, found.outcome == FitOutcome.CONVERGED]).all()


def test_a_key_of_several_models_keeps_its_own_values():
    rng = np.random.default_rng(6)
    rows = switching_rows(rng, 2, 40, [[0.9, 0.1], [0.3, 0.7]], (0.01, 9.0))
    definition = walk(learn={"parameters": ["fast.variance", "R", "transition"], **BY_KEY})
    model = kalman.build(definition)
    plain = kalman.build({**definition, "learn": None})
    before, outputs = kalman.run(model, kalman.initial_states(model, 2), rows, UNIT)
    expected, others = kalman.run(plain, kalman.initial_states(plain, 2), rows, UNIT)
    np.testing.assert_allclose(before.log_likelihood, expected.log_likelihood, rtol=1e-12)
    np.testing.assert_allclose(
        outputs.extra["mode_probabilities"], others.extra["mode_probabilities"], rtol=1e-9
    )
    own = find_key_parameters(model)
    assert own.learned == ("fast.variance", "R", "transition")
    values = {
        "R": np.array([[2.0, 0.5]]),
        "transition": np.array([[0.8, 0.6], [0.2, 0.4], [0.1, 0.5], [0.9, 0.5]]),
    }
    states = kalman.initial_states(model, 2)
    states = states._replace(values=with_key_parameters(model, states.values, values))
    after, _ = kalman.run(model, states, rows, UNIT)
    smoothed_states, _, smoothed = kalman.smooth(model, states, rows, UNIT)
    same(smoothed_states.log_likelihood, after.log_likelihood)
    for k in range(2):
        transition = values["transition"][:, k].reshape(2, 2).tolist()
        written = kalman.build(
            {**definition, "learn": None}, {"R": [[float(values["R"][0, k])]], "transition": transition}
        )
        one = rows_of(rows.y[:, rows.key == k])
        alone, _ = kalman.run(written, kalman.initial_states(written, 1), one, UNIT)
        assert alone.log_likelihood[0] == pytest.approx(after.log_likelihood[k], rel=1e-12)
        _, _, of_one = kalman.smooth(written, kalman.initial_states(written, 1), one, UNIT)
        np.testing.assert_allclose(smoothed.mean[:, rows.key == k], of_one.mean, rtol=1e-9, atol=1e-12)


def test_groups_learn_their_own_modes():
    rng = np.random.default_rng(7)
    calm = switching_rows(rng, 12, 40, [[0.98, 0.02], [0.5, 0.5]], (0.01, 9.0))
    wild = switching_rows(rng, 12, 40, [[0.6, 0.4], [0.3, 0.7]], (0.01, 9.0))
    rows = rows_of(np.concatenate([part.y.reshape(12, 40) for part in (calm, wild)]))
    group = np.repeat([0, 1], 12)
    definition = walk(learn={"parameters": ["fast.variance", "transition"], **BY_GROUP})
    learn = learners.learnable(definition)
    pooled = learn.fit(lambda theta: learn.evaluate(theta, rows, 24, UNIT), lambda: rows.y, 100)
    assert pooled.errors is not None and 0.0 < pooled.errors["transition"][0][1] < 0.3
    found, _ = fit_all(group_learning(learn), rows, group, pooled, 2)
    leave = [one["transition"][0][1] for one in found.parameters]
    assert leave[0] < 0.12 < 0.2 < leave[1]
    values = {**learn.parameters(pooled.theta)}
    values["groups"] = {"by": ["region"], "values": [["a"], ["b"]], "parameters": found.parameters}
    states = begin_states(kalman.build, definition, values)
    model = kalman.build(definition, values)
    rows_of_transition = model.find_key_rows("transition")  # type: ignore[attr-defined]
    assert states[rows_of_transition[1], :2].tolist() == leave


STILL = {**CURVED, "process": {"kind": "function", "f": f"{HERE}:stay", "Q": [[0.0]]}}
REFUSED = [
    (level("extended", {"parameters": ["R"], "method": "em"}), "learn.method", "no closed form"),
    (level("unscented", {"parameters": ["rate"]}), "learn.parameters[0]", "no parameter 'rate'"),
    (level("cubature", {"parameters": ["initial.mean"], **BY_KEY}), "learn.scope", "a key begins once"),
    (level("extended", {"parameters": ["Q"]}, **STILL), "process.Q", "starts at zero"),
]


@pytest.mark.parametrize(("definition", "field", "problem"), REFUSED)
def test_what_cannot_be_learned_is_refused(definition, field, problem):
    with pytest.raises(kalman.ModelError, match=problem) as error:
        learners.learnable(definition)
    assert error.value.field == field


class Sum:
    """A filter that only adds: a row's log-likelihood is y times the state, and it fails where that is 9 or more."""

    def step(self, state, rows):
        value = rows.y[0] * state[0]
        flag = np.where(value < 9.0, flags.WELL, flags.NOT_PSD).astype(np.uint8)
        return state, kalman.Step(value, value, flag, {})


def test_a_key_whose_copies_break_down_has_a_value_that_no_search_takes():
    """Scores are weighted as asked; a row flagged at theta is left out of all; flagged beside it, it is a loss."""
    y = np.array([[1.0, 2.0, 1.0, 4.0, 1.0, 9.0, -1.0, 3.0]])
    rows = kalman.SortedRows(np.repeat(np.arange(4), 2), np.tile([0, 1], 4), y, np.empty((0, 8)))
    starts = [np.full((1, 4), a) for a in (1.0, 2.5, 0.5)]  # at theta, above it, below it
    weights = Weights(*(np.full((1, 4), a) for a in (0.25, 2.0, -3.0)))
    model: Any = Sum()
    found = compute_differences(model, rows, 4, UNIT, starts, weights)
    share = 0.25 + 2.0 * 2.5 - 3.0 * 0.5
    np.testing.assert_array_equal(found.log_likelihood, [3.0, -np.inf, 1.0, 2.0])
    assert found.used.tolist() == [2, 2, 1, 2]
    np.testing.assert_array_equal(found.gradient[0, [0, 2, 3]], share * np.array([3.0, 1.0, 2.0]))
    np.testing.assert_array_equal(found.information[0, 0, [0, 2, 3]], share**2 * np.array([5.0, 1.0, 10.0]))


def test_starts_are_the_noises_at_many_sizes():
    """Both noises times a power of ten, and against each other times another, half of it each; other numbers stay."""
    free = [
        Free(Parameter("process.Q", "covariance", (1.0,)), 0, 2, True),
        Free(Parameter("observation.R", "covariance", (1.0,)), 0, 1, True),
        Free(Parameter("F[0][0]", "real", (0.5,)), 0, 0, False),
    ]
    written = np.array([0.3, -0.2, 0.7])
    found = list_starts(free, written, (0.0, -3.0))
    assert len(found) == 10 and not np.any(found[0][0] - written)
    sizes = [np.exp((theta - written) * [2.0, 1.0, 1.0]) for theta, _ in found]
    whole = [(1.0, a) for a in (0, -4, -2, 2, 4)] + [(1e-3, a) for a in (0, -4, -2, 2, 4)]
    expected = [[size * 10.0 ** (a / 2), size * 10.0 ** (-a / 2), 1.0] for size, a in whole]
    np.testing.assert_allclose(sizes, expected, rtol=1e-13)
    assert [kind for _, kind in found] == [1, 0, 0, 2, 2] * 2
    alone = list_starts(free[1:], written[1:], (0.0, -3.0))
    np.testing.assert_allclose([np.exp(theta[0] + 0.2) for theta, _ in alone], [1.0, 1e-3], rtol=1e-13)
    assert len(list_starts(free[2:], written[2:], (0.0, -3.0))) == 1
