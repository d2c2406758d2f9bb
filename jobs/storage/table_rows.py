"""Read rows of Delta tables into Arrow without Spark: by version, partition and filter, file by file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from numpy.typing import NDArray

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.core.settings import find_local_path, refuse_misread
from jobs.storage.columns import UTC_MICROSECONDS
from jobs.storage.object_files import ObjectFiles, build_delta_options, is_in_s3

_compute: Any = pc

Filter = Sequence[Sequence[tuple[str, str, Any]]]
"""Row filter in the form of `filters` of `pyarrow.parquet`: a row must meet all conditions of at least one list.

A condition consists of a column, a comparison (=, <, <=, >, >=, in, not in) and a value. A null value meets no
condition except `not in`.
"""
_ROUNDED_US = 1000
"""Precision of times in statistics, in microseconds: Delta in Java rounds times down to whole milliseconds."""


class Met(NamedTuple):
    """Files that may contain rows that meet a filter: the files with only such rows, and the other files."""

    whole: frozenset[str]
    across: frozenset[str]


def find_files(files: pa.Table, rows: Filter) -> Met:
    """Return the files of a table (`list_live_files`) that by their statistics may contain rows that meet a filter."""
    whole, beside = _select_none(files), _compute.invert(_select_none(files))
    for conditions in rows:
        every, some_none = _compute.invert(_select_none(files)), _select_none(files)
        for one in conditions:
            fits, fails = _decide(files, *one)
            every, some_none = _compute.and_(every, fits), _compute.or_(some_none, fails)
        whole, beside = _compute.or_(whole, every), _compute.and_(beside, some_none)
    across = _compute.invert(_compute.or_(whole, beside))
    whole = _compute.and_(whole, _compute.invert(beside))
    return Met(*(frozenset(files["path"].filter(one).to_pylist()) for one in (whole, across)))


def select_rows(rows: pa.RecordBatch, filters: Filter) -> pa.RecordBatch:
    """Return the rows that meet a filter."""
    return rows.filter(pq.filters_to_expression(filters))  # type: ignore[arg-type]


def drop_rows(rows: pa.RecordBatch, filters: Filter) -> pa.RecordBatch:
    """Return the rows that do not meet a filter."""
    met: Any = pq.filters_to_expression(filters)  # type: ignore[arg-type]
    return rows.filter(~_compute.coalesce(met, pa.scalar(False)))


def convert_time(micros: int) -> pa.Scalar:
    """Return a time, given in microseconds since 1970, as the value of a condition."""
    return pa.scalar(micros, pa.int64()).cast(UTC_MICROSECONDS)


def _select_none(files: pa.Table) -> Any:
    return pa.repeat(False, files.num_rows)


def _decide(files: pa.Table, name: str, compare: str, value: Any) -> tuple[Any, Any]:
    """Return two masks of files: files in which all rows meet the condition, and files in which no row meets it."""
    names = files.column_names
    if f"partition.{name}" in names:
        least = greatest = files[f"partition.{name}"].combine_chunks()
        filled, empty = least.is_valid(), least.is_null()
    elif f"min.{name}" in names and f"null_count.{name}" in names:
        least, greatest = (files[f"{side}.{name}"].combine_chunks() for side in ("min", "max"))
        nulls = files[f"null_count.{name}"].combine_chunks()
        filled = _compute.equal(nulls, 0)
        empty = _compute.equal(nulls, files["num_records"].combine_chunks())
    else:
        return _select_none(files), _select_none(files)
    if pa.types.is_timestamp(least.type):
        least = least.cast(UTC_MICROSECONDS)
        greatest = _compute.add(greatest.cast(UTC_MICROSECONDS), pa.scalar(_ROUNDED_US, pa.duration("us")))
    wanted = pa.array(list(value) if "in" in compare else [value]).cast(least.type)
    first, last = (_compute.min_max(wanted)[side] for side in ("min", "max"))
    below, above = _compute.less(greatest, first), _compute.greater(least, last)
    if compare == "<":
        fits, fails = below, _compute.greater_equal(least, last)
    elif compare == "<=":
        fits, fails = _compute.less_equal(greatest, last), above
    elif compare == ">":
        fits, fails = above, _compute.less_equal(greatest, first)
    elif compare == ">=":
        fits, fails = _compute.greater_equal(least, first), below
    else:
        same = _compute.and_(_compute.equal(least, greatest), _compute.is_in(least, wanted))
        fits, fails = same, _compute.or_(below, above)
    fits, fails, filled, empty = (_compute.fill_null(one, False) for one in (fits, fails, filled, empty))
    fits, fails = _compute.and_(fits, filled), _compute.or_(fails, empty)
    return (fails, fits) if compare == "not in" else (fits, fails)


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_UNREADABLE = {"deletionVectors", "columnMapping"}
"""Features of a table that make its Parquet files insufficient to determine its rows."""


def read_table(
    root: str,
    table: str,
    columns: Sequence[str],
    partition: Mapping[str, str] | None = None,
    version: int | None = None,
    among: tuple[str, Sequence[str]] | None = None,
) -> pa.Table | None:
    """Return columns of a table at a version or at the newest version; None if the table does not exist.

    Args:
        root: root of the warehouse.
        table: name of the table, such as `manifests`.
        columns: names of columns, without partition columns; if a file lacks a column, the column is null in its rows.
        partition: values of partition columns; only files of this partition are read.
        version: version of the table; None means the newest.
        among: a text column and its allowed values; None means all rows.

    Raises:
        UserError: the table or version cannot be read without Spark.
    """
    parts = list(read_parts(root, table, columns, partition, version, among))
    return pa.concat_tables(parts, promote_options="default") if parts else None


def read_parts(
    root: str,
    table: str,
    columns: Sequence[str],
    partition: Mapping[str, str] | None = None,
    version: int | None = None,
    among: tuple[str, Sequence[str]] | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a table file by file, for tables larger than memory; the arguments are those of `read_table`.

    Raises:
        UserError: the table or version cannot be read without Spark.
    """
    with report_unreadable_table(f"{root}/{table}"):
        try:
            log = open_log(root, table, version)
        except TableNotFoundError:
            return
        for name in _list_names(root, table, log, partition or {}):
            yield _read(open_parquet(f"{root}/{table}", name), columns, among)


