"""Forecasts against the joint Gaussian, published numbers and the laws of a forecast."""

from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm

import kalman
from kalman.evaluation.forecast import extract_variances, forecast, interval
from kalman.filters.prediction import predict_measurement
from tests.kalman.filters.test_linear import NILE, nile_model
from tests.kalman.smoothers.test_smoothing import joint
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, full, run_one

KINDS = ["explicit", "constant_velocity", "sum"]


def test_nile_ten_steps_ahead():
    """Durbin and Koopman (2012), section 2.8; the numbers are statsmodels'."""
    definition = nile_model({"diffuse": True})
    states, _ = run_one(definition, NILE)
    ahead = forecast(kalman.build(definition), states, np.ones((10, 1)))
    np.testing.assert_allclose(ahead.mean[0, :, 0], 798.370293, rtol=1e-9)
    np.testing.assert_allclose(ahead.measurement_mean, ahead.mean)
    variance = ahead.measurement_covariance[0, :, 0]
    assert variance[0] == pytest.approx(20600.257942, abs=5e-7)
    assert variance[9] == pytest.approx(33822.157942, abs=5e-7)
    low, high = interval(ahead.measurement_mean[0, :, 0], variance, 0.5)
    half = 0.6744897501960817 * np.sqrt(variance)  # the quartile of a normal distribution
    np.testing.assert_allclose([low, high], [798.370293 - half, 798.370293 + half], rtol=1e-9)


def test_a_local_linear_trend_is_forecast_as_by_statsmodels():
    """Mean and variance of `get_forecast`, from a known start, with missing rows."""
    y = np.array(NILE, float)
    y[[5, 6, 40]] = np.nan
    kind: Any = "local linear trend"
    peer = sm.tsa.UnobservedComponents(y, kind)
    peer.ssm.initialize_known(np.array([1000.0, 1.0]), np.diag([1e4, 25.0]))
    expected = peer.smooth([15099.0, 1469.0, 30.0]).get_forecast(12)
    definition = {
        "states": ["level", "slope"],
        "measurement": ["volume"],
        "process": {"kind": "explicit", "F": [[1.0, 1.0], [0.0, 1.0]], "Q": [[1469.0, 0.0], [0.0, 30.0]]},
        "observation": {"H": [[1.0, 0.0]], "R": [[15099.0]]},
        "initial": {"mean": [1000.0, 1.0], "covariance": [[1e4, 0.0], [0.0, 25.0]]},
    }
    states, _ = run_one(definition, y)
    ahead = forecast(kalman.build(definition), states, np.ones((12, 1)))
    np.testing.assert_allclose(ahead.measurement_mean[0, :, 0], expected.predicted_mean, rtol=1e-11)
    np.testing.assert_allclose(ahead.measurement_covariance[0, :, 0], expected.var_pred_mean, rtol=1e-11)


@pytest.mark.parametrize("diffuse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_joint_gaussian_over_random_models(kind, diffuse):
    """Irregular steps ahead with control, from keys of several lengths, some without rows."""
    rng = np.random.default_rng([sum(map(ord, kind)), diffuse])
    c = 1 if kind == "explicit" else 0
    definition = random_definition(rng, kind, 3, 2, c)
    n = len(definition["states"])
    if diffuse:
        definition["observation"]["H"] = rng.normal(size=(2, n)).tolist()
        definition["initial"] = {"diffuse": True}
    H, R = np.array(definition["observation"]["H"]), np.array(definition["observation"]["R"])
    model = kalman.build(definition)
    keys, steps = 6, 3
    rows = random_rows(rng, definition, keys, 6)
    gaps = rng.choice([1_000_000, 2_000_000, 500_000], len(rows.key))
    rows = rows._replace(time=np.cumsum(gaps))
    states, _ = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    dt, u = rng.choice([0.0, 0.5, 3.0], (steps, keys)), rng.normal(size=(steps, c, keys))
    ahead = forecast(model, states, dt, u)
    assert not ahead.flag.any()
    for key in range(keys):
        here = rows.key == key
        y = np.concatenate([rows.y[:, here].T, np.full((steps, 2), np.nan)])
        time = np.concatenate([np.diff(rows.time[here], prepend=0) / UNIT, dt[:, key]])
        truth = joint(definition, H, y, time, np.concatenate([rows.u[:, here].T, u[:, :, key]]))
        P = truth.covariances[-steps:]
        ours = full(ahead.covariance[:, :, key])
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(P))
        finite, known = np.isfinite(P), np.isfinite(np.diagonal(P, axis1=1, axis2=2))
        size = np.abs(P[finite]).max(initial=1e-3)
        rtol = 1e-9 if not diffuse else 1e-7
        np.testing.assert_allclose(ours[finite], P[finite], rtol=rtol, atol=rtol * size)
        np.testing.assert_allclose(
            ahead.mean[:, :, key].T[known],
            truth.means[-steps:][known],
            rtol=rtol,
            atol=rtol * np.sqrt(size),
        )
        S = full(ahead.measurement_covariance[:, :, key])
        for s in range(steps):
            if finite[s].all():
                np.testing.assert_allclose(S[s], H @ P[s] @ H.T + R, rtol=rtol, atol=rtol * size)
                y_mean = H @ truth.means[-steps + s]
                np.testing.assert_allclose(
                    ahead.measurement_mean[:, s, key], y_mean, rtol=rtol, atol=rtol * np.sqrt(size)
                )


