"""Read the columns of CSV, Parquet and ORC files without checking the values."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from jobs.core.errors import UserError
from jobs.core.input_files import list_part_files, open_input
from jobs.landing.csv_records import (
    PIECE_BYTES,
    PLAIN,
    Dialect,
    Header,
    Unreadable,
    cut_pieces,
    ends_record,
    parse_records,
    read_header,
)
from jobs.landing.dialects import ANY, BEGINNING, detect_settings, find_dialect, suggest_setting
from jobs.landing.file_parts import (
    CSV_FORMATS,
    MOST,
    FilePart,
    check_columns,
    compute_batch_rows,
    compute_stored_bytes,
    limit_memory,
    limit_sources,
    open_bytes,
    refuse_expansion,
    report_unreadable,
)
from jobs.landing.raw_rows import NOT_UTF8, RawRows, join_parts, repair_texts
from jobs.landing.wide_files import build_long_rows, build_long_schema, find_wide_columns
from jobs.specs.files import Files

STORED_FORMATS = (".parquet", ".orc")
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
                full = ROWS_A_PART
                sizes = [file.nrows / file.nstripes] * file.nstripes if file.nstripes else []
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


_BLOCK = 1 << 20


class _RecodedText(io.RawIOBase):
    """Forward-only stream of UTF-8 bytes over a stream of bytes in another encoding.

    by_cr: whether lines end with a carriage return alone.
    """

    def __init__(self, stream: io.BufferedIOBase, encoding: str, by_cr: bool) -> None:
        self._stream, self._by_cr = stream, by_cr
        self._decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)()
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer with the next bytes, and return their number; 0 at the end of the stream.

        Raises:
            UnicodeDecodeError: the bytes are not valid in the encoding.
        """
        block = b"."
        while block and not self._rest:
            block = self._stream.read(_BLOCK)
            self._rest = block
            if self._decoder is not None:
                self._rest = self._decoder.decode(block, not block).encode("utf-8", "surrogatepass")
            if self._by_cr:
                self._rest = self._rest.replace(b"\r", b"\n")
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


FORMATS = (*CSV_FORMATS, *STORED_FORMATS)

_FOUND: dict[tuple[object, ...], Dialect] = {}
"""Cache of the dialects of files, by file, columns and settings."""
_MOST_FOUND = 1 << 15


def check_format(path: Path) -> str:
    """Return the ending of a file.

    Raises:
        UserError: the ending is not in `FORMATS`.
    """
    ending = next((one for one in FORMATS if path.name.lower().endswith(one)), None)
    if ending is None:
        raise UserError(
            f"{path}: the file's ending must be .csv, .tsv, .csv.gz, .tsv.gz, .parquet or .orc; unpack an archive, and "
            "save a spreadsheet as CSV"
        )
    return ending


def read(path: Path, columns: Sequence[str] | None = None, named: Files = ANY) -> RawRows:
    """Read the named columns of a file, or all columns; a CSV field stays text, and an empty field becomes null.

    For a CSV file, the column `_corrupt` contains the text of rows with a wrong number of fields, and the column
    `_bytes` contains the bytes of rows that are not UTF-8. Each of these two columns exists only if the file has such
    rows.

    Raises:
        UserError: the file cannot be read, has another format than its ending indicates, or lacks a column.
    """
    names = read_schema(path, columns or (), named).names
    some = list_whole_parts(path, columns or (), named)
    found = [source for part in some for source in read_part(part, columns)]
    return join_parts(found, names if columns is None else list(columns))


def list_whole_parts(path: Path, columns: Sequence[str], named: Files = ANY) -> list[FilePart]:
    """Return the parts of a file that is read from its beginning: those of `list_parts`, or one part of a CSV file.

    Raises:
        UserError: the file cannot be read, or has another format than its ending indicates.
    """
    if not _is_one_csv(path):
        return list_parts(path, columns=columns, named=named)
    with _report_unreadable(path):
        return [_build_records_part(path, 0, columns, named)]


