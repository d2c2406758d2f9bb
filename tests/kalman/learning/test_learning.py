"""Maximum likelihood: the gradient against differences, the published optimum, all keys at once."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from statsmodels.datasets import nile

import kalman
from kalman.learning import maximum_likelihood
from kalman.learning.key_fits import Population
from tests.kalman.support.models import random_covariance, random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT

LEARNED = {
    "explicit": ["Q", "R"],
    "random_walk": ["variance", "R"],
    "local_linear_trend": ["level_variance", "slope_variance", "R"],
    "constant_velocity": ["acceleration_variance", "R"],
    "ornstein_uhlenbeck": ["rate", "variance", "mean", "R"],
    "damped_trend": ["level_variance", "slope_variance", "damping", "R"],
    "constant_acceleration": ["jerk_variance", "R"],
    "seasonal_dummy": ["variance", "R"],
    "seasonal_trigonometric": ["period", "variance", "R"],
    "continuous": ["diffusion", "R"],
    "sum": ["local_linear_trend.slope_variance", "ornstein_uhlenbeck.rate", "ornstein_uhlenbeck.mean", "R"],
}
STARTS = {"proper": {}, "diffuse": {"initial": {"diffuse": True}}}
LONG = [("continuous", "diffuse"), ("constant_velocity", "diffuse")]
CASES = [
    pytest.param(*case, marks=pytest.mark.slow if case in LONG else []) for case in product(LEARNED, STARTS)
]
"""Of kinds and starts, for tests of derivatives."""


@pytest.mark.parametrize(("kind", "start"), CASES)
def test_gradient_is_exact(kind, start):
    """Against a fourth-order difference: irregular times, missing components, correlated noise."""
    rng = np.random.default_rng([len(kind), len(start)])
    definition = random_definition(rng, kind, 2, 2, 1 if kind == "explicit" else 0)
    definition |= {"learn": {"parameters": LEARNED[kind]}, **STARTS[start]}
    definition["observation"]["H"] = rng.normal(size=np.shape(definition["observation"]["H"])).tolist()
    learn = maximum_likelihood.build_linear_learner(definition)
    rows = random_rows(rng, definition, 8, 9)
    if start == "diffuse":  # three derivatives from rows a millisecond apart are not to be had in float64
        rows = rows._replace(time=np.cumsum(rng.choice([0, 500_000, 1_000_000], len(rows.time))))
    theta = learn.start + 0.2 * rng.normal(size=len(learn.start))
    value, gradient, used = learn.compute_gradient(theta, rows, 8, UNIT)
    assert used == len(rows.key)
    model = kalman.build({**definition, "learn": None}, learn.parameters(theta))
    states, _ = kalman.run(model, kalman.initial_states(model, 8), rows, UNIT)
    assert value == pytest.approx(states.log_likelihood.sum(), rel=1e-12)

    def along(i, step):
        moved = theta.copy()
        moved[i] += step
        return learn.compute_gradient(moved, rows, 8, UNIT)[0]

    h = 1e-3
    for i in range(len(theta)):
        difference = (8 * (along(i, h) - along(i, -h)) - (along(i, 2 * h) - along(i, -2 * h))) / (12 * h)
        assert gradient[i] == pytest.approx(difference, rel=1e-6, abs=1e-6 * np.abs(gradient).max())


def series(values):
    n = len(values)
    time = np.arange(n) * 1_000_000
    return kalman.SortedRows(np.zeros(n, np.int64), time, np.array([values], float), np.empty((0, n)))


def level(learn, q=1000.0, r=10000.0):
    return {
        "states": ["level"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": q},
        "observation": {"R": [[r]]},
        "initial": {"diffuse": True},
        "learn": learn,
    }


NILE = series(np.asarray(dict(nile.load_pandas())["data"]["volume"], float))


def test_nile_optimum():
    """Durbin and Koopman (2012), section 2.10: 15098.53 and 1469.18."""
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"]}))
    seen = []
    found = maximum_likelihood.fit(
        lambda theta: learn.compute_gradient(theta, NILE, 1, UNIT),
        learn.start,
        progress=lambda n, ll: seen.append((n, ll)),
    )
    parameters = learn.parameters(found.theta)
    assert found.converged and found.iterations < 30 and seen[-1][0] == len(seen)
    assert parameters["R"][0][0] == pytest.approx(15098.53, rel=2e-6)
    assert parameters["variance"] == pytest.approx(1469.18, rel=1e-5)
    assert found.log_likelihood == pytest.approx(-633.464564, abs=5e-7)
    assert kalman.build(level(None), parameters).initial(1).shape == (3, 1)


def test_a_name_that_is_not_learned_stays():
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["R"]}, q=1469.18))
    found = maximum_likelihood.fit(lambda theta: learn.compute_gradient(theta, NILE, 1, UNIT), learn.start)
    assert learn.names == ("R",)
    assert learn.parameters(found.theta)["R"][0][0] == pytest.approx(15098.53, rel=1e-4)


def test_zeros_stay_zero_and_correlations_are_learned():
    rng = np.random.default_rng(5)
    definition = random_definition(rng, "explicit", 3, 3)
    Q = np.zeros((3, 3))
    Q[np.ix_([0, 2], [0, 2])] = random_covariance(rng, 2)
    definition["process"]["Q"] = Q.tolist()
    definition["observation"]["R"] = np.diag([1.0, 2.0, 3.0]).tolist()
    definition["learn"] = {"parameters": ["Q", "R"]}
    learn = maximum_likelihood.build_linear_learner(definition)
    assert len(learn.start) == 3 + 3
    np.testing.assert_allclose(learn.parameters(learn.start)["Q"], Q, rtol=1e-14)
    moved = learn.parameters(learn.start + rng.normal(size=6))
    assert (np.array(moved["Q"]) != 0).tolist() == (Q != 0).tolist()
    assert (np.array(moved["R"]) != 0).tolist() == np.eye(3, dtype=bool).tolist()
    kalman.build({**definition, "learn": None}, moved)


@pytest.mark.parametrize(
    ("Q", "problem"),
    [
        ([[0, 0], [0, 0]], "starts at zero"),
        ([[1, 1], [1, 1]], "singular"),
    ],
)
def test_a_parameter_that_cannot_be_learned_is_refused(Q, problem):
    definition = random_definition(np.random.default_rng(1), "explicit", 2, 1)
    definition["process"]["Q"] = Q
    definition["learn"] = {"parameters": ["Q"]}
    with pytest.raises(kalman.ModelError, match=problem) as error:
        maximum_likelihood.build_linear_learner(definition)
    assert error.value.field == "process.Q"


def around(theta):
    return Population(theta, np.eye(len(theta)), 0)


def assert_same_fits(one, other):
    for name, a, b in zip(one._fields, one, other, strict=True):
        if name == "reason":
            assert a == b
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


def simulated(rng, keys, length):
    """Random walks whose noise differs from key to key."""
    q, r = np.exp(rng.normal(0, 1, keys)), np.exp(rng.normal(0, 1, keys))
    x = np.cumsum(rng.normal(size=(keys, length)) * np.sqrt(q)[:, None], axis=1)
    y = x + rng.normal(size=x.shape) * np.sqrt(r)[:, None]
    key, time = np.repeat(np.arange(keys), length), np.tile(np.arange(length) * 1_000_000, keys)
    return kalman.SortedRows(key, time, y.reshape(1, -1), np.empty((0, keys * length))), q, r


def test_each_key_gets_its_own():
    rng = np.random.default_rng(11)
    keys = 12
    rows, q, r = simulated(rng, keys, 150)
    learn = maximum_likelihood.build_linear_learner(
        level({"parameters": ["variance", "R"], "scope": "key"}, 1.0, 1.0)
    )
    found = learn.fit_keys(rows, keys, UNIT, around(learn.start))
    assert found.converged.all() and found.used.tolist() == [150] * keys
    # the truth within four standard errors or so of 150 rows, where pooled values are off by e^2
    assert np.abs(np.log(found.parameters / np.array([q, r]))).mean() < 0.5
    for key in range(2):  # the mode that one key alone, by the other optimiser, finds
        here = rows.key == key
        alone = series(rows.y[0, here])

        def objective(theta, alone=alone):
            value, gradient, used = learn.compute_gradient(theta, alone, 1, UNIT)
            away = theta - learn.start
            return value - 0.5 * away @ away, gradient - away, used

        np.testing.assert_allclose(
            found.theta[:, key], maximum_likelihood.fit(objective, learn.start).theta, atol=1e-3
        )


def test_own_parameters_do_not_depend_on_the_company_and_shrink():
    rng = np.random.default_rng(12)
    keys = 40
    rows, _, _ = simulated(rng, keys, 12)
    kept = rows.key != 7  # a key without rows
    rows = kalman.SortedRows(rows.key[kept], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
    learn = maximum_likelihood.build_linear_learner(
        level({"parameters": ["variance", "R"], "scope": "key"}, 2.0, 0.5)
    )
    found = learn.fit_keys(rows, keys, UNIT, around(learn.start))
    np.testing.assert_allclose(found.parameters[:, 7], [2.0, 0.5], rtol=1e-15)
    assert np.isfinite(found.theta).all() and np.abs(found.theta - learn.start[:, None]).max() < 4
    some = np.array([3, 7, 20, 39])
    number = np.full(keys, -1)
    number[some] = np.arange(4)
    mask = number[rows.key] >= 0
    part = kalman.SortedRows(number[rows.key[mask]], rows.time[mask], rows.y[:, mask], rows.u[:, mask])
    alone = learn.fit_keys(part, 4, UNIT, around(learn.start))
    assert_same_fits(alone, found.take(some))


def test_own_parameters_ride_in_the_state():
    rng = np.random.default_rng(13)
    definition = level({"parameters": ["variance", "R"], "scope": "key"}, 2.0, 0.5)
    model = kalman.build(definition, {"variance": 3.0, "R": [[0.25]]})
    assert model.fields["parameters"] == (2,)
    states = kalman.initial_states(model, 3)
    assert states.values[-2:].tolist() == [[3.0] * 3, [0.25] * 3], "a new key starts with the pooled ones"
    own = np.array([[1.0, 2.0, 3.0], [0.5, 0.4, 0.3]])
    states = states._replace(values=model.with_parameters(states.values, own))  # type: ignore[attr-defined]
    y = rng.normal(size=6)
    rows = kalman.SortedRows(
        np.repeat(np.arange(3), 6), np.tile(np.arange(6) * 500_000, 3), np.tile(y, 3)[None], np.empty((0, 18))
    )
    after, outputs = kalman.run(model, states, rows, UNIT)
    same(after.values[-2:], own)
    for key in range(3):
        plain = kalman.build(level(None, *own[:, key]))
        here = rows.key == key
        one = kalman.SortedRows(rows.key[here] * 0, rows.time[here], rows.y[:, here], rows.u[:, here])
        _, expected = kalman.run(plain, kalman.initial_states(plain, 1), one, UNIT)
        same(outputs.mean[:, here], expected.mean)
        same(outputs.log_likelihood[here], expected.log_likelihood)


def test_rows_that_break_the_filter_are_left_out_of_the_gradient():
    y = NILE.y.copy()
    y[0, 50] = np.inf
    learn = maximum_likelihood.build_linear_learner(level({"parameters": ["variance", "R"]}))
    with_bad = learn.compute_gradient(learn.start, NILE._replace(y=y), 1, UNIT)
    kept = np.arange(100) != 50
    rows = kalman.SortedRows(NILE.key[kept], NILE.time[kept], NILE.y[:, kept], NILE.u[:, kept])
    without = learn.compute_gradient(learn.start, rows, 1, UNIT)
    same(list(map(np.asarray, with_bad)), list(map(np.asarray, without)))
    nothing = kalman.SortedRows(NILE.key[:0], NILE.time[:0], NILE.y[:, :0], NILE.u[:, :0])
    value, gradient, used = learn.compute_gradient(learn.start, nothing, 0, UNIT)
    assert (value, gradient.tolist(), used) == (0.0, [0.0, 0.0], 0)


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("refused", ["infinite", "nan", "no slope", "rows fall out"])
def test_no_refused_point_is_better_than_a_poor_start(refused, rows):
    """A start of any log-likelihood is better than where the filter breaks down: the maximum beside it is found."""
    best, edge = 2.6, 2.5  # the first step is one long, from 3 to 2
    for level in (-1e-3, -1.0, -1e3, -1e5, 1e5):
        asked = []

        def objective(theta, level=level, asked=asked):
            away = theta[0] - best
            value, slope, used = rows * (level - away**2), np.array([-2.0 * rows * away]), rows
            asked.append(theta[0])
            if theta[0] < edge:
                value = {"infinite": -np.inf, "nan": np.nan}.get(refused, value)
                slope = slope * (np.nan if refused == "no slope" else 1.0)
                used -= refused == "rows fall out"
            return value, slope, used

        found = maximum_likelihood.fit(objective, np.array([3.0]))
        assert min(asked) < edge, "it was tried"
        assert found.theta[0] == pytest.approx(best, abs=1e-4) and found.used == rows
        assert found.log_likelihood == pytest.approx(rows * level, rel=1e-12, abs=1e-7 * rows)


NOISES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {"kind": "explicit", "F": [[0.9, 0.1], [0.0, 0.8]], "Q": [[2.0, 0.5], [0.5, 1.0]]},
        {"Q": [[1.0, 0.25], [0.25, 0.5]]},
        ["F[0][1]", "Q"],
    ),
    (
        {"kind": "local_linear_trend", "level_variance": 2.0, "slope_variance": 0.5},
        {"level_variance": 1.0, "slope_variance": 0.25},
        ["level_variance", "slope_variance"],
    ),
    (
        {"kind": "sum", "parts": [
            {"kind": "random_walk", "variance": 3.0},
            {"kind": "ornstein_uhlenbeck", "rate": 0.3, "variance": 2.0, "mean": 4.0},
        ]},
        {"parts": [
            {"kind": "random_walk", "variance": 1.5},
            {"kind": "ornstein_uhlenbeck", "rate": 0.3, "variance": 1.0, "mean": 4.0},
        ]},
        ["random_walk.variance", "ornstein_uhlenbeck.variance", "ornstein_uhlenbeck.rate"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("process", "halved", "names"), NOISES, ids=["explicit", "trend", "sum"])
def test_free_numbers_follow_the_scale_of_all_noise_as_is_said(process, halved, names):
    """Half of all noise: each free number is less by the logarithm of two times what is said of it, 0 if it is none."""
    definition = {
        "states": ["a", "b"],
        "measurement": ["y", "z"],
        "process": process,
        "observation": {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[3.0, 1.0], [1.0, 2.0]]},
        "initial": {"mean": [1.0, 2.0], "covariance": [[4.0, 1.0], [1.0, 2.0]]},
        "learn": {"parameters": [*names, "R", "H[1][0]", "initial.mean", "initial.covariance"]},
    }
    less = {
        **definition,
        "process": {**process, **halved},
        "observation": {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[1.5, 0.5], [0.5, 1.0]]},
        "initial": {"mean": [1.0, 2.0], "covariance": [[2.0, 0.5], [0.5, 1.0]]},
    }
    learn, other = (
        maximum_likelihood.build_linear_learner(definition),
        maximum_likelihood.build_linear_learner(less),
    )
    scale = learn.variables.scale
    np.testing.assert_allclose(learn.start - other.start, scale * np.log(2.0), rtol=1e-14, atol=1e-15)
    assert {0.0, 0.5} <= set(scale.tolist())
