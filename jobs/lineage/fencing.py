"""Commit only as the holder of the lease, so that a driver that has lost its lease can no longer write.

A driver that is frozen for long loses its lease to another driver, and may wake up in the middle of a micro-batch. A
check of the lease before a commit is not enough, because the driver may freeze between the check and the commit. So the
epoch of the lease is part of the commit:

- A commit's transaction number consists of the epoch and the micro-batch. Delta skips a transaction whose number does
  not exceed the last number under its name, and refuses a transaction if another commit has used its name meanwhile.
- An earlier driver may still run until it has recorded its end. While an earlier driver may run, a driver first makes
  an empty commit to each table, with a number above the numbers of all such drivers. From then on, every commit of
  their epochs is skipped or refused, wherever a driver was frozen. Delta skips the empty commit if a later driver has
  written.
- A skipped commit does not pass for a written commit: after its commits, and before its micro-batch is done, a driver
  checks whether a later epoch has begun, and stops in this case.

If a driver was killed between its commits, the transaction number does not show whether its micro-batch was written,
because the next driver numbers the micro-batch by a new epoch. Only the micro-batch whose offsets were fixed before the
next driver began can be affected; for this micro-batch the table is queried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F

from jobs.lineage.leases import Lease
from jobs.spark.warehouse import Warehouse
from jobs.storage.row_changes import delete_rows

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from jobs.storage.part_files import PartFile
    from jobs.storage.table_log import FileTable

BATCHES = 2**32
"""Number of transaction numbers reserved for each epoch: one for each micro-batch."""


class RowGroup(NamedTuple):
    """One of several appends of a micro-batch to one table: the name of the append, and the condition of its rows."""

    name: str
    condition: str


@dataclass
class Fence:
    """Write micro-batches to tables as the holder of a lease.

    pending: the micro-batch that an earlier driver may have begun to write, or None.
    """

    warehouse: Warehouse
    lease: Lease
    pending: int | None
    _last: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Check that this driver still holds the lease; the check is cheap enough for every micro-batch.

        Raises:
            UserError: a later driver holds the lease.
        """
        self.lease.check()

    def append(
        self,
        rows: DataFrame,
        table: str,
        batch_id: int,
        part: RowGroup | None = None,
    ) -> None:
        """Append a micro-batch's rows, marked with `generation` and `batch_id`, to a table, exactly once.

        After a kill before the commit, nothing is written. After a later kill, the next driver finds the rows and does
        not write them again. Columns that the table lacks are added, because another model version may have more
        columns.

        Args:
            rows: rows to append.
            table: name of the table.
            batch_id: number of the micro-batch.
            part: identifies this append if the micro-batch appends to the table several times; None means one append.

        Raises:
            UserError: the lease is lost.
        """
        name = self._name(table, part)
        if self._begin_append(rows.schema, table, name, batch_id, part):
            self.warehouse.append(rows, table, (name, self._number(batch_id)), more_columns=True)
            self.check()

    def add(self, files: Sequence[PartFile], table: FileTable, schema: StructType, batch_id: int) -> None:
        """Add a micro-batch's files of rows to a table, exactly once, as `append` does with rows.

        Args:
            files: files with rows that are marked with `generation` and `batch_id`.
            table: the table.
            schema: schema of the rows.
            batch_id: number of the micro-batch.

        Raises:
            UserError: the lease is lost, or the commit failed.
        """
        name = self._name(table.name, None)
        if self._begin_append(schema, table.name, name, batch_id, None):
            table.commit(files, (name, self._number(batch_id)))
            self.check()

    def _begin_append(
        self,
        schema: StructType,
        table: str,
        name: str,
        batch_id: int,
        part: RowGroup | None,
    ) -> bool:
        """Keep earlier drivers from writing under a name; return whether the micro-batch must still be appended."""
        self.check()
        assert self._last.get(name) != batch_id, (
            f"two appends of micro-batch {batch_id} under one name, {name}"
        )
        self._raise_fence(schema, table, name)
        self._last[name] = batch_id
        if batch_id != self.pending:
            return True
        written = self._mine & (F.col("batch_id") == batch_id)
        return not self._has_matching_rows(
            table, written if part is None else written & F.expr(part.condition)
        )

    def _number(self, batch_id: int) -> int:
        return self.lease.generation.epoch * BATCHES + batch_id

    def begin(self, rows: Callable[[], DataFrame], table: str) -> None:
        """Append the generation's first rows, to which upserts follow, unless the table has rows of the generation.

        Raises:
            UserError: the lease is lost.
        """
        self.check()
        name = self._fence_upserts(table)
        if self._has_matching_rows(table, self._mine):
            return
        number = self.lease.generation.epoch * BATCHES
        self.warehouse.append(rows(), table, (name, number), more_columns=True)
        self.check()

    def forget(self, table: str) -> None:
        """Delete the generation's rows from a table into which this driver does not upsert, if the table exists.

        Afterwards no earlier driver can add rows. If this driver freezes, it cannot delete rows of a later driver.

        Raises:
            UserError: the lease is lost.
        """
        if not self.warehouse.exists(table):
            return
        self.check()
        self._fence_upserts(table)
        mine = [[("generation", "=", self.lease.generation.generation)]]
        number = self.lease.generation.epoch * BATCHES
        delete_rows(self.warehouse, table, mine, transaction=(self._name(table, None), number))
        self.check()

    def upsert(self, rows: DataFrame, table: str, batch_id: int, key: str) -> None:
        """Upsert a micro-batch's rows, one per `key`, among the generation's rows.

        A repeated upsert changes nothing, so the table need not be queried after a kill.

        Raises:
            UserError: the lease is lost.
        """
        self.check()
        name = self._name(table, None)
        self._raise_fence(rows.schema, table, name)
        self._last[name] = batch_id
        # The name is a constant, so that other generations' rows are not read and their drivers' commits do not
        # conflict.
        mine = f"t.generation = '{self.lease.generation.generation}' AND t.`{key}` = s.`{key}`"
        self.warehouse.upsert(rows, table, mine, (name, self._number(batch_id)))
        self.check()

    def _name(self, table: str, part: RowGroup | None) -> str:
        return f"{self.lease.generation.generation}/{table}/{part.name if part else 'rows'}/by-epoch"

    @property
    def _mine(self) -> Column:
        return F.col("generation") == self.lease.generation.generation

    def _fence_upserts(self, table: str) -> str:
        """Keep earlier drivers from `upsert` and `begin`; return the name of the transaction of `begin`."""
        rows, begun = self._name(table, None), f"{self._name(table, None)}/begin"
        if self.lease.taken_over:
            schema = self.warehouse.read(table).schema
            for name in (rows, begun):
                self._raise_fence(schema, table, name)
                self._last[name] = -1
        return begun

    def _raise_fence(self, schema: StructType, table: str, name: str) -> None:
        """Keep earlier drivers that may still run from writing under a transaction name; done once per name."""
        if self.lease.taken_over and name not in self._last:
            self.warehouse.mark(table, schema, (name, (self.lease.suspect + 1) * BATCHES - 1))

    def _has_matching_rows(self, table: str, condition: Column) -> bool:
        return self.warehouse.exists(table) and not self.warehouse.read(table).filter(condition).isEmpty()
