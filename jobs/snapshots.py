"""Write, find, verify and load snapshots: state rows first, then the manifest row that makes the snapshot exist."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.arrow_lists import lists, matrix
from jobs.errors import UserError, first_line
from jobs.keys import KeyKind, identity_arrays, identity_expressions, integer_keys
from jobs.packets import Layout, Records
from jobs.positions import DELTA, rank
from jobs.processor import SEED
from jobs.routing import Routing, bucket_of
from jobs.spark_conf import suited
from jobs.spec import ModelSpec
from jobs.tables import MANIFESTS, SNAPSHOTS, Warehouse, utc
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from jobs.waiting_table import Held

GOOD, REMOVED = "good", "removed"
"""`removed`: `maintain` has taken its rows away. The manifest stays, as it says what generations began from."""
STATE_ROWS = (
    "state_index bigint, event_time bigint, mean array<double>, covariance array<double>, log_likelihood double, "
    "extras map<string, array<double>>"
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot as its manifest row says it is."""

    snapshot_id: str
    model: str
    model_version: int
    fingerprint: str
    parameters: dict[str, Any]
    position: dict[str, Any]
    key_count: int
    checksum: str
    rows: int
    snapshots_version: int
    spec: str
    status: str = GOOD
    cut: datetime | None = None
    learn_from: datetime | None = None
    learn_to: datetime | None = None
    generation: str | None = None
    batch_id: int | None = None
    parent: str | None = None
    committed_at: datetime | None = None
    waiting: dict[str, Any] | None = None
    """Of a model whose rows wait for a watermark: that, and the rows that wait (`jobs.waiting_table`)."""
    inputs: dict[str, Any] | None = None
    """Of a model with inputs: the version of their table that the last rows had (`jobs.inputs_table.Version`)."""

    @property
    def version(self) -> int:
        """Return how far in its source rows are reflected: a version, or a topic's sum of offsets."""
        return rank(self.position)

    def model_spec(self) -> ModelSpec:
        """Return the spec as it was when the snapshot was made: what its states mean."""
        return ModelSpec.model_validate_json(self.spec)


def state_rows(kernel: Filter, records: Records, integer: bool) -> Iterator[pa.RecordBatch]:
    """Turn state records into Arrow rows: key, then the columns of `STATE_ROWS`."""
    step = 65_536
    for start in range(0, records.size, step):
        part = records.slice(start, min(start + step, records.size))
        arrays = part.arrays
        mean, covariance, extras = kernel.snapshot(np.ascontiguousarray(arrays["values"], np.float64))
        key = pa.array(integer_keys(np.ascontiguousarray(arrays["route"]))) if integer else part.text
        yield pa.RecordBatch.from_arrays(
            [
                key,
                pa.array(np.ascontiguousarray(arrays["count"])),
                pa.array(np.ascontiguousarray(arrays["event_time"])),
                lists(mean),
                lists(covariance),
                pa.array(np.ascontiguousarray(arrays["log_likelihood"])),
                map_of(extras, part.size),
            ],
            ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood", "extras"],
        )


def typed_states(rows: DataFrame) -> DataFrame:
    """Return state rows as a snapshot has them: the key as text, the event time as a timestamp."""
    from pyspark.sql import functions as F

    return rows.withColumn("key", F.col("key").cast("string")).withColumn(
        "event_time", F.timestamp_micros("event_time")
    )


