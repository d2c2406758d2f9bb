"""Carry rows that do not fit through the stream's operator to the sink, beside it and without touching its state.

They travel as packets in groups of their own: messages that are no rows, and rows whose keys have no inputs. So a
micro-batch reads its source once, and what it rejects is decided by the same offsets as what it accepts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from jobs.around import Around
from jobs.checked_rows import PAYLOAD, REASON
from jobs.messages import POSITION, REJECTED
from jobs.packed_rows import Packer, RowFormat, select_columns
from jobs.packets import records_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.stateful_processor import TimerValues

ASIDE = -1
"""The group of messages that do not fit; those of the filter's buckets are not negative."""
SET_ASIDE = 9
"""Kind of the operator's output packets that hold them."""
WITHOUT = -2
"""The group of rows whose keys have no inputs (`jobs.input_rows`)."""
WITHOUT_INPUTS = 12
"""Kind of the operator's output packets that hold them."""


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


class SetAside(Around):
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


def topic_quarantine(
    rejected: DataFrame, model: str, topic: str, generation: str | None, batch_id: int | None
) -> DataFrame:
    """Give rejected messages (`_reason`, `_payload`, `_position`) the quarantine's columns."""
    from pyspark.sql import functions as F

    where = json.dumps({"generation": generation, "batch_id": batch_id})[1:-1]
    position = F.col(POSITION)
    if generation is not None:
        position = F.concat(F.expr(f"left({POSITION}, length({POSITION}) - 1)"), F.lit(f", {where}}}"))
    return rejected.select(
        F.lit(model).alias("model"),
        F.col(PAYLOAD).alias("payload"),
        F.col(REASON).alias("reason"),
        F.lit(f"kafka:{topic}").alias("source"),
        position.alias("position"),
        F.lit(batch_id).cast("bigint").alias("batch_id"),
        F.lit(generation).cast("string").alias("generation"),
        F.current_timestamp().alias("quarantined_at"),
    )
