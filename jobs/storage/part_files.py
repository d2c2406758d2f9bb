"""Write Parquet files of a Delta table by Arrow, without Spark, with statistics that let readers skip files.

A file belongs to the table once a commit names it (`jobs.storage.table_log`). VACUUM removes a file that no commit
names once the file is older than the retention of files. Each file name is used only once, so attempts of the same task
never touch the files of other attempts. In a folder a file is written in place. For an object store it is written to a
temporary file and uploaded when it is complete, so the store never has a part of a file.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.core.faults import name_file
from jobs.core.settings import find_local_path
from jobs.storage.columns import UTC_MICROSECONDS
from jobs.storage.files import open_files
from jobs.storage.object_files import ObjectFiles
from jobs.storage.table_rows import EPOCH

TARGET_BYTES = 256 << 20
"""Default size in bytes at which a file is full."""
_GROUP_ROWS = 1 << 17
"""Number of rows at which the collected batches become a row group."""
_GROUP_BYTES = 64 << 20
"""Size in bytes at which the collected batches become a row group, because rows of models with many states are large.
"""
_TEXT = 32
"""Maximum length of a text in statistics, in characters, as in Delta's writer."""
_LAST = "\U0010ffff"
"""The last character of Unicode."""
INDEXED = 32
"""Default number of leading columns with statistics, as in Delta's writer."""
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
"""Texts that can be the name of a folder without escapes."""

Values = tuple[tuple[str, str | None], ...]
"""Values of the partition columns, as (name, text) pairs."""


class PartFile(NamedTuple):
    """A file in a table's folder: name, bytes, rows, time of completion (ms since 1970), and Delta's statistics.

    values: values of the partition columns.
    """

    path: str
    size: int
    rows: int
    modified: int
    stats: str
    values: Values = ()

    def encode(self) -> bytes:
        """Return the description of the file as JSON."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def decode(cls, text: bytes) -> PartFile:
        """Return the description of a file from the JSON that `encode` returned."""
        found = json.loads(text)
        return cls(**{**found, "values": tuple((name, value) for name, value in found["values"])})


class PartWriter:
    """Writer of batches into as few files as the maximum size of a file allows.

    Args:
        folder: path or URI of the table's or a partition's folder, which is made if it is missing.
        prefix: prefix of the files' names, such as the name of the task's attempt; a random id follows the prefix.
        full: size in bytes at which a file is full.
        indexed: number of leading columns with statistics.
    """

    def __init__(self, folder: str, prefix: str, full: int = TARGET_BYTES, indexed: int = INDEXED) -> None:
        self._folder, self._prefix, self._full, self._indexed = folder, prefix, full, indexed
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._part: _OpenPart | None = None

    def add(self, batch: pa.RecordBatch) -> list[PartFile]:
        """Add rows, with the same columns at each call; return the files that this call completed."""
        if batch.num_rows:
            self._held.append(batch)
            self._rows += batch.num_rows
            self._bytes += batch.nbytes
        return self._write() if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES else []

    def end(self) -> list[PartFile]:
        """Write the remaining rows, and return the last files."""
        done = self._write() if self._held else []
        return done if self._part is None else [*done, self._close_part(self._part)]

    def abandon(self) -> None:
        """Remove the incomplete file."""
        if self._part is not None:
            self._part.abandon()

    def _write(self) -> list[PartFile]:
        rows, self._held = pa.Table.from_batches(self._held), []
        self._rows = self._bytes = 0
        if self._part is None:
            name = f"{self._prefix}-{uuid.uuid4()}.snappy.parquet"
            self._part = _OpenPart(self._folder, name, rows.schema, self._indexed)
        self._part.add(rows)
        return [self._close_part(self._part)] if self._part.size >= self._full else []

    def _close_part(self, part: _OpenPart) -> PartFile:
        done, self._part = part.close(), None
        return done


def write_parts(
    folder: str,
    prefix: str,
    batches: Iterable[pa.RecordBatch],
    partition_by: Sequence[str] = (),
    **options: int,
) -> list[PartFile]:
    """Write batches as `PartWriter` does, with separate files for each partition; return the files.

    After an error all written files are removed, because on a full disk the next attempt needs their space.
    """
    writers: dict[Values, PartWriter] = {}
    done: list[PartFile] = []
    try:
        for batch in batches:
            for values, rows in _split_by_partition(batch, partition_by):
                if values not in writers:
                    writers[values] = PartWriter(_name_folder(folder, values), prefix, **options)
                done += [_place_part(one, values) for one in writers[values].add(rows)]
        for values, writer in writers.items():
            done += [_place_part(one, values) for one in writer.end()]
        return done
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        remove(folder, done)
        raise


def _split_by_partition(
    batch: pa.RecordBatch, names: Sequence[str]
) -> Iterator[tuple[Values, pa.RecordBatch]]:
    """Split a batch by the values of its partition columns; yield the values and their rows without these columns."""
    if not batch.num_rows:
        return
    if not names:
        yield (), batch
        return
    compute: Any = pc
    distinct = pa.Table.from_batches([batch]).select(names).group_by(names).aggregate([])
    others = batch.drop_columns(list(names))
    for row in distinct.to_pylist():
        chosen: Any = None
        for name, value in row.items():
            column = batch.column(name)
            one = (
                column.is_null() if value is None else compute.fill_null(compute.equal(column, value), False)
            )
            chosen = one if chosen is None else compute.and_(chosen, one)
        yield (
            tuple((name, None if row[name] is None else str(row[name])) for name in names),
            others if distinct.num_rows == 1 else others.filter(chosen),
        )


def _name_folder(folder: str, values: Values) -> str:
    """Return a partition's folder by Delta's convention, or `folder` if a value cannot be part of a folder name."""
    if values and all(value is not None and _PLAIN.fullmatch(value) for _, value in values):
        return "/".join([folder, *(f"{name}={value}" for name, value in values)])
    return folder


def _place_part(part: PartFile, values: Values) -> PartFile:
    """Return a partition's file with its path relative to the table's folder, and with the partition's values."""
    return part._replace(path=f"{_name_folder('', values)}/{part.path}".lstrip("/"), values=values)


