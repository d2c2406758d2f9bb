"""Rows of a snapshot in their tables; they are written once, pinned to a version, and verified by their checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.snapshots.row_hash import format_checksum, sum_hashes, wrap_sum
from jobs.spark.warehouse import Warehouse
from jobs.spark.written_rows import write_made_rows
from jobs.state.encoding.estimates import build_table_batch
from jobs.storage.columns import parse_arrow_schema
from jobs.storage.row_changes import ReplacingTable
from jobs.storage.table_rows import read_parts
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest


STATES = "snapshots"
"""Name of the table of state rows."""
PARTITION = ("model", "snapshot_id")
"""The partition columns of all tables with rows of snapshots."""
_UNREADABLE = (PySparkException, Py4JJavaError, pa.ArrowException, OSError, UserError)
"""Errors that a read at a removed version may raise; in Spark a missing file raises Py4JJavaError."""


class RowsDigest(NamedTuple):
    """The digest of a snapshot's rows: number of rows, a checksum that ignores their order, and the table's version."""

    rows: int
    checksum: str
    version: int


class _RowSums:
    """The number and the hashes of the rows that a task has written."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns, self._rows, self._hash = list(columns), 0, 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows with the columns."""
        self._rows += rows.num_rows
        self._hash += sum_hashes([rows.column(name) for name in self._columns])

    def numbers(self) -> dict[str, int]:
        """Return the sums by name."""
        return {"rows": self._rows, "hash": wrap_sum(self._hash)}


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
    constants = get_partition(manifest)
    written = pa.schema([one for one in parse_arrow_schema(schema) if one.name in {*columns, *constants}])

    def mark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (build_table_batch(batch, written, constants) for batch in batches)

    files = ReplacingTable(warehouse, table)
    parts, sums = write_made_rows(
        rows.select(*columns), mark, written, files, True, lambda: _RowSums(columns)
    )
    version = warehouse.replace_by(parts, files, [[(name, "=", one) for name, one in constants.items()]])
    count, total = (sum(one[name] for one in sums) for name in ("rows", "hash"))
    return RowsDigest(count, format_checksum(total), version)._asdict()


def find_verified_version(
    tables: Tables, table: str, manifest: Manifest, digest: RowsDigest, columns: Sequence[str], what: str
) -> int:
    """Return a version of a table in which a snapshot's rows are whole (`find_whole_version`); this process reads them.

    Raises:
        UserError: rows are missing, doubled or changed.
    """

    def measured(version: int) -> tuple[int, str]:
        sums = _RowSums(columns)
        for part in read_parts(tables.root, table, columns, get_partition(manifest), version):
            for batch in part.to_batches():
                sums.add(batch)
        found = sums.numbers()
        return found["rows"], format_checksum(found["hash"])

    return find_whole_version(tables, table, manifest.snapshot_id, digest, measured, what)


def get_partition(manifest: Manifest) -> dict[str, str]:
    """Return the partition of a snapshot's rows in their tables."""
    return {"model": manifest.model, "snapshot_id": manifest.snapshot_id}


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
