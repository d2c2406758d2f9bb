"""The states from which to forecast: those of the live generation after a micro-batch, or those of a snapshot."""

from __future__ import annotations

from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import generations
from jobs.lineage.damage import refuse_damaged
from jobs.lineage.generations import read_origin_manifest as origin_of
from jobs.lineage.model import DeployedModel
from jobs.snapshots import manifests
from jobs.snapshots.manifests import GOOD
from jobs.snapshots.store import verify
from jobs.spark.warehouse import Warehouse
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import describe
from jobs.streaming.state_reader import read_states

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest
    from jobs.specs.model_spec import ModelSpec

NEWEST = "newest"
"""In place of a snapshot's name: the newest one, also where a stream is live."""


class ForecastOrigin(NamedTuple):
    """States of keys, the rows of a snapshot, and where they come from.

    manifest: of the snapshot, or of the one that the generation began from: it has the spec and the parameters
    generation, batch: None for a snapshot
    taken_at: when the micro-batch or the snapshot was committed; None: unknown
    position: what the states reflect, in words
    """

    manifest: Manifest
    spec: ModelSpec
    states: DataFrame
    generation: str | None
    batch: int | None
    taken_at: datetime | None
    position: str

    @property
    def name(self) -> str:
        """Return a name of the states: the same states have the same."""
        if self.generation is None:
            return self.manifest.snapshot_id
        return f"{self.generation}-b{self.batch}"

    @property
    def text(self) -> str:
        """Return the same in words."""
        if self.generation is None:
            return f"snapshot {self.manifest.snapshot_id}"
        return f"micro-batch {self.batch} of {self.generation}"


def find_origin(model: DeployedModel[Warehouse], snapshot: str | None) -> ForecastOrigin:
    """Return the states to forecast from.

    Args:
        model: the deployed one.
        snapshot: a snapshot's id, or `newest`; None: the live generation, and where none is live the newest snapshot.

    Raises:
        UserError: there is no such snapshot, or none at all; the states are damaged.
    """
    warehouse, spec = model.warehouse, model.spec
    generation = None if snapshot is not None else generations.find_live(warehouse, spec.name)
    if generation is None:
        return _read_snapshot(warehouse, _choose_snapshot(model, snapshot), spec.folder)
    refuse_damaged(warehouse, generation)
    began = origin_of(warehouse, generation)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    batch = checkpoint.find_last_commit()
    if batch is None:
        return _read_snapshot(warehouse, began, spec.folder)
    return ForecastOrigin(
        began,
        began.model_spec(spec.folder),
        read_states(model, generation, began, batch).frame,
        generation.generation,
        batch,
        checkpoint.committed_at(batch),
        describe(checkpoint.position(batch, generation.start_position)),
    )


def _read_snapshot(warehouse: Warehouse, manifest: Manifest, folder: str | None) -> ForecastOrigin:
    states = verify(warehouse, manifest)
    spec = manifest.model_spec(folder)
    return ForecastOrigin(
        manifest, spec, states, None, None, manifest.committed_at, describe(manifest.position)
    )


def _choose_snapshot(model: DeployedModel[Warehouse], snapshot: str | None) -> Manifest:
    known = [one for one in manifests.read_manifests(model.warehouse, model.name) if one.status == GOOD]
    if snapshot not in (None, NEWEST):
        found = next((one for one in known if one.snapshot_id == snapshot), None)
        if found is None:
            have = ", ".join(one.snapshot_id for one in known[-3:]) or "none"
            raise UserError(f"--snapshot {snapshot}: model {model.name} has no such snapshot (it has {have})")
        return found
    fitting = [one for one in known if one.fingerprint == model.spec.fingerprint() and not one.without_state]
    if not fitting:
        others = f" ({len(known)} are of other specs)" if known else ""
        raise UserError(
            f"model {model.name} has no live stream and no snapshot of version {model.spec.version} as its spec is "
            f"now{others}, so there is no state to forecast from: make one with `kalman-pipeline pretrain --model "
            f"{model.name}`, or give the rows of a file with --input"
        )
    return max(fitting, key=attrgetter("preference"))
