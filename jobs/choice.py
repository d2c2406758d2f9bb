"""Choose the generation that a stream drives: the live one, or a new one from the right snapshot."""

from __future__ import annotations

from typing import NamedTuple

from jobs import generations, leases, snapshots
from jobs.errors import RUN_FAILED, UserError
from jobs.generations import Generation
from jobs.snapshots import Manifest
from jobs.spec import ModelSpec
from jobs.tables import Warehouse


class Choice(NamedTuple):
    """A generation, the snapshot that it began from, and if it begins now."""

    generation: Generation
    manifest: Manifest
    begins: bool


def choose(warehouse: Warehouse, spec: ModelSpec, adopt: str | None) -> Choice:
    """Return the generation to drive: the live one, else one from the newest good snapshot; or from `adopt`.

    Raises:
        UserError: there is no snapshot, the live state means something else than the spec, or a driver holds it.
    """
    live = generations.live(warehouse, spec.name)
    if adopt is not None and (live is None or live.snapshot_id != adopt):
        manifest = _adoptable(warehouse, spec, adopt)
        if live is not None:
            leases.refuse_if_driven(live)
        return Choice(_begin(warehouse, spec, manifest), manifest, True)
    if live is None:
        manifest = snapshots.newest_startable(warehouse, spec.name, spec.fingerprint())
        if manifest is None:
            raise UserError(_no_snapshot(warehouse, spec))
        return Choice(_begin(warehouse, spec, manifest), manifest, True)
    generations.check_unchanged(live, spec.fingerprint(), spec.version)
    manifest = snapshots.find(warehouse, live.snapshot_id)
    if manifest is None:
        raise UserError(
            f"the manifest of snapshot {live.snapshot_id}, from which {live.generation} began, is missing",
            RUN_FAILED,
        )
    return Choice(live, manifest, False)


def _adoptable(warehouse: Warehouse, spec: ModelSpec, snapshot_id: str) -> Manifest:
    manifest = snapshots.find(warehouse, snapshot_id)
    if manifest is None or manifest.model != spec.name:
        known = [one.snapshot_id for one in snapshots.all_of(warehouse, spec.name)]
        have = f"it has {', '.join(known[-5:])}" if known else "it has none"
        raise UserError(f"--adopt {snapshot_id}: model {spec.name} has no such snapshot ({have})")
    if manifest.fingerprint != spec.fingerprint():
        raise UserError(
            f"--adopt {snapshot_id}: it is of version {manifest.model_version} of {spec.name} and the spec, version "
            f"{spec.version}, gives the state another meaning: pretrain the spec as it is now"
        )
    if manifest.cut is not None:
        raise UserError(
            f"--adopt {snapshot_id}: it is history before {manifest.cut:%Y-%m-%d %H:%M} UTC only; rows after that, "
            f"up to version {manifest.version}, would be lost. Pretrain up to a version instead"
        )
    return manifest


def _no_snapshot(warehouse: Warehouse, spec: ModelSpec) -> str:
    known = snapshots.all_of(warehouse, spec.name)
    text = f"model {spec.name} has no snapshot that a stream can start from"
    if known:
        text += f" ({len(known)} of other versions, or of history only)"
    return f"{text}: make one with `kalman-pipeline pretrain --model {spec.name}`"


def _begin(warehouse: Warehouse, spec: ModelSpec, manifest: Manifest) -> Generation:
    partitions = spec.stream.partitions or warehouse.spark.sparkContext.defaultParallelism
    keys = max(manifest.key_count, spec.stream.expected_keys or 0, 1)
    blocks = max(1, -(-keys // (partitions * spec.stream.keys_per_block)))
    return generations.begin(warehouse, manifest, partitions, blocks)
