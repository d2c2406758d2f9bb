"""Read the measurements in Python tasks, from the Parquet files of one version of their table.

The driver plans which task reads which row groups; a task packs the rows where it reads them, so no row passes through
Java. Spark reads every table whose rows this reader could not return exactly as Spark does (`choose_files`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from jobs.batch.batch_filter import Interval
from jobs.core.settings import find_local_path
from jobs.snapshots.row_hash import hash_texts
from jobs.spark.conf import ARROW_ROWS
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import build_texts, repeat_text
from jobs.state.encoding.keys import KEY_CHECK_SEED, ONLY
from jobs.state.encoding.packets import ROW_PACKETS, TYPED_ROW_PACKETS
from jobs.state.encoding.routing import Routing
from jobs.state.encoding.rows import ID_CHECK_SEED, ROW_ID, RowFormat, build_row_packer, select_columns
from jobs.storage.table_log import open_plain_log
from jobs.storage.table_rows import list_live_files, open_parquet
from jobs.storage.tables import LATE_COPIES_TABLE
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.spark.warehouse import Warehouse

_compute: Any = pc

MOST_FILES = 5_000
"""The number of files up to which the driver looks at each; Spark's tasks do this for a table with more files."""
TASK_BYTES = 16 << 20
"""The bytes, in the columns that are read, for which one more task is worth its start."""
QUICK_BYTES = 1 << 30
"""The bytes, in the columns that are read, up to which packets take Java only seconds (about fifty million rows)."""
FEW_ROWS = 100_000
"""The number of rows up to which this process reads, learns and filters sooner than Spark starts."""
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
class HistoryFiles:
    """The row groups with the rows of a version of a table whose event times are in an interval.

    schema: the columns of the spec, with their types in the table.
    """

    folder: str
    schema: StructType
    pieces: tuple[FileGroup, ...]
    interval: Interval = Interval()

    def between(self, interval: Interval) -> HistoryFiles:
        """Return the rows of an interval, without the row groups that have none; all rows must be known so far."""
        first, last = interval
        some = (
            one
            for one in self.pieces
            if (first is None or one.greatest >= first) and (last is None or one.least < last)
        )
        return replace(self, pieces=tuple(some), interval=interval)

    def pack(self, warehouse: Warehouse, fmt: RowFormat, routing: Routing, typed: bool) -> DataFrame:
        """Return packets of the rows, as `jobs.state.encoding.rows.pack_rows` does; `typed` packets have a kind."""
        packer = build_row_packer(fmt, routing, typed)
        beside = [] if fmt.row_id is None else [fmt.row_id.column]
        columns = [*fmt.kind.columns, fmt.time, *fmt.numbers, *beside]

        def work(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return packer(build_packing_columns(batch, fmt) for batch in rows)

        return self._run(warehouse, columns, fmt.time, work, TYPED_ROW_PACKETS if typed else ROW_PACKETS)

    def count(self, warehouse: Warehouse, time: str, at: int | None) -> tuple[int, int]:
        """Count the rows from an event time on, and the earlier rows; tasks count where statistics do not suffice.

        Args:
            warehouse: the warehouse, which runs the tasks.
            time: the column of event times.
            at: the event time; None means that no row is earlier.
        """
        first, last = self.interval
        limits = [one for one in (first, at, last) if one is not None]
        across = tuple(
            one for one in self.pieces if any(one.least < limit <= one.greatest for limit in limits)
        )
        whole = [one for one in self.pieces if one not in across]

        def work(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in rows:
                before = 0 if at is None else int(np.count_nonzero(_read_micros(batch, time) < at))
                columns = [pa.array([n], pa.int64()) for n in (batch.num_rows - before, before)]
                yield pa.RecordBatch.from_arrays(columns, ["rows", "before"])

        found = [(0, one.rows) if at is not None and one.greatest < at else (one.rows, 0) for one in whole]
        if across:
            some = replace(self, pieces=across)
            found += some._run(warehouse, [time], time, work, "rows bigint, before bigint").collect()
        return sum(rows for rows, _ in found), sum(before for _, before in found)

    def _run(
        self, warehouse: Warehouse, columns: list[str], time: str, work: Callable[..., Any], schema: str
    ) -> DataFrame:
        """Return the result of a function over batches of the rows, in tasks that read about equally many bytes."""
        parts = self._divide(warehouse.cores)
        folder, interval = self.folder, self.interval

        def over(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    yield from work(read_pieces(folder, parts[number], columns, time, interval))

        return warehouse.number_tasks(len(parts)).mapInArrow(over, schema)

    def _divide(self, cores: int) -> list[list[FileGroup]]:
        """Return consecutive row groups for each task."""
        total = sum(one.size for one in self.pieces)
        count = min(len(self.pieces), max(cores, -(-total // TASK_BYTES)))
        parts: list[list[FileGroup]] = [[] for _ in range(count)]
        before = 0
        for one in self.pieces:
            parts[(2 * before + one.size) * count // (2 * total + 1)].append(one)
            before += one.size
        return [part for part in parts if part]


def read_pieces(
    folder: str, pieces: Sequence[FileGroup], columns: list[str], time: str, interval: Interval
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of row groups whose event times are in an interval; a column that a file lacks is not there."""
    for name in dict.fromkeys(one.file for one in pieces):
        groups = [one.group for one in pieces if one.file == name]
        file = open_parquet(folder, name)
        have = [column for column in columns if column in file.schema_arrow.names]
        for batch in file.iter_batches(ARROW_ROWS, groups, have, use_threads=False):
            held = interval.holds(_read_micros(batch, time))
            yield batch if held.all() else batch.filter(pa.array(held))


def _read_micros(batch: pa.RecordBatch, time: str) -> NDArray[np.int64]:
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


def choose_files(warehouse: Tables, spec: ModelSpec, table: str, version: int) -> HistoryFiles | str:
    """Return the files that tasks can read exactly as Spark does, or a clause that says why Spark must read them.

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
    names = sorted(list_live_files(log)["path"].to_pylist())
    if len(names) > MOST_FILES:
        return f"the table has {len(names):,} files"
    folder = warehouse.path(table)
    with ThreadPoolExecutor(8) as pool:
        looks = list(pool.map(lambda name: _look(folder, name, spec, types), names))
    whole = StructType.fromJson(json.loads(log.schema().to_json()))
    pieces: list[FileGroup] = []
    for name, found in zip(names, looks, strict=True):
        if isinstance(found, str):
            return f"{name}: {found}"
        pieces += found
    return HistoryFiles(folder, StructType([whole[name] for name in spec.columns]), tuple(pieces))


def _is_usual(spec: ModelSpec, name: str, kind: str) -> bool:
    """Return whether tasks convert a column of a type of Delta to the columns of packets as Spark does."""
    if name == spec.time:
        return kind == "timestamp"
    if name in spec.naming_columns:
        return kind == "string" or kind in _INTEGERS
    return kind in _NUMBERS


def _look(folder: str, name: str, spec: ModelSpec, types: dict[str, str]) -> list[FileGroup] | str:
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
        return [_measure(name, data, i, wanted, columns[spec.time]) for i in range(data.num_row_groups)]
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


@dataclass(frozen=True)
class RowSource:
    """Rows of history: files for tasks, chosen on first use, or a frame for Spark's reader, also made on first use.

    make_frame: return the rows as a frame.
    choose: return the files with exactly these rows, or why Spark must read them.
    """

    warehouse: Warehouse
    make_frame: Callable[[], DataFrame]
    choose: Callable[[], HistoryFiles | str]

    @classmethod
    def of_frame(cls, warehouse: Warehouse, frame: DataFrame, why: str) -> RowSource:
        """Return rows that Spark reads, and why."""
        return cls(warehouse, lambda: frame, lambda: why)

    @cached_property
    def frame(self) -> DataFrame:
        """The rows as a frame of Spark's reader."""
        return self.make_frame()

    @cached_property
    def files(self) -> HistoryFiles | str:
        """The files with exactly these rows, or why Spark must read the rows."""
        return self.choose()

    @cached_property
    def schema(self) -> StructType:
        """The columns of the rows and their types."""
        return self.frame.schema if isinstance(self.files, str) else self.files.schema

    @property
    def moves_rows(self) -> bool:
        """Return whether so much passes through Java, in rows or in packets, that its optimising compiler pays off."""
        return isinstance(self.files, str) or sum(one.size for one in self.files.pieces) > QUICK_BYTES

    @property
    def few(self) -> bool:
        """Return whether one process is done with these rows before Spark has started."""
        return not isinstance(self.files, str) and sum(one.rows for one in self.files.pieces) <= FEW_ROWS

    def pack(self, fmt: RowFormat, routing: Routing, typed: bool = False) -> DataFrame:
        """Return packets of the rows for each bucket; `typed` packets have a kind."""
        if not isinstance(self.files, str):
            return self.files.pack(self.warehouse, fmt, routing, typed)
        packets = TYPED_ROW_PACKETS if typed else ROW_PACKETS
        return select_columns(self.frame, fmt).mapInArrow(build_row_packer(fmt, routing, typed), packets)

    def before(self, time: str, at: int) -> RowSource:
        """Return the rows with earlier event times (µs) than `at`."""
        return RowSource(
            self.warehouse,
            lambda: self.frame.filter(F.unix_micros(F.col(f"`{time}`")) < at),
            lambda: self.files if isinstance(self.files, str) else self.files.between(Interval(None, at)),
        )

    def count(self, time: str) -> int:
        """Return the number of rows."""
        if isinstance(self.files, str):
            return self.frame.count()
        return self.files.count(self.warehouse, time, None)[0]

    def find_newest(self, time: str) -> int | None:
        """Return the greatest event time (µs); None if there are no rows."""
        last = None if isinstance(self.files, str) else self.files.interval.last
        if not isinstance(self.files, str) and all(
            last is None or one.greatest < last for one in self.files.pieces
        ):
            return max((one.greatest for one in self.files.pieces), default=None)
        row = self.frame.agg(F.max(F.unix_micros(F.col(f"`{time}`")))).first()
        return None if row is None else row[0]
