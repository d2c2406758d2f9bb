"""Laws that every filter keeps: company, cuts and snapshots change no bit."""

import pickle

import numpy as np

import kalman
from tests.kalman.support.models import same
from tests.kalman.support.oracles import UNIT


def keep(rows, mask, number=None):
    key = rows.key[mask] if number is None else number[rows.key[mask]]
    return kalman.SortedRows(key, rows.time[mask], rows.y[:, mask], rows.u[:, mask])


def columns(outputs, which):
    return [*(a[..., which] for a in outputs[:6]), {k: v[..., which] for k, v in outputs.extra.items()}]


def splitting_and_permuting_keys_changes_no_bit(model, rows, keys, rng):
    states, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    for group in np.array_split(rng.permutation(keys), [1, 3, keys // 4]):
        number = np.full(keys, -1)
        number[group] = np.arange(len(group))
        mask = np.flatnonzero(number[rows.key] >= 0)
        mask = mask[np.argsort(number[rows.key[mask]], kind="stable")]
        start = kalman.initial_states(model, len(group))
        part, said = kalman.run(model, start, keep(rows, mask, number), UNIT)
        same(list(part), [states.values[:, group], *(a[group] for a in states[1:])])
        same(columns(said, slice(None)), columns(outputs, mask))


def cutting_rows_changes_no_bit(model, rows, keys, rng):
    whole, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    batch = np.zeros(len(rows.key), int)
    for key in range(keys):  # each key's rows are cut at places of its own
        here = rows.key == key
        batch[here] = np.sort(rng.integers(0, 4, here.sum()))
    states = kalman.initial_states(model, keys)
    for b in range(4):
        mask = np.flatnonzero(batch == b)
        states, said = kalman.run(model, states, keep(rows, mask), UNIT)
        same(columns(said, slice(None)), columns(outputs, mask))
    same(list(states), list(whole))


def snapshot_restores_every_bit(model, rows, keys):
    states, _ = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    mean, covariance, extras = model.snapshot(states.values)
    n = len(model.states)
    assert mean.shape == (n, keys) and covariance.shape == (n * n, keys)
    assert all(len(extras[name]) == shape[0] for name, shape in list(model.fields.items())[2:])
    same(model.restore(mean, covariance, extras), states.values)
    again = pickle.loads(pickle.dumps(model))
    same(again.initial(3), model.initial(3))
    same(again.step(states.values, _row(model, keys))[0], model.step(states.values, _row(model, keys))[0])


def _row(model, keys):
    y, u = np.ones((model.measurements, keys)), np.zeros((model.controls, keys))
    return kalman.Rows(np.ones(keys), np.zeros(keys, bool), y, u)


def a_bad_row_hurts_its_own_key_alone(model, rows, keys, bad, code):
    """Put a bad measurement into one row: flagged, and all else is as if the row had not been there."""
    where = int(np.flatnonzero(rows.key == rows.key[len(rows.key) // 2])[-1])
    y = rows.y.copy()
    y[:, where] = bad
    states, outputs = kalman.run(model, kalman.initial_states(model, keys), rows._replace(y=y), UNIT)
    assert outputs.flag[where] == code and np.isnan(outputs.log_likelihood[where])
    without = np.delete(np.arange(len(rows.key)), where)
    expected, said = kalman.run(model, kalman.initial_states(model, keys), keep(rows, without), UNIT)
    same(list(states), list(expected))
    same(columns(outputs, without), columns(said, slice(None)))
