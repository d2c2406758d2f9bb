"""Apply micro-batches to a bucket of keys under a watermark: to its states, waiting rows and clock. No Spark.

The watermark is the maximum event time of all rows that the stream has read, less the delay. Every bucket gets the
maximum event time of each micro-batch (`jobs.state.encoding.rows`). So the watermark is the same in all buckets, and it
moves within the micro-batch that brings the newer row. It is part of the state, so a retried micro-batch finds the
same watermark. Keys that were silent for too long are archived, and restored when a row comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from jobs.state.block_format import StateFormat
from jobs.state.block_store import Blocks, decode_offered
from jobs.state.encoding.keys import match
from jobs.state.encoding.packets import (
    NEVER,
    Layout,
    OutputPacket,
    PacketColumn,
    Records,
    StateVariable,
    join_records,
    merge_records,
)
from jobs.state.encoding.routing import compute_blocks
from jobs.state.encoding.row_order import find_repeated
from jobs.state.encoding.rows import KeyedRows, select_rows, sort_by_key
from jobs.state.filter_step import filter_step, find_newest_times
from jobs.state.key_states import BucketStates, Copies, no_copy
from jobs.state.plan import (
    EventTimePolicy,
    Packet,
    Plan,
    Stores,
    build_duplicate_packet,
    build_output_packets,
)
from jobs.state.reorder_buffer import Clock, LastSeenIndex, ReorderBuffer
from jobs.state.replay import ReplayWindow
from jobs.state.row_ids import build_row_id_check

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


class EventTimeBucket:
    """A bucket's states, waiting rows and clock, in byte stores."""

    def __init__(self, plan: Plan, stores: Stores, clock: bytes | None, copies: Copies = no_copy) -> None:
        """Open a bucket.

        Args:
            plan: the operator's plan.
            stores: stores of the bucket.
            clock: the stored clock; None before the first micro-batch.
            copies: returns the folders of local copies.
        """
        assert plan.event_time is not None
        policy = plan.event_time
        held = Clock(policy.watermark, max_event_time=policy.max_event_time)
        if clock is not None:
            held = Clock.decode(clock)
        self.plan, self.policy = plan, policy
        self.watermark = held.watermark
        self.max_event_time, self.last_arrival = held.max_event_time, held.last_arrival
        self.states = Blocks(stores.blocks, plan.state, plan.blocks)
        if policy.idle is None:  # no key expires, and `BucketStates` never removes one
            place = partial(copies, StateVariable.STATES)
            self.states = BucketStates(stores.blocks, plan.state, plan.blocks, place)
        self.waiting = ReorderBuffer(stores.parts, policy.row_format, policy.delay, held.parts)
        self.expiry = KeyExpiry(plan, policy, self.states, stores, held.last_seen)
        self.window = ReplayWindow(plan, policy, self.states, stores, copies)
        self.ids = build_row_id_check(plan, stores, held.row_ids)

    @property
    def clock(self) -> Clock:
        """Return the clock to store."""
        return Clock(
            self.watermark,
            self.waiting.parts,
            self.expiry.index,
            self.max_event_time,
            self.last_arrival,
            self.ids.index,
        )

    def seed(
        self, states: Iterable[bytes], rows: Iterable[bytes], now: int = 0, ids: Iterable[bytes] = ()
    ) -> None:
        """Add a snapshot's packets of states, waiting rows and row ids; its keys count as seen now."""
        decoded = [self.plan.state.layout.decode(packet) for packet in states]
        if decoded:
            self.expiry.update(*self.states.add(join_records(decoded)), None, now)
        decoded = [self.plan.rows.layout.decode(packet) for packet in rows]
        if decoded:
            self.waiting.add(join_records(decoded))
        self.ids.seed(ids)

    def import_states(self, packets: Iterable[bytes], now: int) -> tuple[int, int]:
        """Add the states of new keys, which count as seen now; skip keys with a state here or in the archive.

        Returns the number of new keys, and the number of skipped keys.
        """
        offered = decode_offered(self.plan.state.layout, packets)
        new = self.expiry.select_not_archived(self.states.absent(offered))
        if new.size:
            self.expiry.update(*self.states.add(new), None, now)
        return new.size, offered.size - new.size

    def take(self, packets: Iterable[bytes], max_event_time: int, now: int = 0) -> Iterator[Packet]:
        """Process the rows of a micro-batch; yield the output packets.

        Args:
            packets: packets of this bucket's rows.
            max_event_time: maximum over the micro-batch's rows in all buckets.
            now: microseconds of the machine's clock when the micro-batch was planned.
        """
        policy, layout = self.policy, self.plan.rows.layout
        parts = [layout.decode(packet) for packet in packets]
        rows = join_records(parts) if parts else layout.empty()
        late = rows.arrays["time"] < policy.late_before(self.watermark)
        if max_event_time != NEVER:
            self.watermark = max(self.watermark, max_event_time - policy.delay)
            self.max_event_time, self.last_arrival = max(self.max_event_time, max_event_time), now
        if late.any():
            yield from self._refuse(rows.take(np.flatnonzero(late)))
            rows = rows.take(np.flatnonzero(~late))
        yield from self.expiry.expire_by_clock(now)
        yield from self._apply(self._due(rows) if policy.waits else rows, now)

    def wake(self, now: int) -> Iterator[Packet]:
        """Process a micro-batch without rows; yield the output packets as `take` does."""
        yield from self.expiry.expire_by_clock(now)
        deadline = self._patience_ends
        if deadline is not None and now >= deadline:
            self.watermark = self.max_event_time + 1
            yield from self._apply(self.waiting.release(self.watermark), now)

    @property
    def alarm(self) -> int | None:
        """Return the machine time at which there is work even without new rows, or None."""
        deadlines = (self.expiry.deadline, self._patience_ends)
        return min((one for one in deadlines if one is not None), default=None)

    @property
    def _patience_ends(self) -> int | None:
        """Return the time at which all waiting rows are released; it is the same in all buckets."""
        patience = self.policy.patience
        if patience is None or self.last_arrival == NEVER or self.watermark > self.max_event_time:
            return None
        return self.last_arrival + patience + 1

    def _refuse(self, rows: Records) -> Iterator[Packet]:
        """Yield packets of rows behind the watermark: duplicates, and late rows."""
        rows, duplicates = self.ids.check_late(rows)
        yield from duplicates
        if rows.size:
            yield OutputPacket.LATE_BY_WATERMARK, rows.size, self.plan.rows.layout.encode(rows)

    def _due(self, rows: Records) -> Records:
        """Return the rows that the watermark has passed; buffer the others."""
        passed = rows.arrays["time"] < self.watermark
        ready = [self.waiting.release(self.watermark), rows.take(np.flatnonzero(passed))]
        self.waiting.add(rows.take(np.flatnonzero(~passed)))
        return join_records(ready)

    def _apply(self, rows: Records, now: int) -> Iterator[Packet]:
        """Apply rows, and expire keys by the watermark."""
        keyed = sort_by_key(rows, self.plan.rows)
        if len(keyed.rows.key):
            replays = self.policy.replay_length > 0
            yield from self.window.apply(keyed, self.ids) if replays else self._filter(keyed, now)
        self.ids.sweep(self.policy.late_before(self.watermark))
        yield from self.expiry.expire_by_watermark(self.watermark)
        if self.watermark != NEVER:
            yield OutputPacket.WAITING, self.waiting.count, b""
            yield OutputPacket.WATERMARK, self.watermark, b""

    def _filter(self, keyed: KeyedRows, now: int) -> Iterator[Packet]:
        plan, policy = self.plan, self.policy
        present, known = self.states.load(keyed.keys.arrays["route"])
        known = self.expiry.restore(known, keyed)
        checked = self.ids.check(keyed, *(() if plan.apply_late else (known,)))
        yield from checked.duplicates
        keyed = checked.kept
        if plan.rows.distinct:
            repeats = find_repeated(keyed.rows, find_newest_times(keyed.keys, known))
            if repeats.any():
                yield build_duplicate_packet(plan, OutputPacket.DUPLICATE, keyed, np.flatnonzero(repeats))
                keyed = select_rows(keyed, np.flatnonzero(~repeats))
        result = filter_step(
            plan.row_filter,
            plan.state.layout,
            known,
            keyed,
            plan.apply_late,
            None if plan.begin is None else plan.begin(keyed),
            policy.idle_between_rows,
        )
        self.states.save(present, result.records)
        self.expiry.update(present, result.records, keyed.keys, now)
        self.ids.remember(checked, keyed, result.outputs, policy.late_before(self.watermark))
        if result.ended is not None:
            yield OutputPacket.EXPIRED, result.ended.size, plan.state.layout.encode(result.ended)
        yield from build_output_packets(plan, keyed, result.outputs)
