"""Expire the keys of a bucket: note when each key was last seen, archive expired keys, restore keys that come back.

Silence is measured either in event time, against the watermark, or by the machine's clock. The module works without
Spark.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from jobs.state.block_format import StateFormat
from jobs.state.block_store import Blocks
from jobs.state.bucket_clock import LastSeenIndex
from jobs.state.encoding.keys import match
from jobs.state.encoding.packets import NEVER, Layout, OutputPacket, PacketColumn, Records, merge_records
from jobs.state.encoding.routing import compute_blocks
from jobs.state.encoding.rows import KeyedRows
from jobs.state.event_time_policy import EventTimePolicy, Stores
from jobs.state.plan import Packet, Plan

_SEEN = PacketColumn("seen", "<i8")


class KeyExpiry:
    """The expiry of a bucket's keys; `index` finds the blocks of their `states` with silent keys."""

    def __init__(
        self, plan: Plan, policy: EventTimePolicy, states: Blocks, stores: Stores, index: LastSeenIndex
    ) -> None:
        self.plan, self.policy, self.states, self.index = plan, policy, states, index
        self.archive = Blocks(stores.ended, plan.state, plan.blocks)
        seen = Layout((*plan.rows.kind.identity_columns, _SEEN), text=False)
        self.last_seen = Blocks(stores.last_seen, StateFormat(plan.state.header, seen), plan.blocks)

    @property
    def deadline(self) -> int | None:
        """Return the earliest processing time at which a key may expire; None if keys do not expire by this clock."""
        idle, oldest = self.policy.idle, self.index.oldest
        if not self.policy.processing_time or idle is None or oldest is None:
            return None
        return oldest + idle + 1

    def expire_by_clock(self, now: int) -> Iterator[Packet]:
        """Expire keys by the time `now` (microseconds) of the machine's clock, if the policy measures silence by it."""
        if self.policy.processing_time and self.policy.idle is not None:
            yield from self._expire(now - self.policy.idle)

    def expire_by_watermark(self, watermark: int) -> Iterator[Packet]:
        """Expire keys by the watermark, if the policy measures silence by event time."""
        if self.policy.idle is not None and not self.policy.processing_time and watermark != NEVER:
            yield from self._expire(watermark - self.policy.idle)

    def select_not_archived(self, offered: Records) -> Records:
        """Return the state records whose keys are not in the archive, ordered by route."""
        return self.archive.absent(offered) if self.policy.archive and offered.size else offered

    def restore(self, known: Records, keyed: KeyedRows) -> Records:
        """Take the states of archived keys with new rows out of the archive; return them with the known states."""
        if not self.policy.archive:
            return known
        new = keyed.keys.take(np.flatnonzero(match(known, keyed.keys) < 0))
        if new.size == 0:
            return known
        blocks = np.unique(compute_blocks(new.arrays["route"], self.plan.blocks))
        archived = self.archive.read(blocks)
        at = match(archived, new)
        if (at < 0).all():
            return known
        back = np.zeros(archived.size, bool)
        back[at[at >= 0]] = True
        self.archive.save(blocks, archived.take(np.flatnonzero(~back)))
        return merge_records(known, archived.take(np.flatnonzero(back)))

    def update(
        self,
        present: NDArray[np.int64],
        records: Records,
        keys: Records | None = None,
        now: int | None = None,
    ) -> None:
        """Note when the keys of some blocks were last seen.

        Args:
            present: numbers of the blocks.
            records: all state records of the blocks.
            keys: keys with rows in this micro-batch; None means all keys without a last-seen time.
            now: time of the machine's clock; None if no key has a row.
        """
        if self.policy.idle is None:
            return
        last = records.arrays["event_time"]
        if self.policy.processing_time:
            seen = self.last_seen.read(present)
            at = match(seen, records)
            last = np.full(records.size, 0 if now is None else now, np.int64)
            last[at >= 0] = seen.arrays["seen"][at[at >= 0]]
            if keys is not None and now is not None:
                last[match(keys, records) >= 0] = now
            names = (column.name for column in self.plan.rows.kind.identity_columns)
            identities = {name: records.arrays[name] for name in names}
            self.last_seen.save(present, Records({**identities, "seen": last}, None))
        self.index = self.index.update(present, records.arrays["route"], last, self.plan.blocks)

    def _expire(self, before: int) -> Iterator[Packet]:
        """Expire the keys that were last seen before a time."""
        present = self.index.expired_before(before)
        if len(present) == 0:
            return
        known = self.states.read(present)
        last = known.arrays["event_time"]
        if self.policy.processing_time:
            seen = self.last_seen.read(present)
            last = seen.arrays["seen"][match(seen, known)]
        silent = last < before
        left = known.take(np.flatnonzero(~silent))
        self.states.save(present, left)
        self.update(present, left)
        expired = known.take(np.flatnonzero(silent))
        if self.policy.archive:
            self.archive.add(expired)
        yield OutputPacket.EXPIRED, expired.size, self.plan.state.layout.encode(expired)
