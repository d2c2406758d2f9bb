"""Innovations, NIS, NEES and Ljung-Box against statsmodels, published bounds and simulation."""

import numpy as np
import pytest
from scipy.stats import chi2
from statsmodels.stats.diagnostic import acorr_ljungbox
from statsmodels.tsa.statespace.structural import UnobservedComponents

import kalman
from kalman.evaluation.diagnostics import (
    consistency,
    coverage,
    innovations,
    ljung_box,
    mean_bounds,
    nees,
)
from kalman.evaluation.forecast import forecast
from kalman.smoothers.smooth import smooth
from tests.kalman.filters.test_linear import NILE, nile_model
from tests.kalman.models.test_columns import definition as columns_definition
from tests.kalman.models.test_columns import random_inputs
from tests.kalman.support.models import random_definition, random_rows
from tests.kalman.support.oracles import UNIT, corrections, full, run_one, transition_of
from tests.kalman.test_run import keep

KINDS = ["explicit", "constant_velocity", "sum"]


def innovate(definition, rows, keys):
    model = kalman.build(definition)
    _, outputs, white = innovations(model, kalman.initial_states(model, keys), rows, UNIT)
    return outputs, white


def textbook_innovations(definition, y, dt, u):
    """Cholesky-whitened innovations of one key: one row after another, with matrices."""
    result = np.full(y.shape, np.nan)
    for k, row in enumerate(corrections(definition, np.array(definition["observation"]["H"]), y, dt, u)):
        result[k, ~np.isnan(y[k])] = np.linalg.solve(np.linalg.cholesky(row.spread), row.innovation)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_normalised_innovations_are_those_of_the_textbook(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    definition = random_definition(rng, kind, 3, 3, 1 if kind == "explicit" else 0)
    rows = random_rows(rng, definition, 5, 9)
    outputs, white = innovate(definition, rows, 5)
    for key in np.unique(rows.key):
        here = rows.key == key
        dt = np.diff(rows.time[here], prepend=0) / UNIT
        truth = textbook_innovations(definition, rows.y[:, here].T, dt, rows.u[:, here].T)
        np.testing.assert_allclose(white[:, here].T, truth, rtol=1e-9, atol=1e-9)
    some = np.isfinite(outputs.nis)
    np.testing.assert_allclose(np.nansum(white[:, some] ** 2, axis=0), outputs.nis[some], rtol=1e-9)


def test_nile_against_statsmodels():
    """Standardised forecast errors and their Ljung-Box test (Durbin and Koopman 2012, section 2.12)."""
    theirs = UnobservedComponents(NILE, "llevel", use_exact_diffuse=True).smooth([15099.0, 1469.1])  # type: ignore[arg-type]
    key = np.zeros(100, np.int64)
    rows = kalman.SortedRows(key, np.arange(100) * 1_000_000, NILE[None], np.empty((0, 100)))
    outputs, white = innovate(nile_model({"diffuse": True}), rows, 1)
    assert np.isnan(white[0, 0])  # diffuse: nothing was predicted
    expected = theirs.filter_results.standardized_forecasts_error[0, 1:]
    np.testing.assert_allclose(white[0, 1:], expected, rtol=1e-9)
    test = acorr_ljungbox(white[0, 1:], lags=[9])
    ours = ljung_box(key, white[0], 1, lags=9)
    assert ours.statistic[0] == pytest.approx(float(test["lb_stat"].iloc[0]), rel=1e-12)
    assert ours.p_value[0] == pytest.approx(float(test["lb_pvalue"].iloc[0]), rel=1e-10)
    assert ours.statistic[0] == pytest.approx(8.84, abs=0.06), "the book prints Q(9) = 8.84"


def test_ljung_box_over_ragged_keys():
    rng = np.random.default_rng(4)
    lengths = [40, 0, 25, 3, 7, 60]
    key = np.repeat(np.arange(6), lengths)
    values = rng.normal(size=len(key))
    values[rng.random(len(key)) < 0.2] = np.nan
    values[key == 4] = 1.0
    ours = ljung_box(key, values, 6, lags=5)
    assert ours.statistic.dtype == float
    for k, length in enumerate(lengths):
        own = values[(key == k) & np.isfinite(values)]
        assert ours.count[k] == len(own)
        if length in (0, 3, 7):
            assert np.isnan([ours.statistic[k], ours.p_value[k]]).all()
            continue
        test = acorr_ljungbox(own, lags=[5])
        assert ours.statistic[k] == pytest.approx(float(test["lb_stat"].iloc[0]), rel=1e-12)
        assert ours.p_value[k] == pytest.approx(float(test["lb_pvalue"].iloc[0]), rel=1e-10)


def test_published_bounds():
    """Bar-Shalom: mean NEES of 50 runs at 95 %, two-sided; NIS gates."""
    np.testing.assert_allclose(mean_bounds(2, 50), (1.4844, 2.5912), atol=5e-5)
    np.testing.assert_allclose(mean_bounds(4, 50), (3.2546, 4.8212), atol=5e-5)
    for m, gate, wide in ((1, 3.8415, 6.6349), (2, 5.9915, 9.2103)):
        assert mean_bounds(m, 1, 0.90)[1] == pytest.approx(gate, abs=5e-5)
        assert mean_bounds(m, 1, 0.98)[1] == pytest.approx(wide, abs=5e-5)


@pytest.mark.parametrize("n", [2, 4])
def test_simulated_keys_are_as_consistent_as_they_should_be(n):
    """40 times 50 runs: mean NEES within the published bounds about 95 times in 100; NIS; no pattern."""
    rng = np.random.default_rng(n)
    process = {"kind": "constant_velocity", "acceleration_variance": 0.5, "dimensions": n // 2}
    definition = {
        "states": [f"x{i}" for i in range(n)],
        "measurement": [f"y{i}" for i in range(n // 2)],
        "process": process,
        "observation": {"R": np.eye(n // 2).tolist()},
        "initial": {"mean": [0] * n, "covariance": (4 * np.eye(n)).tolist()},
    }
    keys, length = 2000, 40
    F, Q, _ = transition_of(process, 1.0)
    x, path = 2 * rng.normal(size=(keys, n)), []
    for k in range(length):
        x = x if k == 0 else x @ F.T + rng.multivariate_normal(np.zeros(n), Q, keys)
        path.append(x)
    truth = np.array(path).transpose(2, 1, 0).reshape(n, -1)
    y = truth[::2] + rng.normal(size=(n // 2, keys * length))
    key = np.repeat(np.arange(keys), length)
    rows = kalman.SortedRows(
        key, np.tile(np.arange(length) * 1_000_000, keys), y, np.empty((0, keys * length))
    )
    outputs, white = innovate(definition, rows, keys)
    error = nees(outputs.mean, outputs.covariance, truth)
    direct = truth - outputs.mean
    solved = np.linalg.solve(full(outputs.covariance), direct.T[:, :, None])[:, :, 0]
    np.testing.assert_allclose(error, (solved * direct.T).sum(axis=1), rtol=1e-9)
    low, high = mean_bounds(n, 50)
    runs = error.reshape(40, 50, length)[:, :, -1].mean(axis=1)
    assert np.count_nonzero((runs < low) | (runs > high)) <= 6  # 2 are expected; more than 6: p = 0.003
    count = np.full(len(key), n // 2)
    whole = consistency(np.zeros(len(key), int), outputs.nis, count, 1)
    assert not whole.outside()[0] and whole.components[0] == len(key) * n // 2
    each = consistency(key, outputs.nis, count, keys)
    assert 0.035 < each.outside().mean() < 0.065
    assert 0.03 < (ljung_box(key, white[0], keys).p_value < 0.05).mean() < 0.07
    wrong, _ = innovate({**definition, "observation": {"R": (4 * np.eye(n // 2)).tolist()}}, rows, keys)
    assert consistency(key, wrong.nis, count, keys).outside().mean() > 0.9


def test_late_and_flagged_rows_have_no_innovation():
    definition = nile_model({"mean": [0.0], "covariance": [[1.0]]})
    y = np.array([[1.0, np.inf, 2.0]])
    rows = kalman.SortedRows(np.zeros(3, np.int64), np.arange(3) * 1_000_000, y, np.empty((0, 3)))
    _, white = innovate(definition, rows, 1)
    assert np.isfinite(white[0]).tolist() == [True, False, True]
    model = kalman.build(definition)
    states, _ = run_one(definition, [1.0, 2.0])
    _, outputs, white = innovations(model, states, rows._replace(y=np.ones((1, 3))), UNIT)
    assert outputs.late.tolist() == [True, False, False]
    assert np.isfinite(white[0]).tolist() == [False, True, True]


def test_nees_where_nothing_is_known_and_where_all_is():
    mean, truth = np.zeros((2, 3)), np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 3.0]])
    covariance = np.array([[1.0, np.inf, 0.0], [0.0, np.inf, 0.0], [4.0, np.inf, 9.0]])
    np.testing.assert_allclose(nees(mean, covariance, truth), [2.0, np.nan, 1.0])


def test_coverage_is_the_share_of_rows_in_their_predicted_intervals():
    rng = np.random.default_rng(4)
    white = rng.normal(size=(3, 4000))
    white[1, ::3] = np.nan
    white[:, 7] = np.nan
    components = np.isfinite(white).sum(axis=0)
    nis = np.where(components > 0, np.nansum(white**2, axis=0), np.nan)
    bounds = [np.inf, *chi2.ppf(0.9, [1, 2, 3])]
    inside = [value <= bounds[count] for value, count in zip(nis, components, strict=True) if count]
    assert coverage(nis, components, 0.9) == np.mean(inside) and abs(np.mean(inside) - 0.9) < 0.02
    assert coverage(np.array([3.8, 3.9, np.inf, np.nan])) == 1 / 3  # 3.84; a gated row may have any NIS
    assert np.isnan(coverage(np.full(3, np.nan))) and np.isnan(coverage(np.zeros(2), np.zeros(2)))
    assert np.isnan(coverage(np.empty(0)))


def test_columns_in_the_measurement_count():
    """NIS is the sum of squares of the innovations, and a lag and a forecast use each row's own matrices too."""
    rng = np.random.default_rng(8)
    model = columns_definition(rng)
    rows = random_inputs(rng, model)
    outputs, white = innovate(model, rows, 8)
    some = np.isfinite(outputs.nis)
    np.testing.assert_allclose(np.nansum(white[:, some] ** 2, axis=0), outputs.nis[some], rtol=1e-9)
    lagged, plain = kalman.build({**model, "smoothing": {"lag": 2}}), kalman.build(model)
    _, said = kalman.run(lagged, kalman.initial_states(lagged, 8), rows, UNIT)
    key = int(np.argmax(np.bincount(rows.key)))
    here = np.flatnonzero(rows.key == key)
    cut = keep(rows, here[:4])
    states, _, smoothed = smooth(plain, kalman.initial_states(plain, 8), cut, UNIT)
    np.testing.assert_allclose(said.extra["lagged_mean"][:, here[3]], smoothed.mean[:, 1], rtol=1e-9)
    u = np.repeat(rows.u[:, here[:1], None], 8, axis=1).transpose(2, 0, 1)
    ahead = forecast(plain, states, np.ones((1, 8)), u)
    a, b, noise, spread, bias, _ = u[0, :, 0]
    H, R = np.array([[1.0, b], [a, 0.5]]), spread * np.array([[noise, 0.2], [0.2, 1.5]])
    mean, P = ahead.mean[:, 0, key], full(ahead.covariance[:, :, key])[0]
    np.testing.assert_allclose(ahead.measurement_mean[:, 0, key], H @ mean + [bias, -1.0], rtol=1e-10)
    S = full(ahead.measurement_covariance[:, :, key])[0]
    np.testing.assert_allclose(S, H @ P @ H.T + R, rtol=1e-10)
