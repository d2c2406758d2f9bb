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
_COLUMN = re.compile(r"\s*`?(\w+)`?\s+(.+?)\s*", re.DOTALL)


def schema_of(columns: str, comments: Mapping[str, str] = MappingProxyType({})) -> Schema:
    """Return Delta's schema of columns.

    Args:
        columns: name and type of each, such as `id string, mean array<double>`.
        comments: of columns, by name.

    Raises:
        KeyError: a column without a type, or with one that no table has.
    """
    fields = []
    for column in _split(columns):
        found = _COLUMN.fullmatch(column)
        if found is None:
            raise KeyError(column)
        name, kind = found.groups()
        about = {"comment": comments[name]} if name in comments else None
        fields.append(Field(name, _type_of(kind), metadata=about))
    return Schema(fields)


def _split(text: str) -> list[str]:
    """Return the parts of a text between commas that stand in no angle brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _type_of(text: str) -> Any:
    if text.startswith("array<"):
        return ArrayType(_type_of(text[6:-1]))
    if text.startswith("map<"):
        key, value = _split(text[4:-1])
        return MapType(_type_of(key.strip()), _type_of(value.strip()))
    return PrimitiveType(_PRIMITIVES[text])
