"""Read the rows of a file, a folder or a glob without Spark, for all commands that read files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.core.errors import UserError
from jobs.core.input_files import find_files, is_several_files, parse_path
from jobs.core.report import format_count
from jobs.landing.csv_parquet import FORMATS, list_whole_parts, read_dialect, read_part, read_schema
from jobs.landing.csv_records import COMMA, PLAIN
from jobs.landing.dialects import ANY, NAMES, describe_header
from jobs.landing.file_parts import check_columns, is_csv
from jobs.landing.json_rows import (
    SCHEMA_DOCUMENTS,
    is_json,
    is_number,
    is_whole,
    parse_object,
    read_json_documents,
    read_objects,
)
from jobs.landing.json_rows import list_json_parts as json_parts
from jobs.landing.json_rows import read_part as read_documents
from jobs.landing.raw_rows import RawRows, join_parts, take_columns, write_as_texts
from jobs.landing.reading import ALWAYS_READ, list_endings, read_keyed_schema, select_reader
from jobs.landing.wide_files import describe_wide
from jobs.specs.files import Files
from jobs.specs.model_spec import ModelSpec


def list_input_files(input: str, endings: Sequence[str] = FORMATS) -> list[Path]:
    """Return the files of an input, which is a file, a folder or a glob; a single file need not exist.

    Raises:
        UserError: a folder or a glob has no file with these endings, or the input is not a path.
    """
    if is_several_files(input, endings):
        return [Path(one) for one in find_files([input], endings)]
    return [parse_path(input)]


def read_rows(spec: ModelSpec, input: str) -> RawRows:
    """Read the columns of a spec from all files of an input, in order; the result has the spec's column names.

    Raises:
        UserError: a file cannot be read, lacks a column, or has a column of another type than earlier files, or no file
            has a row.
    """
    found = {path: read_first_rows(spec, path) for path in list_input_files(input, list_endings(spec))}
    paths = [path for path, source in found.items() if source.rows]
    if not paths:
        raise UserError(f"{input}: has no rows; give a file with rows below its header")
    sources = _unify_types([found[path] for path in paths], list(map(is_json, paths)))
    names = list(sources[0].columns)
    for path, source in zip(paths, sources, strict=True):
        check_types(path, [sources[0], source], names)
    return take_columns(spec, sources[0] if len(sources) == 1 else join_parts(sources, names))


def read_first_rows(spec: ModelSpec, path: Path, most: float = math.inf) -> RawRows:
    """Read about `most` first rows of a file, with the columns of a spec; the result has the file's column names.

    Raises:
        UserError: the file cannot be read, or lacks a column.
    """
    read_keyed_schema(spec, str(path))
    reader = select_reader(spec, str(path))
    sources = (one for part in reader.list_whole() for one in reader.sources(part, spec.file_columns))
    found = take_rows(sources, most)
    named = [] if spec.key_from_name is None else [spec.key_from_name]
    return found[0] if len(found) == 1 else join_parts(found, [*spec.file_columns, *named])


def take_rows(sources: Iterable[RawRows], most: float) -> list[RawRows]:
    """Return the first batches that together have at least `most` rows, or all batches if they have fewer rows."""
    found: list[RawRows] = []
    rows = 0
    for source in sources:
        found.append(source)
        rows += source.rows
        if rows >= most:
            break
    return found


def _unify_types(sources: list[RawRows], are_json: list[bool]) -> list[RawRows]:
    """Return sources with JSON numbers converted to texts in the columns whose types differ between the sources."""
    kinds = [{name: column.type for name, column in source.columns.items()} for source in sources]
    differ = {name for one in kinds for name, kind in one.items() if kind != kinds[0].get(name, kind)}
    return [
        source._replace(
            columns={
                name: write_as_texts(column, source.decimal) if name in differ else column
                for name, column in source.columns.items()
            }
        )
        if of_json
        else source
        for source, of_json in zip(sources, are_json, strict=True)
    ]


def read_all(input: str, columns: Sequence[str] | None, named: Files = ANY) -> RawRows:
    """Read columns from all files of an input, in order, without the spec of a model.

    Args:
        input: file, folder or glob.
        columns: names of the columns. None means all columns.
        named: settings for the dialect of CSV files.

    Raises:
        UserError: a file cannot be read, lacks a column, or has a column of another type than earlier files.
    """
    sources: list[RawRows] = []
    for path in list_input_files(input, ALWAYS_READ):
        schema = read_columns_schema(path, columns or (), named)
        names = list(schema.names if columns is None else columns)
        source = join_parts(list(read_columns(path, schema, names, named)), names)
        problems = [one for one in source.reasons() if one is not None] if is_json(path) else []
        if problems:
            raise UserError(
                f"{path}: {format_count(len(problems), 'row')}: {problems[0]}; write one object on each line"
            )
        sources.append(source._replace(decimal=named.decimal))
        if columns is None:
            check_columns(path, list(source.columns), list(sources[0].columns))
        check_types(path, sources, list(sources[0].columns))
    return sources[0] if len(sources) == 1 else join_parts(sources, list(sources[0].columns))


def check_types(path: Path, sources: Sequence[RawRows], columns: Sequence[str]) -> None:
    """Check that the last source, which was read from `path`, has the same column types as the first source.

    Raises:
        UserError: a column has another type.
    """
    for name in columns:
        first, last = (source.columns[name].type for source in (sources[0], sources[-1]))
        if first != last:
            raise UserError(
                f"{path}: column '{name}' holds {last}, and {first} in the files before it; give them one type"
            )


def describe_dialects(spec: ModelSpec, paths: Sequence[str | Path]) -> list[str]:
    """Return a description of each unusual dialect among CSV files; an empty list if no dialect is unusual."""
    words = (
        describe_dialect(path, spec.files, spec.file_columns) for path in map(Path, paths) if is_csv(path)
    )
    found = Counter("; ".join(one) for one in words if one)
    return [f"read {format_count(count, 'file')}: {said}" for said, count in sorted(found.items())]


def describe_dialect(path: Path, files: Files, columns: Sequence[str] = ()) -> list[str]:
    """Return descriptions of the unusual features in the format of a file.

    Args:
        path: path of the file.
        files: settings of the spec for files.
        columns: columns of the file, used to find the dialect of a CSV file.
    """
    dialect = read_dialect(path, columns, files) if is_csv(path) else PLAIN
    words = [f"fields separated by {NAMES[dialect.separator]}"] if dialect.separator != COMMA else []
    words += describe_header(dialect)
    words += ["a comma before fractions"] if files.decimal == "," else []
    words += [f"{files.thousands!r} between thousands"] if files.thousands is not None else []
    words += [f"negative numbers by {files.negative}"] if files.negative != "minus" else []
    words += [f"{name} in {unit}" for name, unit in files.units.items()]
    words += [f"{word} is {number:g}" for word, number in files.words.items()]
    words += [f"no header: columns are called {', '.join(files.columns)}"] if files.columns else []
    return words + ([] if files.wide is None else [describe_wide(files.wide)])


def read_columns_schema(path: Path, columns: Sequence[str], named: Files = ANY) -> pa.Schema:
    """Check that a file has the named columns, and return the schema of the file, without the spec of a model.

    Args:
        path: path of the file.
        columns: names of the columns that the file must have.
        named: known settings for the dialect of CSV files.

    Raises:
        UserError: the file cannot be read, or lacks a column.
    """
    if not is_json(path):
        return read_schema(path, columns, named)
    schema = infer_member_schema(path)
    check_columns(path, schema.names, columns)
    return schema


def infer_member_schema(path: Path) -> pa.Schema:
    """Return the schema inferred from the first JSON objects of a file; nested members are named `outer.inner`.

    Raises:
        UserError: the file cannot be read, or has no object.
    """
    rows = [
        _flatten_members(parse_object(document)[0])
        for document in read_json_documents(path, SCHEMA_DOCUMENTS)
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        raise UserError(f"{path}: has no JSON object with members; give a file with an object on each line")
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return pa.schema([(name, _infer_kind(some)) for name, some in values.items()])


def read_columns(path: Path, schema: pa.Schema, names: list[str], named: Files) -> Iterator[RawRows]:
    """Yield the named columns of a file in batches of rows, without the spec of a model.

    Args:
        path: path of the file.
        schema: schema of the file; members of JSON objects get its types.
        names: names of the columns.
        named: settings for the dialect of CSV files.

    Raises:
        UserError: the file cannot be read, or lacks a column.
    """
    if not is_json(path):
        for part in list_whole_parts(path, names, named):
            yield from read_part(part, names)
        return
    for part in json_parts(path):
        for some in read_documents(part):
            exact = [name for name in names if schema.field(name).type == pa.int64()]
            found = read_objects(some, names, [], exact, named.decimal)
            alike = {
                name: _cast_column(column, schema.field(name).type) for name, column in found.columns.items()
            }
            yield found._replace(columns=alike)


def _flatten_members(row: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Return the members of an object; nested members are named `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= (
            _flatten_members(value, f"{outer}{name}.")
            if isinstance(value, dict)
            else {f"{outer}{name}": value}
        )
    return found


def _infer_kind(values: list[Any]) -> pa.DataType:
    """Return the type of a member, which is a type of numbers if all values are numbers, else the type of texts."""
    if not values or not all(map(is_number, values)):
        return pa.string()
    return pa.int64() if all(map(is_whole, values)) else pa.float64()


def _cast_column(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column in a type, or as texts if a value does not have this type."""
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        return column.cast(pa.string())
