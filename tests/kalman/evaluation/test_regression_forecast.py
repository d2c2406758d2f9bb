"""Forecasts of regressions: of RLS against statsmodels' least squares, of LMS and NLMS by their coefficients."""

from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm

import kalman
from kalman.evaluation.forecast import forecast
from kalman.filters.prediction import Residual, predict_measurement
from tests.kalman.support.oracles import UNIT

RNG = np.random.default_rng(11)
X = RNG.normal(size=(30, 2))
Y = 1.5 + X @ np.array([2.0, -1.0]) + RNG.normal(size=30)
AHEAD = RNG.normal(size=(4, 2))


def definition(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "filter": kind,
        "states": ["b0", "b1", "b2"],
        "measurement": ["y"],
        "control": ["x1", "x2"],
        **more,
    }


def ahead(given: dict[str, Any], rows: int = 30) -> tuple[kalman.KeyStates, Any]:
    model = kalman.build(given)
    key, time = np.zeros(rows, np.int64), np.arange(rows) * 1_000_000
    sorted_rows = kalman.SortedRows(key, time, Y[None, :rows].copy(), X[:rows].T.copy())
    states, _ = kalman.run(model, kalman.initial_states(model, 1), sorted_rows, UNIT)
    return states, forecast(model, states, np.ones((4, 1)), AHEAD[:, :, None])


def test_recursive_least_squares_forecasts_as_statsmodels_does() -> None:
    _, found = ahead(definition("rls"))
    expected = sm.OLS(Y, sm.add_constant(X)).fit().get_prediction(sm.add_constant(AHEAD))
    np.testing.assert_allclose(found.measurement_mean[0, :, 0], expected.predicted_mean, rtol=1e-12)
    np.testing.assert_allclose(found.measurement_covariance[0, :, 0], expected.se_obs**2, rtol=1e-12)
    np.testing.assert_array_equal(found.flag, 0)


def test_without_residuals_or_with_a_free_coefficient_the_variance_is_infinite() -> None:
    for rows in (2, 3):
        _, found = ahead(definition("rls"), rows)
        assert np.isposinf(found.measurement_covariance).all() and np.isfinite(found.measurement_mean).all()


def test_of_rows_that_fit_exactly_no_forecast_and_no_residual_is_judged() -> None:
    """A residual sum of squares of zero tells nothing of the errors to come."""
    model: Any = kalman.build(definition("rls", states=["b0"], control=["x1"], observation={"H": [["x1"]]}))
    u = np.array([[3.0, 4.0, 12.0]])
    rows = kalman.SortedRows(np.zeros(3, np.int64), np.arange(3) * 1_000_000, np.zeros((1, 3)), u)
    states, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    assert outputs.covariance[0, -1] == 0.0
    row = kalman.Rows(np.ones(1), np.zeros(1, bool), np.array([[4.0]]), np.array([[2.0]]))
    for mean, covariance in (
        predict_measurement(model, states.values, row.u),
        model.residual(states.values, row),
    ):
        assert np.isfinite(mean).all() and np.isposinf(covariance).all()


def test_two_measurements_share_their_coefficients() -> None:
    """A second measurement by the same coefficients: the covariance of both has the coefficients' part."""
    H = [[1.0, "x1", "x2"], [2.0, "x1", 0.0]]
    given = {**definition("rls"), "measurement": ["y", "z"], "observation": {"H": H, "offset": [0.0, 5.0]}}
    model = kalman.build(given)
    Z = 5.0 + 3.0 + 2.0 * X[:, 0] + RNG.normal(size=30)
    rows = kalman.SortedRows(np.zeros(30, np.int64), np.arange(30) * 1_000_000, np.array([Y, Z]), X.T.copy())
    states, _ = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    found = forecast(model, states, np.ones((1, 1)), AHEAD[:1, :, None])
    stacked = np.array([row for x in X for row in ([1.0, *x], [2.0, x[0], 0.0])])
    fit = sm.OLS(np.array([Y, Z - 5.0]).T.ravel(), stacked).fit()
    h = np.array([[1.0, *AHEAD[0]], [2.0, AHEAD[0, 0], 0.0]])
    S = h @ np.asarray(fit.cov_params()) @ h.T + fit.scale * np.eye(2)
    np.testing.assert_allclose(found.measurement_mean[:, 0, 0], h @ fit.params + [0.0, 5.0], rtol=1e-11)
    np.testing.assert_allclose(found.measurement_covariance[:, 0, 0], S[np.tril_indices(2)], rtol=1e-10)


@pytest.mark.parametrize("kind", ["lms", "nlms"])
def test_least_mean_squares_forecast_by_their_coefficients(kind: str) -> None:
    states, found = ahead(definition(kind, **{kind: {"step": 0.1}}, observation={"R": [[2.0]]}))
    expected = states.values[0, 0] + AHEAD @ states.values[1:, 0]
    np.testing.assert_allclose(found.measurement_mean[0, :, 0], expected, rtol=1e-14)
    np.testing.assert_array_equal(found.measurement_covariance, 2.0)
    _, unknown = ahead(definition(kind, **{kind: {"step": 0.1}}))
    np.testing.assert_array_equal(unknown.measurement_mean, found.measurement_mean)
    assert np.isnan(unknown.measurement_covariance).all()  # without R nothing is known of the errors


def test_the_square_of_a_forecasts_error_by_its_variance_is_the_next_rows_nis() -> None:
    """Also with forgetting, which discounts the rows so far before the next one is judged."""
    given = definition("rls", rls={"forgetting": 0.9})
    model = kalman.build(given)
    u = X[29:30, :, None]
    states, _ = ahead(given, 29)
    last = kalman.SortedRows(
        np.zeros(1, np.int64), np.array([29_000_000]), Y[None, 29:].copy(), X[29:].T.copy()
    )
    one = forecast(model, states, np.ones((1, 1)), u)
    _, outputs = kalman.run(model, states, last, UNIT)
    error = Y[29] - one.measurement_mean[0, 0, 0]
    np.testing.assert_allclose(error**2 / one.measurement_covariance[0, 0, 0], outputs.nis[0], rtol=1e-11)


@pytest.mark.parametrize(
    "given",
    [
        definition("rls"),
        definition("rls", rls={"forgetting": 0.9}),
        definition("lms", lms={"step": 0.1}, observation={"R": [[2.0]]}),
        definition("nlms", observation={"offset": [3.0]}),
    ],
    ids=["rls", "forgetting", "lms", "nlms"],
)
def test_a_rows_residual_is_its_measurement_minus_its_forecast(given: dict[str, Any]) -> None:
    model = kalman.build(given)
    assert isinstance(model, Residual)
    states, _ = ahead(given, 12)
    row = kalman.Rows(np.ones(1), np.zeros(1, bool), np.array([[4.0]]), AHEAD[:1].T)
    residual, covariance = model.residual(states.values, row)
    mean, expected = predict_measurement(model, states.values, row.u)
    np.testing.assert_allclose(residual, 4.0 - mean, rtol=1e-13)
    np.testing.assert_allclose(covariance, expected, rtol=1e-12)
