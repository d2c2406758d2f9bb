"""What the operator of a stream with a watermark knows of time, where it keeps what it knows, and what it puts out."""

from __future__ import annotations

from typing import NamedTuple

from jobs.encoding.packet_kinds import NEVER
from jobs.state.block_format import StateFormat
from jobs.state.block_store import Store


class EventTimePolicy(NamedTuple):
    """What a timed operator knows of time.

    delay: of the watermark in microseconds; rows: how waiting rows are stored; watermark: where a bucket's begins, as
    the snapshot left it; waits: rows wait for it; drop: rows that repeat another are counted and forgotten; idle:
    microseconds of silence after which a key ends, None: never; archive: it comes back as it was; ring: rows of each
    key that are kept for replay, 0: none; machine: silence is told by the machine's clock; patience: microseconds
    without any row after which nothing waits any longer, None: it does; newest: event time that the snapshot knows;
    ids: how remembered ids are stored, None: repetitions are not told by ids.
    """

    delay: int
    rows: StateFormat
    watermark: int = NEVER
    waits: bool = True
    drop: bool = False
    idle: int | None = None
    archive: bool = False
    ring: int = 0
    machine: bool = False
    patience: int | None = None
    newest: int = NEVER
    ids: StateFormat | None = None

    @property
    def wakes(self) -> bool:
        """Tell if the machine's clock decides anything."""
        return self.machine or self.patience is not None

    def reach(self, watermark: int) -> int:
        """Return the time before which a row is too late whatever its key."""
        if watermark == NEVER or self.waits:
            return watermark
        return NEVER if self.idle is None or self.archive or self.machine else watermark - self.idle


class Stores(NamedTuple):
    """Where a bucket keeps its blocks of states, its parts of waiting rows, and the blocks of keys that have ended; for
    replay the kept rows of each block, and the states before them; when rows of its keys came, where that counts; the
    ids of rows, where repetitions are told by them."""

    blocks: Store
    parts: Store
    ended: Store
    ring: Store
    base: Store
    seen: Store
    ids: Store | None = None
