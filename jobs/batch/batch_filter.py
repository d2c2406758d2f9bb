"""Filter a table of measurements in batch: each key's rows in event-time order, from the initial distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.offline.row_faults import FEWEST, Gaps, Lost, count_gaps
from jobs.snapshots.state_rows import StateRows, build_state_rows
from jobs.specs.model_spec import ModelSpec
from jobs.state.block_format import build_state_layout
from jobs.state.encoding.keys import build_key_text
from jobs.state.encoding.routing import make_routing
from jobs.state.encoding.rows import KeyedRows, RowFormat, build_bucket_worker, pack_rows
from jobs.state.filter_step import Begin, StepResult, filter_step
from jobs.state.row_filter import RowFilter
from jobs.storage.positions import parse_time
from kalman.filters.rounded import find_storage_dtype
from kalman.mixtures.building import FAMILIES
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.snapshots.model_runtime import ModelRuntime

ROWS_A_BUCKET = 500_000
MIN_BUCKETS = 4
"""The number of buckets depends on the data alone, so that sums over buckets are the same on every machine."""


class Interval(NamedTuple):
    """Event times in microseconds from `first` (included) to `last` (excluded); None means no limit on that side."""

    first: int | None = None
    last: int | None = None

    @classmethod
    def parse(cls, first: str | None, last: str | None, options: tuple[str, str]) -> Interval:
        """Return the interval of two times (ISO 8601) from a command's options.

        Raises:
            UserError: a text is not a time, or the interval is empty.
        """
        given = zip((first, last), options, strict=True)
        found = cls(*(None if text is None else parse_time(text, option) for text, option in given))
        if found.first is not None and found.last is not None and found.first >= found.last:
            raise UserError(f"{options[0]} must be before {options[1]}")
        return found

    def holds(self, time: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark the times (N,) that are in the interval."""
        held = np.ones(len(time), bool)
        if self.first is not None:
            held &= time >= self.first
        if self.last is not None:
            held &= time < self.last
        return held

    def before_end(self, time: Column) -> Column:
        """Return the condition that a time in microseconds is before the interval's end."""
        return F.lit(True) if self.last is None else time < self.last

    @property
    def data(self) -> list[int | None]:
        """Return the interval as a list, for digests and JSON."""
        return [self.first, self.last]


class Batch(NamedTuple):
    """The settings of a batch pass.

    unit: microseconds of the model's time unit.
    idle: microseconds without rows after which a key restarts; None means that keys never restart.
    """

    rows: RowFormat
    unit: float
    idle: int | None = None


def build_batch(runtime: ModelRuntime) -> Batch:
    """Return the settings of a model's batch pass."""
    return Batch(runtime.rows.joined, runtime.spec.unit_us, runtime.spec.idle_us)


def count_buckets(rows: int) -> int:
    """Return the number of buckets for this number of rows."""
    return max(MIN_BUCKETS, -(-rows // ROWS_A_BUCKET))


def count_shared_buckets(spec: ModelSpec, rows: int, in_process: bool) -> int:
    """Return the number of buckets whose packets learning, filter and estimates share.

    What one process learns and filters for each key alone needs no buckets, as a key's numbers do not depend on the
    others. Sums over keys are sums over the buckets of `count_buckets`, everywhere.
    """
    by_key = spec.learn is None or (spec.learn.scope == "key" and spec.filter not in FAMILIES)
    return 1 if in_process and by_key else count_buckets(rows)


def pack_buckets(frame: DataFrame, fmt: RowFormat, count: int) -> DataFrame:
    """Pack rows, and move the packets of each bucket to one partition.

    Args:
        frame: measurement rows.
        fmt: the format of the rows.
        count: number of rows, which decides the number of buckets.
    """
    buckets = count_buckets(count)
    routing = make_routing(buckets, 1)
    return pack_rows(frame, fmt, routing).repartition(buckets, "bucket")


def compute_final_states(
    packed: DataFrame, kernel: Filter, batch: Batch, begin: Begin | None = None
) -> StateRows:
    """Filter bucketed rows to each key's latest state, with the columns of a snapshot's rows.

    `begin` returns the initial states (size, K) of a bucket's keys; without it, keys start in the model's initial
    state.
    """
    step = build_bucket_filter(kernel, batch)

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        yield from build_state_rows(kernel, step(keyed, begin and begin(keyed)).records)

    return StateRows(packed, build_bucket_worker(batch.rows, work), batch.rows.kind.integer)


def build_bucket_filter(
    kernel: Filter, batch: Batch, beside: tuple[str, ...] = ()
) -> Callable[[KeyedRows, NDArray[np.float64] | None], StepResult]:
    """Return the function that filters a bucket's rows, from given initial states (size, K) or from the model's.

    beside: names of additional outputs (`RowFilter`).
    """
    layout = build_state_layout(batch.rows.kind, kernel.size, find_storage_dtype(kernel))
    row_filter = RowFilter(kernel, batch.unit, beside)

    def step(keyed: KeyedRows, begin: NDArray[np.float64] | None) -> StepResult:
        return filter_step(row_filter, layout, layout.empty(), keyed, begin=begin, idle=batch.idle)

    return step


def count_bucket_gaps(packed: DataFrame, batch: Batch) -> Gaps:
    """Count the time steps in bucketed rows that differ from the usual time step of their key."""

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        counts = count_gaps(keyed.rows.key, keyed.rows.time)
        yield pa.RecordBatch.from_arrays([pa.array([n], pa.int64()) for n in counts], list(Gaps._fields))

    schema = ", ".join(f"{name} bigint" for name in Gaps._fields)
    found = packed.mapInArrow(build_bucket_worker(batch.rows, work), schema).collect()
    return Gaps(*(sum(row[name] for row in found) for name in Gaps._fields))


def count_keys(packed: DataFrame, batch: Batch) -> int:
    """Count the keys of bucketed rows."""

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"keys": [keyed.keys.size]})

    found = packed.mapInArrow(build_bucket_worker(batch.rows, work), "keys bigint").collect()
    return sum(row["keys"] for row in found)


def find_lost_keys(frame: DataFrame, fmt: RowFormat, states: DataFrame) -> Lost | None:
    """Find keys whose last rows did not change their states, as `row_faults.find_lost` finds them from flags.

    Args:
        frame: measurement rows.
        fmt: the format of the rows.
        states: the columns key and event_time of the states after the rows.
    """
    rows = frame.select(build_key_text(fmt.kind).alias("key"), F.col(f"`{fmt.time}`").alias("at"))
    both = rows.join(states.select("key", "event_time"), on="key", how="left")
    is_after = F.col("event_time").isNull() | (F.col("at") > F.col("event_time"))
    by_key = both.groupBy("key").agg(F.count("*").alias("rows"), F.count_if(is_after).alias("tail"))
    tail = F.col("tail")
    lost = (tail >= FEWEST) & (2 * tail >= F.col("rows"))
    row = by_key.agg(
        F.count_if(lost).alias("keys"),
        F.count("*").alias("of"),
        F.sum(F.when(lost, tail)).alias("tail"),
        F.max(F.when(lost, F.struct("tail", "key", "rows"))).alias("worst"),
    ).first()
    if row is None or not row["keys"]:
        return None
    worst = row["worst"]
    its, after = int(worst["tail"]), int(worst["rows"]) - int(worst["tail"])
    return Lost(int(row["keys"]), int(row["of"]), int(row["tail"]), worst["key"], its, after, {})
