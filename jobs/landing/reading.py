"""Read and check the rows of a file, piece by piece, by one reader for each kind of file.

A piece is read by itself, in any process, so that a file gives the same rows however it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from jobs.landing.checking import check_rows, refuse_types
from jobs.landing.csv_parquet import FORMATS, Part, check_columns, parts, read_part, read_schema
from jobs.landing.json_rows import FORMATS as JSON_FORMATS
from jobs.landing.json_rows import check_documents, is_json, json_schema
from jobs.landing.json_rows import parts as json_parts
from jobs.landing.json_rows import read_part as read_json
from jobs.landing.key_from_name import schema_with_key, with_key
from jobs.landing.raw_rows import Source
from jobs.landing.text_lines import FORMATS as TEXT_FORMATS
from jobs.landing.text_lines import is_text, pattern_of, text_schema
from jobs.landing.text_lines import parts as text_parts
from jobs.landing.text_lines import read_part as read_text
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import KeyTypes

ALWAYS_READ = (*FORMATS, *JSON_FORMATS)
"""Endings of the files that can be landed for any model."""

_CUT_BY_BYTES = (".csv", ".json", ".jsonl", ".ndjson", ".txt", ".log")
"""Endings of the files whose pieces are ranges of bytes."""


class Piece(NamedTuple):
    """A part of a file, and about how many bytes of the file it is; rejected: keep the rejected rows, too."""

    part: Part
    size: int
    rejected: bool = True


class FileReader(Protocol):
    """Reads one file: its columns, its pieces in order, and the checked rows of a piece."""

    def columns(self) -> pa.Schema:
        """Return the columns of the file, after checking them against the spec."""
        ...

    def pieces(self, start: int = 0, stop: int | None = None) -> list[Part]:
        """Return the pieces of the file in order; of lines or records those between two places in its bytes."""
        ...

    def read(self, piece: Part, key_types: KeyTypes) -> Iterator[pa.RecordBatch]:
        """Read and check the rows of a piece (`check_rows`)."""
        ...


@dataclass(frozen=True)
class RecordReader:
    """Reads CSV, Parquet or ORC."""

    spec: ModelSpec
    path: str

    def columns(self) -> pa.Schema:
        """Return the columns of the file, each of which it has once."""
        schema = read_schema(Path(self.path), self.spec.file_columns, self.spec.files)
        # Rejected rows are kept with all columns, by name.
        check_columns(Path(self.path), schema.names, schema.names)
        return schema

    def pieces(self, start: int = 0, stop: int | None = None) -> list[Part]:
        """Return ranges of records, row groups or stripes."""
        return parts(Path(self.path), start, stop, self.spec.file_columns, self.spec.files)

    def read(self, piece: Part, key_types: KeyTypes) -> Iterator[pa.RecordBatch]:
        """Read and check the rows of a piece."""
        for source in self._sources(piece):
            written = source._replace(decimal=self.spec.files.decimal)
            yield check_rows(self.spec, with_key(self.spec, written, self.path), key_types, self.path)

    def _sources(self, piece: Part) -> Iterator[Source]:
        return read_part(piece)


class LineReader(RecordReader):
    """Reads lines of text."""

    def columns(self) -> pa.Schema:
        """Return the groups of the spec's expression."""
        return text_schema(self.spec, Path(self.path))

    def pieces(self, start: int = 0, stop: int | None = None) -> list[Part]:
        """Return ranges of lines."""
        return text_parts(Path(self.path), start, stop)

    def _sources(self, piece: Part) -> Iterator[Source]:
        return read_text(pattern_of(self.spec, self.path), piece)


@dataclass(frozen=True)
class DocumentReader:
    """Reads JSON."""

    spec: ModelSpec
    path: str

    def columns(self) -> pa.Schema:
        """Return the spec's columns with the types of the file's first documents."""
        return json_schema(Path(self.path), self.spec)

    def pieces(self, start: int = 0, stop: int | None = None) -> list[Part]:
        """Return ranges of lines, or the whole of an array."""
        return json_parts(Path(self.path), start, stop)

    def read(self, piece: Part, key_types: KeyTypes) -> Iterator[pa.RecordBatch]:
        """Read and check the documents of a piece."""
        for documents in read_json(piece):
            yield check_documents(self.spec, documents, key_types, self.path)


def endings_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the endings of the files that can be landed; those of text where the spec says how to read lines."""
    return (*ALWAYS_READ, *(() if spec.line_pattern is None else TEXT_FORMATS))


def reader_of(spec: ModelSpec, path: str) -> FileReader:
    """Return the reader of a file, or of a folder that Spark wrote as one file, by its ending."""
    if is_json(path):
        return DocumentReader(spec, path)
    return LineReader(spec, path) if is_text(path) else RecordReader(spec, path)


def file_schema(spec: ModelSpec, path: str) -> pa.Schema:
    """Return a file's schema after checking it against the spec.

    Raises:
        UserError: a column is missing or has an unusable type, or the file cannot be read.
    """
    schema = schema_with_key(spec, reader_of(spec, path).columns(), path)
    refuse_types(spec, schema, path)
    return schema


def pieces_of(spec: ModelSpec, path: str, size: int, start: int, middle: int) -> list[Piece]:
    """Return the pieces of a file from a place in its bytes on, in order.

    Args:
        spec: the model.
        path: of the file.
        size: bytes of the file.
        start: of the accepted rows that land.
        middle: of the rejected rows that are kept, at `start` or behind it.

    Raises:
        UserError: the file cannot be read.
    """
    reader = reader_of(spec, path)
    cut = path.lower().endswith(_CUT_BY_BYTES)

    def sized(found: list[Part], end: int, rejected: bool) -> Iterator[Piece]:
        for part in found:
            share = (end if part.stop is None else part.stop) - part.start if cut else size // len(found)
            yield Piece(part, share, rejected)

    former = reader.pieces(start, middle) if start < middle else []
    return [*sized(former, middle, False), *sized(reader.pieces(middle), size, True)]
