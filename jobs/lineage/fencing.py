"""Commit only as the holder of the lease: a driver that lost its lease can no longer write.

A driver that is frozen for long loses its lease to another, and may wake up in the middle of a micro-batch. A check of
the lease before a commit is not enough, as the driver may freeze in between. So the lease's epoch is in the commit:

- A commit's transaction number consists of epoch and micro-batch. Delta skips a transaction whose number does not
  exceed the last number of its name, and refuses a transaction whose name another commit has used meanwhile.
- An earlier driver may still run until it records its end. While one may, a driver first makes an empty commit to each
  table, with a number after the last such driver's. From then on every commit of that epoch or an earlier epoch is
  skipped or refused, wherever its driver was frozen. Delta skips the empty commit if a later driver has written.
- A skipped commit is not mistaken for a written one: after its commits, and before its micro-batch is done, a driver
  checks if a later epoch has begun, and stops if so.

If a driver was killed between its commits, the number does not show whether its micro-batch was written, as the next
driver numbers it by a new epoch. This can only be the micro-batch whose offsets were fixed before the next driver
began; for this micro-batch the table is queried.
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

_BATCHES = 2**32
"""The number of micro-batches that an epoch can number."""


def parse_batch(number: int) -> int:
    """Return the micro-batch of a transaction number in the Delta log of an estimates table."""
    return number % _BATCHES


class RowGroup(NamedTuple):
    """One of several appends of a micro-batch to the same table: its name, and the condition for its rows."""

    name: str
    condition: str


@dataclass
class Fence:
    """Write micro-batches to tables as the holder of a lease.

    pending: the micro-batch that an earlier driver may have begun to write, if any.
    """

    warehouse: Warehouse
    lease: Lease
    pending: int | None
    _last: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Check that this driver still holds the lease; cheap enough for every micro-batch.

        Raises:
            UserError: a later driver holds it.
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

        After a kill before the commit, nothing is written; after a later kill, the next driver finds the rows and
        skips them. The table gets the columns that it lacks: another version of the model may have more.

        Args:
            rows: rows to append.
            table: name of the table.
            batch_id: number of the micro-batch.
            part: identifies this append if a micro-batch appends to the table several times.

        Raises:
            UserError: the lease is lost.
        """
        name = self._name(table, part)
        if self._begin_append(rows.schema, table, name, batch_id, part):
            self.warehouse.append(rows, table, (name, self._number(batch_id)), more_columns=True)
            self.check()

    def add(self, files: Sequence[PartFile], table: FileTable, schema: StructType, batch_id: int) -> None:
        """Add a micro-batch's files of rows to a table, exactly once, as `append` appends rows.

        Args:
            files: files of rows that are marked with `generation` and `batch_id`.
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
        return self.lease.generation.epoch * _BATCHES + batch_id

    def begin(self, rows: Callable[[], DataFrame], table: str) -> None:
        """Append the generation's first rows to a table, before micro-batches upsert rows, unless it already has rows.

        Raises:
            UserError: the lease is lost.
        """
        self.check()
        name = self._fence_upserts(table)
        if self._has_matching_rows(table, self._mine):
            return
        number = self.lease.generation.epoch * _BATCHES
        self.warehouse.append(rows(), table, (name, number), more_columns=True)
        self.check()

    def forget(self, table: str) -> None:
        """Delete the generation's rows from a table into which this driver does not upsert, if the table exists.

        Afterwards no earlier driver can add rows, and this driver, if it freezes, cannot delete rows of a later driver.

        Raises:
            UserError: the lease is lost.
        """
        if not self.warehouse.exists(table):
            return
        self.check()
        self._fence_upserts(table)
        mine = [[("generation", "=", self.lease.generation.generation)]]
        number = self.lease.generation.epoch * _BATCHES
        delete_rows(self.warehouse, table, mine, transaction=(self._name(table, None), number))
        self.check()

    def upsert(self, rows: DataFrame, table: str, batch_id: int, key: str) -> None:
        """Upsert a micro-batch's rows, one per `key`, among the generation's rows.

        This is idempotent, so after a kill the table need not be queried.

        Raises:
            UserError: the lease is lost.
        """
        self.check()
        name = self._name(table, None)
        self._raise_fence(rows.schema, table, name)
        self._last[name] = batch_id
        # A constant, so that rows of other generations are not read and their drivers' commits do not conflict.
        mine = f"t.generation = '{self.lease.generation.generation}' AND t.`{key}` = s.`{key}`"
        self.warehouse.upsert(rows, table, mine, (name, self._number(batch_id)))
        self.check()

    def _name(self, table: str, part: RowGroup | None) -> str:
        return f"{self.lease.generation.generation}/{table}/{part.name if part else 'rows'}/by-epoch"

    @property
    def _mine(self) -> Column:
        return F.col("generation") == self.lease.generation.generation

    def _fence_upserts(self, table: str) -> str:
        """Keep earlier drivers from upserting rows and from `begin`; return the transaction name of `begin`."""
        rows, begun = self._name(table, None), f"{self._name(table, None)}/begin"
        if self.lease.taken_over:
            schema = self.warehouse.read(table).schema
            for name in (rows, begun):
                self._raise_fence(schema, table, name)
                self._last[name] = -1
        return begun

    def _raise_fence(self, schema: StructType, table: str, name: str) -> None:
        """Keep earlier drivers that may still run from writing under a name; once per name."""
        if self.lease.taken_over and name not in self._last:
            self.warehouse.mark(table, schema, (name, (self.lease.suspect + 1) * _BATCHES - 1))

    def _has_matching_rows(self, table: str, condition: Column) -> bool:
        return self.warehouse.exists(table) and not self.warehouse.read(table).filter(condition).isEmpty()
