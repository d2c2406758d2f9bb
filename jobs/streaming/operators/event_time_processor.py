"""The stateful operator of a stream with a watermark: `jobs.state.event_time_bucket` over Spark's state.

Beside the blocks of states there are the parts of waiting rows, and the bucket's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.encoding.packet_kinds import STATES_BY_BLOCK, RowPacket, StateVariable
from jobs.encoding.watermark_ticks import max_event_time
from jobs.state.block_store import map_store
from jobs.state.event_time_bucket import EventTimeBucket
from jobs.state.event_time_policy import Stores
from jobs.state.plan import Plan

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import TimerValues, ValueState


class EventTimeProcessor(StatefulProcessor):
    """Run a timed model's filter over the keys of a bucket."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the bucket's stores and its clock."""
        self.handle = handle
        declared = (
            (StateVariable.STATES, STATES_BY_BLOCK),
            (StateVariable.WAITING_ROWS, ("part", "rows")),
            (StateVariable.ENDED, STATES_BY_BLOCK),
            (StateVariable.REPLAY_ROWS, ("block", "rows")),
            (StateVariable.REPLAY_BASE, STATES_BY_BLOCK),
            (StateVariable.LAST_SEEN, ("block", "times")),
        )
        self.stores = Stores(
            *(map_store(handle, name, columns, self.plan.text) for name, columns in declared)
        )
        if self.plan.rows.row_id is not None:
            ids = map_store(handle, StateVariable.ROW_IDS, ("block", "ids"), self.plan.text)
            self.stores = self.stores._replace(row_ids=ids)
        self.clock: ValueState = handle.getValueState(StateVariable.CLOCK, "clock binary")

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Take over states and waiting rows from the snapshot."""
        bucket = self._bucket()
        kind, payload = initialState["kind"], initialState["payload"]
        states, rows, ids = (
            payload[kind == one] for one in (RowPacket.STATES, RowPacket.ROWS, RowPacket.ROW_IDS)
        )
        bucket.seed(states, rows, _now(timerValues), ids)
        self._leave(bucket, timerValues)

    def import_states(self, packets: Iterable[bytes], timers: TimerValues) -> tuple[int, int]:
        """Take over states of keys that there are none of; return how many were taken, and how many there were."""
        bucket = self._bucket()
        counts = bucket.import_states(packets, _now(timers))
        self._leave(bucket, timers)
        return counts

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Advance the bucket by a micro-batch, and put out packets."""
        frame = pd.concat(list(rows), ignore_index=True)
        packed = frame["kind"] == RowPacket.ROWS
        bucket = self._bucket()
        packets = (bytes(payload) for payload in frame["payload"][packed])
        newest = max_event_time(frame["payload"][~packed])
        for kind, count, packet in bucket.take(packets, newest, _now(timerValues)):
            yield pd.DataFrame({"kind": [kind], "rows": [count], "payload": [packet]})
        self._leave(bucket, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:  # noqa: N802
        """Do what is due by the machine's clock."""
        bucket = self._bucket()
        for kind, count, packet in bucket.wake(_now(timerValues)):
            yield pd.DataFrame({"kind": [kind], "rows": [count], "payload": [packet]})
        self._leave(bucket, timerValues)

    def _leave(self, bucket: EventTimeBucket, timers: TimerValues) -> None:
        """Keep the bucket's clock, and ask to be woken when there is something to do."""
        self.clock.update((bucket.clock.encode(),))
        if self.plan.event_time is not None and self.plan.event_time.needs_timers:
            for timer in list(self.handle.listTimers()):
                if timer > timers.getCurrentProcessingTimeInMs():  # Spark sees to those that go off now
                    self.handle.deleteTimer(timer)
            if bucket.alarm is not None:
                self.handle.registerTimer(-(-bucket.alarm // 1000))

    def _bucket(self) -> EventTimeBucket:
        held = self.clock.get() if self.clock.exists() else None
        return EventTimeBucket(self.plan, self.stores, None if held is None else bytes(held[0]))


def _now(timers: TimerValues) -> int:
    """Return the micro-batch's time by the machine's clock; Spark keeps it, so a micro-batch that runs again has it."""
    return timers.getCurrentProcessingTimeInMs() * 1000
