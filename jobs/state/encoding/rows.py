"""Pack measurement rows into one binary value per bucket before the shuffle, and unpack them without duplicates.

Spark passes rows to a keyed Python operator one tuple at a time; packed rows are passed as a few long values
(docs/decisions/0052). The functions that run on the executors use only NumPy and Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.core.stopwatch import UNPACK, step
from jobs.spark.local_frame import Make
from jobs.state.encoding.keys import (
    KeyKind,
    build_identity_arrays,
    build_identity_columns,
    build_key_text,
    group,
    is_integer,
    select_sub_kind,
)
from jobs.state.encoding.packets import (
    NEVER,
    ROW_PACKETS,
    Layout,
    PacketColumn,
    Records,
    RowPacket,
    build_packet_batch,
    join_records,
)
from jobs.state.encoding.routing import Routing, compute_buckets
from jobs.state.encoding.row_order import Ints, Marks, find_repeated, find_resent, order_rows
from kalman.run import SortedRows

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from jobs.specs.model_spec import ModelSpec


Floats = NDArray[np.float64]

Packer = Make
"""A function from batches of rows to batches of packets."""

INPUT_IDENTITY = ("_input_identity", "_input_check")
"""Identity of the key to which the inputs belong, if the inputs belong to only some of the key columns."""
ROW_ID = ("_row_id", "_row_id_check", "_row_id_text")
"""The row id: an integer, or two hashes of a text together with the text."""
NAMED = PacketColumn("named", "u1")
"""Column that marks the rows of a packet that have an id."""
ID_CHECK_SEED = 0x726F7773


class RowId(NamedTuple):
    """The id column, whose values identify duplicates (`jobs.state.encoding.row_order`), and whether it has integers.

    within: maximum difference between the event times of a row and its duplicate, in microseconds.
    """

    column: str
    integer: bool
    within: int

    @property
    def width(self) -> int:
        """Return the number of 64-bit numbers in an id: one for an integer, two for the hashes of a text."""
        return 1 if self.integer else 2


class RowFormat(NamedTuple):
    """The columns of a measurement row, by name; `distinct` means that a key has at most one row per time.

    The last `inputs` controls are not in the measurements table. They are inputs of the key with the columns
    `inputs_key`, and are joined to the row (`jobs.lineage.inputs_table`).
    """

    kind: KeyKind
    time: str
    measurement: tuple[str, ...]
    control: tuple[str, ...]
    distinct: bool = False
    inputs: int = 0
    inputs_key: KeyKind | None = None
    row_id: RowId | None = None

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the number columns of the measurements table: measurements, and controls that are not inputs."""
        return (*self.measurement, *self.control[: len(self.control) - self.inputs])

    @property
    def joined(self) -> RowFormat:
        """Return the format of rows whose inputs are joined."""
        return self._replace(inputs=0, inputs_key=None)

    @property
    def bare(self) -> RowFormat:
        """Return the format of rows without ids, which the rows have after the check for duplicates."""
        return self._replace(row_id=None)

    @property
    def layout(self) -> Layout:
        """Return the layout of a packet of rows."""
        columns = [
            *self.kind.identity_columns,
            PacketColumn("time", "<i8"),
            PacketColumn("y", "<f8", len(self.measurement)),
        ]
        if self.control:
            columns.append(PacketColumn("u", "<f8", len(self.control)))
        if self.row_id is None:
            return Layout(tuple(columns), text=not self.kind.integer)
        columns += [PacketColumn("id", "<i8", self.row_id.width), NAMED]
        return Layout(tuple(columns), text=not self.kind.integer, label=not self.row_id.integer)


def build_row_format(spec: ModelSpec, kind: KeyKind, schema: StructType | None = None) -> RowFormat:
    """Return the format of a model's rows; the `schema` of their table decides whether ids are integers.

    Raises:
        UserError: the table does not have the id column.
    """
    control = (*spec.control, *spec.input_names)
    fmt = RowFormat(kind, spec.time, tuple(spec.measurement), control, spec.duplicates is not None)
    for name in spec.id_columns:
        assert spec.duplicates is not None and schema is not None
        if name not in schema.names:
            raise UserError(
                f"the measurements table of {spec.name} has no column {name}, by which its spec finds duplicates "
                f"(duplicates.id): give a model with other columns another name"
            )
        row_id = RowId(name, is_integer(schema[name].dataType), spec.duplicates.within_us)
        fmt = fmt._replace(distinct=False, row_id=row_id)
    if spec.inputs is None:
        return fmt
    by = select_sub_kind(kind, tuple(spec.inputs.key or spec.key))
    return fmt._replace(inputs=len(spec.input_names), inputs_key=by)


class KeyedRows(NamedTuple):
    """The rows of a bucket in the order in which the filter applies them, and the keys of the bucket.

    keys: identities (and texts) of the K keys, ordered by route. rows: N rows of these keys. ids: `id`, `named` and
    label of each row; None if rows have no ids.
    """

    keys: Records
    rows: SortedRows
    ids: Records | None = None


