"""The same filters over many keys: company and cuts change no bit, and a bad row hurts nobody else."""

import pickle

import numpy as np
import pytest

import kalman
from kalman import flags
from tests.kalman.support.models import random_rows, same
from tests.kalman.support.nonlinear import random_nonlinear
from tests.kalman.support.oracles import UNIT
from tests.kalman.test_run import columns, keep

HERE = "tests.kalman.support.nonlinear"
CASES = [
    ("extended", "covariance"),
    ("extended", "square_root"),
    ("extended", "information"),
    ("unscented", "covariance"),
    ("unscented", "square_root"),
    ("cubature", "covariance"),
    ("cubature", "square_root"),
    ("linear", "square_root"),
    ("linear", "information"),
]
KEYS = 120


def case(index, longest=6):
    kind, form = CASES[index]
    rng = np.random.default_rng(index)
    definition = {**random_nonlinear(rng, kind, 2, 2, 1, jacobians=index != 1), "form": form}
    if kind == "linear":
        definition["process"] = {
            "kind": "explicit",
            "F": [[1, 0.5], [0, 0.9]],
            "Q": [[1, 0], [0, 1]],
            "B": [[1], [0]],
        }
        definition["observation"] = {"H": [[1, 0], [1, 1]], "R": [[1, 0.2], [0.2, 1]]}
    return rng, kalman.build(definition), random_rows(rng, definition, KEYS, longest)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_company_changes_no_bit(index):
    rng, model, rows = case(index)
    states, outputs = kalman.run(model, kalman.initial_states(model, KEYS), rows, UNIT)
    assert not outputs.flag.any()
    for group in np.array_split(rng.permutation(KEYS), [1, 3, 40]):
        number = np.full(KEYS, -1)
        number[group] = np.arange(len(group))
        mask = np.flatnonzero(number[rows.key] >= 0)
        mask = mask[np.argsort(number[rows.key[mask]], kind="stable")]
        part, said = kalman.run(
            model, kalman.initial_states(model, len(group)), keep(rows, mask, number), UNIT
        )
        same(list(part), [states.values[:, group], *(a[group] for a in states[1:])])
        same(columns(said, slice(None)), columns(outputs, mask))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_cuts_and_snapshots_change_no_bit(index):
    rng, model, rows = case(index)
    whole, outputs = kalman.run(model, kalman.initial_states(model, KEYS), rows, UNIT)
    batch = np.zeros(len(rows.key), int)
    for key in range(KEYS):
        here = rows.key == key
        batch[here] = np.sort(rng.integers(0, 3, here.sum()))
    states = kalman.initial_states(model, KEYS)
    for b in range(3):
        mask = np.flatnonzero(batch == b)
        states, said = kalman.run(model, states, keep(rows, mask), UNIT)
        same(columns(said, slice(None)), columns(outputs, mask))
        model = pickle.loads(pickle.dumps(model))
        states = states._replace(values=model.restore(*model.snapshot(states.values)))
    same(list(states), list(whole))
    mean, covariance, _ = model.snapshot(states.values)
    matrices = covariance.reshape(2, 2, -1)
    same(matrices, matrices.transpose(1, 0, 2))
    same(mean, model.moments(states.values)[0])
    assert model.size == sum(a for (a,) in model.fields.values()) == 5


def flagged(definition, y, u=None):
    """Run five keys of three rows; return states, outputs, and the run without the row at 7."""
    model = kalman.build(definition)
    key, time = np.repeat(np.arange(5), 3), np.tile([0, 1_000_000, 2_000_000], 5)
    rows = kalman.SortedRows(key, time, y, np.empty((0, 15)) if u is None else u)
    states, outputs = kalman.run(model, kalman.initial_states(model, 5), rows, UNIT)
    without = np.delete(np.arange(15), 7)
    expected, said = kalman.run(model, kalman.initial_states(model, 5), keep(rows, without), UNIT)
    same(list(states), list(expected))
    same(columns(outputs, without), columns(said, slice(None)))
    same(outputs.mean[:, 7], outputs.mean[:, 6])
    assert outputs.flag.tolist() == [outputs.flag[7] if i == 7 else 0 for i in range(15)]
    assert np.isnan(outputs.log_likelihood[7]) and np.isnan(outputs.nis[7])
    return outputs.flag[7]


