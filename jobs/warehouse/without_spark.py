"""Read the rows of Delta tables into Arrow without Spark, in a folder or in S3: versions, partitions, files in turn.

`deltalake` reads the table's log and says which Parquet files a version consists of; Arrow reads these files. Only
tables that this project writes are read: without deletion vectors and without renamed columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from jobs.core.errors import RUN_FAILED, UserError, first_line
from jobs.core.roots import local_path
from jobs.stores.s3_files import S3Files
from jobs.stores.settings import delta_options, in_s3

UTC_MICROSECONDS = pa.timestamp("us", "UTC")
"""The type in which all tables are read, and all files written, that have times."""

_UNREADABLE = {"deletionVectors", "columnMapping"}
"""Features of a table whose files alone do not tell its rows."""


def read_table(
    root: str,
    table: str,
    columns: Sequence[str],
    partition: Mapping[str, str] | None = None,
    version: int | None = None,
    among: tuple[str, Sequence[str]] | None = None,
) -> pa.Table | None:
    """Return columns of a table, at a version or the newest; None if there is no such table.

    Args:
        root: of the warehouse.
        table: its name, such as `manifests`.
        columns: names of columns that are no partition columns; one that a file lacks is left out of its rows as null.
        partition: values of partition columns; only the files of this partition are read.
        version: of the table; None: the newest.
        among: a text column and the values of which a row must have one; None: all rows.

    Raises:
        UserError: the warehouse is in another store, or the table or version cannot be read without Spark.
    """
    parts = list(parts_of(root, table, columns, partition, version, among))
    return pa.concat_tables(parts, promote_options="default") if parts else None


def parts_of(
    root: str,
    table: str,
    columns: Sequence[str],
    partition: Mapping[str, str] | None = None,
    version: int | None = None,
    among: tuple[str, Sequence[str]] | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a table file by file, for tables that are larger than the memory; as `read_table`.

    Raises:
        UserError: the warehouse is in another store, or the table or version cannot be read without Spark.
    """
    if not is_readable(root):
        raise UserError(f"{root}: the tables of a warehouse in this store cannot be read without Spark")
    path = f"{root}/{table}"
    try:
        for uri in _uris(root, table, partition or {}, version):
            yield _read(_content(root, uri), columns, among)
    except TableNotFoundError:
        return
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _uris(root: str, table: str, partition: Mapping[str, str], version: int | None) -> list[str]:
    """Return the files of a table, or of one of its partitions, as its log names them, sorted."""
    log = _log(root, table, version)
    features = set(log.protocol().reader_features or ()) & _UNREADABLE
    if features:
        raise UserError(f"{root}/{table}: cannot be read without Spark: it has {', '.join(sorted(features))}")
    kept = [(name, "=", value) for name, value in partition.items()]
    return sorted(log.file_uris(file_pruning_predicate=kept or None))


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read without Spark: {first_line(error)}", RUN_FAILED)


def files_of(root: str, table: str, partition: Mapping[str, str], version: int | None = None) -> list[str]:
    """Return the paths of the files of a partition of a table in a folder, at a version or the newest, sorted.

    Raises:
        UserError: the table, or the version, cannot be read without Spark.
    """
    path = f"{root}/{table}"
    try:
        return [unquote(uri) for uri in _uris(root, table, partition, version)]
    except (DeltaError, OSError) as error:
        raise _unreadable(path, error) from error


def is_readable(root: str) -> bool:
    """Tell if the tables of a warehouse can be read without Spark: those in a folder or in S3."""
    return local_path(root) is not None or in_s3(root)


def _log(root: str, table: str, version: int | None = None) -> DeltaTable:
    """Open a table's log."""
    if in_s3(root):
        return DeltaTable(f"{_uri(root)}/{table}", version=version, storage_options=delta_options())
    return DeltaTable(f"{local_path(root)}/{table}", version=version)


def _uri(root: str) -> str:
    """Return the root of a warehouse in S3 as delta-rs spells it."""
    return f"s3://{root.partition('://')[2]}"


def _content(root: str, uri: str) -> str | pa.BufferReader:
    """Return the path of one of a table's files, or its content if it is in S3."""
    if not in_s3(root):
        return unquote(uri)
    content = S3Files(root).read(unquote(uri).removeprefix(f"{_uri(root)}/"))
    if content is None:
        raise FileNotFoundError(f"{uri} is gone")
    return pa.BufferReader(content)


def _existing(root: str, table: str) -> DeltaTable | None:
    """Open a table's log; None if there is no such table that can be read."""
    if not is_readable(root):
        return None
    try:
        return _log(root, table)  # `is_deltatable` would hold up all threads until the store has answered
    except TableNotFoundError:
        return None


def column_types(root: str, table: str) -> dict[str, str]:
    """Return Delta's types of a table's columns, such as `long`; none if there is no such table that can be read."""
    log = _existing(root, table)
    fields = [] if log is None else log.schema().fields
    return {field.name: str(getattr(field.type, "type", "")) for field in fields}


def file_sizes(root: str, table: str) -> tuple[int, int] | None:
    """Return the number of files of a table and their bytes; None if there is no such table that can be read."""
    log = _existing(root, table)
    if log is None:
        return None
    # `pa.table` would import pandas, which takes longer than all else here.
    found: Any = log.get_add_actions(flatten=True)
    actions = pa.RecordBatchReader.from_stream(found).read_all()
    return actions.num_rows, sum(actions["size_bytes"].to_pylist())


def written_at(root: str, table: str) -> datetime | None:
    """Return when rows of a table were last written; None if its log does not tell."""
    if not is_readable(root):
        return None
    for commit in _log(root, table).history(20):
        if commit.get("operation") in ("MERGE", "WRITE"):
            return datetime.fromtimestamp(int(commit["timestamp"]) / 1e3, UTC)
    return None


def _read(
    source: str | pa.BufferReader, columns: Sequence[str], among: tuple[str, Sequence[str]] | None
) -> pa.Table:
    # Java's files of earlier releases have times as INT96, which would become nanoseconds and overflow.
    file = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
    wanted = [name for name in columns if name in file.schema_arrow.names]
    if among is None:
        rows = file.read(wanted)
    else:  # one row group after the other, of which only the wanted rows stay in memory
        column, values = among
        has = pa.array(values, pa.string())
        groups = (file.read_row_group(i, wanted) for i in range(file.num_row_groups))
        is_in: Any = pc.is_in  # type: ignore[attr-defined]
        parts = [rows.filter(is_in(rows[column].cast(pa.string()), has)) for rows in groups]
        rows = pa.concat_tables(parts) if parts else file.schema_arrow.empty_table().select(wanted)
    # Writers differ in Arrow's type of text, and releases in that of times.
    return rows.cast(pa.schema([field.with_type(_plain(field.type)) for field in rows.schema]))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type in which all files have a column of this type."""
    if pa.types.is_string_view(kind):
        return pa.string()
    return UTC_MICROSECONDS if pa.types.is_timestamp(kind) else kind
