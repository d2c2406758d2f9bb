"""Note the commits of the measurements that a generation has reached, in small files in its checkpoint.

Spark's files have a version's number and the table's id. Both stay the same when the table is restored from a backup
and grows again, so the commit's id is noted before the micro-batch writes anything. A note must never be older than the
state: the commit of an older note could be in the table both before and after a restore.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from jobs.core.errors import RUN_FAILED, UserError
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import commit_id
from jobs.storage.warehouse import Tables

FOLDER = "reached"
KEPT = 2
"""Number of notes that are kept. Each note is a new file, so that no reader finds an incomplete note."""


class Reached(NamedTuple):
    """The latest version from which a generation has read rows, and the id of its commit."""

    version: int
    commit: str


class ReachedCommits:
    """The notes of one generation."""

    def __init__(self, warehouse: Tables, checkpoint: str, table: str) -> None:
        """Open the notes of a checkpoint; `checkpoint` is its path below the warehouse's root."""
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
        """Note the commit that a micro-batch reaches, unless an earlier micro-batch has reached it.

        Raises:
            UserError: the commit that the previous micro-batch had reached has been replaced since.
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
