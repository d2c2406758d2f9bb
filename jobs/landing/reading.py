"""Read and check the rows of a file, piece by piece, with a different reader for each type of file.

Each piece is read independently, in any process, so that the rows of a file do not depend on the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from jobs.landing.checking import check_rows, refuse_types
from jobs.landing.csv_parquet import FORMATS, list_parts, list_whole_parts, read_part, read_schema
from jobs.landing.file_parts import FilePart, check_columns, cut_line_parts
from jobs.landing.json_rows import FORMATS as JSON_FORMATS
from jobs.landing.json_rows import infer_json_schema, is_json, parse_documents
from jobs.landing.json_rows import list_json_parts as json_parts
from jobs.landing.json_rows import read_part as read_json
from jobs.landing.raw_rows import RawRows, add_key, add_key_to_schema, build_spec_schema
from jobs.landing.text_lines import FORMATS as TEXT_FORMATS
from jobs.landing.text_lines import build_text_schema, get_line_pattern, is_text
from jobs.landing.text_lines import read_part as read_text
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import KeyTypes

ALWAYS_READ = (*FORMATS, *JSON_FORMATS)
"""Endings of files that can land for any model."""

_CUT_BY_BYTES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt", ".log")
"""Endings of files whose pieces are byte ranges."""


class FilePiece(NamedTuple):
    """Part of a file with its approximate size in bytes; `rejected` is whether rejected rows are also committed."""

    part: FilePart
    size: int
    rejected: bool = True


@dataclass(frozen=True)
class FileReader:
    """Reader of the columns, pieces and rows of one CSV, Parquet or ORC file."""

    spec: ModelSpec
    path: str

    def columns(self) -> pa.Schema:
        """Check that the file has the columns of the spec, and return the schema of the file."""
        return read_schema(Path(self.path), self.spec.file_columns, self.spec.files)

    def pieces(self, start: int = 0, stop: int | None = None) -> list[FilePart]:
        """Return the pieces of the file in order; for lines and records, the pieces between two byte positions."""
        return list_parts(Path(self.path), start, stop, self.spec.file_columns, self.spec.files)

    def list_whole(self) -> list[FilePart]:
        """Return the pieces of the file, which is read from its beginning: a CSV file need not be cut."""
        return list_whole_parts(Path(self.path), self.spec.file_columns, self.spec.files)

    def read(
        self, piece: FilePart, key_types: KeyTypes, landed: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the checked rows of a piece (`check_rows`).

        Args:
            piece: piece of the file.
            key_types: types of the key and id columns.
            landed: start of the landing, in microseconds since 1970. None means the present time.
        """
        for source in self.sources(piece):
            yield check_rows(self.spec, source._replace(landed=landed), key_types, self.path)

    def sources(self, piece: FilePart, columns: Sequence[str] | None = None) -> Iterator[RawRows]:
        """Yield the named columns, or all columns, of a piece in batches, with the key from the file's name.

        The function `RawRows.before` of a batch returns the rows before the batch.
        """
        last: list[RawRows] = []  # only the previous batch, to limit the memory for a large piece
        for number, source in enumerate(self._read_unkeyed(piece, columns)):
            source = source._replace(decimal=self.spec.files.decimal)
            keyed = add_key(self.spec, source, self.path)

            def before(number: int = number, last: list[RawRows] = last) -> Iterator[RawRows]:
                yield from last
                if number < 2:
                    yield from self._before(piece, columns)

            yield keyed._replace(before=before)
            last = [keyed]

    def _before(self, piece: FilePart, columns: Sequence[str] | None) -> Iterator[RawRows]:
        """Yield the rows before a piece, beginning with the nearest batch."""
        for one in reversed(self.pieces(0, piece.start)):
            if one.path == piece.path and one.start < piece.start:
                yield from reversed(list(self.sources(one, columns)))

    def _read_unkeyed(self, piece: FilePart, columns: Sequence[str] | None) -> Iterator[RawRows]:
        return read_part(piece, columns)


class LineReader(FileReader):
    """Reader of lines of text; the columns are the named groups of the spec's `line_pattern`."""

    def columns(self) -> pa.Schema:
        return build_text_schema(self.spec, Path(self.path))

    def pieces(self, start: int = 0, stop: int | None = None) -> list[FilePart]:
        return cut_line_parts(Path(self.path), start, stop, self.spec.files.memory_mb << 20)

    def list_whole(self) -> list[FilePart]:
        return self.pieces()

    def _read_unkeyed(self, piece: FilePart, columns: Sequence[str] | None) -> Iterator[RawRows]:
        return read_text(get_line_pattern(self.spec, self.path), piece, columns)


class DocumentReader(LineReader):
    """Reader of JSON files; all rows have the columns of the spec, and requested columns are ignored."""

    def columns(self) -> pa.Schema:
        return infer_json_schema(Path(self.path), self.spec)

    def pieces(self, start: int = 0, stop: int | None = None) -> list[FilePart]:
        return json_parts(Path(self.path), start, stop, self.spec.files.memory_mb << 20)

    def _read_unkeyed(self, piece: FilePart, columns: Sequence[str] | None) -> Iterator[RawRows]:
        for documents in read_json(piece, self.spec.file_columns):
            yield parse_documents(self.spec, documents, self.path)


def list_endings(spec: ModelSpec) -> tuple[str, ...]:
    """Return the endings of files that can land for a model; text files can land if the spec has `line_pattern`."""
    return (*ALWAYS_READ, *(() if spec.line_pattern is None else TEXT_FORMATS))


def select_reader(spec: ModelSpec, path: str) -> FileReader:
    """Return the reader for a file, or for a folder that Spark has written, chosen by the ending of the path."""
    if is_json(path):
        return DocumentReader(spec, path)
    return LineReader(spec, path) if is_text(path) else FileReader(spec, path)


def read_keyed_schema(spec: ModelSpec, path: str) -> pa.Schema:
    """Return the schema of a file, with the key column from the file's name.

    Raises:
        UserError: a column of the spec is missing, or the file cannot be read.
    """
    return add_key_to_schema(spec, select_reader(spec, path).columns(), path)


def read_spec_schema(spec: ModelSpec, path: str) -> pa.Schema:
    """Check the types of the spec's columns in a file, and return these types.

    Raises:
        UserError: a column is missing or has an unusable type, or the file cannot be read.
    """
    schema = read_keyed_schema(spec, path)
    check_columns(Path(path), schema.names, schema.names)  # payloads contain all columns by name
    refuse_types(spec, schema, path)
    return build_spec_schema(spec, schema)


def cut_file_pieces(spec: ModelSpec, path: str, size: int, start: int, middle: int) -> list[FilePiece]:
    """Return the pieces of a file from a byte position on, in order.

    Args:
        spec: spec of the model.
        path: path of the file.
        size: size of the file in bytes.
        start: byte position from which accepted rows land.
        middle: byte position, at or after `start`, from which rejected rows are also committed.

    Raises:
        UserError: the file cannot be read.
    """
    reader = select_reader(spec, path)
    cut = path.lower().endswith(_CUT_BY_BYTES)

    def sized(found: list[FilePart], end: int, rejected: bool) -> Iterator[FilePiece]:
        for part in found:
            share = (end if part.stop is None else part.stop) - part.start if cut else size // len(found)
            yield FilePiece(part, share, rejected)

    former = reader.pieces(start, middle) if start < middle else []
    return [*sized(former, middle, False), *sized(reader.pieces(middle), size, True)]
