"""Smoothing after a diffuse start and with little or no measurement noise, against arithmetic in 200 digits."""

from typing import Any

import numpy as np
import pytest

import kalman
from kalman.smoothers.moments import MomentSmoother
from kalman.smoothers.smooth import smooth
from tests.kalman.support.drawn import Drawn, exact, rows_of
from tests.kalman.support.oracles import UNIT, full
from tests.kalman.test_drawn import compare

TREND: dict[str, Any] = {"kind": "local_linear_trend", "level_variance": 1.0, "slope_variance": 0.01}
DUMMIES: dict[str, Any] = {"kind": "seasonal_dummy", "period": 4, "variance": 0.1}
WALK: dict[str, Any] = {"kind": "random_walk", "variance": 1.0}


def waves(period: float, harmonics: int, variance: float = 0.0) -> dict[str, Any]:
    return {"kind": "seasonal_trigonometric", "period": period, "variance": variance, "harmonics": harmonics}


def drawn(parts: list[dict[str, Any]], H: list[float], R: float, y: Any, initial: Any = None) -> Drawn:
    n = len(H)
    parts = [{**part, "name": f"p{i}"} for i, part in enumerate(parts)]
    return Drawn(
        {
            "states": [f"x{i}" for i in range(n)],
            "measurement": ["y"],
            "process": {"kind": "sum", "parts": parts} if len(parts) > 1 else parts[0],
            "observation": {"H": [H], "R": [[R]]},
            "initial": initial or {"diffuse": True},
        },
        np.asarray(y, float),
        np.arange(len(y), dtype=float),
    )


