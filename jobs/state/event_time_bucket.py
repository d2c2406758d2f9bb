"""One micro-batch of one bucket under a watermark: which rows are due, which too late, which keys end. No Spark.

The watermark is the newest event time of all rows that the stream has taken in, less the delay. Every bucket hears of
the newest time of every micro-batch (`jobs.encoding.watermark_ticks`), so it is the same in all of them, moves within the micro-batch that
brings the newer row, and is part of the state: a micro-batch that is run again finds the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jobs.encoding.keys import match
from jobs.encoding.packet_kinds import NEVER, OutputPacket
from jobs.encoding.packets import Column, Layout, Records, concat
from jobs.encoding.routing import block_of
from jobs.encoding.rows import KeyedRows, keyed_rows
from jobs.state.block_format import StateFormat
from jobs.state.block_store import Blocks, decoded, due, touched, unknown
from jobs.state.duplicates import chosen, repeated
from jobs.state.event_time_policy import Stores
from jobs.state.filter_step import filter_step, gather, put
from jobs.state.plan import accepted, late_rows, put_out, rows_of, without_state
from jobs.state.reorder_buffer import PARTS, Clock, ReorderBuffer
from jobs.state.replay import replay
from jobs.state.row_ids import RememberedIds
from kalman.run import KeyStates, Outputs, SortedRows, initial_states, picked

if TYPE_CHECKING:
    from jobs.state.plan import Plan

SEEN = Column("seen", "<i8")


class EventTimeBucket:
    """A bucket's states, rows and clock, over stores of bytes."""

    def __init__(self, plan: Plan, stores: Stores, clock: bytes | None) -> None:
        """Take up a bucket; `clock` is None before its first micro-batch."""
        assert plan.timing is not None
        self.plan, self.timing = plan, plan.timing
        self.blocks = Blocks(stores.blocks, plan.state, plan.blocks)
        self.ended = Blocks(stores.ended, plan.state, plan.blocks)
        ring = StateFormat(plan.timing.rows.header, plan.rows.bare.layout)
        self.ring = Blocks(stores.ring, ring, plan.blocks)
        self.base = Blocks(stores.base, plan.state, plan.blocks)
        seen = Layout((*plan.rows.kind.identity_columns, SEEN), text=False)
        self.seen = Blocks(stores.seen, StateFormat(plan.state.header, seen), plan.blocks)
        held = Clock(plan.timing.watermark, PARTS.empty(), newest=plan.timing.newest)
        if clock is not None:
            held = Clock.decode(clock)
        self.watermark, self.idle = held.watermark, held.idle
        self.newest, self.came = held.newest, held.came
        self.ids: RememberedIds | None = None
        if plan.rows.row_id is not None and plan.timing.ids is not None and stores.ids is not None:
            blocks = Blocks(stores.ids, plan.timing.ids, plan.blocks)
            self.ids = RememberedIds(blocks, plan.rows.row_id.within, held.ids)
        self.waiting = ReorderBuffer(stores.parts, plan.timing.rows, plan.timing.delay, held.parts)

    @property
    def clock(self) -> Clock:
        """Return the clock as it is to be kept."""
        clock = Clock(self.watermark, self.waiting.parts, self.idle, self.newest, self.came)
        return clock if self.ids is None else clock._replace(ids=self.ids.oldest)

    def seed(
        self, states: Iterable[bytes], rows: Iterable[bytes], now: int = 0, ids: Iterable[bytes] = ()
    ) -> None:
        """Take over packets of states, of waiting rows and of ids from a snapshot; its keys count as seen now."""
        decoded = [self.plan.state.layout.decode(packet) for packet in states]
        if decoded:
            self._touch(*self.blocks.add(concat(decoded)), None, now)
        decoded = [self.plan.rows.layout.decode(packet) for packet in rows]
        if decoded:
            self.waiting.add(concat(decoded))
        if self.ids is not None:
            self.ids.seed(ids)

    def take_over(self, packets: Iterable[bytes], now: int) -> tuple[int, int]:
        """Take over packets of states of keys that there are none of, which count as seen now.

        Returns how many were taken, and how many there were: keys with a state, and those that have ended and wait in
        the archive for their return.
        """
        offered = decoded(self.plan.state.layout, packets)
        new = unknown(self.blocks, offered)
        if self.timing.archive and new.size:
            new = unknown(self.ended, new)
        if new.size:
            self._touch(*self.blocks.add(new), None, now)
        return new.size, offered.size - new.size

    def take(self, packets: Iterable[bytes], newest: int, now: int = 0) -> Iterator[tuple[int, int, bytes]]:
        """Yield what a micro-batch puts out: kind, number of rows, payload.

        Args:
            packets: of this bucket's rows.
            newest: event time among the micro-batch's rows, of all buckets.
            now: microseconds of the machine's clock when the micro-batch was planned.
        """
        timing, layout = self.timing, self.plan.rows.layout
        parts = [layout.decode(packet) for packet in packets]
        rows = concat(parts) if parts else layout.empty()
        behind = rows.arrays["time"] < timing.reach(self.watermark)
        if newest != NEVER:
            self.watermark = max(self.watermark, newest - timing.delay)
            self.newest, self.came = max(self.newest, newest), now
        if behind.any():
            yield from self._behind(rows.take(np.flatnonzero(behind)))
            rows = rows.take(np.flatnonzero(~behind))
        yield from self._by_the_clock(now)
        yield from self._apply(self._due(rows) if timing.waits else rows, now)

    def wake(self, now: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield what a micro-batch puts out that has no row of any bucket, as `take` does."""
        yield from self._by_the_clock(now)
        patience = self.timing.patience
        if patience is not None and self.came != NEVER and now - self.came > patience and self._open:
            self.watermark = self.newest + 1
            yield from self._apply(self.waiting.release(self.watermark), now)

    def _apply(self, rows: Records, now: int) -> Iterator[tuple[int, int, bytes]]:
        """Filter rows, and end keys by the watermark."""
        timing = self.timing
        keyed = keyed_rows(rows, self.plan.rows)
        if len(keyed.rows.key):
            yield from self._replay(keyed) if timing.ring else self._filter(keyed, now)
        if self.ids is not None:
            self.ids.sweep(timing.reach(self.watermark))
        if timing.idle is not None and not timing.machine and self.watermark != NEVER:
            yield from self._expire(self.watermark - timing.idle)
        if self.watermark != NEVER:
            yield OutputPacket.WAITING, self.waiting.count, b""
            yield OutputPacket.WATERMARK, self.watermark, b""

    def _by_the_clock(self, now: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield the keys that the machine's clock ends, where it does: at once, before rows of theirs are taken."""
        if self.timing.machine and self.timing.idle is not None:
            yield from self._expire(now - self.timing.idle)

    @property
    def _open(self) -> bool:
        """Tell if the watermark has not passed all rows; of all buckets, so that they let go together."""
        return self.watermark <= self.newest

    @property
    def alarm(self) -> int | None:
        """Return when, by the machine's clock, there is something to do though no row comes; None: never."""
        timing, oldest = self.timing, self.idle.arrays["oldest"]
        due = []
        if timing.machine and timing.idle is not None and len(oldest):
            due.append(int(oldest.min()) + timing.idle + 1)
        if timing.patience is not None and self.came != NEVER and self._open:
            due.append(self.came + timing.patience + 1)
        return min(due, default=None)

    def _due(self, rows: Records) -> Records:
        """Return the rows that the watermark has passed, and let the others wait."""
        passed = rows.arrays["time"] < self.watermark
        ready = [self.waiting.release(self.watermark), rows.take(np.flatnonzero(passed))]
        self.waiting.add(rows.take(np.flatnonzero(~passed)))
        return concat(ready)

    def _behind(self, rows: Records) -> Iterator[tuple[int, int, bytes]]:
        """Refuse rows behind the watermark: some of them may repeat what has been taken."""
        if self.ids is not None:
            keyed = keyed_rows(rows, self.plan.rows)
            again = self.ids.tell(keyed, np.ones(rows.size, bool)).again
            if again.any():
                yield self._repeated(keyed, np.flatnonzero(again))
                rows = late_rows(keyed, np.flatnonzero(~again))
        if rows.size:
            yield OutputPacket.LATE_BY_WATERMARK, rows.size, self.plan.rows.layout.encode(rows)

    def _filter(self, keyed: KeyedRows, now: int) -> Iterator[tuple[int, int, bytes]]:
        plan, timing = self.plan, self.timing
        present, known = self.blocks.load(keyed.keys.arrays["route"])
        if timing.archive:
            known = self._come_back(present, known, keyed)
        told, whole, late = None, keyed, np.zeros(0, bool)
        if self.ids is not None:
            has, newest = _times(known, keyed)
            late = has[keyed.rows.key] & (keyed.rows.time < newest[keyed.rows.key]) & (not plan.apply_late)
            told = self.ids.tell(keyed, late)
            if told.again.any():
                yield self._repeated(keyed, np.flatnonzero(told.again))
                keyed = chosen(keyed, np.flatnonzero(~told.again))
        if plan.rows.distinct:
            again = repeated(keyed.rows, *_times(known, keyed))
            if again.any():
                yield self._repeated(keyed, np.flatnonzero(again))
                keyed = chosen(keyed, np.flatnonzero(~again))
        begin = None if plan.begin is None else plan.begin(keyed)
        idle = None if timing.archive or timing.machine else timing.idle
        advanced = filter_step(
            plan.kernel,
            plan.state.layout,
            known,
            keyed,
            plan.unit,
            plan.apply_late,
            begin,
            plan.estimates.watched,
            idle,
        )
        self.blocks.replace(present, advanced.records)
        self._touch(present, advanced.records, keyed.keys, now)
        if self.ids is not None and told is not None:
            which = ~late & ~_without_state(whole, keyed, advanced.outputs)
            self.ids.remember(told, whole, which, timing.reach(self.watermark))
        if advanced.ended is not None:
            yield OutputPacket.EXPIRED, advanced.ended.size, plan.state.layout.encode(advanced.ended)
        yield from put_out(plan, keyed, advanced.outputs)

    def _replay(self, keyed: KeyedRows) -> Iterator[tuple[int, int, bytes]]:
        """Take rows in their place among those that are kept."""
        plan = self.plan
        present, known = self.blocks.load(keyed.keys.arrays["route"])
        earlier, kept = self.base.read(present), self.ring.read(present)
        at, at_base, head, base = self._begun(keyed, known, earlier)
        told, whole, floors = None, keyed, np.where(base.count > 0, base.event_time, NEVER)
        if self.ids is not None:
            told = self.ids.tell(keyed, keyed.rows.time < floors[keyed.rows.key])
            if told.again.any():
                yield self._repeated(keyed, np.flatnonzero(told.again))
                keyed = chosen(keyed, np.flatnonzero(~told.again))
                at, at_base, head, base = self._begun(keyed, known, earlier)
        keys = keyed.keys
        code = match(keys, kept) if kept.size else np.empty(0, np.int64)
        mine = np.flatnonzero(code >= 0)
        y, u = kept.arrays["y"], kept.arrays.get("u", np.empty((0, kept.size)))
        ring = SortedRows(code[mine], kept.arrays["time"][mine], y[:, mine], u[:, mine])
        done = replay(
            plan.kernel,
            head,
            base,
            ring,
            keyed.rows,
            plan.unit,
            self.timing.ring,
            plan.rows.distinct,
            plan.estimates.watched,
        )
        self.blocks.replace(present, put(known, keys, at, done.head, done.head.count > 0))
        has = np.bincount(done.ring.key, minlength=keys.size) > 0
        self.base.replace(present, put(earlier, keys, at_base, done.base, has))
        rows = concat([kept.take(np.flatnonzero(code < 0)), rows_of(keys, done.ring)])
        self.ring.replace(present, rows.take(np.argsort(rows.arrays["route"], kind="stable")))
        if self.ids is not None and told is not None:
            bad = _without_state(whole, KeyedRows(keys, done.rows), done.outputs)
            which = (whole.rows.time >= floors[whole.rows.key]) & ~bad
            self.ids.remember(told, whole, which, NEVER, floors)
        for kind, which in (
            (OutputPacket.BEYOND_REPLAY_WINDOW, done.beyond),
            (OutputPacket.DUPLICATE, done.repeats),
        ):
            if which.any() and kind == OutputPacket.DUPLICATE:
                yield self._repeated(keyed, np.flatnonzero(which))
            elif which.any():
                refused = late_rows(keyed, np.flatnonzero(which))
                yield kind, refused.size, plan.rows.layout.encode(refused)
        # Of the rows that have an estimate now, those that had none are the new ones, in the order in which they came.
        new = np.flatnonzero(~(done.beyond | done.repeats))
        first, again = np.flatnonzero(~done.corrects), np.flatnonzero(done.corrects)
        ids = None if keyed.ids is None else keyed.ids.take(new)
        yield from put_out(plan, KeyedRows(keys, done.rows.take(first), ids), picked(done.outputs, first))
        some = KeyedRows(keys, done.rows.take(again))
        corrected = picked(done.outputs, again)
        for count, packet in accepted(plan, some, corrected, without_state(corrected)):
            yield OutputPacket.CORRECTION, count, packet

    def _begun(
        self, keyed: KeyedRows, known: Records, earlier: Records
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], KeyStates, KeyStates]:
        """Return where keys are among the newest states and among those before the rings, and both of theirs."""
        plan, keys = self.plan, keyed.keys
        fresh = initial_states(plan.kernel, keys.size)
        if plan.begin is not None:
            fresh = fresh._replace(values=plan.begin(keyed))
        at, at_base = match(known, keys), match(earlier, keys)
        head = gather(known, at, at < 0, fresh)
        return at, at_base, head, gather(earlier, at_base, at_base < 0, head)

    def _repeated(self, keyed: KeyedRows, which: NDArray[np.int64]) -> tuple[int, int, bytes]:
        if self.timing.drop:
            return OutputPacket.DROPPED, len(which), b""
        kind = OutputPacket.DUPLICATE if self.ids is None else OutputPacket.DUPLICATE_ID
        return kind, len(which), self.plan.rows.layout.encode(late_rows(keyed, which))

    def _expire(self, before: int) -> Iterator[tuple[int, int, bytes]]:
        """End the keys whose last sign of life was before a time."""
        present = due(self.idle, before)
        if len(present) == 0:
            return
        known = self.blocks.read(present)
        last = known.arrays["event_time"]
        if self.timing.machine:
            seen = self.seen.read(present)
            last = seen.arrays["seen"][match(seen, known)]
        silent = last < before
        left = known.take(np.flatnonzero(~silent))
        self.blocks.replace(present, left)
        self._touch(present, left)
        gone = known.take(np.flatnonzero(silent))
        if self.timing.archive:
            self.ended.add(gone)
        yield OutputPacket.EXPIRED, gone.size, self.plan.state.layout.encode(gone)

    def _come_back(self, present: NDArray[np.int64], known: Records, keyed: KeyedRows) -> Records:
        """Return the known states with those of keys that had ended and have rows now."""
        new = keyed.keys.take(np.flatnonzero(match(known, keyed.keys) < 0))
        if new.size == 0:
            return known
        blocks = np.unique(block_of(new.arrays["route"], self.plan.blocks))
        archived = self.ended.read(blocks)
        at = match(archived, new)
        if (at < 0).all():
            return known
        back = np.zeros(archived.size, bool)
        back[at[at >= 0]] = True
        self.ended.replace(blocks, archived.take(np.flatnonzero(~back)))
        joined = concat([known, archived.take(np.flatnonzero(back))])
        return joined.take(np.argsort(joined.arrays["route"], kind="stable"))

    def _touch(
        self,
        present: NDArray[np.int64],
        records: Records,
        keys: Records | None = None,
        now: int | None = None,
    ) -> None:
        """Note the signs of life of what the blocks `present` hold now.

        Args:
            present: blocks.
            records: their states.
            keys: that have had rows now; None, with a time: all that are not known.
            now: the machine's clock; None: none has had a row.
        """
        if self.timing.idle is None:
            return
        last = records.arrays["event_time"]
        if self.timing.machine:
            seen = self.seen.read(present)
            at = match(seen, records)
            last = np.full(records.size, 0 if now is None else now, np.int64)
            last[at >= 0] = seen.arrays["seen"][at[at >= 0]]
            if keys is not None and now is not None:
                last[match(keys, records) >= 0] = now
            names = (column.name for column in self.plan.rows.kind.identity_columns)
            identities = {name: records.arrays[name] for name in names}
            self.seen.replace(present, Records({**identities, "seen": last}, None))
        self.idle = touched(self.idle, present, records.arrays["route"], last, self.plan.blocks)


def _without_state(whole: KeyedRows, keyed: KeyedRows, outputs: Outputs) -> NDArray[np.bool_]:
    """Tell which of all rows (N,) are of keys whose state is no number, by what came out for some of the rows."""
    routes = keyed.keys.arrays["route"][keyed.rows.key[without_state(outputs)]]
    return np.isin(whole.keys.arrays["route"], routes)[whole.rows.key]


def _times(known: Records, keyed: KeyedRows) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which keys (K,) have a state, and the time of its newest row."""
    at = match(known, keyed.keys)
    has = at >= 0
    time = np.zeros(len(at), np.int64)
    time[has] = known.arrays["event_time"][at[has]]
    return has, time
