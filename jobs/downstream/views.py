"""Select the estimates that a query counts, so that it counts each row once when another generation becomes live.

A new generation may estimate rows that the query has already counted from the former generation. Also, a micro-batch
that was planned before the switch may run after the switch. So a query stores its view in a file before it starts:

- The view before the switch counts the estimates that were in the table at the end of the last planned micro-batch.
- The new view counts later micro-batches of the new lineage after the source position up to which the query has counted
  (`since`); it compares `since` with the ranges in the estimates (`jobs.lineage.source_ranges`).
- In a micro-batch across this position, a row is counted unless its key and event time were counted before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.downstream.queries import APPLICATIONS, Query
from jobs.lineage.generations import LineageSegment
from jobs.lineage.live import combine_conditions, is_in_lineage
from jobs.lineage.source_ranges import has_ended_by, has_started_from
from jobs.spark.warehouse import Warehouse
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import Place, find_furthest, includes
from jobs.storage.tables import SOURCE_RANGE, estimates

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True)
class ViewPart:
    """Micro-batches of one generation after `after`, up to `last` (None means no limit), that end after `since`."""

    generation: str
    after: int = -1
    last: int | None = None
    since: Place | None = None

    @property
    def rows(self) -> Column:
        """Return the condition for rows of these micro-batches, without a test of the rows' ranges."""
        found = (F.col("generation") == self.generation) & (F.col("batch_id") > self.after)
        return found if self.last is None else found & (F.col("batch_id") <= self.last)

    def condition(self, ranged: bool) -> Column:
        """Return the condition for rows that this part may count; ranged: whether the table has ranges."""
        if self.since is None or not ranged:
            return self.rows
        return self.rows & ~F.coalesce(has_ended_by(self.since), F.lit(False))


@dataclass(frozen=True)
class View:
    """The rows that a query counts, and the lineage that was live when the view was made.

    earlier: the rows that a former query has counted, if this query began with the states of the former query.
    """

    lineage: tuple[LineageSegment, ...]
    parts: tuple[ViewPart, ...]
    earlier: tuple[ViewPart, ...] = ()

    @property
    def generations(self) -> list[str]:
        """Return the generations whose estimates are counted, the live generation first."""
        return list(dict.fromkeys(one.generation for one in (*self.lineage, *self.parts)))

    @property
    def waits(self) -> bool:
        """Return whether rows that are already counted may still arrive from the new generation."""
        return any(one.since is not None for one in self.parts)

    def of(self, rows: DataFrame, table: DataFrame) -> DataFrame:
        """Return the counted rows of a stream of estimates; table: the current estimates."""
        ranged = SOURCE_RANGE in rows.columns
        counted = rows.filter(combine_conditions(one.condition(ranged) for one in self.parts))
        marks = [one for one in self.parts if one.since is not None]
        if not marks or not ranged:
            return counted
        split = combine_conditions(
            one.rows & ~F.coalesce(has_started_from(one.since or {}), F.lit(True)) for one in marks
        )
        live = is_in_lineage(self.lineage, F.col("generation"), F.col("batch_id"))
        before = table.filter(combine_conditions(one.rows for one in (*self.parts, *self.earlier)) & ~live)
        before = before.select(F.col("key").alias("_key"), F.col("event_time").alias("_at")).distinct()
        again = split & (F.col("key") == F.col("_key")) & (F.col("event_time") == F.col("_at"))
        return counted.join(before, again, "left_anti")


Begin = Callable[[tuple[LineageSegment, ...]], View]
"""Function that returns the view of a new query, given a lineage."""


class SeenPosition(NamedTuple):
    """The last micro-batch of a generation that a query has read, and the range of the last counted micro-batch.

    counted is None if no micro-batch is counted, or if an earlier release wrote the last counted micro-batch.
    """

    last: int
    counted: dict[str, Place] | None


def update_view(
    warehouse: Warehouse,
    query: Query,
    source: int,
    lineage: Sequence[LineageSegment],
    begin: Begin | None = None,
) -> View:
    """Return and store the current view of a query's source.

    source: number of the source in the query. begin: function that returns the view of a new query, given a lineage; by
    default the view has all rows.
    """
    now = tuple(lineage)
    fresh = View(now, tuple(ViewPart(one.generation, -1, one.last_batch) for one in now))
    checkpoint, files = Checkpoint(warehouse, query.checkpoint), warehouse.files(APPLICATIONS)
    content, planned = files.read(query.name_view_file(source)), checkpoint.find_last_planned()
    if content is None or planned is None:
        # The query is new, or an earlier release started it.
        view = begin(now) if begin is not None and planned is None else fresh
    else:
        view = parse_view(json.loads(content))
        if view.lineage != now:
            seen = _read_seen(warehouse, query, view, planned, source)
            view = fresh if seen is None else switch_view(view, now, seen)
        elif view.waits and planned == checkpoint.find_last_commit():
            view = settle_view(view, _read_seen(warehouse, query, view, planned, source) or {})
    files.write(query.name_view_file(source), json.dumps(asdict(view)).encode())
    return view


