"""The state rows of a snapshot: one typed row per key, in files of a table, and as packets for a stream's start.

Tasks write, read and sum up these rows (decision 0045). The checksum of rows is the sum, modulo 2^64, of the 64-bit
hashes of all rows, so the order of rows does not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.snapshots.row_hash import format_checksum, hash_texts, sum_hashes, wrap_sum
from jobs.snapshots.verified_rows import PARTITION, STATES, get_partition
from jobs.spark.local_frame import LocalFrame, Make
from jobs.spark.warehouse import Warehouse
from jobs.spark.written_rows import keep_rows, write_files
from jobs.state.encoding.arrow import build_lists, build_matrix, look_up_entries
from jobs.state.encoding.keys import KEY_CHECK_SEED, KeyKind, build_identity_arrays, build_key_array
from jobs.state.encoding.packets import ROW_PACKETS, TYPED_ROW_PACKETS, Layout, Records, RowPacket
from jobs.state.encoding.routing import Routing
from jobs.state.encoding.rows import map_batches, pack_buckets
from jobs.storage.columns import parse_arrow_schema
from jobs.storage.row_changes import ReplacingTable
from jobs.storage.table_rows import list_partition_files, open_parquet
from jobs.storage.tables import SNAPSHOTS
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.snapshots.manifests import Manifest


STATE_ROWS = (
    "state_index bigint, event_time bigint, mean array<double>, covariance array<double>, log_likelihood double, "
    "extras map<string, array<double>>"
)
STATE_COLUMNS = tuple(parse_arrow_schema(STATE_ROWS))
"""The columns of `STATE_ROWS` as Arrow fields."""
Moments = tuple[NDArray[np.float64], NDArray[np.float64], dict[str, NDArray[np.float64]]]
"""Means (n, K), covariances (n*n, K), and the other fields by name, each (d, K), of K states."""


_SEEDED = ("event_time", "state_index", "log_likelihood")


def build_state_rows(kernel: Filter, records: Records) -> Iterator[pa.RecordBatch]:
    """Convert state records to Arrow rows with the key column first, then the columns of `STATE_ROWS`."""
    step = 65_536
    for start in range(0, records.size, step):
        part = records.slice(start, min(start + step, records.size))
        arrays = part.arrays
        given = (
            pa.array(np.ascontiguousarray(arrays[name])) for name in ("count", "event_time", "log_likelihood")
        )
        moments = kernel.snapshot(np.ascontiguousarray(arrays["values"], np.float64))
        yield pa.RecordBatch.from_pydict(build_state_columns(build_key_array(part), *given, moments=moments))


def build_state_columns(
    key: pa.Array, count: pa.Array, time: pa.Array, log_likelihood: pa.Array, moments: Moments
) -> dict[str, pa.Array]:
    """Return the key column and the columns of `STATE_ROWS` by name; `moments` are a kernel's `snapshot`."""
    mean, covariance, extras = moments
    return {
        "key": key,
        "state_index": count,
        "event_time": time,
        "mean": build_lists(mean),
        "covariance": build_lists(covariance),
        "log_likelihood": log_likelihood,
        "extras": map_of(extras, len(key)),
    }


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

    @property
    def batches(self) -> Iterator[pa.RecordBatch]:
        """Return the rows of a source in this process (`Warehouse.in_process`)."""
        return self.make(cast(LocalFrame, self.source).batches)

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
    rows: StateRows,
    kernel: Filter,
    kind: KeyKind,
    layout: Layout,
    routing: Routing,
    typed: bool = False,
) -> DataFrame:
    """Pack the rows of a snapshot into packets of state records for the initial state; `typed` packets have a kind."""
    packet = RowPacket.STATES if typed else None

    @map_batches
    def seed(batch: pa.RecordBatch) -> pa.RecordBatch:
        text = batch.column("key").cast(pa.string())
        found = (
            {"identity": text.cast(pa.int64())}
            if kind.integer
            else {"identity": hash_texts(text), "check": hash_texts(text, KEY_CHECK_SEED)}
        )
        arrays = build_identity_arrays({name: one.to_numpy() for name, one in found.items()})
        for name, column in zip(("event_time", "count", "log_likelihood"), _SEEDED, strict=True):
            arrays[name] = batch.column(column).to_numpy()
        arrays["values"] = kernel.restore(*parse_states(batch, kernel))
        return pack_buckets(Records(arrays, None if kind.integer else text), layout, routing, packet)

    return rows.through(seed, TYPED_ROW_PACKETS if typed else ROW_PACKETS)


def find_state_extras_widths(kernel: Filter) -> dict[str, int]:
    """Return the number of values per key in each state field except mean and covariance."""
    _, _, extras = kernel.snapshot(kernel.initial(1))
    return {name: array.shape[0] for name, array in extras.items()}


def count_state_numbers(kernel: Filter) -> int:
    """Return the number of values per key in a snapshot: mean, covariance, and all other fields."""
    n = len(kernel.states)
    return n + n * n + sum(find_state_extras_widths(kernel).values())


def parse_states(batch: pa.RecordBatch, kernel: Filter) -> Moments:
    """Return the moments of K state rows, with which a kernel's `restore` makes its states."""
    extras = {
        name: build_matrix(look_up_entries(batch.column("extras"), name), width, name)
        for name, width in find_state_extras_widths(kernel).items()
    }
    n = len(kernel.states)
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


