"""The ids of the rows that a bucket has applied, as far back as a duplicate may still come.

An entry is a key, an id and a time. A duplicate also makes an entry, because the next duplicate is compared with this
entry. Entries have the same block numbers as the states of their keys, so a micro-batch reads and writes only the
entries of its keys. An entry is removed when no future row can be near enough in time. Keeping an entry for longer
changes no result, because times are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.state.block_format import StateFormat, build_format
from jobs.state.block_store import Blocks
from jobs.state.encoding.keys import KeyKind, match
from jobs.state.encoding.packets import (
    NEVER,
    Layout,
    OutputPacket,
    PacketColumn,
    Records,
    join_records,
    merge_records,
)
from jobs.state.encoding.row_order import Marks, find_resent, find_starts
from jobs.state.encoding.rows import KeyedRows, RowFormat, RowId, build_marks, select_rows, sort_by_key
from jobs.state.filter_step import find_newest_times
from jobs.state.plan import (
    Packet,
    Plan,
    Stores,
    build_duplicate_packet,
    find_without_state,
    select_row_records,
)
from jobs.state.reorder_buffer import LastSeenIndex
from kalman.run import Outputs

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def build_ids_layout(kind: KeyKind, row_id: RowId) -> Layout:
    """Return the layout of entries: 24 bytes if key and id are integers, 32 or 40 if one or both are texts."""
    columns = (*kind.identity_columns, PacketColumn("time", "<i8"), PacketColumn("id", "<i8", row_id.width))
    return Layout(columns, text=False)


def build_ids_format(spec: ModelSpec, fmt: RowFormat) -> StateFormat | None:
    """Return the storage format of a model's row ids in the stream's state; None if the rows have no ids."""
    if fmt.row_id is None:
        return None
    meaning = {
        "model": spec.name,
        "version": spec.version,
        "ids": fmt.row_id.column,
        "whole": fmt.row_id.integer,
        "key": dict(zip(fmt.kind.columns, fmt.kind.types, strict=True)),
    }
    return build_format(meaning, build_ids_layout(fmt.kind, fmt.row_id))


def build_entries(keyed: KeyedRows, which: Bools | None = None) -> Records:
    """Return entries for the rows with an id, ordered by route; a mask `which` selects rows, None means all rows."""
    assert keyed.ids is not None
    named = keyed.ids.arrays["named"].astype(bool)
    taken = np.flatnonzero(named if which is None else named & which)
    owners = keyed.keys.take(keyed.rows.key[taken])
    arrays = {**owners.arrays, "time": keyed.rows.time[taken], "id": keyed.ids.arrays["id"][:, taken]}
    return Records(arrays, None)


def is_in_reach(entries: Records, within: int, floor: int, floors: Ints | None = None) -> Bools:
    """Return a mask (N,) of the entries that a future row may repeat.

    Args:
        entries: all entries of some keys, ordered by route.
        within: maximum difference between the event times of a row and its duplicate, in microseconds.
        floor: event time; no future row is earlier. `NEVER` if unknown.
        floors: (N,) the same limit for the key of each entry; None means the time of the key's newest entry.
    """
    time = entries.arrays["time"]
    if len(time) == 0:
        return np.zeros(0, bool)
    if floors is None:
        # Entries of keys that share a route may alternate. Then each run of equal keys counts as a separate key, and
        # more entries are kept.
        starts = find_starts(*(entries.arrays[name] for name in ("route", "check") if name in entries.arrays))
        newest = np.maximum.reduceat(time, np.flatnonzero(starts))
        floors = newest[np.cumsum(starts) - 1]
    floors = np.maximum(floors, floor)
    return (floors == NEVER) | (time >= np.where(floors == NEVER, 0, floors) - within)


class IdComparison(NamedTuple):
    """Rows after a comparison with the entries of their keys.

    rows: N rows of K keys
    floors: (K,) event time before which a row of the key is late, or `NEVER`
    repeats: (N,) whether the row repeats another row
    present, entries: block numbers of the keys, and the entries in these blocks
    """

    rows: KeyedRows
    floors: Ints
    repeats: Bools
    present: Ints
    entries: Records

    @property
    def late(self) -> Bools:
        """Return a mask (N,) of the late rows."""
        return self.rows.rows.time < self.floors[self.rows.rows.key]


class Checked(NamedTuple):
    """Rows after the check: the `kept` rows, packets with the duplicates, and the comparison for `remember`."""

    kept: KeyedRows
    duplicates: Sequence[Packet] = ()
    compared: IdComparison | None = None


class RowIdCheck:
    """The check for a model whose rows have no ids; it keeps all rows and remembers nothing."""

    index = LastSeenIndex()
    """Time of the oldest entry in each block."""

    def seed(self, packets: Iterable[bytes]) -> None:
        """Add the entries in a snapshot's packets."""

    def check_late(self, rows: Records) -> tuple[Records, Sequence[Packet]]:
        """Return the late rows that repeat no other row, and packets with the duplicates."""
        return rows, ()

    def check(self, keyed: KeyedRows, *states: Records) -> Checked:
        """Compare rows with the remembered rows and with each other.

        Args:
            keyed: the rows to check.
            states: state records; a row older than the state of its key is late. If several records have the same key,
                the last record is used.
        """
        return Checked(keyed)

    def remember(self, checked: Checked, keyed: KeyedRows, outputs: Outputs, floor: int | None) -> None:
        """Remember the ids of the checked rows that were not refused, and remove entries that are out of reach.

        Args:
            checked: the result of `check`.
            keyed: the rows that the filter has applied or refused.
            outputs: the filter's outputs for these rows.
            floor: event time; no future row is earlier. None means that the state of each key sets the limit.
        """

    def sweep(self, floor: int) -> None:
        """Remove entries of silent keys; no future row is earlier than the event time `floor`."""


