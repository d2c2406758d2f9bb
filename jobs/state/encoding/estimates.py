"""Pack a filter's outputs into binary values in the stateful operator, and unpack them into the table's columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.state.encoding.arrow import build_lists
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import CONTROL, MEASURED, Layout, PacketColumn, Records
from jobs.state.encoding.routing import compute_identities
from jobs.state.encoding.rows import KeyedRows
from jobs.state.encoding.table_columns import (
    COMPUTED,
    build_extra_column,
    find_arrow_type,
    find_extra_type,
    find_extra_widths,
    parse_key_columns,
)
from kalman.flags import FLAGS
from kalman.run import Outputs

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec
    from kalman.types import Filter

_TIMESTAMP = pa.timestamp("us", tz="UTC")

ROWS_A_PACKET = 32_768
"""Number of rows in a packet of estimates; with it a packet stays far below the 2 GiB limit of a binary value."""


class EstimateFormat(NamedTuple):
    """The columns of an estimate.

    states: number of states n. diagonal: whether an estimate has only variances instead of the full covariance. extra:
    names and widths of the filter's other outputs.
    """

    kind: KeyKind
    states: int
    diagonal: bool
    extra: tuple[tuple[str, int], ...]

    @property
    def beside(self) -> tuple[str, ...]:
        """Return the names of the extras that the filter does not compute; they are `beside` in a `RowFilter`."""
        return tuple(name for name, _ in self.extra if name in COMPUTED)

    @property
    def layout(self) -> Layout:
        """Return the layout of a packet of estimates."""
        n = self.states
        columns = [
            *([PacketColumn("key", "<i8")] if self.kind.integer else []),
            PacketColumn("time", "<i8"),
            PacketColumn("mean", "<f8", n),
            PacketColumn("covariance", "<f8", n if self.diagonal else n * (n + 1) // 2),
            PacketColumn("log_likelihood", "<f8"),
            PacketColumn("nis", "<f8"),
            *(PacketColumn(name, "<f8", width) for name, width in self.extra),
            PacketColumn("flag", "|u1"),
        ]
        return Layout(tuple(columns), text=not self.kind.integer)


def estimate_format(kind: KeyKind, spec: ModelSpec, kernel: Filter) -> EstimateFormat:
    """Return the format of a model's estimates."""
    widths = find_extra_widths(kernel)
    extra = {**kernel.outputs, **{name: widths[name] for name in spec.outputs.columns}}
    diagonal = spec.outputs.covariance == "diagonal"
    return EstimateFormat(kind, len(spec.states), diagonal, tuple(extra.items()))


