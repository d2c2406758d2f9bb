"""An operator around the model's own: it has no state, and hands on whatever it does not see to itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.encoding.packet_kinds import (
    MISSING_INPUTS,
    REJECTED_MESSAGES,
    ROW_PACKETS,
    TYPED_ROW_PACKETS,
    OutputPacket,
    RowPacket,
    packet_batch,
)
from jobs.encoding.packets import records_of
from jobs.encoding.rows import Packer, RowFormat, select_columns
from jobs.ingestion.messages import REJECTED
from jobs.warehouse.quarantine import PAYLOAD, POSITION, REASON

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import TimerValues

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class DelegatingProcessor(StatefulProcessor):
    """Let another operator have its state, its snapshot, its rows and its timers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Let the model's operator declare its state."""
        self.inner.init(handle)

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Let the model's operator take over the snapshot."""
        self.inner.handleInitialState(key, initialState, timerValues)

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Let the model's operator take its rows."""
        yield from self.inner.handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802
        """Let the model's operator see to its timers."""
        yield from self.inner.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def close(self) -> None:
        """Close the model's operator."""
        self.inner.close()


def pack_messages(rows: DataFrame, fmt: RowFormat, packer: Packer, typed: bool) -> DataFrame:
    """Pack messages (`messages.judged`): those that fit as `packer` packs them, the others for `SetAside`.

    Args:
        rows: judged messages.
        fmt: what a row is made of.
        packer: takes batches with the columns of `packed_rows.select_columns`.
        typed: packets carry a kind.
    """
    selected = select_columns(rows, fmt, (REASON, PAYLOAD, POSITION))
    kind = RowPacket.ROWS if typed else None

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            reasons = batch.column(REASON)
            if reasons.null_count < len(reasons):
                rejected = batch.filter(reasons.is_valid()).select([REASON, PAYLOAD, POSITION])
                bucket = pa.array([REJECTED_MESSAGES], pa.int32())
                yield packet_batch(bucket, pa.array([_encode(rejected)], pa.binary()), kind)
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
    """Hand the packets of `REJECTED_MESSAGES` and `MISSING_INPUTS` on as they are, and all others to the model's own operator."""

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Put out the group's packets: of what does not fit as they came, else what the filter says."""
        group = int(key[0])
        if group not in (REJECTED_MESSAGES, MISSING_INPUTS):
            yield from self.inner.handleInputRows(key, rows, timerValues)
            return
        rejects = group == REJECTED_MESSAGES
        kind = OutputPacket.REJECTED_MESSAGES if rejects else OutputPacket.MISSING_INPUTS
        for frame in rows:
            for payload in frame["payload"]:
                packet = bytes(payload)
                count = _decode(packet).num_rows if rejects else records_of(packet)
                yield pd.DataFrame({"kind": [kind], "rows": [count], "payload": [packet]})


def rejected_rows(packets: DataFrame) -> DataFrame:
    """Return `_reason`, `_payload` and `_position` of what packets of kind `REJECTED_MESSAGES` hold."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch.column("payload").to_pylist():
                yield _decode(payload)

    return packets.select("payload").mapInArrow(unpack, REJECTED)


class KeyImporter(DelegatingProcessor):
    """Let the model's own operator take over what is offered, and then its rows of the micro-batch."""

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Take over new keys before any row is filtered, wherever in the micro-batch they come."""
        frame = pd.concat(list(rows), ignore_index=True)
        states = frame["kind"] == RowPacket.STATES
        if states.any():
            taken, held = self.inner.import_states(frame["payload"][states], timerValues)
            kinds = [OutputPacket.KEYS_TAKEN, OutputPacket.KEYS_HELD]
            yield pd.DataFrame({"kind": kinds, "rows": [taken, held], "payload": [b"", b""]})
        rest = frame[~states]
        if len(rest):
            yield from self.inner.handleInputRows(key, iter([rest]), timerValues)