def select_columns(frame: DataFrame, fmt: RowFormat, beside: Sequence[str] = ()) -> DataFrame:
    """Select the columns to pack: identity, time, measurements and controls, in that order.

    The names of the columns in `beside`, which are kept too, begin with _. An integer key and the time are not
    converted here, because work per row in Spark costs more than work per batch in Arrow and NumPy.
    """
    time = F.col(f"`{fmt.time}`").alias("time")
    numbers = [F.col(f"`{name}`").cast("double").alias(f"n{i}") for i, name in enumerate(fmt.numbers)]
    if fmt.row_id is not None:
        beside = [*beside, *ROW_ID[: 1 if fmt.row_id.integer else 3]]
        frame = frame.withColumns(build_id_columns(fmt.row_id, F.col(f"`{fmt.row_id.column}`")))
    if fmt.inputs_key not in (None, fmt.kind):
        beside = [*beside, *INPUT_IDENTITY[: 1 if fmt.inputs_key.integer else 2]]
        frame = frame.withColumns(
            dict(
                zip(
                    INPUT_IDENTITY,
                    build_identity_columns(fmt.inputs_key, build_key_text(fmt.inputs_key)),
                    strict=False,
                )
            )
        )
    if fmt.kind.integer:
        identity = F.col(f"`{fmt.kind.columns[0]}`").cast("bigint").alias("identity")
        return frame.select(identity, time, *numbers, *beside)
    keyed = frame.select(build_key_text(fmt.kind).alias("_text"), time, *numbers, *beside)
    names = [f"n{i}" for i in range(len(numbers))]
    return keyed.select(*build_identity_columns(fmt.kind, F.col("_text")), "time", *names, *beside)


def build_id_columns(row_id: RowId, given: SparkColumn) -> dict[str, SparkColumn]:
    """Return the expressions that make the columns `ROW_ID` from an id column."""
    if row_id.integer:
        return {ROW_ID[0]: given.cast("bigint")}
    text = given.cast("string")
    return dict(zip(ROW_ID, (F.xxhash64(text), F.xxhash64(F.lit(ID_CHECK_SEED), text), text), strict=True))


def pack_rows(frame: DataFrame, fmt: RowFormat, routing: Routing) -> DataFrame:
    """Pack measurement rows into one packet for each Arrow batch and bucket."""
    return select_columns(frame, fmt).mapInArrow(build_row_packer(fmt, routing), ROW_PACKETS)


def build_row_packer(fmt: RowFormat, routing: Routing, typed: bool = False) -> Packer:
    """Return the function that packs batches with the columns of `select_columns`; `typed` packets have a kind."""
    kind = RowPacket.ROWS if typed else None
    return map_batches(lambda batch: pack_buckets(parse_records(batch, fmt), fmt.layout, routing, kind))


def pack_buckets(
    records: Records, layout: Layout, routing: Routing, kind: RowPacket | None
) -> pa.RecordBatch:
    """Return records as packets (`build_packet_batch`), one for each bucket with records."""
    labels = np.asarray(routing.labels, np.int32)
    if len(labels) == 1:
        parts, present = [layout.encode(records)], labels
    else:
        bucket = compute_buckets(records.arrays["route"], len(labels))
        order = np.argsort(bucket.astype(np.uint16), kind="stable")
        numbers, starts = np.unique(bucket[order], return_index=True)
        ordered = records.take(order)
        stops = [*starts[1:], len(order)]
        parts = [layout.encode(ordered.slice(a, b)) for a, b in zip(starts, stops, strict=True)]
        present = labels[numbers]
    return build_packet_batch(pa.array(present), pa.array(parts, pa.binary()), kind)


