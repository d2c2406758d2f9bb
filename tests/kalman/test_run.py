"""Running many keys: company and cuts change no bit, and a bad row hurts nobody else."""

import pickle

import numpy as np
import pytest

import kalman
from kalman import flags
from tests.kalman.support.models import SIZES, random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, run_one

CASES = [("explicit", 2, 2, 1, False), ("explicit", 3, 3, 0, True), *((k, 0, 2, 0, False) for k in SIZES)]


def case(index, seed=0, keys=300, longest=9):
    kind, n, m, c, diffuse = CASES[index]
    rng = np.random.default_rng([index, seed])
    definition = random_definition(rng, kind, n, m, c)
    if diffuse:
        definition["initial"] = {"diffuse": True}
    model = kalman.build(definition)
    return rng, model, random_rows(rng, definition, keys, longest)


def keep(rows, mask, number=None):
    key = rows.key[mask] if number is None else number[rows.key[mask]]
    return kalman.SortedRows(key, rows.time[mask], rows.y[:, mask], rows.u[:, mask])


def columns(outputs, which):
    return [*(a[..., which] for a in outputs[:6]), {k: v[..., which] for k, v in outputs.extra.items()}]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_splitting_and_permuting_keys_changes_no_bit(index):
    rng, model, rows = case(index)
    keys = 300
    states, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    for group in np.array_split(rng.permutation(keys), [1, 3, 40, 200]):
        number = np.full(keys, -1)
        number[group] = np.arange(len(group))
        mask = np.flatnonzero(number[rows.key] >= 0)
        mask = mask[np.argsort(number[rows.key[mask]], kind="stable")]
        part, said = kalman.run(
            model, kalman.initial_states(model, len(group)), keep(rows, mask, number), UNIT
        )
        same(list(part), [states.values[:, group], *(a[group] for a in states[1:])])
        same(columns(said, slice(None)), columns(outputs, mask))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_cutting_rows_into_batches_changes_no_bit(index):
    rng, model, rows = case(index, 1)
    whole, outputs = kalman.run(model, kalman.initial_states(model, 300), rows, UNIT)
    batch = np.zeros(len(rows.key), int)
    for key in range(300):  # each key's rows are cut at places of its own
        here = rows.key == key
        batch[here] = np.sort(rng.integers(0, 4, here.sum()))
    states = kalman.initial_states(model, 300)
    for b in range(4):
        mask = np.flatnonzero(batch == b)
        states, said = kalman.run(model, states, keep(rows, mask), UNIT)
        same(columns(said, slice(None)), columns(outputs, mask))
    same(list(states), list(whole))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_snapshot_restores_every_bit(index):
    _, model, rows = case(index, 2, longest=2)
    states, _ = kalman.run(model, kalman.initial_states(model, 300), rows, UNIT)
    mean, covariance, extras = model.snapshot(states.values)
    n = len(model.states)
    matrices = covariance.reshape(n, n, -1)
    same(matrices, matrices.transpose(1, 0, 2))
    same(model.restore(mean, covariance, extras), states.values)
    same(pickle.loads(pickle.dumps(model)).initial(3), model.initial(3))


def test_more_keys_than_a_block_and_a_filter_in_pieces_of_it():
    rng, model, _ = case(0)
    keys = 10_000
    n = keys
    rows = kalman.SortedRows(
        np.arange(n), np.zeros(n, np.int64), rng.normal(size=(2, n)), rng.normal(size=(1, n))
    )
    states, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    some = np.array([0, 4095, 4096, 9999])
    part, _ = kalman.run(
        model, kalman.initial_states(model, 4), keep(rows, some, np.searchsorted(some, np.arange(n))), UNIT
    )
    same(part.values, states.values[:, some])


BAD = {
    "infinite measurement": ({}, np.inf, flags.NON_FINITE),
    "overflow": ({}, 1e200, flags.OVERFLOW),
    "no variance": ({"observation": {"H": [[1.0]], "R": [[0.0]]}}, 1.0, flags.SINGULAR_INNOVATION),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_flagged_and_leaves_its_key_at_the_last_good_state(name):
    change, bad, code = BAD[name]
    definition = {
        "states": ["a"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"H": [[1.0]], "R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
        **change,
    }
    model = kalman.build(definition)
    key = np.repeat(np.arange(5), 3)
    time = np.tile([0, 1_000_000, 2_000_000], 5)
    y = np.full((1, 15), 0.5)
    where = 7  # the third key's second row
    y[0, where] = bad
    if code == flags.SINGULAR_INNOVATION:
        time[where] = time[where - 1]  # measured without noise a moment ago: nothing is left to weigh
    rows = kalman.SortedRows(key, time, y, np.empty((0, 15)))
    states, outputs = kalman.run(model, kalman.initial_states(model, 5), rows, UNIT)
    assert outputs.flag.tolist() == [code if i == where else 0 for i in range(15)]
    assert kalman.FLAGS[code] is not None
    assert np.isnan(outputs.log_likelihood[where]) and np.isnan(outputs.nis[where])
    assert states.count.tolist() == [3, 3, 2, 3, 3]
    # as if the row had not been there: the next one is predicted from the last good one
    without = np.delete(np.arange(15), where)
    expected, said = kalman.run(model, kalman.initial_states(model, 5), keep(rows, without), UNIT)
    same(list(states), list(expected))
    same(columns(said, slice(None)), columns(outputs, without))
    same(outputs.mean[:, where], outputs.mean[:, where - 1])


def test_a_missing_row_has_log_likelihood_zero_and_no_nis():
    definition = random_definition(np.random.default_rng(3), "explicit", 2, 2)
    states, outputs = run_one(definition, [[1, 2], [np.nan, np.nan], [np.nan, 1]])
    assert outputs.log_likelihood[1] == 0 and np.isnan(outputs.nis[1])
    assert outputs.log_likelihood[2] != 0 and states.count[0] == 3


def test_late_rows_are_not_applied():
    _, model, rows = case(3, 3, keys=20)
    states, _ = kalman.run(model, kalman.initial_states(model, 20), rows, UNIT)
    again, outputs = kalman.run(model, states, rows._replace(time=rows.time - 1), UNIT)
    assert outputs.late.all() and np.isnan(outputs.mean).all() and np.isnan(outputs.log_likelihood).all()
    same(list(again), list(states))
    key = rows.key[-1:]
    mixed = kalman.SortedRows(
        np.repeat(key, 2),
        np.array([rows.time[-1] - 1, rows.time[-1] + 5]),
        rows.y[:, [0, 0]],
        rows.u[:, [0, 0]],
    )
    after, outputs = kalman.run(model, states, mixed, UNIT)
    assert outputs.late.tolist() == [True, False] and after.count[key] == states.count[key] + 1
    assert after.event_time[key] == rows.time[-1] + 5


@pytest.mark.parametrize("keys", [0, 1, 3])
def test_no_rows_and_no_keys(keys):
    _, model, rows = case(0)
    nothing = keep(rows, np.empty(0, int))
    states, outputs = kalman.run(model, kalman.initial_states(model, keys), nothing, UNIT)
    assert states.values.shape == (model.size, keys) and outputs.mean.shape == (2, 0)


def test_the_callers_arrays_are_left_alone():
    _, model, rows = case(1)
    states = kalman.initial_states(model, 300)
    before = pickle.dumps((states, rows))
    kalman.run(model, states, rows, UNIT)
    assert pickle.dumps((states, rows)) == before
