"""Put files of a Delta table in the place of others, in one commit: readers see the former rows or the new ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from jobs.storage.part_files import PartFile
from jobs.storage.table_log import Due, FileTable
from jobs.storage.table_rows import live_files

_OF_PARTITION = "partition."


class ReplacingTable(FileTable):
    """A table of which files are replaced by others."""

    def files(self) -> pa.Table:
        """Return the table's files (`live_files`).

        Raises:
            UserError: there is no such table.
        """
        return live_files(self._need())

    def replace(
        self,
        parts: Sequence[PartFile],
        replaced: Callable[[pa.Table], Collection[str] | None],
        metadata: Mapping[str, Any],
    ) -> int | None:
        """Add files to the table and remove others in one commit; return the version that it made.

        Args:
            parts: the files to add.
            replaced: returns the names of the files to remove, given the table's files (`live_files`); None: the table
                has rows of which the new files know nothing, so nothing is committed. It is called anew where another
                commit came in between.
            metadata: of the commit.

        Raises:
            Conflict: other commits came in between again and again.
            UserError: the log cannot be read or written, a file is gone, the table no longer takes the columns of which
                it was asked last, or its files do not tell its rows.
        """

        def due(log: DeltaTable) -> Due | None:
            files = live_files(log)
            gone = replaced(files)
            if gone and "deletionVectors" in (log.protocol().reader_features or ()):
                raise self._refused(
                    "it has the feature deletionVectors, and rows are to be replaced: "
                    "ALTER TABLE ... DROP FEATURE deletionVectors"
                )
            return None if gone is None else Due(removed=_removed(files, gone))

        return self._commit(parts, due, {**metadata, "isBlindAppend": False})


def _removed(files: pa.Table, gone: Collection[str]) -> list[RemoveAction]:
    columns = [name for name in files.column_names if name.startswith(_OF_PARTITION)]
    names: Any = pa.array(list(gone), pa.string())
    now = int(time.time() * 1000)
    return [
        RemoveAction(
            file["path"],
            True,
            now,
            file["size_bytes"],
            {name.removeprefix(_OF_PARTITION): file[name] for name in columns},
        )
        for file in files.select(["path", "size_bytes", *columns])
        .filter(pc.field("path").isin(names))
        .to_pylist()
    ]
