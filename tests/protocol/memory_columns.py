"""Stand-in for `pyspark.sql.functions`: expressions that are evaluated on one row, a dictionary.

Only what the modules that decide use. Null behaves as in SQL: a comparison with null is null, and `AND`, `OR`, `NOT`
have three values. `UNKNOWN` is for Delta's test of conflicts, which knows a row's partition and nothing else.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.errors import PySparkException

from tests.protocol import world

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "UNKNOWN"})()


class Column:
    """An expression; `fold` is set for an aggregate, which takes all rows of a group."""

    def __init__(
        self,
        value: Callable[[Mapping[str, Any]], Any],
        name: str = "expression",
        fold: Callable[[Sequence[Mapping[str, Any]]], Any] | None = None,
        descending: bool = False,
        fields: tuple[str, ...] = (),
    ) -> None:
        self.value, self.name, self.fold, self.descending = value, name, fold, descending
        self.fields = fields
        """Of a struct."""

    def alias(self, name: str) -> Column:
        return Column(self.value, name, self.fold, fields=self.fields)

    def cast(self, kind: Any) -> Column:
        to = {"string": _text, "bigint": _whole, "int": _whole, "double": _number, "boolean": _boolean}
        change = to.get(kind if isinstance(kind, str) else kind.simpleString(), lambda value: value)
        return _map(change, self).alias(self.name)

    def try_cast(self, kind: str) -> Column:
        def attempt(row: Mapping[str, Any]) -> Any:
            try:
                return self.cast(kind).value(row)
            except ValueError:
                return None

        return Column(attempt, self.name)

    def isin(self, *values: Any) -> Column:
        wanted = values[0] if len(values) == 1 and isinstance(values[0], (list, tuple, set)) else values
        return _map(lambda value: value in wanted, self)

    def startswith(self, text: str | Column) -> Column:
        return _map(lambda value, start: value.startswith(start), self, _column(text))

    def contains(self, text: str | Column) -> Column:
        return _map(lambda value, part: part in value, self, _column(text))

    def isNull(self) -> Column:
        return Column(lambda row: _unless_unknown(self.value(row), lambda value: value is None))

    def isNotNull(self) -> Column:
        return Column(lambda row: _unless_unknown(self.value(row), lambda value: value is not None))

    def desc(self) -> Column:
        return Column(self.value, self.name, descending=True)

    def getItem(self, place: Any) -> Column:
        return self[place]

    def __getitem__(self, place: Any) -> Column:
        return _map(lambda value: _member(value, place), self)

    def __eq__(self, other: object) -> Column:  # type: ignore[override]
        return _map(operator.eq, self, _column(other))

    def __ne__(self, other: object) -> Column:  # type: ignore[override]
        return _map(operator.ne, self, _column(other))

    def __lt__(self, other: Any) -> Column:
        return _map(operator.lt, self, _column(other))

    def __le__(self, other: Any) -> Column:
        return _map(operator.le, self, _column(other))

    def __gt__(self, other: Any) -> Column:
        return _map(operator.gt, self, _column(other))

    def __ge__(self, other: Any) -> Column:
        return _map(operator.ge, self, _column(other))

    def __add__(self, other: Any) -> Column:
        return _map(operator.add, self, _column(other))

    def __sub__(self, other: Any) -> Column:
        return _map(operator.sub, self, _column(other))

    def __and__(self, other: Any) -> Column:
        right = _column(other)
        return Column(lambda row: _and(self.value(row), right.value(row)))

    def __or__(self, other: Any) -> Column:
        right = _column(other)
        return Column(lambda row: _not(_and(_not(self.value(row)), _not(right.value(row)))))

    def __invert__(self) -> Column:
        return Column(lambda row: _not(self.value(row)))

    __hash__ = None  # type: ignore[assignment]


def _and(left: Any, right: Any) -> Any:
    if left is False or right is False:
        return False
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    return None if left is None or right is None else bool(left and right)


def _not(value: Any) -> Any:
    return value if value is None or value is UNKNOWN else not value


def _unless_unknown(value: Any, test: Callable[[Any], bool]) -> Any:
    return UNKNOWN if value is UNKNOWN else test(value)


def _map(function: Callable[..., Any], *columns: Column) -> Column:
    """Apply a function to values; null if one of them is null, unknown if one is unknown."""

    def value(row: Mapping[str, Any]) -> Any:
        values = [column.value(row) for column in columns]
        if any(one is UNKNOWN for one in values):
            return UNKNOWN
        return None if any(one is None for one in values) else function(*values)

    return Column(value)


def _column(value: Any) -> Column:
    return value if isinstance(value, Column) else Column(lambda row: value)


def column_of(value: str | Column) -> Column:
    """Return a column given by its name or as an expression."""
    return value if isinstance(value, Column) else col(value)


def _member(value: Any, name: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    return value[name] if 0 <= name < len(value) else None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(value: Any) -> int:
    return _micros(value) // 1_000_000 if isinstance(value, datetime) else int(value)


def _number(value: Any) -> float:
    return float(value)


def _boolean(value: Any) -> bool:
    return value == "true" if isinstance(value, str) else bool(value)


def _micros(at: datetime) -> int:
    aware = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return (aware - EPOCH) // timedelta(microseconds=1)


def lookup(row: Mapping[str, Any], name: str) -> Any:
    """Return a column's value by a name that may be qualified (`t.status`) or nested (`row.at`)."""
    if name in row:
        return row[name]
    first, _, rest = name.partition(".")
    if rest and first in row:
        inside = row[first]
        return inside if inside is None or inside is UNKNOWN else lookup(inside, rest)
    if UNKNOWN in row.values():
        return UNKNOWN
    raise KeyError(f"no column {name} among {', '.join(row)}")