def list_live_files(log: DeltaTable) -> pa.Table:
    """Return the files of a log's version as a flat table, in the form of `DeltaTable.get_add_actions`.

    The column `path` contains paths relative to the table's folder, as `open_parquet` expects.
    """
    found = to_arrow(log.get_add_actions(flatten=True))
    names: Any = found["path"].cast(pa.string())
    if any("%" in path for path in names.to_pylist()):
        # Only for such paths, because `pa.array` imports pandas.
        names = pa.array([unquote(path) for path in names.to_pylist()], pa.string())
    return found.set_column(found.column_names.index("path"), "path", names)


def count_rows(folder: str, files: pa.Table) -> int:
    """Count the rows of the given files (`list_live_files`) from the log, or from the files if the log lacks counts."""
    names = files["path"].to_pylist()
    known = files["num_records"].to_pylist() if "num_records" in files.column_names else [None] * len(names)
    return sum(
        open_parquet(folder, name).metadata.num_rows if number is None else number
        for name, number in zip(names, known, strict=True)
    )


def _read_files(root: str, table: str, log: DeltaTable) -> pa.Table:
    """Return the files of a log's version.

    Raises:
        UserError: the table uses deletion vectors or column mapping.
    """
    refuse_unreadable(f"{root}/{table}", log)
    return list_live_files(log)


def refuse_unreadable(path: str, log: DeltaTable) -> None:
    """Refuse a table whose rows cannot be determined from its Parquet files alone.

    Raises:
        UserError: the table uses deletion vectors or column mapping.
    """
    features = set(log.protocol().reader_features or ()) & _UNREADABLE
    if features:
        raise UserError(f"{path}: cannot be read without Spark: it has {', '.join(sorted(features))}")


