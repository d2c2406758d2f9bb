"""Find how a CSV file is written: what separates its fields, and if its first line is a header."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jobs.ingestion.csv_records import BOM, COMMA
from jobs.specs.files import SEPARATORS, Files

ANY = Files()
"""What a spec says that names no dialect."""

BEGINNING = 1 << 16
"""Bytes at a file's beginning by which its dialect is found."""
_RECORDS = 50
_NUMBER_OR_TIME = re.compile(r"\s*[+-]?[.]?[0-9][0-9.,:/\sTZ+eE-]*")
NAMES = {COMMA: "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar (|)"}
"""The separators in words."""


class Dialect(NamedTuple):
    """What separates the fields, and the names of the columns if the file has no header."""

    separator: str = COMMA
    names: tuple[str, ...] = ()


def find_dialect(beginning: bytes, columns: Sequence[str] = (), named: Files = ANY) -> Dialect:
    """Return the dialect of a CSV file.

    With columns it is the separator with which the header has them. If the spec names the columns of files without a
    header, it is the one with which the first record has as many fields. Else it is the separator that cuts the first
    records into most fields, as many in each; a comma where none does.

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
        fitting = [one for one in possible if len(first[one]) == len(named.columns)]
        return Dialect(fitting[0] if fitting else _best(records), tuple(named.columns))
    return Dialect(_best(records))


def hint(beginning: bytes, columns: Sequence[str], named: Files = ANY) -> str:
    """Return the likely reason why a file's header lacks columns, with the setting; empty if it is not its dialect."""
    found = find_dialect(beginning, columns, named)
    rows = _records(beginning, found.separator)
    if found.names or not rows:
        return ""
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


def without_header(beginning: bytes) -> Dialect | None:
    """Return the dialect of a file without a header, with names made up for its columns; None if it has a header."""
    found = find_dialect(beginning)
    rows = _records(beginning, found.separator)
    if not has_no_header(rows):
        return None
    return Dialect(found.separator, tuple(f"c{place}" for place in range(1, len(rows[0]) + 1)))


def has_no_header(rows: Sequence[Sequence[str]]) -> bool:
    """Tell if the first of some records is a row as the second is: a number or time in the same fields, and in one."""
    if len(rows) < 2 or len(rows[0]) != len(rows[1]):
        return False
    kinds = [[_NUMBER_OR_TIME.fullmatch(text) is not None for text in row] for row in rows[:2]]
    named = any(below and not above for above, below in zip(*kinds, strict=True))
    return any(kinds[0]) and not named


def _best(records: dict[str, list[list[str]]]) -> str:
    """Return the separator that cuts records into most fields, as many in each; the first of several."""

    def fields(separator: str) -> int:
        rows = records[separator]
        even = sum(len(row) == len(rows[0]) for row in rows) if rows else 0
        return len(rows[0]) if rows and len(rows[0]) > 1 and even >= 0.9 * len(rows) else 0

    return max(records, key=fields)


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


def _shown(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else text[: most - 3] + "...")
