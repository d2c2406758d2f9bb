"""The check of row ids: a stage of a bucket before its rows are filtered or replayed. No Spark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jobs.encoding.keys import match
from jobs.encoding.packet_kinds import NEVER, OutputPacket
from jobs.encoding.packets import Records, concat, merged
from jobs.encoding.rows import KeyedRows, keyed_rows
from jobs.state.block_store import Blocks
from jobs.state.distinct import chosen, marks_of
from jobs.state.duplicates import Marks, resent
from jobs.state.event_time_policy import Stores
from jobs.state.filter_step import newest_times
from jobs.state.last_seen_index import LastSeenIndex
from jobs.state.plan import Packet, Plan, duplicate_packet, some_rows, without_state
from jobs.state.row_ids import Bools, Ints, entries_of, in_reach
from kalman.run import Outputs


class Compared(NamedTuple):
    """Rows that were compared with the entries of their keys.

    rows: N rows of K keys
    floors: (K,) event time before which a row of each key is late, `NEVER` where none is
    repeats: (N,) which of them repeat another
    present, entries: block numbers of the keys, and their entries
    """

    rows: KeyedRows
    floors: Ints
    repeats: Bools
    present: Ints
    entries: Records

    @property
    def late(self) -> Bools:
        """Return which rows (N,) are late."""
        return self.rows.rows.time < self.floors[self.rows.rows.key]


class Checked(NamedTuple):
    """Rows after the check: those that are `kept`, packets of the duplicates, and what `remember` needs."""

    kept: KeyedRows
    duplicates: Sequence[Packet] = ()
    compared: Compared | None = None


class RowIdCheck:
    """The check for rows without ids: it keeps all rows and remembers nothing."""

    index = LastSeenIndex()
    """For each block of entries the time of the oldest one."""

    def seed(self, packets: Iterable[bytes]) -> None:
        """Add the entries of a snapshot."""

    def check_late(self, rows: Records) -> tuple[Records, Sequence[Packet]]:
        """Return the late rows that repeat no other, and packets of the duplicates."""
        return rows, ()

    def check(self, keyed: KeyedRows, *states: Records) -> Checked:
        """Compare rows with those remembered and with each other.

        Args:
            keyed: the rows.
            states: state records; a row that is older than its key's state is late. Of several the last ones count.
        """
        return Checked(keyed)

    def remember(self, checked: Checked, keyed: KeyedRows, outputs: Outputs, floor: int | None) -> None:
        """Remember the ids of the rows that were checked and not refused, and remove entries that are out of reach.

        Args:
            checked: the result of `check`.
            keyed: the rows that were filtered.
            outputs: of these rows.
            floor: no future row is earlier than this time; None: each key has its own, by its state.
        """

    def sweep(self, floor: int) -> None:
        """Remove entries of silent keys; no future row is earlier than the time `floor`."""


class DuplicateIds(RowIdCheck):
    """The check of a bucket's rows by their ids, over blocks of entries (`jobs.state.row_ids`)."""

    def __init__(self, plan: Plan, blocks: Blocks, within: int, index: LastSeenIndex) -> None:
        self.plan, self.blocks, self.within, self.index = plan, blocks, within, index

    def seed(self, packets: Iterable[bytes]) -> None:
        """Add the entries of a snapshot."""
        decoded = [self.blocks.state.layout.decode(packet) for packet in packets]
        if decoded:
            self._update(*self.blocks.add(concat(decoded)))

    def check_late(self, rows: Records) -> tuple[Records, Sequence[Packet]]:
        """Return the late rows that repeat no other, and packets of the duplicates."""
        keyed = keyed_rows(rows, self.plan.rows)
        repeats = self._compare(keyed, np.full(keyed.keys.size, np.iinfo(np.int64).max)).repeats
        if not repeats.any():
            return rows, ()
        return some_rows(keyed, np.flatnonzero(~repeats)), [self._packet(keyed, repeats)]

    def check(self, keyed: KeyedRows, *states: Records) -> Checked:
        """Compare rows with those remembered and with each other."""
        compared = self._compare(keyed, newest_times(keyed.keys, *states))
        repeats = compared.repeats
        if not repeats.any():
            return Checked(keyed, (), compared)
        kept = chosen(keyed, np.flatnonzero(~repeats))
        return Checked(kept, [self._packet(keyed, repeats)], compared)

    def remember(self, checked: Checked, keyed: KeyedRows, outputs: Outputs, floor: int | None) -> None:
        """Remember the ids of the rows that were checked and not refused, and remove entries that are out of reach."""
        assert checked.compared is not None
        compared = checked.compared
        rows, present = compared.rows, compared.present
        # Rows of a key without a state are refused, duplicates too.
        routes = keyed.keys.arrays["route"][keyed.rows.key[without_state(outputs)]]
        bad = np.isin(rows.keys.arrays["route"], routes)[rows.rows.key]
        entries = merged(compared.entries, entries_of(rows, ~compared.late & ~bad))
        own = None
        if floor is None:
            at = match(rows.keys, entries)
            floor, own = NEVER, np.where(at >= 0, compared.floors[at], NEVER)
        left = entries.take(np.flatnonzero(in_reach(entries, self.within, floor, own)))
        self.blocks.replace(present, left)
        self._update(present, left)

    def sweep(self, floor: int) -> None:
        """Remove entries of silent keys.

        A block is read when its oldest entry is twice as old as it has to be: at most once in `within`.
        """
        present = self.index.expired_before(NEVER if floor == NEVER else floor - 2 * self.within)
        if len(present) == 0:
            return
        known = self.blocks.read(present)
        left = known.take(np.flatnonzero(in_reach(known, self.within, floor, np.full(known.size, NEVER))))
        self.blocks.replace(present, left)
        self._update(present, left)

    def _compare(self, keyed: KeyedRows, floors: Ints) -> Compared:
        present, known = self.blocks.load(keyed.keys.arrays["route"])
        at = match(keyed.keys, known)
        mine = np.flatnonzero(at >= 0)
        held = Marks(at[mine], known.arrays["id"][:, mine], known.arrays["time"][mine])
        marks, named = marks_of(keyed)
        compared = Compared(keyed, floors, np.zeros(len(keyed.rows.key), bool), present, known)
        compared.repeats[named] = resent(marks, self.within, held, compared.late[named])
        return compared

    def _packet(self, keyed: KeyedRows, repeats: Bools) -> Packet:
        return duplicate_packet(self.plan, OutputPacket.DUPLICATE_ID, keyed, np.flatnonzero(repeats))

    def _update(self, present: Ints, entries: Records) -> None:
        arrays = entries.arrays
        self.index = self.index.update(present, arrays["route"], arrays["time"], self.blocks.blocks)


def row_id_check(plan: Plan, stores: Stores, index: LastSeenIndex) -> RowIdCheck:
    """Return the check of a bucket's rows."""
    row_id, policy = plan.rows.row_id, plan.event_time
    if row_id is None or policy is None or policy.id_format is None or stores.row_ids is None:
        return RowIdCheck()
    return DuplicateIds(plan, Blocks(stores.row_ids, policy.id_format, plan.blocks), row_id.within, index)
