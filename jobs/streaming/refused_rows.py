"""Convert messages and rows that a stream refuses to rows of the quarantine table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from jobs.spark.warehouse import Warehouse
from jobs.state.encoding import row_order
from jobs.state.encoding.keys import build_key_array, build_key_columns
from jobs.state.encoding.packets import OutputPacket
from jobs.state.encoding.rows import RowFormat, select_ids
from jobs.storage.quarantine import PAYLOAD, POSITION, REASON, TABLE
from jobs.storage.tables import QUARANTINE
from jobs.streaming.publishing import JSON_TIME

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def keep(warehouse: Warehouse, rows: DataFrame, transaction: tuple[str, int]) -> None:
    """Append rejected rows, once per transaction.

    Args:
        warehouse: warehouse of the quarantine.
        rows: result of `build_rejected_rows`.
        transaction: application and number, as in `Warehouse.append`.
    """
    warehouse.append(add_row_ids(warehouse, rows), TABLE, transaction, more_columns=True)


def build_rejected_rows(
    rows: DataFrame,
    model: str,
    source: Column,
    position: Column,
    payload: Column | None = None,
    reason: Column | None = None,
    generation: str | None = None,
    batch_id: int | None = None,
) -> DataFrame:
    """Return rejected rows with the columns of the quarantine.

    Args:
        rows: rejected rows.
        model: name of the model.
        source: source of each row.
        position: position of each row in its source, as JSON.
        payload: content of each row; None means the column `_payload`.
        reason: reason why each row was rejected; None means the column `_reason`.
        generation: generation of the stream that rejected the rows; None if no stream rejected them.
        batch_id: micro-batch in which the stream rejected the rows, or None.
    """
    return rows.select(
        F.lit(model).alias("model"),
        (F.col(PAYLOAD) if payload is None else payload).alias("payload"),
        (F.col(REASON) if reason is None else reason).alias("reason"),
        source.alias("source"),
        position.alias("position"),
        F.lit(batch_id).cast("bigint").alias("batch_id"),
        F.lit(generation).cast("string").alias("generation"),
        F.current_timestamp().alias("quarantined_at"),
    )


def add_row_ids(warehouse: Warehouse, rows: DataFrame) -> DataFrame:
    """Return rejected rows with ids; create the quarantine table unless it exists."""
    warehouse.create(TABLE, QUARANTINE)
    return rows.withColumn("id", F.expr("uuid()"))


def build_topic_quarantine(
    rejected: DataFrame, model: str, topic: str, generation: str, batch_id: int
) -> DataFrame:
    """Return messages (`_reason`, `_payload`, `_position`) that a generation rejected, as rows of the quarantine."""
    where = json.dumps({"generation": generation, "batch_id": batch_id})[1:-1]
    position = F.concat(F.expr(f"left({POSITION}, length({POSITION}) - 1)"), F.lit(f", {where}}}"))
    source = F.lit(f"kafka:{topic}")
    return build_rejected_rows(rejected, model, source, position, generation=generation, batch_id=batch_id)


REASONS = {
    OutputPacket.LATE: "late: older than the key's state",
    OutputPacket.BAD_STATE: "state: the key's state is not a number",
    OutputPacket.LATE_BY_WATERMARK: "late: behind the watermark",
    OutputPacket.BEYOND_REPLAY_WINDOW: "late: older than the rows kept for replay",
    OutputPacket.DUPLICATE: row_order.REASON,
    OutputPacket.DUPLICATE_ID: row_order.SAME_ID,
    OutputPacket.MISSING_INPUTS: "inputs: the table of inputs has no row for the key",
}
"""For each packet kind, the reason of the refusal, as it is stored in the quarantine table."""


def build_refused_rows(
    packets: DataFrame, fmt: RowFormat, model: str, generation: str, batch_id: int
) -> DataFrame:
    """Unpack refused rows (kind, payload) into rows of the quarantine, whose payload is the row as JSON."""
    names = fmt.numbers  # a row is quarantined as it arrived, without the inputs of its key
    layout, kind, has_id = fmt.layout, fmt.kind, fmt.row_id is not None

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            pairs = zip(batch.column("kind").to_pylist(), batch.column("payload").to_pylist(), strict=True)
            for refused, payload in pairs:
                records = layout.decode(payload)
                arrays = records.arrays
                values = np.concatenate([arrays["y"], arrays.get("u", np.empty((0, records.size)))])
                columns = [pa.array(np.array(row), mask=np.isnan(row)) for row in values[: len(names)]]
                if has_id:
                    columns.append(select_ids(records))
                reason = pa.repeat(REASONS[refused], records.size)
                yield pa.RecordBatch.from_arrays(
                    [reason, build_key_array(records), pa.array(np.array(arrays["time"])), *columns],
                    ["reason", "key", "time", *(f"n{i}" for i in range(len(names))), *(["id"] * has_id)],
                )

    numbers = "".join(f", n{i} double" for i in range(len(names)))
    if fmt.row_id is not None:
        numbers += f", id {'bigint' if fmt.row_id.integer else 'string'}"
    rows = packets.select("kind", "payload").mapInArrow(
        unpack, f"reason string, key {'bigint' if kind.integer else 'string'}, time bigint{numbers}"
    )
    payload = F.to_json(
        F.struct(
            *build_key_columns(kind, F.col("key").cast("string")),
            F.timestamp_micros("time").alias(fmt.time),
            *(F.col(f"n{i}").alias(name) for i, name in enumerate(names)),
            *([] if fmt.row_id is None else [F.col("id").alias(fmt.row_id.column)]),
        ),
        {"ignoreNullFields": "false", "timestampFormat": JSON_TIME},
    )
    position = F.lit(json.dumps({"generation": generation, "batch_id": batch_id}))
    source, reason = F.lit(f"measurements/{model}"), F.col("reason")
    return build_rejected_rows(rows, model, source, position, payload, reason, generation, batch_id)
