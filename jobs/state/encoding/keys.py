"""Keys: their text, their 64-bit identity, and the groups of records with the same key.

The identity of a single integer key column is its value. Any other key is identified by two independent 64-bit hashes
of its text. Among 10^9 keys, two keys probably share the first hash, but no two keys share both hashes, so no keys are
merged. The texts are passed along with the records, and the state stores each text once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.state.encoding.packets import PacketColumn, Records
from jobs.state.encoding.routing import compute_identities, compute_routes
from jobs.state.encoding.row_order import find_starts

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType, StructType

ROUTE = PacketColumn("route", "<u8")
CHECK = PacketColumn("check", "<i8")
KEY_CHECK_SEED = 0x6B616C6D
ONLY = "[]"
"""The text of the only key of a model without key columns: a JSON array of no values."""
ALL_ROWS = "all rows"
"""The readable form of `ONLY`."""
_INTEGERS = ("tinyint", "smallint", "int", "bigint")


class KeyKind(NamedTuple):
    """The key columns of a model: their names, their Spark types as DDL, and whether the key is one integer.

    A model without key columns has a single key, whose text is `ONLY`.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    integer: bool

    @property
    def identity_columns(self) -> tuple[PacketColumn, ...]:
        """Return the packet columns of a key's identity."""
        return (ROUTE,) if self.integer else (ROUTE, CHECK)

    @property
    def is_plain_key(self) -> bool:
        """Return whether the only key column is called `key`; this column then replaces a table's text column `key`."""
        return len(self.columns) == 1 and self.columns[0].casefold() == "key"


def build_key_kind(columns: list[str], schema: StructType) -> KeyKind:
    """Return the kind of keys that have these columns of a table."""
    types = tuple(schema[name].dataType.simpleString() for name in columns)
    return KeyKind(tuple(columns), types, len(columns) == 1 and is_integer(schema[columns[0]].dataType))


def select_sub_kind(kind: KeyKind, columns: tuple[str, ...]) -> KeyKind:
    """Return the kind of keys that have only these columns of the given kind."""
    types = tuple(kind.types[kind.columns.index(name)] for name in columns)
    return KeyKind(columns, types, len(columns) == 1 and types[0] in _INTEGERS)


def is_integer(data_type: DataType) -> bool:
    """Return whether values of `data_type` are integers of at most 64 bits."""
    return data_type.simpleString() in _INTEGERS


def build_key_text(kind: KeyKind) -> SparkColumn:
    """Return the expression of a key's text: the value of a single column, or a JSON array of several values."""
    if not kind.columns:
        return F.lit(ONLY)
    parts = [F.col(_quote_name(name)).cast("string") for name in kind.columns]
    return parts[0] if len(parts) == 1 else F.to_json(F.array(*parts))


def format_key(text: str) -> str:
    """Return the readable form of a key's text."""
    return ALL_ROWS if text == ONLY else text


def build_key_columns(kind: KeyKind, text: SparkColumn) -> list[SparkColumn]:
    """Return expressions that parse a key's text into the typed key columns."""
    if len(kind.columns) <= 1:
        return [text.cast(one).alias(name) for name, one in zip(kind.columns, kind.types, strict=True)]
    values = F.from_json(text, "array<string>")
    named = zip(kind.columns, kind.types, strict=True)
    return [values[i].cast(type_).alias(name) for i, (name, type_) in enumerate(named)]


def build_identity_columns(kind: KeyKind, text: SparkColumn) -> list[SparkColumn]:
    """Return the columns `identity` (64 bits) and, unless the key is an integer, `check` and `text`."""
    if kind.integer:
        return [text.cast("bigint").alias("identity")]
    return [
        F.xxhash64(text).alias("identity"),
        F.xxhash64(F.lit(KEY_CHECK_SEED), text).alias("check"),
        text.alias("text"),
    ]


def build_identity_arrays(columns: dict[str, NDArray]) -> dict[str, NDArray]:
    """Return the identity arrays of a packet, given the columns of `build_identity_columns` as arrays."""
    arrays = {"route": compute_routes(columns["identity"])}
    if "check" in columns:
        arrays["check"] = columns["check"]
    return arrays


def build_key_array(records: Records) -> pa.Array:
    """Return the keys (N,) of records with identities, as integers or texts."""
    if records.text is not None:
        return records.text
    return pa.array(compute_identities(np.ascontiguousarray(records.arrays["route"])))


class Grouped(NamedTuple):
    """N records, sorted by their K keys.

    order: (N,) permutation that sorts the records. code: (N,) number of the key of each sorted record, from 0. first:
    (K,) position of the first record of each key among the sorted records.
    """

    order: NDArray[np.int64]
    code: NDArray[np.int64]
    first: NDArray[np.int64]


def group(records: Records, order_by: Callable[[NDArray], NDArray[np.int64]] | None = None) -> Grouped:
    """Order records by the routes of their keys, and number the keys.

    Args:
        records: records with identities.
        order_by: function from the key number (N,) of each record to the permutation (N,) that sorts the records by
            key number and then by other values. By default the records of a key keep their order.
    """
    route, check = records.arrays["route"], records.arrays.get("check")
    sort = order_by or (lambda code: np.argsort(code, kind="stable"))
    order = sort(route)
    starts = find_starts(route[order])
    if check is not None:
        both = find_starts(route[order], check[order])
        if np.count_nonzero(both) != np.count_nonzero(starts):  # two keys share a route
            by_both = np.lexsort((check, route))
            code = np.empty(len(route), np.int64)
            code[by_both] = np.cumsum(find_starts(route[by_both], check[by_both]))
            order = sort(code)
            both = find_starts(route[order], check[order])
        starts = both
    return Grouped(order, np.cumsum(starts) - 1, np.flatnonzero(starts))


def match(known: Records, keys: Records) -> NDArray[np.int64]:
    """Return the position (K,) of each key among the known records, or -1; both arguments are ordered by route."""
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
        ):  # about one key in 10^9 shares its route with another key
            last = np.searchsorted(known_route, route[i], "right")
            same = np.flatnonzero(known_check[at[i] : last] == check[i])
            found[i] = at[i] + same[0] if len(same) else -1
    return found


def _quote_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
