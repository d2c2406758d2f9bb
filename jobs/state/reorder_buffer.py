"""The reorder buffer of a bucket: rows that wait for the watermark, in parts by event time.

Time is cut into slots of a quarter of the watermark's delay. The rows of one micro-batch and slot form a part, which is
one value in the store. An index finds the parts that are due. So a row is written about once, and read when it is due.
The cost of a micro-batch depends neither on the number of waiting rows nor on the number of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jobs.state.block_format import StateFormat, build_format
from jobs.state.block_store import Store
from jobs.state.encoding.packets import Layout, PacketColumn, Records, join_records
from jobs.state.encoding.rows import RowFormat

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec

SLOTS = 4
"""Number of slots in the watermark's delay."""
MANY = 32
"""Number of parts in a slot from which the parts are joined into one part."""

PARTS = Layout(
    (
        PacketColumn("part", "<i8"),
        PacketColumn("slot", "<i8"),
        PacketColumn("first", "<i8"),
        PacketColumn("rows", "<i8"),
    ),
    text=False,
)
"""The index with, for each part, its number in the store, its slot, its earliest event time and its number of rows."""


@dataclass
class ReorderBuffer:
    """The waiting rows of a bucket.

    Attributes:
        store: store of the parts.
        fmt: storage format of rows.
        delay: delay of the watermark, in microseconds.
        parts: index (`PARTS`) of the P parts.
    """

    store: Store
    fmt: StateFormat
    delay: int
    parts: Records

    @property
    def count(self) -> int:
        """Return the number of waiting rows."""
        return int(self.parts.arrays["rows"].sum())

    def add(self, rows: Records) -> None:
        """Add rows, in any order."""
        if rows.size == 0:
            return
        slot = rows.arrays["time"] // max(self.delay // SLOTS, 1)
        order = np.argsort(slot, kind="stable")
        slots, starts = np.unique(slot[order], return_index=True)
        stops = [*starts[1:].tolist(), len(order)]
        ordered = rows.take(order)
        for number, start, stop in zip(slots.tolist(), starts.tolist(), stops, strict=True):
            part = ordered.slice(start, stop)
            same_slot = self.parts.arrays["slot"] == number
            if np.count_nonzero(same_slot) >= MANY:
                part = join_records([*self._remove(same_slot), part])
            self._put(number, part)

    def release(self, before: int) -> Records:
        """Remove the rows whose event time is before `before`, and return these rows in any order."""
        due = self.parts.arrays["first"] < before
        if not due.any():
            return self.fmt.layout.empty()
        slots = self.parts.arrays["slot"][due].tolist()
        ready: list[Records] = []
        early: dict[int, list[Records]] = {}
        for slot, rows in zip(slots, self._remove(due), strict=True):
            passed = rows.arrays["time"] < before
            ready.append(rows.take(np.flatnonzero(passed)))
            if not passed.all():
                early.setdefault(slot, []).append(rows.take(np.flatnonzero(~passed)))
        for slot, left in early.items():
            self._put(slot, join_records(left))
        return join_records(ready)

    def _remove(self, which: NDArray[np.bool_]) -> list[Records]:
        """Read and remove the parts under the mask `which` (P,)."""
        removed = []
        for number in self.parts.arrays["part"][which].tolist():
            value = self.store.get(number)
            if value is None:
                raise ValueError(f"part {number} of the waiting rows is missing from the state")
            removed.append(self.fmt.decode(value))
            self.store.remove(number)
        self.parts = self.parts.take(np.flatnonzero(~which))
        return removed

    def _put(self, slot: int, rows: Records) -> None:
        number = int(self.parts.arrays["part"].max(initial=-1)) + 1
        self.store.put(number, self.fmt.encode(rows))
        entry = {"part": number, "slot": slot, "first": rows.arrays["time"].min(), "rows": rows.size}
        one = Records({name: np.array([value], np.int64) for name, value in entry.items()}, None)
        self.parts = join_records([self.parts, one])


def build_waiting_format(spec: ModelSpec, fmt: RowFormat) -> StateFormat:
    """Return the storage format of a model's waiting rows in the stream's state."""
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
    return build_format(meaning, fmt.layout)
