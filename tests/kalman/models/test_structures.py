"""Structures in closed form against stochastic differential equations, and against one another."""

import numpy as np
import pytest
from scipy.linalg import expm, solve_continuous_lyapunov

import kalman
from kalman.linalg.packing import pack_lower, unpack_symmetric
from kalman.linalg.program import Program, Symbol, Tape
from kalman.models.continuous import discretise_system
from kalman.models.structures import parse
from tests.kalman.support.models import random_covariance, same
from tests.kalman.support.oracles import run_one, van_loan

TIMES = np.array([0.0, 1e-6, 0.03, 0.5, 1.0, 2.75, 40.0])


def moved(definition, dt):
    """F (K, n, n), Q (K, n, n), c (K, n) of a structure."""
    structure = parse("process", definition)
    values = {p.name: p.value for p in structure.parameters}
    F, Q, c = structure.transition(np.asarray(dt, float), [], values)
    K, n = len(dt), structure.size
    whole = [[np.broadcast_to(a, K) for a in row] for row in (*F, *unpack_symmetric(Q), c)]
    return (
        np.array(whole[:n]).transpose(2, 0, 1),
        np.array(whole[n : 2 * n]).transpose(2, 0, 1),
        np.array(whole[-1]).T,
    )


@pytest.mark.parametrize("seed", range(12))
def test_continuous_is_van_loan(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 6))
    A = rng.normal(size=(n, n)) * 10.0 ** rng.uniform(-2, 1)
    A -= np.eye(n) * max(np.linalg.eigvals(A).real.max(), 0)
    if seed % 3 == 0:
        A = np.triu(A)  # some states that others never reach
    D = np.array(random_covariance(rng, n))
    drift = rng.normal(size=n)
    F, Q, c = moved(
        {"kind": "continuous", "A": A.tolist(), "diffusion": D.tolist(), "offset": drift.tolist()}, TIMES
    )
    for k, dt in enumerate(TIMES):
        f, q, offset = van_loan(A, D, drift, dt)
        np.testing.assert_allclose(F[k], expm(A * dt), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(Q[k], q, rtol=1e-10, atol=1e-12 * np.abs(q).max())
        np.testing.assert_allclose(c[k], offset, rtol=1e-10, atol=1e-12 * np.abs(offset).max())


def test_a_long_pause_of_a_stable_model_gives_its_stationary_covariance():
    A, D = np.array([[-0.2, 1.0], [-1.5, -0.3]]), np.array([[0.1, 0.05], [0.05, 2.0]])
    F, Q, _ = moved({"kind": "continuous", "A": A.tolist(), "diffusion": D.tolist()}, [1e9])
    assert np.abs(F).max() == 0.0
    np.testing.assert_allclose(Q[0], solve_continuous_lyapunov(A, -D), rtol=1e-13)


SAME = {
    "constant_velocity": (
        {"kind": "constant_velocity", "acceleration_variance": 0.7},
        {"kind": "continuous", "A": [[0, 1], [0, 0]], "diffusion": [[0, 0], [0, 0.7]]},
    ),
    "constant_acceleration": (
        {"kind": "constant_acceleration", "jerk_variance": 0.7},
        {
            "kind": "continuous",
            "A": [[0, 1, 0], [0, 0, 1], [0, 0, 0]],
            "diffusion": [[0, 0, 0], [0, 0, 0], [0, 0, 0.7]],
        },
    ),
    "ornstein_uhlenbeck": (
        {"kind": "ornstein_uhlenbeck", "rate": 0.3, "variance": 2.0, "mean": 5.0},
        {"kind": "continuous", "A": [[-0.3]], "diffusion": [[1.2]], "offset": [1.5]},
    ),
    "damped_trend": (
        {"kind": "damped_trend", "level_variance": 0.2, "slope_variance": 0.7, "damping": 0.4},
        {"kind": "continuous", "A": [[0, 1], [0, -0.4]], "diffusion": [[0.2, 0], [0, 0.7]]},
    ),
    "seasonal_trigonometric": (
        {"kind": "seasonal_trigonometric", "period": 2 * np.pi, "variance": 0.3},
        {"kind": "continuous", "A": [[0, 1], [-1, 0]], "diffusion": [[0.3, 0], [0, 0.3]]},
    ),
    "local_linear_trend": (
        {"kind": "local_linear_trend", "level_variance": 0.2, "slope_variance": 0.7},
        {"kind": "damped_trend", "level_variance": 0.2, "slope_variance": 0.7, "damping": 1e-14},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_closed_forms_are_those_of_their_equation(name):
    for mine, theirs in zip(*(moved(definition, TIMES) for definition in SAME[name]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-12, atol=1e-13)


def test_damping_is_smooth_where_the_series_ends():
    """The series and the closed form meet at damping * dt = 1/2, of one and of twice that."""
    for at in (0.25, 0.5):
        dt = at * (1 + np.array([-1e-13, 1e-13]))
        for part in moved(SAME["damped_trend"][0] | {"damping": 1.0}, dt):
            np.testing.assert_allclose(part[0], part[1], rtol=1e-12)


def test_seasons_of_dummies_sum_to_zero_without_noise():
    """Harvey (1989), section 2.3.4: any s seasons in a row sum to zero."""
    definition = {
        "states": ["s0", "s1", "s2"],
        "measurement": ["y"],
        "process": {"kind": "seasonal_dummy", "period": 4, "variance": 0.0},
        "observation": {"R": [[1.0]]},
        "initial": {"mean": [5.0, -1.0, 2.0], "covariance": np.zeros((3, 3)).tolist()},
    }
    _, outputs = run_one(definition, [np.nan] * 9)
    np.testing.assert_allclose(outputs.mean[0], [5, -6, 2, -1, 5, -6, 2, -1, 5])


def test_a_wave_comes_back_after_whole_periods():
    F, Q, _ = moved(
        {"kind": "seasonal_trigonometric", "period": 7.0, "variance": 0.5, "harmonics": 3}, [7e6, 3.5]
    )
    same(F[0], np.eye(6))
    np.testing.assert_allclose(Q[0], 0.5 * 7e6 * np.eye(6))
    np.testing.assert_allclose(np.diag(F[1]), [-1, -1, 1, 1, -1, -1], rtol=1e-12)


def test_level_and_season_together_are_those_of_statsmodels():
    """Trend and seasonal dummies as in Durbin and Koopman (2012), section 3.2, one step a row."""
    from statsmodels.datasets import co2
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    y = np.asarray(dict(co2.load_pandas())["data"]["co2"].resample("MS").mean(), float)[:120]
    variances = {"R": 0.05, "level": 0.08, "seasonal": 0.002}
    their_model = UnobservedComponents(y, "llevel", seasonal=12, use_exact_diffuse=True)  # type: ignore[arg-type]
    theirs = their_model.smooth(list(variances.values()))
    definition = {
        "states": ["level", *(f"s{i}" for i in range(11))],
        "measurement": ["co2"],
        "process": {
            "kind": "sum",
            "parts": [
                {"kind": "random_walk", "variance": 0.08},
                {"kind": "seasonal_dummy", "period": 12, "variance": 0.002},
            ],
        },
        "observation": {"R": [[0.05]]},
        "initial": {"diffuse": True},
    }
    states, outputs = run_one(definition, y)
    assert states.log_likelihood[0] == pytest.approx(theirs.llf, rel=1e-9)
    np.testing.assert_allclose(outputs.mean[:2, 20:], theirs.filtered_state[:2, 20:], rtol=1e-8, atol=1e-8)


def test_a_call_on_the_straight_line_is_the_call_itself():
    tape = Tape()
    A, D = [[-0.5, 1.0], [0.0, -2.0]], [[1.0, 0.2, 3.0]]
    dt: Symbol = tape.symbol()
    found = discretise_system(A, D, dt, True)  # type: ignore[arg-type]
    flat = [*(a for row in (*found.F, *found.G) for a in row), *found.Q[0]]
    program = Program(tape, [dt], flat)
    times = np.random.default_rng(0).exponential(size=50)
    out = np.empty((len(flat), 50))
    program([times], np.empty((program.buffers, 50)), out)
    now = discretise_system(A, D, times, True)
    flat_now = [*(a for row in (*now.F, *now.G) for a in row), *now.Q[0]]
    same(out, np.array([np.broadcast_to(a, 50) for a in flat_now]))
    assert found.F[1][0] == 0.0 and len(pack_lower(A)) == 3


def test_continuous_takes_control_and_entries_from_columns():
    """A rate that a column gives, elementwise: each row as if its own model had been written."""
    rng = np.random.default_rng(3)
    rate, push = rng.uniform(0.1, 3, 20), rng.normal(size=20)
    seconds = np.cumsum(rng.exponential(size=20))
    base = {
        "states": ["x", "v"],
        "measurement": ["y"],
        "control": ["rate", "push"],
        "observation": {"H": [[1.0, 0.0]], "R": [[0.3]]},
        "initial": {"mean": [1.0, 0.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
    }
    process = {"kind": "continuous", "A": [[0, 1], [-1, "rate"]], "diffusion": [[0, 0], [0, "rate"]]}
    process["B"] = [[0, 0], [0, 1]]
    y = rng.normal(size=20)
    _, outputs = run_one(base | {"process": process}, y, seconds, np.column_stack([-rate, push]) * [[-1, 1]])
    assert not outputs.flag.any()
    x, P = np.array([1.0, 0.0]), np.eye(2)
    for k in range(20):
        if k:
            A, D = np.array([[0, 1], [-1, rate[k]]]), np.diag([0, rate[k]])
            F, Q, c = van_loan(
                A,
                D,
                np.array([0, push[k]]),
                np.round(seconds[k] * 1e6) / 1e6 - np.round(seconds[k - 1] * 1e6) / 1e6,
            )
            x, P = F @ x + c, F @ P @ F.T + Q
        K = P[:, 0] / (P[0, 0] + 0.3)
        x, P = x + K * (y[k] - x[0]), P - np.outer(K, P[0])
        np.testing.assert_allclose(outputs.mean[:, k], x, rtol=1e-9, atol=1e-9 * np.abs(x).max())


def test_an_error_names_the_field():
    for definition, field in (
        ({"kind": "seasonal_dummy", "period": 1, "variance": 1.0}, "process.period"),
        ({"kind": "seasonal_trigonometric", "period": 0.0, "variance": 1.0}, "process.period"),
        ({"kind": "continuous", "A": [[1.0]], "diffusion": [[-1.0]]}, "process.diffusion[0][0]"),
        ({"kind": "continuous", "A": [[1.0, 2.0]], "diffusion": [[1.0]]}, "process.A"),
        ({"kind": "continuous", "A": [[1.0], [2.0]], "diffusion": [[1.0, 0.0], [0.0, 1.0]]}, "process.A"),
        ({"kind": "continuous", "A": [[1.0]], "diffusion": [[1.0, 0.0], [0.0, 1.0]]}, "process.diffusion"),
        ({"kind": "damped_trend", "level_variance": 1, "slope_variance": 1, "damping": 0}, "process.damping"),
        ({"kind": "constant_acceleration", "jerk_variance": 1, "dimensions": 4}, "process.dimensions"),
    ):
        with pytest.raises(kalman.ModelError) as error:
            parse("process", definition)
        assert error.value.field == field