def switch_view(view: View, lineage: tuple[LineageSegment, ...], seen: Mapping[str, SeenPosition]) -> View:
    """Return the view after another lineage has become live; seen: the position of the query, by generation."""
    return View(
        lineage, (*_list_counted_parts(view, seen), *_list_next_parts(view, lineage, seen)), view.earlier
    )


def follow_view(view: View, lineage: tuple[LineageSegment, ...], seen: Mapping[str, SeenPosition]) -> View:
    """Return the view of a query that begins at the position `seen` (by generation) of a query with this view."""
    return View(
        lineage, _list_next_parts(view, lineage, seen), (*view.earlier, *_list_counted_parts(view, seen))
    )


def _list_counted_parts(view: View, seen: Mapping[str, SeenPosition]) -> tuple[ViewPart, ...]:
    """Return the micro-batches that a query has counted up to the position `seen`."""
    last = {name: one.last for name, one in seen.items()}
    return tuple(
        replace(one, last=min(last[one.generation], last[one.generation] if one.last is None else one.last))
        for one in view.parts
        if last.get(one.generation, -1) > one.after
    )


def _list_next_parts(
    view: View, lineage: tuple[LineageSegment, ...], seen: Mapping[str, SeenPosition]
) -> tuple[ViewPart, ...]:
    """Return the micro-batches of a lineage to count after the position of a query."""
    last = {name: one.last for name, one in seen.items()}
    places = [one.counted["to"] for one in seen.values() if one.counted is not None]
    since = find_furthest([*places, *(one.since for one in view.parts if one.since is not None)])
    return tuple(
        ViewPart(one.generation, last.get(one.generation, -1), one.last_batch, since)
        for one in lineage
        if one.last_batch is None or one.last_batch > last.get(one.generation, -1)
    )


def settle_view(view: View, seen: Mapping[str, SeenPosition]) -> View:
    """Return the view without `since` if the live generation is past `since`, as later micro-batches begin after it."""
    live = seen.get(view.lineage[0].generation)
    if live is None or live.counted is None:
        return view
    begun = live.counted["from"]
    if all(one.since is None or includes(begun, one.since) for one in view.parts):
        return replace(view, parts=tuple(replace(one, since=None) for one in view.parts))
    return view


def read_view(warehouse: Warehouse, query: Query, batch: int) -> tuple[View, dict[str, SeenPosition]] | None:
    """Return the view of a query, and its position at the end of a micro-batch; None if view or position is unknown."""
    content = warehouse.files(APPLICATIONS).read(query.name_view_file(0))
    if content is None:
        return None
    view = parse_view(json.loads(content))
    seen = _read_seen(warehouse, query, view, batch, 0)
    return None if seen is None else (view, seen)


def parse_view(kept: dict[str, Any]) -> View:
    """Build a view from the dictionary that `asdict` made of it."""
    lineage = tuple(LineageSegment(*one) for one in kept["lineage"])
    parts, earlier = (tuple(ViewPart(**one) for one in kept.get(name, [])) for name in ("parts", "earlier"))
    return View(lineage, parts, earlier)


def _read_seen(
    warehouse: Warehouse, query: Query, view: View, batch: int, source: int
) -> dict[str, SeenPosition] | None:
    """Return the position of a query after a planned micro-batch; None if its estimates cannot be read any more."""
    version = _find_table_version(Checkpoint(warehouse, query.checkpoint), batch, source)
    try:
        rows = warehouse.read(estimates(query.model), version)
        ranged = SOURCE_RANGE in rows.columns
        text = F.col(SOURCE_RANGE) if ranged else F.lit(None).cast("string")
        counts = combine_conditions(one.condition(ranged) for one in view.parts) & text.isNotNull()
        found = rows.groupBy("generation").agg(
            F.max("batch_id").alias("last"),
            F.max(F.when(counts, F.struct("batch_id", text.alias("range")))).alias("counted"),
        )
        return {
            row["generation"]: SeenPosition(
                row["last"], row["counted"] and json.loads(row["counted"]["range"])
            )
            for row in found.collect()
        }
    except (PySparkException, Py4JJavaError):
        print(
            f"{query.name}: version {version} of {estimates(query.model)} is gone: rows that the new live generation "
            f"estimated again are counted again",
            file=sys.stderr,
        )
        return None


def _find_table_version(checkpoint: Checkpoint, batch: int, source: int) -> int:
    """Return the version of the estimates table up to which a planned micro-batch has read a source.

    A version that is only partly read counts as read, because the view for its remaining files does not change.
    """
    offset = checkpoint.offset(batch, source)
    within = int(offset["index"]) >= 0 or offset.get("isStartingVersion")
    return int(offset["reservoirVersion"]) - (0 if within else 1)
