"""Stand-in for Spark's data frames: lists of dictionaries, evaluated at once.

A frame of a table holds the rows of the version that was the latest when it was made, as a frame of Delta does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.protocol.memory_columns import Column, column_of, expr

_PLAIN: dict[str, DataType] = {
    "string": StringType(),
    "bigint": LongType(),
    "int": IntegerType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "timestamp": TimestampType(),
}


def parse_type(text: str) -> DataType:
    """Parse the type of a column, such as `map<string, array<double>>`."""
    text = text.strip()
    if text.startswith("array<"):
        return ArrayType(parse_type(text[6:-1]))
    if text.startswith("map<"):
        key, value = text[4:-1].split(",", 1)
        return MapType(parse_type(key), parse_type(value))
    return _PLAIN[text]


def parse_schema(text: str) -> StructType:
    """Parse columns, such as `key string, mean array<double>`, as `StructType.fromDDL` does in the JVM."""
    fields, depth, part = [], 0, ""
    for letter in text + ",":
        depth += (letter == "<") - (letter == ">")
        if letter != "," or depth:
            part += letter
            continue
        name, kind = part.strip().replace(":", " ", 1).split(None, 1)
        fields.append(StructField(name.strip("`"), parse_type(kind)))
        part = ""
    return StructType(fields)


class Frame:
    """Rows with a schema."""

    def __init__(self, session: Any, rows: Iterable[Mapping[str, Any]], schema: StructType) -> None:
        self.sparkSession, self.rows, self.schema = session, [dict(row) for row in rows], schema

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def _of(self, rows: Iterable[Mapping[str, Any]], schema: StructType | None = None) -> Frame:
        return Frame(self.sparkSession, rows, schema or self.schema)

    def filter(self, condition: Column | str) -> Frame:
        test = expr(condition) if isinstance(condition, str) else condition
        return self._of(row for row in self.rows if test.value(row) is True)

    where = filter

    def select(self, *columns: Any) -> Frame:
        wanted = (
            list(columns[0]) if len(columns) == 1 and isinstance(columns[0], (list, tuple)) else list(columns)
        )
        parts: list[Column] = []
        for one in wanted:
            if isinstance(one, str) and one == "*":
                parts += [column_of(name) for name in self.columns]
            elif isinstance(one, str) and one.endswith(".*"):
                inside: Any = self.schema[one[:-2]].dataType
                parts += [column_of(f"{one[:-2]}.{name}") for name in inside.names]
            else:
                parts.append(column_of(one))
        kinds = {field.name: field.dataType for field in self.schema.fields}
        schema = StructType([StructField(one.name, _kind(one, kinds)) for one in parts])
        return self._of(({one.name: one.value(row) for one in parts} for row in self.rows), schema)

    def withColumns(self, columns: Mapping[str, Column]) -> Frame:
        names = [*self.columns, *(name for name in columns if name not in self.columns)]
        kinds = {field.name: field.dataType for field in self.schema.fields}
        schema = StructType([StructField(name, kinds.get(name, StringType())) for name in names])
        return self._of(
            ({**row, **{name: one.value(row) for name, one in columns.items()}} for row in self.rows), schema
        )

    def withColumn(self, name: str, column: Column) -> Frame:
        return self.withColumns({name: column})

    def drop(self, *names: str) -> Frame:
        return self.select(*(name for name in self.columns if name not in names))

    def dropna(self, subset: list[str]) -> Frame:
        return self._of(row for row in self.rows if all(row[name] is not None for name in subset))

    def distinct(self) -> Frame:
        return self.dropDuplicates(self.columns)

    def dropDuplicates(self, subset: list[str]) -> Frame:
        seen: dict[str, Mapping[str, Any]] = {}
        for row in self.rows:
            seen.setdefault(repr([row[name] for name in subset]), row)
        return self._of(seen.values())

    def limit(self, number: int) -> Frame:
        return self._of(self.rows[:number])

    def orderBy(self, *columns: str | Column) -> Frame:
        rows = list(self.rows)
        for one in reversed([column_of(c) for c in columns]):
            rows.sort(
                key=lambda row, one=one: (one.value(row) is not None, one.value(row)), reverse=one.descending
            )
        return self._of(rows)

    sort = orderBy

    def unionByName(self, other: Frame) -> Frame:
        return self._of([*self.rows, *other.rows])

    def join(self, other: Frame, on: str | list[str], how: str = "inner") -> Frame:
        names = [on] if isinstance(on, str) else on
        have: dict[str, list[dict[str, Any]]] = {}
        for row in other.rows:
            have.setdefault(repr([row[name] for name in names]), []).append(row)
        matches = [(row, have.get(repr([row[name] for name in names]), [])) for row in self.rows]
        if how in ("left_anti", "left_semi"):
            return self._of(row for row, found in matches if bool(found) == (how == "left_semi"))
        fields = [*self.schema.fields, *(f for f in other.schema.fields if f.name not in self.columns)]
        none = {field.name: None for field in fields}
        lone: list[dict[str, Any]] = [] if how == "inner" else [{}]
        both = [{**none, **more, **row} for row, found in matches for more in found or lone]
        if how == "full_outer":
            mine = {repr([row[name] for name in names]) for row in self.rows}
            alone = [row for row in other.rows if repr([row[name] for name in names]) not in mine]
            both += [{**none, **row} for row in alone]
        else:
            assert how in ("inner", "left"), how
        return self._of(both, StructType(fields))

    def withColumnRenamed(self, name: str, to: str) -> Frame:
        return self.select(*(column_of(one).alias(to if one == name else one) for one in self.columns))

    def groupBy(self, *columns: str | Column) -> Groups:
        parts = [column_of(one) for one in columns]
        return Groups(self.withColumns({one.name: one for one in parts}), [one.name for one in parts])

    def agg(self, *columns: Column) -> Frame:
        return Groups(self, []).agg(*columns)

    def mapInArrow(self, function: Callable[..., Any], schema: Any) -> Frame:
        """Call a function with one batch; one of the simulation's own takes and gives rows."""
        if getattr(function, "of_rows", False):
            return self._of(function(self.rows), self.schema)
        wanted = parse_schema(schema) if isinstance(schema, str) else schema
        if not self.rows:
            return self._of([], wanted)
        batch = pa.RecordBatch.from_pylist(self.rows)
        batches: Iterator[pa.RecordBatch] = function(iter([batch]))
        return self._of((row for one in batches for row in one.to_pylist()), wanted)

    def collect(self) -> list[Row]:
        return [Row(*self.columns)(*(row[name] for name in self.columns)) for row in self.rows]

    def first(self) -> Row | None:
        return next(iter(self.collect()), None)

    def toArrow(self) -> pa.Table:
        return pa.table({name: [row[name] for row in self.rows] for name in self.columns})

    def count(self) -> int:
        return len(self.rows)

    def isEmpty(self) -> bool:
        return not self.rows

    def alias(self, name: str) -> Frame:
        return self

    def persist(self) -> Frame:
        return self

    unpersist = persist

    def coalesce(self, parts: int) -> Frame:
        return self

    repartition = coalesce


