"""Count the rows of a run from what files say of themselves: the ends of Parquet files, or a Delta table's log.

It saves a job over all rows. Where they do not tell for sure, because a file has rows that may not fit, or lies across
an end of the interval, the rows have to be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.core.roots import local_path
from jobs.history.source import Interval
from jobs.storage.positions import to_micros
from jobs.storage.table_log import files_at

if TYPE_CHECKING:
    from jobs.spark.warehouse import Warehouse
    from jobs.specs.model_spec import ModelSpec

MOST_FILES = 256
"""Files whose ends the driver reads at most: more are counted by a job, which reads several at once."""
_MILLISECOND = 1000


class Counts(NamedTuple):
    """Rows of the interval, rows before it that were read, rows that do not fit, rows whose key has no inputs."""

    rows: int
    before: int
    unfit: int
    without_inputs: int


class Wanted(NamedTuple):
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


def count_by_ends(paths: Sequence[str], spec: ModelSpec, wanted: Wanted) -> Counts | None:
    """Return the counts of Parquet files of the user's, if their ends tell them.

    Args:
        paths: of all files, local ones as paths or `file:` URIs.
        spec: of the model, which says what a row must have.
        wanted: the rows to count.
    """
    if len(paths) > MOST_FILES:
        return None
    found = []
    for path in paths:
        local = local_path(path.removeprefix("file:")) if path.startswith(("/", "file:/")) else None
        if local is None:
            return None
        try:
            end = pq.read_metadata(local)
        except (OSError, pa.ArrowException):
            return None  # Spark says what is wrong with it
        found += [(end.schema, end.row_group(i)) for i in range(end.num_row_groups)]
    return _counts(
        (group.num_rows, _place_of(schema, group, spec, wanted)) for schema, group in found if group.num_rows
    )


def _counts(found: Iterable[tuple[int, int | None]]) -> Counts | None:
    """Return the counts of numbers of rows that are all in one place each (`Wanted.place`); None if some are not."""
    totals = [0, 0]
    for number, place in found:
        if place is None:
            return None
        if place >= 0:
            totals[place] += number
    return Counts(totals[0], totals[1], 0, 0)


def _place_of(schema: Any, group: Any, spec: ModelSpec, wanted: Wanted) -> int | None:
    """Return where the rows of a group are (`Wanted.place`); None: not in one place, or some may not fit."""
    columns = {group.column(i).path_in_schema: i for i in range(group.num_columns)}
    if not {*spec.key, spec.time, *spec.measurement, *spec.control} <= set(columns):
        return None

    def statistics(name: str) -> Any:
        return group.column(columns[name]).statistics

    def whole(name: str) -> bool:
        found = statistics(name)
        return found is not None and found.has_null_count and found.null_count == 0

    def type_of(name: str) -> pa.DataType:
        return schema.to_arrow_schema().field(name).type

    if not all(whole(name) for name in (*spec.key, spec.time, *spec.control)):
        return None
    # The bounds of floats leave NaN out: it means that a measurement is missing, which a control must not be.
    if not all(pa.types.is_integer(type_of(name)) for name in spec.control):
        return None
    if not all(_finite(type_of(name), statistics(name)) for name in spec.measurement):
        return None
    time = type_of(spec.time)
    if not pa.types.is_timestamp(time) or time.tz is None or time.unit not in ("us", "ms"):
        return None  # Spark converts it, which may fail
    if wanted.everything:
        return 0
    found = statistics(spec.time)
    if not found.has_min_max or not isinstance(found.min, datetime):
        return None
    return wanted.place(to_micros(found.min), to_micros(found.max))


def _finite(kind: pa.DataType, found: Any) -> bool:
    """Tell if no value of a column of numbers can be infinite."""
    if pa.types.is_integer(kind):
        return True
    if found is None or not pa.types.is_floating(kind):
        return False
    if found.has_min_max:
        return bool(np.isfinite([found.min, found.max]).all())
    return found.num_values == 0 and found.has_null_count


def count_by_log(warehouse: Warehouse, table: str, version: int, time: str, wanted: Wanted) -> Counts | None:
    """Return the counts of a Delta table's version all of whose rows fit, if its log tells them.

    Args:
        warehouse: of the table.
        table: its name.
        version: of the table.
        time: the column of event times.
        wanted: the rows to count.
    """
    files = files_at(warehouse, table, version)
    if files is None or "." in time:
        return None
    names = ["num_records"] if wanted.everything else ["num_records", f"min.{time}", f"max.{time}"]
    if not files.num_rows:
        return Counts(0, 0, 0, 0)
    if not set(names) <= set(files.column_names) or any(files.column(name).null_count for name in names):
        return None
    rows = files.column("num_records").to_pylist()
    if wanted.everything:
        return Counts(sum(rows), 0, 0, 0)
    if not all(pa.types.is_timestamp(files.schema.field(name).type) for name in names[1:]):
        return None
    least, greatest = (
        pc.cast(files.column(name), pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
        for name in names[1:]
    )
    # Delta in Java rounds both bounds down to milliseconds.
    places = (wanted.place(low, high + _MILLISECOND - 1) for low, high in zip(least, greatest, strict=True))
    return _counts(zip(rows, places, strict=True))
