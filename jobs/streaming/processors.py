"""The stateful operators of a stream, and stateless wrappers around them.

One operator applies rows as they arrive, the other by an event-time policy. A wrapper passes rejected rows through, or
imports states.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.state.block_store import MapStore, decode_offered, map_store
from jobs.state.encoding.packets import (
    MISSING_INPUTS,
    REJECTED_MESSAGES,
    ROW_PACKETS,
    STATES_BY_BLOCK,
    TYPED_ROW_PACKETS,
    OutputPacket,
    RowPacket,
    StateVariable,
    build_packet_batch,
    count_records,
    join_records,
)
from jobs.state.encoding.rows import Packer, RowFormat, find_max_event_time, select_columns, unpack_rows
from jobs.state.event_time_bucket import EventTimeBucket
from jobs.state.filter_step import filter_step
from jobs.state.key_states import BucketStates
from jobs.state.plan import Packet, Plan, Stores, build_output_packets
from jobs.storage.quarantine import PAYLOAD, POSITION, REASON, REJECTED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.stateful_processor import TimerValues, ValueState


class FilterProcessor(StatefulProcessor):
    """Stateful operator that applies the model's filter to the keys of a bucket as rows arrive."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state variable, which has values by number."""
        store = map_store(handle, StateVariable.STATES, STATES_BY_BLOCK, self.plan.text)
        self.states = BucketStates(store, self.plan.state, self.plan.blocks, copy_folder)

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Add the states of the snapshot; each value of `payload` is a packet with state records of this bucket."""
        layout = self.plan.state.layout
        self.states.add(join_records([layout.decode(payload) for payload in initialState["payload"]]))

    def import_states(self, packets: Iterable[bytes], timers: TimerValues) -> tuple[int, int]:
        """Add the states of new keys; return the number of new keys, and the number of keys that already existed."""
        offered = decode_offered(self.plan.state.layout, packets)
        new = self.states.absent(offered)
        if new.size:
            self.states.add(new)
        return new.size, offered.size - new.size

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Apply a micro-batch of packed rows to the bucket's states, and yield packets of estimates."""
        plan = self.plan
        keyed = unpack_rows((payload for frame in rows for payload in frame["payload"]), plan.rows)
        if len(keyed.rows.key) == 0:
            return
        present, known = self.states.load(keyed.keys.arrays["route"])
        begin = None if plan.begin is None else plan.begin(keyed)
        result = filter_step(plan.row_filter, plan.state.layout, known, keyed, plan.apply_late, begin)
        self.states.save(present, result.records)
        for packet in build_output_packets(plan, keyed, result.outputs):
            yield build_packet_frame(packet)


def copy_folder(variable: StateVariable = StateVariable.STATES) -> Path | None:
    """Return the folder for the local copy of a state variable of a task's bucket, or None outside a task.

    Spark removes the folder when the executor ends, so no other executor finds the copy.
    """
    context, folders = TaskContext.get(), os.environ.get("SPARK_LOCAL_DIRS", "")
    query = None if context is None else context.getLocalProperty("sql.streaming.queryId")
    if context is None or query is None or not folders:
        return None
    return Path(folders.split(",")[0]) / "kalman-states" / query / f"{context.partitionId()}-{variable}"


def build_packet_frame(packet: Packet) -> pd.DataFrame:
    """Return an output packet with the columns of `OUTPUT_PACKETS`."""
    kind, count, payload = packet
    return pd.DataFrame({"kind": [kind], "rows": [count], "payload": [payload]})