def write(warehouse: Warehouse, manifest: Manifest, states: DataFrame, held: Held | None = None) -> Manifest:
    """Write a snapshot: its rows, replacing what an earlier, killed attempt left; then its manifest.

    Args:
        warehouse: where.
        manifest: what the snapshot is; count, checksum and table version are filled in here. The count that it has is
            about how many keys to expect.
        states: key (text), state_index, event_time, mean, covariance, log_likelihood, extras.
        held: rows that wait, of a model whose rows do.

    Killed before the manifest is committed, the snapshot does not exist; the next attempt overwrites its rows. One that
    exists and whose rows are damaged gets new rows, and its manifest is pointed to them in one commit.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    from jobs import waiting_table

    # A snapshot is read as a whole, so the least and greatest value of each column in each file would help nobody.
    properties = {"delta.dataSkippingNumIndexedCols": "0"}
    warehouse.create("snapshots", SNAPSHOTS, ("model", "snapshot_id"), properties)
    warehouse.create("manifests", MANIFESTS)
    rows = states.select(
        F.lit(manifest.snapshot_id).alias("snapshot_id"),
        F.lit(manifest.model).alias("model"),
        F.lit(manifest.model_version).cast("int").alias("model_version"),
        *("key", "state_index", "event_time", "mean", "covariance", "log_likelihood", "extras"),
    )
    where = f"model = '{manifest.model}' AND snapshot_id = '{manifest.snapshot_id}'"
    with warehouse.lock("snapshots"), suited(warehouse.spark, manifest.key_count):
        rows.write.format("delta").mode("overwrite").option("replaceWhere", where).save(
            warehouse.path("snapshots")
        )
        version = warehouse.latest_version("snapshots")
    waiting = None
    if held is not None:
        waiting = waiting_table.write(warehouse, manifest.snapshot_id, manifest.model, held)
    with suited(warehouse.spark, manifest.key_count):
        written = read_rows(warehouse, manifest.snapshot_id, manifest.model, version)
        count, checksum, total = measure(written)
    row = {
        "snapshot_id": manifest.snapshot_id,
        "model": manifest.model,
        "model_version": manifest.model_version,
        "fingerprint": manifest.fingerprint,
        "parameters": json.dumps(manifest.parameters),
        "position": json.dumps(manifest.position),
        "cut": manifest.cut,
        "learn_from": manifest.learn_from,
        "learn_to": manifest.learn_to,
        "generation": manifest.generation,
        "batch_id": manifest.batch_id,
        "key_count": count,
        "checksum": checksum,
        "rows": total,
        "snapshots_version": version,
        "status": GOOD,
        "spec": manifest.spec,
        "parent": manifest.parent,
        "waiting": None if waiting is None else json.dumps(waiting),
        "inputs": None if manifest.inputs is None else json.dumps(manifest.inputs),
    }
    before = record(warehouse, manifest.snapshot_id)
    if before is not None and before.status != REMOVED:
        return _repaired(warehouse, row)
    schema = StructType.fromDDL(MANIFESTS)
    assert isinstance(schema, StructType)
    frame = warehouse.spark.createDataFrame([row], schema).withColumn("committed_at", F.current_timestamp())
    if before is None:
        # A table of an earlier release has not all of the columns yet.
        warehouse.append(frame.coalesce(1), "manifests", (manifest.snapshot_id, 1), {"mergeSchema": "true"})
    else:
        _again(warehouse, frame)
    written = find(warehouse, manifest.snapshot_id)
    assert written is not None
    return written


def _again(warehouse: Warehouse, row: DataFrame) -> None:
    """Let a snapshot exist again that had been taken away; one that is there is left as it is."""
    from delta.tables import DeltaTable

    table = DeltaTable.forPath(warehouse.spark, warehouse.path("manifests")).alias("t")
    merge = table.merge(row.alias("s"), "t.snapshot_id = s.snapshot_id")
    with warehouse.lock("manifests"):
        merge.withSchemaEvolution().whenMatchedUpdateAll(f"t.status = '{REMOVED}'").execute()


def read_rows(warehouse: Warehouse, snapshot_id: str, model: str, version: int | None = None) -> DataFrame:
    """Read a snapshot's state rows."""
    from pyspark.sql import functions as F

    frame = warehouse.read("snapshots", version)
    return frame.filter((F.col("model") == model) & (F.col("snapshot_id") == snapshot_id))


def measure(rows: DataFrame) -> tuple[int, str, int]:
    """Return the key count, the checksum and the measurements reflected of state rows.

    The checksum is the sum, modulo 2^64, of a 64-bit hash of each row: no order of rows changes it.
    """
    from pyspark.sql import functions as F

    columns = ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood"]
    hashed = rows.select("state_index", F.xxhash64(*columns, F.map_entries("extras")).alias("hash"))
    # Sums of halves, 32 bits each, are 64-bit integers for up to two billion keys; decimals take several times as long.
    row = hashed.agg(
        F.count("*").alias("count"),
        F.sum(F.shiftright("hash", 32)).alias("high"),
        F.sum(F.col("hash").bitwiseAND(F.lit(0xFFFFFFFF))).alias("low"),
        F.sum("state_index").alias("rows"),
    ).first()
    assert row is not None
    checksum = (((row["high"] or 0) << 32) + (row["low"] or 0)) % (1 << 64)
    return int(row["count"]), f"{checksum:016x}", int(row["rows"] or 0)


