"""Rows of a snapshot in their tables; they are written once, pinned to a version, and verified by their checksum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import MapType

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.spark.warehouse import Warehouse
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest


STATES = "snapshots"
"""Name of the table of state rows."""
PARTITION = ("model", "snapshot_id")
"""The partition columns of all tables with rows of snapshots."""
_UNREADABLE = (PySparkException, Py4JJavaError, OSError, UserError)
"""Errors that a read at a removed version may raise; in Spark a missing file raises Py4JJavaError."""


class RowsDigest(NamedTuple):
    """The digest of a snapshot's rows: number of rows, a checksum that ignores their order, and the table's version."""

    rows: int
    checksum: str
    version: int


def write_rows(
    warehouse: Warehouse, table: str, schema: str, manifest: Manifest, rows: DataFrame, columns: Sequence[str]
) -> dict[str, Any]:
    """Write a snapshot's rows, and replace rows of a killed attempt; return the digest of the rows for the manifest.

    Args:
        warehouse: warehouse of the snapshot.
        table: name of the table; it is created with the columns `schema` if it does not exist.
        schema: columns and types as text.
        manifest: manifest of the snapshot.
        rows: rows that have these columns.
        columns: names of the columns to write.
    """
    warehouse.create(table, schema, partition_by=PARTITION)
    name, model = manifest.snapshot_id, manifest.model
    marked = rows.select(F.lit(name).alias("snapshot_id"), F.lit(model).alias("model"), *columns)
    mine = [[("model", "=", model), ("snapshot_id", "=", name)]]
    version = warehouse.replace(marked, table, mine)
    count, checksum = _measure(read_rows(warehouse, name, model, version, table), columns)
    return RowsDigest(count, checksum, version)._asdict()


def read_verified_rows(
    warehouse: Warehouse,
    table: str,
    manifest: Manifest,
    digest: RowsDigest,
    columns: Sequence[str],
    what: str,
) -> DataFrame:
    """Return a snapshot's rows, pinned to a version of their table (`find_whole_version`).

    Raises:
        UserError: rows are missing, doubled or changed.
    """

    def measured(version: int) -> tuple[int, str]:
        return _measure(read_rows(warehouse, manifest.snapshot_id, manifest.model, version, table), columns)

    version = find_whole_version(warehouse, table, manifest.snapshot_id, digest, measured, what)
    return read_rows(warehouse, manifest.snapshot_id, manifest.model, version, table).select(*columns)


def find_whole_version(
    tables: Tables,
    table: str,
    snapshot_id: str,
    digest: RowsDigest,
    measure: Callable[[int], tuple[int, str]],
    what: str,
) -> int:
    """Return a version of a table in which a snapshot's rows are whole.

    This is the version in which the rows were written. After 30 days Delta has dropped this version, and the latest
    version is used. The rows of a snapshot are written once, and the checksum shows that they are unchanged.

    Args:
        tables: tables of the warehouse.
        table: name of the table with the rows.
        snapshot_id: id of the snapshot.
        digest: digest of the rows in the manifest.
        measure: function that returns the number and checksum of the snapshot's rows at a version of the table.
        what: name of the rows for error messages.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    version = digest.version
    try:
        count, checksum = measure(version)
    except _UNREADABLE:
        try:
            version = tables.latest_version(table)
            count, checksum = measure(version)
        except _UNREADABLE as error:
            raise UserError(
                f"the {what} of snapshot {snapshot_id} cannot be read: {extract_first_line(error)}",
                RUN_FAILED,
            ) from error
    if (count, checksum) != (digest.rows, digest.checksum):
        raise UserError(
            f"snapshot {snapshot_id} is damaged: {count} {what} with checksum {checksum}, where its manifest says "
            f"{digest.rows} with {digest.checksum}; start from another snapshot or pretrain again",
            RUN_FAILED,
        )
    return version


def read_rows(
    warehouse: Warehouse, snapshot_id: str, model: str, version: int | None = None, table: str = STATES
) -> DataFrame:
    """Read a snapshot's rows in a table, by default its state rows, at the given version or at the newest version."""
    mine = (F.col("model") == model) & (F.col("snapshot_id") == snapshot_id)
    return warehouse.read(table, version).filter(mine)


def _measure(rows: DataFrame, columns: Sequence[str]) -> tuple[int, str]:
    """Return the number of rows, and the sum, modulo 2^64, of the rows' 64-bit hashes."""
    hashed = [  # Spark cannot hash maps, but it can hash their entries
        F.map_entries(name) if isinstance(rows.schema[name].dataType, MapType) else F.col(name)
        for name in columns
    ]
    digest = F.xxhash64(*hashed).cast("decimal(38,0)")
    row = rows.agg(F.count("*").alias("count"), F.sum(digest).alias("digest")).first()
    assert row is not None
    return int(row["count"]), f"{int(row['digest'] or 0) % (1 << 64):016x}"
