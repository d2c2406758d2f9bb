"""Find damage in a generation's checkpoint, and name the snapshot from which its stream resumes without loss.

If a checkpoint is missing, Spark silently starts from nothing; if a part is missing, it starts from a wrong position.
So the checkpoint is examined before the query starts, and a damaged one is refused; nothing is repaired by guessing.
"""

from __future__ import annotations

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.generations import Generation
from jobs.snapshots import manifests
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.quarantine import TABLE
from jobs.storage.tables import estimates
from jobs.storage.warehouse import Tables


def find_damage(warehouse: Tables, generation: Generation) -> str | None:
    """Return a description of the damage of a generation's checkpoint, or None."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    found = checkpoint.find_damage()
    if (
        found is None
        and generation.epoch
        and checkpoint.find_last_planned() is None
        and _has_written_rows(warehouse, generation)
    ):
        return (
            f"there is nothing in {generation.checkpoint}, and {generation.generation} has written estimates"
        )
    return found


def refuse_damaged(warehouse: Tables, generation: Generation) -> None:
    """Refuse a damaged checkpoint, and a checkpoint that Spark would look for in the former place of the warehouse.

    Raises:
        UserError: the checkpoint is damaged, or was moved; the message has the way to recover.
    """
    found = find_damage(warehouse, generation)
    if found is not None:
        raise UserError(
            f"the checkpoint of {generation.generation} is damaged: {found}. Restore it from a copy; or "
            f"{describe_recovery(warehouse, generation)}",
            RUN_FAILED,
        )
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    if checkpoint.find_former_root() is not None:
        checkpoint.refuse_moved(f"; or {describe_recovery(warehouse, generation)}")


def describe_recovery(warehouse: Tables, generation: Generation) -> str:
    """Return a sentence that describes how to recover a stream without its generation's checkpoint.

    The hint names the generation's latest export, or else the snapshot from which it began. Only for these the
    preceding micro-batch is known, so that readers miss no row and see no row twice.
    """
    mine = [
        one
        for one in manifests.read_manifests(warehouse, generation.model)
        if one.generation == generation.generation and one.model_version == generation.model_version
    ]
    newest = max(mine, key=lambda one: one.batch_id or 0, default=None)
    snapshot = generation.snapshot_id if newest is None else newest.snapshot_id
    return (
        f"let a new generation process the rows after a snapshot again, each row counted "
        f"once: `kalman-pipeline stream --model {generation.model} --adopt {snapshot}`"
    )


def find_half_written_batch(warehouse: Tables, generation: Generation) -> int | None:
    """Return the uncommitted micro-batch of which a killed driver has written rows, or None."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    planned = checkpoint.find_last_planned()
    if planned is None or planned == checkpoint.find_last_commit():
        return None
    return planned if _has_written_rows(warehouse, generation, planned) else None


def _has_written_rows(warehouse: Tables, generation: Generation, batch: int | None = None) -> bool:
    for table in (estimates(generation.model), TABLE):
        wanted = {"generation": generation.generation} | ({} if batch is None else {"batch_id": batch})
        if warehouse.has_rows(table, wanted):
            return True
    return False
