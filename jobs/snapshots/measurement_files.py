"""Read measurements in Python tasks, from the Parquet files of their table.

The driver plans which task reads which row groups; a task packs the rows where it reads them, so no row passes through
Java. Spark reads every table whose rows this reader could not return exactly as Spark does (`open_measurements`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql.types import StructType

from jobs.core.settings import find_local_path
from jobs.snapshots.row_hash import hash_texts
from jobs.spark.conf import ARROW_ROWS
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import build_texts, repeat_text
from jobs.state.encoding.keys import KEY_CHECK_SEED, ONLY
from jobs.state.encoding.rows import ID_CHECK_SEED, ROW_ID, Packer, RowFormat
from jobs.storage.table_log import open_plain_log
from jobs.storage.table_rows import open_parquet
from jobs.storage.tables import LATE_COPIES_TABLE
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from deltalake import DeltaTable

_compute: Any = pc

Holds = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""A function that marks the event times (N,), in microseconds, of the rows to read."""
TASK_BYTES = 16 << 20
"""The bytes, in the columns that are read, for which one more task is worth its start."""
_LEGACY_TIMES = b"org.apache.spark.legacyDateTime"
"""The mark of files with times in the calendar of Spark 2, which Spark converts."""
_INTEGERS = {"byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64()}
_NUMBERS = {**_INTEGERS, "float": pa.float32(), "double": pa.float64()}
_CODECS = {"UNCOMPRESSED", "SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4", "LZ4_RAW"}
_ESCAPES = {chr(i): f"\\u{i:04X}" for i in range(32)} | {
    "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"
}  # fmt: skip
_ESCAPED = re.compile(r'["\\\x00-\x1f]')


class FileGroup(NamedTuple):
    """A row group of a file: its rows, the bytes of its needed columns, and its least and greatest event time (µs)."""

    file: str
    group: int
    rows: int
    size: int
    least: int
    greatest: int


@dataclass(frozen=True)
class MeasurementTable:
    """A table whose rows tasks can read from its Parquet files exactly as Spark does.

    identity: the id that Delta gave the table. types: Delta's type of each column of the spec. schema: the same columns
    with Spark's types.
    """

    folder: str
    identity: str
    spec: ModelSpec
    types: Mapping[str, str]
    schema: StructType

    def list_groups(self, names: Sequence[str]) -> list[list[FileGroup]] | str:
        """Return the row groups of each of the files, or why Spark must read one of them."""
        with ThreadPoolExecutor(min(8, max(1, len(names)))) as pool:
            looks = list(pool.map(lambda name: _look(self.folder, name, self.spec, self.types), names))
        for name, found in zip(names, looks, strict=True):
            if isinstance(found, str):
                return f"{name}: {found}"
        return [found for found in looks if not isinstance(found, str)]


def open_measurements(
    warehouse: Tables, spec: ModelSpec, table: str, version: int
) -> tuple[MeasurementTable, DeltaTable] | str:
    """Return a table of measurements for tasks, with its log, or a clause that says why Spark must read the table.

    Args:
        warehouse: the warehouse.
        spec: the model of the measurements.
        table: the name of the table.
        version: the version of the table.
    """
    if find_local_path(warehouse.root) is None:
        return "the table is in a store"
    if warehouse.exists(LATE_COPIES_TABLE):
        return "copies of late rows are left out"
    log = open_plain_log(warehouse, table, version)
    if log is None:
        return "the table has deletion vectors, mapped columns or other features, or delta-rs cannot read it"
    fields = {field.name: field for field in log.schema().fields}
    types: dict[str, str] = {}
    for name in spec.columns:
        if name not in fields or name in log.metadata().partition_columns:
            return f"its files have no column {name}, which may be a partition or differ in case"
        if set(fields[name].metadata) - {"comment"}:
            return f"the column {name} has metadata beside its comment"
        types[name] = str(getattr(fields[name].type, "type", "a nested type"))
        if not _is_usual(spec, name, types[name]):
            return f"the column {name} has the type {types[name]}"
    whole = StructType.fromJson(json.loads(log.schema().to_json()))
    schema = StructType([whole[name] for name in spec.columns])
    return MeasurementTable(warehouse.path(table), str(log.metadata().id), spec, types, schema), log


def divide_groups(groups: Sequence[FileGroup], cores: int) -> list[list[FileGroup]]:
    """Return consecutive row groups for each task; the tasks read about equally many bytes."""
    total = sum(one.size for one in groups)
    count = min(len(groups), max(cores, -(-total // TASK_BYTES)))
    parts: list[list[FileGroup]] = [[] for _ in range(count)]
    before = 0
    for one in groups:
        parts[(2 * before + one.size) * count // (2 * total + 1)].append(one)
        before += one.size
    return [part for part in parts if part]


def pack_groups(
    folder: str,
    groups: Sequence[FileGroup],
    fmt: RowFormat,
    packer: Packer,
    holds: Holds | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the packets of the rows of row groups; `packer` takes the columns of `rows.select_columns`."""
    beside = [] if fmt.row_id is None else [fmt.row_id.column]
    columns = [*fmt.kind.columns, fmt.time, *fmt.numbers, *beside]
    batches = read_groups(folder, groups, columns, fmt.time, holds)
    return packer(build_packing_columns(batch, fmt) for batch in batches)


def read_groups(
    folder: str, groups: Sequence[FileGroup], columns: list[str], time: str, holds: Holds | None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of row groups, or those whose event times `holds`; a column that a file lacks is not there."""
    for name in dict.fromkeys(one.file for one in groups):
        numbers = [one.group for one in groups if one.file == name]
        file = open_parquet(folder, name)
        have = [column for column in columns if column in file.schema_arrow.names]
        for batch in file.iter_batches(ARROW_ROWS, numbers, have, use_threads=False):
            held = None if holds is None else holds(read_micros(batch, time))
            yield batch if held is None or held.all() else batch.filter(pa.array(held))


def read_micros(batch: pa.RecordBatch, time: str) -> NDArray[np.int64]:
    """Return the event times (N,) of N rows, in microseconds."""
    return batch.column(time).view(pa.int64()).to_numpy()


def build_packing_columns(rows: pa.RecordBatch, fmt: RowFormat) -> pa.RecordBatch:
    """Return rows with the columns and values of `jobs.state.encoding.rows.select_columns`.

    Args:
        rows: N rows with the columns of their files.
        fmt: the format of the rows; the keys' inputs are not among its columns.
    """
    kind, row_id = fmt.kind, fmt.row_id
    found: dict[str, pa.Array] = {}
    if kind.integer:
        found["identity"] = rows.column(kind.columns[0]).cast(pa.int64())
    else:
        text = build_key_texts([rows.column(name) for name in kind.columns], rows.num_rows)
        found |= {"identity": hash_texts(text), "check": hash_texts(text, KEY_CHECK_SEED), "text": text}
    found["time"] = rows.column(fmt.time)
    for i, name in enumerate(fmt.numbers):
        found[f"n{i}"] = _find(rows, name, pa.float64())
    if row_id is not None and row_id.integer:
        found[ROW_ID[0]] = _find(rows, row_id.column, pa.int64())
    elif row_id is not None:
        text = _find(rows, row_id.column, pa.string())
        found |= zip(ROW_ID, (hash_texts(text), hash_texts(text, ID_CHECK_SEED), text), strict=True)
    return pa.RecordBatch.from_arrays(list(found.values()), list(found))


def build_key_texts(columns: Sequence[pa.Array], count: int) -> pa.Array:
    """Return the text of each of `count` keys, as `jobs.state.encoding.keys.build_key_text` does."""
    if not columns:
        return repeat_text(ONLY, count)
    texts = [one.cast(pa.string()) for one in columns]
    if len(texts) == 1:
        return texts[0]
    quoted = (_compute.binary_join_element_wise('"', _escape(one), '"', "") for one in texts)
    parts = [part for one in quoted for part in (",", one.fill_null("null"))]
    return _compute.binary_join_element_wise("[", *parts[1:], "]", "")


def _escape(texts: pa.Array) -> pa.Array:
    """Return texts as the JSON of Spark has them between quotation marks."""
    if not _compute.any(_compute.match_substring_regex(texts, _ESCAPED.pattern)).as_py():
        return texts
    coded = texts.dictionary_encode()
    plain = [_ESCAPED.sub(lambda found: _ESCAPES[found[0]], one) for one in coded.dictionary.to_pylist()]
    return build_texts(plain).take(coded.indices)


def _find(rows: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    """Return a column in another type; nulls if the rows' file lacks the column."""
    if name not in rows.schema.names:
        return pa.nulls(rows.num_rows, kind)
    return rows.column(name).cast(kind, safe=False)


def _is_usual(spec: ModelSpec, name: str, kind: str) -> bool:
    """Return whether tasks convert a column of a type of Delta to the columns of packets as Spark does."""
    if name == spec.time:
        return kind == "timestamp"
    if name in spec.naming_columns:
        return kind == "string" or kind in _INTEGERS
    return kind in _NUMBERS


def _look(folder: str, name: str, spec: ModelSpec, types: Mapping[str, str]) -> list[FileGroup] | str:
    """Return the row groups of a file, or why Spark must read the file."""
    try:
        file = open_parquet(folder, name)
        data = file.metadata
        columns = {data.schema.column(i).path: i for i in range(data.num_columns)}
        if _LEGACY_TIMES in (data.metadata or {}):
            return "its times are in the calendar of Spark 2"
        lower = {name.lower() for name in file.schema_arrow.names}
        for column, kind in types.items():
            if column not in file.schema_arrow.names:
                if column == spec.time or column in spec.key or column.lower() in lower:
                    return f"it has no column {column}, or writes it in another case"
            elif not _has_type(file.schema_arrow.field(column).type, kind) or column not in columns:
                return f"its column {column} has another type than the table's"
        wanted = [columns[column] for column in types if column in columns]
        groups = [data.row_group(i) for i in range(data.num_row_groups)]
        codecs = {group.column(i).compression for group in groups for i in wanted}
        if codecs - _CODECS:
            return f"it is compressed by {', '.join(sorted(codecs - _CODECS))}"
        return [
            _measure(name, data, i, wanted, columns[spec.time])
            for i, group in enumerate(groups)
            if group.num_rows
        ]
    except (OSError, pa.ArrowException) as error:
        return f"it cannot be opened ({type(error).__name__})"
    except _NoBounds:
        return "event times may be null, or have no statistics"


class _NoBounds(Exception):
    """A row group does not tell the range of its event times."""


def _measure(name: str, data: pq.FileMetaData, group: int, wanted: Sequence[int], time: int) -> FileGroup:
    """Return the description of a row group; raises _NoBounds."""
    rows = data.row_group(group)
    about: Any = rows.column(time).statistics
    if about is None or not about.has_min_max or not about.has_null_count or about.null_count:
        raise _NoBounds
    size = sum(rows.column(i).total_compressed_size for i in wanted)
    return FileGroup(name, group, rows.num_rows, size, about.min_raw, about.max_raw)


def _has_type(found: pa.DataType, kind: str) -> bool:
    """Return whether a file's column has the usual Arrow type of Delta's type."""
    if kind == "timestamp":
        return pa.types.is_timestamp(found) and found.unit == "us" and found.tz is not None
    if kind == "string":
        return pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found)
    return found == _NUMBERS[kind]
