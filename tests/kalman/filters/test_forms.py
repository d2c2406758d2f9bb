"""Square roots and information: the same filter, in numbers that keep where the covariance's would not."""

from fractions import Fraction

import numpy as np
import pytest

import kalman
from kalman import flags
from kalman.filters.prediction import predict_measurement
from kalman.linalg import cholesky
from tests.kalman.support.models import SIZES, random_covariance, random_definition, random_rows
from tests.kalman.support.oracles import UNIT, full, run_one

KINDS = ["explicit", *SIZES]
FORMS = [
    (kind, form)
    for kind in ("linear", "extended", "unscented", "cubature")
    for form in ("covariance", "square_root", "information")
    if form != "information" or kind in ("linear", "extended")
]
HERE = "tests.kalman.support.nonlinear"


@pytest.mark.parametrize(
    ("filter_kind", "form"), [pair for pair in FORMS if pair != ("linear", "covariance")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_is_the_linear_filter(kind, filter_kind, form):
    rng = np.random.default_rng([KINDS.index(kind), 5])
    definition = random_definition(rng, kind, 3, int(rng.integers(1, 4)), 1 if kind == "explicit" else 0)
    rows = random_rows(rng, definition, 15, 8)
    results = []
    for change in ({}, {"filter": filter_kind, "form": form}):
        model = kalman.build({**definition, **change})
        results.append(kalman.run(model, kalman.initial_states(model, 15), rows, UNIT)[1])
    assert not results[1].flag.any()
    for name in ("mean", "covariance", "log_likelihood", "nis"):
        np.testing.assert_allclose(
            getattr(results[1], name), getattr(results[0], name), rtol=1e-9, atol=1e-10
        )


def test_many_measurements_in_information_form():
    """Twelve correlated measurements of two states, some missing."""
    rng = np.random.default_rng(2)
    definition = random_definition(rng, "local_linear_trend", 2, 12)
    rows = random_rows(rng, definition, 6, 6)
    outputs = []
    for form in ("covariance", "information"):
        model = kalman.build({**definition, "form": form})
        outputs.append(kalman.run(model, kalman.initial_states(model, 6), rows, UNIT)[1])
    for name in ("mean", "covariance", "log_likelihood", "nis"):
        np.testing.assert_allclose(getattr(outputs[1], name), getattr(outputs[0], name), rtol=1e-8, atol=1e-9)


SHARP = {
    "states": ["a", "b"],
    "measurement": ["z"],
    "process": {"kind": "explicit", "F": [[1, 0], [0, 1]], "Q": [[0, 0], [0, 0]]},
    "observation": {"H": [[1, 0]], "R": [[0.04]]},
    "initial": {"mean": [0, 0], "covariance": [[1e24, 1e-24], [1e-24, 1e24]]},
}


@pytest.mark.parametrize(
    ("kind", "form", "function"),
    [
        (*pair, function)
        for pair in FORMS
        for function in (False, True)
        if pair[0] != "linear" or not function
    ],
)
def test_a_measurement_much_sharper_than_the_prior(kind, form, function):
    """P - K S K' gives 0 here; the exact answer is diag(0.04, 1e24)."""
    definition = {**SHARP, "filter": kind, "form": form}
    if function:
        definition["observation"] = {
            "h": f"{HERE}:first_state",
            "jacobian": f"{HERE}:first_state_slope",
            "R": [[0.04]],
        }
    _, outputs = run_one(definition, [1.0])
    np.testing.assert_allclose(outputs.covariance[[0, 2], 0], [0.04, 1e24], rtol=4e-15)
    assert abs(outputs.covariance[1, 0]) < 1e-12
    assert outputs.flag[0] == 0


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("kind", ["linear", "unscented"])
def test_a_covariance_stays_one(n, kind):
    """A chain of n integrators without noise under sharp measurements: rounding is all that happens."""
    F = np.eye(n) + np.diag(np.ones(n - 1), 1)
    definition = {
        "filter": kind,
        "form": "square_root",
        "states": [f"x{i}" for i in range(n)],
        "measurement": ["y"],
        "process": {"kind": "explicit", "F": F.tolist(), "Q": np.zeros((n, n)).tolist()},
        "observation": {"H": [[1.0] + [0.0] * (n - 1)], "R": [[1e-10]]},
        "initial": {"mean": [0.0] * n, "covariance": (1e8 * np.eye(n)).tolist()},
    }
    _, outputs = run_one(definition, np.zeros(60))
    assert not outputs.flag.any()
    for P in full(outputs.covariance):
        scale = np.sqrt(np.diag(P))
        assert (scale > 0).all() and np.linalg.eigvalsh(P / np.outer(scale, scale)).min() > -1e-14


def test_square_roots_keep_the_digits_that_covariances_lose():
    """Against the same filter in fractions: four integrators, R = 1e-12 beside P = 1e6."""
    n, length = 4, 8
    F = np.eye(n) + np.diag(np.ones(n - 1), 1)
    definition = {
        "states": [f"x{i}" for i in range(n)],
        "measurement": ["y"],
        "process": {"kind": "explicit", "F": F.tolist(), "Q": np.zeros((n, n)).tolist()},
        "observation": {"H": [[1.0, 0.0, 0.0, 0.0]], "R": [[2.0**-40]]},
        "initial": {"mean": [0.0] * n, "covariance": (2.0**20 * np.eye(n)).tolist()},
    }
    P = [[Fraction(int(i == j) * 2**20) for j in range(n)] for i in range(n)]
    f = [[Fraction(int(a)) for a in row] for row in F]
    for k in range(length):
        if k:
            FP = [[sum(f[i][a] * P[a][j] for a in range(n)) for j in range(n)] for i in range(n)]
            P = [[sum(FP[i][a] * f[j][a] for a in range(n)) for j in range(n)] for i in range(n)]
        S = P[0][0] + Fraction(1, 2**40)
        P = [[P[i][j] - P[i][0] * P[0][j] / S for j in range(n)] for i in range(n)]
    exact = np.array([[float(a) for a in row] for row in P])
    worst = {}
    for form in ("covariance", "square_root"):
        _, outputs = run_one({**definition, "form": form}, np.zeros(length))
        found = full(outputs.covariance)[-1]
        scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
        worst[form] = np.abs((found - exact) / scale).max()
    assert worst["square_root"] < 1e-6 and worst["square_root"] < worst["covariance"] / 100


@pytest.mark.parametrize("n", range(1, 6))
@np.errstate(all="ignore")
def test_factors(n):
    rng = np.random.default_rng(n)
    P = np.array(random_covariance(rng, n))
    packed = [np.array([P[i, j]]) for i in range(n) for j in range(i + 1)]
    L, sound = cholesky.cholesky(packed)
    rows = np.array([[np.ravel(a)[0] for a in row] for row in cholesky.unpack_triangle(L)])
    np.testing.assert_allclose(rows, np.linalg.cholesky(P), rtol=1e-12)
    assert sound > 0
    A = rng.normal(size=(n, n + 2))
    A[0, 1:] = 0.0
    T = cholesky.triangulate_rows([[np.array([a]) if a else 0.0 for a in row] for row in A])
    triangle = np.array([[np.ravel(a)[0] for a in row] for row in cholesky.unpack_triangle(T)])
    np.testing.assert_allclose(triangle @ triangle.T, A @ A.T, rtol=1e-12, atol=1e-12)
    assert (np.diag(triangle) >= 0).all()
    v = 0.5 * rows @ rng.normal(size=n) / np.sqrt(n)
    down, sound = cholesky.downdate(L, [np.array([a]) for a in v])
    lowered = np.array([[np.ravel(a)[0] for a in row] for row in cholesky.unpack_triangle(down)])
    if sound > 0:
        np.testing.assert_allclose(lowered @ lowered.T, P - np.outer(v, v), rtol=1e-10, atol=1e-12)
    _, sound = cholesky.downdate(L, [np.array([3.0 * a]) for a in rows.sum(axis=1)])
    assert sound < 0, "nine times what there is cannot be taken away"


@np.errstate(all="ignore")
def test_a_singular_covariance_has_a_factor():
    P = [np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.array([1.0, 2.0])]
    L, sound = cholesky.cholesky(P)
    np.testing.assert_array_equal(np.array(L), [[1, 0], [1, 0], [0, np.sqrt(2)]])
    assert np.min(sound) >= 0
    _, sound = cholesky.cholesky([np.array([1.0]), np.array([2.0]), np.array([1.0])])
    assert np.min(sound) < 0


@pytest.mark.parametrize(
    ("filter_kind", "form"), [pair for pair in FORMS if pair != ("linear", "covariance")]
)
def test_entries_from_columns_and_predicted_measurements(filter_kind, form):
    """H, R, Q, an offset and scales of the noise from columns, on every row; then what a measurement would be."""
    rng = np.random.default_rng(8)
    definition = {
        "states": ["a", "b"],
        "measurement": ["y", "z"],
        "control": ["slope", "loud", "shaky", "shift"],
        "process": {
            "kind": "local_linear_trend",
            "level_variance": 1.0,
            "slope_variance": 0.1,
            "noise_scale": "shaky",
        },
        "observation": {
            "H": [["slope", 0.5], [0.0, 1.0]],
            "R": [[1.0, 0.2], [0.2, 2.0]],
            "noise_scale": "loud",
            "offset": ["shift", 1.0],
        },
        "initial": {"mean": [0.0, 1.0], "covariance": [[2.0, 0.1], [0.1, 1.0]]},
    }
    if form == "information":
        del definition["observation"]["noise_scale"]
        definition["control"].remove("loud")
    rows = random_rows(rng, definition, 12, 6)
    rows = rows._replace(u=np.abs(rows.u))
    results = []
    for change in ({}, {"filter": filter_kind, "form": form}):
        model = kalman.build({**definition, **change})
        results.append(kalman.run(model, kalman.initial_states(model, 12), rows, UNIT)[1])
    assert not results[1].flag.any()
    for name in ("mean", "covariance", "log_likelihood", "nis"):
        np.testing.assert_allclose(
            getattr(results[1], name), getattr(results[0], name), rtol=1e-9, atol=1e-10
        )
    negative = rows._replace(u=-rows.u)
    outputs = kalman.run(model, kalman.initial_states(model, 12), negative, UNIT)[1]
    assert (outputs.flag == flags.NOT_PSD).any() and np.isfinite(outputs.covariance).all()
    plain = kalman.build(definition)
    expected = [predict_measurement(one, one.initial(3), rows.u[:, :3]) for one in (plain, model)]
    for ours, linear in zip(expected[1], expected[0], strict=True):
        np.testing.assert_allclose(ours, linear, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "form"), [pair for pair in FORMS if pair[0] != "linear"])
def test_the_predicted_measurement_is_that_of_the_innovation(kind, form):
    """The innovation that a row then has, and its variance, are those that were expected."""
    definition = {
        "filter": kind,
        "form": form,
        "states": ["x"],
        "measurement": ["z"],
        "process": {"kind": "explicit", "F": [[1]], "Q": [[0]]},
        "observation": {"h": f"{HERE}:squared", "R": [[0.1]]},
        "initial": {"mean": [1.0], "covariance": [[0.25]]},
    }
    model = kalman.build(definition)
    mean, covariance = predict_measurement(model, model.initial(1))
    expected = {"extended": (1.0, 1.1), "unscented": (1.25, 1.225), "cubature": (1.25, 1.1)}[kind]
    np.testing.assert_allclose([mean[0, 0], covariance[0, 0]], expected, rtol=1e-11)
    _, outputs = run_one(definition, [1.5])
    assert outputs.nis[0] == pytest.approx((1.5 - mean[0, 0]) ** 2 / covariance[0, 0], rel=1e-12)


def test_learning_is_that_of_the_covariance_form():
    from kalman.learning.maximum_likelihood import build_linear_learner

    definition = {
        "states": ["a"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"R": [[2.0]]},
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
        "learn": {"parameters": ["R"], "scope": "key"},
        "form": "square_root",
    }
    rows = random_rows(np.random.default_rng(4), {**definition, "control": []}, 5, 9)
    found = build_linear_learner(definition).fit_keys(rows, 5, UNIT, None)
    model = kalman.build(definition)
    plain = kalman.build({**definition, "form": "covariance"})
    outputs = []
    for one in (model, plain):
        start = kalman.initial_states(one, 5)
        start = start._replace(values=one.with_parameters(start.values, found.parameters))
        outputs.append(kalman.run(one, start, rows, UNIT)[1])
    np.testing.assert_allclose(outputs[0].mean, outputs[1].mean, rtol=1e-10, atol=1e-12)
