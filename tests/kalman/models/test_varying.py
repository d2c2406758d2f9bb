"""Fields of named structures, fading and gates that come from columns, each row with its own value."""

import copy
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.linalg import expm

import kalman
from kalman.learning import maximum_likelihood
from kalman.smoothers.smooth import smooth
from tests.kalman.support.oracles import UNIT

SECOND = 1_000_000
FORMS = [
    ("linear", None),
    ("linear", "square_root"),
    ("linear", "information"),
    ("extended", None),
    ("unscented", None),
    ("unscented", "square_root"),
    ("cubature", None),
]
STRUCTURES: list[dict[str, Any]] = [
    {"kind": "random_walk", "variance": 0.7},
    {"kind": "local_linear_trend", "level_variance": 0.7, "slope_variance": 0.2},
    {"kind": "damped_trend", "level_variance": 0.7, "slope_variance": 0.2, "damping": 0.4},
    {"kind": "constant_velocity", "acceleration_variance": 0.3},
    {"kind": "constant_acceleration", "jerk_variance": 0.3},
    {"kind": "ornstein_uhlenbeck", "rate": 0.3, "variance": 2.0, "mean": -1.0},
    {"kind": "seasonal_trigonometric", "period": 7.0, "variance": 0.1, "harmonics": 2},
    {"kind": "seasonal_dummy", "period": 4, "variance": 0.3},
]
SIZES = [1, 2, 2, 2, 3, 1, 4, 3]
SAME_FOR_ALL = {"seasonal_dummy": ("period",), "seasonal_trigonometric": ("harmonics",)}


def model_of(process: dict[str, Any], n: int, control: list[str], **more: Any) -> dict[str, Any]:
    return {
        "states": [f"x{i}" for i in range(n)],
        "measurement": ["y"],
        "control": control,
        "process": process,
        "observation": {"H": [[1.0] * n], "R": [[0.8]]},
        "initial": {"mean": [0.3] * n, "covariance": (np.eye(n) + 0.1).tolist()},
        **more,
    }


def rows_of(y: np.ndarray, u: np.ndarray, dt: np.ndarray | None = None) -> kalman.SortedRows:
    n = len(y)
    time = np.arange(n) * SECOND if dt is None else (np.cumsum(dt) * UNIT).astype(np.int64)
    return kalman.SortedRows(np.zeros(n, np.int64), time, y[None], np.ascontiguousarray(u))


def run(definition: dict[str, Any], rows: kalman.SortedRows) -> Any:
    model = kalman.build(definition)
    return kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)[1]


def smoothed(definition: dict[str, Any], rows: kalman.SortedRows) -> Any:
    model = kalman.build(definition)
    return smooth(model, kalman.initial_states(model, 1), rows, UNIT)[2]


def fields_of(process: dict[str, Any]) -> list[str]:
    fixed = ("kind", "name", *SAME_FOR_ALL.get(process["kind"], ()))
    return [name for name in process if name not in fixed]


def in_columns(process: dict[str, Any], tag: str = "") -> tuple[dict[str, Any], list[str], list[float]]:
    names = [f"{tag}{name}" for name in fields_of(process)]
    return (
        {**process, **{name: f"{tag}{name}" for name in fields_of(process)}},
        names,
        [process[name] for name in fields_of(process)],
    )


CASES = [
    *((process, n, "linear", None) for process, n in zip(STRUCTURES, SIZES, strict=True)),
    *((STRUCTURES[2], 2, kind, form) for kind, form in FORMS[1:]),
]


