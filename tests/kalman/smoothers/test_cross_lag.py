"""Fixed-lag smoothing of the non-linear filters and other forms: it is fixed-interval smoothing of rows cut there."""

from typing import Any

import numpy as np
import pytest

import kalman
from kalman import flags
from kalman.evaluation.diagnostics import innovations
from kalman.evaluation.forecast import forecast
from kalman.smoothers.smooth import smooth
from tests.kalman.support import laws
from tests.kalman.support.laws import keep
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.nonlinear import random_nonlinear
from tests.kalman.support.oracles import UNIT, full

CASES = {
    "extended": {"filter": "extended"},
    "unscented": {"filter": "unscented"},
    "cubature": {"filter": "cubature", "form": "square_root"},
    "robust": {"filter": "unscented", "robust": {"student_t": {"degrees": 4}, "gate": {"probability": 0.99}}},
    "linear square root": {"form": "square_root"},
    "linear robust": {"robust": {"huber": {}, "fading": 1.05}, "adaptive": {"R": 0.05}},
}


def case(name, seed):
    rng = np.random.default_rng([seed, len(name)])
    if name.startswith("linear"):
        definition = random_definition(rng, "sum", 3, 2)
    else:
        definition = random_nonlinear(rng, CASES[name]["filter"], 2, 2, 1)
    definition = {**definition, **CASES[name]}
    return rng, definition, random_rows(rng, definition, 12, 9)


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_fixed_interval_smoother_of_rows_cut_at_the_lag(name, lag):
    _, definition, rows = case(name, lag)
    model, plain = kalman.build({**definition, "smoothing": {"lag": lag}}), kalman.build(definition)
    _, outputs = kalman.run(model, kalman.initial_states(model, 12), rows, UNIT)
    _, expected = kalman.run(plain, kalman.initial_states(plain, 12), rows, UNIT)
    same(list(outputs[:6]), list(expected[:6]))
    same([outputs.extra[name] for name in expected.extra], list(expected.extra.values()))
    n = len(definition["states"])
    for key in np.unique(rows.key):
        here = np.flatnonzero((rows.key == key) & (outputs.flag == flags.WELL))
        assert np.isnan(outputs.extra["lagged_mean"][:, here[:lag]]).all()
        for k in range(lag, len(here)):
            cut = keep(rows, np.flatnonzero((rows.key == key) & (np.arange(len(rows.key)) <= here[k])))
            _, _, truth = smooth(plain, kalman.initial_states(plain, 12), cut, UNIT)
            place = np.searchsorted(np.flatnonzero(rows.key == key), here[k - lag])
            same(outputs.extra["lagged_mean"][:, here[k]], truth.mean[:, place])
            packed = outputs.extra["lagged_covariance"][:, here[k]].reshape(n, n)[np.tril_indices(n)]
            same(packed, truth.covariance[:, place])
            age = (rows.time[here[k]] - rows.time[here[k - lag]]) / UNIT
            assert outputs.extra["lagged_age"][0, here[k]] == pytest.approx(age, abs=1e-9)
    flagged = outputs.flag != flags.WELL
    assert np.isnan(outputs.extra["lagged_mean"][:, flagged]).all()


@pytest.mark.parametrize("name", CASES)
def test_laws(name):
    rng, definition, rows = case(name, 5)
    model = kalman.build({**definition, "smoothing": {"lag": 2}})
    laws.splitting_and_permuting_keys_changes_no_bit(model, rows, 12, rng)
    laws.cutting_rows_changes_no_bit(model, rows, 12, rng)
    laws.snapshot_restores_every_bit(model, rows, 12)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 12, np.inf, flags.NON_FINITE)


def test_on_a_linear_model_it_is_the_linear_filters():
    rng = np.random.default_rng(3)
    definition = {**random_definition(rng, "constant_velocity", 2, 2), "smoothing": {"lag": 3}}
    rows = random_rows(rng, definition, 12, 9)
    results = []
    for change in ({}, {"filter": "cubature"}, {"form": "square_root"}):
        model = kalman.build({**definition, **change})
        results.append(kalman.run(model, kalman.initial_states(model, 12), rows, UNIT)[1].extra)
    for other in results[1:]:
        for field, values in results[0].items():
            np.testing.assert_allclose(values, other[field], rtol=1e-8, atol=1e-8)


def test_smoothing_forecasts_and_diagnostics_see_the_filter_beneath():
    _, definition, rows = case("unscented", 1)
    definition["control"] = []
    rows = rows._replace(u=rows.u[:0])
    results = []
    for one in (definition, {**definition, "smoothing": {"lag": 2}}):
        model = kalman.build(one)
        states, _, smoothed = smooth(model, kalman.initial_states(model, 12), rows, UNIT)
        white = innovations(model, kalman.initial_states(model, 12), rows, UNIT)[2]
        results.append([*smoothed, white, *forecast(model, states, np.ones((2, 12)))])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            {"filter": "rls", "process": None, "observation": None, "initial": None, "control": ["u"]},
            "smoothing",
        ),
        ({"robust": {"huber": {}}, "initial": {"diffuse": True}}, "initial.diffuse"),
    ],
)
def test_a_filter_that_cannot_be_smoothed_is_refused(change, field):
    definition = random_definition(np.random.default_rng(1), "explicit", 2, 1)
    with pytest.raises(kalman.ModelError) as error:
        kalman.build({**definition, **change, "smoothing": {"lag": 2}})
    assert error.value.field == field


def test_rows_that_an_earlier_release_kept_are_smoothed_as_before():
    """Such a release kept the filtered and the predicted covariance, of which G takes the difference."""
    F, Q, lag = np.array([[1.0, 1.0], [0.0, 1.0]]), np.diag([0.5, 0.1]), 2
    definition = {
        "filter": "extended",
        "states": ["level", "slope"],
        "measurement": ["y"],
        "process": {"kind": "explicit", "F": F.tolist(), "Q": Q.tolist()},
        "observation": {"H": [[1.0, 0.0]], "R": [[1.0]]},
        "initial": {"mean": [0.0, 0.0], "covariance": [[4.0, 0.5], [0.5, 1.0]]},
        "smoothing": {"lag": lag},
    }
    model: Any = kalman.build(definition)
    y, time = np.array([[1.0, 2.5, 2.0, 4.0, 4.5, 7.0]]), np.arange(6) * int(UNIT)
    rows = kalman.SortedRows(np.zeros(6, np.int64), time, y, np.empty((0, 6)))
    states, before = kalman.run(model, kalman.initial_states(model, 1), rows.take(np.arange(4)), UNIT)
    old = states.values.copy()
    low = np.tril_indices(2)
    for age in range(lag):
        P = full(before.covariance[:, [2 - age]])[0]
        for name, kept in (("covariances", P), ("predicted", F @ P @ F.T + Q)):
            place = model.places[f"lagged_{name}"]
            old[place][age::lag, 0] = kept[low]
    assert not np.array_equal(old, states.values)
    found = [
        kalman.run(model, states._replace(values=values), rows.take(np.arange(4, 6)), UNIT)[1].extra
        for values in (states.values, old)
    ]
    for name in ("lagged_mean", "lagged_covariance"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-12)
