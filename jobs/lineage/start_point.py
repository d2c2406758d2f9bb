"""Choose the generation that a stream drives: the live one, a new one from a snapshot, or one by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import compatibility, generations, hand_over, leases
from jobs.lineage.damage import find_damage, refuse_damaged
from jobs.lineage.generations import REMOVED, RETIRED, Generation
from jobs.snapshots import manifests
from jobs.snapshots.manifests import Manifest
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import describe
from jobs.storage.tables import need_columns
from jobs.storage.warehouse import Tables
from kalman import NUMERICS

if TYPE_CHECKING:
    from jobs.spark.warehouse import Warehouse


class StartPoint(NamedTuple):
    """The generation to drive, the snapshot that it began from, the spec to run it with, and if this start made it.

    notes: sentences about differences that wait for an upgrade or a hand-over (`compatibility.check`).
    """

    generation: Generation
    manifest: Manifest
    spec: ModelSpec
    is_new: bool
    notes: tuple[str, ...] = ()


def resolve(
    warehouse: Warehouse,
    spec: ModelSpec,
    adopt: str | None = None,
    generation: str | None = None,
    allow_missing: bool = False,
) -> StartPoint:
    """Return the generation to drive, which is made if need be.

    What the tables alone tell is refused before Spark starts.

    In this order: `generation`; a new one from the snapshot `adopt`; the live one; a new one from the newest good
    snapshot. A generation of an earlier version than the spec runs with the spec in its snapshot's manifest.

    Args:
        warehouse: of the generations.
        spec: the deployed one.
        adopt: id of a snapshot.
        generation: name of a generation.
        allow_missing: adopt the snapshot even if rows before its position would have no live estimate.

    Raises:
        UserError: there is no snapshot, its state does not fit the spec, rows would have no live estimate, or another
            driver holds the generation.
    """
    if generation is not None:
        return _again(warehouse, spec, generations.named(warehouse, spec.name, generation))
    live = generations.live(warehouse, spec.name)
    if adopt is not None and _is_new(warehouse, adopt, live):
        manifest = _adoptable(warehouse, spec, adopt)
        if live is not None:
            leases.refuse_if_driven(live)
        return _adopted(warehouse, spec, manifest, live, allow_missing)
    if live is None:
        need_columns(warehouse, spec.name, spec.columns)
        if manifests.newest_startable(warehouse, spec.name, spec.fingerprint(), spec.source_kind) is None:
            raise UserError(
                _no_snapshot(warehouse, spec)
            )  # without asking a topic, for which Spark would start
        deployed = compatibility.deployment(warehouse, spec)
        known = spec.fingerprint(), spec.source_kind, deployed.table, deployed.topic_id
        manifest = manifests.newest_startable(warehouse, spec.name, *known)
        if manifest is None:
            raise UserError(_no_snapshot(warehouse, spec))
        compatibility.check(compatibility.snapshot_built_with(manifest), deployed)
        parent = hand_over.of_snapshot(warehouse, manifest).link
        return StartPoint(begin(warehouse, spec, manifest, parent, None), manifest, spec, True)
    return _again(warehouse, spec, live)


def _is_new(warehouse: Warehouse, adopt: str, live: Generation | None) -> bool:
    """Tell if a snapshot needs a new generation: not if the live one began from it and can continue.

    A damaged checkpoint cannot continue, nor one of a warehouse that was moved since, nor one with states of format 1,
    which may lack rows.
    """
    if live is None or live.snapshot_id != adopt or find_damage(warehouse, live) is not None:
        return True
    checkpoint = Checkpoint(warehouse, live.checkpoint)
    return checkpoint.has_states_of_format_1() or checkpoint.moved_from() is not None


def _adopted(
    warehouse: Warehouse, spec: ModelSpec, manifest: Manifest, live: Generation | None, allow_missing: bool
) -> StartPoint:
    """Make the generation that adopts a snapshot.

    Raises:
        UserError: rows before the snapshot's position would have no live estimate, and this is not allowed.
    """
    found = hand_over.of_snapshot(warehouse, manifest)
    notes: list[str] = []
    if found.why:
        missing = found.missing_rows(manifest)
        if not allow_missing:
            raise UserError(
                f"--adopt {manifest.snapshot_id}: {missing}. Or add {hand_over.ALLOW}: the state has these rows, the "
                f"live estimates never will"
            )
        notes.append(missing)
    return StartPoint(begin(warehouse, spec, manifest, found.link, live), manifest, spec, True, tuple(notes))


def begin_exported(
    warehouse: Warehouse,
    spec: ModelSpec,
    manifest: Manifest,
    source: Generation,
    status: str = generations.LIVE,
    partitions: int | None = None,
) -> Generation:
    """Make a generation from the exported (and migrated) state of the live one, which it continues.

    If that generation has committed nothing, its state still is the snapshot that it began from; the new one then
    continues it from its start.
    """
    parent = source.generation, -1
    if manifest.generation == source.generation and manifest.batch_id is not None:
        parent = source.generation, manifest.batch_id
    return begin(warehouse, spec, manifest, parent, source, status, partitions)


def begin(
    warehouse: Warehouse,
    spec: ModelSpec,
    manifest: Manifest,
    parent: tuple[str, int] | None,
    live: Generation | None,
    status: str = generations.LIVE,
    partitions: int | None = None,
) -> Generation:
    """Make a generation from a snapshot, laid out for its keys.

    parent: what it continues, after which micro-batch; live: the live generation that the command has seen.

    Raises:
        UserError: another command has changed the model's generations meanwhile.
    """
    partitions = partitions or spec.stream.partitions or warehouse.spark.sparkContext.defaultParallelism
    return generations.begin(
        warehouse,
        manifest,
        partitions,
        compatibility.blocks_of(spec, manifest.key_count, partitions),
        live,
        status,
        parent,
        numerics=NUMERICS,
    )


def _again(warehouse: Warehouse, spec: ModelSpec, generation: Generation) -> StartPoint:
    leases.refuse_if_driven(generation)
    if generation.status == REMOVED:
        raise UserError(
            f"generation {generation.generation} is removed: its checkpoint is gone, so it cannot resume"
        )
    if generation.status == RETIRED:
        raise UserError(
            f"generation {generation.generation} is retired: `kalman-pipeline rollback --model {spec.name} "
            f"--to {generation.generation}` makes it the live one again"
        )
    manifest = generations.origin(warehouse, generation)
    refuse_damaged(warehouse, generation)
    built_with = compatibility.generation_built_with(warehouse, generation, manifest, spec.folder)
    deployed = compatibility.deployment(warehouse, spec, built_with.settings)
    notes = compatibility.check(built_with, deployed)
    return StartPoint(
        generation, manifest, compatibility.spec_to_run(built_with.spec, spec), False, tuple(notes)
    )


def _adoptable(warehouse: Warehouse, spec: ModelSpec, snapshot_id: str) -> Manifest:
    manifest = _adoptable_manifest(warehouse, spec, snapshot_id)
    compatibility.check(
        compatibility.snapshot_built_with(manifest), compatibility.deployment(warehouse, spec)
    )
    return manifest


def _adoptable_manifest(warehouse: Tables, spec: ModelSpec, snapshot_id: str) -> Manifest:
    """Return the manifest of a snapshot that a stream of this spec may start from, as far as the manifest tells."""
    manifest = manifests.find(warehouse, snapshot_id)
    if manifest is None or manifest.model != spec.name:
        known = [one.snapshot_id for one in manifests.all_of(warehouse, spec.name)]
        have = f"it has {', '.join(known[-5:])}" if known else "it has none"
        raise UserError(f"--adopt {snapshot_id}: model {spec.name} has no such snapshot ({have})")
    if manifest.fingerprint != spec.fingerprint():
        raise UserError(
            f"--adopt {snapshot_id}: it is of version {manifest.model_version} of {spec.name} and the spec, version "
            f"{spec.version}, gives the state another meaning: migrate the snapshot, or pretrain the spec as it is now"
        )
    if manifest.position["source"] != spec.source_kind:
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


def _no_snapshot(warehouse: Tables, spec: ModelSpec) -> str:
    known = manifests.all_of(warehouse, spec.name)
    text = f"model {spec.name} has no snapshot that a stream can start from"
    if known:
        text += f" ({len(known)} of other versions, of history only, or of rows that are gone)"
    return f"{text}: make one with `kalman-pipeline pretrain --model {spec.name}`"
