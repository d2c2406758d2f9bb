"""Choose the generation that a stream drives: the live one, a new one from a snapshot, or a named generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import compatibility, generations, hand_over, leases
from jobs.lineage.generation_checkpoint import find_damage, refuse_damaged
from jobs.lineage.generations import REMOVED, RETIRED, DeployedModel, Generation
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
        parent = hand_over.find_continuation(warehouse, manifest).link
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
    found = hand_over.find_continuation(model.warehouse, manifest)
    notes: list[str] = []
    if found.why:
        missing = found.missing_rows(manifest)
        if not allow_missing:
            raise UserError(
                f"--adopt {manifest.snapshot_id}: {missing}. Or add {hand_over.ALLOW}: the state has these rows, the "
                f"live estimates never will"
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
