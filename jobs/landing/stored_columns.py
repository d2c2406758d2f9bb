"""Read Parquet and ORC files, whose row groups and stripes can be read independently.

Arrow reads an ORC time without a zone as local time; the zone is the spec's `time_zone`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from jobs.core.errors import UserError
from jobs.core.input_files import list_part_files, open_input
from jobs.landing.csv_records import PIECE_BYTES
from jobs.landing.file_parts import (
    FilePart,
    check_columns,
    compute_batch_rows,
    compute_stored_bytes,
    limit_memory,
    refuse_expansion,
)
from jobs.landing.raw_rows import NOT_UTF8, RawRows, repair_texts

FORMATS = (".parquet", ".orc")
ROWS_A_PART = 1_000_000
"""Approximate number of rows of the ORC stripes that are one part."""


def read_stored_schema(path: Path) -> pa.Schema:
    """Return the schema of a file, or of the first file of a folder."""
    with limit_memory(path), _open_file(_list_files(path)[0]) as file:
        schema = file.schema if isinstance(file, orc.ORCFile) else file.schema_arrow
    return pa.schema([(field.name, _find_plain_kind(field.type)) for field in schema])


def list_stored_parts(path: Path) -> list[FilePart]:
    """Return the parts of a file, or of a folder of files, in order."""
    found: list[FilePart] = []
    for one in _list_files(path):
        with limit_memory(one), _open_file(one) as file:
            if isinstance(file, orc.ORCFile):
                full, sizes = (
                    ROWS_A_PART,
                    [file.nrows / file.nstripes] * file.nstripes if file.nstripes else [],
                )
            else:
                groups = range(file.num_row_groups)
                full, sizes = PIECE_BYTES, [file.metadata.row_group(at).total_byte_size for at in groups]
        start, size = 0, 0.0
        for place, more in enumerate(sizes):
            size += more
            if size >= full or place == len(sizes) - 1:
                found.append(FilePart(str(one), start, place + 1))
                start, size = place + 1, 0.0
    return found


def read_stored(part: FilePart, columns: Sequence[str] | None) -> Iterator[RawRows]:
    """Yield the named columns, or all columns, of a part in batches of rows.

    Raises:
        UserError: a column is missing, the file is damaged, or its content needs far more memory than allowed.
    """
    path = Path(part.path)
    with _open_file(path) as file:
        if isinstance(file, orc.ORCFile):
            schema, rows, read = file.schema, file.nrows, partial(_read_stripes, file, part)
        else:
            schema, rows, read = file.schema_arrow, file.metadata.num_rows, partial(_read_groups, file, part)
        wanted = list(schema.names if columns is None else columns)
        check_columns(path, schema.names, wanted)
        refuse_expansion(path, compute_stored_bytes(schema, wanted, rows), part.most)
        for batch in read(wanted):
            batch.validate(full=True)  # a damaged file may contain invalid texts
            found, not_utf8 = repair_texts({name: _cast_plain(batch.column(name)) for name in wanted})
            source = RawRows(found, batch.num_rows)
            if not_utf8 is not None:
                problems = source.reasons()
                problems[not_utf8] = NOT_UTF8
                source = source._replace(problems=problems)
            yield source


def _read_stripes(file: orc.ORCFile, part: FilePart, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield the stripes of a part, read column by column.

    Columns are read separately because the ORC reader needs several times the memory of its result.
    """
    for place in range(part.start, file.nstripes if part.stop is None else part.stop):
        found = [file.read_stripe(place, columns=[name]).column(0) for name in columns]
        yield pa.RecordBatch.from_arrays(found, columns)


def _read_groups(file: pq.ParquetFile, part: FilePart, columns: list[str]) -> Iterator[pa.RecordBatch]:
    groups = list(range(part.start, file.num_row_groups if part.stop is None else part.stop))
    rows = 0
    for batch in file.iter_batches(
        compute_batch_rows(file.metadata, groups), row_groups=groups, columns=columns
    ):
        rows += batch.num_rows
        yield batch
    # If a damaged column ends early, Arrow returns all other columns with fewer rows, too, and raises no error.
    said = sum(file.metadata.row_group(one).num_rows for one in groups)
    if rows != said:
        raise UserError(
            f"{part.path}: is damaged: it says that it has {said:,} rows, and {rows:,} can be read; copy it again"
        )


@contextmanager
def _open_file(path: Path) -> Iterator[orc.ORCFile | pq.ParquetFile]:
    with open_input(path) as stream:
        if path.name.lower().endswith(".orc"):
            yield orc.ORCFile(stream)
        else:
            # Old Spark versions write INT96 times, which are read in microseconds, because in nanoseconds years outside
            # 1677 to 2262 would overflow. With a buffer, not all columns of a row group are in memory together.
            yield pq.ParquetFile(stream, coerce_int96_timestamp_unit="us", buffer_size=1 << 20)


def _list_files(path: Path) -> list[Path]:
    """Return the path itself if it is a file, or the part files of a folder that Spark has written.

    Raises:
        UserError: the folder has no files.
    """
    if not path.is_dir():
        return [path]
    ending = path.suffix.lower()
    found = [
        part
        for part in list_part_files(path)
        if part.name.endswith(ending) and not any(name[0] in "._" for name in part.relative_to(path).parts)
    ]
    if not found:
        raise UserError(f"{path}: has no {ending} files in it")
    return found


def _find_plain_kind(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if any(is_kind(kind) for is_kind in _TEXTS) else kind


def _cast_plain(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    # The cast from bytes to text is unchecked, because `repair_texts` later finds the rows with invalid texts.
    return column.cast(_find_plain_kind(column.type), safe=not _is_bytes(column.type))


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


_TEXTS = (pa.types.is_large_string, pa.types.is_string_view, _is_bytes)
"""Tests for types that are read as text; bytes are included because some Parquet writers declare texts as bytes."""
