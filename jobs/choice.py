"""Choose the generation that a stream drives: the live one, a new one from the right snapshot, or one by its name."""

from __future__ import annotations

from typing import NamedTuple

from jobs import generations, leases, snapshots
from jobs.checkpoints import Checkpoint
from jobs.errors import RUN_FAILED, UserError
from jobs.generations import REMOVED, RETIRED, Generation
from jobs.positions import said
from jobs.snapshots import Manifest
from jobs.spec import ModelSpec
from jobs.tables import Warehouse


class Choice(NamedTuple):
    """A generation, the snapshot that it began from, the spec that its state means, and if it begins now."""

    generation: Generation
    manifest: Manifest
    spec: ModelSpec
    begins: bool


def choose(
    warehouse: Warehouse, spec: ModelSpec, adopt: str | None = None, generation: str | None = None
) -> Choice:
    """Return the generation to drive.

    That is `generation`; or a new one from the snapshot `adopt`; or the live one; or a new one from the newest good
    snapshot. A generation of an earlier version than the spec goes on with the spec that its snapshot keeps.

    Raises:
        UserError: there is no snapshot, the state means something else than the spec, or a driver holds it.
    """
    if generation is not None:
        return _again(warehouse, spec, generations.named(warehouse, spec.name, generation))
    live = generations.live(warehouse, spec.name)
    if adopt is not None and (live is None or live.snapshot_id != adopt):
        manifest = _adoptable(warehouse, spec, adopt)
        if live is not None:
            leases.refuse_if_driven(live)
        return Choice(begin(warehouse, spec, manifest), manifest, spec, True)
    if live is None:
        manifest = snapshots.newest_startable(warehouse, spec.name, spec.fingerprint(), spec.source_kind)
        if manifest is None:
            raise UserError(_no_snapshot(warehouse, spec))
        return Choice(begin(warehouse, spec, manifest), manifest, spec, True)
    return _again(warehouse, spec, live)


def begin(
    warehouse: Warehouse, spec: ModelSpec, manifest: Manifest, status: str = generations.LIVE
) -> Generation:
    """Make a generation from a snapshot, laid out for its keys, with the one that it follows as its parent."""
    partitions = spec.stream.partitions or warehouse.spark.sparkContext.defaultParallelism
    keys = max(manifest.key_count, spec.stream.expected_keys or 0, 1)
    blocks = max(1, -(-keys // (partitions * spec.stream.keys_per_block)))
    parent = _parent(warehouse, manifest)
    return generations.begin(warehouse, manifest, partitions, blocks, status, parent)


def _parent(warehouse: Warehouse, manifest: Manifest) -> tuple[str, int] | None:
    """Return the generation that one from this snapshot follows, and the last of its micro-batches that count."""
    if manifest.generation is not None and manifest.batch_id is not None:
        return manifest.generation, manifest.batch_id
    live = generations.live(warehouse, manifest.model)
    if live is None:
        return None
    checkpoint = Checkpoint(warehouse, live.checkpoint)
    batch = checkpoint.last_commit()
    while batch is not None and batch >= 0 and checkpoint.has(batch):
        version = checkpoint.ends_with(batch)
        if version is not None and version <= manifest.version:
            return live.generation, batch
        batch -= 1
    return live.generation, -1


def origin(warehouse: Warehouse, generation: Generation) -> Manifest:
    """Return the manifest of the snapshot that a generation began from.

    Raises:
        UserError: it is missing.
    """
    manifest = snapshots.record(warehouse, generation.snapshot_id)
    if manifest is None:
        raise UserError(
            f"the manifest of snapshot {generation.snapshot_id}, from which {generation.generation} began, is missing",
            RUN_FAILED,
        )
    return manifest


def _again(warehouse: Warehouse, spec: ModelSpec, generation: Generation) -> Choice:
    if generation.status == REMOVED:
        raise UserError(
            f"generation {generation.generation} is removed: its checkpoint is gone, so nothing can go on from it"
        )
    if generation.status == RETIRED:
        raise UserError(
            f"generation {generation.generation} is retired: `kalman-pipeline rollback --model {spec.name} "
            f"--to {generation.generation}` makes it the live one again"
        )
    manifest = origin(warehouse, generation)
    return Choice(generation, manifest, meant_by(spec, generation, manifest), False)


def meant_by(spec: ModelSpec, generation: Generation, manifest: Manifest) -> ModelSpec:
    """Return the spec that a generation's state means: the deployed one, or an earlier version's.

    Raises:
        UserError: the deployed spec gives the state another meaning under the same version, or is an older one.
    """
    if generation.fingerprint == spec.fingerprint():
        return spec
    if generation.model_version < spec.version:
        return manifest.model_spec()
    what = (
        f"the deployed spec is version {spec.version}, older than the generation's {generation.model_version}"
        if generation.model_version > spec.version
        else f"its spec has changed since {generation.generation} began, under the same version {spec.version}"
    )
    raise UserError(
        f"the stream of {spec.name} cannot go on: {what}, so its state would mean something else. Put the spec back; "
        f"or raise its version and run `kalman-pipeline upgrade --model {spec.name}`; or pretrain it and start a new "
        f"generation with `stream --model {spec.name} --adopt SNAPSHOT`",
        RUN_FAILED,
    )


def _adoptable(warehouse: Warehouse, spec: ModelSpec, snapshot_id: str) -> Manifest:
    manifest = snapshots.find(warehouse, snapshot_id)
    if manifest is None or manifest.model != spec.name:
        known = [one.snapshot_id for one in snapshots.all_of(warehouse, spec.name)]
        have = f"it has {', '.join(known[-5:])}" if known else "it has none"
        raise UserError(f"--adopt {snapshot_id}: model {spec.name} has no such snapshot ({have})")
    if manifest.fingerprint != spec.fingerprint():
        raise UserError(
            f"--adopt {snapshot_id}: it is of version {manifest.model_version} of {spec.name} and the spec, version "
            f"{spec.version}, gives the state another meaning: migrate it, or pretrain the spec as it is now"
        )
    if manifest.position["source"] != spec.source_kind:
        raise UserError(
            f"--adopt {snapshot_id}: its position is in another source than the spec's ({said(manifest.position)}): "
            f"pretrain the spec as it is now"
        )
    if manifest.cut is not None:
        raise UserError(
            f"--adopt {snapshot_id}: it is history before {manifest.cut:%Y-%m-%d %H:%M} UTC only; rows after that, "
            f"up to {said(manifest.position)}, would be lost. Pretrain up to a version instead"
        )
    return manifest


def _no_snapshot(warehouse: Warehouse, spec: ModelSpec) -> str:
    known = snapshots.all_of(warehouse, spec.name)
    text = f"model {spec.name} has no snapshot that a stream can start from"
    if known:
        text += f" ({len(known)} of other versions, or of history only)"
    return f"{text}: make one with `kalman-pipeline pretrain --model {spec.name}`"