class _OpenPart:
    """A file that is being written in its final folder, or as a temporary file that is later uploaded to a store."""

    def __init__(self, folder: str, name: str, schema: pa.Schema, indexed: int) -> None:
        self._name, self._schema, self._rows = name, schema, 0
        self._kept = schema.names[:indexed]
        self._writer: pq.ParquetWriter | None = None
        self._nulls = dict.fromkeys(schema.names, 0)
        self._not_numbers: set[str] = set()
        self._folder = find_local_path(folder)
        self._bucket = ObjectFiles(folder) if self._folder is None else None
        self._file = self._open()
        self._ends: list[pq.FileMetaData] = []
        # Numbers in estimates rarely repeat, and neighbouring rows rarely have the same key, so Arrow would build a
        # dictionary for them and then discard it. Integers and times differ little from row to row, or need few bits.
        repeat: Any = [field.name for field in schema if _is_text(field.type)]
        packed = {field.name: "DELTA_BINARY_PACKED" for field in schema if _is_whole(field.type)}
        try:
            self._writer = pq.ParquetWriter(
                self._file,
                schema,
                compression="snappy",
                use_dictionary=repeat,
                column_encoding=packed,
                # Readers take the types from Parquet's schema, in which all of Arrow's text types are the same type.
                store_schema=False,
                metadata_collector=self._ends,
            )
        except BaseException:
            self.abandon()
            raise

    def _open(self) -> IO[bytes]:
        if self._folder is None:
            return tempfile.TemporaryFile()
        self._folder.mkdir(parents=True, exist_ok=True)
        return open(self._path, "xb")

    @property
    def size(self) -> int:
        """Return the number of bytes written so far."""
        return self._file.tell()

    @property
    def _path(self) -> Path:
        return (self._folder or Path(tempfile.gettempdir())) / self._name

    def add(self, rows: pa.Table) -> None:
        self._rows += rows.num_rows
        for name, column in zip(rows.column_names, rows.columns, strict=True):
            self._nulls[name] += column.null_count
            if pa.types.is_floating(column.type) and _has_nan(column):
                # Parquet's bounds ignore NaN, but Spark orders NaN above all other values.
                self._not_numbers.add(name)
        assert self._writer is not None
        with name_file(self._path):
            self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))

    def close(self) -> PartFile:
        assert self._writer is not None
        with name_file(self._path):
            self._writer.close()
        size = self._file.tell()
        if self._bucket is not None:
            self._file.seek(0)
            self._bucket.send(self._name, self._file)
        self._file.close()
        return PartFile(self._name, size, self._rows, int(time.time() * 1000), self._compute_statistics())

    def abandon(self) -> None:
        """Remove the incomplete file."""
        # On a full disk the attempt to close the file fails again, in several ways; only the first error is reported.
        with suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        with suppress(OSError):
            self._file.close()
        if self._folder is not None:
            self._path.unlink(missing_ok=True)

    def _compute_statistics(self) -> str:
        """Return Delta's statistics of the file, as JSON."""
        least: dict[str, Any] = {}
        greatest: dict[str, Any] = {}
        (whole,) = self._ends
        groups = [whole.row_group(i) for i in range(whole.num_row_groups)]
        for place in range(whole.num_columns):
            name = groups[0].column(place).path_in_schema
            if name not in self._kept or name in self._not_numbers:
                continue
            try:
                is_time = self._schema.field(name).type == UTC_MICROSECONDS
                found = _compute_bounds([group.column(place).statistics for group in groups], is_time)
                if found is None:
                    continue
                low, high = _format_low(found[0]), _format_high(found[1])
            except (OverflowError, ValueError):
                continue  # a time is outside Python's range; without bounds readers do not skip the file
            if low is not None and high is not None:
                least[name], greatest[name] = low, high
        return json.dumps(
            {
                "numRecords": self._rows,
                "minValues": least,
                "maxValues": greatest,
                "nullCount": {name: self._nulls[name] for name in self._kept},
            },
            ensure_ascii=False,
        )