class EventTimeProcessor(StatefulProcessor):
    """Stateful operator that applies the model's filter to the keys of a bucket by event time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the stores and the clock of the bucket."""
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
        """Add the states of new keys; return the number of new keys, and the number of keys that already existed."""
        bucket = self._open_bucket()
        counts = bucket.import_states(packets, _read_time(timers))
        self._close_bucket(bucket, timers)
        return counts

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Apply a micro-batch of packed rows, and yield output packets."""
        frame = pd.concat(list(rows), ignore_index=True)
        packed = frame["kind"] == RowPacket.ROWS
        bucket = self._open_bucket()
        packets = (bytes(payload) for payload in frame["payload"][packed])
        newest = find_max_event_time(frame["payload"][~packed])
        for packet in bucket.take(packets, newest, _read_time(timerValues)):
            yield build_packet_frame(packet)
        self._close_bucket(bucket, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:  # noqa: N802
        """Expire keys and release waiting rows by the processing-time clock, and yield output packets."""
        bucket = self._open_bucket()
        for packet in bucket.wake(_read_time(timerValues)):
            yield build_packet_frame(packet)
        self._close_bucket(bucket, timerValues)

    def _close_bucket(self, bucket: EventTimeBucket, timers: TimerValues) -> None:
        """Store the clock of the bucket, and register a timer for its next alarm."""
        self.clock.update((bucket.clock.encode(),))
        if self.plan.event_time is not None and self.plan.event_time.needs_timers:
            for timer in list(self.handle.listTimers()):
                if timer > timers.getCurrentProcessingTimeInMs():  # Spark deletes timers that have expired
                    self.handle.deleteTimer(timer)
            if bucket.alarm is not None:
                self.handle.registerTimer(-(-bucket.alarm // 1000))

    def _open_bucket(self) -> EventTimeBucket:
        held = self.clock.get() if self.clock.exists() else None
        return EventTimeBucket(self.plan, self.stores, None if held is None else bytes(held[0]), copy_folder)


def _read_time(timers: TimerValues) -> int:
    """Return the processing time of the micro-batch in microseconds, which is the same in a retry."""
    return timers.getCurrentProcessingTimeInMs() * 1000


class DelegatingProcessor(StatefulProcessor):
    """Stateless wrapper around a processor; it delegates every call that a subclass does not override."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Let the processor declare its state."""
        self.inner.init(handle)

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Let the processor import the snapshot."""
        self.inner.handleInitialState(key, initialState, timerValues)

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Let the processor apply the rows."""
        yield from self.inner.handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802
        """Let the processor handle its timers."""
        yield from self.inner.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def close(self) -> None:
        """Close the processor."""
        self.inner.close()


def pack_messages(rows: DataFrame, fmt: RowFormat, packer: Packer, typed: bool) -> DataFrame:
    """Pack a topic's valid messages with `packer`, and the rejected messages for `PassThroughRejects`.

    Args:
        rows: messages; a rejected message has a reason (`landing.messages.read_checked_messages`).
        fmt: format of the valid rows.
        packer: function that packs batches with the columns of `rows.select_columns`.
        typed: whether the packets have a kind.
    """
    selected = select_columns(rows, fmt, (REASON, PAYLOAD, POSITION))
    kind = RowPacket.ROWS if typed else None

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            reasons = batch.column(REASON)
            if reasons.null_count < len(reasons):
                rejected = batch.filter(reasons.is_valid()).select([REASON, PAYLOAD, POSITION])
                bucket = pa.array([REJECTED_MESSAGES], pa.int32())
                yield build_packet_batch(bucket, pa.array([_encode(rejected)], pa.binary()), kind)
                batch = batch.filter(reasons.is_null())
            yield from packer(iter([batch]))

    return selected.mapInArrow(pack, TYPED_ROW_PACKETS if typed else ROW_PACKETS)


def _encode(batch: pa.RecordBatch) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue().to_pybytes()


def _decode(payload: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(payload).read_all().combine_chunks().to_batches()[0]


class PassThroughRejects(DelegatingProcessor):
    """Yield the buckets `REJECTED_MESSAGES` and `MISSING_INPUTS` unchanged; the processor gets all other buckets."""

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Yield packets of rejected rows unchanged, or else let the processor apply the rows."""
        group = int(key[0])
        if group not in (REJECTED_MESSAGES, MISSING_INPUTS):
            yield from self.inner.handleInputRows(key, rows, timerValues)
            return
        rejects = group == REJECTED_MESSAGES
        kind = OutputPacket.REJECTED_MESSAGES if rejects else OutputPacket.MISSING_INPUTS
        for frame in rows:
            for payload in frame["payload"]:
                packet = bytes(payload)
                count = _decode(packet).num_rows if rejects else count_records(packet)
                yield pd.DataFrame({"kind": [kind], "rows": [count], "payload": [packet]})


def unpack_rejected_rows(packets: DataFrame) -> DataFrame:
    """Return `_reason`, `_payload` and `_position` of the messages in packets of the kind `REJECTED_MESSAGES`."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch.column("payload").to_pylist():
                yield _decode(payload)

    return packets.select("payload").mapInArrow(unpack, REJECTED)


class KeyImporter(DelegatingProcessor):
    """Let the processor import offered states before it applies the rows of a micro-batch."""

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Import new keys before any row is filtered, wherever the keys are in the micro-batch."""
        frame = pd.concat(list(rows), ignore_index=True)
        states = frame["kind"] == RowPacket.STATES
        if states.any():
            new, held = self.inner.import_states(frame["payload"][states], timerValues)
            kinds = [OutputPacket.KEYS_TAKEN, OutputPacket.KEYS_HELD]
            yield pd.DataFrame({"kind": kinds, "rows": [new, held], "payload": [b"", b""]})
        rest = frame[~states]
        if len(rest):
            yield from self.inner.handleInputRows(key, iter([rest]), timerValues)
