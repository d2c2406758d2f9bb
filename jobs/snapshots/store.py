"""Write, find, verify and load snapshots: state rows first, then the manifest row that makes the snapshot exist."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from jobs.core.errors import UserError, first_line
from jobs.snapshots import waiting_rows
from jobs.snapshots.manifests import GOOD, REMOVED, Manifest, all_of, find, record
from jobs.snapshots.row_ids import TABLE as IDS
from jobs.snapshots.state_rows import measure, read_rows
from jobs.snapshots.waiting_rows import TABLE as WAITING
from jobs.spark.conf import codegen_for
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import MANIFESTS, SNAPSHOTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.waiting_rows import Held


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
    with warehouse.lock("snapshots"), codegen_for(warehouse.spark, manifest.key_count):
        rows.write.format("delta").mode("overwrite").option("replaceWhere", where).save(
            warehouse.path("snapshots")
        )
        version = warehouse.latest_version("snapshots")
    waiting = None
    if held is not None:
        waiting = waiting_rows.write(warehouse, manifest.snapshot_id, manifest.model, held)
    with codegen_for(warehouse.spark, manifest.key_count):
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
    table = DeltaTable.forPath(warehouse.spark, warehouse.path("manifests")).alias("t")
    merge = table.merge(row.alias("s"), "t.snapshot_id = s.snapshot_id")
    with warehouse.lock("manifests"):
        merge.withSchemaEvolution().whenMatchedUpdateAll(f"t.status = '{REMOVED}'").execute()


def remove(warehouse: Warehouse, model: str, names: list[str]) -> None:
    """Take snapshots away: the manifests are marked first, in one commit, so that none is there without its rows.

    Killed between the two, the rows of marked manifests are found and removed by the next call.
    """

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

    def counted(version: int) -> tuple[DataFrame, int, str]:
        rows = read_rows(warehouse, manifest.snapshot_id, manifest.model, version)
        with codegen_for(warehouse.spark, manifest.key_count):
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
