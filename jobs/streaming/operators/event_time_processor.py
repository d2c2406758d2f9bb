"""The stateful operator of a stream with an event-time policy: `jobs.state.event_time_bucket` over Spark's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.state.block_store import MapStore, map_store
from jobs.state.encoding.packet_kinds import STATES_BY_BLOCK, RowPacket, StateVariable
from jobs.state.encoding.rows import find_max_event_time
from jobs.state.event_time_bucket import EventTimeBucket
from jobs.state.event_time_policy import Stores
from jobs.state.plan import Plan
from jobs.streaming.operators.processor import build_packet_frame

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import TimerValues, ValueState


class EventTimeProcessor(StatefulProcessor):
    """The model's filter over the keys of a bucket, by event time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the bucket's stores and its clock."""
        self.handle = handle

        def store(name: StateVariable, columns: tuple[str, str]) -> MapStore:
            return map_store(handle, name, columns, self.plan.text)

        self.stores = Stores(
            blocks=store(StateVariable.STATES, STATES_BY_BLOCK),
            parts=store(StateVariable.WAITING_ROWS, ("part", "rows")),
            ended=store(StateVariable.ENDED, STATES_BY_BLOCK),
            replay_rows=store(StateVariable.REPLAY_ROWS, ("block", "rows")),
            replay_base=store(StateVariable.REPLAY_BASE, STATES_BY_BLOCK),
            last_seen=store(StateVariable.LAST_SEEN, ("block", "times")),
        )
        if self.plan.rows.row_id is not None:
            self.stores = self.stores._replace(row_ids=store(StateVariable.ROW_IDS, ("block", "ids")))
        self.clock: ValueState = handle.getValueState(StateVariable.CLOCK, "clock binary")

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Add the states, waiting rows and row ids of the snapshot."""
        bucket = self._open_bucket()
        kind, payload = initialState["kind"], initialState["payload"]
        states, rows, ids = (
            payload[kind == one] for one in (RowPacket.STATES, RowPacket.ROWS, RowPacket.ROW_IDS)
        )
        bucket.seed(states, rows, _read_time(timerValues), ids)
        self._close_bucket(bucket, timerValues)

    def import_states(self, packets: Iterable[bytes], timers: TimerValues) -> tuple[int, int]:
        """Add the states of new keys; return the numbers of new keys and of keys that existed."""
        bucket = self._open_bucket()
        counts = bucket.import_states(packets, _read_time(timers))
        self._close_bucket(bucket, timers)
        return counts

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Apply a micro-batch of packed rows, and yield packets."""
        frame = pd.concat(list(rows), ignore_index=True)
        packed = frame["kind"] == RowPacket.ROWS
        bucket = self._open_bucket()
        packets = (bytes(payload) for payload in frame["payload"][packed])
        newest = find_max_event_time(frame["payload"][~packed])
        for packet in bucket.take(packets, newest, _read_time(timerValues)):
            yield build_packet_frame(packet)
        self._close_bucket(bucket, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:  # noqa: N802
        """Expire keys and release waiting rows by the processing-time clock, and yield packets."""
        bucket = self._open_bucket()
        for packet in bucket.wake(_read_time(timerValues)):
            yield build_packet_frame(packet)
        self._close_bucket(bucket, timerValues)

    def _close_bucket(self, bucket: EventTimeBucket, timers: TimerValues) -> None:
        """Store the bucket's clock, and register a timer for its next alarm."""
        self.clock.update((bucket.clock.encode(),))
        if self.plan.event_time is not None and self.plan.event_time.needs_timers:
            for timer in list(self.handle.listTimers()):
                if timer > timers.getCurrentProcessingTimeInMs():  # Spark deletes timers that have expired
                    self.handle.deleteTimer(timer)
            if bucket.alarm is not None:
                self.handle.registerTimer(-(-bucket.alarm // 1000))

    def _open_bucket(self) -> EventTimeBucket:
        held = self.clock.get() if self.clock.exists() else None
        return EventTimeBucket(self.plan, self.stores, None if held is None else bytes(held[0]))


def _read_time(timers: TimerValues) -> int:
    """Return the micro-batch's processing time in microseconds; a retry has the same time."""
    return timers.getCurrentProcessingTimeInMs() * 1000
