"""Export a snapshot of a stream's state at the end of a committed micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.catalog import export_id
from jobs.lineage.compatibility import add_commit_to_position, refuse_other_measurements
from jobs.lineage.damage import refuse_damaged
from jobs.lineage.generations import REMOVED
from jobs.lineage.generations import read_origin_manifest as origin_of
from jobs.lineage.missing_rows import refuse_missing_rows
from jobs.lineage.model import DeployedModel
from jobs.lineage.pinned_inputs import read_pinned_version
from jobs.snapshots.store import find_whole, write
from jobs.spark.job_labels import label_jobs
from jobs.spark.warehouse import Warehouse
from jobs.storage.checkpoints import Checkpoint
from jobs.streaming.state_reader import read_states, read_waiting

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest


def export(
    model: DeployedModel[Warehouse],
    generation: Generation,
    batch: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    allow_missing_rows: bool = False,
) -> tuple[Manifest, bool]:
    """Return the snapshot of a generation's state at the end of a micro-batch, and whether this call made it.

    A generation that has committed nothing has the state of its starting snapshot. By default the micro-batch is the
    last one that completes a version of the measurements. With `allow_missing_rows` the export does not compare a state
    of format 1 with its estimates.

    Raises:
        UserError: the generation is removed or damaged, its measurements have changed, the micro-batch does not exist,
            or the state lacks rows that were estimated.
    """
    warehouse = model.warehouse
    if generation.status == REMOVED:  # its checkpoint may be partly deleted
        raise UserError(f"generation {generation.generation} is removed, and its state with it")
    origin = origin_of(warehouse, generation)
    refuse_damaged(warehouse, generation)
    refuse_other_measurements(warehouse, generation, origin)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    if checkpoint.find_last_commit() is None:
        if batch is not None:
            raise UserError(f"{generation.generation} has no micro-batch {batch}: it has committed none")
        return origin, False
    batch, version = _end(checkpoint, generation, batch)
    check: Callable[[Manifest], None] | None = None
    if checkpoint.has_states_of_format_1() and not allow_missing_rows:
        check = partial(refuse_missing_rows, warehouse, generation)
    identity = export_id(generation, batch, version)
    found = find_whole(warehouse, identity)
    if found is not None:
        if check is not None:
            check(found)
        return found, False
    on_progress(f"reading the state of micro-batch {batch}")
    made = replace(
        origin,
        snapshot_id=identity,
        position=add_commit_to_position(
            warehouse, generation, checkpoint.position(batch, generation.start_position)
        ),
        generation=generation.generation,
        batch_id=batch,
        parent=None,
        cut=None,
        committed_at=None,
        numerics=generation.numerics,
        inputs=None if origin.inputs is None else read_pinned_version(warehouse, generation, batch),
    )
    states = read_states(model, generation, origin, batch)
    held = None
    if origin.model_spec().timed:
        held = read_waiting(model, generation, origin, batch)
    with label_jobs(warehouse.spark, f"export {generation.model}", "read the state, write the snapshot"):
        return write(warehouse, replace(made, waiting=None), states, held, check=check), True


def _end(checkpoint: Checkpoint, generation: Generation, batch: int | None) -> tuple[int, int]:
    """Return a committed micro-batch and the version of the measurements that it completes."""
    last = checkpoint.find_last_commit()
    assert last is not None
    if batch is not None and not 0 <= batch <= last:
        raise UserError(
            f"{generation.generation} has no micro-batch {batch}: its last committed one is {last}"
        )
    if batch is not None:
        version = checkpoint.ends_with(batch)
        if version is not None:
            return batch, version
        raise UserError(
            f"micro-batch {batch} of {generation.generation} ends within a version of the measurements, so no "
            f"stream could start exactly after it: export another"
        )
    whole = find_last_whole_batch(checkpoint)
    if whole is not None:
        return whole
    raise UserError(
        f"no micro-batch of {generation.generation} whose state is kept completes a version of the measurements: "
        f"let the stream catch up, or raise stream.max_files_per_batch in the spec",
        RUN_FAILED,
    )


def find_last_whole_batch(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return the last committed micro-batch that completes a version, and that version; None if there is none.

    Several micro-batches may share a version that has many files.
    """
    for batch in reversed(checkpoint.commits()):
        if not checkpoint.has(batch):
            break
        version = checkpoint.ends_with(batch)
        if version is not None:
            return batch, version
    return None
