"""Replayed late rows: copies of rows that a stream rejected as late, appended so that the same stream reads them.

A late row is already in the measurements table when the stream rejects it. Replaying the row from quarantine appends a
copy. The copy is only for the lineage that rejected the row: a batch pass, and a stream that begins from a snapshot of
the pass, read the original instead. The `_origin` of a copy is `late:GENERATION:BATCH:REPLAY`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import LIVE, SHADOW, LineageSegment
from jobs.lineage.live import is_in_lineage
from jobs.spark.warehouse import Warehouse
from jobs.storage.row_changes import NOW, put_rows
from jobs.storage.tables import LATE_COPIES, LATE_COPIES_TABLE, LATE_COPY
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.lineage.generations import Generation

TABLE, PREFIX = LATE_COPIES_TABLE, LATE_COPY


def list_lineages(warehouse: Tables, model: str) -> list[list[LineageSegment]]:
    """Return the lineage of every live or shadow generation."""
    catalog = Catalog(warehouse)
    going = [one for one in catalog.generations(model) if one.status in (LIVE, SHADOW)]
    return [trace_state_lineage(catalog, one) for one in going]


def trace_state_lineage(catalog: Catalog, generation: Generation) -> list[LineageSegment]:
    """Return a generation and the ancestors of its state, each with the last micro-batch that its successor took over.

    A generation that began from a batch pass took over no state. So its lineage has no ancestor, even if it has a
    parent.
    """
    by_name = {one.generation: one for one in catalog.generations(generation.model)}
    at: Generation | None = generation
    last: int | None = None
    segments: list[LineageSegment] = []
    while at is not None and all(segment.generation != at.generation for segment in segments):
        segments.append(LineageSegment(at.generation, last))
        snapshot = catalog.manifest(at.snapshot_id)
        if snapshot is None or snapshot.generation is None:
            break
        at, last = by_name.get(snapshot.generation), snapshot.batch_id
    return segments


def is_refused_by_all(lineages: list[list[LineageSegment]], generation: str, batch: int) -> bool:
    """Return whether every lineage (of at least one) contains the generation's micro-batch that rejected a row."""
    return bool(lineages) and all(
        any(
            one.generation == generation and (one.last_batch is None or batch <= one.last_batch)
            for one in segments
        )
        for segments in lineages
    )


def format_origin(replay: str, generation: str, batch: int) -> str:
    """Return the `_origin` of the copy of a row that a generation rejected in a micro-batch."""
    return f"{PREFIX}{generation}:{batch}:{replay}"


def record_replay(tables: Tables, replay: str, model: str, rows: int) -> None:
    """Record a replay before its copies are appended, so that readers filter these copies."""
    tables.create(TABLE, LATE_COPIES)
    row = {"replay": replay, "model": model, "rows": rows, "replayed_at": NOW}
    put_rows(
        tables,
        TABLE,
        ("replay",),
        lambda there: [] if any(one["replay"] == replay for one in there) else [row],
    )


def drop_late_copies(warehouse: Warehouse, rows: DataFrame) -> DataFrame:
    """Drop copies of late rows in a batch pass, because the pass reads the original rows."""
    if not warehouse.exists(TABLE):
        return rows
    return rows.filter(~F.coalesce(F.col("_origin").startswith(PREFIX), F.lit(False)))


def drop_foreign_copies(warehouse: Warehouse, rows: DataFrame, generation: Generation) -> DataFrame:
    """Drop copies of late rows that no generation in the lineage of `generation` has rejected.

    The filter is applied even if no row was ever replayed, because a replay may come while the stream runs.
    """
    if "_origin" not in rows.columns:  # another tool wrote the table
        return rows
    segments = trace_state_lineage(Catalog(warehouse), generation)
    parts = F.split(F.col("_origin"), ":")
    mine = is_in_lineage(segments, F.get(parts, 1), F.get(parts, 2).try_cast("bigint"))
    copy = F.coalesce(F.col("_origin").startswith(PREFIX), F.lit(False))
    return rows.filter(~copy | F.coalesce(mine, F.lit(False)))
