"""The state rows of a snapshot, one typed row per key, and their packets for the initial state of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.state.encoding.arrow import build_lists, build_matrix
from jobs.state.encoding.keys import KeyKind, build_identity_arrays, build_identity_columns, build_key_array
from jobs.state.encoding.packets import ROW_PACKETS, TYPED_ROW_PACKETS, Layout, Records, RowPacket
from jobs.state.encoding.routing import Routing
from jobs.state.encoding.rows import pack_buckets
from jobs.storage.columns import parse_arrow_schema
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


STATE_ROWS = (
    "state_index bigint, event_time bigint, mean array<double>, covariance array<double>, log_likelihood double, "
    "extras map<string, array<double>>"
)
STATE_COLUMNS = tuple(parse_arrow_schema(STATE_ROWS))
"""The columns of `STATE_ROWS` as Arrow fields."""


def build_state_rows(kernel: Filter, records: Records) -> Iterator[pa.RecordBatch]:
    """Convert state records to Arrow rows with the key column first, then the columns of `STATE_ROWS`."""
    step = 65_536
    for start in range(0, records.size, step):
        part = records.slice(start, min(start + step, records.size))
        arrays = part.arrays
        mean, covariance, extras = kernel.snapshot(np.ascontiguousarray(arrays["values"], np.float64))
        yield pa.RecordBatch.from_arrays(
            [
                build_key_array(part),
                pa.array(np.ascontiguousarray(arrays["count"])),
                pa.array(np.ascontiguousarray(arrays["event_time"])),
                build_lists(mean),
                build_lists(covariance),
                pa.array(np.ascontiguousarray(arrays["log_likelihood"])),
                map_of(extras, part.size),
            ],
            ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood", "extras"],
        )


Make = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class StateRows(NamedTuple):
    """State rows that tasks compute from source rows; the same tasks can process the state rows further.

    source: the source rows. make: function from batches of source rows to batches of state rows (key, then
    `STATE_COLUMNS`). integer: whether the keys in the batches are integers instead of texts.
    """

    source: DataFrame
    make: Make
    integer: bool

    @classmethod
    def of(cls, rows: DataFrame) -> StateRows:
        """Wrap rows with the columns of a snapshot."""
        return cls(rows.select("key", *build_untyped_columns()), iter, False)

    @property
    def frame(self) -> DataFrame:
        """Return the rows with the columns and types of a snapshot."""
        key_type = "bigint" if self.integer else "string"
        return restore_types(self.source.mapInArrow(self.make, f"key {key_type}, {STATE_ROWS}"))

    def then(self, further: Make) -> StateRows:
        """Return the state rows after another function in the same tasks; the keys of the result are texts."""
        make = self.make
        return StateRows(self.source, lambda batches: further(make(batches)), False)

    def through(self, further: Make, schema: str) -> DataFrame:
        """Return the result of another function that runs in the same tasks, with the columns `schema`."""
        make = self.make
        return self.source.mapInArrow(lambda batches: further(make(batches)), schema)


def build_untyped_columns() -> list[Column]:
    """Return expressions for the columns of a snapshot after the key, with the types of `STATE_COLUMNS`."""
    at = F.unix_micros("event_time").alias("event_time")
    return [at if field.name == "event_time" else F.col(field.name) for field in STATE_COLUMNS]


def restore_types(rows: DataFrame) -> DataFrame:
    """Return state rows with the column types of a snapshot: the key is a text, the event time a timestamp."""
    return rows.withColumn("key", F.col("key").cast("string")).withColumn(
        "event_time", F.timestamp_micros("event_time")
    )


def pack_seeds(
    rows: DataFrame,
    kernel: Filter,
    kind: KeyKind,
    layout: Layout,
    routing: Routing,
    typed: bool = False,
) -> DataFrame:
    """Pack the rows of a snapshot into packets of state records for the initial state; `typed` packets have a kind."""
    widths, n = find_state_extras_widths(kernel), len(kernel.states)
    columns = rows.select(
        *build_identity_columns(kind, F.col("key")),
        F.unix_micros("event_time").alias("event_time"),
        F.col("state_index").alias("count"),
        "log_likelihood",
        "mean",
        "covariance",
        *split_extras(widths),
    )
    packet = RowPacket.STATES if typed else None

    def seed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            names = ["identity"] if kind.integer else ["identity", "check"]
            arrays = build_identity_arrays({name: batch.column(name).to_numpy() for name in names})
            for name in ("event_time", "count", "log_likelihood"):
                arrays[name] = batch.column(name).to_numpy()
            arrays["values"] = kernel.restore(*parse_states(batch, n, widths))
            records = Records(arrays, None if kind.integer else batch.column("text"))
            yield pack_buckets(records, layout, routing, packet)

    return columns.mapInArrow(seed, TYPED_ROW_PACKETS if typed else ROW_PACKETS)


def find_state_extras_widths(kernel: Filter) -> dict[str, int]:
    """Return the number of values per key in each state field except mean and covariance."""
    _, _, extras = kernel.snapshot(kernel.initial(1))
    return {name: array.shape[0] for name, array in extras.items()}


def split_extras(widths: dict[str, int]) -> list[Column]:
    """Return expressions that split a snapshot's map `extras` into columns for `parse_states`."""
    return [F.col("extras")[name].alias(f"x{i}") for i, name in enumerate(widths)]


def with_extras(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    """Replace the map `extras` of the rows by columns `x0`, `x1`, ..., one column for each field in `names`."""
    lookup: Any = pc.map_lookup  # type: ignore[attr-defined]
    columns = {name: batch.column(name) for name in batch.schema.names if name != "extras"}
    for i, name in enumerate(names):
        columns[f"x{i}"] = lookup(batch.column("extras"), pa.scalar(name), "first")
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def parse_states(
    batch: pa.RecordBatch, n: int, widths: dict[str, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return the means (n, K), the covariances (n*n, K) and the extras by name, each (d, K), of K rows."""
    extras = {
        name: build_matrix(batch.column(f"x{i}"), width, name)
        for i, (name, width) in enumerate(widths.items())
    }
    mean = build_matrix(batch.column("mean"), n, "mean")
    return mean, build_matrix(batch.column("covariance"), n * n, "covariance"), extras


def map_of(extras: dict[str, NDArray[np.float64]], size: int) -> pa.Array:
    """Return N maps from each name to d numbers; extras: (d, N) arrays by name; without arrays, all maps are null."""
    kind = pa.map_(pa.string(), pa.list_(pa.float64()))
    if not extras:
        return pa.nulls(size, kind)
    columns = [build_lists(array) for array in extras.values()]
    order = (np.arange(size)[:, None] + size * np.arange(len(columns))).ravel()
    items = pa.concat_arrays(columns).take(pa.array(order))
    names = pa.array(list(extras) * size, pa.string())
    offsets = pa.array(np.arange(size + 1, dtype=np.int32) * np.int32(len(columns)))
    return pa.MapArray.from_arrays(offsets, names, items)