def find(warehouse: Warehouse, snapshot_id: str) -> Manifest | None:
    """Return a snapshot's manifest, or None if the snapshot does not exist, or does no longer."""
    found = record(warehouse, snapshot_id)
    return None if found is None or found.status == REMOVED else found


def record(warehouse: Warehouse, snapshot_id: str) -> Manifest | None:
    """Return a snapshot's manifest, also if its rows are gone, or None if there never was such a snapshot."""
    from pyspark.sql import functions as F

    if not warehouse.exists("manifests"):
        return None
    row = warehouse.read("manifests").filter(F.col("snapshot_id") == snapshot_id).first()
    return None if row is None else _manifest(row)


def remove(warehouse: Warehouse, model: str, names: list[str]) -> None:
    """Take snapshots away: the manifests are marked first, in one commit, so that none is there without its rows.

    Killed between the two, the rows of marked manifests are found and removed by the next call.
    """
    from delta.tables import DeltaTable
    from pyspark.sql import functions as F

    from jobs.ids_table import TABLE as IDS
    from jobs.waiting_table import TABLE as WAITING

    if not warehouse.exists("manifests"):
        return
    if names:
        with warehouse.lock("manifests"):
            DeltaTable.forPath(warehouse.spark, warehouse.path("manifests")).update(
                (F.col("model") == model) & F.col("snapshot_id").isin(names), {"status": F.lit(REMOVED)}
            )
    gone = [one.snapshot_id for one in all_of(warehouse, model) if one.status == REMOVED]
    mine = (F.col("model") == model) & F.col("snapshot_id").isin(gone)
    for table in ("snapshots", WAITING, IDS):
        if gone and warehouse.exists(table) and not warehouse.read(table).filter(mine).isEmpty():
            with warehouse.lock(table):
                DeltaTable.forPath(warehouse.spark, warehouse.path(table)).delete(mine)


def all_of(warehouse: Warehouse, model: str | None = None) -> list[Manifest]:
    """Return the manifests, of one model or of all, in the order in which their rows were committed."""
    from pyspark.sql import functions as F

    if not warehouse.exists("manifests"):
        return []
    frame = warehouse.read("manifests")
    if model is not None:
        frame = frame.filter(F.col("model") == model)
    return [_manifest(row) for row in frame.orderBy("snapshots_version", "snapshot_id").collect()]


def newest_startable(
    warehouse: Warehouse, model: str, fingerprint: str, source: str = DELTA, table: str | None = None
) -> Manifest | None:
    """Return the good snapshot of this very model that reflects most, among those that a stream may start from.

    With the id of the measurements `table`, none of a table that was there before it.
    """
    fit = [
        one
        for one in all_of(warehouse, model)
        if one.status == GOOD
        and one.cut is None
        and one.fingerprint == fingerprint
        and one.position["source"] == source
        and (table is None or one.position.get("id", table) == table)
    ]
    return max(fit, key=lambda one: (one.version, one.snapshots_version), default=None)


def find_whole(warehouse: Warehouse, snapshot_id: str) -> Manifest | None:
    """Return a snapshot's manifest if the snapshot exists and its rows are there; None: it is to be made (again)."""
    found = find(warehouse, snapshot_id)
    try:
        if found is not None:
            verify(warehouse, found)
    except UserError:
        return None
    return found


def _repaired(warehouse: Warehouse, row: dict[str, Any]) -> Manifest:
    """Point the manifest of a snapshot whose rows were written again to them, in one commit."""
    from delta.tables import DeltaTable
    from pyspark.sql import functions as F

    names = ["key_count", "checksum", "rows", "snapshots_version", "parameters"]
    if row["waiting"] is not None:
        names.append("waiting")
    table = DeltaTable.forPath(warehouse.spark, warehouse.path("manifests"))
    with warehouse.lock("manifests"):
        table.update(F.col("snapshot_id") == row["snapshot_id"], {name: F.lit(row[name]) for name in names})
    written = find(warehouse, row["snapshot_id"])
    assert written is not None
    return written


