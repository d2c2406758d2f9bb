"""Count the rows of a run from the log of its Delta table.

It saves a job over all rows. Where the log does not tell for sure, because a file lies across an end of the interval,
the rows have to be counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jobs.batch.batch_filter import Interval
from jobs.storage.table_log import read_files_at

if TYPE_CHECKING:
    from jobs.spark.warehouse import Warehouse

_MILLISECOND = 1000


class HistoryCounts(NamedTuple):
    """Rows of the interval, rows before it that were read, rows that do not fit, rows whose key has no inputs."""

    rows: int
    before: int
    unfit: int
    without_inputs: int


class CountedRows(NamedTuple):
    """The rows to count: those of the interval, and those before it since a time (None: all of them)."""

    interval: Interval
    since: int | None

    @property
    def everything(self) -> bool:
        """Whether all rows are of the interval."""
        return self.interval == Interval(None, None) and self.since is None

    def place(self, earliest: int, latest: int) -> int | None:
        """Return where rows of such times are: 0 in the interval, 1 before it, -1 not read; None: not in one place."""
        first, last = self.interval
        if last is not None and earliest >= last or self.since is not None and latest < self.since:
            return -1
        if last is not None and latest >= last or self.since is not None and earliest < self.since:
            return None
        if first is None or earliest >= first:
            return 0
        return 1 if latest < first else None


def _sum_counts(found: Iterable[tuple[int, int | None]]) -> HistoryCounts | None:
    """Return the counts of numbers of rows that are all in one place each (`Wanted.place`); None if some are not."""
    totals = [0, 0]
    for number, place in found:
        if place is None:
            return None
        if place >= 0:
            totals[place] += number
    return HistoryCounts(totals[0], totals[1], 0, 0)


def count_by_log(
    warehouse: Warehouse, table: str, version: int, time: str, wanted: CountedRows
) -> HistoryCounts | None:
    """Return the counts of a Delta table's version all of whose rows fit, if its log tells them.

    Args:
        warehouse: of the table.
        table: its name.
        version: of the table.
        time: the column of event times.
        wanted: the rows to count.
    """
    files = read_files_at(warehouse, table, version)
    if files is None or "." in time:
        return None
    names = ["num_records"] if wanted.everything else ["num_records", f"min.{time}", f"max.{time}"]
    if not files.num_rows:
        return HistoryCounts(0, 0, 0, 0)
    if not set(names) <= set(files.column_names) or any(files.column(name).null_count for name in names):
        return None
    rows = files.column("num_records").to_pylist()
    if wanted.everything:
        return HistoryCounts(sum(rows), 0, 0, 0)
    if not all(pa.types.is_timestamp(files.schema.field(name).type) for name in names[1:]):
        return None
    least, greatest = (
        pc.cast(files.column(name), pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
        for name in names[1:]
    )
    # Delta in Java rounds both bounds down to milliseconds.
    places = (wanted.place(low, high + _MILLISECOND - 1) for low, high in zip(least, greatest, strict=True))
    return _sum_counts(zip(rows, places, strict=True))
