"""Read the rows of a file, a folder or a glob for a model's spec, for every verb that takes files. No Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from jobs.core.errors import UserError
from jobs.core.input_files import find_files, names_several, path_of
from jobs.core.report import plural
from jobs.landing import csv_parquet, json_rows, text_lines
from jobs.landing.csv_parquet import Part, check_columns, check_format, found_dialect
from jobs.landing.csv_records import COMMA
from jobs.landing.dialects import ANY, NAMES
from jobs.landing.json_rows import document_rows, is_json, json_schema
from jobs.landing.key_from_name import schema_with_key, with_key
from jobs.landing.raw_rows import Source, joined
from jobs.landing.text_lines import is_text, pattern_of, text_schema
from jobs.specs.files import Files
from jobs.specs.model_spec import ModelSpec

ALWAYS_READ = (*csv_parquet.FORMATS, *json_rows.FORMATS)
"""Endings of the files that can be read for any model."""


def endings_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the endings of the files that can be read; those of text where the spec says how to read lines."""
    return (*ALWAYS_READ, *(() if spec.line_pattern is None else text_lines.FORMATS))


def files_of(input: str, endings: Sequence[str] = csv_parquet.FORMATS) -> list[Path]:
    """Return the files that an input names: a file, a folder or a glob. A single name is not looked for yet.

    Raises:
        UserError: it is a folder or a glob without a file of the endings, or no path.
    """
    if names_several(input, endings):
        return [Path(one) for one in find_files([input], endings)]
    return [path_of(input)]


def schema_of(spec: ModelSpec, path: Path) -> pa.Schema:
    """Return the names and types of a file's columns, with the key from its name.

    Raises:
        UserError: the file cannot be read, or lacks a column that the spec names.
    """
    if is_json(path):
        schema = json_schema(path, spec)
    elif is_text(path):
        schema = text_schema(spec, path)
    else:
        schema = csv_parquet.read_schema(path, spec.file_columns, spec.files)
    return schema_with_key(spec, schema, path)


def parts_of(spec: ModelSpec, path: Path, start: int = 0, stop: int | None = None) -> list[Part]:
    """Return the parts of a file, or of a folder of files, in order; of lines or records those between two places.

    Raises:
        UserError: the file cannot be read.
    """
    if is_json(path):
        return json_rows.parts(path, start, stop)
    if is_text(path):
        return text_lines.parts(path, start, stop)
    return csv_parquet.parts(path, start, stop, spec.file_columns, spec.files)


def rows_of_part(
    spec: ModelSpec, part: Part, file: str | Path, columns: Sequence[str] | None = None
) -> Iterator[Source]:
    """Read the named columns, or all, of a part of a file, in some batches of unchecked rows.

    Of JSON objects the spec's columns are read. Rows have the key from the name of `file`, where the spec has one.

    Raises:
        UserError: the file cannot be read, or lacks a column.
    """
    if is_json(part.path):
        found = (document_rows(spec, some) for some in json_rows.read_part(part))
    elif is_text(part.path):
        found = text_lines.read_part(pattern_of(spec, file), part, columns)
    else:
        found = csv_parquet.read_part(part, columns)
    for source in found:
        yield with_key(spec, source._replace(decimal=spec.files.decimal), file)


def read_rows(spec: ModelSpec, input: str) -> Source:
    """Read the columns that a spec names from all files of an input, one file after the other.

    Raises:
        UserError: a file cannot be read, lacks a column, or has a column of another type than the files before it;
            there is no row.
    """
    found = {path: _all_rows(spec, path) for path in files_of(input, endings_of(spec))}
    paths = [path for path, source in found.items() if source.rows]
    if not paths:
        raise UserError(f"{input}: has no rows; give a file with rows below its header")
    sources = _written_alike([found[path] for path in paths], list(map(is_json, paths)))
    for path, source in zip(paths, sources, strict=True):
        check_types(path, [sources[0], source], spec.columns)
    return sources[0] if len(sources) == 1 else joined(sources, spec.columns)


def _all_rows(spec: ModelSpec, path: Path) -> Source:
    """Return the columns that a spec names of all rows of a file."""
    if not (is_json(path) or is_text(path)):
        check_format(path)
    schema_of(spec, path)
    parts = parts_of(spec, path)
    found = [source for part in parts for source in rows_of_part(spec, part, path, spec.file_columns)]
    if is_json(path):
        found = _written_alike(found, [True] * len(found))
    return found[0] if len(found) == 1 else joined(found, spec.columns)


def _written_alike(sources: list[Source], are_json: list[bool]) -> list[Source]:
    """Return rows with texts in the place of JSON numbers, in columns of which some have other types."""
    kinds = [{name: column.type for name, column in source.columns.items()} for source in sources]
    differ = {name for one in kinds for name, kind in one.items() if kind != kinds[0].get(name, kind)}
    return [
        source._replace(
            columns={
                name: column.cast(pa.string()) if name in differ else column
                for name, column in source.columns.items()
            }
        )
        if of_json
        else source
        for source, of_json in zip(sources, are_json, strict=True)
    ]


def read_all(input: str, columns: Sequence[str] | None, named: Files = ANY) -> Source:
    """Read the named columns, or all, of all files of an input that is no model's, one file after the other.

    named: what the spec says of the dialect of CSV files.

    Raises:
        UserError: a file cannot be read, lacks a column, or has a column of another type than the files before it.
    """
    sources: list[Source] = []
    for path in files_of(input):
        source = csv_parquet.read(path, columns, named)
        sources.append(source._replace(decimal=named.decimal))
        if columns is None:
            check_columns(path, list(source.columns), list(sources[0].columns))
        check_types(path, sources, list(sources[0].columns))
    return sources[0] if len(sources) == 1 else joined(sources, list(sources[0].columns))


def check_types(path: Path, sources: Sequence[Source], columns: Sequence[str]) -> None:
    """Check that the columns of the last of some sources, which is of the file `path`, have the types of the first.

    Raises:
        UserError: a column has another type.
    """
    for name in columns:
        first, last = (source.columns[name].type for source in (sources[0], sources[-1]))
        if first != last:
            raise UserError(
                f"{path}: column '{name}' holds {last}, and {first} in the files before it; give them one type"
            )


def dialects(spec: ModelSpec, paths: Sequence[str | Path]) -> list[str]:
    """Return in words how CSV files are written that are not written as most are: no line where all of them are."""
    found: Counter[str] = Counter()
    for path in map(Path, paths):
        if path.name.lower().endswith((".csv", ".csv.gz")):
            dialect = found_dialect(path, spec.file_columns, spec.files)
            words = [f"fields separated by {NAMES[dialect.separator]}"] if dialect.separator != COMMA else []
            words += [f"no header, columns {', '.join(dialect.names)}"] if dialect.names else []
            words += ["a comma before fractions"] if spec.files.decimal == "," else []
            if words:
                found["; ".join(words)] += 1
    return [f"read {plural(count, 'file')}: {words}" for words, count in sorted(found.items())]
