"""The rows of history, as files that tasks read (`jobs.snapshots.measurement_files`) or as a frame of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from jobs.batch.batch_filter import Interval
from jobs.snapshots.measurement_files import (
    FileGroup,
    divide_groups,
    open_measurements,
    pack_groups,
    read_groups,
    read_micros,
)
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.packets import ROW_PACKETS, TYPED_ROW_PACKETS
from jobs.state.encoding.routing import Routing
from jobs.state.encoding.rows import RowFormat, build_row_packer, select_columns
from jobs.storage.table_rows import list_live_files
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.spark.warehouse import Warehouse

MOST_FILES = 5_000
"""The number of files up to which the driver looks at each; Spark's tasks do this for a table with more files."""
QUICK_BYTES = 1 << 30
"""The bytes, in the columns that are read, up to which packets take Java only seconds (about fifty million rows)."""
FEW_ROWS = 100_000
"""The number of rows up to which this process reads, learns and filters sooner than Spark starts."""
SMALL = 16
"""The entries of a covariance up to which the cost of a row hardly depends on their number."""


@dataclass(frozen=True)
class HistoryFiles:
    """The row groups with the rows of a version of a table whose event times are in an interval.

    schema: the columns of the spec, with their types in the table.
    """

    folder: str
    schema: StructType
    pieces: tuple[FileGroup, ...]
    interval: Interval = Interval()

    def between(self, interval: Interval) -> HistoryFiles:
        """Return the rows of an interval, without the row groups that have none; all rows must be known so far."""
        first, last = interval
        some = (
            one
            for one in self.pieces
            if (first is None or one.greatest >= first) and (last is None or one.least < last)
        )
        return replace(self, pieces=tuple(some), interval=interval)

    def pack(self, warehouse: Warehouse, fmt: RowFormat, routing: Routing, typed: bool) -> DataFrame:
        """Return packets of the rows, as `jobs.state.encoding.rows.pack_rows` does; `typed` packets have a kind."""
        packer, folder, holds = build_row_packer(fmt, routing, typed), self.folder, self.interval.holds

        def work(groups: list[FileGroup]) -> Iterator[pa.RecordBatch]:
            return pack_groups(folder, groups, fmt, packer, holds)

        return self._run(warehouse, work, TYPED_ROW_PACKETS if typed else ROW_PACKETS)

    def count(self, warehouse: Warehouse, time: str, at: int | None) -> tuple[int, int]:
        """Count the rows from an event time on, and the earlier rows; tasks count where statistics do not suffice.

        Args:
            warehouse: the warehouse, which runs the tasks.
            time: the column of event times.
            at: the event time; None means that no row is earlier.
        """
        first, last = self.interval
        limits = [one for one in (first, at, last) if one is not None]
        across = tuple(
            one for one in self.pieces if any(one.least < limit <= one.greatest for limit in limits)
        )
        whole = [one for one in self.pieces if one not in across]

        folder, holds = self.folder, self.interval.holds

        def work(groups: list[FileGroup]) -> Iterator[pa.RecordBatch]:
            for batch in read_groups(folder, groups, [time], time, holds):
                before = 0 if at is None else int(np.count_nonzero(read_micros(batch, time) < at))
                columns = [pa.array([n], pa.int64()) for n in (batch.num_rows - before, before)]
                yield pa.RecordBatch.from_arrays(columns, ["rows", "before"])

        found = [(0, one.rows) if at is not None and one.greatest < at else (one.rows, 0) for one in whole]
        if across:
            some = replace(self, pieces=across)
            found += some._run(warehouse, work, "rows bigint, before bigint").collect()
        return sum(rows for rows, _ in found), sum(before for _, before in found)

    def _run(self, warehouse: Warehouse, work: Callable[..., Any], schema: str) -> DataFrame:
        """Return the result of a function of row groups, in tasks that read about equally many bytes."""
        parts = divide_groups(self.pieces, warehouse.cores)

        def over(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    yield from work(parts[number])

        return warehouse.number_tasks(len(parts)).mapInArrow(over, schema)


def choose_files(warehouse: Tables, spec: ModelSpec, table: str, version: int) -> HistoryFiles | str:
    """Return the files that tasks can read exactly as Spark does, or a clause that says why Spark must read them.

    Args:
        warehouse: the warehouse.
        spec: the model of the measurements.
        table: the name of the table.
        version: the version of the table.
    """
    opened = open_measurements(warehouse, spec, table, version)
    if isinstance(opened, str):
        return opened
    rows, log = opened
    names = sorted(list_live_files(log)["path"].to_pylist())
    if len(names) > MOST_FILES:
        return f"the table has {len(names):,} files"
    found = rows.list_groups(names)
    if isinstance(found, str):
        return found
    return HistoryFiles(rows.folder, rows.schema, tuple(group for groups in found for group in groups))


@dataclass(frozen=True)
class RowSource:
    """Rows of history: files for tasks, chosen on first use, or a frame for Spark's reader, also made on first use.

    make_frame: return the rows as a frame.
    choose: return the files with exactly these rows, or why Spark must read them.
    """

    warehouse: Warehouse
    make_frame: Callable[[], DataFrame]
    choose: Callable[[], HistoryFiles | str]

    @classmethod
    def of_frame(cls, warehouse: Warehouse, frame: DataFrame, why: str) -> RowSource:
        """Return rows that Spark reads, and why."""
        return cls(warehouse, lambda: frame, lambda: why)

    @cached_property
    def frame(self) -> DataFrame:
        """The rows as a frame of Spark's reader."""
        return self.make_frame()

    @cached_property
    def files(self) -> HistoryFiles | str:
        """The files with exactly these rows, or why Spark must read the rows."""
        return self.choose()

    @cached_property
    def schema(self) -> StructType:
        """The columns of the rows and their types."""
        return self.frame.schema if isinstance(self.files, str) else self.files.schema

    @property
    def moves_rows(self) -> bool:
        """Return whether so much passes through Java, in rows or in packets, that its optimising compiler pays off."""
        return isinstance(self.files, str) or sum(one.size for one in self.files.pieces) > QUICK_BYTES

    def is_few(self, states: int) -> bool:
        """Return whether one process is done with the rows of so many states before Spark has started."""
        if isinstance(self.files, str):
            return False
        return sum(one.rows for one in self.files.pieces) * max(1, states**2 // SMALL) <= FEW_ROWS

    def pack(self, fmt: RowFormat, routing: Routing, typed: bool = False) -> DataFrame:
        """Return packets of the rows for each bucket; `typed` packets have a kind."""
        if not isinstance(self.files, str):
            return self.files.pack(self.warehouse, fmt, routing, typed)
        packets = TYPED_ROW_PACKETS if typed else ROW_PACKETS
        return select_columns(self.frame, fmt).mapInArrow(build_row_packer(fmt, routing, typed), packets)

    def before(self, time: str, at: int) -> RowSource:
        """Return the rows with earlier event times (µs) than `at`."""
        return RowSource(
            self.warehouse,
            lambda: self.frame.filter(F.unix_micros(F.col(f"`{time}`")) < at),
            lambda: self.files if isinstance(self.files, str) else self.files.between(Interval(None, at)),
        )

    def count(self, time: str) -> int:
        """Return the number of rows."""
        if isinstance(self.files, str):
            return self.frame.count()
        return self.files.count(self.warehouse, time, None)[0]

    def find_newest(self, time: str) -> int | None:
        """Return the greatest event time (µs); None if there are no rows."""
        last = None if isinstance(self.files, str) else self.files.interval.last
        if not isinstance(self.files, str) and all(
            last is None or one.greatest < last for one in self.files.pieces
        ):
            return max((one.greatest for one in self.files.pieces), default=None)
        row = self.frame.agg(F.max(F.unix_micros(F.col(f"`{time}`")))).first()
        return None if row is None else row[0]