ONE = {
    "states": ["x"],
    "measurement": ["y"],
    "process": {"kind": "function", "f": f"{HERE}:still", "Q": [[0.01]]},
    "observation": {"h": f"{HERE}:logarithms", "R": [[0.1]]},
    "initial": {"mean": [3.0], "covariance": [[0.02]]},
}
PAIRS = [pair for pair in CASES if pair[0] != "linear"]


@pytest.mark.parametrize(("kind", "form"), PAIRS)
@pytest.mark.parametrize(("bad", "code"), [(np.inf, flags.NON_FINITE), (1e200, flags.OVERFLOW)])
def test_a_bad_measurement_leaves_its_key_at_the_last_good_state(kind, form, bad, code):
    y = np.full((1, 15), 1.1)
    y[0, 7] = bad
    assert flagged({**ONE, "filter": kind, "form": form}, y) == code


@pytest.mark.parametrize(("kind", "form"), PAIRS)
def test_a_function_that_gives_no_number_flags_its_key(kind, form):
    """The control moves one key's state below zero, where there is no logarithm."""
    definition = {
        **ONE,
        "filter": kind,
        "form": form,
        "control": ["u"],
        "process": {"kind": "function", "f": f"{HERE}:pushed", "Q": [[0.01]]},
    }
    y, u = np.full((1, 15), 1.1), np.zeros((1, 15))
    u[0, 7] = -20.0
    assert flagged(definition, y, u) == flags.NON_FINITE


@pytest.mark.parametrize("form", ["covariance", "square_root"])
def test_a_difference_of_squares_that_is_no_covariance_flags_its_key(form):
    """kappa = -1.9 of two states gives the centre a weight of -19, and h one key a great bend."""
    definition = {
        **ONE,
        "filter": "unscented",
        "form": form,
        "unscented": {"kappa": -0.95},
        "control": ["u"],
        "process": {"kind": "function", "f": f"{HERE}:bent_by_control", "Q": [[0.001]]},
        "observation": {"H": [[1.0]], "R": [[1.0]]},
    }
    y, u = np.full((1, 15), 3.0), np.zeros((1, 15))
    u[0, 7] = 20.0
    assert flagged(definition, y, u) == flags.NOT_PSD


@pytest.mark.parametrize(("kind", "form"), [pair for pair in CASES if pair[1] != "information"])
def test_an_innovation_without_variance_flags_its_key(kind, form):
    definition = {
        "filter": kind,
        "form": form,
        "states": ["a"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"H": [[1.0]], "R": [[0.0]]},
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
    }
    model = kalman.build(definition)
    rows = kalman.SortedRows(np.array([0, 0, 1]), np.zeros(3, np.int64), np.ones((1, 3)), np.empty((0, 3)))
    _, outputs = kalman.run(model, kalman.initial_states(model, 2), rows, UNIT)
    assert outputs.flag.tolist() == [0, flags.SINGULAR_INNOVATION, 0]
    np.testing.assert_array_equal(outputs.covariance, 0.0)


@pytest.mark.parametrize("keys", [0, 1])
def test_no_rows_and_no_keys(keys):
    for index in range(len(CASES)):
        _, model, rows = case(index, longest=1)
        nothing = keep(rows, np.empty(0, int))
        states, outputs = kalman.run(model, kalman.initial_states(model, keys), nothing, UNIT)
        assert states.values.shape == (model.size, keys) and outputs.mean.shape == (2, 0)


def test_more_keys_than_a_block():
    rng, model, _ = case(3)
    keys = 2500
    rows = kalman.SortedRows(
        np.arange(keys), np.zeros(keys, np.int64), rng.normal(size=(2, keys)), rng.normal(size=(1, keys))
    )
    states, _ = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    some = np.array([0, 1023, 1024, 2499])
    number = np.searchsorted(some, np.arange(keys))
    part, _ = kalman.run(model, kalman.initial_states(model, 4), keep(rows, some, number), UNIT)
    same(part.values, states.values[:, some])
