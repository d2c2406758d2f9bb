"""Stateless wrappers around the model's stateful processor, which pass rejected rows through or import states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.landing.messages import REJECTED
from jobs.state.encoding.packets import (
    MISSING_INPUTS,
    REJECTED_MESSAGES,
    ROW_PACKETS,
    TYPED_ROW_PACKETS,
    OutputPacket,
    RowPacket,
    build_packet_batch,
    count_records,
)
from jobs.state.encoding.rows import Packer, RowFormat, select_columns
from jobs.storage.quarantine import PAYLOAD, POSITION, REASON

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.stateful_processor import TimerValues


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
