"""Pack measurements into one binary row a bucket before the shuffle, and read such rows back as arrays.

Spark hands rows to a keyed Python operator one tuple at a time; packed, it hands over a few long values instead
(docs/decisions/0001). The functions that run on the executors use NumPy and Arrow alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.keys import KeyKind, group, identity_arrays, identity_expressions, sub_kind, text_of
from jobs.order import order_rows
from jobs.packets import Column, Layout, Records, concat
from jobs.routing import Routing, bucket_of
from jobs.stopwatch import UNPACK, step
from kalman.run import SortedRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.spec import ModelSpec

Packer = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Turns batches of rows into batches of packets."""

PACKED = "bucket int, payload binary"
INPUT_IDENTITY = ("_input_identity", "_input_check")
"""Where a row's inputs belong to some of its key columns alone: the identity by these."""


class RowFormat(NamedTuple):
    """What a measurement row is made of, by column name; `distinct`: of a key and time there is one.

    The last `inputs` of the controls are not in the row as it comes: they belong to its key, by the columns of
    `inputs_key`, and are joined to it (`jobs.input_rows`).
    """

    kind: KeyKind
    time: str
    measurement: tuple[str, ...]
    control: tuple[str, ...]
    distinct: bool = False
    inputs: int = 0
    inputs_key: KeyKind | None = None

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the numbers that a row comes with: measurements, and controls of its own."""
        return (*self.measurement, *self.control[: len(self.control) - self.inputs])

    @property
    def joined(self) -> RowFormat:
        """Return the format of rows that have their inputs already."""
        return self._replace(inputs=0, inputs_key=None)

    @property
    def layout(self) -> Layout:
        """Return the layout of a packet of rows."""
        columns = [
            *self.kind.identity_columns,
            Column("time", "<i8"),
            Column("y", "<f8", len(self.measurement)),
        ]
        if self.control:
            columns.append(Column("u", "<f8", len(self.control)))
        return Layout(tuple(columns), text=not self.kind.integer)


def row_format(spec: ModelSpec, kind: KeyKind) -> RowFormat:
    """Return what the rows of a model are made of."""
    control, distinct = (*spec.control, *spec.input_names), spec.duplicates is not None
    fmt = RowFormat(kind, spec.time, tuple(spec.measurement), control, distinct)
    if spec.inputs is None:
        return fmt
    by = sub_kind(kind, tuple(spec.inputs.key or spec.key))
    return fmt._replace(inputs=len(spec.input_names), inputs_key=by)


class KeyedRows(NamedTuple):
    """The rows of a bucket in the order in which they are applied, and its keys.

    keys: identities (and texts) of the K keys, by route; rows: their N rows; order: (N,) where each came from.
    """

    keys: Records
    rows: SortedRows


def select_columns(frame: DataFrame, fmt: RowFormat, beside: Sequence[str] = ()) -> DataFrame:
    """Select what is packed: identity, time, measurements and controls, in that order.

    Columns to keep `beside` these have names that begin with _. An integer key and the time are passed on as they are:
    whatever Spark computes for a row costs more than Arrow and NumPy do for a whole batch.
    """
    from pyspark.sql import functions as F

    time = F.col(f"`{fmt.time}`").alias("time")
    numbers = [F.col(f"`{name}`").cast("double").alias(f"n{i}") for i, name in enumerate(fmt.numbers)]
    if fmt.inputs_key not in (None, fmt.kind):
        beside = [*beside, *INPUT_IDENTITY[: 1 if fmt.inputs_key.integer else 2]]
        frame = frame.withColumns(
            dict(
                zip(
                    INPUT_IDENTITY,
                    identity_expressions(fmt.inputs_key, text_of(fmt.inputs_key)),
                    strict=False,
                )
            )
        )
    if fmt.kind.integer:
        identity = F.col(f"`{fmt.kind.columns[0]}`").cast("bigint").alias("identity")
        return frame.select(identity, time, *numbers, *beside)
    keyed = frame.select(text_of(fmt.kind).alias("_text"), time, *numbers, *beside)
    names = [f"n{i}" for i in range(len(numbers))]
    return keyed.select(*identity_expressions(fmt.kind, F.col("_text")), "time", *names, *beside)


def pack_rows(frame: DataFrame, fmt: RowFormat, routing: Routing) -> DataFrame:
    """Pack measurement rows: one output row for each Arrow batch and bucket."""
    return select_columns(frame, fmt).mapInArrow(row_packer(fmt, routing), PACKED)


def row_packer(fmt: RowFormat, routing: Routing) -> Packer:
    """Return the function that packs batches with the columns of `select_columns`."""
    layout, labels = fmt.layout, np.asarray(routing.labels, np.int32)

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            records = records_of(batch, fmt)
            bucket = bucket_of(records.arrays["route"], len(labels))
            if len(labels) == 1:
                parts, present = [layout.encode(records)], labels
            else:
                order = np.argsort(bucket.astype(np.uint16), kind="stable")
                present, starts = np.unique(bucket[order], return_index=True)
                ordered = records.take(order)
                stops = [*starts[1:], len(order)]
                parts = [layout.encode(ordered.slice(a, b)) for a, b in zip(starts, stops, strict=True)]
                present = labels[present]
            yield pa.RecordBatch.from_arrays(
                [pa.array(present, pa.int32()), pa.array(parts, pa.binary())], PACKED_NAMES
            )

    return pack


PACKED_NAMES = ["bucket", "payload"]


def times_of(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the times (N,) of an Arrow batch of `select_columns`, in microseconds."""
    return batch.column("time").view(pa.int64()).to_numpy()


def records_of(batch: pa.RecordBatch, fmt: RowFormat) -> Records:
    """Read an Arrow batch of `select_columns` as records."""
    numbers = ["identity"] if fmt.kind.integer else ["identity", "check"]
    arrays = identity_arrays({name: batch.column(name).to_numpy() for name in numbers})
    arrays["time"] = times_of(batch)
    m, c = len(fmt.measurement), len(fmt.control)
    values = np.empty((m + c, batch.num_rows))
    for i in range(m + c):
        column = batch.column(f"n{i}")
        values[i] = column.to_numpy(
            zero_copy_only=False
        )  # Arrow gives null as NaN, which is what missing means here
    arrays["y"] = values[:m]
    if c:
        arrays["u"] = values[m:]
    return Records(arrays, None if fmt.kind.integer else batch.column("text"))


@step(UNPACK)
def unpack_rows(payloads: Iterable[bytes], fmt: RowFormat) -> KeyedRows:
    """Join the packets of a bucket and put their rows in the order in which they are applied."""
    layout = fmt.layout
    parts = [layout.decode(payload) for payload in payloads]
    return keyed_rows(concat(parts) if parts else layout.empty(), fmt)


@step(UNPACK)
def keyed_rows(records: Records, fmt: RowFormat) -> KeyedRows:
    """Put rows in the order in which they are applied, and find their keys."""
    y, time = records.arrays["y"], records.arrays["time"]
    u = records.arrays.get("u", np.empty((0, records.size)))
    grouped = group(records, lambda code: order_rows(code, time, y, u))
    order = grouped.order
    keys = Records({c.name: records.arrays[c.name] for c in fmt.kind.identity_columns}, records.text)
    return KeyedRows(
        keys.take(order[grouped.first]),
        SortedRows(
            grouped.code, time[order], np.ascontiguousarray(y[:, order]), np.ascontiguousarray(u[:, order])
        ),
    )
