"""Continue a stream whose states have format 1 as a generation of format 2, before anything else is written.

Releases before 0.3.0 used format 1. There, attempts of a micro-batch write files with the same names, and a frozen
driver may overwrite them at any time. So this release only reads such states, at the last committed micro-batch, and
compares them with the estimates (`jobs.lineage.find_missing_rows`).

A hand-over that was killed at any moment is repeated by the next start: it finds the export by its id. One commit
retires the former generation and makes the new one live. A driver of the former generation that wakes up detects this;
its writes after the exported micro-batch are not live.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from jobs.core.errors import UserError, extract_first_line
from jobs.lineage import generations, leases
from jobs.lineage.generations import LIVE
from jobs.lineage.model import DeployedModel
from jobs.lineage.start_point import StartPoint
from jobs.snapshots.manifests import Manifest
from jobs.spark.warehouse import Warehouse
from jobs.storage.checkpoints import Checkpoint
from jobs.streaming.exporting import export, find_last_whole_batch
from jobs.supervision.driver_identity import DriverIdentity
from jobs.supervision.driver_log import FAILED, STOPPED
from kalman import NUMERICS


def continue_former_states(
    model: DeployedModel[Warehouse],
    start: StartPoint,
    owner: DriverIdentity,
    stop: threading.Event,
    note: Callable[[str], None],
    allow_missing_rows: bool,
) -> StartPoint:
    """Return the start of a new generation that continues the live generation's states of format 1.

    Args:
        model: the deployed model.
        start: the start point that names the live generation.
        owner: this driver; it holds the lease of the former generation during the export.
        stop: set if another driver takes the lease over.
        note: called with progress messages.
        allow_missing_rows: also hand over states that lack rows.

    Raises:
        UserError: the generation is a shadow, a driver holds it, or its states lack rows.
    """
    warehouse, former = model.warehouse, start.generation
    if former.status != LIVE:
        raise UserError(
            f"the states of the shadow {former.generation} are of an earlier release's format, which this one only "
            f"reads: `kalman-pipeline upgrade --model {former.model}` makes the shadow anew"
        )
    lease, error = leases.acquire_lease(warehouse, former, owner), None
    try:
        with leases.keep_lease(warehouse, lease, stop):
            note(f"{former.generation} hands its states over to a new generation")
            manifest, batch = _export_states(model, start, note, allow_missing_rows)
            lease.check()
            place = former.partitions, former.blocks, lease.generation
            made = generations.begin(
                warehouse, manifest, *place, parent=(former.generation, batch), numerics=NUMERICS
            )
    except BaseException as problem:
        error = extract_first_line(problem, 500)
        raise
    finally:
        leases.release(warehouse, lease, STOPPED if error is None else FAILED, error)
    said = (
        f"{former.generation} kept its states in the format of an earlier release; {made.generation} continues them "
        f"from snapshot {manifest.snapshot_id}"
    )
    return StartPoint(made, manifest, start.spec, True, (*start.notes, said))


def _export_states(
    model: DeployedModel[Warehouse], start: StartPoint, note: Callable[[str], None], allow_missing_rows: bool
) -> tuple[Manifest, int]:
    """Return a generation's export and its micro-batch, or its start if no micro-batch completes a version."""
    if find_last_whole_batch(Checkpoint(model.warehouse, start.generation.checkpoint)) is None:
        return start.manifest, -1
    manifest, _ = export(model, start.generation, None, note, allow_missing_rows)
    assert manifest.batch_id is not None
    return manifest, manifest.batch_id
