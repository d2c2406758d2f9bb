"""Rejected rows as DataFrames: their columns, and appends to the quarantine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from jobs.spark.warehouse import Warehouse
from jobs.storage.quarantine import PAYLOAD, POSITION, REASON, TABLE
from jobs.storage.tables import QUARANTINE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def keep(warehouse: Warehouse, rows: DataFrame, transaction: tuple[str, int]) -> None:
    """Append rejected rows, once per transaction.

    Args:
        warehouse: warehouse of the quarantine.
        rows: result of `rejected_rows`.
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
        source, position: source of each row, and its place there as JSON.
        payload, reason: the row's content, and the reason of its rejection; by default the columns `_payload` and
            `_reason`.
        generation, batch_id: generation and micro-batch of the stream that rejected the rows, if a stream did.
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
    """Return rejected rows with ids, and make the quarantine table unless it exists."""
    warehouse.create(TABLE, QUARANTINE)
    return rows.withColumn("id", F.expr("uuid()"))


def build_topic_quarantine(
    rejected: DataFrame, model: str, topic: str, generation: str, batch_id: int
) -> DataFrame:
    """Return messages (`_reason`, `_payload`, `_position`) rejected by a generation, with the quarantine's columns."""
    where = json.dumps({"generation": generation, "batch_id": batch_id})[1:-1]
    position = F.concat(F.expr(f"left({POSITION}, length({POSITION}) - 1)"), F.lit(f", {where}}}"))
    source = F.lit(f"kafka:{topic}")
    return build_rejected_rows(rejected, model, source, position, generation=generation, batch_id=batch_id)
