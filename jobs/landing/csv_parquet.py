"""Read the columns of a CSV, Parquet or ORC file unchecked."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.core.errors import UserError, first_line
from jobs.core.input_files import open_input, part_files
from jobs.core.redaction import show_name, show_names
from jobs.landing.bounds import (
    MOST,
    is_out_of_memory,
    limit_sources,
    memory_limit,
    open_bytes,
    refuse_expansion,
    rows_a_batch,
    stored_bytes,
)
from jobs.landing.csv_records import (
    PIECE_BYTES,
    PLAIN,
    Dialect,
    Header,
    OtherTable,
    TooLong,
    ends_record,
    parse_records,
    pieces,
    read_header,
)
from jobs.landing.dialects import ANY, BEGINNING, find_dialect, hint, settings_of
from jobs.landing.orc_stripes import orc_columns, read_stripes, stripe_ranges
from jobs.landing.raw_rows import Source, joined, valid_texts
from jobs.landing.shapes.recoded_text import RecodedText
from jobs.landing.shapes.wide_files import WideColumns, long_rows, long_schema, wide_columns
from jobs.specs.files import Files
from jobs.specs.problems import closest

FORMATS = (".csv", ".csv.gz", ".parquet", ".orc")
HEADER_BYTES = 1 << 16
"""Bytes that are read at once where only the header is wanted."""

_FOUND: dict[tuple[object, ...], Dialect] = {}
"""The dialects of the files that were looked at, each found once."""
_MOST_FOUND = 1 << 15


class Part(NamedTuple):
    """A part of a file that can be read by itself, by a worker of Spark as well.

    Of a CSV file the bytes from `start` to `stop`, which are whole records (None: all records); of a Parquet file the
    row groups, of an ORC file the stripes, from `start` to `stop` (None: the last). dialect, names: of a CSV file and
    of its columns. wide: which columns become rows. most: bytes of memory that reading a piece of it may take.
    """

    path: str
    start: int
    stop: int | None
    dialect: Dialect = PLAIN
    names: tuple[str, ...] = ()
    wide: WideColumns | None = None
    most: int = MOST


def check_format(path: Path) -> str:
    """Return the file's ending.

    Raises:
        UserError: the ending is none of .csv, .csv.gz, .parquet and .orc.
    """
    ending = next((one for one in FORMATS if path.name.lower().endswith(one)), None)
    if ending is None:
        raise UserError(f"{path}: the file's ending must be .csv, .csv.gz, .parquet or .orc")
    return ending


def read(path: Path, columns: Sequence[str] | None = None, named: Files = ANY) -> Source:
    """Read the named columns, or all; CSV fields stay text, an empty field is null.

    Reading all columns of a CSV file keeps the text of misshapen rows in the column `_corrupt`, and the bytes of rows
    that are not UTF-8 in the column `_bytes`.

    Raises:
        UserError: the file cannot be read, has another format than its ending says, or lacks a column.
    """
    if path.is_dir() and check_format(path) not in (".parquet", ".orc"):
        raise UserError(f"{path}: is a folder; give one file")
    names = read_schema(path, columns or (), named).names
    with _readable(path):
        whole = [_records(path, 0, columns or (), named)] if _is_csv(path) else None
    some = parts(path, columns=columns or (), named=named) if whole is None else whole
    found = [source for part in some for source in read_part(part, columns)]
    return joined(found, names if columns is None else list(columns))


def parts(
    path: Path, start: int = 0, stop: int | None = None, columns: Sequence[str] = (), named: Files = ANY
) -> list[Part]:
    """Return the parts of a file, or of a folder of Parquet or ORC files, in order.

    Args:
        path: of the file.
        start: of a CSV file leave out the bytes before, which are whole records; its header is always left out.
        stop: of a CSV file leave out the bytes from here on, where a record begins.
        columns: that the rows have, to find a CSV file's dialect by.
        named: what the spec says of the dialect.

    Raises:
        UserError: the file cannot be read, or has another format than its ending says.
    """
    wide = wide_columns(named, columns)
    with _readable(path):
        if _is_orc(path):
            files = _files_within(path, ".orc")
            stripes = (Part(str(file), *some) for file in files for some in stripe_ranges(file))
            return [part._replace(wide=wide, most=named.memory_mb << 20) for part in stripes]
        if not _is_csv(path):
            return [part._replace(wide=wide, most=named.memory_mb << 20) for part in _row_groups(path)]
        whole = _records(path, start, columns, named)
        dialect = whole.dialect
        if not can_be_cut(path, dialect):
            return [whole]
        found: list[Part] = []
        start = whole.start
        with _bytes(path, dialect, whole.most) as stream:
            stream.seek(start)
            for piece in pieces(stream, PIECE_BYTES, dialect=dialect):
                end = start + len(piece)
                found.append(whole._replace(start=start, stop=end if stop is None else min(end, stop)))
                start = end
                if stop is not None and end >= stop:
                    break
        return [part for part in found if part.stop is None or part.start < part.stop]


def _records(path: Path, start: int, columns: Sequence[str], named: Files) -> Part:
    """Return all records of a CSV file from a place on as one part."""
    dialect = found_dialect(path, columns, named)
    header = _header(path, dialect)
    names, wide = tuple(header.names), wide_columns(named, columns)
    return Part(str(path), max(header.end, start), None, dialect, names, wide, named.memory_mb << 20)


def can_be_cut(path: Path, dialect: Dialect) -> bool:
    """Tell if a CSV file can be read from its middle: it is neither compressed nor in another encoding than UTF-8."""
    return not path.name.lower().endswith(".gz") and not dialect.is_recoded


def begins_record(path: Path, place: int, columns: Sequence[str] = (), named: Files = ANY) -> bool:
    """Tell if a record of a CSV file begins at a place in its bytes, or would if the file went on.

    columns, named: as of `parts`.

    Raises:
        UserError: the file cannot be read.
    """
    with _readable(path):
        dialect = found_dialect(path, columns, named)
        if not can_be_cut(path, dialect):
            return False
        start = _header(path, dialect).end
        with _bytes(path, dialect) as stream:
            stream.seek(start)
            for piece in pieces(stream, PIECE_BYTES, dialect=dialect):
                if start + len(piece) >= place:
                    return ends_record(piece[: place - start], dialect)
                start += len(piece)
    return start == place


def read_part(part: Part, columns: Sequence[str] | None = None) -> Iterator[Source]:
    """Read the named columns, or all, of a part of a file as `read` does, in some batches of rows.

    Raises:
        UserError: the file cannot be read, lacks a column, or takes more memory than the part says.
    """
    sources = _read_part(part, columns if part.wide is None else None)
    for source in limit_sources(sources, part.path, part.most):
        yield source if part.wide is None else long_rows(source, part.wide, columns)


def _read_part(part: Part, columns: Sequence[str] | None) -> Iterator[Source]:
    path = Path(part.path)
    with _readable(path):
        if _is_csv(path):
            yield from _read_records(part, columns)
            return
        if _is_orc(path):
            schema, rows = orc_columns(path)
            wanted = list(schema.names if columns is None else columns)
            check_columns(path, schema.names, wanted)
            refuse_expansion(path, stored_bytes(schema, wanted, rows), part.most)
            for batch in read_stripes(path, part.start, part.stop, wanted):
                yield _stored(batch, wanted)
            return
        with _parquet(path) as file:
            have = file.schema_arrow.names
            wanted = list(have if columns is None else columns)
            check_columns(path, have, wanted)
            groups = list(range(part.start, file.num_row_groups if part.stop is None else part.stop))
            refuse_expansion(path, stored_bytes(file.schema_arrow, wanted, file.metadata.num_rows), part.most)
            rows, said = 0, sum(file.metadata.row_group(one).num_rows for one in groups)
            each = rows_a_batch(file.metadata, groups)
            for batch in file.iter_batches(each, row_groups=groups, columns=wanted):
                rows += batch.num_rows
                yield _stored(batch, wanted)
            # Arrow takes a damaged column that ends early for the end of the others, too.
            if rows != said:
                raise UserError(
                    f"{path}: is damaged: it says that it has {said:,} rows, and {rows:,} can be read; copy it again"
                )


def _read_records(part: Part, columns: Sequence[str] | None) -> Iterator[Source]:
    """Read a part of a CSV file."""
    path, dialect = Path(part.path), part.dialect
    names = part.names or _header(path, dialect).names
    check_columns(path, names, names if columns is None else columns)
    with _bytes(path, dialect) as stream:
        stream.seek(part.start)
        rest = pieces(stream, PIECE_BYTES, dialect=dialect)
        if part.stop is not None:
            rest = iter([stream.read(part.stop - part.start)])
        for piece in rest:
            yield parse_records(piece, names, columns, dialect)


def read_schema(path: Path, columns: Sequence[str], named: Files = ANY) -> pa.Schema:
    """Return the names and types of a file's columns, after checking that the named ones exist.

    named: what the spec says of a CSV file's dialect, and of wide files.

    Raises:
        UserError: the file cannot be read, has another format than its ending says, or lacks a column.
    """
    is_csv = _is_csv(path)
    wide = wide_columns(named, columns)
    needed = columns if wide is None else wide.kept
    with _readable(path):
        if is_csv:
            names = _header(path, found_dialect(path, columns, named)).names
            _check_header(path, names, needed, named)
            schema = pa.schema([(name, pa.string()) for name in names])
        else:
            schema = _stored_schema(path)
    check_columns(path, schema.names, needed)
    if wide is not None:
        schema = long_schema(path, schema, wide)
        check_columns(path, schema.names, columns)
    return schema


def found_dialect(path: Path, columns: Sequence[str], named: Files = ANY) -> Dialect:
    """Return the dialect of a CSV file: what the spec names, else what the file's beginning shows."""
    there = path.stat()
    known = (path, there.st_size, there.st_mtime_ns, *columns, named.model_dump_json())
    if known not in _FOUND:
        if len(_FOUND) == _MOST_FOUND:
            _FOUND.clear()
        wide = wide_columns(named, columns)
        _FOUND[known] = find_dialect(_beginning(path), columns if wide is None else wide.kept, named)
    return _FOUND[known]


