"""Rows of a bucket that wait for the watermark, in parts by time: a row is written about once, and read when it is due.

Time is cut into slots, a quarter of the watermark's delay each. What a micro-batch leaves waiting in a slot is one
part, a value of its own in the store; an index of the parts says which are due. So neither what waits nor how many keys
there are costs anything in a micro-batch, only what comes and what is due.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.packet_kinds import NEVER
from jobs.encoding.packets import Column, Layout, Records, concat
from jobs.encoding.rows import RowFormat
from jobs.state.block_format import StateFormat, format_of
from jobs.state.block_store import Store

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec

SLOTS = 4
"""Slots in the delay."""
MANY = 32
"""Parts of a slot that are joined into one."""

PARTS = Layout(
    (Column("part", "<i8"), Column("slot", "<i8"), Column("first", "<i8"), Column("rows", "<i8")), text=False
)
IDLE = Layout((Column("block", "<i8"), Column("oldest", "<i8")), text=False)
_MAGIC = b"KCL1"
_PREFIX = struct.Struct("<4s4xqqqq")  # magic, watermark, newest, came, bytes of the parts


class Clock(NamedTuple):
    """What a bucket knows of time.

    watermark: microseconds, it never goes back; parts: index of what waits, with each part's number, slot, earliest
    time and number of rows; idle: for each block of states the earliest sign of life in it, where keys expire; newest:
    event time of all rows; came: when, by the machine's clock, the last of them did; ids: for each block the time of
    its oldest remembered id, where repetitions are told by ids.
    """

    watermark: int
    parts: Records
    idle: Records = IDLE.empty()
    newest: int = NEVER
    came: int = NEVER
    ids: Records = IDLE.empty()

    def encode(self) -> bytes:
        """Return the clock as one value."""
        parts = PARTS.encode(self.parts)
        prefix = _PREFIX.pack(_MAGIC, self.watermark, self.newest, self.came, len(parts))
        return b"".join(
            [prefix, parts, IDLE.encode(self.idle), IDLE.encode(self.ids) if self.ids.size else b""]
        )

    @classmethod
    def decode(cls, value: bytes) -> Clock:
        """Return the clock that a value holds."""
        magic, watermark, newest, came, length = _PREFIX.unpack_from(value)
        if magic != _MAGIC:
            raise ValueError(f"a bucket's clock begins with {magic!r}, not with {_MAGIC!r}")
        idle = IDLE.decode(value, _PREFIX.size + length)
        rest = _PREFIX.size + length + len(IDLE.encode(idle))
        ids = IDLE.decode(value, rest) if len(value) > rest else IDLE.empty()
        return cls(watermark, PARTS.decode(value, _PREFIX.size), idle, newest, came, ids)


@dataclass
class ReorderBuffer:
    """The rows that wait.

    Attributes:
        store: of the parts.
        fmt: how rows are stored.
        delay: of the watermark, in microseconds.
        parts: the index.
    """

    store: Store
    fmt: StateFormat
    delay: int
    parts: Records

    @property
    def count(self) -> int:
        """Return how many rows wait."""
        return int(self.parts.arrays["rows"].sum())

    def add(self, rows: Records) -> None:
        """Let rows wait."""
        if rows.size == 0:
            return
        slot = rows.arrays["time"] // max(self.delay // SLOTS, 1)
        order = np.argsort(slot, kind="stable")
        slots, starts = np.unique(slot[order], return_index=True)
        stops = [*starts[1:].tolist(), len(order)]
        ordered = rows.take(order)
        for number, start, stop in zip(slots.tolist(), starts.tolist(), stops, strict=True):
            part = ordered.slice(start, stop)
            there = self.parts.arrays["slot"] == number
            if np.count_nonzero(there) >= MANY:
                part = concat([*self._take(there), part])
            self._put(number, part)

    def release(self, before: int) -> Records:
        """Return the rows that are before a time; they wait no longer."""
        due = self.parts.arrays["first"] < before
        if not due.any():
            return self.fmt.layout.empty()
        slots = self.parts.arrays["slot"][due].tolist()
        ready: list[Records] = []
        early: dict[int, list[Records]] = {}
        for slot, rows in zip(slots, self._take(due), strict=True):
            passed = rows.arrays["time"] < before
            ready.append(rows.take(np.flatnonzero(passed)))
            if not passed.all():
                early.setdefault(slot, []).append(rows.take(np.flatnonzero(~passed)))
        for slot, left in early.items():
            self._put(slot, concat(left))
        return concat(ready)

    def _take(self, which: NDArray[np.bool_]) -> list[Records]:
        """Read and remove the parts that `which` (P,) marks."""
        taken = []
        for number in self.parts.arrays["part"][which].tolist():
            value = self.store.get(number)
            if value is None:
                raise ValueError(f"part {number} of the waiting rows is missing from the state")
            taken.append(self.fmt.decode(value))
            self.store.remove(number)
        self.parts = self.parts.take(np.flatnonzero(~which))
        return taken

    def _put(self, slot: int, rows: Records) -> None:
        number = int(self.parts.arrays["part"].max(initial=-1)) + 1
        self.store.put(number, self.fmt.encode(rows))
        entry = {"part": number, "slot": slot, "first": rows.arrays["time"].min(), "rows": rows.size}
        one = Records({name: np.array([value], np.int64) for name, value in entry.items()}, None)
        self.parts = concat([self.parts, one])


def row_format_of(spec: ModelSpec, fmt: RowFormat) -> StateFormat:
    """Return how a model's waiting rows are stored in the stream's state."""
    meaning = {
        "model": spec.name,
        "version": spec.version,
        "waiting": [
            fmt.time,
            *fmt.measurement,
            *fmt.control,
            *([] if fmt.row_id is None else [fmt.row_id.column]),
        ],
        "key": dict(zip(fmt.kind.columns, fmt.kind.types, strict=True)),
    }
    return format_of(meaning, fmt.layout)
