"""Convert columns of tables from text (`id string, at timestamp`) to the schemas of Delta and Arrow, without Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from deltalake import Field, Schema
from deltalake.schema import ArrayType, MapType, PrimitiveType, StructType

UTC_MICROSECONDS = pa.timestamp("us", "UTC")
"""The type of all times in the tables that are read and in the files that are written."""
_PRIMITIVES = {
    "tinyint": "byte",
    "smallint": "short",
    "int": "integer",
    "bigint": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
}
"""Delta's names of the types in Spark's DDL."""
_PIECE = re.compile(r"`(?:[^`]|``)*`|.", re.DOTALL)
_COLUMN = re.compile(r"\s*(`(?:[^`]|``)+`|[\w.-]+?)(?:\s*:\s*|\s+)(.+?)\s*", re.DOTALL)
_DECIMAL = re.compile(r"decimal\(\d+, ?\d+\)")


def parse_schema(columns: str) -> Schema:
    """Return Delta's schema of columns that are given as text.

    Args:
        columns: name and type of each column in Spark's DDL, such as `id string, mean array<double>`.

    Raises:
        KeyError: a column has a type that no table of this product uses.
    """
    return Schema(_parse_fields(columns))


def parse_arrow_schema(columns: str) -> pa.Schema:
    """Return the Arrow schema of columns that are given as text, as for `parse_schema`."""
    found: Any = parse_schema(columns).to_arrow()
    return pa.schema(found)


def _parse_fields(columns: str) -> list[Field]:
    fields = []
    for one in _split(columns):
        found = _COLUMN.fullmatch(one)
        if found is None:
            raise KeyError(f"{one.strip()} is no column with a type")
        name = found[1] if found[1][0] != "`" else found[1][1:-1].replace("``", "`")
        fields.append(Field(name, _parse_type(found[2])))
    return fields


def _split(text: str) -> Iterator[str]:
    """Split a text at its commas, except commas within brackets or within a quoted name."""
    part, depth = "", 0
    for piece in _PIECE.findall(text):
        depth += (piece in "<(") - (piece in ">)")
        if piece == "," and not depth:
            yield part
            part = ""
        else:
            part += piece
    if part.strip():
        yield part


def _parse_type(text: str) -> Any:
    kind, _, inner = text.strip().removesuffix(">").partition("<")
    if kind == "array":
        return ArrayType(_parse_type(inner))
    if kind == "map":
        key, value = _split(inner)
        return MapType(_parse_type(key), _parse_type(value))
    if kind == "struct":
        return StructType(_parse_fields(inner))
    if _DECIMAL.fullmatch(kind):
        return PrimitiveType(kind.replace(", ", ","))
    if kind not in _PRIMITIVES:
        raise KeyError(f"{text} is no type of a column")
    return PrimitiveType(_PRIMITIVES[kind])
