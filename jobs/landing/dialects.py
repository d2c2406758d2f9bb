"""Find how a CSV file is written: what separates its fields, and if its first line is a header."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa

from jobs.core.redaction import show_name
from jobs.landing.csv_records import BOM, COMMA
from jobs.specs.files import SEPARATORS, Files

ANY = Files()
"""What a spec says that names no dialect."""

BEGINNING = 1 << 16
"""Bytes at a file's beginning by which its dialect is found."""
_RECORDS = 50
_DECIMAL = re.compile(r"[+-]?[0-9]*(?:([.,])([0-9]+))?(?:[eE][+-]?[0-9]+)?")
_NUMBER_OR_TIME = re.compile(r" *[+-]?[.]?[0-9][0-9.,:/ TZ+eE-]*")
NAMES = {COMMA: "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar (|)"}
"""The separators in words."""


class Dialect(NamedTuple):
    """What separates the fields, and the names of the columns if the file has no header."""

    separator: str = COMMA
    names: tuple[str, ...] = ()


def find_dialect(beginning: bytes, columns: Sequence[str] = (), named: Files = ANY) -> Dialect:
    """Return the dialect of a CSV file.

    With columns it is the separator with which the header has them. If the spec names the columns of files without a
    header, it is one with which the records have as many fields. Else it is the separator that cuts the first records
    best (`_best`); a comma where none does.

    Args:
        beginning: bytes of the file.
        columns: that the file must have, as far as they are known.
        named: what the spec says.
    """
    possible = SEPARATORS if named.separator is None else (named.separator,)
    records = {separator: _records(beginning, separator) for separator in possible}
    first = {separator: rows[0] if rows else [] for separator, rows in records.items()}
    if columns:
        for separator in possible:
            if set(columns) <= set(first[separator]):
                return Dialect(separator)
    if named.columns:
        return Dialect(_best(records, len(named.columns)), tuple(named.columns))
    return Dialect(_best(records))


def hint(beginning: bytes, columns: Sequence[str], named: Files = ANY) -> str:
    """Return the likely reason why a file's header lacks columns, with the setting; empty if it is not its dialect."""
    found = find_dialect(beginning, columns, named)
    rows = _records(beginning, found.separator)
    if found.names or not rows:
        return ""
    if remedy := comments_above(beginning):
        return remedy
    if not set(columns) & set(rows[0]) and has_no_header(rows):
        names = ", ".join(columns) if len(columns) == len(rows[0]) else f"{', '.join(columns)}, ..."
        return (
            f"its first line looks like a row ({_shown(found.separator.join(rows[0]))}): if it has no header, name its "
            f"{len(rows[0])} columns in order in the spec, files: {{columns: [{names}]}}"
        )
    if len(rows[0]) == 1:
        by_blanks = re.split(r"\s{1,}", rows[0][0].strip())
        if set(columns) <= set(by_blanks):
            return (
                "its columns are separated by blanks: write it with commas, semicolons or tabs, or rename it to .txt "
                "and add line_pattern to the spec"
            )
        if named.separator is not None:
            return f"with {NAMES[named.separator]} as files.separator its header is one field ({_shown(rows[0][0])})"
    return ""


def comments_above(beginning: bytes) -> str:
    """Return that lines of comments stand above a file's header, and how to take them away; empty if none do."""
    lines = beginning.removeprefix(BOM).split(b"\n")
    count = next((place for place, line in enumerate(lines) if not line.startswith(b"#")), 0)
    fields = [
        [line.count(separator.encode()) for separator in SEPARATORS] for line in lines[count - 1 : count + 1]
    ]
    if not count or any(above == below > 0 for above, below in zip(*fields, strict=True)):
        return ""  # `#time,value` is a header
    stand = "1 line of comments stands" if count == 1 else f"{count} lines of comments stand"
    return f"{stand} above its header, which must be its first line: take them away (tail -n +{count + 1} FILE > NEW)"


def without_header(beginning: bytes) -> Dialect | None:
    """Return the dialect of a file without a header, with names made up for its columns; None if it has a header."""
    found = find_dialect(beginning)
    rows = _records(beginning, found.separator)
    if not has_no_header(rows):
        return None
    return Dialect(found.separator, tuple(f"c{place}" for place in range(1, len(rows[0]) + 1)))


def decimal_of(columns: Sequence[pa.Array]) -> Literal[".", ","]:
    """Return what precedes the fraction of the numbers in columns of text: a comma only where that is sure.

    It is, if a column of numbers has commas, not three digits after each, as between thousands, and none has points.
    """
    comma = False
    for column in columns:
        texts = [text.strip() for text in column.drop_null().unique().to_pylist() if text.strip()]
        numbers = [match for text in texts if (match := _DECIMAL.fullmatch(text))]
        if len(numbers) < 0.9 * len(texts) or not texts:
            continue
        fractions = [match for match in numbers if match[1] is not None]
        if any(match[1] == "." for match in fractions):
            return "."
        comma |= any(len(match[2]) != 3 for match in fractions)
    return "," if comma else "."


def has_no_header(rows: Sequence[Sequence[str]]) -> bool:
    """Tell if the first of some records is a row.

    It is, if it has a number or a time in each field in which the second has one, and in one at least, and every
    text in it is in its column again: the name of a column is not.
    """
    if len(rows) < 2 or len(rows[0]) != len(rows[1]):
        return False
    values = [[_NUMBER_OR_TIME.fullmatch(text) is not None for text in row] for row in rows[:2]]
    named = any(below and not above for above, below in zip(*values, strict=True))
    if named or not any(values[0]):
        return False
    texts = [place for place, is_value in enumerate(values[0]) if not is_value and rows[0][place]]
    return all(any(row[place : place + 1] == [rows[0][place]] for row in rows[1:]) for place in texts)


def _best(records: dict[str, list[list[str]]], fields: int | None = None) -> str:
    """Return the separator that cuts records best, the first of several.

    It cuts them into as many fields each (`fields` of them, if that is known), of which most are numbers or times; then
    into most fields. A comma before fractions cuts as evenly as a semicolon between fields, but not into numbers.
    """

    def merit(separator: str) -> tuple[float, int]:
        rows = records[separator]
        width = len(rows[0]) if rows else 0
        even = [row for row in rows if len(row) == width]
        if width < 2 or len(even) < 0.9 * len(rows) or fields not in (None, width):
            return 0.0, 0
        cells = [text for row in even for text in row if text]
        values = sum(_NUMBER_OR_TIME.fullmatch(text) is not None for text in cells)
        return 1.0 + values / max(len(cells), 1), width

    return max(records, key=merit)


def _records(beginning: bytes, separator: str) -> list[list[str]]:
    """Return the first records, without the last one, which may be cut off; of a single one that one."""
    text = beginning.removeprefix(BOM).decode("utf-8", "backslashreplace")
    found: list[list[str]] = []
    for row in _rows(text, separator):
        found.append(row)
        if len(found) > _RECORDS:
            break
    whole = len(found) > _RECORDS or len(beginning) == BEGINNING
    return found[:-1] if whole and len(found) > 1 else found


def _rows(text: str, separator: str) -> Iterator[list[str]]:
    try:
        yield from (row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row)
    except csv.Error:
        return


def _shown(text: str) -> str:
    return repr(show_name(text))