def list_parts(
    path: Path, start: int = 0, stop: int | None = None, columns: Sequence[str] = (), named: Files = ANY
) -> list[FilePart]:
    """Return the parts of a file, or of a folder of Parquet or ORC files, in order.

    Args:
        path: path of the file or folder.
        start: for a CSV file, byte position of the first record to read; the header is always skipped.
        stop: for a CSV file, byte position after the last record to read. None means the end of the file.
        columns: column names of the rows, used to find the dialect of a CSV file.
        named: settings of the spec for files.

    Raises:
        UserError: the file cannot be read, or has another format than its ending indicates.
    """
    most = named.memory_mb << 20
    with _report_unreadable(path):
        if not _is_one_csv(path):
            wide = find_wide_columns(named, columns)
            return [part._replace(wide=wide, most=most) for part in list_stored_parts(path)]
        whole = _build_records_part(path, start, columns, named)
        dialect = whole.dialect
        if not can_be_cut(path, dialect):
            return [whole]
        found: list[FilePart] = []
        start = whole.start
        with _open_bytes(path, dialect, most, start) as stream:
            for piece in cut_pieces(stream, PIECE_BYTES, dialect=dialect):
                end = start + len(piece)
                found.append(whole._replace(start=start, stop=end if stop is None else min(end, stop)))
                start = end
                if stop is not None and end >= stop:
                    break
        return [part for part in found if part.stop is None or part.start < part.stop]


def _build_records_part(path: Path, start: int, columns: Sequence[str], named: Files) -> FilePart:
    """Return one part with all records of a CSV file from a byte position to the end."""
    dialect = read_dialect(path, columns, named)
    header = _read_header(path, dialect)
    names, wide = tuple(header.names), find_wide_columns(named, columns)
    return FilePart(str(path), max(header.end, start), None, named.memory_mb << 20, dialect, names, wide)


def can_be_cut(path: Path, dialect: Dialect) -> bool:
    """Return whether a CSV file can be read from its middle: the file must be uncompressed UTF-8."""
    return not path.name.lower().endswith(".gz") and not dialect.is_recoded


def is_record_start(path: Path, place: int, columns: Sequence[str] = (), named: Files = ANY) -> bool:
    """Return whether a record of a CSV file begins at a byte position, or the file ends there after a whole record.

    Args:
        path: path of the file.
        place: byte position.
        columns: column names of the rows, used to find the dialect.
        named: settings of the spec for files.

    Raises:
        UserError: the file cannot be read.
    """
    with _report_unreadable(path):
        dialect = read_dialect(path, columns, named)
        if not can_be_cut(path, dialect):
            return False
        start = _read_header(path, dialect).end
        with _open_bytes(path, dialect, start=start) as stream:
            for piece in cut_pieces(stream, PIECE_BYTES, dialect=dialect):
                if start + len(piece) >= place:
                    return ends_record(piece[: place - start], dialect)
                start += len(piece)
    return start == place


def read_part(part: FilePart, columns: Sequence[str] | None = None) -> Iterator[RawRows]:
    """Yield the rows of a part of a file in batches; the columns are the same as for `read`.

    Raises:
        UserError: the file cannot be read, lacks a column, or needs more memory than the part allows.
    """
    sources = _read_part(part, columns if part.wide is None else None)
    for source in limit_sources(sources, part.path, part.most):
        yield source if part.wide is None else build_long_rows(source, part.wide, columns)


def _read_part(part: FilePart, columns: Sequence[str] | None) -> Iterator[RawRows]:
    path, dialect = Path(part.path), part.dialect
    with _report_unreadable(path):
        if not _is_one_csv(path):
            yield from read_stored(part, columns)
            return
        names = part.names or _read_header(path, dialect).names
        check_columns(path, names, names if columns is None else columns)
        with _open_bytes(path, dialect, part.most, part.start) as stream:
            rest = cut_pieces(stream, PIECE_BYTES, dialect=dialect)
            if part.stop is not None:
                rest = iter([stream.read(part.stop - part.start)])
            for piece in rest:
                yield parse_records(piece, names, columns, dialect)


