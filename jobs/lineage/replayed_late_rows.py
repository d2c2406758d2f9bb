"""Copies of late rows: a row that the stream refused is among the measurements; a replay adds it at their end again.

The copy is for the lineage that refused the row, and for no other reader: a batch pass takes the row itself, in its
place, and a stream that begins from such a snapshot has it. A copy's `_origin` tells: `late:GENERATION:BATCH:REPLAY`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from jobs.lineage import generations
from jobs.lineage.live import LineageSegment
from jobs.snapshots import manifests
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import LATE_COPIES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.lineage.generations import Generation

TABLE = "late_copies"
"""A row a replay of late rows. While it is not there, no measurement is such a copy and nothing has to be looked at."""
_PREFIX = "late:"


def lineages(warehouse: Warehouse, model: str) -> list[list[LineageSegment]]:
    """Return, for every live or shadow generation, its lineage."""
    known = generations.all_of(warehouse, model)
    going = [one for one in known if one.status in (generations.LIVE, generations.SHADOW)]
    return [lineage(warehouse, known, one) for one in going]


def lineage(warehouse: Warehouse, known: list[Generation], generation: Generation) -> list[LineageSegment]:
    """Return a generation and those whose state it has taken over, each up to the micro-batch where it was taken.

    A generation that began from a batch pass has taken over none, whichever it followed as the live one.
    """
    by_name = {one.generation: one for one in known}
    at: Generation | None = generation
    last: int | None = None
    links: list[LineageSegment] = []
    while at is not None and all(link.generation != at.generation for link in links):
        links.append(LineageSegment(at.generation, last))
        snapshot = manifests.record(warehouse, at.snapshot_id)
        if snapshot is None or snapshot.generation is None:
            break
        at, last = by_name.get(snapshot.generation), snapshot.batch_id
    return links


def refused_by_all(chains: list[list[LineageSegment]], generation: Column, batch: Column) -> Column:
    """Tell of rows refused by a generation in a micro-batch if every generation that goes on goes on from there."""
    result = F.lit(bool(chains))
    for chain in chains:
        result = result & _through(chain, generation, batch)
    return F.coalesce(result, F.lit(False))


def origin(replay: str) -> Column:
    """Return the `_origin` of the copy of a quarantined row with columns `generation` and `batch_id`."""
    text = F.concat_ws(":", F.col("generation"), F.col("batch_id").cast("string"), F.lit(replay))
    return F.concat(F.lit(_PREFIX), text)


def announce(warehouse: Warehouse, replay: str, model: str, rows: int) -> None:
    """Say, before the copies are there, that there are some, so that readers look for them."""
    warehouse.create(TABLE, LATE_COPIES)
    frame = warehouse.spark.range(1).select(
        F.lit(replay).alias("replay"),
        F.lit(model).alias("model"),
        F.lit(rows).cast("bigint").alias("rows"),
        F.current_timestamp().alias("replayed_at"),
    )
    warehouse.append(frame.coalesce(1), TABLE, (f"replay-{replay}", 1))


def without(warehouse: Warehouse, rows: DataFrame) -> DataFrame:
    """Leave out copies of late rows: for a batch pass, which has the rows themselves."""
    if not warehouse.exists(TABLE):
        return rows
    return rows.filter(~F.coalesce(F.col("_origin").startswith(_PREFIX), F.lit(False)))


def for_generation(warehouse: Warehouse, rows: DataFrame, generation: Generation) -> DataFrame:
    """Leave out copies of late rows that neither this generation nor one that it goes on from has refused."""
    if not warehouse.exists(TABLE):
        return rows
    chain = lineage(warehouse, generations.all_of(warehouse, generation.model), generation)
    parts = F.split(F.col("_origin"), ":")
    mine = _through(chain, F.get(parts, 1), F.get(parts, 2).try_cast("bigint"))
    copy = F.coalesce(F.col("_origin").startswith(_PREFIX), F.lit(False))
    return rows.filter(~copy | F.coalesce(mine, F.lit(False)))


def _through(chain: list[LineageSegment], generation: Column, batch: Column) -> Column:
    """Tell if a lineage goes through a generation's micro-batch."""
    result = F.lit(False)
    for link in chain:
        here = generation == link.generation
        result = result | (here if link.last_batch is None else here & (batch <= link.last_batch))
    return result