NO_STATISTICS = {"delta.dataSkippingNumIndexedCols": "0"}
"""Table property without statistics: a snapshot is read as a whole, so minima and maxima per file would be useless."""
_COLUMNS = ["key", *(field.name for field in STATE_COLUMNS)]
_BATCH_ROWS = 65_536
SUMS = "keys bigint, hash bigint, rows bigint"
"""Columns with the sums of a task, as DDL."""


def select_hashed_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the columns that the hash of a state row covers, in the order of hashing."""
    columns = {field.name: batch.column(field.name).cast(field.type) for field in STATE_COLUMNS}
    return {"key": batch.column("key").cast(pa.string()), **columns}


class StateRowSums:
    """The sums of the state rows that a task has processed so far."""

    def __init__(self) -> None:
        self.keys = self._hash = self._rows = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows with the key and `STATE_COLUMNS`, or the same columns with a table's types."""
        columns = select_hashed_columns(rows)
        self.keys += len(columns["key"])
        self._rows += int(np.sum(columns["state_index"].to_numpy()))
        self._hash += sum_hashes([*columns.values()])

    def numbers(self) -> dict[str, int]:
        """Return the values of the columns `SUMS`; the sum of hashes is a signed 64-bit integer."""
        return {"keys": self.keys, "hash": wrap_sum(self._hash), "rows": self._rows}


class Measured(NamedTuple):
    """The number of keys in state rows, their checksum, and the number of measurements that they reflect."""

    keys: int
    checksum: str
    rows: int


def add_sums(parts: Iterable[Any]) -> Measured:
    """Return the total of the sums of all tasks; parts: rows with the columns `SUMS`."""
    found = list(parts)
    keys, hashes, rows = (sum(one[name] for one in found) for name in ("keys", "hash", "rows"))
    return Measured(keys, format_checksum(hashes), rows)


class CommittedStates(NamedTuple):
    """The table version in which state rows were committed, and the sums of these rows."""

    version: int
    measured: Measured


def write_states(warehouse: Warehouse, manifest: Manifest, states: StateRows | DataFrame) -> CommittedStates:
    """Write a snapshot's state rows in tasks, and replace the snapshot's former files by the new files in one commit.

    After a kill before the commit, the new files are not part of the table, and VACUUM removes them.

    Args:
        warehouse: warehouse of the snapshot.
        manifest: manifest of the snapshot.
        states: state rows of the snapshot, with the columns that their table has after `model_version`.

    Raises:
        UserError: the table cannot take the files, or the commit failed.
    """
    warehouse.create(STATES, SNAPSHOTS, PARTITION, NO_STATISTICS)
    table = ReplacingTable(warehouse, STATES)
    schema = parse_arrow_schema(SNAPSHOTS)
    table.ready(schema, by_partition=True)
    made = states if isinstance(states, StateRows) else StateRows.of(states)
    make = made.make  # a local name, because the tasks must not get the DataFrame in `made`
    values = get_partition(manifest)
    constants = {**values, "model_version": manifest.model_version}

    def typed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in make(batches):
            columns = select_hashed_columns(batch)
            arrays = [
                columns[field.name].cast(field.type)
                if field.name in columns
                else pa.repeat(pa.scalar(constants[field.name], field.type), batch.num_rows)
                for field in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    written = write_files(made.source, typed, table, StateRowSums)
    mine = [[(name, "=", value) for name, value in values.items()]]
    version = table.replace_rows(written.parts, mine, keep_rows(warehouse, table, mine))
    assert version is not None
    return CommittedStates(version, add_sums(written.sums))


def read_stored_rows(warehouse: Warehouse, manifest: Manifest, version: int) -> StateRows:
    """Return a snapshot's state rows at a version of their table, as `StateRows` that the reading tasks can process.

    Raises:
        UserError: the log does not have the version, or the rows cannot be read from the table's files.
    """
    names = list_partition_files(warehouse.root, STATES, get_partition(manifest), version)
    folder = warehouse.path(STATES)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for name in batch.column("name").to_pylist():
                with open_parquet(folder, name) as file:
                    yield from map(_convert_batch, file.iter_batches(_BATCH_ROWS, columns=_COLUMNS))

    return StateRows(warehouse.spread([(name,) for name in names], "name string"), read, False)


def measure_rows(rows: StateRows) -> Measured:
    """Return the number of keys, the checksum and the number of measurements of state rows, computed by Spark tasks."""
    return add_sums(rows.through(_sum, SUMS).collect())


def measure_stored(warehouse: Warehouse, manifest: Manifest, version: int) -> Measured:
    """Return the result of `measure_rows` for a snapshot's rows at a version of their table."""
    with warehouse.choose_codegen(manifest.key_count):
        return measure_rows(read_stored_rows(warehouse, manifest, version))


def _sum(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    sums = StateRowSums()
    for batch in batches:
        sums.add(batch)
    if sums.keys:
        yield pa.RecordBatch.from_pylist([sums.numbers()])


def _convert_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of a file with the key column first, then the columns and types of `STATE_COLUMNS`."""
    columns = [batch.column("key").cast(pa.string())]
    for field in STATE_COLUMNS:
        column = batch.column(field.name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, _COLUMNS)
