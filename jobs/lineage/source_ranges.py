"""The source range of each micro-batch of a generation, stored in its estimates for as long as the estimates exist.

Spark keeps the offsets of the last 100 micro-batches in a checkpoint. A generation may continue after a much older
micro-batch, and readers must then find the estimates before this micro-batch. So each estimate has the range of its
micro-batch as a JSON text, which is constant within a commit. The range has the places (`jobs.storage.positions`) after
which the micro-batch began and at which it ended. A micro-batch without estimates needs no range.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.lineage.live import combine_conditions
from jobs.spark.warehouse import Warehouse
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import FILES, VERSION, Place, convert_position, includes, is_whole, parse_offsets
from jobs.storage.tables import SOURCE_RANGE, estimates

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from jobs.lineage.generations import Generation

_PLACES = "`from` map<string, bigint>, `to` map<string, bigint>"


class SourceRange(NamedTuple):
    """A micro-batch, the place after which it began (None if unknown), and the place at which it ended."""

    batch: int
    start: Place | None
    end: Place


class Nearest(NamedTuple):
    """The micro-batches with a known range that are nearest to a place; None if there is no such micro-batch.

    before: the last micro-batch that ended at or before the place
    after: the first micro-batch that ended after the place
    lower, upper: as before and after, but only among the micro-batches that ended at a position
    """

    before: SourceRange | None = None
    after: SourceRange | None = None
    lower: SourceRange | None = None
    upper: SourceRange | None = None

    def joined(self, other: Nearest) -> Nearest:
        """Return the nearest micro-batches in this result and another result."""
        pairs = zip((max, min, max, min), self, other, strict=True)
        return Nearest(*(_select_by(*pair) for pair in pairs))


class NearbyBatches(NamedTuple):
    """A generation's micro-batches around a place.

    before: the last micro-batch with estimates that ended at or before the place, or the generation's start as batch -1
    after: the first micro-batch with estimates that ended after the place
    unknown: micro-batches of an earlier release between `before` and `after`, which may be before or after the place
    reached: the end of the last committed micro-batch; None if the checkpoint is gone
    positions: the nearest positions before and after the place at which a micro-batch ended
    """

    before: SourceRange
    after: SourceRange | None
    unknown: bool
    reached: Place | None
    positions: list[Place]


class RangeWriter:
    """Computes the range of each micro-batch of a running generation."""

    def __init__(self, warehouse: Warehouse, generation: Generation) -> None:
        self._checkpoint = Checkpoint(warehouse, generation.checkpoint)
        self._last = -1, convert_position(generation.start_position)

    def of(self, batch: int) -> str:
        """Return the range of a running micro-batch as text; Spark has already fixed its offsets."""
        last, start = self._last
        if last != batch - 1:
            start = self._checkpoint.place(batch - 1)
        end = self._checkpoint.place(batch)
        self._last = batch, end
        return json.dumps({"from": start, "to": end}, separators=(",", ":"))


def find_around(
    warehouse: Warehouse, generation: Generation, limit: int | None, place: Place
) -> NearbyBatches:
    """Return a generation's micro-batches around a place at or after its start.

    limit: the last micro-batch to include; None includes all micro-batches.
    """
    origin = SourceRange(-1, None, convert_position(generation.start_position))
    batches, unknown, found = _read_batches(warehouse, generation, limit), False, Nearest()
    if batches is not None:
        found = _find_nearest(batches, place)
        lacking = _list_unranged_batches(batches, found, origin)
        if lacking:
            kept = [
                one for one in list_retained(warehouse, generation) if limit is None or one.batch <= limit
            ]
            found = found.joined(_select_nearest(kept, place))
            unknown = not {one.batch for one in kept}.issuperset(
                _list_unranged_batches(batches, found, origin)
            )
    ends = [one.end for one in (found.lower or origin, found.upper) if one is not None]
    return NearbyBatches(
        found.before or origin, found.after, unknown, _find_reached_place(warehouse, generation), ends
    )


def has_ended_by(place: Place) -> Column:
    """Return the condition that an estimate's micro-batch ended at or before a place; null if its range is unknown."""
    return _is_up_to(F.from_json(SOURCE_RANGE, _PLACES)["to"], place)


def is_before(position: Mapping[str, Any]) -> Column:
    """Return the condition that a row's message comes before a position in its topic."""
    return combine_conditions(
        (F.col("_partition") == number) & (F.col("_offset") < offset)
        for number, offset in parse_offsets(position).items()
    )


def has_started_from(place: Place) -> Column:
    """Return the condition that an estimate's micro-batch began at or after a place; null if its range is unknown."""
    begun = F.from_json(SOURCE_RANGE, _PLACES)["from"]
    if VERSION in place:
        version, files = begun[VERSION], F.coalesce(begun[FILES], F.lit(0))
        same = (version == place[VERSION]) & (files >= place.get(FILES, 0))
        return (version > place[VERSION]) | same
    found = F.lit(True)
    for number, offset in place.items():
        found = found & (F.coalesce(begun[number], F.lit(0)) >= offset)
    return F.when(begun.isNotNull(), found)


