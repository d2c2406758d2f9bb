"""Choose the generation that a stream drives, and the micro-batch after which a new generation continues.

A stream drives the live generation, a new one from a snapshot, or a named one. A new one continues another so that each
row has exactly one estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import compatibility, generations, leases
from jobs.lineage.catalog import Catalog
from jobs.lineage.generation_checkpoint import find_damage, refuse_damaged
from jobs.lineage.generations import REMOVED, RETIRED, DeployedModel, Generation
from jobs.lineage.source_ranges import SourceRange, find_around, find_last_whole
from jobs.snapshots import manifests
from jobs.snapshots.manifests import Manifest
from jobs.specs.model_spec import ModelSpec
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
from jobs.storage.tables import measurements, need_columns
from jobs.storage.warehouse import Tables
from kalman import NUMERICS

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
        f"stream --model {manifest.model}`){_suggest_versions(manifest, [read[VERSION]] if VERSION in read else [])}"
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
        f"--to-version {max(nearest)}`, then `kalman-pipeline stream --model {manifest.model} --adopt SNAPSHOT` with it"
    )


def _describe_place(place: Place, manifest: Manifest) -> str:
    if VERSION in place:
        return describe(build_delta_position("", place[VERSION]))
    return describe({**manifest.position, "offsets": place})


class StartPoint(NamedTuple):
    """The generation to drive, the snapshot from which it began, the spec to run, and whether this start made it.

    notes: sentences about differences that wait for an upgrade or a hand-over (`compatibility.check`).
    """

    generation: Generation
    manifest: Manifest
    spec: ModelSpec
    is_new: bool
    notes: tuple[str, ...] = ()


def resolve(
    model: DeployedModel[Warehouse],
    adopt: str | None = None,
    generation: str | None = None,
    allow_missing: bool = False,
) -> StartPoint:
    """Return the generation to drive; make it if necessary.

    Checks that need only the tables run before Spark starts.

    The first choice that applies is made: the generation named `generation`; a new generation from the snapshot
    `adopt`; the live generation; a new generation from the newest good snapshot. A generation whose version is below
    the version of the spec runs with the spec in the manifest of its snapshot.

    Args:
        model: the deployed model.
        adopt: id of a snapshot, or None.
        generation: name of a generation, or None.
        allow_missing: whether to adopt the snapshot even if rows before its position would have no live estimate.

    Raises:
        UserError: there is no snapshot, its state does not fit the spec, rows would have no live estimate, or another
            driver holds the generation.
    """
    warehouse, spec = model.warehouse, model.spec
    if generation is not None:
        return _resume_generation(model, generations.read_named(warehouse, spec.name, generation))
    live = generations.find_live(warehouse, spec.name)
    if adopt is not None and _is_new(warehouse, adopt, live):
        manifest = _check_adoptable(model, adopt)
        deployed = compatibility.describe_deployment(model)
        compatibility.check(compatibility.describe_snapshot_build(manifest), deployed)
        if live is not None:
            leases.refuse_if_driven(live)
        return _adopt_snapshot(model, manifest, live, allow_missing)
    if live is None:
        need_columns(warehouse, spec.name, spec.columns)
        if (
            manifests.find_newest_startable(warehouse, spec.name, spec.fingerprint(), spec.source_kind)
            is None
        ):
            raise UserError(_explain_no_snapshot(model))  # raised before Spark starts to look at the topic
        deployed = compatibility.describe_deployment(model)
        known = spec.fingerprint(), spec.source_kind, deployed.table, deployed.topic_id
        manifest = manifests.find_newest_startable(warehouse, spec.name, *known)
        if manifest is None:
            raise UserError(_explain_no_snapshot(model))
        compatibility.check(compatibility.describe_snapshot_build(manifest), deployed)
        parent = find_continuation(warehouse, manifest).link
        return StartPoint(begin(model, manifest, parent, None), manifest, spec, True)
    return _resume_generation(model, live)


def _is_new(warehouse: Warehouse, adopt: str, live: Generation | None) -> bool:
    """Return whether a snapshot needs a new generation, because the live one did not begin from it or cannot continue.

    A generation cannot continue if its checkpoint is damaged, if the warehouse was moved, or if its states have format
    1, which may lack rows.
    """
    if live is None or live.snapshot_id != adopt or find_damage(warehouse, live) is not None:
        return True
    checkpoint = Checkpoint(warehouse, live.checkpoint)
    return checkpoint.has_states_of_format_1() or checkpoint.find_former_root() is not None


def _adopt_snapshot(
    model: DeployedModel[Warehouse], manifest: Manifest, live: Generation | None, allow_missing: bool
) -> StartPoint:
    """Make the generation that adopts a snapshot.

    Raises:
        UserError: rows before the snapshot's position would have no live estimate, and this is not allowed.
    """
    found = find_continuation(model.warehouse, manifest)
    notes: list[str] = []
    if found.why:
        missing = found.missing_rows(manifest)
        if not allow_missing:
            raise UserError(
                f"--adopt {manifest.snapshot_id}: {missing}. Or run `kalman-pipeline stream --model {model.name} "
                f"--adopt {manifest.snapshot_id} {ALLOW}`: the state has these rows, the live estimates never will"
            )
        notes.append(missing)
    return StartPoint(begin(model, manifest, found.link, live), manifest, model.spec, True, tuple(notes))


def begin_exported(
    model: DeployedModel[Warehouse],
    manifest: Manifest,
    source: Generation,
    status: str = generations.LIVE,
    partitions: int | None = None,
) -> Generation:
    """Make a generation that continues `source` from its exported (and possibly migrated) state.

    If `source` has committed nothing, its state is still the snapshot from which it began. The new generation then
    continues from the start of `source`.
    """
    parent = source.generation, -1
    if manifest.generation == source.generation and manifest.batch_id is not None:
        parent = source.generation, manifest.batch_id
    return begin(model, manifest, parent, source, status, partitions)


def begin(
    model: DeployedModel[Warehouse],
    manifest: Manifest,
    parent: tuple[str, int] | None,
    live: Generation | None,
    status: str = generations.LIVE,
    partitions: int | None = None,
) -> Generation:
    """Make a generation from a snapshot, with a layout for the number of its keys.

    parent: the generation to continue, and its last live micro-batch. live: the live generation that the command read.

    Raises:
        UserError: another command has changed the model's generations meanwhile.
    """
    partitions = (
        partitions or model.spec.stream.partitions or model.warehouse.spark.sparkContext.defaultParallelism
    )
    return generations.begin(
        model.warehouse,
        manifest,
        partitions,
        compatibility.compute_block_count(model.spec, manifest.key_count, partitions),
        live,
        status,
        parent,
        numerics=NUMERICS,
    )


def _resume_generation(model: DeployedModel[Warehouse], generation: Generation) -> StartPoint:
    leases.refuse_if_driven(generation)
    if generation.status == REMOVED:
        raise UserError(
            f"generation {generation.generation} is removed: its checkpoint is gone, so it cannot resume"
        )
    if generation.status == RETIRED:
        raise UserError(
            f"generation {generation.generation} is retired: `kalman-pipeline rollback --model {model.name} "
            f"--to {generation.generation}` makes it the live one again"
        )
    manifest = generations.read_origin_manifest(model.warehouse, generation)
    refuse_damaged(model.warehouse, generation)
    built_with = compatibility.describe_generation_build(model, generation, manifest)
    deployed = compatibility.describe_deployment(model, built_with.settings)
    notes = compatibility.check(built_with, deployed)
    return StartPoint(
        generation, manifest, compatibility.select_spec(built_with.spec, model.spec), False, tuple(notes)
    )


def _check_adoptable(model: DeployedModel[Tables], snapshot_id: str) -> Manifest:
    """Return the manifest of a snapshot from which, by the manifest, a stream of this spec may start.

    Raises:
        UserError: a stream of this spec may not start from the snapshot.
    """
    manifest = manifests.find(model.warehouse, snapshot_id)
    if manifest is None or manifest.model != model.name:
        known = [one.snapshot_id for one in manifests.read_manifests(model.warehouse, model.name)]
        have = f"it has {', '.join(known[-5:])}" if known else "it has none"
        raise UserError(f"--adopt {snapshot_id}: model {model.name} has no such snapshot ({have})")
    if manifest.fingerprint != model.spec.fingerprint():
        raise UserError(
            f"--adopt {snapshot_id}: it is of version {manifest.model_version} of {model.name} and the spec, version "
            f"{model.spec.version}, gives the state another meaning: migrate the snapshot, or pretrain the spec as it "
            f"is now"
        )
    if manifest.position["source"] != model.spec.source_kind:
        raise UserError(
            f"--adopt {snapshot_id}: its position ({describe(manifest.position)}) is in another source than the "
            f"spec's: pretrain the spec as it is now"
        )
    if manifest.cut is not None:
        raise UserError(
            f"--adopt {snapshot_id}: it covers only rows before {manifest.cut:%Y-%m-%d %H:%M} UTC; later rows, up "
            f"to {describe(manifest.position)}, would be lost. Pretrain up to a version instead"
        )
    return manifest


def _explain_no_snapshot(model: DeployedModel[Tables]) -> str:
    known = manifests.read_manifests(model.warehouse, model.name)
    text = f"model {model.name} has no snapshot that a stream can start from"
    if known:
        text += f" ({len(known)} of other versions, of history only, or of rows that are gone)"
    return f"{text}: make one with `kalman-pipeline pretrain --model {model.name}`"