def test_an_undetermined_state_has_an_infinite_variance():
    """After one row of a trend the level is known and the slope is not: nor is anything to come."""
    definition = {
        "states": ["level", "slope"],
        "measurement": ["volume", "slope_too"],
        "process": {"kind": "local_linear_trend", "level_variance": 1.0, "slope_variance": 0.1},
        "observation": {"H": [[1.0, 0.0], [0.0, 1.0]], "R": [[2.0, 0.0], [0.0, 1.0]]},
        "initial": {"diffuse": True},
    }
    states, _ = run_one(definition, [[3.0, np.nan]])
    model = kalman.build(definition)
    now, later = (forecast(model, states, np.full((1, 1), dt)) for dt in (0.0, 1.0))
    assert np.isfinite(now.measurement_covariance[0]) and np.isinf(now.measurement_covariance[2])
    assert now.measurement_covariance[0, 0, 0] == pytest.approx(4.0)
    assert np.isinf(later.measurement_covariance).all()
    bounds = interval(later.measurement_mean, extract_variances(later.measurement_covariance), 0.9)
    assert np.isneginf(bounds[0]).all() and np.isposinf(bounds[1]).all()
    mean, covariance = predict_measurement(model, model.initial(4), np.empty((0, 4)))
    assert mean.shape == (2, 4) and np.isinf(extract_variances(covariance)).all()


def test_two_steps_are_one_and_other_keys_change_no_bit():
    rng = np.random.default_rng(1)
    definition = random_definition(rng, "sum", m=2)
    model = kalman.build(definition)
    rows = random_rows(rng, definition, 40, 6)
    states, _ = kalman.run(model, kalman.initial_states(model, 40), rows, UNIT)
    states = states._replace(count=np.maximum(states.count, 1))
    once = forecast(model, states, np.full((1, 40), 3.0))
    twice = forecast(model, states, np.array([[1.0] * 40, [2.0] * 40]))
    np.testing.assert_allclose(twice.covariance[:, 1], once.covariance[:, 0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(twice.measurement_mean[:, 1], once.measurement_mean[:, 0], rtol=1e-12)
    some = rng.permutation(40)[:7]
    same(list(forecast(model, states.take(some), np.full((1, 7), 3.0))), [a[..., some] for a in once])
    lagged = kalman.build({**definition, "smoothing": {"lag": 2}})
    wide = np.concatenate([states.values, lagged.initial(40)[model.size :]])
    same(list(forecast(lagged, states._replace(values=wide), np.full((1, 40), 3.0))), list(once))


def test_errors_of_forecasts():
    definition = random_definition(np.random.default_rng(0), "explicit", 2, 1, 1)
    model = kalman.build(definition)
    with pytest.raises(kalman.ModelError, match="control"):
        forecast(model, kalman.initial_states(model, 1), np.ones((1, 1)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        interval(np.zeros(1), np.ones(1), 1.0)
    states = kalman.initial_states(model, 2)._replace(count=np.ones(2, np.int64))
    u = np.zeros((3, 1, 2))
    u[1, 0, 1] = np.nan
    ahead = forecast(model, states, np.ones((3, 2)), u)
    assert ahead.flag.astype(bool).tolist() == [[False, False], [False, True], [False, True]]
    np.testing.assert_array_equal(np.isnan(ahead.mean[0]), ahead.flag.astype(bool))
