"""Advance the states of keys by their rows: the one step that batch, stream and replay share. No Spark, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.keys import match
from jobs.encoding.packets import Layout, Records, concat
from jobs.encoding.rows import KeyedRows
from jobs.state.expiry import run_lives
from jobs.state.filtering import filter_rows
from kalman.run import KeyStates, Outputs, initial_states
from kalman.types import Filter

Begin = Callable[[KeyedRows], NDArray[np.float64]]
"""Gives the states (size, K) in which the keys of some rows begin if they are new."""

_STATE = ("event_time", "count", "log_likelihood", "values")


class Advanced(NamedTuple):
    """States after some rows: all records, ordered by route, and what came out for each row."""

    records: Records
    outputs: Outputs
    ended: Records | None = None
    """The last states of keys that ended among the rows, where keys end (`jobs.state.expiry`)."""


def filter_step(
    kernel: Filter,
    layout: Layout,
    known: Records,
    keyed: KeyedRows,
    unit: float,
    apply_late: bool = False,
    begin: NDArray[np.float64] | None = None,
    watched: bool = False,
    idle: int | None = None,
) -> Advanced:
    """Apply rows to the states of their keys; keys that are not known begin at the model's initial distribution.

    Args:
        kernel: the filter.
        layout: of state records (`state_blocks.state_layout`).
        known: state records ordered by route; of no records if nothing is known.
        keyed: the rows and their keys.
        unit: microseconds in the model's unit of time.
        apply_late: take a row that is older than its key's state as if it had come at the state's time, instead of
            refusing it.
        begin: (size, K) states in which keys that are not known begin; by default the model's initial state.
        watched: also put out the normalised innovations (`jobs.state.filtering`); each row is then predicted twice.
        idle: microseconds of silence after which a key begins anew.
    """
    at = match(known, keyed.keys)
    new = at < 0
    fresh = initial_states(kernel, len(at))
    if begin is not None:
        fresh = fresh._replace(values=begin)
    before = gather(known, at, new, fresh)
    rows = keyed.rows
    if apply_late:
        held = np.where(before.count > 0, before.event_time, np.iinfo(np.int64).min)
        rows = rows._replace(time=np.maximum(rows.time, held[rows.key]))
    ended = None
    if idle is None or len(rows.key) == 0:
        after, outputs = filter_rows(kernel, before, rows, unit, watched)
    else:
        after, outputs, gone, whose = run_lives(kernel, before, fresh, rows, unit, idle, watched)
        if len(whose):
            identities = keyed.keys.take(whose)
            ended = Records({**identities.arrays, **gone._asdict()}, identities.text)
    # A key whose every row was refused has still no state: it is not kept.
    keep = ~new | (after.count > 0)
    records = put(known, keyed.keys, at, after, keep)
    if ended is not None:  # a key that ended may have come back with refused rows alone
        records = records.take(np.flatnonzero(records.arrays["count"] > 0))
    return Advanced(records, outputs, ended)


def put(
    known: Records, keys: Records, at: NDArray[np.int64], states: KeyStates, keep: NDArray[np.bool_]
) -> Records:
    """Return known states with those of some keys in their places, ordered by route.

    Args:
        known: ordered by route.
        keys: identities of K keys, ordered by route.
        at: (K,) where they are among the known ones, or -1.
        states: of these keys.
        keep: (K,) which of those that are not known are to be.
    """
    new = at < 0
    changed = {name: np.array(known.arrays[name]) for name in _STATE}
    found = at[~new]
    for name in _STATE:
        changed[name][..., found] = getattr(states, name)[..., ~new]
    identities = {name: array for name, array in known.arrays.items() if name not in _STATE}
    kept = Records({**identities, **changed}, known.text)
    born = np.flatnonzero(new & keep)
    if len(born) == 0:
        return kept
    newcomers = keys.take(born)
    begun = Records(
        {**newcomers.arrays, **{name: getattr(states, name)[..., born] for name in _STATE}}, newcomers.text
    )
    if kept.size == 0:
        return begun
    joined = concat([kept, begun])
    return joined.take(np.argsort(joined.arrays["route"], kind="stable"))


def gather(known: Records, at: NDArray[np.int64], new: NDArray[np.bool_], fresh: KeyStates) -> KeyStates:
    """Return the states of keys at positions `at` of the known ones, and fresh ones where they are new."""
    if new.all():
        return fresh
    states = KeyStates(**{name: known.arrays[name][..., at] for name in _STATE})
    states = states._replace(values=states.values.astype(np.float64, copy=False))
    for name in _STATE:
        getattr(states, name)[..., new] = getattr(fresh, name)[..., new]
    return states