def _kind(column: Column, known: Mapping[str, DataType]) -> DataType:
    """Return a column's type, as far as it matters: of a struct its fields, else that of the former column."""
    if column.fields:
        return StructType([StructField(name, StringType()) for name in column.fields])
    return known.get(column.name, LongType() if column.fold else StringType())


class Groups:
    """Rows grouped by columns."""

    def __init__(self, frame: Frame, names: list[str]) -> None:
        self.frame, self.names = frame, names

    def agg(self, *columns: Column) -> Frame:
        groups: dict[str, list[dict[str, Any]]] = {} if self.names else {"": []}
        for row in self.frame.rows:
            groups.setdefault(repr([row[name] for name in self.names]) if self.names else "", []).append(row)
        kinds = {field.name: field for field in self.frame.schema.fields}
        schema = StructType(
            [
                *(kinds[name] for name in self.names),
                *(StructField(one.name, _kind(one, {})) for one in columns),
            ]
        )
        found = [
            {
                **{name: rows[0][name] for name in self.names},
                **{one.name: one.fold(rows) for one in columns if one.fold is not None},
            }
            for rows in groups.values()
        ]
        return Frame(self.frame.sparkSession, found, schema)

    def count(self) -> Frame:
        return self.agg(Column(lambda row: None, "count", len))
