"""The chain of generations behind the live estimates, pinned: what a verification recomputes, and what it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.lineage.live import live_lineage
from jobs.lineage.start_point import origin
from jobs.snapshots import manifests
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import KAFKA, describe

STATE = "state"
"""`Segment.end` of the live generation: the states at its end are those of its checkpoint."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A generation from its snapshot up to the micro-batch with which it ends, or at which the live one is pinned.

    first, last: positions, after which its rows begin and at which they end; end: the snapshot that was exported there,
    `STATE`, or None if nothing holds the states at the end.
    """

    generation: str
    snapshot: str
    first: dict[str, Any]
    last_batch: int
    last: dict[str, Any]
    end: str | None


@dataclass(frozen=True, slots=True)
class Chain:
    """What is verified: segments, the live one first; the snapshots they began from; reasons why parts cannot be."""

    segments: list[Segment]
    snapshots: list[str]
    not_verified: list[str]


def chain_of(warehouse: Warehouse, model: str) -> Chain:
    """Return the chain of a model's live estimates as it is now; empty if no generation is live."""
    by_name = {one.generation: one for one in generations.all_of(warehouse, model)}
    segments: list[Segment] = []
    snapshots: list[str] = []
    reasons: list[str] = []
    later: Segment | None = None
    for name, last_batch in live_lineage(warehouse, model):
        generation = by_name[name]
        seed = origin(warehouse, generation)
        if seed.snapshot_id not in snapshots:
            snapshots.append(seed.snapshot_id)
        found: Segment | str | None
        if last_batch is None:
            found = _live(warehouse, generation)
        elif last_batch < 0:
            found = None
        else:
            found = _ended(
                warehouse, generation, last_batch, snapshots[-1] if later is None else later.snapshot
            )
        if isinstance(found, str):
            reasons.append(found)
        elif found is not None:
            segments.append(found)
        later = found if isinstance(found, Segment) else later
    return Chain(segments, snapshots, reasons)


def _live(warehouse: Warehouse, generation: generations.Generation) -> Segment | str | None:
    """Return the segment of the live generation, up to the last micro-batch that completes a version."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    commits = checkpoint.commits()
    if not commits:
        return None
    for batch in reversed(commits):
        if not checkpoint.has(batch):
            break
        if checkpoint.ends_with(batch) is not None:
            last = checkpoint.position(batch, generation.start_position)
            return Segment(
                generation.generation, generation.snapshot_id, generation.start_position, batch, last, STATE
            )
    return (
        f"{generation.generation}: none of the micro-batches whose state is kept completes a version of the "
        f"measurements, so which rows it has read cannot be told: verify again when it has caught up"
    )


def _ended(
    warehouse: Warehouse, generation: generations.Generation, batch: int, successor: str
) -> Segment | str:
    """Return the segment of an earlier generation, which ends with a micro-batch."""
    name = generation.generation
    snapshot = exported = manifests.record(warehouse, successor)
    while exported is not None and exported.parent is not None:
        exported = manifests.record(warehouse, exported.parent)
    begins = generation.snapshot_id, generation.start_position
    if exported is not None and (exported.generation, exported.batch_id) == (name, batch):
        kept = exported.status != manifests.REMOVED
        return Segment(name, *begins, batch, exported.position, exported.snapshot_id if kept else None)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    try:
        if generation.status != generations.REMOVED and checkpoint.ends_with(batch) is not None:
            return Segment(name, *begins, batch, checkpoint.position(batch, generation.start_position), None)
    except UserError:
        pass
    at = "" if snapshot is None else f", and its successor began at {describe(snapshot.position)}"
    return f"{name}: where its micro-batch {batch} ended is no longer known{at}"


def is_topic(segment: Segment) -> bool:
    """Tell if a segment's rows came from a topic."""
    return segment.last["source"] == KAFKA
