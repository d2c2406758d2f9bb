"""Extended, unscented and cubature filters against values by hand, textbook filters and published numbers."""

import numpy as np
import pytest
from scipy.stats import chi2

import kalman
from tests.kalman.support.models import random_rows
from tests.kalman.support.nonlinear import (
    random_nonlinear,
    range_and_bearing,
    textbook_nonlinear,
    velocity_noise,
)
from tests.kalman.support.oracles import UNIT, full, run_one

HERE = "tests.kalman.support.nonlinear"
KINDS = ["extended", "unscented", "cubature"]
FORMS = [
    *((kind, form) for kind in KINDS for form in ("covariance", "square_root")),
    ("extended", "information"),
]
RULES = [
    {},
    {"unscented": {"alpha": 1.0, "beta": 2.0, "kappa": 0.0}},
    {"unscented": {"alpha": 0.05, "beta": 2.0, "kappa": 0.0}},  # the centre weighs -399
    {"unscented": {"alpha": 0.5, "beta": 0.0, "kappa": 1.0}},
    {"unscented": {"alpha": 1.0, "beta": 0.0, "kappa": -0.3}},  # the covariance is a difference
]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_by_hand(kind, form):
    """x ~ N(1, 1/4), z = x^2 + v, R = 1/10, z = 3/2."""
    definition = {
        "filter": kind,
        "form": form,
        "states": ["x"],
        "measurement": ["z"],
        "process": {"kind": "explicit", "F": [[1]], "Q": [[0]]},
        "observation": {"h": f"{HERE}:squared", "R": [[0.1]]},
        "initial": {"mean": [1.0], "covariance": [[0.25]]},
    }
    if kind == "unscented":
        definition["unscented"] = {"alpha": 1.0, "beta": 0.0, "kappa": 2.0}
    _, outputs = run_one(definition, [1.5])
    mean, variance = {
        "extended": (27 / 22, 1 / 44),
        "unscented": (54 / 49, 9 / 196),
        "cubature": (49 / 44, 1 / 44),
    }[kind]
    rtol = 1e-11 if kind == "extended" else 1e-14  # the slope is by differences here
    np.testing.assert_allclose(outputs.mean[0, 0], mean, rtol=rtol)
    np.testing.assert_allclose(outputs.covariance[0, 0], variance, rtol=rtol)


@pytest.mark.parametrize("kind", ["unscented", "cubature"])
def test_points_are_drawn_again_after_the_process_noise(kind):
    """x ~ N(1, 3/20) that stays, with noise of 1/10: the measurement by hand is met by N(1, 1/4)."""
    definition = {
        "filter": kind,
        "states": ["x"],
        "measurement": ["z"],
        "process": {"kind": "function", "f": f"{HERE}:still", "Q": [[0.1]]},
        "observation": {"h": f"{HERE}:squared", "R": [[0.1]]},
        "initial": {"mean": [1.0], "covariance": [[0.15]]},
    }
    _, outputs = run_one(definition, [np.nan, 1.5])
    mean, variance = {"unscented": (54 / 49, 9 / 196), "cubature": (49 / 44, 1 / 44)}[kind]
    np.testing.assert_allclose(outputs.mean[0, 1], mean, rtol=1e-13)
    np.testing.assert_allclose(outputs.covariance[0, 1], variance, rtol=1e-13)


