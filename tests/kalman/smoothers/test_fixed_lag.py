"""Fixed-lag smoothing: a row's state L rows later is the fixed-interval one of data cut there; bits and state."""

import pickle

import numpy as np
import pytest

import kalman
from kalman.smoothers.smooth import smooth
from tests.kalman.filters.test_linear import NILE, nile_model
from tests.kalman.smoothers.test_smoothing import joint, smooth_one
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT
from tests.kalman.test_run import columns, keep

KINDS = ["explicit", "constant_velocity", "sum"]


def case(kind, seed, lag, diffuse=False, keys=3, longest=8):
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    controls = int(rng.integers(0, 2)) if kind == "explicit" else 0
    definition = random_definition(rng, kind, int(rng.integers(1, 4)), int(rng.integers(1, 3)), controls)
    if diffuse:
        n, m = len(definition["states"]), len(definition["measurement"])
        definition["observation"]["H"] = rng.normal(size=(m, n)).tolist()
        definition["initial"] = {"diffuse": True}
    rows = random_rows(rng, definition, keys, longest)
    if diffuse:
        rows = rows._replace(time=np.cumsum(rng.choice([1_000_000, 2_000_000, 500_000], len(rows.key))))
    return rng, {**definition, "smoothing": {"lag": lag}}, rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lag", "diffuse"), [(1, False), (3, False), (2, True), (4, True)])
