"""Residuals, their covariance and system matrices against statsmodels, the textbook and differences of functions."""

from typing import Any

import numpy as np
import pytest
from statsmodels.tsa.statespace.kalman_filter import KalmanFilter

import kalman
from kalman import flags
from kalman.evaluation.row_figures import RowFigures, figures
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.state_layout import locate_fields
from tests.kalman.filters.test_linear import NILE, nile_model
from tests.kalman.support.models import SIZES, random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, transition_of

RESIDUALS = ["residual", "residual_covariance"]
SYSTEM = ["system_F", "system_H", "system_Q", "system_R"]


def figured(model, rows, keys, names, states=None):
    states = states or kalman.initial_states(model, keys)
    watch = RowFigures(model, states, rows, names)
    after, outputs = kalman.run(model, states, rows, UNIT, watch)
    return after, outputs, watch.found()


def one_key(y, step=1.0, u=None):
    n = y.shape[1]
    time = np.round(np.arange(n) * step * UNIT).astype(np.int64)
    return kalman.SortedRows(np.zeros(n, np.int64), time, y, np.empty((0, n)) if u is None else u)


def theirs(definition, y):
    """statsmodels' forecast errors and their covariances, of a model with one step a row."""
    process, observation, initial = (definition[name] for name in ("process", "observation", "initial"))
    m, n = np.shape(observation["H"])
    other = KalmanFilter(m, n, loglikelihood_burn=0)
    other.bind(np.asfortranarray(y))
    other["design"], other["obs_cov"] = np.array(observation["H"]), np.array(observation["R"])
    other["transition"], other["state_cov"] = np.array(process["F"]), np.array(process["Q"])
    other["selection"] = np.eye(n)
    other.initialize_known(np.array(initial["mean"]), np.array(initial["covariance"]))
    return other.filter()


def test_residuals_are_the_forecast_errors_of_statsmodels():
    rng = np.random.default_rng(0)
    definition = random_definition(rng, "explicit", 3, 2)
    y = 3 * rng.normal(size=(2, 60))
    y[:, 17:20] = np.nan
    model = kalman.build(definition)
    _, outputs, found = figured(model, one_key(y), 1, RESIDUALS)
    want = theirs(definition, y)
    there = ~np.isnan(y).any(axis=0)
    np.testing.assert_allclose(
        found["residual"][:, there], want.forecasts_error[:, there], rtol=1e-11, atol=1e-11
    )
    assert np.isnan(found["residual"][:, ~there]).all()
    S = found["residual_covariance"].reshape(2, 2, -1)
    np.testing.assert_allclose(S[..., there], want.forecasts_error_cov[..., there], rtol=1e-11)
    np.testing.assert_allclose(
        S[..., ~there], want.forecasts_error_cov[..., ~there], rtol=1e-11
    )  # predicted all the same
    solved = np.linalg.solve(S.T, found["residual"].T[..., None])[..., 0].T
    np.testing.assert_allclose(
        (solved * found["residual"])[:, there].sum(axis=0), outputs.nis[there], rtol=1e-11
    )


def test_what_is_not_predicted_has_no_residual():
    y = NILE.copy()
    y[40] = np.nan
    _, _, found = figured(kalman.build(nile_model({"diffuse": True})), one_key(y[None]), 1, RESIDUALS)
    assert np.flatnonzero(np.isnan(found["residual"][0])).tolist() == [0, 40]
    assert np.flatnonzero(np.isinf(found["residual_covariance"][0])).tolist() == [0]
    assert found["residual"][0, 1] == pytest.approx(
        40.0, rel=1e-12
    )  # 1160 - 1120: Durbin and Koopman, chapter 2
    assert found["residual_covariance"][0, 1] == pytest.approx(2 * 15099.0 + 1469.1, rel=1e-12)


