"""Jacobians by differences against exact ones, wherever the state is and however wide it spreads."""

import numpy as np
import pytest

import kalman
from kalman.models import differences
from tests.kalman.support.oracles import run_one

HERE = "tests.kalman.models.test_differences"
BEACON = np.array([500_000.0, 5_000_000.0])
"""Easting and northing, metres, as a map has them."""
PLACE = BEACON + [30.0, 40.0]
SLOPE = np.array([0.6, 0.8])


def beacon_range(x):
    return np.hypot(x[0] - BEACON[0], x[1] - BEACON[1])[None]


def beacon_slope(x):
    r = np.hypot(x[0] - BEACON[0], x[1] - BEACON[1])
    return np.array([[(x[0] - BEACON[0]) / r, (x[1] - BEACON[1]) / r]])


def wrong_slope(x):
    return beacon_slope(x) * 1.001


def drift(x, dt, u):
    return np.array([x[0] + dt * np.cos(x[1] / 1e6), x[1] + dt * np.sin(x[0] / 1e6)])


def definition(jacobian=None, deviation=10.0, mean=PLACE):
    return {
        "filter": "extended",
        "states": ["east", "north"],
        "measurement": ["range"],
        "process": {"kind": "explicit", "F": [[1, 0], [0, 1]], "Q": [[0.1, 0], [0, 0.1]]},
        "observation": {"h": f"{HERE}:beacon_range", "R": [[1.0]]}
        | ({"jacobian": f"{HERE}:{jacobian}"} if jacobian else {}),
        "initial": {"mean": list(mean), "covariance": (deviation**2 * np.eye(2)).tolist()},
    }


@pytest.mark.parametrize("deviation", [1e-4, 1e-2, 1.0, 10.0, 100.0, 1e4, 1e6, 1e8])
def test_a_range_to_a_beacon_far_from_the_origin(deviation):
    x, spread = PLACE[:, None], np.full((2, 1), deviation)
    found = differences.compute_slope(lambda points, which: beacon_range(points), x, spread, 1)
    np.testing.assert_allclose(found.value[0, :, 0], SLOPE, rtol=2e-8)
    assert (np.abs(found.value[0, :, 0] - SLOPE) <= found.error[0, :, 0]).all()


@pytest.mark.parametrize("deviation", [0.0, 1e-4, 1.0, 10.0, 1e4, 1e8])
def test_the_exact_jacobian_is_accepted_and_a_wrong_one_is_not(deviation):
    kalman.build(definition("beacon_slope", deviation))
    with pytest.raises(kalman.ModelError, match="by differences"):
        kalman.build(definition("wrong_slope", deviation))


def test_the_filter_with_differences_is_that_with_the_exact_jacobian():
    """A track along the beacon, a reading a second: same estimates, also where the filter has settled."""
    rng = np.random.default_rng(4)
    track = PLACE + np.cumsum(rng.normal(0.0, 0.3, (60, 2)), axis=0)
    y = beacon_range(track.T)[0] + rng.normal(size=60)
    (_, given), (_, numeric) = (run_one(definition(name), y) for name in ("beacon_slope", None))
    np.testing.assert_allclose(numeric.mean - PLACE[:, None], given.mean - PLACE[:, None], atol=2e-7)
    np.testing.assert_allclose(numeric.covariance, given.covariance, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(numeric.log_likelihood, given.log_likelihood, rtol=1e-7, atol=1e-8)


def test_moving_the_map_moves_the_slopes_by_rounding_alone():
    for offset in (0.0, 1e3, 1e6, 1e9):
        x = np.array([[0.3, -1.1], [2.0, 0.7]]) + offset

        def function(points, which, offset=offset):
            a, b = points[0] - offset, points[1] - offset
            return np.array([np.sin(a) * b, np.exp(0.5 * a) + b * b])

        a, b = x - offset
        exact = np.array([[np.cos(a) * b, np.sin(a)], [0.5 * np.exp(0.5 * a), 2.0 * b]])
        found = differences.compute_slope(function, x, np.full((2, 2), 0.5), 2)
        np.testing.assert_allclose(found.value, exact, rtol=1e-9 if offset < 1e7 else 1e-3)
        assert (np.abs(found.value - exact) <= found.error + 1e-15).all()


@pytest.mark.parametrize("deviation", [1e-6, 1.0, 1e3, 1e9, 1e12])
def test_a_function_whose_domain_ends_within_the_spread(deviation):
    with np.errstate(all="ignore"):
        found = differences.compute_slope(
            lambda points, which: np.log(points), np.ones((1, 1)), np.full((1, 1), deviation), 1
        )
    assert found.value[0, 0, 0] == pytest.approx(1.0, abs=1e-8)


def test_a_key_has_the_bits_that_it_has_alone():
    """Keys whose steps are made shorter beside keys whose steps are not; times and controls of each key's own."""
    rng = np.random.default_rng(1)
    model = kalman.build(
        {
            **definition(),
            "process": {"kind": "function", "f": f"{HERE}:drift", "Q": [[1.0, 0.0], [0.0, 1.0]]},
        }
    )
    keys = 40
    mean = PLACE[:, None] + rng.normal(0.0, 100.0, (2, keys))
    deviations = 10.0 ** rng.uniform(-3, 9, keys)
    covariance = np.array([deviations**2, 0 * deviations, 0 * deviations, deviations**2])
    state = model.from_moments(mean, covariance)
    rows = kalman.Rows(
        rng.uniform(0.1, 5.0, keys), np.zeros(keys, bool), rng.uniform(10, 90, (1, keys)), np.empty((0, keys))
    )
    together, step = model.step(state, rows)
    assert not step.flag.any()
    for k in range(keys):
        one = kalman.Rows(rows.dt[[k]], rows.first[[k]], rows.y[:, [k]], rows.u[:, [k]])
        alone, _ = model.step(state[:, [k]], one)
        np.testing.assert_array_equal(alone[:, 0], together[:, k])


@pytest.mark.parametrize("place", [1.0, -4.0, 2.0**20])
def test_no_step_is_shorter_than_4096_spacings_of_floats(place):
    """Where a root begins two step lengths never agree: steps are made shorter down to the least, and no further."""
    widths = []

    def root(points, which):
        away = points - place
        widths.append(np.abs(away).min() / abs(place))
        return np.sign(away) * np.sqrt(np.abs(away))

    differences.compute_slope(root, np.full((1, 1), place), np.full((1, 1), abs(place)), 1)
    assert widths == [2.0**-8, 2.0**-14, 2.0**-20, 2.0**-26, 2.0**-32, 2.0**-38, 2.0**-40]