def written_as(path: Path) -> Files:
    """Return what a spec has to say of how a CSV file is written; nothing of any other file.

    Raises:
        UserError: the file cannot be read.
    """
    if check_format(path) not in (".csv", ".csv.gz"):
        return ANY
    with _readable(path):
        return settings_of(_beginning(path))


def _check_header(path: Path, names: Sequence[str], columns: Sequence[str], named: Files) -> None:
    """Check if a CSV file whose header lacks columns does so because of its dialect.

    Raises:
        UserError: it does; the message says what to do.
    """
    have = set(names)
    missing = [name for name in columns if name not in have]
    if missing and (remedy := hint(_beginning(path), columns, named)):
        raise UserError(f"{path}: there is no column '{missing[0]}'; {remedy}")


def _beginning(path: Path) -> bytes:
    with open_bytes(path) as stream:
        return stream.read(BEGINNING)


def _is_csv(path: Path) -> bool:
    is_csv = check_format(path) in (".csv", ".csv.gz")
    if is_csv and path.is_dir():
        raise UserError(f"{path}: is a folder; give one file")
    return is_csv


def _is_orc(path: Path) -> bool:
    return check_format(path) == ".orc"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of a file that cannot be read into a UserError."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except UnicodeError as error:
        encoding = getattr(error, "encoding", "utf-8").upper()
        remedy = "save it as UTF-8, or name its encoding in the spec, such as files: {encoding: windows-1252}"
        raise UserError(f"{path}: is not {encoding} text; {remedy}") from None
    except OtherTable as error:
        raise UserError(
            f"{path}: another table with other columns begins between its rows ({first_line(error)[:80]}); write each "
            "table into a file of its own"
        ) from error
    except TooLong as error:
        raise UserError(
            f"{path}: {error}: write one row on each line, and close each quotation mark"
        ) from None
    except csv.Error as error:
        if "field limit" in str(error):
            raise UserError(
                f'{path}: has a quotation mark (") that nothing closes, so that the rows after it are one field: close '
                "it, or write it twice if it is part of a text"
            ) from error
        raise UserError(f"{path}: is not CSV ({error})") from error
    except gzip.BadGzipFile as error:
        raise UserError(damaged(path, str(error))) from error
    except (EOFError, zlib.error) as error:
        raise UserError(damaged(path, str(error))) from error
    except (pa.ArrowException, OSError) as error:
        if is_out_of_memory(error):  # `memory_limit` says so
            raise
        if isinstance(error, PermissionError):
            raise UserError(
                f"{path}: may not be read; give this user the right to ({error.strerror})"
            ) from None
        kind = {".orc": "an ORC", ".parquet": "a Parquet"}.get(check_format(path), "a CSV")
        raise UserError(
            f"{path}: cannot be read: it is not {kind} file, or is damaged ({first_line(error)}); copy it again, or "
            "write it anew"
        ) from error


