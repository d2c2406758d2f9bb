"""Read the live estimates of a model: of each row those of one generation, without holes or doubles at a switch.

A generation goes on exactly behind a micro-batch of its parent. So the live estimates are those of the live
generation, and before them those of its parent up to that micro-batch, and so on. A switch is one commit in
`generations`, so a reader sees the chain before it or the chain after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as F

from jobs.lineage import generations
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import estimates, latest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class LineageSegment(NamedTuple):
    """A generation whose estimates count, up to a micro-batch; None: all of them."""

    generation: str
    last_batch: int | None


def live_lineage(warehouse: Warehouse, model: str) -> list[LineageSegment]:
    """Return the generations whose estimates are the live ones, the live generation first; none if there is none."""
    known = {one.generation: one for one in generations.all_of(warehouse, model)}
    at = next((one for one in known.values() if one.status == generations.LIVE), None)
    last: int | None = None
    links: list[LineageSegment] = []
    while at is not None and all(link.generation != at.generation for link in links):
        links.append(LineageSegment(at.generation, last))
        last = at.parent_batch
        at = None if at.parent is None else known.get(at.parent)
    return links


def live_estimates(warehouse: Warehouse, model: str) -> DataFrame:
    """Return the live estimates of a model, with the columns of its estimates table."""
    return warehouse.read(estimates(model)).filter(is_live(warehouse, model))


def is_live(warehouse: Warehouse, model: str) -> Column:
    """Return the condition on rows of the estimates table by which they are live ones."""
    condition = F.lit(False)
    for link in live_lineage(warehouse, model):
        mine = F.col("generation") == link.generation
        condition = condition | (
            mine if link.last_batch is None else mine & (F.col("batch_id") <= link.last_batch)
        )
    return condition


def latest_corrections(rows: DataFrame) -> DataFrame:
    """Leave out estimates that a later micro-batch of their generation has corrected (`order.kind: replay`).

    Of a generation's rows of one key and event time those of the newest micro-batch count, where any is corrected.
    """
    if "correction" not in rows.columns:
        return rows
    same = Window.partitionBy("generation", "key", "event_time")
    told = rows.withColumns(
        {"_newest": F.max("batch_id").over(same), "_corrected": F.max("correction").over(same)}
    )
    kept = told.filter(~F.coalesce("_corrected", F.lit(False)) | (F.col("batch_id") == F.col("_newest")))
    return kept.drop("_newest", "_corrected")


def live_latest(warehouse: Warehouse, model: str) -> DataFrame:
    """Return the latest state of each key of a model's live generation; its spec has `sinks: {latest: true}`."""
    live = generations.live(warehouse, model)
    mine = F.lit(False) if live is None else F.col("generation") == live.generation
    return warehouse.read(latest(model)).filter(mine)
