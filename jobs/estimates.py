"""Pack a filter's output into binary values inside the stateful operator; unpack them into the table's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.advance import INNOVATION
from jobs.arrow_lists import lists
from jobs.keys import KeyKind, columns_of, integer_keys
from jobs.packed_rows import KeyedRows
from jobs.packets import Column, Layout, Records
from kalman.flags import FLAGS
from kalman.run import Outputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.spec import ModelSpec
    from kalman.types import Filter

ROWS_A_PACKET = 262_144
"""Rows in one packet of estimates: it keeps a packet far below the 2 GiB that a binary value may have."""


class EstimateFormat(NamedTuple):
    """What an estimate is made of.

    states: number of states n; diagonal: variances alone instead of the whole covariance; extra: widths by name of
    what else the filter puts out.
    """

    kind: KeyKind
    states: int
    diagonal: bool
    extra: tuple[tuple[str, int], ...]

    @property
    def watched(self) -> bool:
        """Tell if normalised innovations are put out."""
        return any(name == INNOVATION for name, _ in self.extra)

    @property
    def layout(self) -> Layout:
        """Return the layout of a packet of estimates."""
        n = self.states
        columns = [
            *([Column("key", "<i8")] if self.kind.integer else []),
            Column("time", "<i8"),
            Column("mean", "<f8", n),
            Column("covariance", "<f8", n if self.diagonal else n * (n + 1) // 2),
            Column("log_likelihood", "<f8"),
            Column("nis", "<f8"),
            *(Column(name, "<f8", width) for name, width in self.extra),
            Column("flag", "|u1"),
        ]
        return Layout(tuple(columns), text=not self.kind.integer)


def estimate_format(kind: KeyKind, spec: ModelSpec, kernel: Filter) -> EstimateFormat:
    """Return what the estimates of a spec's model are made of."""
    extra = dict(kernel.outputs)
    if spec.outputs.innovation:
        extra[INNOVATION] = kernel.measurements
    diagonal = spec.outputs.covariance == "diagonal"
    return EstimateFormat(kind, len(spec.states), diagonal, tuple(extra.items()))


def diagonal_of_packed(n: int) -> NDArray[np.int64]:
    """Return where the diagonal of an n x n matrix is in its packed lower triangle."""
    return np.array([i * (i + 3) // 2 for i in range(n)])


def full_of_packed(n: int) -> NDArray[np.int64]:
    """Return, row-major, where each entry of a symmetric n x n matrix is in its packed lower triangle."""
    return np.array([max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for i in range(n) for j in range(n)])


def pack_estimates(fmt: EstimateFormat, keyed: KeyedRows, outputs: Outputs) -> Iterator[tuple[int, bytes]]:
    """Yield (rows, packet) of the accepted rows, in the order in which they were applied."""
    rows = keyed.rows
    accepted = None if not outputs.late.any() else np.flatnonzero(~outputs.late)
    covariance = outputs.covariance[diagonal_of_packed(fmt.states)] if fmt.diagonal else outputs.covariance
    arrays: dict[str, NDArray] = {
        "time": rows.time,
        "mean": outputs.mean,
        "covariance": covariance,
        "log_likelihood": outputs.log_likelihood,
        "nis": outputs.nis,
        "flag": outputs.flag,
        **{name: outputs.extra[name] for name, _ in fmt.extra},
    }
    code = rows.key
    if fmt.kind.integer:
        arrays["key"] = integer_keys(keyed.keys.arrays["route"])[code]
    text = None if keyed.keys.text is None else keyed.keys.text.take(pa.array(code))
    records = Records(arrays, text)
    if accepted is not None:
        records = records.take(accepted)
    for start in range(0, records.size, ROWS_A_PACKET):
        stop = min(start + ROWS_A_PACKET, records.size)
        yield stop - start, fmt.layout.encode(records.slice(start, stop))


def unpack_estimates(packed: DataFrame, fmt: EstimateFormat) -> DataFrame:
    """Turn packets (column `payload`) into rows: key, key columns, event_time, mean, covariance, ... and flags."""
    from pyspark.sql import functions as F

    key_type = "bigint" if fmt.kind.integer else "string"
    extra = "".join(f", `{name}` array<double>" for name, _ in fmt.extra)
    schema = (
        f"key {key_type}, event_time bigint, mean array<double>, covariance array<double>, log_likelihood double, "
        f"nis double, flags string{extra}"
    )
    rows = packed.select("payload").mapInArrow(_unpacker(fmt), schema)
    text = F.col("key").cast("string")
    alone = [name.casefold() for name in fmt.kind.columns] == ["key"]  # the text stands for the column too
    return rows.select(
        text.alias("key"),
        *([] if alone else columns_of(fmt.kind, F.col("key"))),
        F.timestamp_micros("event_time").alias("event_time"),
        "mean",
        "covariance",
        "log_likelihood",
        "nis",
        "flags",
        *(name for name, _ in fmt.extra),
    )


def _unpacker(fmt: EstimateFormat) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    n, layout = fmt.states, fmt.layout
    full = None if fmt.diagonal else full_of_packed(n)
    names = [
        "key",
        "event_time",
        "mean",
        "covariance",
        "log_likelihood",
        "nis",
        "flags",
        *(x for x, _ in fmt.extra),
    ]

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for payload in batch.column("payload"):
                records = layout.decode(payload.as_py())  # a copy, and aligned
                arrays = records.arrays
                covariance = arrays["covariance"] if full is None else arrays["covariance"][full]
                nis = arrays["nis"]
                yield pa.RecordBatch.from_arrays(
                    [
                        records.text if records.text is not None else pa.array(arrays["key"]),
                        pa.array(arrays["time"]),
                        lists(arrays["mean"]),
                        lists(covariance),
                        pa.array(arrays["log_likelihood"]),
                        pa.array(nis, mask=np.isnan(nis)),
                        flag_names(arrays["flag"]),
                        *(lists(arrays[name]) for name, _ in fmt.extra),
                    ],
                    names,
                )

    return unpack


def flag_names(flags: NDArray[np.uint8]) -> pa.Array:
    """Return the flags' names, null where all is well."""
    if not flags.any():
        return pa.nulls(len(flags), pa.string())
    return pa.array(FLAGS, pa.string()).take(pa.array(flags))
