"""Rows of a snapshot other than its states, in a table of their own: written once, pinned and verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import MapType

from jobs.core.errors import RUN_FAILED, UserError, first_line
from jobs.spark.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest


class RowsDigest(NamedTuple):
    """A snapshot's rows in its manifest: their number, a checksum that ignores their order, the table's version."""

    rows: int
    checksum: str
    version: int


def write_rows(
    warehouse: Warehouse, table: str, snapshot_id: str, model: str, rows: DataFrame, columns: Sequence[str]
) -> RowsDigest:
    """Write a snapshot's rows, replacing those of a killed attempt; return their digest for the manifest."""
    marked = rows.select(F.lit(snapshot_id).alias("snapshot_id"), F.lit(model).alias("model"), *columns)
    mine = [[("model", "=", model), ("snapshot_id", "=", snapshot_id)]]
    version = warehouse.replace(marked, table, mine)
    return RowsDigest(*_measure(_read(warehouse, table, snapshot_id, model, version), columns), version)


def verified_rows(
    warehouse: Warehouse,
    table: str,
    manifest: Manifest,
    digest: RowsDigest,
    columns: Sequence[str],
    what: str,
) -> DataFrame:
    """Return a snapshot's rows, pinned to a version of their table, after checking that they are whole.

    That is the version that was written. After 30 days Delta has dropped it, and the latest version is used: rows of a
    snapshot are written once, and the checksum shows that they are unchanged.

    Raises:
        UserError: rows are missing, doubled or changed.
    """

    def counted(version: int) -> tuple[DataFrame, int, str]:
        rows = _read(warehouse, table, manifest.snapshot_id, manifest.model, version)
        return rows, *_measure(rows, columns)

    try:
        rows, count, checksum = counted(digest.version)
    except (PySparkException, Py4JJavaError):  # a missing file raises the latter
        try:
            rows, count, checksum = counted(warehouse.latest_version(table))
        except (PySparkException, Py4JJavaError, OSError) as error:
            raise UserError(
                f"the {what} of snapshot {manifest.snapshot_id} cannot be read: {first_line(error)}",
                RUN_FAILED,
            ) from error
    if (count, checksum) != (digest.rows, digest.checksum):
        raise UserError(
            f"snapshot {manifest.snapshot_id} is damaged: it has {count} {what} with checksum {checksum}, where its "
            f"manifest says {digest.rows} with {digest.checksum}; start from another snapshot or pretrain again",
            RUN_FAILED,
        )
    return rows.select(*columns)


def _read(warehouse: Warehouse, table: str, snapshot_id: str, model: str, version: int) -> DataFrame:
    mine = (F.col("model") == model) & (F.col("snapshot_id") == snapshot_id)
    return warehouse.read(table, version).filter(mine)


def _measure(rows: DataFrame, columns: Sequence[str]) -> tuple[int, str]:
    """Return the count of rows, and the sum, modulo 2^64, of a 64-bit hash of each."""
    hashed = [  # maps have no hash; their entries have
        F.map_entries(name) if isinstance(rows.schema[name].dataType, MapType) else F.col(name)
        for name in columns
    ]
    digest = F.xxhash64(*hashed).cast("decimal(38,0)")
    row = rows.agg(F.count("*").alias("count"), F.sum(digest).alias("digest")).first()
    assert row is not None
    return int(row["count"]), f"{int(row['digest'] or 0) % (1 << 64):016x}"
