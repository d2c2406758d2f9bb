"""The linear filter against textbook, joint Gaussian, closed forms and published numbers."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2
from statsmodels.datasets import co2, nile
from statsmodels.tsa.statespace.kalman_filter import KalmanFilter
from statsmodels.tsa.statespace.structural import UnobservedComponents

import kalman
from kalman.filters.update import mask_present
from tests.kalman.support.decimals import given_all
from tests.kalman.support.models import SIZES, STEPS, random_definition, random_rows
from tests.kalman.support.oracles import UNIT, diffuse_joint, full, joint, run_one, textbook, transition_of

KINDS = ["explicit", *SIZES, *STEPS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_textbook_over_random_models(kind, seed):
    """Correlated noise, missing components, irregular times, control; n 1-4, m 1-3."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    controls = int(rng.integers(0, 3)) if kind == "explicit" else 0
    definition = random_definition(rng, kind, int(rng.integers(1, 5)), int(rng.integers(1, 4)), controls)
    rows = random_rows(rng, definition, 9, 12)
    model = kalman.build(definition)
    _, outputs = kalman.run(model, kalman.initial_states(model, 9), rows, UNIT)
    H = np.array(definition["observation"]["H"])
    for key in np.unique(rows.key):
        here = rows.key == key
        dt = np.diff(rows.time[here], prepend=0) / UNIT
        truth = textbook(definition, H, rows.y[:, here].T, dt, rows.u[:, here].T)
        np.testing.assert_allclose(outputs.mean[:, here].T, truth.means, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(
            full(outputs.covariance[:, here]), truth.covariances, rtol=1e-10, atol=1e-11
        )
        np.testing.assert_allclose(
            outputs.log_likelihood[here], truth.log_likelihoods, rtol=1e-10, atol=1e-11
        )
        np.testing.assert_allclose(outputs.nis[here], truth.nis, rtol=1e-10, atol=1e-11)
    assert not outputs.flag.any()


@pytest.mark.parametrize("kind", KINDS)
def test_joint_gaussian(kind):
    rng = np.random.default_rng(7)
    definition = random_definition(rng, kind, 3, 2, 1 if kind == "explicit" else 0)
    N = 6
    y, u = rng.normal(size=(N, 2)), rng.normal(size=(N, len(definition["control"])))
    y[2, 0] = y[4] = np.nan
    seconds = np.cumsum([0, 1, 0.5, 0, 3, 0.25])
    H = np.array(definition["observation"]["H"])
    score, mean, covariance = joint(definition, H, y, np.diff(seconds, prepend=0), u)
    states, outputs = run_one(definition, y, seconds, u)
    np.testing.assert_allclose(states.log_likelihood[0], score, rtol=1e-10)
    np.testing.assert_allclose(outputs.mean[:, -1], mean, rtol=1e-9)
    np.testing.assert_allclose(full(outputs.covariance)[-1], covariance, rtol=1e-8, atol=1e-10)


NILE = np.asarray(dict(nile.load_pandas())["data"]["volume"], float)


def nile_model(initial):
    return {
        "filter": "linear",
        "states": ["level"],
        "measurement": ["volume"],
        "process": {"kind": "explicit", "F": [[1.0]], "Q": [[1469.1]]},
        "observation": {"H": [[1.0]], "R": [[15099.0]]},
        "initial": initial,
    }


def test_nile_with_a_wide_prior():
    """Durbin and Koopman (2012), chapter 2; all rows count, with the constant."""
    states, _ = run_one(nile_model({"mean": [0.0], "covariance": [[1e7]]}), NILE)
    assert states.log_likelihood[0] == pytest.approx(-641.585578, abs=5e-7)


def test_nile_with_an_exact_diffuse_start():
    """Durbin and Koopman (2012), section 2.2.5; log-likelihood as statsmodels has it."""
    states, outputs = run_one(nile_model({"diffuse": True}), NILE)
    assert states.log_likelihood[0] == pytest.approx(-633.464564, abs=5e-7)
    dropped = states.log_likelihood[0] + 0.5 * np.log(2 * np.pi)  # KFAS leaves the first row out
    assert dropped == pytest.approx(-632.545625, abs=1e-6)
    for row, mean, variance in (
        (0, 1120, 15099),
        (1, 1140.927840, 7899.736379),
        (99, 798.370293, 4032.157942),
    ):
        assert outputs.mean[0, row] == pytest.approx(mean, abs=5e-7)
        assert outputs.covariance[0, row] == pytest.approx(variance, abs=5e-7)
    assert np.isnan(outputs.nis[0]) and not np.isnan(outputs.nis[1:]).any()


def test_nile_with_missing_rows():
    """Durbin and Koopman (2012), section 2.7: rows 21-40 and 61-80 missing, each with log-likelihood 0."""
    y = NILE.copy()
    y[20:40] = y[60:80] = np.nan
    states, outputs = run_one(nile_model({"diffuse": True}), y)
    assert states.log_likelihood[0] == pytest.approx(-381.506001, abs=5e-7)
    assert outputs.mean[0, 30] == pytest.approx(1026.141555, abs=5e-7)
    assert outputs.covariance[0, 30] == pytest.approx(20192.296160, abs=5e-7)
    assert (outputs.log_likelihood[20:40] == 0).all() and np.isnan(outputs.nis[20:40]).all()


def test_nile_ten_steps_ahead():
    """Durbin and Koopman (2012), section 2.8, as ten missing rows; the measurement's variance adds R."""
    _, outputs = run_one(nile_model({"diffuse": True}), np.append(NILE, [np.nan] * 10))
    np.testing.assert_allclose(outputs.mean[0, 100:], 798.370293, rtol=1e-9)
    ahead = outputs.covariance[0, 100:] + 15099
    assert ahead[0] == pytest.approx(20600.257942, abs=5e-7) and ahead[9] == pytest.approx(
        33822.157942, abs=5e-7
    )


def test_matlab_toolbox():
    """EKF/UKF toolbox for MATLAB (Hartikainen, Solin, Sarkka 2011)."""
    definition = {
        "states": ["a", "b"],
        "measurement": ["z"],
        "process": {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": [[2, 0], [0, 2]]},
        "observation": {"H": [[0.5, -0.3]], "R": [[0.5]]},
        "initial": {"mean": [1, 1], "covariance": [[1, 0.1], [0.1, 1]]},
    }
    states, outputs = run_one(definition, [np.nan, 1, 2, 3])
    expected = [(2.3563758390, 0.9295302014), (4.3915325861, 1.1514893011), (6.7190624359, 1.5281061414)]
    np.testing.assert_allclose(outputs.mean[:, 1:].T, expected, atol=5e-11)
    assert states.log_likelihood[0] == pytest.approx(-4.047678110, abs=5e-10)


def test_golden_ratio():
    """A random walk with Q = R = 1 settles at P = (sqrt 5 - 1) / 2."""
    definition = nile_model({"mean": [0.0], "covariance": [[1.0]]})
    definition["process"]["Q"], definition["observation"]["R"] = [[1.0]], [[1.0]]
    _, outputs = run_one(definition, np.zeros(60))
    assert outputs.covariance[0, -1] == pytest.approx((np.sqrt(5) - 1) / 2, rel=1e-14)


@pytest.mark.parametrize(("index", "gain"), [(1.0, (0.75, 0.5)), (0.1, (0.36, 0.08))])
def test_kalata(index, gain):
    """Kalata (1984): steady gains of constant velocity with piecewise-constant acceleration."""
    q = index**2
    definition = {
        "states": ["p", "v"],
        "measurement": ["z"],
        "process": {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": [[q / 4, q / 2], [q / 2, q]]},
        "observation": {"H": [[1, 0]], "R": [[1]]},
        "initial": {"mean": [0, 0], "covariance": [[1, 0], [0, 1]]},
    }
    _, outputs = run_one(definition, np.zeros(400))
    np.testing.assert_allclose(outputs.covariance[:2, -1], gain, atol=5e-3 if index == 0.1 else 1e-12)


def test_a_measurement_much_sharper_than_the_prior():
    """P - K S K' gives 0 here; the exact answer is diag(0.04, 1e24)."""
    definition = {
        "states": ["a", "b"],
        "measurement": ["z"],
        "process": {"kind": "explicit", "F": [[1, 0], [0, 1]], "Q": [[0, 0], [0, 0]]},
        "observation": {"H": [[1, 0]], "R": [[0.04]]},
        "initial": {"mean": [0, 0], "covariance": [[1e24, 1e-24], [1e-24, 1e24]]},
    }
    _, outputs = run_one(definition, [1.0])
    np.testing.assert_allclose(outputs.covariance[[0, 2], 0], [0.04, 1e24], rtol=1e-12)
    assert abs(outputs.covariance[1, 0]) < 1e-12


def test_diffuse_local_linear_trend_is_that_of_statsmodels():
    y = NILE.copy()
    y[[1, 5, 6, 40]] = np.nan
    variances = {"R": 12000.0, "level": 900.0, "slope": 12.0}
    their_model = UnobservedComponents(y, "lltrend", use_exact_diffuse=True)  # type: ignore[arg-type]
    theirs = their_model.smooth(list(variances.values()))
    definition = {
        "states": ["level", "slope"],
        "measurement": ["volume"],
        "process": {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": [[900, 0], [0, 12]]},
        "observation": {"H": [[1, 0]], "R": [[12000]]},
        "initial": {"diffuse": True},
    }
    states, outputs = run_one(definition, y)
    assert states.log_likelihood[0] == pytest.approx(theirs.llf, rel=1e-11)
    np.testing.assert_allclose(outputs.mean[:, 2:], theirs.filtered_state[:, 2:], rtol=1e-9)
    np.testing.assert_allclose(
        full(outputs.covariance)[2:], theirs.filtered_state_cov.transpose(2, 0, 1)[2:], rtol=1e-9
    )
    assert np.isinf(outputs.covariance[:, :2]).any(axis=0).all(), (
        "an undetermined state has no finite variance"
    )


@pytest.mark.parametrize("seed", range(8))
def test_diffuse_is_the_limit_of_ever_wider_priors(seed):
    """The limit itself, by generalised least squares over all rows: x1 is an unknown constant."""
    rng = np.random.default_rng(seed)
    definition = random_definition(rng, "explicit", 3, 2)
    H = rng.normal(size=(2, 3))
    definition["observation"]["H"] = H.tolist()
    y = rng.normal(size=(8, 2))
    y[1, 0] = np.nan
    score, mean, covariance = diffuse_joint(definition, H, y)
    states, exact = run_one({**definition, "initial": {"diffuse": True}}, y)
    np.testing.assert_allclose(exact.mean[:, -1], mean, rtol=1e-8)
    np.testing.assert_allclose(full(exact.covariance)[-1], covariance, rtol=1e-8)
    assert states.log_likelihood[0] == pytest.approx(score, rel=1e-9)
    assert not states.values[9:18].any(), "nothing is left undetermined"


def test_partly_diffuse():
    definition = {
        "states": ["level", "slope"],
        "measurement": ["volume"],
        "process": {"kind": "local_linear_trend", "level_variance": 1.0, "slope_variance": 0.1},
        "observation": {"R": [[2.0]]},
        "initial": {"diffuse": [True, False], "mean": [0, 0.5], "covariance": [[0, 0], [0, 0.25]]},
    }
    _, outputs = run_one(definition, [3.0, 4.0])
    np.testing.assert_allclose(outputs.mean[:, 0], [3.0, 0.5])
    np.testing.assert_allclose(outputs.covariance[:, 0], [2.0, 0.0, 0.25])


def test_a_diffuse_start_by_rows_that_hardly_distinguish_the_states():
    """Carbon dioxide, a week a row, trend and yearly seasons: the first six rows are a stretch of almost a line.

    The variances begin at 1e11 for a noise of 0.06. About 1e-5 is lost, here and by statsmodels; a filter that loses
    more finds no covariance in the end. Against 120 digits, and statsmodels' exact diffuse filter over 14 years.
    """
    loaded: Any = co2.load_pandas()
    data = loaded.data["co2"]
    data = data[data.index.year >= 1988]
    years = (data.index.year + (data.index.dayofyear - 1) / 365.25).to_numpy()
    seconds, y = np.round(years - years[0], 6), data.to_numpy()
    trend = {"kind": "local_linear_trend", "level_variance": 0.4, "slope_variance": 0.05}
    season = {"kind": "seasonal_trigonometric", "period": 1.0, "harmonics": 2, "variance": 0.02}
    definition = {
        "states": ["level", "slope", "s1", "c1", "s2", "c2"],
        "measurement": ["co2"],
        "process": {"kind": "sum", "parts": [trend, season]},
        "observation": {"R": [[0.06]]},
        "initial": {"diffuse": True},
    }
    _, outputs = run_one(definition, y, seconds)
    assert not outputs.flag.any()
    H, dt = np.array([[1.0, 0.0, 1.0, 0.0, 1.0, 0.0]]), np.diff(seconds, prepend=0.0)
    exact = given_all(definition, H, y[:21, None], dt[:21], np.empty((21, 0)))
    np.testing.assert_allclose(outputs.mean[:, 20], exact.means[-1], rtol=5e-3)
    np.testing.assert_allclose(full(outputs.covariance)[20], exact.covariances[-1], rtol=5e-3)
    steps = [transition_of(definition["process"], one) for one in [*dt[1:], 0.02]]
    theirs = KalmanFilter(1, 6, k_posdef=6)
    theirs.bind(y)
    theirs["design"], theirs["selection"], theirs["obs_cov"] = H, np.eye(6), [[0.06]]
    theirs["transition"] = np.stack([F for F, _, _ in steps], axis=2)
    theirs["state_cov"] = np.stack([Q for _, Q, _ in steps], axis=2)
    theirs.initialize_diffuse()
    told = theirs.filter()
    np.testing.assert_allclose(outputs.mean[:, -1], told.filtered_state[:, -1], rtol=5e-5)
    np.testing.assert_allclose(
        full(outputs.covariance)[-1], told.filtered_state_cov[:, :, -1], rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("n", [2, 4])
def test_consistency_by_simulation(n):
    """Mean NEES and NIS of 200 simulated keys are within their 99.9 % chi-square bounds (Bar-Shalom, 5.4)."""
    rng = np.random.default_rng(2024)
    kind = {"kind": "constant_velocity", "acceleration_variance": 0.5, "dimensions": n // 2}
    P0 = np.eye(n) * 4
    definition = {
        "states": [f"x{i}" for i in range(n)],
        "measurement": [f"y{i}" for i in range(n // 2)],
        "process": kind,
        "observation": {"R": np.eye(n // 2).tolist()},
        "initial": {"mean": [0] * n, "covariance": P0.tolist()},
    }
    model = kalman.build(definition)
    keys, length = 200, 25
    F, Q, _ = transition_of(kind, 1.0)
    x = rng.multivariate_normal(np.zeros(n), P0, keys)
    xs = []
    for k in range(length):
        x = x if k == 0 else x @ F.T + rng.multivariate_normal(np.zeros(n), Q, keys)
        xs.append(x)
    truth = np.array(xs).transpose(1, 0, 2).reshape(-1, n)
    y = truth[:, ::2].T + rng.normal(size=(n // 2, keys * length))
    time = np.tile(np.arange(length) * 1_000_000, keys)
    rows = kalman.SortedRows(np.repeat(np.arange(keys), length), time, y, np.empty((0, keys * length)))
    _, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    error = (outputs.mean.T - truth)[:, :, None]
    nees = (error.transpose(0, 2, 1) @ np.linalg.solve(full(outputs.covariance), error)).ravel()
    last = np.arange(keys) * length + length - 1
    low, high = chi2.ppf([0.0005, 0.9995], keys * n) / keys
    assert low < nees[last].mean() < high
    m = n // 2
    low, high = chi2.ppf([0.0005, 0.9995], keys * length * m) / (keys * length)
    assert low < outputs.nis.mean() < high


def test_rows_without_a_gap_are_asked_for_none():
    """Programs without masks are for batches in which nothing is missing; one gap is enough for masks of all."""
    y = np.arange(6.0).reshape(2, 3)
    assert mask_present(y) == [None, None]
    y[1, 2] = np.nan
    assert [list(one) for one in mask_present(y) if one is not None] == [[True] * 3, [True, True, False]]
    assert mask_present(y[:, :2]) == [None, None] and mask_present(y[:0]) == []