def read_schema(path: Path, columns: Sequence[str], named: Files = ANY) -> pa.Schema:
    """Check that a file has the named columns, and return the schema of the file.

    Args:
        path: path of the file.
        columns: names of the columns that the file must have.
        named: settings of the spec for files, including its dialect and wide files.

    Raises:
        UserError: the file cannot be read, has another format than its ending indicates, or lacks a column.
    """
    is_csv = _is_one_csv(path)
    wide = find_wide_columns(named, columns)
    needed = columns if wide is None else wide.kept
    with _report_unreadable(path):
        if is_csv:
            names = _read_header(path, read_dialect(path, columns, named)).names
            _check_header(path, names, needed, named)
            schema = pa.schema([(name, pa.string()) for name in names])
        else:
            schema = read_stored_schema(path)
    check_columns(path, schema.names, needed)
    if wide is not None:
        schema = build_long_schema(path, schema, wide)
        check_columns(path, schema.names, columns)
    return schema


def read_dialect(path: Path, columns: Sequence[str], named: Files = ANY) -> Dialect:
    """Return the dialect of a CSV file; features that the spec does not set are found in the file's beginning."""
    there = path.stat()
    known = (path, there.st_size, there.st_mtime_ns, *columns, named.model_dump_json())
    if known not in _FOUND:
        if len(_FOUND) == _MOST_FOUND:
            _FOUND.clear()
        wide = find_wide_columns(named, columns)
        _FOUND[known] = find_dialect(_read_beginning(path), columns if wide is None else wide.kept, named)
    return _FOUND[known]


def read_settings(path: Path) -> Files:
    """Return the settings that a spec needs for the dialect of a CSV file; no settings for other files.

    Raises:
        UserError: the file cannot be read.
    """
    if check_format(path) not in CSV_FORMATS:
        return ANY
    with _report_unreadable(path):
        return detect_settings(_read_beginning(path))


def _check_header(path: Path, names: Sequence[str], columns: Sequence[str], named: Files) -> None:
    """Raise an error if a CSV file's header lacks columns because of the file's dialect.

    Raises:
        UserError: the dialect is the cause. The message names the remedy.
    """
    have = set(names)
    missing = [name for name in columns if name not in have]
    if missing and (remedy := suggest_setting(_read_beginning(path), columns, named)):
        raise UserError(f"{path}: there is no column '{missing[0]}'; {remedy}")


def _read_beginning(path: Path) -> bytes:
    with open_bytes(path) as stream:
        return stream.read(BEGINNING)


def _is_one_csv(path: Path) -> bool:
    is_csv = check_format(path) in CSV_FORMATS
    if is_csv and path.is_dir():
        raise UserError(f"{path}: is a folder; give one file")
    return is_csv


@contextmanager
def _report_unreadable(path: Path) -> Iterator[None]:
    """Raise a UserError in place of an error for a file that cannot be read or is not CSV."""
    try:
        with report_unreadable(path):
            yield
    except UnicodeError as error:
        encoding = getattr(error, "encoding", "utf-8").upper()
        remedy = "save it as UTF-8, or name its encoding in the spec, such as files: {encoding: windows-1252}"
        raise UserError(f"{path}: is not {encoding} text; {remedy}") from None
    except Unreadable as error:
        raise UserError(f"{path}: {error}") from None
    except csv.Error as error:
        if "field limit" in str(error):
            raise UserError(
                f'{path}: has a quotation mark (") that nothing closes, so that the rows after it are one field: close '
                "it, or write it twice if it is part of a text"
            ) from error
        raise UserError(f"{path}: is not CSV ({error})") from error


@contextmanager
def _open_bytes(
    path: Path, dialect: Dialect = PLAIN, most: int = MOST, start: int = 0
) -> Iterator[io.BufferedIOBase]:
    """Open a file at a position in its text, and yield a stream of uncompressed UTF-8 bytes with line feeds."""
    with open_bytes(path, most) as plain:
        if not dialect.is_recoded:
            plain.seek(start)
        if not (dialect.is_recoded or dialect.by_cr):
            yield plain
            return
        stream = io.BufferedReader(_RecodedText(plain, dialect.encoding, dialect.by_cr), _BLOCK)
        if dialect.is_recoded:
            stream.read(start)
        yield stream


def _read_header(path: Path, dialect: Dialect) -> Header:
    with _open_bytes(path, dialect) as stream, limit_memory(path):
        found = read_header(stream, dialect)
    if found is None:
        raise UserError(f"{path}: is empty; give a file with a header and rows")
    return found
