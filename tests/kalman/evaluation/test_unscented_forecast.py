"""Forecasts of measurements by sigma points against sums with a textbook's weights."""

import numpy as np
import pytest

import kalman
from kalman.evaluation.forecast import forecast
from tests.kalman.support.nonlinear import random_nonlinear, seen, textbook_nonlinear
from tests.kalman.support.oracles import full, run_one

RULES = [
    {},
    {"alpha": 1.0, "beta": 2.0, "kappa": 0.0},
    {"alpha": 0.5, "beta": 2.0, "kappa": 1.0},
    {"alpha": 1.0, "beta": 1.0, "kappa": 2.0},
    {"alpha": 0.8, "beta": 0.0, "kappa": 3.0},
    {"alpha": 1.0, "beta": 0.0, "kappa": -0.5},  # the covariance is a difference, as in the next
    {"alpha": 1.0, "beta": -1.5, "kappa": 1.0},
]


def by_weights(x, P, R, alpha=1.0, beta=0.0, kappa=2.0):
    """Mean and covariance of a measurement of N(x, P)."""
    n, m = len(x), len(R)
    scale = alpha**2 * (n + kappa)
    L = np.linalg.cholesky(P)
    points = x[:, None] + np.sqrt(scale) * np.hstack([np.zeros((n, 1)), L, -L])
    weights = np.full(2 * n + 1, 0.5 / scale)
    weights[0] = 1.0 - n / scale
    values = seen(points, m)
    mean = values @ weights
    weights[0] += 1.0 - alpha**2 + beta
    away = values - mean[:, None]
    return mean, (away * weights) @ away.T + np.array(R)


@pytest.mark.parametrize("form", ["covariance", "square_root"])
@pytest.mark.parametrize("rule", RULES)
def test_forecasts_by_points(form, rule):
    rng = np.random.default_rng([9, RULES.index(rule)])
    definition = {**random_nonlinear(rng, "unscented", 3, 2, 0), "form": form, "unscented": rule}
    if RULES.index(rule) > 4:  # close to a line, so that the difference stays a covariance
        definition["initial"]["covariance"] = (0.1 * np.array(definition["initial"]["covariance"])).tolist()
    y = rng.normal(size=(6, 2))
    states, outputs = run_one(definition, y)
    assert not outputs.flag.any()
    model = kalman.build(definition)
    ahead = forecast(model, states, np.ones((3, 1)))
    assert not ahead.flag.any()
    longer = np.concatenate([y, np.full((3, 2), np.nan)])
    truth = textbook_nonlinear(definition, longer, np.ones(9), np.empty((9, 0)))
    ours = full(ahead.measurement_covariance[:, :, 0])
    for step in range(3):
        x, P = truth.means[6 + step], truth.covariances[6 + step]
        np.testing.assert_allclose(ahead.mean[:, step, 0], x, rtol=1e-9, atol=1e-10)
        mean, covariance = by_weights(x, P, definition["observation"]["R"], **rule)
        np.testing.assert_allclose(ahead.measurement_mean[:, step, 0], mean, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(ours[step], covariance, rtol=1e-9, atol=1e-10)