def locate_packed_diagonal(n: int) -> NDArray[np.int64]:
    """Return the positions (n,) of the diagonal of a symmetric n x n matrix in its packed lower triangle."""
    return np.array([i * (i + 3) // 2 for i in range(n)])


def locate_packed_full(n: int) -> NDArray[np.int64]:
    """Return the positions (n * n,) of a symmetric n x n matrix, row by row, in its packed lower triangle."""
    return np.array([max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for i in range(n) for j in range(n)])


def estimate_records(fmt: EstimateFormat, keyed: KeyedRows, outputs: Outputs) -> Records:
    """Return the estimates of the accepted rows, in the order in which the filter applied the rows."""
    rows = keyed.rows
    of_row = {MEASURED: rows.y, CONTROL: rows.u}
    accepted = None if not outputs.late.any() else np.flatnonzero(~outputs.late)
    covariance = (
        outputs.covariance[locate_packed_diagonal(fmt.states)] if fmt.diagonal else outputs.covariance
    )
    arrays: dict[str, NDArray] = {
        "time": rows.time,
        "mean": outputs.mean,
        "covariance": covariance,
        "log_likelihood": outputs.log_likelihood,
        "nis": outputs.nis,
        "flag": outputs.flag,
        **{name: of_row[name] if name in of_row else outputs.extra[name] for name, _ in fmt.extra},
    }
    code = rows.key
    if fmt.kind.integer:
        arrays["key"] = compute_identities(keyed.keys.arrays["route"])[code]
    text = None if keyed.keys.text is None else keyed.keys.text.take(pa.array(code))
    records = Records(arrays, text)
    return records if accepted is None else records.take(accepted)


def pack_estimates(fmt: EstimateFormat, keyed: KeyedRows, outputs: Outputs) -> Iterator[tuple[int, bytes]]:
    """Yield packets of estimates of the accepted rows with their numbers of rows, in the order of application."""
    records = estimate_records(fmt, keyed, outputs)
    for start in range(0, records.size, ROWS_A_PACKET):
        stop = min(start + ROWS_A_PACKET, records.size)
        yield stop - start, fmt.layout.encode(records.slice(start, stop))


def estimate_schema(fmt: EstimateFormat, batch_id: bool) -> str:
    """Return the columns of `estimate_batch` as DDL."""
    kind = fmt.kind
    named = [] if kind.is_plain_key else zip(kind.columns, kind.types, strict=True)
    columns = "".join(f"`{name.replace('`', '``')}` {type_}, " for name, type_ in named)
    extra = "".join(f", `{name}` {find_extra_type(name)}" for name, _ in fmt.extra)
    return (
        f"key string, {columns}event_time timestamp, mean array<double>, covariance array<double>, "
        f"log_likelihood double, nis double, flags string{extra}{', batch_id bigint' if batch_id else ''}"
    )


def estimate_batch(
    fmt: EstimateFormat, records: Records, batch_id: NDArray[np.int64] | None = None
) -> pa.RecordBatch:
    """Return estimates as rows with the columns of `estimate_schema`; batch_id: (N,) micro-batch of each row."""
    arrays = records.arrays
    covariance = (
        arrays["covariance"] if fmt.diagonal else arrays["covariance"][locate_packed_full(fmt.states)]
    )
    nis = arrays["nis"]
    columns = {
        **_build_key_columns(fmt.kind, records),
        "event_time": pa.array(np.ascontiguousarray(arrays["time"])).view(_TIMESTAMP),
        "mean": build_lists(arrays["mean"]),
        "covariance": build_lists(covariance),
        "log_likelihood": pa.array(np.ascontiguousarray(arrays["log_likelihood"])),
        "nis": pa.array(nis, mask=np.isnan(nis)),
        "flags": find_flag_names(arrays["flag"]),
        **{name: build_extra_column(name, arrays[name]) for name, _ in fmt.extra},
        **({} if batch_id is None else {"batch_id": pa.array(batch_id)}),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _build_key_columns(kind: KeyKind, records: Records) -> dict[str, pa.Array]:
    """Return the text and the key columns of each record's key; a single column `key` is not repeated."""
    if kind.integer:
        number = pa.array(np.ascontiguousarray(records.arrays["key"])).cast(find_arrow_type(kind.types[0]))
        text, typed = number.cast(pa.string()), {kind.columns[0]: number}
    else:
        text = records.text
        typed = {} if kind.is_plain_key else parse_key_columns(kind, text)
    return {"key": text, **({} if kind.is_plain_key else typed)}


def find_flag_names(flags: NDArray[np.uint8]) -> pa.Array:
    """Return the names of the flags (N,); null for rows without a flag."""
    if not flags.any():
        return pa.nulls(len(flags), pa.string())
    return pa.array(FLAGS, pa.string()).take(pa.array(flags))


def build_table_batch(
    found: pa.RecordBatch, schema: pa.Schema, constants: Mapping[str, Any]
) -> pa.RecordBatch:
    """Return the rows of `estimate_batch` with the columns of a table, in the order of the table.

    Args:
        found: the rows (N).
        schema: the table's columns.
        constants: value, by column name, of each column that is the same in all rows.
    """
    columns = dict(zip(found.schema.names, found.columns, strict=True))
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else _repeat_value(constants[field.name], field.type, found.num_rows)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)


def _repeat_value(value: Any, kind: pa.DataType, size: int) -> pa.Array:
    """Return an array (N,) that repeats a value; a text is stored once, and written like any other text column."""
    if pa.types.is_string(kind):
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(size, np.int32)), pa.array([value], kind))
    return pa.repeat(pa.scalar(value, kind), size)