def damaged(path: Path, why: str) -> str:
    """Return the sentence about a compressed file that cannot be expanded."""
    return f"{path}: is cut off or damaged: it is no whole gzip file ({why}); copy it again, or write it anew"


@contextmanager
def _bytes(path: Path, dialect: Dialect = PLAIN, most: int = MOST) -> Iterator[io.BufferedIOBase]:
    """Open a file, uncompressed, as UTF-8 text with line feeds."""
    with open_bytes(path, most) as plain:
        yield (
            RecodedText(plain, dialect.encoding, dialect.by_cr)
            if dialect.is_recoded or dialect.by_cr
            else plain
        )


def _header(path: Path, dialect: Dialect) -> Header:
    with _bytes(path, dialect) as stream, memory_limit(path):
        found = read_header(stream, HEADER_BYTES, dialect)
    if found is None:
        raise UserError(f"{path}: is empty; give a file with a header and rows")
    return found[0]


def _stored(batch: pa.RecordBatch, names: Sequence[str]) -> Source:
    batch.validate(full=True)  # a damaged file may hold text that is none
    found, not_utf8 = valid_texts({name: _plain_type(batch.column(name)) for name in names})
    return Source(found, np.zeros(batch.num_rows, bool), batch.num_rows, not_utf8)


def _stored_schema(path: Path) -> pa.Schema:
    with memory_limit(path):
        if _is_orc(path):
            schema = orc_columns(_files_within(path, ".orc")[0])[0]
        else:
            with _parquet(_files_within(path, ".parquet")[0]) as file:
                schema = file.schema_arrow
    return pa.schema([(field.name, _plain_kind(field.type)) for field in schema])


