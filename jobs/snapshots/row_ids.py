"""The remembered row ids at a snapshot's position, which are part of the snapshot in a separate table, one row per id.

A row after the position may repeat a row before the position. Without the remembered ids, a stream that begins from the
snapshot would process the repeated row a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from jobs.snapshots.verified_rows import RowsDigest, find_verified_version, read_rows, write_rows
from jobs.spark.warehouse import Warehouse
from jobs.state.block_format import StateFormat
from jobs.state.encoding.packets import TYPED_ROW_PACKETS, Records, RowPacket
from jobs.state.encoding.routing import Routing, compute_identities, compute_routes
from jobs.state.encoding.rows import RowFormat, group_by_bucket, map_batches, pack_buckets, unpack_rows
from jobs.state.row_ids import build_entries, build_ids_layout, is_in_reach
from jobs.state.spark_values import decode_stored
from jobs.storage.tables import REMEMBERED_IDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest

TABLE = "remembered_ids"
COLUMNS = ("key_identity", "key_check", "id", "id_check", "event_time")
"""The identities of key and id (`state.encoding.keys`, `.rows`): an integer, or two hashes of a text."""
_ROWS = ", ".join(f"{name} bigint" for name in COLUMNS)


def extract_from_rows(packed: DataFrame, fmt: RowFormat, floor: int) -> DataFrame:
    """Return an entry for each of the bucketed rows that a later row may repeat.

    Args:
        packed: packets of rows, one partition per bucket.
        fmt: format of the rows.
        floor: event time (microseconds); no later row can have an earlier event time.
    """

    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for payloads in group_by_bucket(batches):
            yield _build_rows(_select_reachable(build_entries(unpack_rows(payloads, fmt)), fmt, floor))

    return _convert_times(packed.mapInArrow(take, _ROWS))


def extract_from_blocks(blocks: DataFrame, stored: StateFormat, fmt: RowFormat, floor: int) -> DataFrame:
    """Return the entries that a later row may repeat, from blocks of the stream's state (column `ids`)."""

    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for value in batch.column("ids").to_pylist():
                yield _build_rows(_select_reachable(stored.decode(decode_stored(value)), fmt, floor))

    return _convert_times(blocks.select("ids").mapInArrow(unpack, _ROWS))


def write(warehouse: Warehouse, manifest: Manifest, entries: DataFrame) -> dict[str, Any]:
    """Write a snapshot's entries, and replace entries of a killed attempt; return their digest for the manifest."""
    return write_rows(warehouse, TABLE, REMEMBERED_IDS, manifest, entries, COLUMNS)


def read_row_ids(warehouse: Warehouse, manifest: Manifest) -> DataFrame | None:
    """Return a snapshot's entries, pinned and verified; None if the snapshot has no entries.

    Raises:
        UserError: entries are missing, doubled or changed.
    """
    digest = (manifest.waiting or {}).get("ids")
    if digest is None:
        return None
    version = find_verified_version(
        warehouse, TABLE, manifest, RowsDigest(**digest), COLUMNS, "remembered ids"
    )
    return read_rows(warehouse, manifest.snapshot_id, manifest.model, version, TABLE).select(*COLUMNS)


def pack_row_ids(entries: DataFrame, fmt: RowFormat, routing: Routing) -> DataFrame:
    """Pack entries for the stream's initial state."""
    row_id = fmt.row_id
    assert row_id is not None
    layout = build_ids_layout(fmt.kind, row_id)
    names = ["id", "id_check"][: row_id.width]

    @map_batches
    def pack(batch: pa.RecordBatch) -> pa.RecordBatch:
        given = {name: batch.column(name).fill_null(0).to_numpy() for name in batch.schema.names}
        arrays = {"route": compute_routes(given["key_identity"]), "time": given["event_time"]}
        if not fmt.kind.integer:
            arrays["check"] = given["key_check"]
        arrays["id"] = np.stack([given[name] for name in names])
        return pack_buckets(Records(arrays, None), layout, routing, RowPacket.ROW_IDS)

    times = F.unix_micros("event_time").alias("event_time")
    return entries.select(*COLUMNS[:-1], times).mapInArrow(pack, TYPED_ROW_PACKETS)


def _select_reachable(entries: Records, fmt: RowFormat, floor: int) -> Records:
    assert fmt.row_id is not None
    return entries.take(np.flatnonzero(is_in_reach(entries, fmt.row_id.within, floor)))


def _build_rows(entries: Records) -> pa.RecordBatch:
    """Return entries as Arrow rows (`_ROWS`)."""
    arrays = entries.arrays
    ids = arrays["id"]
    columns = [
        pa.array(compute_identities(np.ascontiguousarray(arrays["route"]))),
        pa.array(np.array(arrays["check"])) if "check" in arrays else pa.nulls(entries.size, pa.int64()),
        pa.array(np.array(ids[0])),
        pa.array(np.array(ids[1])) if len(ids) > 1 else pa.nulls(entries.size, pa.int64()),
        pa.array(np.array(arrays["time"])),
    ]
    return pa.RecordBatch.from_arrays(columns, list(COLUMNS))


def _convert_times(rows: DataFrame) -> DataFrame:
    return rows.withColumn("event_time", F.timestamp_micros("event_time"))
