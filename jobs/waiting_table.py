"""The rows that wait at a snapshot's position: part of the snapshot, in a table of their own, one plain row each.

A snapshot reflects each row up to its position exactly once: in a key's state, or here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from jobs.arrow_lists import lists
from jobs.errors import RUN_FAILED, UserError, first_line
from jobs.keys import identity_expressions, integer_keys, text_of
from jobs.packed_rows import RowFormat
from jobs.routing import Routing
from jobs.state_blocks import StateFormat
from jobs.state_text import stored_bytes
from jobs.tables import WAITING_ROWS, Warehouse
from jobs.ticks import TIMED, timed_packer
from jobs.waiting_rows import NEVER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots import Manifest
    from jobs.spec import ModelSpec

TABLE = "waiting"
COLUMNS = ("key", "event_time", "measurement", "control")


class Held(NamedTuple):
    """Rows that wait (`COLUMNS`), the watermark that they wait for, and the newest event time; in microseconds."""

    rows: DataFrame
    watermark: int
    newest: int


def row_format_of(spec: ModelSpec, fmt: RowFormat) -> StateFormat:
    """Return how a model's waiting rows are stored in the stream's state."""
    meaning = {
        "model": spec.name,
        "version": spec.version,
        "waiting": [fmt.time, *fmt.measurement, *fmt.control],
        "key": dict(zip(fmt.kind.columns, fmt.kind.types, strict=True)),
    }
    header = json.dumps(meaning, separators=(",", ":")).encode()
    return StateFormat(header + b" " * (-len(header) % 8), fmt.layout)


def of_measurements(frame: DataFrame, fmt: RowFormat) -> DataFrame:
    """Return measurement rows with the columns of waiting ones."""
    from pyspark.sql import functions as F

    def numbers(names: tuple[str, ...]) -> Any:
        return F.array(*(F.col(f"`{name}`").cast("double") for name in names)).cast("array<double>")

    return frame.select(
        text_of(fmt.kind).alias("key"),
        F.col(f"`{fmt.time}`").alias("event_time"),
        numbers(fmt.measurement).alias("measurement"),
        numbers(fmt.control).alias("control"),
    )


def of_parts(parts: DataFrame, stored: StateFormat, fmt: RowFormat) -> DataFrame:
    """Return the rows of parts of the stream's state (column `rows`) with the columns of waiting ones."""
    from pyspark.sql import functions as F

    kind = fmt.kind

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for value in batch.column("rows").to_pylist():
                records = stored.decode(stored_bytes(value))
                arrays = records.arrays
                u = arrays.get("u", np.empty((0, records.size)))
                key = pa.array(integer_keys(np.array(arrays["route"]))) if kind.integer else records.text
                yield pa.RecordBatch.from_arrays(
                    [key, pa.array(np.array(arrays["time"])), lists(arrays["y"]), lists(u)], list(COLUMNS)
                )

    schema = (
        f"key {'bigint' if kind.integer else 'string'}, event_time bigint, "
        "measurement array<double>, control array<double>"
    )
    return (
        parts.select("rows")
        .mapInArrow(unpack, schema)
        .withColumn("key", F.col("key").cast("string"))
        .withColumn("event_time", F.timestamp_micros("event_time"))
    )


def write(warehouse: Warehouse, snapshot_id: str, model: str, held: Held) -> dict[str, Any]:
    """Write a snapshot's waiting rows, replacing what a killed attempt left; return what its manifest says of them."""
    from pyspark.sql import functions as F

    warehouse.create(TABLE, WAITING_ROWS, partition_by=("model", "snapshot_id"))
    rows = held.rows.select(F.lit(snapshot_id).alias("snapshot_id"), F.lit(model).alias("model"), *COLUMNS)
    where = f"model = '{model}' AND snapshot_id = '{snapshot_id}'"
    with warehouse.lock(TABLE):
        rows.write.format("delta").mode("overwrite").option("replaceWhere", where).save(warehouse.path(TABLE))
        version = warehouse.latest_version(TABLE)
    count, checksum = _measure(_read(warehouse, snapshot_id, model, version))
    none = held.watermark == NEVER
    times = {"watermark": None if none else held.watermark, "newest": None if none else held.newest}
    return {**times, "rows": count, "checksum": checksum, "version": version}


def verified(warehouse: Warehouse, manifest: Manifest) -> Held | None:
    """Return a snapshot's waiting rows, pinned, once they are found whole; None if it has no watermark.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    said = manifest.waiting
    if said is None:
        return None
    try:
        rows = _read(warehouse, manifest.snapshot_id, manifest.model, said["version"])
        count, checksum = _measure(rows)
    except (PySparkException, Py4JJavaError) as error:
        raise UserError(
            f"the waiting rows of snapshot {manifest.snapshot_id} cannot be read: {first_line(error)}",
            RUN_FAILED,
        ) from error
    if (count, checksum) != (said["rows"], said["checksum"]):
        raise UserError(
            f"snapshot {manifest.snapshot_id} is damaged: {count} rows wait with checksum {checksum}, where its "
            f"manifest says {said['rows']} with {said['checksum']}; start from another snapshot or pretrain again",
            RUN_FAILED,
        )
    none = said["watermark"] is None
    return Held(
        rows.select(*COLUMNS), NEVER if none else said["watermark"], NEVER if none else said["newest"]
    )


def packets(rows: DataFrame, fmt: RowFormat, routing: Routing) -> DataFrame:
    """Pack waiting rows for the stream's initial state (`ticks.TIMED`)."""
    from pyspark.sql import functions as F

    numbers = [
        F.get(name, F.lit(i)).alias(f"n{at + i}")
        for name, at, width in (
            ("measurement", 0, len(fmt.measurement)),
            ("control", len(fmt.measurement), len(fmt.control)),
        )
        for i in range(width)
    ]
    columns = rows.select(
        *identity_expressions(fmt.kind, F.col("key")), F.unix_micros("event_time").alias("time"), *numbers
    )
    packer: Callable[..., Any] = timed_packer(fmt.joined, routing)
    return columns.mapInArrow(packer, TIMED).filter("kind = 1")


def _read(warehouse: Warehouse, snapshot_id: str, model: str, version: int) -> DataFrame:
    from pyspark.sql import functions as F

    mine = (F.col("model") == model) & (F.col("snapshot_id") == snapshot_id)
    return warehouse.read(TABLE, version).filter(mine)


def _measure(rows: DataFrame) -> tuple[int, str]:
    """Return the count of rows, and the sum, modulo 2^64, of a 64-bit hash of each."""
    from pyspark.sql import functions as F

    digest = F.xxhash64(*COLUMNS).cast("decimal(38,0)")
    row = rows.agg(F.count("*").alias("count"), F.sum(digest).alias("digest")).first()
    assert row is not None
    return int(row["count"]), f"{int(row['digest'] or 0) % (1 << 64):016x}"