def find_last_whole(warehouse: Warehouse, generation: Generation) -> SourceRange | None:
    """Return the last committed micro-batch of a generation that ended at a position; None if it is unknown."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    last = checkpoint.find_last_commit()
    if last is None:
        return None
    for batch in reversed(checkpoint.commits()):
        place = _find_place(checkpoint, batch)
        if place is not None and is_whole(place):
            return SourceRange(batch, None, place)
    batches = _read_batches(warehouse, generation, last)
    if batches is None:
        return None
    whole = F.when(_is_whole(F.col("to")), F.struct("batch_id", "range"))
    row = batches.agg(F.max(whole).alias("last")).first()
    return None if row is None else _parse_range(row["last"])


def end_place(warehouse: Warehouse, generation: Generation, batch: int) -> Place | None:
    """Return the end of a micro-batch from its estimates; None without estimates that have a range."""
    batches = _read_batches(warehouse, generation, batch)
    row = None if batches is None else batches.filter(F.col("batch_id") == batch).first()
    found = _parse_range(row) if row is not None and row["range"] is not None else None
    return None if found is None else found.end


def list_retained(warehouse: Warehouse, generation: Generation) -> list[SourceRange]:
    """Return the ranges of the committed micro-batches whose offsets are still in the checkpoint, oldest first."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    found = []
    before = None
    for batch in checkpoint.commits():
        start = convert_position(generation.start_position) if batch == 0 else before
        before = _find_place(checkpoint, batch)
        if before is not None:
            found.append(SourceRange(batch, start, before))
    return found


def _read_batches(warehouse: Warehouse, generation: Generation, limit: int | None) -> DataFrame | None:
    """Return a row for each micro-batch with estimates: `batch_id`, `range`, and the places `from` and `to`."""
    table = estimates(generation.model)
    if not warehouse.exists(table):
        return None
    rows = warehouse.read(table).filter(F.col("generation") == generation.generation)
    if limit is not None:
        rows = rows.filter(F.col("batch_id") <= limit)
    text = F.col(SOURCE_RANGE) if SOURCE_RANGE in rows.columns else F.lit(None).cast("string")
    batches = rows.groupBy("batch_id").agg(F.max(text).alias("range"))
    return batches.select("*", F.from_json("range", _PLACES).alias("_places")).select(
        "batch_id", "range", "_places.from", "_places.to"
    )


def _find_nearest(batches: DataFrame, place: Place) -> Nearest:
    """Return the micro-batches nearest to a place, without micro-batches whose estimates have no range."""
    known, passed = F.col("range").isNotNull(), _is_up_to(F.col("to"), place)
    whole, one = _is_whole(F.col("to")), F.struct("batch_id", "range")
    row = batches.agg(
        F.max(F.when(known & passed, one)),
        F.min(F.when(known & ~passed, one)),
        F.max(F.when(known & passed & whole, one)),
        F.min(F.when(known & ~passed & whole, one)),
    ).first()
    assert row is not None
    return Nearest(*(_parse_range(found) for found in row))


def _select_nearest(ranges: list[SourceRange], place: Place) -> Nearest:
    """Return the micro-batches nearest to a place; the `ranges` are ordered from oldest to newest."""
    passed = [one for one in ranges if includes(place, one.end)]
    later = [one for one in ranges if not includes(place, one.end)]
    lower, upper = ([one for one in some if is_whole(one.end)] for some in (passed, later))
    return Nearest(
        passed[-1] if passed else None,
        later[0] if later else None,
        lower[-1] if lower else None,
        upper[0] if upper else None,
    )


def _select_by(choose: Any, one: SourceRange | None, other: SourceRange | None) -> SourceRange | None:
    """Return the range whose micro-batch is `choose` (`min` or `max`) of both, or the only one that there is."""
    return choose((it for it in (one, other) if it is not None), key=lambda it: it.batch, default=None)


def _is_up_to(end: Column, place: Place) -> Column:
    """Return the condition that `place` includes the place in a column (`positions.includes`)."""
    if VERSION in place:
        version, files = end[VERSION], F.coalesce(end[FILES], F.lit(0))
        return (version < place[VERSION]) | ((version == place[VERSION]) & (files <= place.get(FILES, 0)))
    bounds = F.from_json(F.lit(json.dumps(place)), "map<string, bigint>")
    return F.forall(F.map_entries(end), lambda one: one["value"] <= F.coalesce(bounds[one["key"]], F.lit(0)))


def _is_whole(end: Column) -> Column:
    return F.coalesce(end[FILES], F.lit(0)) == 0


def _list_unranged_batches(batches: DataFrame, found: Nearest, origin: SourceRange) -> list[int]:
    """Return the micro-batches that lie between the two nearest and whose estimates have no range."""
    rows = batches.filter(F.col("range").isNull() & (F.col("batch_id") > (found.before or origin).batch))
    if found.after is not None:
        rows = rows.filter(F.col("batch_id") < found.after.batch)
    return [row["batch_id"] for row in rows.select("batch_id").collect()]


def _parse_range(row: Row | None) -> SourceRange | None:
    if row is None:
        return None
    both = json.loads(row["range"])
    return SourceRange(row["batch_id"], both["from"], both["to"])


def _find_reached_place(warehouse: Warehouse, generation: Generation) -> Place | None:
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    last = checkpoint.find_last_commit()
    return None if last is None else _find_place(checkpoint, last)


def _find_place(checkpoint: Checkpoint, batch: int) -> Place | None:
    """Return the end of a micro-batch, or None if its offsets are gone or damaged."""
    try:
        return checkpoint.place(batch)
    except UserError:
        return None
