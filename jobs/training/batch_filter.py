"""Filter a table of measurements in batch: each key's rows in event-time order, from the initial distribution on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from jobs.encoding.estimates import EstimateFormat, pack_estimates
from jobs.encoding.routing import make_routing
from jobs.encoding.rows import KeyedRows, RowFormat, pack_rows
from jobs.snapshots.state_rows import STATE_ROWS, state_rows, typed_states
from jobs.state.block_format import state_layout
from jobs.state.duplicates import each_bucket
from jobs.state.filter_step import Begin, filter_step
from kalman.filters.rounded import stored_as
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.runtime import ModelRuntime

ROWS_A_BUCKET = 500_000
MIN_BUCKETS = 4
"""The number of buckets comes from the data, never from the machine, so that sums over them are the same anywhere."""


class Batch(NamedTuple):
    """What a batch pass needs to know of its model; idle: microseconds of silence after which a key begins anew."""

    rows: RowFormat
    unit: float
    idle: int | None = None


def batch_of(runtime: ModelRuntime) -> Batch:
    """Return what a batch pass needs to know of a model."""
    return Batch(runtime.rows.joined, runtime.spec.unit_us, runtime.spec.idle_us)


def bucket_rows(frame: DataFrame, fmt: RowFormat, count: int) -> DataFrame:
    """Pack rows and bring each bucket's packets into a partition of their own.

    Args:
        frame: measurement rows.
        fmt: what they are made of.
        count: how many they are, for the number of buckets.
    """
    buckets = max(MIN_BUCKETS, -(-count // ROWS_A_BUCKET))
    routing = make_routing(buckets, 1)
    return pack_rows(frame, fmt, routing).repartition(buckets, "bucket")


def final_states(packed: DataFrame, kernel: Filter, batch: Batch, begin: Begin | None = None) -> DataFrame:
    """Filter bucketed rows to each key's latest state: key (text) and the columns of a snapshot's rows.

    `begin` gives the states (size, K) in which a bucket's keys begin; by default the model's initial state.
    """

    kind = batch.rows.kind
    layout = state_layout(kind, kernel.size, stored_as(kernel))

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        start = None if begin is None else begin(keyed)
        result = filter_step(kernel, layout, layout.empty(), keyed, batch.unit, begin=start, idle=batch.idle)
        yield from state_rows(kernel, result.records, kind.integer)

    key_type = "bigint" if kind.integer else "string"
    states = packed.mapInArrow(each_bucket(batch.rows, work), f"key {key_type}, {STATE_ROWS}")
    return typed_states(states)


def packed_estimates(
    packed: DataFrame, kernel: Filter, batch: Batch, fmt: EstimateFormat, begin: Begin | None = None
) -> DataFrame:
    """Filter bucketed rows to packets of estimates (`estimates.unpack_estimates` makes rows of them)."""
    layout = state_layout(batch.rows.kind, kernel.size, stored_as(kernel))

    def work(keyed: KeyedRows) -> Iterator[pa.RecordBatch]:
        start = None if begin is None else begin(keyed)
        result = filter_step(
            kernel,
            layout,
            layout.empty(),
            keyed,
            batch.unit,
            begin=start,
            watched=fmt.watched,
            idle=batch.idle,
        )
        for _, packet in pack_estimates(fmt, keyed, result.outputs):
            yield pa.RecordBatch.from_arrays([pa.array([packet], pa.binary())], ["payload"])

    return packed.mapInArrow(each_bucket(batch.rows, work), "payload binary")
