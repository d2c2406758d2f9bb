"""Functions of a row's inputs, h(x, u) and f(x, dt, u, w), against filters written out one key at a time."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import kalman
from kalman.smoothers.smooth import smooth
from tests.kalman.support.nonlinear import points_of
from tests.kalman.support.oracles import UNIT, full

SECOND = 1_000_000
HERE = "tests.kalman.filters.test_function_inputs"
FORMS = [
    ("extended", None),
    ("extended", "square_root"),
    ("extended", "information"),
    ("unscented", None),
    ("unscented", "square_root"),
    ("cubature", None),
    ("cubature", "square_root"),
]
RULES = [
    {},
    {"alpha": 1.0, "beta": 2.0, "kappa": 0.0},
    {"alpha": 0.5, "beta": 0.0, "kappa": 1.0},
    {"alpha": 1.0, "beta": 0.0, "kappa": -0.3},  # the covariance is a difference
]


def growth(x, u):
    """exp(beta x_t): a generalised linear model, beta a random walk and x_t a column."""
    return np.exp(x[:1] * u[:1])


def growth_slope(x, u):
    return (u[:1] * np.exp(x[:1] * u[:1]))[None]


def growth_two(x, u):
    return np.array([np.exp(x[0] * u[0]) + x[1], x[1] * u[1] + 0.1 * x[0] ** 2])


def wrong_slope(x, u):
    return growth_slope(x, u) * 1.01


def plain(x):
    return np.exp(x[:1])


def plain_with_default(x, scale=2.0):
    return scale * x[:1]


def any_arguments(*arguments):
    assert len(arguments) == 1
    return np.exp(arguments[0][:1])


def three(x, u, z):
    return x[:1]


def keyword(x, *, u):
    return x[:1]


def above_one_hundred(x, u):
    return np.sqrt(u[:1] - 100.0) * x[:1]


def wide(x, u):
    return u * x[:1]


def without_inputs(x, dt):
    return x * np.exp(-0.1 * dt)


def stay(x, dt, u):
    return x + 0.0


def jolted(x, dt, u, w):
    """A product with the noise, and a noise whose effect depends on the state; three noises, two states."""
    return np.array(
        [x[0] * np.exp(w[0]) + 0.1 * dt * x[1] + u[0], 0.9 * x[1] + (1.0 + 0.2 * x[0]) * w[1] + 0.3 * w[2]]
    )


def jolted_by_state(x, dt, u):
    one, zero = np.ones(x.shape[1]), np.zeros(x.shape[1])
    return np.array([[one, 0.1 * dt], [zero, 0.9 * one]])


def jolted_by_noise(x, dt, u):
    one, zero = np.ones(x.shape[1]), np.zeros(x.shape[1])
    return np.array([[x[0], zero, zero], [zero, 1.0 + 0.2 * x[0], 0.3 * one]])


def half_noise(x, dt, u):
    return 0.5 * jolted_by_noise(x, dt, u)


def pushed(x, dt, u, w):
    """A line, driven by one noise: F x + G w."""
    return np.array([x[0] + dt * x[1] + 0.5 * w[0], x[1] + w[0]])


def dimmed(x, u, v):
    """A noise that is multiplied, one that is added to one component, and a common one; three noises, two values."""
    return np.array(
        [np.exp(x[0] * u[0]) * (1.0 + v[0]) + x[1] + 0.5 * v[2], x[1] * u[1] + v[1] * x[0] + v[2]]
    )


def dimmed_slope(x, u):
    zero = 0.0 * x[0]
    return np.array([[u[0] * np.exp(x[0] * u[0]), 1.0 + zero], [zero, u[1] + zero]])


def dimmed_by_noise(x, u):
    one, zero = np.ones(x.shape[1]), np.zeros(x.shape[1])
    return np.array([[np.exp(x[0] * u[0]), zero, 0.5 * one], [zero, x[0], one]])


def doubled_noise(x, u, v):
    """A line, disturbed by two noises of which the second counts twice."""
    return x[:1] + u[:1] + v[:1] + 2.0 * v[1:]


def noise_of(dt, u):
    return np.array([[dt * (1.0 + u[0] ** 2)]])


GROWTH: dict[str, Any] = {
    "filter": "extended",
    "states": ["beta"],
    "measurement": ["y"],
    "control": ["x"],
    "process": {"kind": "random_walk", "variance": 0.001},
    "observation": {"h": f"{HERE}:growth", "R": [[0.04]]},
    "initial": {"mean": [0.5], "covariance": [[0.2]]},
}
JOLTED: dict[str, Any] = {
    "filter": "extended",
    "states": ["a", "b"],
    "measurement": ["y", "z"],
    "control": ["u", "v"],
    "process": {
        "kind": "function",
        "f": f"{HERE}:jolted",
        "Q": [[0.02, 0.005, 0.0], [0.005, 0.1, 0.0], [0.0, 0.0, 0.3]],
    },
    "observation": {"h": f"{HERE}:growth_two", "R": [[0.5, 0.1], [0.1, 0.8]]},
    "initial": {"mean": [0.3, 0.2], "covariance": [[0.1, 0.02], [0.02, 0.2]]},
}


def in_form(definition: dict[str, Any], kind: str, form: str | None, **process: Any) -> dict[str, Any]:
    found = {**copy.deepcopy(definition), "filter": kind, **({"form": form} if form else {})}
    found["process"] |= process
    return found


def textbook(definition: dict[str, Any], y, dt, u, jacobians, functions, offset=None, by_noise=None):
    """Filter y (N, m) with matrices: f(x, dt, u, w) or f(x, dt, u), h(x, u); jacobians (F, L, H), L None: additive.

    by_noise: dh/dv, where h takes v too.
    """
    kind, rule = definition["filter"], definition.get("unscented", {})
    f, h = functions
    F, L, H = jacobians
    Q, R = np.array(definition["process"]["Q"]), np.array(definition["observation"]["R"])
    x, P = np.array(definition["initial"]["mean"]), np.array(definition["initial"]["covariance"])
    out = []
    for k in range(len(y)):
        here = u[k][:, None]
        at = dt[k : k + 1]
        if k and kind == "extended":
            A = F(x[:, None], at, here)[:, :, 0]
            W = np.eye(len(x)) if L is None else L(x[:, None], at, here)[:, :, 0]
            noise = [] if L is None else [np.zeros((len(Q), 1))]
            x, P = f(x[:, None], at, here, *noise)[:, 0], A @ P @ A.T + W @ Q @ W.T
        elif k:
            n = len(x)
            if L is None:
                points, wm, wc = points_of(kind, rule, x, P)
                noise, added = [], Q
            else:
                joint = np.block([[P, np.zeros((n, len(Q)))], [np.zeros((len(Q), n)), Q]])
                points, wm, wc = points_of(kind, rule, np.concatenate([x, np.zeros(len(Q))]), joint)
                noise, added = [points[n:]], 0.0
            many = points.shape[1]
            values = f(points[:n], np.full(many, dt[k]), np.repeat(here, many, axis=1), *noise)
            x = values @ wm
            d = values - x[:, None]
            P = (d * wc) @ d.T + added
        has = ~np.isnan(y[k])
        noisy = R
        if kind == "extended":
            J = H(x[:, None], here)[:, :, 0]
            silent = [] if by_noise is None else [np.zeros((len(R), 1))]
            z, S, C = h(x[:, None], here, *silent)[:, 0], J @ P @ J.T, P @ J.T
            if by_noise is not None:
                M = by_noise(x[:, None], here)[:, :, 0]
                noisy = M @ R @ M.T
        elif by_noise is not None:
            n = len(x)
            joint = np.block([[P, np.zeros((n, len(R)))], [np.zeros((len(R), n)), R]])
            points, wm, wc = points_of(kind, rule, np.concatenate([x, np.zeros(len(R))]), joint)
            values = h(points[:n], np.repeat(here, points.shape[1], axis=1), points[n:])
            z = values @ wm
            d, e = values - z[:, None], points[:n] - x[:, None]
            S, C, noisy = (d * wc) @ d.T, (e * wc) @ d.T, 0.0
        else:
            points, wm, wc = points_of(kind, rule, x, P)
            values = h(points, np.repeat(here, points.shape[1], axis=1))
            z = values @ wm
            d, e = values - z[:, None], points - x[:, None]
            S, C = (d * wc) @ d.T, (e * wc) @ d.T
        z = z if offset is None else z + offset[k]
        S, C, v = (S + noisy)[np.ix_(has, has)], C[:, has], (y[k] - z)[has]
        K = C @ np.linalg.inv(S)
        x, P = x + K @ v, P - K @ S @ K.T
        score = -0.5 * (v @ np.linalg.solve(S, v) + np.linalg.slogdet(2 * np.pi * S)[1]) if has.any() else 0.0
        out.append((x, P, score))
    return [np.array(column) for column in zip(*out, strict=True)]


def run(definition: dict[str, Any], y, dt, u):
    model = kalman.build(definition)
    time = (np.cumsum(np.concatenate([[0.0], dt[1:]])) * UNIT).round().astype(np.int64)
    rows = kalman.SortedRows(
        np.zeros(len(y), np.int64), time, np.ascontiguousarray(y.T), np.ascontiguousarray(u.T)
    )
    return kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)[1]


def assert_same(out, truth, rtol=1e-11):
    means, covariances, scores = truth
    np.testing.assert_allclose(out.mean.T, means, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(full(out.covariance), covariances, rtol=10 * rtol, atol=rtol)
    np.testing.assert_allclose(out.log_likelihood, scores, rtol=10 * rtol, atol=10 * rtol)
    assert not out.flag.any()


def growth_rows(rng, n=60):
    x = rng.uniform(-1.0, 2.0, size=(n, 1))
    beta = 0.7 + np.cumsum(rng.normal(size=n) * 0.03)
    y = np.exp(beta[:, None] * x) + 0.2 * rng.normal(size=(n, 1))
    y[rng.random(n) < 0.1] = np.nan
    return y, np.ones(n), x


def growth_truth(definition, y, dt, u, offset=None):
    walk = {**definition, "process": {"Q": [[0.001]]}}
    one = lambda x, at, here: np.ones((1, 1, x.shape[1]))  # noqa: E731
    return textbook(walk, y, dt, u, (one, None, growth_slope), (stay, growth), offset)


@pytest.mark.parametrize(("kind", "form"), FORMS)
@pytest.mark.parametrize("jacobian", [True, False])
def test_a_generalised_linear_model(kind, form, jacobian):
    """exp(beta x_t) with x_t a column, as in a common guide to extended filters."""
    definition = in_form(GROWTH, kind, form)
    if jacobian:
        definition["observation"]["jacobian"] = f"{HERE}:growth_slope"
    y, dt, u = growth_rows(np.random.default_rng(3))
    out = run(definition, y, dt, u)
    assert_same(out, growth_truth(definition, y, dt, u), 1e-9 if not jacobian else 1e-11)
    assert abs(out.mean[0, -1] - 0.7) < 0.4


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_an_offset_beside_a_function(kind, form):
    definition = in_form(GROWTH, kind, form)
    definition["control"] = ["x", "bias"]
    definition["observation"] |= {"offset": ["bias"], "jacobian": f"{HERE}:growth_slope"}
    rng = np.random.default_rng(4)
    y, dt, u = growth_rows(rng)
    bias = rng.normal(size=(len(y), 1))
    both = np.hstack([u, bias])
    truth = growth_truth(definition, y + bias, dt, u, bias)
    assert_same(run(definition, y + bias, dt, both), truth)


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_an_offset_beside_the_function_of_the_process(kind, form):
    """With the offset in the process the filter is that of a function that adds it."""
    with_offset = in_form(JOLTED, kind, form, f=f"{HERE}:jolted_without", offset=["v", 0.25])
    inside = in_form(JOLTED, kind, form, f=f"{HERE}:jolted_with")
    for one in (with_offset, inside):
        one["process"]["Q"] = [[0.1, 0.0], [0.0, 0.2]]
    y, dt, u = jolted_rows(np.random.default_rng(6))
    found, expected = run(with_offset, y, dt, u), run(inside, y, dt, u)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-9)
    np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-9)


def jolted_without(x, dt, u):
    return np.array([x[0] + 0.1 * dt * x[1], 0.9 * x[1]])


def jolted_with(x, dt, u):
    return jolted_without(x, dt, u) + np.array([u[1], 0.25 + 0.0 * u[1]])


def jolted_rows(rng, n=40):
    y = rng.normal(size=(n, 2)) + 1.0
    y[rng.random((n, 2)) < 0.15] = np.nan
    return y, rng.integers(1, 4, size=n).astype(float), rng.uniform(-0.3, 0.5, size=(n, 2))


def growth_two_slope(x, u):
    zero = 0.0 * x[0]
    return np.array([[u[0] * np.exp(x[0] * u[0]), 1.0 + zero], [0.2 * x[0], u[1] + zero]])


@pytest.mark.parametrize(
    ("kind", "form", "rule"),
    [(kind, form, rule) for kind, form in FORMS for rule in (RULES if kind == "unscented" else RULES[:1])],
)
def test_noise_inside_the_process(kind, form, rule):
    """Three noises that enter a function of two states: by their Jacobian, or by points of state and noise."""
    definition = in_form(JOLTED, kind, form)
    if kind == "unscented" and rule:
        definition["unscented"] = rule
    if kind == "extended":
        definition["process"] |= {
            "jacobian": f"{HERE}:jolted_by_state",
            "noise_jacobian": f"{HERE}:jolted_by_noise",
        }
        definition["observation"]["jacobian"] = f"{HERE}:growth_two_slope"
    y, dt, u = jolted_rows(np.random.default_rng(5))
    jacobians = jolted_by_state, jolted_by_noise, growth_two_slope
    truth = textbook(definition, y, dt, u, jacobians, (jolted, growth_two))
    assert_same(run(definition, y, dt, u), truth, 1e-10)
    if kind == "extended":
        for section in ("process", "observation"):
            for name in ("jacobian", "noise_jacobian"):
                definition[section].pop(name, None)
        assert_same(run(definition, y, dt, u), truth, 1e-8)  # all by differences


@pytest.mark.parametrize(
    ("kind", "form", "rule"),
    [
        (kind, form, rule)
        for kind, form in FORMS
        if form != "information"
        for rule in (RULES if kind == "unscented" else RULES[:1])
    ],
)
def test_noise_inside_the_observation(kind, form, rule):
    """Three noises that enter a function of two values: by their Jacobian, or by points of state and noise."""
    definition = in_form(JOLTED, kind, form, f=f"{HERE}:jolted_without", Q=[[0.1, 0.02], [0.02, 0.2]])
    R = [[0.05, 0.01, 0.0], [0.01, 0.2, 0.0], [0.0, 0.0, 0.3]]
    definition["observation"] = {"h": f"{HERE}:dimmed", "R": R}
    if kind == "unscented" and rule:
        definition["unscented"] = rule
    if kind == "extended":
        definition["observation"] |= {
            "jacobian": f"{HERE}:dimmed_slope",
            "noise_jacobian": f"{HERE}:dimmed_by_noise",
        }
        definition["process"]["jacobian"] = f"{HERE}:jolted_by_state_alone"
    y, dt, u = jolted_rows(np.random.default_rng(5))
    jacobians = jolted_by_state_alone, None, dimmed_slope
    truth = textbook(definition, y, dt, u, jacobians, (jolted_without, dimmed), by_noise=dimmed_by_noise)
    assert_same(run(definition, y, dt, u), truth, 1e-10)
    if kind == "extended":
        for name in ("jacobian", "noise_jacobian"):
            definition["observation"].pop(name, None)
        assert_same(run(definition, y, dt, u), truth, 1e-8)
    both = {**definition, "robust": {"gate": {"threshold": 1e9}, "student_t": {"degrees": 1e9}}}
    np.testing.assert_allclose(run(both, y, dt, u).mean.T, truth[0], rtol=1e-5, atol=1e-6)


def jolted_by_state_alone(x, dt, u):
    return jolted_by_state(x, dt, u)


@pytest.mark.parametrize(("kind", "form"), [one for one in FORMS if one[1] != "information"])
def test_noise_inside_a_line_of_the_observation_is_the_linear_filter(kind, form):
    common = {
        "states": ["a"],
        "measurement": ["y"],
        "control": ["u", "r"],
        "process": {"kind": "random_walk", "variance": 0.3},
        "initial": {"mean": [0.3], "covariance": [[1.0]]},
    }
    inside = {
        **common,
        "filter": kind,
        **({"form": form} if form else {}),
        "observation": {"h": f"{HERE}:doubled_noise", "R": [["r", 0.0], [0.0, 0.2]], "noise_scale": 1.5},
    }
    rng = np.random.default_rng(8)
    y, u = rng.normal(size=(30, 1)), np.column_stack([rng.normal(size=30), rng.uniform(0.1, 2.0, 30)])
    y[4] = np.nan
    found = run(inside, y, np.ones(30), u)
    total = np.column_stack([u[:, 0], 1.5 * (u[:, 1] + 4.0 * 0.2)])
    linear = {**common, "observation": {"H": [[1.0]], "R": [["r"]], "offset": ["u"]}}
    truth = run(linear, y, np.ones(30), total)
    np.testing.assert_allclose(found.mean, truth.mean, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(found.covariance, truth.covariance, rtol=1e-9)
    model, states = kalman.build(inside), kalman.initial_states(kalman.build(inside), 1)
    ahead = kalman.forecast(model, states, np.ones((2, 1)), u[:2, :, None])
    plain_model = kalman.build(linear)
    plain = kalman.forecast(
        plain_model, kalman.initial_states(plain_model, 1), np.ones((2, 1)), total[:2, :, None]
    )
    np.testing.assert_allclose(ahead.measurement_mean, plain.measurement_mean, rtol=1e-9)
    np.testing.assert_allclose(ahead.measurement_covariance, plain.measurement_covariance, rtol=1e-9)


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_noise_inside_a_line_is_the_linear_filter(kind, form):
    """F x + G w, also smoothed and with a noise that is a function of dt and a column."""
    common = {
        "states": ["p", "v"],
        "measurement": ["y"],
        "control": ["u"],
        "observation": {"H": [[1.0, 0.0]], "R": [[0.5]], "offset": ["u"]},
        "initial": {"mean": [0.3, -0.2], "covariance": [[1.0, 0.2], [0.2, 2.0]]},
    }
    inside = {
        **common,
        "filter": kind,
        "process": {"kind": "function", "f": f"{HERE}:pushed", "q": f"{HERE}:noise_of", "noise_scale": 2.0},
        **({"form": form} if form else {}),
    }
    rng = np.random.default_rng(8)
    n = 30
    y, u = rng.normal(size=(n, 1)), rng.normal(size=(n, 1))
    rows = kalman.SortedRows(np.zeros(n, np.int64), np.arange(n) * SECOND, y.T.copy(), u.T.copy())
    model = kalman.build(inside)
    out = smooth(model, kalman.initial_states(model, 1), rows, UNIT)[2]
    # the same model in matrices, its Q a row's own: 2 (1 + u^2) G G'
    columns = np.vstack([u.T, *(2.0 * (1.0 + u.T**2) * g for g in (0.25, 0.5, 1.0))])
    linear = kalman.build(
        {
            **common,
            "filter": "linear",
            "control": ["u", "qa", "qb", "qc"],
            "process": {"kind": "explicit", "F": [[1.0, 1.0], [0.0, 1.0]], "Q": [["qa", "qb"], ["qb", "qc"]]},
        }
    )
    truth = smooth(linear, kalman.initial_states(linear, 1), rows._replace(u=columns), UNIT)[2]
    np.testing.assert_allclose(out.mean, truth.mean, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(out.covariance, truth.covariance, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("kind", "form"), [*FORMS[:2], FORMS[3], FORMS[5]])
def test_a_key_has_the_same_bits_in_any_company(kind, form):
    """Over two blocks of keys, and alone; a column that is missing flags its row and leaves the state."""
    model = pickle.loads(pickle.dumps(kalman.build(in_form(JOLTED, kind, form))))
    rng = np.random.default_rng(9)
    keys = 1500
    key = np.repeat(np.arange(keys), 3)
    time = np.tile(np.arange(3), keys) * SECOND
    y, u = rng.normal(size=(2, 3 * keys)), rng.uniform(-0.3, 0.5, size=(2, 3 * keys))
    u[1, 3 * 700 + 1] = np.nan
    rows = kalman.SortedRows(key, time, y, u)
    out = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)[1]
    assert kalman.FLAGS[out.flag[3 * 700 + 1]] == "non_finite"
    np.testing.assert_array_equal(out.mean[:, 3 * 700 + 1], out.mean[:, 3 * 700])
    for one in (0, 700, 1100, 1499):
        mine = rows.take(key == one)._replace(key=np.zeros(3, np.int64))
        alone = kalman.run(model, kalman.initial_states(model, 1), mine, UNIT)[1]
        np.testing.assert_array_equal(alone.mean, out.mean[:, key == one])
        np.testing.assert_array_equal(alone.covariance, out.covariance[:, key == one])


def test_robust_filters_and_modes_take_functions_of_inputs():
    y, dt, u = growth_rows(np.random.default_rng(3))
    plain_out = run(GROWTH, y, dt, u)
    wide_gate = run({**GROWTH, "robust": {"gate": {"threshold": 1e9}}}, y, dt, u)
    np.testing.assert_allclose(wide_gate.mean, plain_out.mean, rtol=1e-12)
    modes = {
        name: value for name, value in GROWTH.items() if name not in ("filter", "process", "observation")
    }
    mode = {name: GROWTH[name] for name in ("filter", "process", "observation")}
    both = run({**modes, "filter": "mmae", "modes": [mode, mode]}, y, dt, u)
    np.testing.assert_allclose(both.mean, plain_out.mean, rtol=1e-9)


@pytest.mark.parametrize("name", ["plain", "plain_with_default", "any_arguments"])
def test_a_function_of_the_state_alone_stays_one(name):
    """A second parameter with a default of its own, and any number of arguments, are no inputs."""
    definition = copy.deepcopy(GROWTH)
    definition["observation"]["h"] = f"{HERE}:{name}"
    definition["observation"]["offset"] = ["x"]
    y, dt, u = growth_rows(np.random.default_rng(3))
    assert np.isfinite(run(definition, y, dt, u).mean).all()
    del definition["observation"]["offset"]
    with pytest.raises(kalman.ModelError, match="the model does not use it: x"):
        kalman.build(definition)


def test_a_process_without_inputs():
    definition = copy.deepcopy(JOLTED)
    definition["process"] = {"kind": "function", "f": f"{HERE}:without_inputs", "Q": [[0.1, 0.0], [0.0, 0.2]]}
    y, dt, u = jolted_rows(np.random.default_rng(5))
    assert np.isfinite(run(definition, y, dt, u).mean).all()


def test_a_function_may_be_undefined_at_the_inputs_that_it_is_tried_at():
    definition = copy.deepcopy(GROWTH)
    definition["observation"]["h"] = f"{HERE}:above_one_hundred"
    out = run(definition, np.ones((2, 1)), np.ones(2), np.array([[104.0], [99.0]]))
    assert [kalman.FLAGS[a] for a in out.flag] == [None, "non_finite"]


WRONG = [
    (
        "observation.h",
        "three",
        "takes (x, u, z), and is called with (x), (x, u) or (x, u, v)",
        "write it as three(x)",
    ),
    ("observation.h", "keyword", "takes (x, *, u), and is called with (x), (x, u) or (x, u, v)", "u (c, K)"),
    ("observation.h", "wide", "gives shape (2, 3) for 3 keys where (1, 3) is needed", "(1, K)"),
    ("observation.jacobian", "wrong_slope", "by differences", "mend it"),
    (
        "observation.jacobian",
        "growth",
        "gives shape (1, 3) for 3 keys where (1, 1, 3) is needed",
        "(1, 1, K)",
    ),
    (
        "process.f",
        "plain",
        "takes (x), and is called with (x, dt), (x, dt, u) or (x, dt, u, w)",
        "(x, dt, u)",
    ),
    ("process.noise_jacobian", "jolted_by_noise", "takes no noise w", "let f take x, dt, u and w"),
]


@pytest.mark.parametrize(("field", "function", "problem", "remedy"), WRONG)
def test_an_error_names_the_function_its_arguments_and_shapes(field, function, problem, remedy):
    definition = copy.deepcopy(GROWTH)
    definition["control"] = ["x", "other"] if function == "wide" else ["x"]
    section, name = field.split(".")
    if section == "process":
        definition["process"] = {"kind": "function", "f": f"{HERE}:stay", "Q": [[1.0]]}
    definition[section][name] = f"{HERE}:{function}"
    with pytest.raises(kalman.ModelError) as error:
        kalman.build(definition)
    assert error.value.field == field and problem in error.value.problem and remedy in error.value.remedy


def test_wrong_noise_inside():
    inside = {**GROWTH, "observation": {"h": f"{HERE}:doubled_noise", "R": [[1.0, 0.0], [0.0, 1.0]]}}
    for changes, problem in (
        ({"adaptive": {"R": 0.1}}, "does not go with noise inside the observation's function"),
        ({"robust": {"huber": {}}}, "does not go with noise inside the observation's function"),
        ({"form": "information"}, "divides by it"),
        (
            {"observation": {**GROWTH["observation"], "noise_jacobian": f"{HERE}:growth_slope"}},
            "takes no noise v",
        ),
    ):
        with pytest.raises(kalman.ModelError, match=problem):
            kalman.build({**inside, **changes})
    for process, problem in (
        ({"Q": [[1.0]]}, "IndexError"),
        ({"noise_jacobian": f"{HERE}:half_noise"}, "by differences"),
        ({"noise_jacobian": f"{HERE}:jolted_by_state"}, "gives shape (2, 2, 3)"),
    ):
        with pytest.raises(kalman.ModelError) as error:
            kalman.build(in_form(JOLTED, "extended", None, **process))
        assert problem in error.value.problem
    with pytest.raises(kalman.ModelError, match="draws the noise at points"):
        kalman.build(in_form(JOLTED, "cubature", None, noise_jacobian=f"{HERE}:jolted_by_noise"))
    for section in ({"robust": {"fading": 1.01}}, {"adaptive": {"Q": 0.1}}):
        with pytest.raises(kalman.ModelError, match="does not go with noise inside"):
            kalman.build({**JOLTED, **section})
