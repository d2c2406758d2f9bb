"""Write, verify and remove snapshots: state rows first, then the manifest row that makes the snapshot exist."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from delta.tables import DeltaTable
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from jobs.core.errors import UserError, first_line
from jobs.snapshots import learned_rows, waiting_rows
from jobs.snapshots.manifests import GOOD, REMOVED, Manifest, all_of, find, record, row_of
from jobs.snapshots.row_ids import TABLE as IDS
from jobs.snapshots.state_rows import measure, read_rows
from jobs.snapshots.waiting_rows import TABLE as WAITING
from jobs.spark.conf import codegen_for
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import MANIFESTS, SNAPSHOTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.waiting_rows import Held


def write(
    warehouse: Warehouse,
    manifest: Manifest,
    states: DataFrame,
    held: Held | None = None,
    learned: DataFrame | None = None,
) -> Manifest:
    """Write a snapshot: its rows, replacing those of a killed attempt, then its manifest. Return the written manifest.

    Killed before the manifest is committed, the snapshot does not exist, and the next attempt overwrites its rows. A
    snapshot that exists with damaged rows gets new rows, and one commit points its manifest to them.

    Args:
        warehouse: of the snapshot.
        manifest: describes the snapshot. Count, checksum and table version are filled in here; its `key_count` is the
            number of keys to expect, about.
        states: key (text), state_index, event_time, mean, covariance, log_likelihood, extras.
        held: waiting rows and remembered ids, for a model whose rows wait for a watermark.
        learned: what was learned (`learned_rows.COLUMNS`), if anything was.
    """
    version = _write_states(warehouse, manifest, states)
    waiting = None
    if held is not None:
        waiting = waiting_rows.write(warehouse, manifest.snapshot_id, manifest.model, held)
    told = None
    if learned is not None:
        told = learned_rows.write(warehouse, manifest.snapshot_id, manifest.model, learned)
    with codegen_for(warehouse.spark, manifest.key_count):
        written = read_rows(warehouse, manifest.snapshot_id, manifest.model, version)
        count, checksum, total = measure(written)
    found = {"key_count": count, "checksum": checksum, "rows": total, "snapshots_version": version}
    return _commit(warehouse, replace(manifest, **found, status=GOOD, waiting=waiting, learned=told))


def _write_states(warehouse: Warehouse, manifest: Manifest, states: DataFrame) -> int:
    """Write a snapshot's state rows, and return the version of their table."""
    # A snapshot is always read as a whole, so per-file minima and maxima of columns would be no use.
    properties = {"delta.dataSkippingNumIndexedCols": "0"}
    warehouse.create("snapshots", SNAPSHOTS, ("model", "snapshot_id"), properties)
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
        return warehouse.latest_version("snapshots")


def _commit(warehouse: Warehouse, manifest: Manifest) -> Manifest:
    """Commit the manifest of a snapshot whose rows are written, and return it as its table has it."""
    warehouse.create("manifests", MANIFESTS)
    row = row_of(manifest)
    before = record(warehouse, manifest.snapshot_id)
    if before is not None and before.status != REMOVED:
        _point_to_new_rows(warehouse, row)
    else:
        schema = StructType.fromDDL(MANIFESTS)
        assert isinstance(schema, StructType)
        frame = warehouse.spark.createDataFrame([row], schema)
        frame = frame.withColumn("committed_at", F.current_timestamp())
        if before is None:
            # A table of an earlier release lacks some of the columns.
            options = {"mergeSchema": "true"}
            warehouse.append(frame.coalesce(1), "manifests", (manifest.snapshot_id, 1), options)
        else:
            _restore(warehouse, frame)
    written = find(warehouse, manifest.snapshot_id)
    assert written is not None
    return written


def _restore(warehouse: Warehouse, row: DataFrame) -> None:
    """Replace the manifest of a removed snapshot; a snapshot that exists is left unchanged."""
    table = DeltaTable.forPath(warehouse.spark, warehouse.path("manifests")).alias("t")
    merge = table.merge(row.alias("s"), "t.snapshot_id = s.snapshot_id")
    with warehouse.lock("manifests"):
        merge.withSchemaEvolution().whenMatchedUpdateAll(f"t.status = '{REMOVED}'").execute()


def _point_to_new_rows(warehouse: Warehouse, row: dict[str, Any]) -> None:
    """Point the manifest of a snapshot to its rows, which were written again, in one commit."""
    names = ["key_count", "checksum", "rows", "snapshots_version", "parameters"]
    names += [name for name in ("waiting", "learned") if row[name] is not None]
    if "learned" in names and "learned" not in warehouse.read("manifests").columns:  # of an earlier release
        warehouse.spark.sql(f"ALTER TABLE delta.`{warehouse.path('manifests')}` ADD COLUMNS (learned string)")
    table = DeltaTable.forPath(warehouse.spark, warehouse.path("manifests"))
    with warehouse.lock("manifests"):
        table.update(F.col("snapshot_id") == row["snapshot_id"], {name: F.lit(row[name]) for name in names})


def remove(warehouse: Warehouse, model: str, names: list[str]) -> None:
    """Remove snapshots: first mark their manifests, in one commit, so that no valid manifest is without its rows.

    Killed in between, the next call removes the rows of the marked manifests.
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
    for table in ("snapshots", WAITING, IDS, learned_rows.TABLE):
        if gone and warehouse.exists(table) and not warehouse.read(table).filter(mine).isEmpty():
            with warehouse.lock(table):
                DeltaTable.forPath(warehouse.spark, warehouse.path(table)).delete(mine)


def find_whole(warehouse: Warehouse, snapshot_id: str) -> Manifest | None:
    """Return a snapshot's manifest if it exists and its rows are whole; None means that it has to be written."""
    found = find(warehouse, snapshot_id)
    try:
        if found is not None:
            verify(warehouse, found)
            learned_rows.verified(warehouse, found)
    except UserError:
        return None
    return found


def verify(warehouse: Warehouse, manifest: Manifest) -> DataFrame:
    """Return a snapshot's state rows, pinned to a version of their table, after checking that they are whole.

    That is the version that was written. After 30 days Delta has dropped it, and the newest version is used: rows of a
    snapshot are written once, and the checksum shows that they are unchanged.

    Raises:
        UserError: rows are missing, doubled or changed.
    """

    def counted(version: int) -> tuple[DataFrame, int, str]:
        rows = read_rows(warehouse, manifest.snapshot_id, manifest.model, version)
        with codegen_for(warehouse.spark, manifest.key_count):
            return rows, *measure(rows)[:2]

    try:
        rows, count, checksum = counted(manifest.snapshots_version)
    except (PySparkException, Py4JJavaError):  # a missing file raises the latter
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
