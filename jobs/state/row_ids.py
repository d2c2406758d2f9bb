"""The ids of the rows that a bucket has applied, as far back as a duplicate may still come.

An entry is a key, an id and a time; a duplicate has one too, as the next duplicate is compared with it. Entries are
stored in the same blocks as the states of their keys, so that a micro-batch reads and writes those of its own keys.
An entry is removed when no row can come any more that is near enough in time. To keep it longer changes nothing, since
times are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.keys import KeyKind
from jobs.encoding.order import starts_of
from jobs.encoding.packet_kinds import NEVER
from jobs.encoding.packets import Column, Layout, Records
from jobs.encoding.rows import KeyedRows, RowFormat, RowId
from jobs.state.block_format import StateFormat, format_of

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def ids_layout(kind: KeyKind, row_id: RowId) -> Layout:
    """Return the layout of entries: 24 bytes where key and id are whole numbers, 32 or 40 where they are texts."""
    columns = (*kind.identity_columns, Column("time", "<i8"), Column("id", "<i8", row_id.width))
    return Layout(columns, text=False)


def ids_format(spec: ModelSpec, fmt: RowFormat) -> StateFormat | None:
    """Return how a model's row ids are stored in the stream's state, None where its rows have none."""
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
    """Return the entries of the rows with an id, or of some of them, ordered by route."""
    assert keyed.ids is not None
    named = keyed.ids.arrays["named"].astype(bool)
    taken = np.flatnonzero(named if which is None else named & which)
    owners = keyed.keys.take(keyed.rows.key[taken])
    arrays = {**owners.arrays, "time": keyed.rows.time[taken], "id": keyed.ids.arrays["id"][:, taken]}
    return Records(arrays, None)


def in_reach(entries: Records, within: int, floor: int, floors: Ints | None = None) -> Bools:
    """Return which entries (N,) of whole keys a future row may repeat.

    Args:
        entries: ordered by route.
        within: how far apart the times of a row and its duplicate may be, in microseconds.
        floor: no future row is earlier than this time; `NEVER` if unknown.
        floors: (N,) the same for each entry's key; by default the key's newest entry.
    """
    time = entries.arrays["time"]
    if len(time) == 0:
        return np.zeros(0, bool)
    if floors is None:
        # Entries of keys that share a route may alternate; each stretch then counts as a key, and more is kept.
        starts = starts_of(*(entries.arrays[name] for name in ("route", "check") if name in entries.arrays))
        newest = np.maximum.reduceat(time, np.flatnonzero(starts))
        floors = newest[np.cumsum(starts) - 1]
    floors = np.maximum(floors, floor)
    return (floors == NEVER) | (time >= np.where(floors == NEVER, 0, floors) - within)