def series(n: int, period: float = 12.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (
        np.cumsum(0.3 * rng.normal(size=n))
        + 2.0 * np.sin(2 * np.pi * np.arange(n) / period)
        + rng.normal(size=n)
    )


@pytest.mark.parametrize("R", [0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-4, 1.0])
def test_a_trend_with_dummies(R):
    one = drawn([TREND, DUMMIES], [1.0, 0.0, 1.0, 0.0, 0.0], R, series(60))
    compare(one, exact(one))


@pytest.mark.parametrize("R", [0.0, 1e-14, 1e-12, 1e-8])
def test_an_autoregression_with_a_moving_average(R):
    process = {"kind": "explicit", "F": [[1.2, 1.0], [-0.5, 0.0]], "Q": [[60.0, 24.0], [24.0, 9.6]]}
    stationary = {"mean": [0.0, 0.0], "covariance": [[200.0, -60.0], [-60.0, 80.0]]}
    one = drawn([process], [1.0, 0.0], R, 10.0 * series(40), stationary)
    compare(one, exact(one))


@pytest.mark.parametrize("R", [0.0, 1e-10, 1.0])
def test_two_diffuse_states_and_a_first_row_that_is_missing(R):
    mean_reverting = {"kind": "ornstein_uhlenbeck", "rate": 0.5, "variance": 1.0}
    y = series(30)
    y[0] = np.nan
    one = drawn([WALK, mean_reverting], [1.0, 1.0], R, y)
    compare(one, exact(one))


@pytest.mark.parametrize("R", [0.0, 1.0])
@pytest.mark.parametrize("harmonics", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_hours_with_the_waves_of_a_day(harmonics, R):
    one = drawn([WALK, waves(24.0, harmonics)], [1.0] + [1.0, 0.0] * harmonics, R, series(60, 24.0))
    compare(one, exact(one))


@pytest.mark.parametrize("harmonics", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_days_with_the_waves_of_a_year(harmonics):
    """Five days hardly tell the waves of a year: what they say is a thousand billion times as uncertain as a day."""
    one = drawn([WALK, waves(365.25, harmonics)], [1.0] + [1.0, 0.0] * harmonics, 1.0, series(200, 365.25))
    compare(one, exact(one))


@pytest.mark.parametrize(
    ("parts", "harmonics", "rows"),
    [
        ([waves(365.25, 2)], 2, 1095),
        ([waves(24.0, 1), waves(168.0, 1)], 2, 1008),
        pytest.param([waves(365.25, 3)], 3, 1095, marks=pytest.mark.slow),
    ],
)
def test_no_row_of_a_season_is_lost(parts, harmonics, rows):
    one = drawn([WALK, *parts], [1.0] + [1.0, 0.0] * harmonics, 1.0, series(rows, 365.25))
    model: Any = kalman.build(one.definition)
    states, outputs, smoothed = smooth(model, kalman.initial_states(model, 1), rows_of(one), UNIT)
    assert not outputs.flag.any() and states.count[0] == rows
    assert np.isfinite(smoothed.covariance).all()
    assert (np.diagonal(full(smoothed.covariance), axis1=1, axis2=2) > 0.0).all()
    assert not model.is_diffuse(states.values)  # all columns are in the covariance at last


def test_a_state_between_the_columns_goes_on_bit_by_bit():
    """A snapshot while waves of a year are still columns, restored, gives what the run without it gives."""
    one = drawn([WALK, waves(365.25, 2)], [1.0, 1.0, 0.0, 1.0, 0.0], 1.0, series(60, 365.25))
    model: Any = kalman.build(one.definition)
    rows = rows_of(one)
    whole, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    for at in (3, 5, 8, 20):
        begun, first = kalman.run(model, kalman.initial_states(model, 1), rows.take(np.arange(at)), UNIT)
        assert model.is_diffuse(begun.values)
        again = model.restore(*model.snapshot(begun.values))
        states, second = kalman.run(model, begun._replace(values=again), rows.take(np.arange(at, 60)), UNIT)
        np.testing.assert_array_equal(states.values, whole.values)
        np.testing.assert_array_equal(np.concatenate([first.mean, second.mean], axis=1), outputs.mean)


def test_a_variance_that_rounding_has_taken_is_no_number():
    """And not 0.0: here N is more than any later rows can say."""
    model: Any = kalman.build(
        drawn([WALK], [1.0], 1.0, [0.0], {"mean": [0.0], "covariance": [[4.0]]}).definition
    )
    state, later = model.initial(3), np.zeros((3, 3))
    later[1] = [0.25, 0.25 * (1 + 1e-12), 0.26]
    mean, covariance = MomentSmoother(model).smoothed(state, later)
    np.testing.assert_array_equal(covariance, [[0.0, 0.0, np.nan]])
    assert np.isnan(mean[0, 2])


def test_32_bits_have_no_columns():
    """Which they could not hold: the state is rounded as it always was, and no direction is lost in silence."""
    one = drawn([WALK, waves(365.25, 1)], [1.0, 1.0, 0.0], 1.0, series(400, 365.25))
    model: Any = kalman.build({**one.definition, "storage": {"dtype": "float32"}})
    states, outputs = kalman.run(
        model, kalman.initial_states(model, 1), rows_of(one).take(np.arange(4)), UNIT
    )
    assert not model.inner.is_diffuse(states.values)
    assert np.diagonal(full(outputs.covariance)[-1]).max() > 1e4  # what four days say of a year


def test_two_sensors_of_a_year_that_report_in_turn():
    """One component is missing in every row, and the columns are folded all the same."""
    one = drawn([WALK, waves(365.25, 1)], [1.0, 1.0, 0.0], 1.0, series(600, 365.25))
    two = {**one.definition, "measurement": ["y", "z"]}
    two["observation"] = {"H": [[1.0, 1.0, 0.0]] * 2, "R": [[1.0, 0.0], [0.0, 1.0]]}
    y = np.full((2, 600), np.nan)
    y[np.arange(600) % 2, np.arange(600)] = one.y
    alone: Any = kalman.build(one.definition)
    model: Any = kalman.build(two)
    rows = rows_of(one)
    states, _, smoothed = smooth(model, kalman.initial_states(model, 1), rows._replace(y=y), UNIT)
    wanted, _, expected = smooth(alone, kalman.initial_states(alone, 1), rows, UNIT)
    assert not model.is_diffuse(states.values)
    for a, b in ((states.values, wanted.values), (smoothed.mean, expected.mean)):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)
