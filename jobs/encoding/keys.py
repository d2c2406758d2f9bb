"""Tell keys apart: their text, their 64-bit identity, and which records belong to the same key.

A model with one integer key column uses that number itself. Any other key is known by the 64-bit hash of its text,
together with a second, independent hash: of a thousand million keys two will probably share the first, and none of
them both, so no two keys are ever merged. The texts travel with the records and live once a key in the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.encoding.packets import Column, Records
from jobs.encoding.routing import identity_of, route_of

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType, StructType

ROUTE = Column("route", "<u8")
CHECK = Column("check", "<i8")
_CHECK_SEED = 0x6B616C6D
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


class KeyKind(NamedTuple):
    """How a model's keys are known: column names, their Spark types as DDL, and if the key is one integer."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    integer: bool

    @property
    def identity_columns(self) -> tuple[Column, ...]:
        """Return the packet columns that hold a key's identity."""
        return (ROUTE,) if self.integer else (ROUTE, CHECK)

    @property
    def is_plain_key(self) -> bool:
        """Tell if the only key column is called `key`: a table's text column `key` then stands for it."""
        return len(self.columns) == 1 and self.columns[0].casefold() == "key"


def key_kind(columns: list[str], schema: StructType) -> KeyKind:
    """Read off a table's schema how the keys in its `columns` are known."""
    types = tuple(schema[name].dataType.simpleString() for name in columns)
    return KeyKind(tuple(columns), types, len(columns) == 1 and is_integer(schema[columns[0]].dataType))


def sub_kind(kind: KeyKind, columns: tuple[str, ...]) -> KeyKind:
    """Return how the values of some of a key's columns are known."""
    types = tuple(kind.types[kind.columns.index(name)] for name in columns)
    return KeyKind(columns, types, len(columns) == 1 and types[0] in _INTEGERS)


def is_integer(data_type: DataType) -> bool:
    """Tell if values of `data_type` are whole numbers of at most 64 bits."""
    return data_type.simpleString() in _INTEGERS


def text_of(kind: KeyKind) -> SparkColumn:
    """Return the expression of a key's text: the value itself, or a JSON array of the values of several columns."""
    parts = [F.col(_quoted(name)).cast("string") for name in kind.columns]
    return parts[0] if len(parts) == 1 else F.to_json(F.array(*parts))


def columns_of(kind: KeyKind, text: SparkColumn) -> list[SparkColumn]:
    """Return the expressions of the typed key columns, from the key's text."""
    if len(kind.columns) == 1:
        return [text.cast(kind.types[0]).alias(kind.columns[0])]
    values = F.from_json(text, "array<string>")
    named = zip(kind.columns, kind.types, strict=True)
    return [values[i].cast(type_).alias(name) for i, (name, type_) in enumerate(named)]


def identity_expressions(kind: KeyKind, text: SparkColumn) -> list[SparkColumn]:
    """Return the columns `identity` (64 bits) and, unless the key is an integer, `check` and `text`."""
    if kind.integer:
        return [text.cast("bigint").alias("identity")]
    return [
        F.xxhash64(text).alias("identity"),
        F.xxhash64(F.lit(_CHECK_SEED), text).alias("check"),
        text.alias("text"),
    ]


def identity_arrays(columns: dict[str, NDArray]) -> dict[str, NDArray]:
    """Return the packet's identity arrays from the arrays that `identity_expressions` gave."""
    arrays = {"route": route_of(columns["identity"])}
    if "check" in columns:
        arrays["check"] = columns["check"]
    return arrays


def integer_keys(route: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the integer keys that have these routes."""
    return identity_of(route)


class Grouped(NamedTuple):
    """Records put in the order of their keys.

    order: (N,) takes the records into that order; code: (N,) number of each ordered record's key, from 0 upwards;
    first: (K,) position, in that order, of the first record of each key.
    """

    order: NDArray[np.int64]
    code: NDArray[np.int64]
    first: NDArray[np.int64]


def group(records: Records, order_by: Callable[[NDArray], NDArray[np.int64]] | None = None) -> Grouped:
    """Bring the records of each key together, keys in the order of their routes, and number the keys.

    Args:
        records: with their identities.
        order_by: gives the permutation that sorts the records by key number, (N,), and whatever else; by default
            records of a key keep their order.
    """
    route, check = records.arrays["route"], records.arrays.get("check")
    sort = order_by or (lambda code: np.argsort(code, kind="stable"))
    order = sort(route)
    starts = _starts(route[order], None)
    if check is not None:
        both = _starts(route[order], check[order])
        if np.count_nonzero(both) != np.count_nonzero(starts):  # two keys share a route: tell them apart
            by_both = np.lexsort((check, route))
            code = np.empty(len(route), np.int64)
            code[by_both] = np.cumsum(_starts(route[by_both], check[by_both]))
            order = sort(code)
            both = _starts(route[order], check[order])
        starts = both
    return Grouped(order, np.cumsum(starts) - 1, np.flatnonzero(starts))


def _starts(route: NDArray[np.uint64], check: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """Mark where a new key begins in ordered records."""
    starts = np.ones(len(route), bool)
    starts[1:] = route[1:] != route[:-1]
    if check is not None:
        starts[1:] |= check[1:] != check[:-1]
    return starts


def match(known: Records, keys: Records) -> NDArray[np.int64]:
    """Find keys among known ones: (K,) the position of each, or -1. Both are ordered by route."""
    known_route, route = known.arrays["route"], keys.arrays["route"]
    if len(known_route) == 0:
        return np.full(len(route), -1)
    at = np.searchsorted(known_route, route)
    inside = np.minimum(at, len(known_route) - 1)
    found = np.where(known_route[inside] == route, inside, -1)
    if "check" in known.arrays:
        known_check, check = known.arrays["check"], keys.arrays["check"]
        for i in np.flatnonzero(
            (found >= 0) & (known_check[found] != check)
        ):  # shared routes: about one in 10^9
            last = np.searchsorted(known_route, route[i], "right")
            same = np.flatnonzero(known_check[at[i] : last] == check[i])
            found[i] = at[i] + same[0] if len(same) else -1
    return found


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