@pytest.mark.parametrize(("process", "n", "kind", "form"), CASES)
def test_a_column_that_does_not_change_is_the_number(process, n, kind, form):
    """Every field of every structure from a column, in a sum too, with a scale and smoothed."""
    columns, names, values = in_columns(process)
    more = {"filter": kind, **({"form": form} if form else {})}
    rng = np.random.default_rng(n)
    y = rng.normal(size=20)
    y[[3, 9]] = np.nan
    u = np.repeat(np.array(values)[:, None], 20, axis=1)
    dt = rng.integers(1, 4, size=20).astype(float)
    one = model_of({**columns, "noise_scale": 1.5}, n, names, **more)
    other = model_of({**process, "noise_scale": 1.5}, n, [], **more)
    left, right = run(one, rows_of(y, u, dt)), run(other, rows_of(y, u[:0], dt))
    np.testing.assert_allclose(left.mean, right.mean, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(left.covariance, right.covariance, rtol=1e-12, atol=1e-13)
    sums = {"kind": "sum", "parts": [{**columns, "name": "own"}, {"kind": "random_walk", "variance": 0.1}]}
    plain = {"kind": "sum", "parts": [{**process, "name": "own"}, {"kind": "random_walk", "variance": 0.1}]}
    left = smoothed(model_of(sums, n + 1, names, **more), rows_of(y, u, dt))
    right = smoothed(model_of(plain, n + 1, [], **more), rows_of(y, u[:0], dt))
    np.testing.assert_allclose(left.mean, right.mean, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(left.covariance, right.covariance, rtol=1e-10, atol=1e-10)


def test_a_random_walk_whose_variance_is_a_column_is_that_of_statsmodels():
    """Time-varying state covariance, with a time-varying intercept of the measurement."""
    rng = np.random.default_rng(2)
    n = 50
    variance, bias, y = rng.uniform(0.1, 3.0, n), rng.normal(size=n), np.cumsum(rng.normal(size=n))
    y[[4, 5, 20]] = np.nan
    definition = model_of({"kind": "random_walk", "variance": "q"}, 1, ["q", "bias"])
    definition["observation"] |= {"offset": ["bias"]}
    definition["initial"] = {"mean": [0.3], "covariance": [[2.0]]}
    out = run(definition, rows_of(y, np.array([variance, bias])))
    peer = sm.tsa.statespace.MLEModel(
        y, k_states=1, k_posdef=1, initialization="known", initial_state=[0.3], initial_state_cov=[[2.0]]
    )
    peer["design"], peer["transition"], peer["selection"] = np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1))
    peer["obs_cov"] = np.array([[0.8]])
    peer["obs_intercept"] = bias[None]
    # its covariance at t acts from t to t + 1, ours between the previous row and this one
    peer["state_cov"] = np.concatenate([variance[1:], [1.0]])[None, None]
    truth: Any = peer.ssm.filter()
    np.testing.assert_allclose(out.mean[0], truth.filtered_state[0], rtol=1e-11)
    np.testing.assert_allclose(out.covariance[0], truth.filtered_state_cov[0, 0], rtol=1e-11)
    np.testing.assert_allclose(out.log_likelihood, truth.llf_obs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_a_rate_and_a_mean_that_change_with_the_row(kind, form):
    """An Ornstein-Uhlenbeck process by matrices, by hand: its noise of each row by the matrix exponential."""
    rng = np.random.default_rng(3)
    n = 40
    u = np.array([rng.uniform(0.1, 1.0, n), rng.uniform(0.5, 3.0, n), rng.normal(size=n)])
    dt, y = rng.integers(1, 4, size=n).astype(float), rng.normal(size=n)
    definition = model_of(
        {"kind": "ornstein_uhlenbeck", "rate": "rate", "variance": "spread", "mean": "middle"},
        1,
        ["rate", "spread", "middle"],
        filter=kind,
        **({"form": form} if form else {}),
    )
    out = run(definition, rows_of(y, u, dt))
    x, P = 0.3, 1.1
    for k in range(n):
        if k:
            rate, spread, middle = u[:, k]
            # Van Loan (1978): [[-A, q], [0, A']] dt
            block = expm(np.array([[rate, 2.0 * rate * spread], [0.0, -rate]]) * dt[k])
            F = block[1, 1]
            x, P = middle + F * (x - middle), F * P * F + F * block[0, 1]
        S = P + 0.8
        x, P = x + P / S * (y[k] - x), P * 0.8 / S
        np.testing.assert_allclose([out.mean[0, k], out.covariance[0, k]], [x, P], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("kind", "form"), FORMS)
@pytest.mark.parametrize(
    ("process", "value", "first"),
    [
        ({"kind": "random_walk", "variance": "c"}, -0.1, True),
        ({"kind": "ornstein_uhlenbeck", "rate": "c", "variance": 1.0}, 0.0, True),
        ({"kind": "random_walk", "variance": "c"}, np.nan, True),
    ],
)
def test_a_value_that_cannot_be_flags_its_row(kind, form, process, value, first):
    """It changes nothing; at a first row a process's value has no effect."""
    definition = model_of(process, 1, ["c"], filter=kind, **({"form": form} if form else {}))
    u = np.full((1, 3), 0.4)
    u[0, 1] = value
    out = run(definition, rows_of(np.array([1.0, 2.0, 3.0]), u))
    flag = "non_finite" if np.isnan(value) else "not_psd"
    assert [kalman.FLAGS[a] for a in out.flag] == [None, flag, None]
    np.testing.assert_array_equal(out.mean[:, 1], out.mean[:, 0])
    u = np.full((1, 3), 0.4)
    u[0, 0] = value if not np.isnan(value) else 0.4
    assert not run(definition, rows_of(np.array([1.0, 2.0, 3.0]), u)).flag.any()


WALK = model_of({"kind": "random_walk", "variance": 0.5}, 1, ["c"])


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_fading_from_a_column(kind, form):
    """alpha^2 P + Q with each row's alpha, by hand; smoothed, a constant column is the number."""
    more = {"filter": kind, **({"form": form} if form else {})}
    rng = np.random.default_rng(4)
    n = 30
    y, alpha = rng.normal(size=n), rng.uniform(1.0, 1.5, n)
    out = run({**WALK, **more, "robust": {"fading": "c"}}, rows_of(y, alpha[None]))
    x, P = 0.3, 1.1
    for k in range(n):
        P = P if not k else alpha[k] ** 2 * P + 0.5
        S = P + 0.8
        x, P = x + P / S * (y[k] - x), P * 0.8 / S
        np.testing.assert_allclose([out.mean[0, k], out.covariance[0, k]], [x, P], rtol=1e-11)
    rows = rows_of(y, np.full((1, n), 1.2))
    without = {**WALK, **more, "control": []}
    left = smoothed({**WALK, **more, "robust": {"fading": "c"}}, rows)
    right = smoothed({**without, "robust": {"fading": 1.2}}, rows._replace(u=rows.u[:0]))
    np.testing.assert_allclose(left.mean, right.mean, rtol=1e-12)
    np.testing.assert_allclose(left.covariance, right.covariance, rtol=1e-12)
    alpha[5], alpha[0] = 0.9, 0.5
    out = run({**WALK, **more, "robust": {"fading": "c"}}, rows_of(y, alpha[None]))
    assert [kalman.FLAGS[a] for a in out.flag] == [None] * 5 + ["not_psd"] + [None] * (n - 6)


@pytest.mark.parametrize(("kind", "form"), FORMS)
@pytest.mark.parametrize("gate", ["threshold", "probability"])
def test_a_gate_from_a_column(kind, form, gate):
    """Each row has its own gate; two measurements, so that a probability has two quantiles."""
    definition = {
        **WALK,
        "filter": kind,
        **({"form": form} if form else {}),
        "measurement": ["y", "z"],
        "observation": {"H": [[1.0], [1.0]], "R": [[0.8, 0.1], [0.1, 0.5]]},
        "robust": {"gate": {gate: "c", "limit": 2}},
    }
    low, high = {"threshold": (0.5, 20.0), "probability": (0.2, 0.9999)}[gate]
    rng = np.random.default_rng(5)
    n = 40
    y = rng.normal(size=(2, n))
    y[0, 7], y[1, 12] = np.nan, np.nan
    for value in (low, high):
        rows = rows_of(y[0], np.full((1, n), value))._replace(y=y)
        number = copy.deepcopy({**definition, "control": []})
        number["robust"]["gate"][gate] = value
        left, right = run(definition, rows), run(number, rows._replace(u=rows.u[:0]))
        np.testing.assert_array_equal(left.mean, right.mean)
        np.testing.assert_array_equal(left.flag, right.flag)
    assert not left.flag.any()
    u = np.full((1, n), high)
    u[0, 20] = low
    y[:, 20] = 3.0
    rows = rows_of(y[0], u)._replace(y=y)
    out = run(definition, rows)
    assert [kalman.FLAGS[a] for a in out.flag] == [None] * 20 + ["gated"] + [None] * (n - 21)
    for wrong in (0.0, -1.0, 1.0 if gate == "probability" else -2.0):
        u[0, 20] = wrong
        assert kalman.FLAGS[run(definition, rows._replace(u=u)).flag[20]] == "not_psd"


WRONG = [
    ("process", {"kind": "random_walk", "variance": "other"}, "process.variance", "not a control column"),
    (
        "process",
        {"kind": "seasonal_dummy", "period": "c", "variance": 1.0},
        "process.period",
        "same for all rows",
    ),
    ("process", {"kind": "random_walk", "variance": 1.0, "varance": "c"}, "process.varance", "not known"),
    ("robust", {"fading": "other"}, "robust.fading", "not a control column"),
    ("robust", {"gate": {"threshold": "other"}}, "robust.gate.threshold", "not a control column"),
    ("learn", {"parameters": ["variance"]}, "learn.parameters[0]", "comes from a column"),
]


@pytest.mark.parametrize(("section", "value", "field", "problem"), WRONG)
def test_an_error_names_the_field(section, value, field, problem):
    definition = {**model_of({"kind": "random_walk", "variance": "c"}, 1, ["c"]), section: value}
    with pytest.raises(kalman.ModelError) as error:
        kalman.build(definition)
    assert error.value.field == field and problem in error.value.problem


def test_other_fields_are_learned_and_adapted_beside_a_column():
    process = {"kind": "local_linear_trend", "level_variance": "c", "slope_variance": 0.2}
    definition = model_of(process, 2, ["c"])
    rng = np.random.default_rng(6)
    rows = rows_of(np.cumsum(rng.normal(size=60)), rng.uniform(0.5, 2.0, (1, 60)))
    assert np.isfinite(run({**definition, "adaptive": {"Q": 0.05}}, rows).mean).all()
    learned = {**definition, "learn": {"parameters": ["slope_variance", "R"]}}
    learn = maximum_likelihood.build_linear_learner(learned)
    theta = learn.start
    value, gradient, _ = learn.compute_gradient(theta, rows, 1, UNIT)
    assert value == pytest.approx(run(definition, rows).log_likelihood.sum(), rel=1e-12)
    for i in range(len(theta)):
        step = np.where(np.arange(len(theta)) == i, 1e-4, 0.0)
        up, down = (learn.compute_gradient(theta + a, rows, 1, UNIT)[0] for a in (step, -step))
        assert gradient[i] == pytest.approx((up - down) / 2e-4, rel=1e-5)
