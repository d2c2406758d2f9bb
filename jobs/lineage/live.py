"""Read the live estimates of a model: one estimate per row, without gaps or duplicates when the generation changes.

A generation continues right after one micro-batch of its parent. So the live estimates are the estimates of the live
generation, preceded by those of its parent up to this micro-batch, and so on. A switch is one commit in `generations`,
so a reader sees the lineage either before or after the switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from jobs.lineage import generations
from jobs.lineage.generations import LineageSegment
from jobs.spark.warehouse import Warehouse
from jobs.storage.tables import estimates, latest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def live_estimates(warehouse: Warehouse, model: str) -> DataFrame:
    """Return the live estimates of a model, with the columns of its estimates table."""
    return warehouse.read(estimates(model)).filter(is_live(warehouse, model))


def is_live(warehouse: Warehouse, model: str) -> Column:
    """Return the condition for live rows of the estimates table, and of the files and messages made from this table.

    The rows need the columns `generation` and `batch_id`.
    """
    segments = generations.read_live_lineage(warehouse, model)
    return is_in_lineage(segments, F.col("generation"), F.col("batch_id"))


def is_in_lineage(segments: Iterable[LineageSegment], generation: Column, batch: Column) -> Column:
    """Return the condition that a lineage contains a micro-batch of a generation."""
    return combine_conditions(
        generation == name if last is None else (generation == name) & (batch <= last)
        for name, last in segments
        if last != -1  # no micro-batch of this generation is in the lineage
    )


def combine_conditions(conditions: Iterable[Column]) -> Column:
    """Return the condition that at least one of the given conditions holds."""
    return reduce(lambda one, other: one | other, conditions, F.lit(False))


def latest_corrections(rows: DataFrame) -> DataFrame:
    """Drop estimates that a later micro-batch of their generation has corrected (`order.kind: replay`).

    If a generation has a correction for a key and event time, only the rows of its latest micro-batch are kept.
    """
    if "correction" not in rows.columns:
        return rows
    same = Window.partitionBy("generation", "key", "event_time")
    compared = rows.withColumns(
        {"_newest": F.max("batch_id").over(same), "_corrected": F.max("correction").over(same)}
    )
    kept = compared.filter(~F.coalesce("_corrected", F.lit(False)) | (F.col("batch_id") == F.col("_newest")))
    return kept.drop("_newest", "_corrected")


def live_latest(warehouse: Warehouse, model: str) -> DataFrame:
    """Return the latest state of each key in a model's live generation. The spec must have `sinks: {latest: true}`."""
    live = generations.find_live(warehouse, model)
    mine = F.lit(False) if live is None else F.col("generation") == live.generation
    return warehouse.read(latest(model)).filter(mine)