def _list_names(root: str, table: str, log: DeltaTable, partition: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the files of a log's version, or of the files of one partition."""
    found = _read_files(root, table, log)
    if found.num_rows:
        found = filter_rows(found, {f"partition.{name}": value for name, value in partition.items()})
    return sorted(found["path"].to_pylist())


@contextmanager
def report_unreadable_table(where: str) -> Iterator[None]:
    """Report a table, version or log that cannot be read as a `UserError`."""
    try:
        yield
    except (DeltaError, OSError, pa.ArrowException) as error:
        raise UserError(f"{where} cannot be read: {extract_first_line(error)}", RUN_FAILED) from error


def list_partition_files(
    root: str, table: str, partition: Mapping[str, str], version: int | None = None
) -> list[str]:
    """Return the sorted paths of a partition's files, for `open_parquet`, at a version or the newest version.

    Raises:
        UserError: the table, or the version, cannot be read without Spark.
    """
    with report_unreadable_table(f"{root}/{table}"):
        return _list_names(root, table, open_log(root, table, version), partition)


def read_columns(log: DeltaTable) -> pa.Schema:
    """Return the columns of a log's version, including its partition columns."""
    found: Any = log.schema().to_arrow()
    return pa.schema(found)


def build_location(root: str, table: str) -> dict[str, Any]:
    """Return the location of a table in the form that delta-rs takes: its URI and the options of its store.

    Raises:
        UserError: delta-rs would misread the path.
    """
    local = find_local_path(root)
    if local is not None:
        return {"table_uri": refuse_misread(f"{local}/{table}", "a Delta table")}
    if is_in_s3(root):
        return {
            "table_uri": f"s3://{root.partition('://')[2]}/{table}",
            "storage_options": build_delta_options(),
        }
    return {"table_uri": f"{root}/{table}"}


def open_log(root: str, table: str, version: int | None = None) -> DeltaTable:
    """Open a table's log, at a version or at the newest version.

    Raises:
        TableNotFoundError: the table does not exist.
        DeltaError: the log, or the version, cannot be read.
        UserError: as in `build_location`.
    """
    return DeltaTable(**build_location(root, table), version=version)


def open_parquet(folder: str, name: str) -> pq.ParquetFile:
    """Open a Parquet file below a folder, which is a path or the URI of an object store.

    Raises:
        OSError: the file does not exist.
    """
    local = find_local_path(folder)
    source: Any = f"{local}/{name}"
    if local is None:
        content = ObjectFiles(folder).read(name)
        if content is None:
            raise FileNotFoundError(f"{folder}/{name} is gone")
        source = pa.BufferReader(content)
    # Files that Java wrote in earlier releases store times as INT96; converted to nanoseconds the times would overflow.
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us")


def _open_existing(root: str, table: str) -> DeltaTable | None:
    """Open a table's log; return None if the table does not exist or cannot be read."""
    try:
        return open_log(root, table)  # `is_deltatable` would block all threads until the store has answered
    except TableNotFoundError:
        return None


def read_column_types(root: str, table: str) -> dict[str, str]:
    """Return Delta's type, such as `long`, of each column; empty if the table does not exist or cannot be read."""
    log = _open_existing(root, table)
    fields = [] if log is None else log.schema().fields
    return {field.name: str(getattr(field.type, "type", "")) for field in fields}


def measure_files(root: str, table: str) -> tuple[int, int] | None:
    """Return a table's number of files and their total bytes; None if it does not exist or cannot be read."""
    log = _open_existing(root, table)
    if log is None:
        return None
    actions = list_live_files(log)
    return actions.num_rows, sum(actions["size_bytes"].to_pylist())


def find_write_time(root: str, table: str) -> datetime | None:
    """Return the time when rows of a table were last written; None if the log does not record the time."""
    for commit in open_log(root, table).history(20):
        if commit.get("operation") in ("MERGE", "WRITE"):
            return datetime.fromtimestamp(int(commit["timestamp"]) / 1e3, UTC)
    return None


def read_small(root: str, table: str, log: DeltaTable, names: Sequence[str] | None = None) -> pa.Table:
    """Return columns of a small table at the version of a log; by default all columns. Times are in UTC.

    A column that the table lacks is null.

    Raises:
        UserError: the table cannot be read without Spark.
    """
    fields = {field.name: field.type for field in read_columns(log)}
    wanted = list(fields if names is None else names)
    with report_unreadable_table(f"{root}/{table}"):
        files = _read_files(root, table, log).sort_by("path")
        parts = [
            _add_partition(_read_or_count(open_parquet(f"{root}/{table}", name), wanted), files, place)
            for place, name in enumerate(files["path"].to_pylist())
        ]
    if not parts:
        return pa.table({name: pa.nulls(0, fields.get(name, pa.string())) for name in wanted})
    found = pa.concat_tables(parts, promote_options="default")
    columns = [
        cast_to_delta(found[name], fields[name])
        if name in found.column_names
        else pa.nulls(found.num_rows, fields.get(name, pa.string()))
        for name in wanted
    ]
    return pa.Table.from_arrays(columns, wanted)


def _read_or_count(file: pq.ParquetFile, wanted: Sequence[str]) -> pa.Table:
    """Return columns of a file; if the file has no such column, return its number of rows as nulls."""
    found = _read(file, wanted, None)
    return found if found.num_columns else pa.table({"": pa.nulls(file.metadata.num_rows)})


def _add_partition(rows: pa.Table, files: pa.Table, place: int) -> pa.Table:
    """Append the partition columns that a file lacks; by Delta's protocol only the log has their values."""
    for column in files.column_names:
        name = column.removeprefix("partition.")
        if name != column and name not in rows.column_names:
            rows = rows.append_column(name, pa.repeat(files[column][place], rows.num_rows))
    return rows


def has_rows(root: str, table: str, where: Mapping[str, Any]) -> bool:
    """Return whether a table has a row with these values; read only files whose statistics allow such a row.

    Args:
        root: root of the warehouse.
        table: name of the table.
        where: wanted values (texts or whole numbers), by column.

    Raises:
        UserError: the table cannot be read without Spark.
    """
    rows = [(name, "=", value) for name, value in where.items()]
    with report_unreadable_table(f"{root}/{table}"):
        met = find_files(_read_files(root, table, open_log(root, table)), [rows])
        if met.whole:
            return True
        for path in met.across:
            found = _read(open_parquet(f"{root}/{table}", path), list(where), None)
            if set(found.column_names) == set(where):
                if filter_rows(found, where).num_rows:
                    return True
    return False


def filter_rows(found: pa.Table, where: Mapping[str, Any]) -> pa.Table:
    """Return the rows that have the given values, by column."""
    compute: Any = pc  # a filter by an expression would import Arrow's datasets, which import pandas
    for name, value in where.items():
        found = found.filter(compute.equal(found[name], value))
    return found


def _read(file: pq.ParquetFile, columns: Sequence[str], among: tuple[str, Sequence[str]] | None) -> pa.Table:
    wanted = [name for name in columns if name in file.schema_arrow.names]
    if among is None:
        rows = file.read(wanted)
    else:  # read by row groups, so that only the selected rows stay in memory
        column, values = among
        has = pa.array(values, pa.string())
        groups = (file.read_row_group(i, wanted) for i in range(file.num_row_groups))
        is_in: Any = pc.is_in  # type: ignore[attr-defined]
        parts = [rows.filter(is_in(rows[column].cast(pa.string()), has)) for rows in groups]
        rows = pa.concat_tables(parts) if parts else file.schema_arrow.empty_table().select(wanted)
    return rows.cast(cast_schema(rows.schema))


def cast_rows(
    batch: pa.RecordBatch, schema: pa.Schema, partition: Mapping[str, str | None] = MappingProxyType({})
) -> pa.RecordBatch:
    """Return rows of a file with the columns of a table, in plain types.

    Args:
        batch: the rows.
        schema: columns of the table.
        partition: values, as texts, of columns that are constant in the file and absent from it; all other absent
            columns are null.
    """

    def column(field: pa.Field) -> pa.Array:
        kind, value = _find_plain_type(field.type), partition.get(field.name)
        if field.name in batch.schema.names:
            return batch.column(field.name).cast(kind)
        if value is None:
            return pa.nulls(batch.num_rows, kind)
        return pa.repeat(pa.scalar(value, pa.string()).cast(kind), batch.num_rows)

    columns = [column(field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema.names)


def cast_schema(schema: pa.Schema) -> pa.Schema:
    """Return columns with their types replaced by the plain types to which all files are cast."""
    # Writers use different Arrow types for texts, and releases use different types for times.
    return pa.schema([field.with_type(_find_plain_type(field.type)) for field in schema])


def to_arrow(batches: Any) -> pa.Table:
    """Convert a result of delta-rs, which uses another Arrow library, to a table. `pa.table` would import pandas."""
    return pa.RecordBatchReader.from_stream(batches).read_all()


def cast_to_delta(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column in the type of Delta's schema; Parquet files use different types for texts and times."""
    return column.cast(UTC_MICROSECONDS if pa.types.is_timestamp(kind) else kind)


def to_rows(found: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a small table as dictionaries, with times in UTC."""
    # Arrow would import pandas to convert times, which takes longer than all other steps.
    lists = [_list_values(column) for column in found.columns]
    return [dict(zip(found.column_names, values, strict=True)) for values in zip(*lists, strict=True)]


def group_rows(rows: pa.Table) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
    """Return the distinct combinations of values of N rows, and for each row the index of its combination (N,)."""
    # `Table.group_by` imports Arrow's datasets, which import pandas.
    combinations: list[tuple[Any, ...]] = [()]
    group_of = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        encoded = column.combine_chunks().dictionary_encode("encode")
        values = encoded.dictionary.to_pylist()
        codes, group_of = np.unique(
            group_of * max(len(values), 1) + np.from_dlpack(encoded.indices), return_inverse=True
        )
        combinations = [
            (*combinations[code // len(values)], values[code % len(values)]) for code in codes.tolist()
        ]
    return combinations, group_of


def _list_values(column: pa.ChunkedArray) -> list[Any]:
    if not pa.types.is_timestamp(column.type):
        return column.to_pylist()
    micros = column.cast(UTC_MICROSECONDS).cast(pa.int64()).to_pylist()
    return [None if one is None else EPOCH + timedelta(microseconds=one) for one in micros]


def _find_plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain type to which a column of this type is cast."""
    if pa.types.is_string_view(kind):
        return pa.string()
    return UTC_MICROSECONDS if pa.types.is_timestamp(kind) else kind
