"""An operator around the model's own: it has no state, and hands on whatever it does not see to itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.encoding.packet_kinds import ASIDE, HELD, KEYS, ROWS, SET_ASIDE, TAKEN, WITHOUT, WITHOUT_INPUTS
from jobs.encoding.packets import records_of
from jobs.encoding.rows import Packer, RowFormat, select_columns
from jobs.encoding.watermark_ticks import of_kind
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


def pack_messages(rows: DataFrame, fmt: RowFormat, packer: Packer, schema: str) -> DataFrame:
    """Pack messages (`messages.judged`): those that fit as `packer` packs them, the others for `SetAside`.

    Args:
        rows: judged messages.
        fmt: what a row is made of.
        packer: takes batches with the columns of `packed_rows.select_columns`.
        schema: of what the packer returns.
    """
    selected = select_columns(rows, fmt, (REASON, PAYLOAD, POSITION))
    timed = "kind int" in schema

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            reasons = batch.column(REASON)
            if reasons.null_count < len(reasons):
                yield _aside(batch.filter(reasons.is_valid()).select([REASON, PAYLOAD, POSITION]), timed)
                batch = batch.filter(reasons.is_null())
            yield from packer(iter([batch]))

    return selected.mapInArrow(pack, schema)


def _aside(rejected: pa.RecordBatch, timed: bool) -> pa.RecordBatch:
    bucket, payload = pa.array([ASIDE], pa.int32()), pa.array([_encode(rejected)], pa.binary())
    if timed:
        return pa.RecordBatch.from_arrays(
            [bucket, pa.array([0], pa.int32()), payload], ["bucket", "kind", "payload"]
        )
    return pa.RecordBatch.from_arrays([bucket, payload], ["bucket", "payload"])


def _encode(batch: pa.RecordBatch) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue().to_pybytes()


def _decode(payload: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(payload).read_all().combine_chunks().to_batches()[0]


class PassThroughRejects(DelegatingProcessor):
    """Hand the packets of `ASIDE` and `WITHOUT` on as they are, and all others to the model's own operator."""

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Put out the group's packets: of what does not fit as they came, else what the filter says."""
        group = int(key[0])
        if group not in (ASIDE, WITHOUT):
            yield from self.inner.handleInputRows(key, rows, timerValues)
            return
        kind = SET_ASIDE if group == ASIDE else WITHOUT_INPUTS
        for frame in rows:
            for payload in frame["payload"]:
                packet = bytes(payload)
                count = _decode(packet).num_rows if group == ASIDE else records_of(packet)
                yield pd.DataFrame({"kind": [kind], "rows": [count], "payload": [packet]})


def rejected_rows(packets: DataFrame) -> DataFrame:
    """Return `_reason`, `_payload` and `_position` of what packets of kind `SET_ASIDE` hold."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch.column("payload").to_pylist():
                yield _decode(payload)

    return packets.select("payload").mapInArrow(unpack, REJECTED)


class TakesOver(Protocol):
    """An operator that takes states over."""

    def take_over(self, packets: Iterable[bytes], timers: TimerValues) -> tuple[int, int]:
        """Take over packets of states; return how many keys were new, and how many were not."""
        ...


def with_kind(packer: Packer) -> Packer:
    """Say of a packer's packets that they hold rows, so that others can come beside them."""

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for packed in packer(batches):
            yield of_kind(packed.column("bucket"), ROWS, packed.column("payload"))

    return pack


class KeyImporter(DelegatingProcessor):
    """Let the model's own operator take over what is offered, and then its rows of the micro-batch."""

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Take over new keys before any row is filtered, wherever in the micro-batch they come."""
        frame = pd.concat(list(rows), ignore_index=True)
        states = frame["kind"] == KEYS
        if states.any():
            taken, held = self.inner.take_over(frame["payload"][states], timerValues)
            yield pd.DataFrame({"kind": [TAKEN, HELD], "rows": [taken, held], "payload": [b"", b""]})
        rest = frame[~states]
        if len(rest):
            yield from self.inner.handleInputRows(key, iter([rest]), timerValues)
