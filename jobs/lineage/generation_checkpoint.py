"""Notes in a generation's checkpoint of the reached commits of the measurements, and damage to the checkpoint."""

from __future__ import annotations

import json
from typing import NamedTuple

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.generations import Generation
from jobs.snapshots import manifests
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import commit_id
from jobs.storage.quarantine import TABLE
from jobs.storage.tables import estimates
from jobs.storage.warehouse import Tables

FOLDER = "reached"
KEPT = 2
"""Number of notes that are kept. Each note is a new file, so that a reader never finds an incomplete note."""


class Reached(NamedTuple):
    """The latest version from which a generation has read rows, and the id of its commit."""

    version: int
    commit: str


class ReachedCommits:
    """The notes of one generation."""

    def __init__(self, warehouse: Tables, checkpoint: str, table: str) -> None:
        """Open the notes of a checkpoint; `checkpoint` is the checkpoint's path below the warehouse's root."""
        self._warehouse, self._table = warehouse, table
        self._checkpoint = Checkpoint(warehouse, checkpoint)
        self._files = warehouse.files(f"{checkpoint}/{FOLDER}")
        self._last: Reached | None = None

    def newest(self) -> Reached | None:
        """Return the note of the latest version, or None before the first note."""
        names = self._names()
        content = self._files.read(names[-1]) if names else None
        return None if content is None else Reached(**json.loads(content))

    def take(self, batch: int) -> None:
        """Note the commit that a micro-batch reaches, unless an earlier micro-batch has reached the same commit.

        Raises:
            UserError: another commit has replaced the commit that the previous micro-batch reached.
        """
        version = self._checkpoint.find_touched_version(batch)
        last = self._last or self.newest()
        if last is not None and last.version >= version:
            return
        if last is not None and commit_id(self._warehouse, self._table, last.version) not in (
            None,
            last.commit,
        ):
            raise UserError(
                f"{self._table} was put back while the stream ran: version {last.version} is another commit now. "
                f"Nothing of micro-batch {batch} was written",
                RUN_FAILED,
            )
        commit = commit_id(self._warehouse, self._table, version)
        if commit is None:
            return
        self._last = Reached(version, commit)
        self._files.write(f"{version:020d}.json", json.dumps(self._last._asdict()).encode())
        for name in self._names()[:-KEPT]:
            self._files.remove(name)

    def _names(self) -> list[str]:
        return [name for name in self._files.names("") if name.endswith(".json")]


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
    """Refuse a checkpoint that is damaged, or that Spark would look for at the former location of the warehouse.

    Raises:
        UserError: the checkpoint is damaged, or was moved; the message explains how to recover.
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
    """Return a sentence that explains how to recover a stream that has lost the checkpoint of its generation.

    The sentence names the latest export of the generation, or else the snapshot from which the generation began. Only
    for these two the preceding micro-batch is known, so that readers miss no row and see no row twice.
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
    """Return the uncommitted micro-batch whose rows a killed driver has partly written, or None."""
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
