"""Read the columns of a CSV or Parquet file unchecked."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from jobs.core.errors import UserError, first_line
from jobs.encoding import arrow
from jobs.specs.problems import closest

FORMATS = (".csv", ".csv.gz", ".parquet")
CORRUPT = "_corrupt"
"""The column with the text of a misshapen row."""


class Source(NamedTuple):
    """The content of a file: `columns` by name, each of N rows, and (N,) which rows are `misshapen`."""

    columns: dict[str, pa.Array]
    misshapen: NDArray[np.bool_]
    rows: int


def check_format(path: Path) -> str:
    """Return the file's ending.

    Raises:
        UserError: the ending is none of .csv, .csv.gz and .parquet.
    """
    ending = next((one for one in FORMATS if path.name.lower().endswith(one)), None)
    if ending is None:
        raise UserError(f"{path}: the file's ending must be .csv, .csv.gz or .parquet")
    return ending


def read(path: Path, columns: Sequence[str] | None = None) -> Source:
    """Read the named columns, or all; CSV fields stay text, an empty field is null.

    Reading all columns of a CSV file keeps the text of misshapen rows in the column `_corrupt`.

    Raises:
        UserError: the file cannot be read, has another format than its ending says, or lacks a column.
    """
    is_csv = _is_csv(path)
    try:
        return _read_csv(path, columns) if is_csv else _read_parquet(path, columns)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_schema(path: Path, columns: Sequence[str]) -> pa.Schema:
    """Return the names and types of a file's columns, after checking that the named ones exist.

    Raises:
        UserError: the file cannot be read, has another format than its ending says, or lacks a column.
    """
    is_csv = _is_csv(path)
    try:
        if is_csv:
            with _text(path) as text:
                names = _header(path, csv.reader(text))
            schema = pa.schema([(name, pa.string()) for name in names])
        else:
            schema = _parquet_schema(path)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from error
    check_columns(path, schema.names, columns)
    return schema


def _is_csv(path: Path) -> bool:
    ending = check_format(path)
    if ending != ".parquet" and path.is_dir():
        raise UserError(f"{path}: is a folder; give one file")
    return ending != ".parquet"


def _text(path: Path) -> io.TextIOBase:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")  # type: ignore[return-value]
    return path.open(encoding="utf-8-sig", newline="")


def _header(path: Path, reader: Iterator[list[str]]) -> list[str]:
    header = next((row for row in reader if row), None)
    if header is None:
        raise UserError(f"{path}: is empty")
    return header


def _read_csv(path: Path, wanted: Sequence[str] | None) -> Source:
    # Python's reader and not Arrow's: one row with a field too many must not fail the whole file.
    try:
        with _text(path) as text:
            reader = csv.reader(text)
            header = _header(path, reader)
            check_columns(path, header, header if wanted is None else wanted)
            rows = [row for row in reader if row]
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path}: is not CSV ({error})") from error
    misshapen = np.fromiter((len(row) != len(header) for row in rows), bool, len(rows))
    columns: dict[str, pa.Array] = {}
    for name in header if wanted is None else wanted:
        place = header.index(name)
        if misshapen.any():
            values = [(row[place] or None) if place < len(row) else None for row in rows]
        else:
            values = [row[place] or None for row in rows]
        columns[name] = arrow.texts(values)
    if wanted is None and misshapen.any():
        columns[CORRUPT] = arrow.texts(
            [_joined(row) if bad else None for row, bad in zip(rows, misshapen, strict=True)]
        )
    return Source(columns, misshapen, len(rows))


def _joined(fields: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _parquet_schema(path: Path) -> pa.Schema:
    if path.is_dir():  # as Spark writes a table
        parts = sorted(part for part in path.rglob("*.parquet") if part.is_file())
        if not parts:
            raise UserError(f"{path}: has no .parquet files in it")
        path = parts[0]
    schema = pq.read_schema(path)
    return pa.schema([(field.name, _plain_kind(field.type)) for field in schema])


def _read_parquet(path: Path, wanted: Sequence[str] | None) -> Source:
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give one file")
    try:
        with pq.ParquetFile(path) as file:
            wanted = file.schema_arrow.names if wanted is None else wanted
            check_columns(path, file.schema_arrow.names, wanted)
            table = file.read(columns=list(wanted)).combine_chunks()
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: is not a Parquet file ({str(error).splitlines()[0]})") from error
    columns = {name: _plain_type(table.column(name)) for name in wanted}
    return Source(columns, np.zeros(table.num_rows, dtype=bool), table.num_rows)


def _plain_kind(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) else kind


def _plain_type(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    column = column.cast(_plain_kind(column.type))
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def check_columns(path: Path, have: Sequence[str], wanted: Sequence[str]) -> None:
    """Check that a file has each of the wanted columns once.

    Raises:
        UserError: a column is missing or appears twice.
    """
    for name in wanted:
        if name not in have:
            hint = closest(name, have)
            listed = ", ".join(have[:20]) + (", ..." if len(have) > 20 else "")
            raise UserError(f"{path}: there is no column '{name}'; {hint or f'columns are {listed}'}")
        if list(have).count(name) > 1:
            raise UserError(f"{path}: column '{name}' appears twice; rename one of them")
