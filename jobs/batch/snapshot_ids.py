"""Which measurements table a snapshot is made of: part of its id, as a table's successor has the same name."""

from __future__ import annotations

from typing import NamedTuple, Self

from jobs.snapshots.manifests import record
from jobs.spark.warehouse import Warehouse
from jobs.storage.positions import CommitMark, commit_mark


class TableVersion(NamedTuple):
    """A version of a measurements table: the table's id, and the mark of the version's commit if known."""

    table: str
    mark: CommitMark | None

    @classmethod
    def of(cls, warehouse: Warehouse, table: str, version: int) -> Self:
        """Return what a version of a table is."""
        return cls(warehouse.table_id(table), commit_mark(warehouse, table, version))

    @property
    def ids(self) -> tuple[str, str | None]:
        """Return the id of the table and that of the commit."""
        return self.table, self.mark and self.mark.id


def of_earlier_release(warehouse: Warehouse, snapshot_id: str, now: TableVersion) -> str | None:
    """Return the id that an earlier release gave a snapshot, if that is of the table as it is now, as far as it tells.

    It does not name its commit; but if it is older than the commit, it is of another one.
    """
    found = record(warehouse, snapshot_id)
    if found is None or found.position.get("id", now.table) != now.table:
        return None
    if found.position.get("commit") not in (None, now.ids[1]):
        return None
    made, landed = found.committed_at, now.mark and now.mark.at
    return None if made is not None and landed is not None and made < landed else snapshot_id
