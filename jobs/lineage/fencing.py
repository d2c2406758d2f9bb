"""Commit as the holder of the lease, or not at all: a driver that lost its lease can write nothing any more.

A driver that is frozen long enough loses its lease to another, and may wake up in the middle of a micro-batch. Looking
at the lease before a commit is not enough, as it may freeze between the two. So the lease's epoch is in the commit:

- A commit's transaction is numbered by epoch, then micro-batch. Delta passes over a transaction whose number is not
  above the last one of its name, and refuses one whose name another has used meanwhile.
- A driver that takes over from one that may still run first makes an empty commit of its own epoch to each table. From
  then on every commit of the older epoch is passed over or refused, wherever its driver was stopped.
- What was passed over is not taken for written: after its commits and before its micro-batch counts as done, a
  driver looks if a later epoch has begun, and ends if so.

That the same micro-batch is not written twice, when a driver was killed between its commits, is no longer told by the
number. It can only be the one whose offsets were fixed before this driver began, and the table is asked if it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from delta.exceptions import ConcurrentTransactionException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.leases import Lease
from jobs.warehouse.delta import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BATCHES = 2**32
"""Micro-batches that an epoch has numbers for."""
_TRIES = 5


def batch_of(number: int) -> int:
    """Return the micro-batch that a transaction of an estimates table belongs to, by its number in the log."""
    return number % _BATCHES


class Part(NamedTuple):
    """One of several appends of a micro-batch to the same table: its name, and which of the table's rows are its."""

    name: str
    condition: str


@dataclass
class Fence:
    """The way of a micro-batch's rows into tables.

    pending: the micro-batch that an earlier driver may have begun to write, if there is one.
    """

    warehouse: Warehouse
    lease: Lease
    pending: int | None
    _last: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Look if the lease is still this driver's: cheap enough for every micro-batch.

        Raises:
            UserError: a later driver has it.
        """
        generation = self.lease.generation
        if self.lease.overtaken():
            raise UserError(
                f"generation {generation.generation} is no longer this driver's: another has taken it over",
                RUN_FAILED,
            )

    def append(
        self,
        rows: DataFrame,
        table: str,
        batch_id: int,
        options: Mapping[str, str] | None = None,
        part: Part | None = None,
    ) -> None:
        """Append a micro-batch's rows, marked with `generation` and `batch_id`, to a table, exactly once.

        Killed before the commit, nothing is there; after it, the next driver finds the rows and passes over them.

        Args:
            rows: what to append.
            table: to what.
            batch_id: of the micro-batch.
            options: of the Delta writer.
            part: where a micro-batch appends to a table several times, which of them this is.

        Raises:
            UserError: the lease is lost.
        """
        self.check()
        name = self._name(table, part)
        assert self._last.get(name) != batch_id, (
            f"two appends of micro-batch {batch_id} under one name, {name}"
        )
        self._raise_fence(rows, table, name, options)
        self._last[name] = batch_id
        if batch_id == self.pending and self._there(table, batch_id, part):
            return
        number = self.lease.generation.epoch * _BATCHES + batch_id
        self.warehouse.append(rows, table, (name, number), options)
        self.check()

    def begin(self, rows: DataFrame, table: str, options: Mapping[str, str] | None = None) -> None:
        """Append a generation's first rows to a table, before its micro-batches upsert others.

        Raises:
            UserError: the lease is lost.
        """
        self.check()
        name = f"{self._name(table, None)}/begin"
        self._raise_fence(rows, table, name, options)
        self._last[name] = -1
        self.warehouse.append(rows, table, (name, self.lease.generation.epoch * _BATCHES), options)
        self.check()

    def upsert(
        self, rows: DataFrame, table: str, batch_id: int, key: str, options: Mapping[str, str] | None = None
    ) -> None:
        """Put a micro-batch's rows, one a `key`, in the place of the generation's rows with these keys.

        Doing it again, or once more after a kill, changes nothing, so nobody has to look if it was done.

        Raises:
            UserError: the lease is lost.
        """
        self.check()
        name = self._name(table, None)
        self._raise_fence(rows, table, name, options)
        self._last[name] = batch_id
        # A constant, so that rows of other generations are neither read nor in the way of their drivers' commits.
        mine = f"t.generation = '{self.lease.generation.generation}' AND t.`{key}` = s.`{key}`"
        number = self.lease.generation.epoch * _BATCHES + batch_id
        self.warehouse.upsert(rows, table, mine, (name, number), options or {})
        self.check()

    def _name(self, table: str, part: Part | None) -> str:
        return f"{self.lease.generation.generation}/{table}/{part.name if part else 'rows'}/by-epoch"

    def _raise_fence(self, rows: DataFrame, table: str, name: str, options: Mapping[str, str] | None) -> None:
        """Keep the driver that had the lease before from writing under a name, once, if it may still run."""
        if not self.lease.taken_over or name in self._last:
            return
        nothing = self.warehouse.spark.createDataFrame([], rows.schema)
        number = self.lease.generation.epoch * _BATCHES - 1
        for left in reversed(range(_TRIES)):
            try:
                self.warehouse.append(nothing, table, (name, number), options)
                return
            except ConcurrentTransactionException:  # the other one's last commit came between
                if left == 0:
                    raise

    def _there(self, table: str, batch_id: int, part: Part | None) -> bool:
        if not self.warehouse.exists(table):
            return False
        mine = F.col("generation") == self.lease.generation.generation
        if part is not None:
            mine = mine & F.expr(part.condition)
        return not self.warehouse.read(table).filter(mine & (F.col("batch_id") == batch_id)).isEmpty()
