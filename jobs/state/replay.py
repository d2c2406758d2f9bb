"""Replay late rows: rewind a key to before its last rows, and apply these again with the late rows. Pure functions.

The last L rows of each key are kept, and the state before the first of them. States before each row would take L times
the space; the filter computes them again, with the same bits however the rows are cut into calls. A row that is later
than all kept rows is applied to the newest state, without a rewind.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.block_format import StateFormat
from jobs.state.block_store import Blocks
from jobs.state.encoding.keys import match
from jobs.state.encoding.packets import NEVER, OutputPacket, Records, StateVariable, merge_records
from jobs.state.encoding.row_order import find_repeated, find_starts, order_rows
from jobs.state.encoding.rows import KeyedRows
from jobs.state.filter_step import gather, put
from jobs.state.key_states import BucketStates, Copies
from jobs.state.plan import (
    EventTimePolicy,
    Packet,
    Plan,
    Stores,
    build_duplicate_packet,
    build_output_packets,
    build_row_packet,
    build_row_records,
    estimate_packets,
    find_without_state,
)
from jobs.state.row_filter import RowFilter
from jobs.state.row_ids import RowIdCheck
from kalman.run import KeyStates, Outputs, SortedRows, initial_states, pick_outputs

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class RewoundRows(NamedTuple):
    """The replay window of K keys.

    head: newest states. base: states before the kept rows, or the newest state of a key without kept rows. rows: the
    kept rows, sorted.
    """

    head: KeyStates
    base: KeyStates
    rows: SortedRows


class Replayed(NamedTuple):
    """K keys after N new rows, of which some may be late.

    window: the window after the rows
    beyond, repeats: (N,) masks of the new rows that are older than the window, and that repeat another row
    rows, outputs: the rows with a new estimate, and the filter's outputs; corrects: mask of rows that had an estimate
    """

    window: RewoundRows
    beyond: Bools
    repeats: Bools
    rows: SortedRows
    outputs: Outputs
    corrects: Bools


def replay(
    row_filter: RowFilter, window: RewoundRows, new: SortedRows, length: int, distinct: bool = False
) -> Replayed:
    """Apply new rows, and apply the kept rows again that come after the new rows.

    A kept row at the same time as a new row, or later, gets a new estimate. Readers use the estimates of the latest
    micro-batch for each key and time.

    Args:
        row_filter: the filter.
        window: the window before the rows.
        new: new rows, sorted.
        length: number of rows per key that a window keeps.
        distinct: whether only the first row to arrive of each key and time is kept.
    """
    head, base, ring = window
    keys = len(head.count)
    beyond = (base.count[new.key] > 0) & (new.time < base.event_time[new.key])
    repeats = _find_repeats(base, ring, new, beyond) if distinct else np.zeros(len(new.key), bool)
    merged, seen = _merge_rows(ring, new.take(~(beyond | repeats)))
    fresh = merged.key[~seen]
    first = np.full(keys, np.iinfo(np.int64).max)
    np.minimum.at(first, fresh, merged.time[~seen])
    last = np.full(keys, NEVER)
    np.maximum.at(last, ring.key, ring.time)
    rewound = first <= last
    begin = KeyStates(*(np.where(rewound, b, h) for b, h in zip(base, head, strict=True)))
    again = rewound[merged.key] | ~seen
    applied = merged.take(again)
    after, outputs = row_filter.run(begin, applied)
    changed = np.zeros(keys, bool)
    changed[fresh] = True
    head_after = KeyStates(*(np.where(changed, a, h) for a, h in zip(after, head, strict=True)))
    estimated = np.flatnonzero(applied.time >= first[applied.key])
    kept = _is_newest(merged.key, keys, length)
    absorbed, _ = row_filter._replace(beside=()).run(base, merged.take(~kept))
    return Replayed(
        RewoundRows(head_after, absorbed, merged.take(kept)),
        beyond,
        repeats,
        applied.take(estimated),
        pick_outputs(outputs, estimated),
        seen[again][estimated],
    )


def _merge_rows(ring: SortedRows, new: SortedRows) -> tuple[SortedRows, Bools]:
    """Return kept and new rows together, sorted, and a mask of the kept rows."""
    key, time = np.concatenate([ring.key, new.key]), np.concatenate([ring.time, new.time])
    y, u = np.concatenate([ring.y, new.y], axis=1), np.concatenate([ring.u, new.u], axis=1)
    order = order_rows(key, time, y, u)
    seen = order < len(ring.key)
    return SortedRows(key[order], time[order], y[:, order], u[:, order]), seen


def _is_newest(key: Ints, keys: int, length: int) -> Bools:
    """Return a mask (N,) of the sorted rows that are among the last `length` rows of their key."""
    stop = np.cumsum(np.bincount(key, minlength=keys))
    return stop[key] - np.arange(len(key)) <= length


def _find_repeats(base: KeyStates, ring: SortedRows, new: SortedRows, beyond: Bools) -> Bools:
    """Return a mask of the new rows that repeat a kept row, the newest row of the base, or another new row."""
    again = find_repeated(new, np.where(base.count > 0, base.event_time, NEVER))
    key, time = np.concatenate([ring.key, new.key]), np.concatenate([ring.time, new.time])
    kept = np.arange(len(key)) < len(ring.key)
    order = np.lexsort((~kept, time, key))  # a kept row comes before the new rows with the same time
    starts = find_starts(key[order], time[order])
    leader = kept[order][np.flatnonzero(starts)][np.cumsum(starts) - 1]
    led = np.zeros(len(order), bool)
    led[order] = leader
    return (again | led[len(ring.key) :]) & ~beyond


class _Loaded(NamedTuple):
    """Records ordered by route.

    present: numbers of the blocks of the rows' keys
    known, base: newest states, and states before the kept rows, at least of these keys
    rows: the kept rows of all keys in these blocks
    """

    present: NDArray[np.int64]
    known: Records
    base: Records
    rows: Records


class _Positions(NamedTuple):
    """Positions of K keys among newest states and base states, -1 if missing; the key of each kept row, or -1."""

    head: NDArray[np.int64]
    base: NDArray[np.int64]
    row_key: NDArray[np.int64]


class ReplayWindow:
    """The kept rows of a bucket's keys, whose newest states are in `states`."""

    def __init__(
        self, plan: Plan, policy: EventTimePolicy, states: Blocks, stores: Stores, copies: Copies
    ) -> None:
        self.plan, self.length, self.states = plan, policy.replay_length, states
        kept = StateFormat(policy.row_format.header, plan.rows.bare.layout)
        self.replay_rows = Blocks(stores.replay_rows, kept, plan.blocks)
        place = partial(copies, StateVariable.REPLAY_BASE)
        self.replay_base = BucketStates(stores.replay_base, plan.state, plan.blocks, place)

    def apply(self, keyed: KeyedRows, ids: RowIdCheck) -> Iterator[Packet]:
        """Apply rows in their place among the kept rows, and yield the packets."""
        plan = self.plan
        route = keyed.keys.arrays["route"]
        (present, known), (_, base) = self.states.load(route), self.replay_base.load(route)
        loaded = _Loaded(present, known, base, self.replay_rows.read(present))
        checked = ids.check(keyed, known, loaded.base)
        yield from checked.duplicates
        keyed = checked.kept
        at, window = self._build_window(keyed, loaded)
        done = replay(plan.row_filter, window, keyed.rows, self.length, plan.rows.distinct)
        self._save(keyed.keys, loaded, at, done.window)
        ids.remember(checked, KeyedRows(keyed.keys, done.rows), done.outputs, None)
        yield from self._build_packets(keyed, done)

    def _build_window(self, keyed: KeyedRows, loaded: _Loaded) -> tuple[_Positions, RewoundRows]:
        plan, keys, kept = self.plan, keyed.keys, loaded.rows
        fresh = initial_states(plan.kernel, keys.size)
        if plan.begin is not None:
            fresh = fresh._replace(values=plan.begin(keyed))
        at, at_base = match(loaded.known, keys), match(loaded.base, keys)
        head = gather(loaded.known, at, at < 0, fresh)
        base = gather(loaded.base, at_base, at_base < 0, head)
        code = match(keys, kept) if kept.size else np.empty(0, np.int64)
        mine = np.flatnonzero(code >= 0)
        y, u = kept.arrays["y"], kept.arrays.get("u", np.empty((0, kept.size)))
        rows = SortedRows(code[mine], kept.arrays["time"][mine], y[:, mine], u[:, mine])
        return _Positions(at, at_base, code), RewoundRows(head, base, rows)

    def _save(self, keys: Records, loaded: _Loaded, at: _Positions, window: RewoundRows) -> None:
        present, known, base, kept = loaded
        head = window.head
        self.states.save(present, put(known, keys, at.head, head, head.count > 0))
        has_rows = np.bincount(window.rows.key, minlength=keys.size) > 0
        self.replay_base.save(present, put(base, keys, at.base, window.base, has_rows))
        rows = merge_records(kept.take(np.flatnonzero(at.row_key < 0)), build_row_records(keys, window.rows))
        self.replay_rows.save(present, rows)

    def _build_packets(self, keyed: KeyedRows, done: Replayed) -> Iterator[Packet]:
        plan, keys = self.plan, keyed.keys
        beyond, repeats = np.flatnonzero(done.beyond), np.flatnonzero(done.repeats)
        if len(beyond):
            yield build_row_packet(plan, OutputPacket.BEYOND_REPLAY_WINDOW, keyed, beyond)
        if len(repeats):
            yield build_duplicate_packet(plan, OutputPacket.DUPLICATE, keyed, repeats)
        # The rows whose estimate is their first are the new rows, in the order of arrival.
        new = np.flatnonzero(~(done.beyond | done.repeats))
        first, again = np.flatnonzero(~done.corrects), np.flatnonzero(done.corrects)
        ids = None if keyed.ids is None else keyed.ids.take(new)
        yield from build_output_packets(
            plan, KeyedRows(keys, done.rows.take(first), ids), pick_outputs(done.outputs, first)
        )
        corrected, outputs = KeyedRows(keys, done.rows.take(again)), pick_outputs(done.outputs, again)
        for count, packet in estimate_packets(plan, corrected, outputs, find_without_state(outputs)):
            yield OutputPacket.CORRECTION, count, packet