def col(name: str) -> Column:
    plain = name.replace("`", "")
    return Column(lambda row: lookup(row, plain), plain.rpartition(".")[2])


def lit(value: Any) -> Column:
    return value if isinstance(value, Column) else Column(lambda row: value, str(value))


def current_timestamp() -> Column:
    return Column(lambda row: world.current().clock.now(), "current_timestamp()")


def desc(name: str) -> Column:
    return col(name).desc()


def coalesce(*columns: str | Column) -> Column:
    def value(row: Mapping[str, Any]) -> Any:
        return next((one for one in (column_of(c).value(row) for c in columns) if one is not None), None)

    return Column(value)


def concat(*columns: Column) -> Column:
    return _map(lambda *parts: "".join(parts), *columns)


def concat_ws(separator: str, *columns: Column) -> Column:
    return Column(lambda row: separator.join(str(c.value(row)) for c in columns if c.value(row) is not None))


def split(column: str | Column, pattern: str) -> Column:
    return _map(lambda text: re.split(pattern, text), column_of(column))


def get(column: str | Column, place: int) -> Column:
    return column_of(column)[place]


def length(column: str | Column) -> Column:
    return _map(len, column_of(column))


def unix_micros(column: str | Column) -> Column:
    return _map(_micros, column_of(column))


def timestamp_micros(column: str | Column) -> Column:
    return _map(lambda micros: EPOCH + timedelta(microseconds=micros), column_of(column))


def from_json(column: str | Column, schema: str) -> Column:
    return _map(json.loads, column_of(column))


def get_json_object(column: str | Column, path: str) -> Column:
    def find(text: str) -> Any:
        value = json.loads(text)
        for name in path.removeprefix("$.").split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value if value is None or isinstance(value, str) else json.dumps(value)

    return _map(find, column_of(column))


def raise_error(message: str | Column) -> Column:
    def fail(row: Mapping[str, Any]) -> Any:
        raise PySparkException(f"[USER_RAISED_EXCEPTION] {_column(message).value(row)}")

    return Column(fail)


def struct(*columns: str | Column) -> Column:
    parts = [column_of(one) for one in columns]
    return Column(
        lambda row: {part.name: part.value(row) for part in parts}, fields=tuple(part.name for part in parts)
    )


class _When(Column):
    """`CASE WHEN ... THEN ... ELSE`."""

    def __init__(self, cases: list[tuple[Column, Column]], last: Column) -> None:
        def value(row: Mapping[str, Any]) -> Any:
            return next((then for test, then in cases if test.value(row) is True), last).value(row)

        super().__init__(value)
        self._cases = cases

    def when(self, test: Column, then: Any) -> _When:
        return _When([*self._cases, (test, _column(then))], lit(None))

    def otherwise(self, last: Any) -> Column:
        return _When(self._cases, _column(last))