@pytest.mark.parametrize(("kind", "form"), FORMS)
@pytest.mark.parametrize("functions", [True, False])
def test_matlab_toolbox(kind, form, functions):
    """EKF/UKF toolbox for MATLAB (Hartikainen, Solin, Sarkka 2011): the linear model, also written as functions."""
    definition = {
        "filter": kind,
        "form": form,
        "states": ["a", "b"],
        "measurement": ["z"],
        "process": {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": [[2, 0], [0, 2]]},
        "observation": {"H": [[0.5, -0.3]], "R": [[0.5]]},
        "initial": {"mean": [1, 1], "covariance": [[1, 0.1], [0.1, 1]]},
    }
    if functions:
        definition["process"] = {"kind": "function", "f": f"{HERE}:toolbox_step", "Q": [[2, 0], [0, 2]]}
        definition["observation"] = {"h": f"{HERE}:toolbox_seen", "R": [[0.5]]}
    states, outputs = run_one(definition, [np.nan, 1, 2, 3])
    expected = [(2.3563758390, 0.9295302014), (4.3915325861, 1.1514893011), (6.7190624359, 1.5281061414)]
    np.testing.assert_allclose(outputs.mean[:, 1:].T, expected, rtol=1e-10)
    assert states.log_likelihood[0] == pytest.approx(-4.047678110, abs=1e-9)
    smoothed = kalman_smooth(definition, [np.nan, 1, 2, 3])
    np.testing.assert_allclose(smoothed[:, 1], (2.9272501150, 1.6358250940), rtol=1e-10)


def kalman_smooth(definition, y):
    from kalman.smoothers.smooth import smooth

    model = kalman.build(definition)
    rows = kalman.SortedRows(
        np.zeros(len(y), np.int64),
        np.arange(len(y)) * 1_000_000,
        np.array(y, float)[None],
        np.empty((0, len(y))),
    )
    return smooth(model, kalman.initial_states(model, 1), rows, UNIT)[2].mean


@pytest.mark.parametrize(
    ("kind", "form", "rule"),
    [
        *((k, f, {}) for k, f in FORMS),
        *(("unscented", f, r) for f in ("covariance", "square_root") for r in RULES[1:]),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_textbook_over_random_models(kind, form, rule, seed):
    """Missing components, correlated noise, irregular times, control; n 1-4, m 1-3; points redrawn after the noise."""
    rng = np.random.default_rng([seed, FORMS.index((kind, form)), RULES.index(rule)])
    n, m, c = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(0, 2))
    definition = {**random_nonlinear(rng, kind, n, m, c), "form": form, **rule}
    if rule is RULES[-1]:  # close to a line, so that the difference stays a covariance
        definition["initial"]["covariance"] = (0.1 * np.array(definition["initial"]["covariance"])).tolist()
    rows = random_rows(rng, definition, 6, 9)
    model = kalman.build(definition)
    _, outputs = kalman.run(model, kalman.initial_states(model, 6), rows, UNIT)
    assert not outputs.flag.any()
    for key in np.unique(rows.key):
        here = rows.key == key
        dt = np.diff(rows.time[here], prepend=0) / UNIT
        truth = textbook_nonlinear(definition, rows.y[:, here].T, dt, rows.u[:, here].T)
        atol = 1e-10 if rule is RULES[2] else 1e-11
        np.testing.assert_allclose(outputs.mean[:, here].T, truth.means, rtol=1e-10, atol=atol)
        np.testing.assert_allclose(
            full(outputs.covariance[:, here]), truth.covariances, rtol=1e-10, atol=atol
        )
        np.testing.assert_allclose(outputs.log_likelihood[here], truth.log_likelihoods, rtol=1e-10, atol=atol)
        np.testing.assert_allclose(outputs.nis[here], truth.nis, rtol=1e-10, atol=atol)


@pytest.mark.parametrize("form", ["covariance", "square_root"])
def test_a_centre_that_weighs_minus_a_million(form):
    """alpha = 1e-3, beta = 2, kappa = 0, as often recommended, against weighted sums in extended precision."""
    rng = np.random.default_rng(11)
    chosen = {"alpha": 1e-3, "beta": 2.0, "kappa": 0.0}
    definition = {**random_nonlinear(rng, "unscented", 3, 2, 0), "form": form, "unscented": chosen}
    y = rng.normal(size=(6, 2))
    _, outputs = run_one(definition, y)
    truth = textbook_nonlinear(definition, y, np.ones(6), np.empty((6, 0)), np.longdouble)
    np.testing.assert_allclose(outputs.mean.T, truth.means, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(full(outputs.covariance), truth.covariances, rtol=1e-7, atol=1e-8)
    assert not outputs.flag.any()


@pytest.mark.parametrize("form", ["covariance", "square_root", "information"])
def test_the_jacobian_by_differences(form):
    rng = np.random.default_rng(5)
    given = {**random_nonlinear(rng, "extended", 3, 2, 1), "form": form}
    numeric = {
        **given,
        "process": {k: v for k, v in given["process"].items() if k != "jacobian"},
        "observation": {k: v for k, v in given["observation"].items() if k != "jacobian"},
    }
    y, u = rng.normal(size=(8, 2)), rng.normal(size=(8, 1))
    (_, a), (_, b) = run_one(given, y, u=u), run_one(numeric, y, u=u)
    np.testing.assert_allclose(a.mean, b.mean, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(a.covariance, b.covariance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["covariance", "square_root"])
def test_a_linear_model_written_as_functions_is_the_linear_filter(kind, form):
    """Noise by a function of dt; process or observation or both as functions; components missing, dt 0 too."""
    rng = np.random.default_rng(3)
    structure = {"kind": "constant_velocity", "acceleration_variance": 0.05, "dimensions": 2}
    function = {"kind": "function", "f": f"{HERE}:velocity", "q": f"{HERE}:velocity_noise"}
    linear = {
        "states": ["x", "vx", "y", "vy"],
        "measurement": ["px", "py"],
        "control": [],
        "process": structure,
        "observation": {"R": [[1.0, 0.3], [0.3, 0.5]]},
        "initial": {"mean": [1, 0.5, -2, 0], "covariance": np.diag([4.0, 1, 4, 1]).tolist()},
    }
    H = {**linear["observation"], "H": [[1, 0, 0, 0], [0, 0, 1, 0]]}
    rows = random_rows(rng, linear, 20, 12)
    results = []
    for definition in (
        linear,
        {**linear, "filter": kind, "form": form, "process": function, "observation": H},
        {
            **linear,
            "filter": kind,
            "form": form,
            "observation": {**linear["observation"], "h": f"{HERE}:positions"},
        },
        {
            **linear,
            "filter": kind,
            "form": form,
            "process": function,
            "observation": {**linear["observation"], "h": f"{HERE}:positions"},
        },
    ):
        model = kalman.build(definition)
        results.append(kalman.run(model, kalman.initial_states(model, 20), rows, UNIT)[1])
    for outputs in results[1:]:
        assert not outputs.flag.any()
        for name in ("mean", "covariance", "log_likelihood", "nis"):
            ours, theirs = getattr(outputs, name), getattr(results[0], name)
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9 * np.nanmax(np.abs(theirs)) * 1e-2)


def test_from_range_and_bearing_to_places():
    """Julier and Uhlmann (2004), section III: the mean of (r cos b, r sin b) is shorter than a first order says.

    Range N(1, 0.02^2), bearing N(90 degrees, 15^2): the mean's second coordinate is exp(-s^2 / 2) = 0.9663, its
    variance (1 + 0.02^2) (1 + exp(-2 s^2)) / 2 - exp(-s^2).
    """
    s = np.deg2rad(15)
    definition = {
        "states": ["r", "b"],
        "measurement": ["x", "y"],
        "process": {"kind": "function", "f": f"{HERE}:polar", "Q": [[0, 0], [0, 0]]},
        "observation": {"H": [[1, 0], [0, 1]], "R": [[1, 0], [0, 1]]},
        "initial": {"mean": [1, np.pi / 2], "covariance": [[0.0004, 0], [0, s * s]]},
    }
    nothing = [[np.nan, np.nan]] * 2
    mean = {kind: run_one({**definition, "filter": kind}, nothing)[1].mean[:, 1] for kind in KINDS}
    three = {**definition, "filter": "unscented", "unscented": {"kappa": 1.0}}  # n + kappa = 3
    _, outputs = run_one(three, nothing)
    truth = np.exp(-s * s / 2)
    assert truth == pytest.approx(0.9663, abs=5e-5)
    assert outputs.mean[1, 1] == pytest.approx(truth, abs=5e-6)
    variance = 1.0004 * (1 + np.exp(-2 * s * s)) / 2 - np.exp(-s * s)
    assert outputs.covariance[2, 1] == pytest.approx(variance, rel=0.1)
    assert mean["extended"][1] == pytest.approx(1.0, abs=1e-12)
    assert mean["unscented"][1] == pytest.approx(truth, abs=3e-4)
    assert mean["cubature"][1] == pytest.approx(truth, abs=3e-4)
    assert all(abs(one[0]) < 1e-12 for one in mean.values())


@pytest.mark.parametrize("kind", KINDS)
def test_consistency_by_simulation(kind):
    """A target seen by range and bearing: mean NEES and NIS within their 99.9 % bounds (Bar-Shalom, 5.4)."""
    rng = np.random.default_rng(7)
    keys, length = 250, 20
    R = np.diag([0.25, 0.0004])
    mean, P0 = np.array([80.0, -1.0, 60.0, 1.5]), np.diag([4.0, 0.25, 4.0, 0.25])
    definition = {
        "filter": kind,
        "states": ["x", "vx", "y", "vy"],
        "measurement": ["range", "bearing"],
        "process": {"kind": "function", "f": f"{HERE}:velocity", "q": f"{HERE}:velocity_noise"},
        "observation": {"h": f"{HERE}:range_and_bearing", "R": R.tolist()},
        "initial": {"mean": mean.tolist(), "covariance": P0.tolist()},
    }
    x = rng.multivariate_normal(mean, P0, keys).T
    Q = velocity_noise(np.ones(1))[:, :, 0]
    xs, ys = [], []
    for k in range(length):
        if k:
            x = np.array([x[0] + x[1], x[1], x[2] + x[3], x[3]])
            x = x + rng.multivariate_normal(np.zeros(4), Q, keys).T
        xs.append(x)
        ys.append(range_and_bearing(x) + np.sqrt(np.diag(R))[:, None] * rng.normal(size=(2, keys)))
    truth = np.array(xs).transpose(1, 2, 0).reshape(4, -1)
    y = np.array(ys).transpose(1, 2, 0).reshape(2, -1)
    time = np.tile(np.arange(length) * 1_000_000, keys)
    model = kalman.build(definition)
    rows = kalman.SortedRows(np.repeat(np.arange(keys), length), time, y, np.empty((0, keys * length)))
    _, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    error = (outputs.mean - truth).T[:, :, None]
    nees = (error.transpose(0, 2, 1) @ np.linalg.solve(full(outputs.covariance), error)).ravel()
    last = np.arange(keys) * length + length - 1
    low, high = chi2.ppf([0.0005, 0.9995], keys * 4) / keys
    assert low < nees[last].mean() < high
    low, high = chi2.ppf([0.0005, 0.9995], keys * length * 2) / (keys * length)
    assert low < outputs.nis.mean() < high
