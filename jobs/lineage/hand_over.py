"""Find the micro-batch after which a new generation continues, so that each row has exactly one live estimate.

The live estimates are the estimates of the live generation, preceded by those of its parent up to a micro-batch, and so
on (`jobs.lineage.live`). A snapshot that was not exported from a stream has only a position. This position is looked up
among the micro-batches of the live generation and its ancestors: the parent is the generation with a micro-batch that
ended exactly at the position. If no micro-batch ended there, the rows between the end of the preceding micro-batch and
the position are in the snapshot's state, but would have no live estimate. The user must allow such rows by an option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import compatibility
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import REMOVED, Generation
from jobs.lineage.source_ranges import SourceRange, find_around, find_last_whole
from jobs.snapshots.manifests import Manifest
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.measurements_table import count_rows_between, new_keys
from jobs.storage.positions import (
    VERSION,
    Place,
    build_delta_position,
    convert_position,
    describe,
    includes,
    is_same_source,
    to_position,
)
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from jobs.spark.warehouse import Warehouse

ALLOW = "--allow-missing-estimates"


class Continuation(NamedTuple):
    """The parent of a new generation, and the parent's last live micro-batch; -1 means no micro-batch of the parent.

    missing: number of rows that would have no live estimate; None if the number is unknown
    why: the reason why rows are missing; empty if no row is missing
    """

    parent: str | None
    batch: int | None
    missing: int | None = 0
    why: str = ""

    @property
    def link(self) -> tuple[str, int] | None:
        """Return the parent and its last live micro-batch; None if there is no parent."""
        return None if self.parent is None or self.batch is None else (self.parent, self.batch)

    def missing_rows(self, manifest: Manifest) -> str:
        """Return a phrase with the number of rows that lack a live estimate."""
        count = "an unknown number of rows" if self.missing is None else f"{self.missing:,} rows"
        return f"{count} up to {describe(manifest.position)} would have no live estimate: {self.why}"


class _Link(NamedTuple):
    """A generation of the live lineage, its last live micro-batch, and the place where its child began."""

    generation: Generation
    limit: int | None
    child: Place | None


def find_continuation(warehouse: Warehouse, manifest: Manifest) -> Continuation:
    """Return the micro-batch after which the live estimates continue in a new generation from a snapshot."""
    catalog = Catalog(warehouse)
    known = {one.generation: one for one in catalog.generations(manifest.model)}
    if _is_export(catalog, manifest, known):
        return Continuation(manifest.generation, manifest.batch_id)
    live = catalog.live(manifest.model)
    if live is None:
        return Continuation(None, None)
    other = _explain_other_source(catalog, live, manifest)
    if other:
        # The estimated rows of a former topic are stored and stay, but the rows of a former table are gone.
        last = None if live.topic is None else Checkpoint(warehouse, live.checkpoint).find_last_commit()
        return Continuation(live.generation, -1 if last is None else last, None, other)
    wanted = convert_position(manifest.position)
    link = _Link(live, None, None)
    while not includes(wanted, convert_position(link.generation.start_position)):
        parent = known.get(link.generation.parent or "")
        if parent is None or not is_same_source(parent.start_position, manifest.position):
            return _continue_before_first(warehouse, manifest, link.generation)
        link = _Link(parent, link.generation.parent_batch, convert_position(link.generation.start_position))
    return _continue_within(warehouse, manifest, link)


def find_last_position(warehouse: Warehouse, live: Generation) -> tuple[dict[str, Any], int]:
    """Return the last position of a generation at which a micro-batch ended, and this micro-batch.

    A stopped stream may have ended within a version. A generation that begins at the position estimates the rows after
    the position again. If no micro-batch ended at a position, return the generation's start and -1.
    """
    found = find_last_whole(warehouse, live)
    if found is None:
        return live.start_position, -1
    start, checkpoint = live.start_position, Checkpoint(warehouse, live.checkpoint)
    if checkpoint.has(found.batch):
        return checkpoint.position(found.batch, start), found.batch
    return to_position(found.end, start), found.batch


def _explain_other_source(catalog: Catalog, live: Generation, manifest: Manifest) -> str:
    """Return why the live generation and a snapshot have different sources; empty if they have the same source."""
    if not is_same_source(live.start_position, manifest.position):
        return f"{live.generation} reads another table or topic, or one that was made anew"
    began_from = catalog.manifest(live.snapshot_id)
    if began_from is None:
        return ""
    try:
        compatibility.refuse_other_measurements(catalog.warehouse, live, began_from)
    except UserError:
        return f"{live.generation} has read rows that the measurements lack since they were put back from a backup"
    return ""


def _is_export(catalog: Catalog, manifest: Manifest, known: dict[str, Generation]) -> bool:
    """Return whether a snapshot was exported from a generation whose estimates up to the snapshot still exist."""
    if manifest.generation is None or manifest.batch_id is None:
        return False
    source = known.get(manifest.generation)
    if source is None or source.status != REMOVED:
        return True
    # `maintain` has deleted the estimates of a removed generation, unless they are live.
    return any(one.generation == source.generation for one in catalog.lineage(manifest.model))


def _continue_before_first(warehouse: Warehouse, manifest: Manifest, first: Generation) -> Continuation:
    """Return a continuation before the first live estimate; no row lacks a live estimate, as history needs none."""
    start, wanted = convert_position(first.start_position), convert_position(manifest.position)
    if includes(start, wanted):
        return Continuation(first.generation, -1)
    why = (
        f"{first.generation} began at {describe(first.start_position)}, which is neither before nor after it"
    )
    return _count_missing_rows(warehouse, manifest, Continuation(first.generation, -1, None, why), start)


def _continue_within(warehouse: Warehouse, manifest: Manifest, link: _Link) -> Continuation:
    """Return the continuation after a generation that began at or before the snapshot's position."""
    name, wanted = link.generation.generation, convert_position(manifest.position)
    found = find_around(warehouse, link.generation, link.limit, wanted)
    end = found.before.end
    after = found.after or (None if link.child is None else SourceRange(-1, link.child, link.child))
    made = Continuation(name, found.before.batch)
    if found.unknown:
        why = (
            f"an earlier release wrote micro-batches of {name} after {_describe_place(end, manifest)}, and "
            f"where these ended "
            f"is not known"
        )
        return _count_missing_rows(warehouse, manifest, made._replace(why=why), end)
    if after is not None:
        begun = end if after.start is None else after.start
        if includes(begun, wanted):
            return made
        nearest = [one[VERSION] for one in found.positions if VERSION in one]
        why = (
            f"{name} estimated them in one micro-batch with later rows{_suggest_versions(manifest, nearest)}"
        )
        return _count_missing_rows(warehouse, manifest, made._replace(why=why), begun)
    read = found.reached if found.reached is not None and includes(found.reached, end) else end
    if includes(read, wanted):
        return made
    why = (
        f"{name} has read up to {_describe_place(read, manifest)}: let it catch up first (`kalman-pipeline "
        f"stream --model "
        f"{manifest.model}`)"
    )
    return _count_missing_rows(warehouse, manifest, made._replace(why=why), read)


def _count_missing_rows(
    warehouse: Warehouse, manifest: Manifest, made: Continuation, start: Place
) -> Continuation:
    """Return a continuation with the number of missing rows between a place and the snapshot's position."""
    table = measurements(manifest.model)
    # A stream that imports the states of new keys skips the history of these keys.
    with_history = not warehouse.exists(new_keys(manifest.model))
    missing = count_rows_between(warehouse, table, start, convert_position(manifest.position), with_history)
    return made._replace(why="", missing=0) if missing == 0 else made._replace(missing=missing)


def _suggest_versions(manifest: Manifest, nearest: list[int]) -> str:
    """Return a sentence with the nearest versions at which micro-batches ended, so a snapshot there misses no rows."""
    if not nearest:
        return ""
    options = " or ".join(str(one) for one in sorted(set(nearest)))
    return (
        f". A snapshot at version {options} misses none: `kalman-pipeline pretrain --model {manifest.model} "
        f"--to-version {max(nearest)}`, then `stream --adopt` that one"
    )


def _describe_place(place: Place, manifest: Manifest) -> str:
    if VERSION in place:
        return describe(build_delta_position("", place[VERSION]))
    return describe({**manifest.position, "offsets": place})