def test_it_is_the_fixed_interval_smoother_of_rows_cut_at_the_lag(kind, lag, diffuse):
    _, definition, rows = case(kind, lag, lag, diffuse)
    model = kalman.build(definition)
    plain = kalman.build({**definition, "smoothing": None})
    _, outputs = kalman.run(model, kalman.initial_states(model, 3), rows, UNIT)
    _, expected = kalman.run(plain, kalman.initial_states(plain, 3), rows, UNIT)
    same(list(outputs[:6]), list(expected[:6]))  # the filter itself is untouched
    n = len(definition["states"])
    tight = 1e-9 if not diffuse else 1e-7
    for key in np.unique(rows.key):
        here = np.flatnonzero(rows.key == key)
        assert np.isnan(outputs.extra["lagged_mean"][:, here[:lag]]).all()
        for k in range(lag, len(here)):
            _, _, cut = smooth(plain, kalman.initial_states(plain, 3), keep(rows, here[: k + 1]), UNIT)
            mean = outputs.extra["lagged_mean"][:, here[k]]
            covariance = outputs.extra["lagged_covariance"][:, here[k]].reshape(n, n)
            packed = covariance[np.tril_indices(n)]
            truth = cut.covariance[:, k - lag]
            known = np.isfinite(cut.covariance[[i * (i + 3) // 2 for i in range(n)], k - lag])
            size = np.abs(truth[np.isfinite(truth)]).max(initial=1e-3)
            np.testing.assert_array_equal(np.isfinite(packed), np.isfinite(truth))
            np.testing.assert_allclose(
                mean[known], cut.mean[known, k - lag], rtol=tight, atol=tight * np.sqrt(size)
            )
            finite = np.isfinite(truth)
            np.testing.assert_allclose(packed[finite], truth[finite], rtol=tight, atol=tight * size)
            same(covariance, covariance.T)
            age = (rows.time[here[k]] - rows.time[here[k - lag]]) / UNIT
            assert outputs.extra["lagged_age"][0, here[k]] == pytest.approx(age, abs=1e-9)


def test_joint_gaussian():
    rng = np.random.default_rng(11)
    definition = random_definition(rng, "constant_velocity", 2, 1)
    y, seconds = rng.normal(size=(6, 1)), np.cumsum([0, 1, 0.5, 2, 0.25, 1])
    y[2] = np.nan
    model = kalman.build({**definition, "smoothing": {"lag": 5}})
    rows = kalman.SortedRows(np.zeros(6, np.int64), (seconds * UNIT).astype(np.int64), y.T, np.empty((0, 6)))
    _, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    H = np.array(definition["observation"]["H"])
    truth = joint(definition, H, y, np.diff(seconds, prepend=0), np.empty((6, 0)))
    n = len(definition["states"])
    np.testing.assert_allclose(outputs.extra["lagged_mean"][:, 5], truth.means[0], rtol=1e-10, atol=1e-10)
    covariance = outputs.extra["lagged_covariance"][:, 5].reshape(n, n)
    np.testing.assert_allclose(covariance, truth.covariances[0], rtol=1e-9, atol=1e-10)


def test_nile():
    """All other rows come later than 1871: the published smoothed value (Durbin and Koopman 2012, 2.4)."""
    model = kalman.build({**nile_model({"diffuse": True}), "smoothing": {"lag": 99}})
    time = np.arange(100) * 1_000_000
    rows = kalman.SortedRows(np.zeros(100, np.int64), time, NILE[None], np.empty((0, 100)))
    _, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    assert np.isnan(outputs.extra["lagged_mean"][0, :99]).all()
    assert outputs.extra["lagged_mean"][0, 99] == pytest.approx(1111.668319, abs=5e-7)
    assert outputs.extra["lagged_covariance"][0, 99] == pytest.approx(4032.157942, abs=5e-7)
    assert outputs.extra["lagged_age"][0, 99] == 99


@pytest.mark.parametrize("diffuse", [False, True])
@pytest.mark.parametrize("kind", ["explicit", "sum"])
def test_cuts_and_company_change_no_bit(kind, diffuse):
    rng, definition, rows = case(kind, 1, 3, diffuse, keys=120)
    model = kalman.build(definition)
    whole, outputs = kalman.run(model, kalman.initial_states(model, 120), rows, UNIT)
    batch = np.zeros(len(rows.key), int)
    for key in range(120):
        here = rows.key == key
        batch[here] = np.sort(rng.integers(0, 4, here.sum()))
    states = kalman.initial_states(model, 120)
    for b in range(4):
        mask = np.flatnonzero(batch == b)
        mean, covariance, extras = model.snapshot(states.values)
        states = states._replace(values=model.restore(mean, covariance, extras))
        states, said = kalman.run(model, states, keep(rows, mask), UNIT)
        same(columns(said, slice(None)), columns(outputs, mask))
    same(list(states), list(whole))
    for group in np.array_split(rng.permutation(120), [1, 7, 50]):
        number = np.full(120, -1)
        number[group] = np.arange(len(group))
        mask = np.flatnonzero(number[rows.key] >= 0)
        mask = mask[np.argsort(number[rows.key[mask]], kind="stable")]
        part, said = kalman.run(
            model, kalman.initial_states(model, len(group)), keep(rows, mask, number), UNIT
        )
        same(part.values, whole.values[:, group])
        same(columns(said, slice(None)), columns(outputs, mask))
    same(pickle.loads(pickle.dumps(model)).initial(3), model.initial(3))


def test_a_flagged_row_gives_no_output_and_leaves_the_kept_rows():
    definition = {**nile_model({"diffuse": True}), "smoothing": {"lag": 2}}
    model = kalman.build(definition)
    y = np.array([[1.0, 3.0, np.inf, 4.0, 1e200, 6.0]])
    rows = kalman.SortedRows(np.zeros(6, np.int64), np.arange(6) * 1_000_000, y, np.empty((0, 6)))
    states, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    assert outputs.flag.astype(bool).tolist() == [False, False, True, False, True, False]
    good = np.flatnonzero(outputs.flag == 0)
    assert np.isnan(outputs.extra["lagged_mean"][:, [2, 4]]).all()
    expected, said = kalman.run(model, kalman.initial_states(model, 1), keep(rows, good), UNIT)
    same(said.extra["lagged_mean"], outputs.extra["lagged_mean"][:, good])
    same(states.values, expected.values)
    cut = smooth_one(nile_model({"diffuse": True}), [1.0, 3.0, 4.0])
    assert outputs.extra["lagged_mean"][0, 3] == pytest.approx(cut.mean[0, 0], rel=1e-12)


@pytest.mark.parametrize(
    ("smoothing", "field"),
    [
        ({"lag": 0}, "smoothing.lag"),
        ({}, "smoothing.lag"),
        ({"lag": 2, "x": 1}, "smoothing.x"),
        (3, "smoothing"),
    ],
)
def test_mistakes_are_named(smoothing, field):
    with pytest.raises(kalman.ModelError) as caught:
        kalman.build({**nile_model({"diffuse": True}), "smoothing": smoothing})
    assert caught.value.field == field


def test_smoothing_and_learning_go_on_beneath_it():
    definition = nile_model({"diffuse": True}) | {"learn": {"parameters": ["Q", "R"]}}
    from kalman.learning.maximum_likelihood import build_linear_learner

    plain, lagged = (
        build_linear_learner(definition),
        build_linear_learner({**definition, "smoothing": {"lag": 2}}),
    )
    same(plain.start, lagged.start)
    model = kalman.build({**definition, "smoothing": {"lag": 2}})
    rows = kalman.SortedRows(np.zeros(9, np.int64), np.arange(9), NILE[None, :9], np.empty((0, 9)))
    _, outputs, smoothed = smooth(model, kalman.initial_states(model, 1), rows, UNIT)
    expected = smooth_one(definition, NILE[:9])
    same(list(smoothed), list(expected))
    assert outputs.extra["lagged_mean"].shape == (1, 9)
