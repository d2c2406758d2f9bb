"""Map the columns of files, messages and tables to the columns of a spec, and add the key from a file's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from jobs.core.errors import UserError
from jobs.landing.raw_rows import RawRows
from jobs.landing.values.times import combine_times
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow


def take_columns(spec: ModelSpec, source: RawRows, names: Sequence[str] | None = None) -> RawRows:
    """Return unparsed rows with only the columns of the spec, under the names in the spec.

    A column of the spec that the rows lack is omitted. The key from the file's name already has the name in the spec.

    Args:
        spec: spec of the model.
        source: N rows with the column names of the files.
        names: names of the spec's columns to return. None means all columns of the spec.
    """
    if not spec.files.names:
        return source
    columns: dict[str, pa.Array] = {}
    for name in spec.columns if names is None else names:
        given = name if name == spec.key_from_name else spec.files.names.get(name, name)
        if isinstance(given, str):
            if given in source.columns:
                columns[name] = source.columns[given]
            continue
        parts = spec.time_parts
        if all(column in source.columns for column in parts.values()):
            found = {part: source.columns[column] for part, column in parts.items()}
            columns[name] = combine_times(found, parts, spec.time_format)
    before = source.before
    if before is None:
        return source._replace(columns=columns)
    earlier = lambda: (take_columns(spec, part, names) for part in before())  # noqa: E731
    return source._replace(columns=columns, before=earlier)


def build_spec_schema(spec: ModelSpec, schema: pa.Schema) -> pa.Schema:
    """Return the types of a file's columns under the names in the spec, without a time that has several columns."""
    if not spec.files.names:
        return schema
    names = {name: spec.list_file_columns([name])[0] for name in spec.columns if name != spec.key_from_name}
    if spec.time_parts:
        del names[spec.time]
    if spec.key_from_name is not None:
        names[spec.key_from_name] = spec.key_from_name
    return pa.schema([(name, schema.field(column).type) for name, column in names.items()])


def parse_name(path: str | Path) -> str:
    """Return a file's name without its folder and its ending; a double ending such as `.csv.gz` is also removed.

    Raises:
        UserError: the file has no name before its ending.
    """
    name = Path(path).name
    bare = Path(name[:-3] if name.lower().endswith(".gz") else name).stem
    if not bare or bare.startswith("."):
        raise UserError(f"{path}: has no name before its ending, so that it names no key; rename it")
    return bare


def add_key(spec: ModelSpec, source: RawRows, path: str | Path) -> RawRows:
    """Return the rows of a file with the key column from the file's name, if the spec has `key_from_name`."""
    name = spec.key_from_name
    if name is None:
        return source
    return source._replace(
        columns={**source.columns, name: arrow.build_texts([parse_name(path)] * source.rows)}
    )


def add_key_to_document(spec: ModelSpec, document: str, path: str | Path) -> str:
    """Return the text of a JSON object with the key from the file's name added; return any other text unchanged."""
    name = spec.key_from_name
    if name is None:
        return document
    try:
        row = json.loads(document)
    except (ValueError, RecursionError):
        return document
    return (
        json.dumps({**row, name: parse_name(path)}, ensure_ascii=False) if isinstance(row, dict) else document
    )


def add_key_to_schema(spec: ModelSpec, schema: pa.Schema, path: str | Path) -> pa.Schema:
    """Return the schema of a file with the key column from the file's name, if the spec has `key_from_name`.

    Raises:
        UserError: the file already has a column with the name of the key column.
    """
    name = spec.key_from_name
    if name is None:
        return schema
    if name in schema.names:
        raise UserError(
            f"{path}: has a column '{name}' itself, and the spec of {spec.name} says key_from_name: {name}; remove "
            "that line, or rename the column"
        )
    parse_name(path)  # an invalid name raises an error here, before any row is read
    return schema.append(pa.field(name, pa.string()))


def build_salt(spec: ModelSpec, path: str | Path) -> bytes:
    """Return the bytes that are hashed before the content of a file.

    If the file's name is the key, the bytes are the name, because files of two keys may have the same content.
    """
    return b"" if spec.key_from_name is None else f"{parse_name(path)}\0".encode()
