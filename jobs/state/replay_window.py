"""The replay window of a bucket: the last rows of each key and the states before them, over stores. No Spark."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.block_format import StateFormat
from jobs.state.block_store import Blocks
from jobs.state.encoding.keys import match
from jobs.state.encoding.packets import OutputPacket, Records, StateVariable, merge_records
from jobs.state.encoding.rows import KeyedRows
from jobs.state.event_time_policy import EventTimePolicy, Stores
from jobs.state.filter_step import gather, put
from jobs.state.key_states import Copies, KeyStates
from jobs.state.plan import (
    Packet,
    Plan,
    build_duplicate_packet,
    build_output_packets,
    build_row_packet,
    build_row_records,
    estimate_packets,
    find_without_state,
)
from jobs.state.replay import Replayed, RewoundRows, replay
from jobs.state.row_ids import RowIdCheck
from kalman.run import SortedRows, initial_states, pick_outputs


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
        self.replay_base = KeyStates(stores.replay_base, plan.state, plan.blocks, place)

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
