"""The event-time policy of a model, and the stores of a bucket of its stream."""

from __future__ import annotations

from typing import NamedTuple

from jobs.state.block_format import StateFormat
from jobs.state.block_store import Store
from jobs.state.encoding.packets import NEVER


class EventTimePolicy(NamedTuple):
    """When rows are applied, when keys expire, and the times of the snapshot. Times are in microseconds.

    delay: delay of the watermark
    row_format: storage format of waiting rows
    watermark, max_event_time: values of the snapshot, from which a bucket begins
    waits: rows wait for the watermark
    drop_duplicates: duplicates are counted and forgotten, not quarantined
    idle: silence after which a key expires; None: keys do not expire
    archive: an expired key comes back with its last state
    replay_length: number of rows per key that are kept for replay; 0: late rows are not replayed
    processing_time: silence is measured by the machine's clock
    patience: time without rows, by the machine's clock, after which waiting rows are released; None: they wait on
    id_format: storage format of row ids; None: rows have no ids
    """

    delay: int
    row_format: StateFormat
    watermark: int = NEVER
    max_event_time: int = NEVER
    waits: bool = True
    drop_duplicates: bool = False
    idle: int | None = None
    archive: bool = False
    replay_length: int = 0
    processing_time: bool = False
    patience: int | None = None
    id_format: StateFormat | None = None

    @property
    def needs_timers(self) -> bool:
        """Return whether the policy depends on the machine's clock."""
        return self.processing_time or self.patience is not None

    @property
    def idle_between_rows(self) -> int | None:
        """Return the silence between two rows of a key after which the key begins anew, or None."""
        return None if self.archive or self.processing_time else self.idle

    def late_before(self, watermark: int) -> int:
        """Return the event time before which a row of any key is late."""
        if watermark == NEVER or self.waits:
            return watermark
        idle = self.idle_between_rows
        return NEVER if idle is None else watermark - idle


class Stores(NamedTuple):
    """The stores of a bucket.

    blocks: states of keys
    parts: rows of the reorder buffer
    ended: states of expired keys, if these can come back
    replay_rows, replay_base: rows of each key that are kept for replay, and the states before them
    last_seen: arrival time of each key's last row, if the machine's clock measures silence
    row_ids: row ids, if rows have ids
    """

    blocks: Store
    parts: Store
    ended: Store
    replay_rows: Store
    replay_base: Store
    last_seen: Store
    row_ids: Store | None = None
