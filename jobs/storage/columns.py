"""Columns of tables as text (`id string, at timestamp`), and as Delta's schema, without Spark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from deltalake import Field, Schema
from deltalake.schema import ArrayType, MapType, PrimitiveType

_PRIMITIVES = {
    "string": "string",
    "int": "integer",
    "bigint": "long",
    "double": "double",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamp",
}
"""Delta's names of Spark's types."""
_COLUMN = re.compile(r"\s*`?(\w+)`?\s+([\w<>, ]+?)\s*(?:,(?![^<]*>)|$)")


def schema_of(columns: str, comments: Mapping[str, str] = MappingProxyType({})) -> Schema:
    """Return Delta's schema of columns.

    Args:
        columns: name and type of each, such as `id string, mean array<double>`.
        comments: of columns, by name.

    Raises:
        KeyError: a type that no table has.
    """
    fields = []
    for name, kind in _COLUMN.findall(columns.strip()):
        about = {"comment": comments[name]} if name in comments else None
        fields.append(Field(name, _type_of(kind), metadata=about))
    return Schema(fields)


def _type_of(text: str) -> Any:
    if text.startswith("array<"):
        return ArrayType(_type_of(text[6:-1]))
    if text.startswith("map<"):
        key, _, value = text[4:-1].partition(",")
        return MapType(_type_of(key.strip()), _type_of(value.strip()))
    return PrimitiveType(_PRIMITIVES[text])
