"""Apply rows to the states of their keys, in one step that batch, stream and replay share, without Spark or a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.encoding.keys import match
from jobs.state.encoding.packets import NEVER, Layout, Records, merge_records
from jobs.state.encoding.rows import KeyedRows
from jobs.state.expiry import run_lives
from jobs.state.row_filter import RowFilter
from kalman.run import KeyStates, Outputs, initial_states

Begin = Callable[[KeyedRows], NDArray[np.float64]]
"""Function that returns the initial states (size, K) of the K keys of some rows."""

_STATE = ("event_time", "count", "log_likelihood", "values")


class StepResult(NamedTuple):
    """All state records after the rows were applied, ordered by route, and the filter's outputs for the rows.

    ended: last states of the keys that expired among the rows (`jobs.state.expiry`); None if keys do not expire.
    """

    records: Records
    outputs: Outputs
    ended: Records | None = None


def filter_step(
    row_filter: RowFilter,
    layout: Layout,
    known: Records,
    keyed: KeyedRows,
    apply_late: bool = False,
    begin: NDArray[np.float64] | None = None,
    idle: int | None = None,
) -> StepResult:
    """Apply rows to the states of their keys; new keys begin at the model's initial distribution.

    Args:
        row_filter: the filter.
        layout: layout of state records (`block_format.build_state_layout`).
        known: state records ordered by route; may be empty.
        keyed: the rows and their K keys.
        apply_late: whether a row that is older than the state of its key is applied as if it had come at the state's
            time, instead of being refused.
        begin: (size, K) initial states of new keys; None means the model's initial state.
        idle: microseconds of silence after which a key begins anew; None means never.
    """
    at = match(known, keyed.keys)
    new = at < 0
    fresh = initial_states(row_filter.kernel, len(at))
    if begin is not None:
        fresh = fresh._replace(values=begin)
    before = gather(known, at, new, fresh)
    rows = keyed.rows
    if apply_late:
        held = np.where(before.count > 0, before.event_time, NEVER)
        rows = rows._replace(time=np.maximum(rows.time, held[rows.key]))
    ended = None
    if idle is None or len(rows.key) == 0:
        after, outputs = row_filter.run(before, rows)
    else:
        after, outputs, ended_states, ended_keys = run_lives(row_filter, before, fresh, rows, idle)
        if len(ended_keys):
            identities = keyed.keys.take(ended_keys)
            ended = Records({**identities.arrays, **ended_states._asdict()}, identities.text)
    # If all rows of a new key were refused, the key still has no state, and is not kept.
    keep = ~new | (after.count > 0)
    records = put(known, keyed.keys, at, after, keep)
    if ended is not None:  # all new rows of an expired key may have been refused
        records = records.take(np.flatnonzero(records.arrays["count"] > 0))
    return StepResult(records, outputs, ended)


def put(
    known: Records, keys: Records, at: NDArray[np.int64], states: KeyStates, keep: NDArray[np.bool_]
) -> Records:
    """Replace or add the states of K keys in the known state records; return all records, ordered by route.

    Args:
        known: state records, ordered by route.
        keys: identities of the K keys, ordered by route.
        at: (K,) positions of the keys among the known records; -1 for a new key.
        states: states of the K keys.
        keep: (K,) mask of the new keys that are added.
    """
    new = at < 0
    changed = {name: np.array(known.arrays[name]) for name in _STATE}
    found = at[~new]
    for name in _STATE:
        changed[name][..., found] = getattr(states, name)[..., ~new]
    identities = {name: array for name, array in known.arrays.items() if name not in _STATE}
    kept = Records({**identities, **changed}, known.text)
    added = np.flatnonzero(new & keep)
    if len(added) == 0:
        return kept
    new_keys = keys.take(added)
    new_records = Records(
        {**new_keys.arrays, **{name: getattr(states, name)[..., added] for name in _STATE}}, new_keys.text
    )
    if kept.size == 0:
        return new_records
    return merge_records(kept, new_records)


def gather(known: Records, at: NDArray[np.int64], new: NDArray[np.bool_], fresh: KeyStates) -> KeyStates:
    """Return the states of K keys: the known records at positions `at`, or the fresh state where `new` is set."""
    if new.all():
        return fresh
    states = KeyStates(**{name: known.arrays[name][..., at] for name in _STATE})
    states = states._replace(values=states.values.astype(np.float64, copy=False))
    for name in _STATE:
        getattr(states, name)[..., new] = getattr(fresh, name)[..., new]
    return states


def find_newest_times(keys: Records, *states: Records) -> NDArray[np.int64]:
    """Return the event time (K,) of the newest row in the state of each key; `NEVER` for a key without a state.

    If several of the `states` have a key, the last of them is used.
    """
    newest = np.full(keys.size, NEVER)
    for records in states:
        at = match(records, keys)
        found = at >= 0
        held = at[found]
        arrays = records.arrays
        newest[found] = np.where(arrays["count"][held] > 0, arrays["event_time"][held], NEVER)
    return newest
