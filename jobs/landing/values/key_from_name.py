"""Add the key column whose value is the file's name (`key_from_name` of a spec): one file per key."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from jobs.core.errors import UserError
from jobs.landing.raw_rows import RawRows
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow


def parse_name(path: str | Path) -> str:
    """Return a file's name without folder and ending, also without a double ending such as `.csv.gz`.

    Raises:
        UserError: no name is left.
    """
    name = Path(path).name
    bare = Path(name[:-3] if name.lower().endswith(".gz") else name).stem
    if not bare or bare.startswith("."):
        raise UserError(f"{path}: has no name before its ending, so that it names no key; rename it")
    return bare


def add_key(spec: ModelSpec, source: RawRows, path: str | Path) -> RawRows:
    """Return a file's rows with the key from its name, if the spec has `key_from_name`."""
    name = spec.key_from_name
    if name is None:
        return source
    return source._replace(
        columns={**source.columns, name: arrow.build_texts([parse_name(path)] * source.rows)}
    )


def add_key_to_document(spec: ModelSpec, document: str, path: str | Path) -> str:
    """Return the text of a JSON object with the key from the file's name added; any other text unchanged."""
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
    """Return a file's schema with the key from its name, if the spec has `key_from_name`.

    Raises:
        UserError: the file already has a column of that name.
    """
    name = spec.key_from_name
    if name is None:
        return schema
    if name in schema.names:
        raise UserError(
            f"{path}: has a column '{name}' itself, and the spec of {spec.name} says key_from_name: {name}; remove "
            "that line, or rename the column"
        )
    parse_name(path)  # raises here, before anything is read
    return schema.append(pa.field(name, pa.string()))


def build_salt(spec: ModelSpec, path: str | Path) -> bytes:
    """Return the bytes to hash before a file's content: its name if that is a key, as two keys may have equal rows."""
    return b"" if spec.key_from_name is None else f"{parse_name(path)}\0".encode()
