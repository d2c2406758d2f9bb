"""The event-time policy of a model, and the stores of a bucket of its stream."""

from __future__ import annotations

from typing import NamedTuple

from jobs.encoding.packet_kinds import NEVER
from jobs.state.block_format import StateFormat
from jobs.state.block_store import Store


class EventTimePolicy(NamedTuple):
    """When rows are applied, when keys expire, and what the snapshot knew of time. Times are in microseconds.

    delay: of the watermark
    row_format: how waiting rows are stored
    watermark, max_event_time: of the snapshot, where a bucket begins
    waits: rows wait for the watermark
    drop_duplicates: duplicates are counted and forgotten, not quarantined
    idle: silence after which a key expires; None: no key does
    archive: an expired key comes back with its last state
    replay_length: rows of each key that are kept for replay; 0: late rows are not replayed
    processing_time: silence is measured by the machine's clock
    patience: without any row for so long, by the machine's clock, nothing waits any more; None: rows wait on
    id_format: how row ids are stored; None: rows have none
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
        """Tell if the machine's clock decides anything."""
        return self.processing_time or self.patience is not None

    @property
    def idle_between_rows(self) -> int | None:
        """Return the silence between two rows of a key that makes the second one the first of a new key, or None."""
        return None if self.archive or self.processing_time else self.idle

    def late_before(self, watermark: int) -> int:
        """Return the event time before which a row is late whatever its key."""
        if watermark == NEVER or self.waits:
            return watermark
        idle = self.idle_between_rows
        return NEVER if idle is None else watermark - idle


class Stores(NamedTuple):
    """The stores of a bucket.

    blocks: states of keys
    parts: rows of the reorder buffer
    ended: states of expired keys, where these come back
    replay_rows, replay_base: rows of each key that are kept for replay, and the states before them
    last_seen: when a row of each key last came, where the machine's clock counts
    row_ids: row ids, where rows have them
    """

    blocks: Store
    parts: Store
    ended: Store
    replay_rows: Store
    replay_base: Store
    last_seen: Store
    row_ids: Store | None = None