def _files_within(path: Path, ending: str) -> list[Path]:
    """Return a file itself, or the files of a folder as Spark writes one.

    Raises:
        UserError: the folder has no files.
    """
    if not path.is_dir():
        return [path]
    found = sorted(
        part
        for part in part_files(path)
        if part.name.endswith(ending) and not any(name[0] in "._" for name in part.relative_to(path).parts)
    )
    if not found:
        raise UserError(f"{path}: has no {ending} files in it")
    return found


def _row_groups(path: Path) -> list[Part]:
    found: list[Part] = []
    for file in _files_within(path, ".parquet"):
        with memory_limit(file), _parquet(file) as opened:
            metadata = opened.metadata
        start = size = 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).total_byte_size
            if size >= PIECE_BYTES or group == metadata.num_row_groups - 1:
                found.append(Part(str(file), start, group + 1))
                start, size = group + 1, 0
    return found


@contextmanager
def _parquet(path: Path) -> Iterator[pq.ParquetFile]:
    with open_input(path) as stream:
        # As nanoseconds, an old Spark's times (INT96) outside of the years 1677 to 2262 would become others.
        # By a buffer, as the columns of a row group would be in memory at once.
        yield pq.ParquetFile(stream, coerce_int96_timestamp_unit="us", buffer_size=1 << 20)


def _plain_kind(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if any(is_kind(kind) for is_kind in _TEXTS) else kind


def _plain_type(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    # Bytes become text unchecked: `valid_texts` marks the rows where they are none.
    return column.cast(_plain_kind(column.type), safe=not _is_bytes(column.type))


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


_TEXTS = (pa.types.is_large_string, pa.types.is_string_view, _is_bytes)
"""Types that are read as text. Some writers of Parquet say of their texts only that they are bytes."""


def check_columns(path: Path, have: Sequence[str], wanted: Sequence[str]) -> None:
    """Check that a file has each of the wanted columns once.

    Raises:
        UserError: a column is missing or appears twice.
    """
    times = Counter(have)
    for name in wanted:
        if not times[name]:
            hint = closest(name, have)
            listed = f"columns are {show_names(have)}"
            raise UserError(f"{path}: there is no column '{name}'; {hint or listed}")
        if times[name] > 1:
            raise UserError(f"{path}: column '{show_name(name)}' appears twice; rename one of them")