def verify(warehouse: Warehouse, manifest: Manifest) -> DataFrame:
    """Return the snapshot's rows, pinned to a version of their table, once they are found whole.

    The version is the one that was written; Delta forgets it after 30 days, and then it is the newest, in which the
    snapshot's rows are the same: they are written once, and the checksum tells.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    def counted(version: int) -> tuple[DataFrame, int, str]:
        rows = read_rows(warehouse, manifest.snapshot_id, manifest.model, version)
        with suited(warehouse.spark, manifest.key_count):
            return rows, *measure(rows)[:2]

    try:
        rows, count, checksum = counted(manifest.snapshots_version)
    except (PySparkException, Py4JJavaError):  # a file that is gone is the latter
        try:
            rows, count, checksum = counted(warehouse.latest_version("snapshots"))
        except (PySparkException, Py4JJavaError) as error:
            raise UserError(
                f"the rows of snapshot {manifest.snapshot_id} cannot be read: {first_line(error)}",
                1,
            ) from error
    if (count, checksum) != (manifest.key_count, manifest.checksum):
        raise UserError(
            f"snapshot {manifest.snapshot_id} is damaged: {count} keys with checksum {checksum}, where its manifest "
            f"says {manifest.key_count} with {manifest.checksum}; start from another snapshot or pretrain again",
            1,
        )
    return rows


def seed_packets(
    rows: DataFrame, kernel: Filter, kind: KeyKind, layout: Layout, routing: Routing
) -> DataFrame:
    """Pack a snapshot's rows for the stream's initial state: (bucket, packet of state records)."""
    from pyspark.sql import functions as F

    _, _, extras = kernel.snapshot(kernel.initial(1))
    widths = {name: array.shape[0] for name, array in extras.items()}
    named: list[Column] = [F.col("extras")[name].alias(f"x{i}") for i, name in enumerate(widths)]
    columns = rows.select(
        *identity_expressions(kind, F.col("key")),
        F.unix_micros("event_time").alias("event_time"),
        F.col("state_index").alias("count"),
        "log_likelihood",
        "mean",
        "covariance",
        *named,
    )
    return columns.mapInArrow(_seeder(kernel, kind, layout, routing, widths), SEED)


def _seeder(
    kernel: Filter, kind: KeyKind, layout: Layout, routing: Routing, widths: dict[str, int]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    n, labels = len(kernel.states), np.asarray(routing.labels)

    def seed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            names = ["identity"] if kind.integer else ["identity", "check"]
            arrays = identity_arrays({name: batch.column(name).to_numpy() for name in names})
            for name in ("event_time", "count", "log_likelihood"):
                arrays[name] = batch.column(name).to_numpy()
            extras = {
                name: matrix(batch.column(f"x{i}"), width, name)
                for i, (name, width) in enumerate(widths.items())
            }
            mean, covariance = (
                matrix(batch.column("mean"), n, "mean"),
                matrix(batch.column("covariance"), n * n, "covariance"),
            )
            arrays["values"] = kernel.restore(mean, covariance, extras)
            records = Records(arrays, None if kind.integer else batch.column("text"))
            bucket = bucket_of(arrays["route"], len(labels))
            for number in np.unique(bucket):
                part = records.take(np.flatnonzero(bucket == number))
                yield pa.RecordBatch.from_arrays(
                    [pa.array([labels[number]], pa.int32()), pa.array([layout.encode(part)], pa.binary())],
                    ["bucket", "payload"],
                )

    return seed


def map_of(extras: dict[str, NDArray[np.float64]], size: int) -> pa.Array:
    """Turn named (d, N) arrays into N maps from name to d numbers; null where there are none."""
    kind = pa.map_(pa.string(), pa.list_(pa.float64()))
    if not extras:
        return pa.nulls(size, kind)
    columns = [lists(array) for array in extras.values()]
    order = (np.arange(size)[:, None] + size * np.arange(len(columns))).ravel()
    items = pa.concat_arrays(columns).take(pa.array(order))
    names = pa.array(list(extras) * size, pa.string())
    offsets = pa.array(np.arange(size + 1, dtype=np.int32) * np.int32(len(columns)))
    return pa.MapArray.from_arrays(offsets, names, items)


def _manifest(row: Row) -> Manifest:
    values = utc(row.asDict())
    return Manifest(
        **{
            **values,
            "parameters": json.loads(values["parameters"] or "{}"),
            "position": json.loads(values["position"]),
            "waiting": json.loads(values.get("waiting") or "null"),
            "inputs": json.loads(values.get("inputs") or "null"),
        }
    )
