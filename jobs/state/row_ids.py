"""The ids of the rows that a bucket has taken, as far back as a repetition of one may still come.

An entry is a key, an id and a time, also of a row that was told to repeat another: from it the next one is reckoned.
Entries are kept with their keys, in the same blocks as the states, so a micro-batch reads and writes those of the keys
that it has rows for. They are let go when no row can come any more that is near enough in time: for keys that have rows
at once, for silent ones when the watermark has left a whole block's oldest entry far behind. That an entry is kept for
longer than it is needed changes nothing, as times are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.keys import KeyKind, match
from jobs.encoding.packet_kinds import NEVER
from jobs.encoding.packets import Column, Layout, Records, concat
from jobs.encoding.rows import KeyedRows, RowFormat, RowId
from jobs.state.block_format import StateFormat, format_of
from jobs.state.block_store import Blocks, due, touched
from jobs.state.distinct import marks_of
from jobs.state.duplicates import Marks, resent

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def ids_layout(kind: KeyKind, row_id: RowId) -> Layout:
    """Return the layout of entries: 24 bytes where key and id are whole numbers, 32 or 40 where they are texts."""
    columns = (*kind.identity_columns, Column("time", "<i8"), Column("id", "<i8", row_id.width))
    return Layout(columns, text=False)


def ids_format(spec: ModelSpec, fmt: RowFormat) -> StateFormat | None:
    """Return how a model's ids are stored in the stream's state, None where its rows have none."""
    if fmt.row_id is None:
        return None
    meaning = {
        "model": spec.name,
        "version": spec.version,
        "ids": fmt.row_id.column,
        "whole": fmt.row_id.integer,
        "key": dict(zip(fmt.kind.columns, fmt.kind.types, strict=True)),
    }
    return format_of(meaning, ids_layout(fmt.kind, fmt.row_id))


def entries_of(keyed: KeyedRows, which: Bools | None = None) -> Records:
    """Return the entries of those rows that have an id, or of some of them, ordered by route."""
    assert keyed.ids is not None
    named = keyed.ids.arrays["named"].astype(bool)
    taken = np.flatnonzero(named if which is None else named & which)
    owners = keyed.keys.take(keyed.rows.key[taken])
    arrays = {**owners.arrays, "time": keyed.rows.time[taken], "id": keyed.ids.arrays["id"][:, taken]}
    return Records(arrays, None)


def in_reach(entries: Records, within: int, floor: int, floors: Ints | None = None) -> Bools:
    """Return which entries (N,) of whole keys a row that is still to come may repeat.

    Args:
        entries: ordered by route.
        within: how far apart the times of a row and its repetition may be, in microseconds.
        floor: no row of any key will come from before that time; `NEVER`: that is not known.
        floors: (N,) the same of each entry's key; by default the key's newest entry.
    """
    time = entries.arrays["time"]
    if len(time) == 0:
        return np.zeros(0, bool)
    if floors is None:
        # Keys that share a route may alternate; each stretch is then taken for a key, and keeps rather more.
        starts = np.zeros(len(time), bool)
        starts[0] = True
        for name in ("route", "check"):
            if name in entries.arrays:
                starts[1:] |= entries.arrays[name][1:] != entries.arrays[name][:-1]
        newest = np.maximum.reduceat(time, np.flatnonzero(starts))
        floors = newest[np.cumsum(starts) - 1]
    floors = np.maximum(floors, floor)
    return (floors == NEVER) | (time >= np.where(floors == NEVER, 0, floors) - within)


class Told(NamedTuple):
    """What the ids say of rows: again (N,) which repeat another; and of their keys' blocks, their numbers `present`
    and the entries `known`."""

    again: Bools
    present: Ints
    known: Records


@dataclass
class RememberedIds:
    """The ids of a bucket.

    Attributes:
        blocks: of entries.
        within: how far apart the times of a row and its repetition may be, in microseconds.
        oldest: for each block the time of its oldest entry (`jobs.state.block_store`), where silent keys are let go.
    """

    blocks: Blocks
    within: int
    oldest: Records

    def seed(self, packets: Iterable[bytes]) -> None:
        """Take over packets of entries from a snapshot."""
        decoded = [self.blocks.state.layout.decode(packet) for packet in packets]
        if decoded:
            self._note(*self.blocks.add(concat(decoded)))

    def tell(self, keyed: KeyedRows, late: Bools) -> Told:
        """Say which rows repeat another, of those remembered or among themselves.

        Args:
            keyed: the rows.
            late: (N,) which are refused in any case.
        """
        present, known = self.blocks.load(keyed.keys.arrays["route"])
        at = match(keyed.keys, known)
        mine = np.flatnonzero(at >= 0)
        held = Marks(at[mine], known.arrays["id"][:, mine], known.arrays["time"][mine])
        marks, named = marks_of(keyed)
        again = np.zeros(len(keyed.rows.key), bool)
        again[named] = resent(marks, self.within, held, late[named])
        return Told(again, present, known)

    def remember(
        self, told: Told, keyed: KeyedRows, which: Bools, floor: int, floors: Ints | None = None
    ) -> None:
        """Keep the ids of some rows (N,) of those that `tell` was asked of, and let go of what is out of reach.

        Args:
            told: what it said.
            keyed: the rows.
            which: (N,) those that are not refused.
            floor: no row of any key will come from before that time.
            floors: (K,) the same of each key; by default its newest row.
        """
        entries = concat([told.known, entries_of(keyed, which)])
        entries = entries.take(np.argsort(entries.arrays["route"], kind="stable"))
        of_each = None
        if floors is not None:
            at = match(keyed.keys, entries)
            of_each = np.where(at >= 0, floors[at], NEVER)
        left = entries.take(np.flatnonzero(in_reach(entries, self.within, floor, of_each)))
        self.blocks.replace(told.present, left)
        self._note(told.present, left)

    def sweep(self, floor: int) -> None:
        """Let go of the ids of silent keys, once no row of any key will come from before a time.

        A block is looked at when its oldest entry is twice as old as it has to be: once in `within` at most.
        """
        present = due(self.oldest, NEVER if floor == NEVER else floor - 2 * self.within)
        if len(present) == 0:
            return
        known = self.blocks.read(present)
        every = np.full(known.size, NEVER)
        left = known.take(np.flatnonzero(in_reach(known, self.within, floor, every)))
        self.blocks.replace(present, left)
        self._note(present, left)

    def _note(self, present: Ints, entries: Records) -> None:
        arrays = entries.arrays
        self.oldest = touched(self.oldest, present, arrays["route"], arrays["time"], self.blocks.blocks)