def _has_nan(column: pa.ChunkedArray) -> bool:
    functions: Any = pc
    return bool(functions.any(functions.is_nan(column)).as_py())


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_dictionary(kind)


def _is_whole(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_date32(kind)


def _compute_bounds(statistics: Sequence[Any], is_time: bool) -> tuple[Any, Any] | None:
    """Return the minimum and maximum of a column over its row groups, or None if a group lacks its bounds."""
    found = []
    for one in statistics:
        if one is None:
            return None
        if one.has_min_max:
            # For columns of type time Arrow would compute the bounds by pandas, which is slow to import.
            ends = (
                (_convert_to_time(one.min_raw), _convert_to_time(one.max_raw))
                if is_time
                else (one.min, one.max)
            )
            found.append(ends)
        elif one.num_values:
            return None  # a row group has values but no bounds
    if not found:
        return None
    lows, highs = zip(*found, strict=True)
    return min(lows), max(highs)


def _convert_to_time(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)


def _format_low(value: Any) -> Any:
    """Return a lower bound in the form of Delta's statistics, or None if the bound cannot be written in that form."""
    if isinstance(value, datetime):
        return _format_instant(value)
    return value[:_TEXT] if isinstance(value, str) else _drop_infinity(value)


def _format_high(value: Any) -> Any:
    """Return an upper bound in the form of Delta's statistics, or None if the bound cannot be written in that form."""
    if isinstance(value, datetime):
        return _format_instant(value + timedelta(microseconds=-value.microsecond % 1000))
    if isinstance(value, str):
        if len(value) <= _TEXT:
            return value
        # A longer text with the same prefix is smaller than the prefix followed by the last character of Unicode.
        return None if value[_TEXT] == _LAST else value[:_TEXT] + _LAST
    return _drop_infinity(value)


def _format_instant(value: datetime) -> str | None:
    """Return a time in UTC, rounded down to milliseconds; None for times before the year 1000."""
    return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z" if value.year >= 1000 else None


def _drop_infinity(value: Any) -> Any:
    """Return a value unchanged, but None for an infinite number, because JSON has no infinities."""
    if isinstance(value, bool | int):
        return value
    return value if isinstance(value, float) and abs(value) < float("inf") else None


def remove(folder: str, parts: Iterable[PartFile]) -> None:
    """Remove files that no commit names and no later commit will name."""
    files = open_files(folder)
    for part in parts:
        files.remove(part.path)


def name_attempt(partition: int, job: str, stage: int, task_attempt: int) -> str:
    """Return the name prefix of the files of a task's attempt; all tasks of a write share `job` (`remove_of`)."""
    return f"part-{partition:05d}-{job}-{stage}.{task_attempt}"


def remove_of(folder: str, job: str, partition: str = "") -> None:
    """Delete the uncommitted files of one write attempt.

    Args:
        folder: folder of the table.
        job: name of the write attempt, as given to `name_attempt`.
        partition: folder of the partition to search; the table's own folder means all partitions.
    """
    files = open_files(folder)
    for name in files.names(partition):
        path = f"{partition}/{name}".lstrip("/")
        if name.startswith("part-") and f"-{job}-" in name:
            files.remove(path)
        elif "=" in name:
            remove_of(folder, job, path)


def parse_partition(name: str) -> int:
    """Return the number of the Spark partition whose task wrote a file."""
    return int(name.split("-", 2)[1])