class DuplicateIds(RowIdCheck):
    """The check of a bucket's rows by their ids, with blocks of entries (`jobs.state.row_ids`)."""

    def __init__(self, plan: Plan, blocks: Blocks, within: int, index: LastSeenIndex) -> None:
        self.plan, self.blocks, self.within, self.index = plan, blocks, within, index

    def seed(self, packets: Iterable[bytes]) -> None:
        """Add the entries in a snapshot's packets."""
        decoded = [self.blocks.state.layout.decode(packet) for packet in packets]
        if decoded:
            self._update(*self.blocks.add(join_records(decoded)))

    def check_late(self, rows: Records) -> tuple[Records, Sequence[Packet]]:
        """Return the late rows that repeat no other row, and packets with the duplicates."""
        keyed = sort_by_key(rows, self.plan.rows)
        repeats = self._compare(keyed, np.full(keyed.keys.size, np.iinfo(np.int64).max)).repeats
        if not repeats.any():
            return rows, ()
        return select_row_records(keyed, np.flatnonzero(~repeats)), [self._packet(keyed, repeats)]

    def check(self, keyed: KeyedRows, *states: Records) -> Checked:
        """Compare rows with the remembered rows and with each other."""
        compared = self._compare(keyed, find_newest_times(keyed.keys, *states))
        repeats = compared.repeats
        if not repeats.any():
            return Checked(keyed, (), compared)
        kept = select_rows(keyed, np.flatnonzero(~repeats))
        return Checked(kept, [self._packet(keyed, repeats)], compared)

    def remember(self, checked: Checked, keyed: KeyedRows, outputs: Outputs, floor: int | None) -> None:
        """Remember the ids of the checked rows that were not refused, and remove entries that are out of reach."""
        assert checked.compared is not None
        compared = checked.compared
        rows, present = compared.rows, compared.present
        # A row of a key without a state is refused, and so are the duplicates of this row.
        routes = keyed.keys.arrays["route"][keyed.rows.key[find_without_state(outputs)]]
        bad = np.isin(rows.keys.arrays["route"], routes)[rows.rows.key]
        entries = merge_records(compared.entries, build_entries(rows, ~compared.late & ~bad))
        own = None
        if floor is None:
            at = match(rows.keys, entries)
            floor, own = NEVER, np.where(at >= 0, compared.floors[at], NEVER)
        left = entries.take(np.flatnonzero(is_in_reach(entries, self.within, floor, own)))
        self.blocks.save(present, left)
        self._update(present, left)

    def sweep(self, floor: int) -> None:
        """Remove entries of silent keys.

        A block is read when its oldest entry is more than twice `within` older than `floor`, so at most once in a time
        span of `within`.
        """
        present = self.index.expired_before(NEVER if floor == NEVER else floor - 2 * self.within)
        if len(present) == 0:
            return
        known = self.blocks.read(present)
        left = known.take(np.flatnonzero(is_in_reach(known, self.within, floor, np.full(known.size, NEVER))))
        self.blocks.save(present, left)
        self._update(present, left)

    def _compare(self, keyed: KeyedRows, floors: Ints) -> IdComparison:
        present, known = self.blocks.load(keyed.keys.arrays["route"])
        at = match(keyed.keys, known)
        mine = np.flatnonzero(at >= 0)
        held = Marks(at[mine], known.arrays["id"][:, mine], known.arrays["time"][mine])
        marks, named = build_marks(keyed)
        compared = IdComparison(keyed, floors, np.zeros(len(keyed.rows.key), bool), present, known)
        compared.repeats[named] = find_resent(marks, self.within, held, compared.late[named])
        return compared

    def _packet(self, keyed: KeyedRows, repeats: Bools) -> Packet:
        return build_duplicate_packet(self.plan, OutputPacket.DUPLICATE_ID, keyed, np.flatnonzero(repeats))

    def _update(self, present: Ints, entries: Records) -> None:
        arrays = entries.arrays
        self.index = self.index.update(present, arrays["route"], arrays["time"], self.blocks.blocks)


def build_row_id_check(plan: Plan, stores: Stores, index: LastSeenIndex) -> RowIdCheck:
    """Return the check for the rows of a bucket: `DuplicateIds` if the rows have ids, else `RowIdCheck`."""
    row_id, policy = plan.rows.row_id, plan.event_time
    if row_id is None or policy is None or policy.id_format is None or stores.row_ids is None:
        return RowIdCheck()
    return DuplicateIds(plan, Blocks(stores.row_ids, policy.id_format, plan.blocks), row_id.within, index)