def read_times(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the times (N,) of an Arrow batch of `select_columns`, in microseconds."""
    return batch.column("time").view(pa.int64()).to_numpy()


def parse_records(batch: pa.RecordBatch, fmt: RowFormat) -> Records:
    """Return an Arrow batch of `select_columns` as records."""
    numbers = ["identity"] if fmt.kind.integer else ["identity", "check"]
    arrays = build_identity_arrays({name: batch.column(name).to_numpy() for name in numbers})
    arrays["time"] = read_times(batch)
    m, c = len(fmt.measurement), len(fmt.control)
    values = np.empty((m + c, batch.num_rows))
    for i in range(m + c):
        column = batch.column(f"n{i}")
        values[i] = column.to_numpy(zero_copy_only=False)  # null becomes NaN, which means a missing value
    arrays["y"] = values[:m]
    if c:
        arrays["u"] = values[m:]
    text = None if fmt.kind.integer else batch.column("text")
    if fmt.row_id is None:
        return Records(arrays, text)
    given = batch.column(ROW_ID[0 if fmt.row_id.integer else 2])
    arrays["named"] = given.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
    numbers = (batch.column(name).fill_null(0).to_numpy() for name in ROW_ID[: fmt.row_id.width])
    arrays["id"] = np.stack(list(numbers))
    return Records(arrays, text, None if fmt.row_id.integer else given.fill_null(""))


def select_ids(records: Records) -> pa.Array:
    """Return the original ids of measurement rows: integers or texts, and null for a missing id."""
    missing = pa.array(records.arrays["named"] == 0)
    given = pa.array(np.array(records.arrays["id"][0])) if records.label is None else records.label
    return pc.if_else(missing, None, given)  # type: ignore[attr-defined]


@step(UNPACK)
def unpack_rows(payloads: Iterable[bytes], fmt: RowFormat) -> KeyedRows:
    """Unpack the packets of a bucket; return the rows in the order in which the filter applies them."""
    layout = fmt.layout
    parts = [layout.decode(payload) for payload in payloads]
    return sort_by_key(join_records(parts) if parts else layout.empty(), fmt)


@step(UNPACK)
def sort_by_key(records: Records, fmt: RowFormat) -> KeyedRows:
    """Return the keys of rows, and the rows in the order in which the filter applies them."""
    y, time = records.arrays["y"], records.arrays["time"]
    u = records.arrays.get("u", np.empty((0, records.size)))
    grouped = group(records, lambda code: order_rows(code, time, y, u))
    order = grouped.order
    keys = Records({c.name: records.arrays[c.name] for c in fmt.kind.identity_columns}, records.text)
    ids = None
    if fmt.row_id is not None:
        ids = Records({name: records.arrays[name] for name in ("id", "named")}, None, records.label).take(
            order
        )
    return KeyedRows(
        keys.take(order[grouped.first]),
        SortedRows(
            grouped.code, time[order], np.ascontiguousarray(y[:, order]), np.ascontiguousarray(u[:, order])
        ),
        ids,
    )


def group_by_bucket(batches: Iterator[pa.RecordBatch]) -> Iterator[list[bytes]]:
    """Yield the packets of each bucket in a partition, bucket by bucket."""
    payloads: dict[int, list[bytes]] = {}
    for batch in batches:
        pairs = zip(batch.column("bucket").to_pylist(), batch.column("payload").to_pylist(), strict=True)
        for bucket, payload in pairs:
            payloads.setdefault(bucket, []).append(payload)
    for bucket in sorted(payloads):
        yield payloads.pop(bucket)


def build_event_time_packer(fmt: RowFormat, routing: Routing) -> Packer:
    """Return the function that packs batches of `select_columns`, and adds a tick for every bucket."""
    packer = build_row_packer(fmt, routing, typed=True)
    labels = pa.array(np.asarray(routing.labels, np.int32))

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            payload = encode_tick(int(read_times(batch).max()))
            ticks = pa.array([payload] * len(labels), pa.binary())
            yield build_packet_batch(labels, ticks, RowPacket.MAX_EVENT_TIME)
            yield from packer(iter([batch]))

    return pack


def encode_tick(max_event_time: int) -> bytes:
    """Return the payload of a tick (a `MAX_EVENT_TIME` packet); the time is in microseconds."""
    return np.int64(max_event_time).tobytes()


def find_max_event_time(ticks: Iterable[bytes]) -> int:
    """Return the maximum event time in the ticks; `NEVER` without ticks."""
    return max((int(np.frombuffer(payload, "<i8")[0]) for payload in ticks), default=NEVER)


def build_marks(keyed: KeyedRows) -> tuple[Marks, Ints]:
    """Return the marks of the rows that have an id, and the positions of these rows among all rows."""
    assert keyed.ids is not None
    named = np.flatnonzero(keyed.ids.arrays["named"])
    return Marks(keyed.rows.key, keyed.ids.arrays["id"], keyed.rows.time).take(named), named


def remove_duplicates(keyed: KeyedRows, fmt: RowFormat) -> KeyedRows:
    """Return the rows without duplicates, if the format of the rows defines duplicates."""
    if fmt.row_id is not None:
        marks, named = build_marks(keyed)
        repeats = np.zeros(len(keyed.rows.key), bool)
        repeats[named] = find_resent(marks, fmt.row_id.within)
    elif fmt.distinct:
        repeats = find_repeated(keyed.rows)
    else:
        return keyed
    return select_rows(keyed, np.flatnonzero(~repeats)) if repeats.any() else keyed


def select_rows(keyed: KeyedRows, which: Ints) -> KeyedRows:
    """Return the rows at positions `which`, in this order, and the keys that have any of these rows."""
    rows = keyed.rows
    present, code = np.unique(rows.key[which], return_inverse=True)
    keys = keyed.keys if len(present) == keyed.keys.size else keyed.keys.take(present)
    ids = None if keyed.ids is None else keyed.ids.take(which)
    return KeyedRows(keys, rows.take(which)._replace(key=code.astype(np.int64)), ids)


def map_batches(convert: Callable[[pa.RecordBatch], pa.RecordBatch]) -> Make:
    """Return a function over the batches of a partition that converts each batch with rows."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (convert(batch) for batch in batches if batch.num_rows)

    return work


def build_bucket_worker(fmt: RowFormat, work: Callable[[KeyedRows], Iterator[pa.RecordBatch]]) -> Make:
    """Return a function over the packets of a partition that calls `work` with the rows of each bucket."""

    def over(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for payloads in group_by_bucket(batches):
            keyed = remove_duplicates(unpack_rows(payloads, fmt), fmt)
            if len(keyed.rows.key):
                yield from work(keyed)

    return over
