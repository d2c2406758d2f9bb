"""The rows that wait for the watermark at a snapshot's position, which are part of the snapshot in a separate table.

A snapshot reflects each row up to its position exactly once, either in the state of a key or in this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from jobs.snapshots import row_ids
from jobs.snapshots.state_rows import restore_types
from jobs.snapshots.verified_rows import RowsDigest, find_verified_version, read_rows, write_rows
from jobs.spark.warehouse import Warehouse
from jobs.state.block_format import StateFormat
from jobs.state.encoding.arrow import build_lists
from jobs.state.encoding.keys import build_identity_columns, build_key_array, build_key_text
from jobs.state.encoding.packets import NEVER, TYPED_ROW_PACKETS, RowPacket
from jobs.state.encoding.routing import Routing
from jobs.state.encoding.rows import RowFormat, build_event_time_packer, build_id_columns, select_ids
from jobs.state.spark_values import decode_stored
from jobs.storage.tables import WAITING_ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest

TABLE = "waiting"
COLUMNS = ("key", "event_time", "measurement", "control")
ROW_ID_COLUMN = "row_id"
"""An additional column with the id of a row as text, for models whose rows have ids."""


class Held(NamedTuple):
    """Waiting rows, the current watermark, and the maximum event time; both times are in microseconds.

    ids: the remembered ids (`jobs.snapshots.row_ids`), for models that detect duplicates by id.
    """

    rows: DataFrame
    watermark: int
    newest: int
    ids: DataFrame | None = None


def build_from_measurements(frame: DataFrame, fmt: RowFormat) -> DataFrame:
    """Return measurement rows with the columns of waiting rows."""

    def numbers(names: tuple[str, ...]) -> Any:
        return F.array(*(F.col(f"`{name}`").cast("double") for name in names)).cast("array<double>")

    return frame.select(
        build_key_text(fmt.kind).alias("key"),
        F.col(f"`{fmt.time}`").alias("event_time"),
        numbers(fmt.measurement).alias("measurement"),
        numbers(fmt.control).alias("control"),
        *(
            []
            if fmt.row_id is None
            else [F.col(f"`{fmt.row_id.column}`").cast("string").alias(ROW_ID_COLUMN)]
        ),
    )


def extract_from_parts(parts: DataFrame, stored: StateFormat, fmt: RowFormat) -> DataFrame:
    """Return the rows in parts of the stream's state (column `rows`), converted to the columns of waiting rows."""
    kind, columns = fmt.kind, _list_columns(fmt.row_id is not None)

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for value in batch.column("rows").to_pylist():
                records = stored.decode(decode_stored(value))
                arrays = records.arrays
                u = arrays.get("u", np.empty((0, records.size)))
                found = [
                    build_key_array(records),
                    pa.array(np.array(arrays["time"])),
                    build_lists(arrays["y"]),
                    build_lists(u),
                ]
                if fmt.row_id is not None:
                    found.append(select_ids(records).cast(pa.string()))
                yield pa.RecordBatch.from_arrays(found, list(columns))

    schema = (
        f"key {'bigint' if kind.integer else 'string'}, event_time bigint, measurement array<double>, "
        f"control array<double>{'' if fmt.row_id is None else f', {ROW_ID_COLUMN} string'}"
    )
    return restore_types(parts.select("rows").mapInArrow(unpack, schema))


def write(warehouse: Warehouse, manifest: Manifest, held: Held) -> dict[str, Any]:
    """Write a snapshot's waiting rows and ids, and replace those of a killed attempt; return `Manifest.waiting`."""
    with_ids = ROW_ID_COLUMN in held.rows.columns
    wrote = write_rows(warehouse, TABLE, WAITING_ROWS, manifest, held.rows, _list_columns(with_ids))
    none = held.watermark == NEVER
    times = {"watermark": None if none else held.watermark, "newest": None if none else held.newest}
    ids = {} if held.ids is None else {"ids": row_ids.write(warehouse, manifest, held.ids)}
    return {**times, **wrote, **({"with_ids": True} if with_ids else {}), **ids}


def read_waiting_rows(warehouse: Warehouse, manifest: Manifest) -> Held | None:
    """Return a snapshot's waiting rows and ids, pinned and verified; None if its model has no watermark.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    waiting = manifest.waiting
    if waiting is None:
        return None
    digest = RowsDigest(*(waiting[name] for name in RowsDigest._fields))
    columns = _list_columns(waiting.get("with_ids", False))
    version = find_verified_version(warehouse, TABLE, manifest, digest, columns, "waiting rows")
    rows = read_rows(warehouse, manifest.snapshot_id, manifest.model, version, TABLE).select(*columns)
    none = waiting["watermark"] is None
    times = (NEVER, NEVER) if none else (waiting["watermark"], waiting["newest"])
    return Held(rows, *times, row_ids.read_row_ids(warehouse, manifest))


def pack_waiting_rows(rows: DataFrame, fmt: RowFormat, routing: Routing) -> DataFrame:
    """Pack waiting rows into packets for the initial state of a stream."""
    numbers = [
        F.get(name, F.lit(i)).alias(f"n{at + i}")
        for name, at, width in (
            ("measurement", 0, len(fmt.measurement)),
            ("control", len(fmt.measurement), len(fmt.control)),
        )
        for i in range(width)
    ]
    given = F.col(ROW_ID_COLUMN) if ROW_ID_COLUMN in rows.columns else F.lit(None).cast("string")
    ids = {} if fmt.row_id is None else build_id_columns(fmt.row_id, given)
    if ids:
        rows = rows.withColumns(ids)
    columns = rows.select(
        *build_identity_columns(fmt.kind, F.col("key")),
        F.unix_micros("event_time").alias("time"),
        *numbers,
        *ids,
    )
    packer: Callable[..., Any] = build_event_time_packer(fmt.joined, routing)
    return columns.mapInArrow(packer, TYPED_ROW_PACKETS).filter(F.col("kind") == RowPacket.ROWS)


def _list_columns(with_ids: bool) -> tuple[str, ...]:
    """Return the columns of waiting rows, with or without the column of ids."""
    return (*COLUMNS, ROW_ID_COLUMN) if with_ids else COLUMNS
