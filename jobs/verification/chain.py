"""Pin the chain of generations behind the live estimates: the parts that a verification can and cannot recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jobs.core.errors import UserError
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import REMOVED, DeployedModel, Generation, read_origin_manifest
from jobs.lineage.source_ranges import end_place
from jobs.snapshots import manifests
from jobs.snapshots.manifests import Manifest
from jobs.spark.warehouse import Warehouse
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import KAFKA, describe, is_whole, parse_offsets, to_position
from jobs.streaming.exporting import find_last_whole_batch

STATE = "state"
"""The value of `Segment.end` for the live generation, whose checkpoint has the states at the segment's end."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A generation from its starting snapshot to its last micro-batch, or to the live generation's pinned micro-batch.

    first, last: positions in the source; the segment's rows begin after `first` and end at `last`.
    end: the snapshot exported at the segment's end, or `STATE`; None if the states at the end are not stored.
    """

    generation: str
    snapshot: str
    first: dict[str, Any]
    last_batch: int
    last: dict[str, Any]
    end: str | None


@dataclass(frozen=True, slots=True)
class Chain:
    """The scope of a verification: segments (the live one first), their starting snapshots, and unverifiable parts.

    not_verified: the reason for each unverifiable part.
    overlaps: sentences about rows that two generations have estimated.
    """

    segments: list[Segment]
    snapshots: list[str]
    not_verified: list[str]
    overlaps: list[str]


def find_chain(model: DeployedModel[Warehouse]) -> Chain:
    """Return the present chain of a model's live estimates; it is empty if no generation is live."""
    warehouse, catalog = model.warehouse, Catalog(model.warehouse)
    by_name = {one.generation: one for one in catalog.generations(model.name)}
    segments: list[Segment] = []
    snapshots: list[str] = []
    reasons: list[str] = []
    overlaps: list[str] = []
    successor: Generation | None = None
    for name, last_batch in catalog.lineage(model.name):
        generation = by_name[name]
        seed = read_origin_manifest(warehouse, generation)
        if seed.snapshot_id not in snapshots:
            snapshots.append(seed.snapshot_id)
        found: Segment | str | None = None
        if successor is None:
            found = _find_live_segment(warehouse, generation)
        elif last_batch is not None and last_batch >= 0:
            exported = catalog.export_behind(successor.snapshot_id)
            found = _find_ended_segment(warehouse, generation, last_batch, successor, exported)
        if isinstance(found, str):
            reasons.append(found)
        elif found is not None:
            segments.append(found)
            if successor is not None:
                _check_joint(found, successor, reasons, overlaps)
        successor = generation
    return Chain(segments, snapshots, reasons, overlaps)


def _find_live_segment(warehouse: Warehouse, generation: Generation) -> Segment | str | None:
    """Return the segment of the live generation, up to the last micro-batch that completes a version."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    if not checkpoint.commits():
        return None
    whole = find_last_whole_batch(checkpoint)
    if whole is not None:
        start = generation.start_position
        last = checkpoint.position(whole[0], start)
        return Segment(generation.generation, generation.snapshot_id, start, whole[0], last, STATE)
    return (
        f"{generation.generation}: none of the micro-batches whose state is kept completes a version of the "
        f"measurements, so which rows it has read cannot be told: verify again when it has caught up"
    )


def _find_ended_segment(
    warehouse: Warehouse,
    generation: Generation,
    batch: int,
    successor: Generation,
    exported: Manifest | None,
) -> Segment | str:
    """Return the segment of an earlier generation up to a micro-batch, or the reason why its end is unknown.

    exported: the snapshot at the hand-over to the successor.
    """
    name = generation.generation
    begins = generation.snapshot_id, generation.start_position
    if exported is not None and (exported.generation, exported.batch_id) == (name, batch):
        kept = exported.status != manifests.REMOVED
        return Segment(name, *begins, batch, exported.position, exported.snapshot_id if kept else None)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    try:
        if generation.status != REMOVED and checkpoint.ends_with(batch) is not None:
            return Segment(name, *begins, batch, checkpoint.position(batch, generation.start_position), None)
    except UserError:
        pass
    place = end_place(warehouse, generation, batch)
    if place is not None and is_whole(place):
        return Segment(name, *begins, batch, to_position(place, generation.start_position), None)
    return (
        f"{name}: where its micro-batch {batch} ended is no longer known, and {successor.generation} began at "
        f"{describe(successor.start_position)}"
    )


def _check_joint(segment: Segment, successor: Generation, reasons: list[str], overlaps: list[str]) -> None:
    """Record rows between a generation's end and its successor's start that have no estimate, or two estimates."""
    ended, began = convert_to_places(segment.last), convert_to_places(successor.start_position)
    if ended == began:
        return
    names = f"{segment.generation} ended at {describe(segment.last)}"
    names += f", and {successor.generation} began at {describe(successor.start_position)}"
    if all(place <= began.get(part, 0) for part, place in ended.items()):
        reasons.append(
            f"{names}: rows between have no live estimate, unless that was allowed at the hand-over"
        )
    else:
        overlaps.append(f"{names}: both have estimated the rows between")


def convert_to_places(position: dict[str, Any]) -> dict[int, int]:
    """Return a position as an offset for each partition of a topic, or as {0: version} for a table of measurements."""
    return parse_offsets(position) if position["source"] == KAFKA else {0: int(position["version"])}


def is_topic(segment: Segment) -> bool:
    """Return whether a segment's rows came from a topic."""
    return segment.last["source"] == KAFKA