def when(test: Column, then: Any) -> _When:
    return _When([(test, _column(then))], lit(None))


def _folding(name: str, column: str | Column, fold: Callable[[Sequence[Any]], Any]) -> Column:
    def of(rows: Sequence[Mapping[str, Any]]) -> Any:
        if isinstance(column, str) and column == "*":
            return fold(rows)
        values = [column_of(column).value(row) for row in rows]
        return fold([one for one in values if one is not None])

    return Column(lambda row: None, name, of, fields=getattr(column, "fields", ()))


def _order(value: Any) -> Any:
    """Return what a value is ordered by: a struct by its fields in turn."""
    return tuple(value.values()) if isinstance(value, dict) else value


def count(column: str | Column) -> Column:
    return _folding("count", column, len)


def max(column: str | Column) -> Column:  # noqa: A001 (Spark's name)
    return _folding("max", column, lambda values: None if not values else sorted(values, key=_order)[-1])


def min(column: str | Column) -> Column:  # noqa: A001 (Spark's name)
    return _folding("min", column, lambda values: None if not values else sorted(values, key=_order)[0])


def sum(column: str | Column) -> Column:  # noqa: A001 (Spark's name)
    return _folding("sum", column, lambda values: functools.reduce(operator.add, values) if values else None)


_NAME = r"(?:\w+|`[^`]+`)"
_TOKEN = re.compile(rf"\s*('(?:[^']|'')*'|{_NAME}(?:\.{_NAME})*|<=|>=|<>|!=|[=<>()|,-])")


def expr(text: str) -> Column:
    """Parse a condition: names, texts, numbers, `= < > IS [NOT] NULL, LIKE, IN, AND, OR, NOT`, and `uuid()`."""
    tokens = _TOKEN.findall(text)
    parsed, rest = _or(tokens)
    assert not rest, f"cannot parse {text!r} after {tokens[: len(tokens) - len(rest)]}"
    return parsed.alias(text)


def _or(tokens: list[str]) -> tuple[Column, list[str]]:
    left, tokens = _conjunction(tokens)
    while tokens and tokens[0].upper() == "OR":
        right, tokens = _conjunction(tokens[1:])
        left = left | right
    return left, tokens


def _conjunction(tokens: list[str]) -> tuple[Column, list[str]]:
    left, tokens = _test(tokens)
    while tokens and tokens[0].upper() == "AND":
        right, tokens = _test(tokens[1:])
        left = left & right
    return left, tokens


_COMPARE = {"=": operator.eq, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


def _test(tokens: list[str]) -> tuple[Column, list[str]]:
    if tokens[0].upper() == "NOT":
        inner, rest = _test(tokens[1:])
        return ~inner, rest
    left, rest = _operand(tokens)
    following = rest[0].upper() if rest else ""
    if following in _COMPARE:
        right, rest = _operand(rest[1:])
        return _map(_COMPARE[following], left, right), rest
    if following in ("<>", "!="):
        right, rest = _operand(rest[1:])
        return _map(operator.ne, left, right), rest
    if following == "IS":
        if rest[1].upper() == "NOT":
            return left.isNotNull(), rest[3:]
        return left.isNull(), rest[2:]
    if following == "LIKE":
        pattern = re.escape(rest[1][1:-1]).replace("%", ".*")
        return _map(lambda value: re.fullmatch(pattern, value) is not None, left), rest[2:]
    return left, rest


def _operand(tokens: list[str]) -> tuple[Column, list[str]]:
    first = tokens[0]
    if first == "(":
        inner, rest = _or(tokens[1:])
        assert rest[0] == ")"
        return inner, rest[1:]
    if first.lower() == "uuid" and tokens[1:3] == ["(", ")"]:
        return Column(lambda row: world.current().new_id()), tokens[3:]
    if first.startswith("'"):
        return lit(first[1:-1].replace("''", "'")), tokens[1:]
    if first.lstrip("-").isdigit():
        return lit(int(first)), tokens[1:]
    if first.lower() in ("true", "false"):
        return lit(first.lower() == "true"), tokens[1:]
    return col(first), tokens[1:]