def test_a_gated_row_shows_why_it_was_gated_and_other_flagged_rows_show_nothing():
    definition = nile_model({"mean": [1000.0], "covariance": [[1e4]]}) | {
        "robust": {"gate": {"threshold": 9.0}}
    }
    y = np.array([[1000.0, 9000.0, np.inf, 1010.0]])
    names = ["innovation", *RESIDUALS, *SYSTEM]
    _, outputs, found = figured(kalman.build(definition), one_key(y), 1, names)
    assert outputs.flag.tolist() == [flags.WELL, flags.GATED, flags.NON_FINITE, flags.WELL]
    v, S = found["residual"][0], found["residual_covariance"][0]
    assert v[1] ** 2 / S[1] == pytest.approx(outputs.nis[1], rel=1e-12) and outputs.nis[1] > 9.0
    assert all(np.isnan(found[name][:, 2]).all() for name in names)
    assert np.isnan(found["innovation"][0, 1])
    np.testing.assert_array_equal(found["system_R"][0, [0, 1, 3]], 15099.0)


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_system_matrices_are_those_of_each_rows_time_step(kind):
    rng = np.random.default_rng(sorted(SIZES).index(kind))
    definition = random_definition(rng, kind, 2, 2)
    rows = random_rows(rng, definition, 6, 9)
    _, _, found = figured(kalman.build(definition), rows, 6, SYSTEM)
    n = len(definition["states"])
    for k in range(len(rows.key)):
        first = k == 0 or rows.key[k] != rows.key[k - 1]
        H, R = (np.array(definition["observation"][name]) for name in "HR")
        np.testing.assert_array_equal(found["system_H"][:, k], H.ravel())
        np.testing.assert_allclose(found["system_R"][:, k], R.ravel(), rtol=1e-15)
        if first:
            assert np.isnan(found["system_F"][:, k]).all() and np.isnan(found["system_Q"][:, k]).all()
            continue
        F, Q, _ = transition_of(definition["process"], (rows.time[k] - rows.time[k - 1]) / UNIT)
        scale = np.abs(Q).max()
        np.testing.assert_allclose(found["system_F"][:, k].reshape(n, n), F, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(found["system_Q"][:, k].reshape(n, n), Q, rtol=1e-11, atol=1e-12 * scale)


def test_matrices_from_columns_are_those_of_the_row():
    definition = nile_model({"mean": [0.0], "covariance": [[1.0]]}) | {"control": ["gain", "noise"]}
    definition["observation"] = {"H": [["gain"]], "R": [[2.0]], "noise_scale": "noise"}
    u = np.array([[1.0, 2.0, 3.0], [0.5, 1.0, 4.0]])
    _, _, found = figured(
        kalman.build(definition), one_key(np.ones((1, 3)), u=u), 1, ["system_H", "system_R"]
    )
    assert found["system_H"].tolist() == [[1.0, 2.0, 3.0]] and found["system_R"].tolist() == [[1.0, 2.0, 8.0]]


@pytest.mark.parametrize("kind", ["linear", "extended"])
def test_adapted_noise_is_that_with_which_the_row_was_weighed(kind):
    definition = nile_model({"mean": [1000.0], "covariance": [[1e4]]}) | {
        "adaptive": {"R": 0.1},
        "filter": kind,
    }
    model, rows = kalman.build(definition), one_key(NILE[None])
    _, _, found = figured(model, rows, 1, ["system_R", *RESIDUALS])
    states, place = kalman.initial_states(model, 1), locate_fields(model.fields)["parameters"]
    for k in range(20):
        assert found["system_R"][0, k] == states.values[place][0, 0]
        states, _ = kalman.run(model, states, rows.take(np.array([k])), UNIT)
    assert len(np.unique(found["system_R"])) > 90


ROBUST = [{}, {"gate": {"threshold": 9.0}}, {"huber": {"threshold": 1.345}}, {"student_t": {"degrees": 4.0}}]


@pytest.mark.parametrize("robust", ROBUST, ids=lambda one: next(iter(one), "plain"))
@pytest.mark.parametrize("kind", ["linear", "extended", "unscented"])
@pytest.mark.filterwarnings("error")
def test_a_row_near_the_largest_number_warns_of_nothing_and_is_exact_or_flagged(kind, robust):
    definition = nile_model({"mean": [1e308], "covariance": [[1e4]]}) | {"filter": kind}
    if robust:
        definition["robust"] = robust
    y = np.array([[1e308, -1e308, np.nan, 1.7e308, 1e308, -1.7e308]])
    _, outputs, found = figured(kalman.build(definition), one_key(y), 1, ["innovation", *RESIDUALS])
    residual, well = found["residual"][0], outputs.flag == flags.WELL
    assert well.tolist() == [True, False, True, False, True, False]
    np.testing.assert_array_equal(residual[well], [0.0, np.nan, 0.0])  # nothing was measured in the second
    shown = ~well & ~np.isnan(residual)
    assert (outputs.flag[shown] == flags.GATED).all() and shown.any() == ("gate" in robust)
    if shown.any():  # -2e308 is beyond the largest number, 0.7e308 is not
        np.testing.assert_allclose(residual[shown], [-np.inf, 0.7e308, -np.inf], rtol=1e-12)
        assert np.isinf(outputs.nis[shown]).all()


def level(x, dt, u):
    return np.array([x[0] + np.sin(x[1]) * dt, 0.9 * x[1]])


def seen(x):
    return np.array([x[0] ** 2 / 10 + x[1]])


def functional(kind, **more):
    here = __name__
    return {
        "filter": kind,
        "states": ["a", "b"],
        "measurement": ["y"],
        "process": {"kind": "function", "f": f"{here}:level", "Q": [[0.2, 0.05], [0.05, 0.1]]},
        "observation": {"h": f"{here}:seen", "R": [[0.5]]},
        "initial": {"mean": [1.0, 0.2], "covariance": [[1.0, 0.1], [0.1, 0.5]]},
        **more,
    }


def test_an_extended_filters_matrices_are_its_jacobians():
    rng = np.random.default_rng(5)
    model, rows = kalman.build(functional("extended")), one_key(rng.normal(size=(1, 6)), step=0.7)
    _, outputs, found = figured(model, rows, 1, SYSTEM)
    for k in range(1, 6):
        a, b = outputs.mean[:, k - 1]
        F = [[1.0, np.cos(b) * 0.7], [0.0, 0.9]]
        np.testing.assert_allclose(found["system_F"][:, k].reshape(2, 2), F, rtol=1e-6, atol=1e-8)
        predicted = level(np.array([a, b]), 0.7, None)
        np.testing.assert_allclose(found["system_H"][:, k], [predicted[0] / 5, 1.0], rtol=1e-6)
        np.testing.assert_array_equal(found["system_Q"][:, k], [0.2, 0.05, 0.05, 0.1])
        np.testing.assert_array_equal(found["system_R"][:, k], [0.5])


def shaken(x, dt, u, w):
    return np.array([x[0] + x[1] * dt * (1.0 + w[0]), 0.9 * x[1] + u[0] * w[0]])


def dimmed(x, u, v):
    return x[:1] * x[1:] + (2.0 + x[1]) * v[:1] + u[:1] * v[1:]


def test_noise_inside_functions_is_put_out_as_it_enters():
    rng = np.random.default_rng(6)
    inside = {
        "control": ["c"],
        "process": {"kind": "function", "f": f"{__name__}:shaken", "Q": [[0.2]]},
        "observation": {"h": f"{__name__}:dimmed", "R": [[0.5, 0.1], [0.1, 0.4]]},
    }
    model = kalman.build(functional("extended", **inside))
    u = rng.uniform(1.0, 2.0, size=(1, 6))
    _, outputs, found = figured(model, one_key(rng.normal(size=(1, 6)), step=0.7, u=u), 1, SYSTEM)
    for k in range(1, 6):
        a, b = outputs.mean[:, k - 1]
        G, M = np.array([[b * 0.7], [u[0, k]]]), np.array([[2.0 + 0.9 * b, u[0, k]]])
        Q, R = 0.2 * G @ G.T, M @ [[0.5, 0.1], [0.1, 0.4]] @ M.T
        np.testing.assert_allclose(found["system_Q"][:, k].reshape(2, 2), Q, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found["system_R"][:, k], R[0], rtol=1e-6)
        H = [0.9 * b, a + b * 0.7]
        np.testing.assert_allclose(found["system_H"][:, k], H, rtol=1e-6, atol=1e-8)
    points = kalman.build(functional("unscented", **inside))
    assert not {"system_Q", "system_R"} & set(figures(points))


def test_kinds_of_filters_have_the_figures_that_are_defined_for_them():
    both = set(RESIDUALS)
    for kind in ("unscented", "cubature"):
        assert set(figures(kalman.build(functional(kind)))) == {"innovation", *both, "system_Q", "system_R"}
        with pytest.raises(kalman.ModelError, match="no matrix F; it has Q, R"):
            RowFigures(kalman.build(functional(kind)), None, None, ["system_F"])  # type: ignore[arg-type]
    mixture = {
        "filter": "poisson_mixture",
        "states": ["n"],
        "measurement": ["n"],
        "mixture": {"rates": [2.0, 9.0]},
    }
    assert set(figures(kalman.build(mixture))) == {"innovation", *both}
    with pytest.raises(kalman.ModelError, match=r"outputs\.matrices: the filter has no matrix R; remove it"):
        RowFigures(kalman.build(mixture), None, None, ["system_R"])  # type: ignore[arg-type]


def test_each_mode_has_its_own_matrices():
    rng = np.random.default_rng(7)
    modes = [{"process": {"kind": "random_walk", "variance": q}} for q in (0.1, 5.0)]
    definition = {
        "filter": "imm",
        "states": ["x"],
        "measurement": ["y"],
        "observation": {"H": [[2.0]], "R": [[0.5]]},
        "initial": {"mean": [0.0], "covariance": [[4.0]]},
        "modes": modes,
        "transition": [[0.9, 0.1], [0.2, 0.8]],
    }
    model = kalman.build(definition)
    assert isinstance(model, MultipleModels)
    rows = one_key(rng.normal(size=(1, 8)), step=0.5)
    _, outputs, found = figured(model, rows, 1, [*RESIDUALS, *SYSTEM])
    np.testing.assert_allclose(found["system_Q"][:, 1:], np.repeat([[0.05], [2.5]], 7, axis=1), rtol=1e-15)
    np.testing.assert_array_equal(found["system_H"], 2.0)
    squares = found["residual"] ** 2 / found["residual_covariance"]
    np.testing.assert_allclose(squares[0], outputs.nis, rtol=1e-10)


@pytest.mark.parametrize("forgetting", [1.0, 0.95])
def test_a_regressions_residuals_are_those_of_least_squares_on_the_rows_before(forgetting):
    rng = np.random.default_rng(8)
    definition = {
        "filter": "rls",
        "states": ["c", "a", "b"],
        "measurement": ["y"],
        "control": ["p", "q"],
        "rls": {"forgetting": forgetting},
    }
    n = 30
    u, y = rng.normal(size=(2, n)), rng.normal(size=(1, n))
    y[0, 11] = np.nan
    model = kalman.build(definition)
    _, outputs, found = figured(model, one_key(y, u=u), 1, [*RESIDUALS, "system_H"])
    X = np.column_stack([np.ones(n), *u])
    np.testing.assert_array_equal(found["system_H"], X.T)
    seen_rows: list[int] = []
    for k in range(n):
        v, S = found["residual"][0, k], found["residual_covariance"][0, k]
        if len(seen_rows) < 3:
            assert np.isnan(v) and np.isinf(S)
        elif k != 11:
            w = np.sqrt(forgetting ** np.arange(len(seen_rows))[::-1])
            A, z = X[seen_rows] * w[:, None], y[0, seen_rows] * w
            b = np.linalg.lstsq(A, z, rcond=None)[0]
            if len(seen_rows) > 3:
                assert v == pytest.approx(y[0, k] - X[k] @ b, rel=1e-9, abs=1e-11)
                assert v * v / S == pytest.approx(outputs.nis[k], rel=1e-10)
        if k != 11:
            seen_rows.append(k)


def test_lms_residuals():
    definition = {
        "filter": "lms",
        "states": ["a"],
        "measurement": ["y"],
        "control": ["p"],
        "lms": {"step": 0.1},
    }
    u, y = np.array([[1.0, 2.0, 3.0]]), np.array([[1.0, 1.0, 1.0]])
    _, outputs, found = figured(kalman.build(definition), one_key(y, u=u), 1, RESIDUALS)
    np.testing.assert_allclose(
        found["residual"][0], [1.0, 1.0 - 2 * 0.1, 1.0 - 3 * outputs.mean[0, 1]], rtol=1e-14
    )
    assert np.isnan(found["residual_covariance"]).all()  # the noise's variance is not given
    noisy = definition | {"observation": {"R": [[4.0]]}}
    _, outputs, found = figured(kalman.build(noisy), one_key(y, u=u), 1, [*RESIDUALS, "system_R"])
    np.testing.assert_allclose(
        found["residual"][0] ** 2 / found["residual_covariance"][0], outputs.nis, rtol=1e-14
    )
    np.testing.assert_array_equal(found["system_R"], 4.0)


CUT: dict[str, dict[str, Any]] = {
    "linear": {},
    "diffuse": {"initial": {"diffuse": True}},
    "in 32 bits": {"storage": {"dtype": "float32"}},
    "square root": {"form": "square_root"},
    "gated and adaptive": {"robust": {"gate": {"threshold": 3.0}}, "adaptive": {"R": 0.05}},
    "extended": {"filter": "extended"},
    "unscented": {"filter": "unscented"},
    "fixed lag with a window": {"smoothing": {"lag": 2}, "sliding_log_likelihood": 3},
    "imm": {
        "filter": "imm",
        "modes": [{}, {"robust": {"fading": 1.2}}],
        "transition": [[0.9, 0.1], [0.2, 0.8]],
    },
}


@pytest.mark.parametrize("kind", CUT)
def test_no_bit_depends_on_the_other_keys_or_on_how_rows_are_cut(kind):
    rng = np.random.default_rng(9)
    definition = random_definition(rng, "damped_trend", 2, 2) | CUT[kind]
    rows = random_rows(rng, definition, 700, 15)
    model = kalman.build(definition)
    names = list(figures(model))
    assert set(names) == {"innovation", *RESIDUALS, *SYSTEM}
    _, _, whole = figured(model, rows, 700, names)
    early = rows.time < np.quantile(rows.time, 0.4)
    states, _, first = figured(model, rows.take(early), 700, names)
    _, _, second = figured(model, rows.take(~early), 700, names, states)
    joined = {name: np.empty_like(values) for name, values in whole.items()}
    for name in names:
        joined[name][:, early], joined[name][:, ~early] = first[name], second[name]
    same(joined, whole)
    some = np.isin(rows.key, [3, 50, 600])
    _, _, few = figured(model, rows.take(some), 700, names)
    same(few, {name: values[:, some] for name, values in whole.items()})
