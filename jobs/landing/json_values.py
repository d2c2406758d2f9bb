"""Cut JSON files without one object per line into rows: arrays, objects over several lines, and envelopes of rows.

The reader decodes one value after another, so that memory contains only one value and one block. An envelope, which is
an object around all rows, is read as a whole.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from jobs.core.errors import UserError
from jobs.landing.csv_records import BOM

BEGINNING = 1 << 16
"""Number of bytes at the beginning of a file that are inspected to find out whether each line is a row."""
BLOCK = 1 << 20
LONGEST_VALUE = 64 << 20
"""Maximum number of characters of a row or an envelope."""
_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_NAMES, _CELLS = ("columns", "fields", "header"), ("data", "values", "rows", "index")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}(-[0-9]{2}([T ][0-9:.,+Zz-]+)?)?|-?[0-9]{9,19}")
"""Pattern of a member name that is a time, in ISO 8601 or as a count since 1970."""
_UNFINISHED = re.compile(
    r"-?|[.]|[eE][+-]?|t(ru?)?|f(a|als?)?|n(ul?)?|Na?|-?I[nfit]*|\\?u[0-9a-fA-F]{0,4}", re.ASCII
)
"""Pattern of what stands between the place of a fault and the end of a file that ends within a value."""
_CUT = "the file was cut off while it was written: copy it again"
_NOT_UTF8 = (
    "it is probably Windows-1252 or Latin-1; convert it with `iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`"
)
"""Remedies."""
_TABLE = re.compile(r":\s*\[\s*\[")
FEWEST_MEMBERS = 3
"""Minimum number of members of an object whose member names are times or row numbers."""


def spans_lines(beginning: bytes) -> bool:
    """Return whether a file has another form than one object per line, judged from the beginning of the file.

    Other forms are an array, objects over several lines, several objects on a line, and an envelope.
    """
    text = beginning.removeprefix(BOM).decode("utf-8", "replace").lstrip(" \t\r\n")
    if not text.startswith("{"):
        return text.startswith("[")
    line, _, rest = text.partition("\n")
    try:
        value, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        return error.pos > len(line) or not rest and len(beginning) >= BEGINNING
    except RecursionError:
        return False
    if end > len(line) or line[end:].strip(" \t\r").startswith(("{", ",")):
        return True
    return (
        not rest.strip()
        and len(beginning) < BEGINNING
        and (
            any(isinstance(one, dict | list) for one in value.values()) or find_named_rows(value) is not None
        )
    )


def read_row_texts(file: BufferedIOBase, path: Path, columns: Sequence[str]) -> Iterator[str]:
    """Yield the rows of a file for which `spans_lines` is true, each as the text of a JSON value.

    Args:
        file: stream of uncompressed bytes, at the beginning of the file.
        path: path of the file, used in messages.
        columns: column names of a row; empty if unknown.

    Raises:
        UserError: the file is not JSON, a value is too long, or the rows have no names.
        ValueError: a row is not an array of as many values as there are columns.
    """
    values = _Values(file, path)
    first = values.following()
    if first is None:
        return
    second = values.following()
    found = json.loads(first)
    if isinstance(found, list):
        if not all(isinstance(name, str) for name in found):
            raise UserError(f"{path}: its rows are arrays without names; write one object on each line")
        while second is not None:
            yield json.dumps(_name_cells(found, json.loads(second)), ensure_ascii=False)
            second = values.following()
        return
    if second is None and not values.is_array and isinstance(found, dict):
        rows = find_rows(found, columns)
        for row in [found] if rows is None else rows:
            yield from _split_samples(json.dumps(row, ensure_ascii=False))
        return
    yield from _split_samples(first)
    while second is not None:
        yield from _split_samples(second)
        second = values.following()


def find_rows(envelope: dict[str, Any], columns: Sequence[str] = ()) -> list[Any] | None:
    """Return the rows inside an envelope; None if the object is itself a row, or no rows are found.

    The rows have one of these forms: the only array of objects; an array of arrays beside an array of column names; an
    object with an array of equal length for each column; an object whose member names are times or row numbers; an
    object of columns that each have times or row numbers as member names.
    """
    if columns and not any(isinstance(envelope.get(name, []), dict | list) for name in columns):
        return None
    objects = list(_walk_objects(envelope))
    for one in objects:
        names = next((one[name] for name in _NAMES if _is_list_of(str, one.get(name))), None)
        cells = next((one[name] for name in _CELLS if _is_list_of(list, one.get(name))), None)
        if names and cells:
            return [_name_cells(names, row) for row in cells]
    found = [value for one in objects for value in one.values() if _is_list_of(dict, value)]
    if len(found) == 1:
        within = find_rows(found[0][0]) if len(found[0]) == 1 and not _has_scalars(found[0][0]) else None
        return found[0] if within is None else within
    tables = [table for one in objects if (table := _find_parallel(one))]
    if not found and len(tables) == 1:
        names = list(tables[0])
        return [dict(zip(names, row, strict=True)) for row in zip(*tables[0].values(), strict=True)]
    if found or tables:
        return None
    timed = [one for one in objects if any(map(_TIME.fullmatch, one))]
    return find_named_rows(envelope) or (find_named_rows(timed[0]) if len(timed) == 1 else None)


def find_named_rows(value: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the rows of an object whose member names are times or row numbers; None for any other object.

    The forms are {time: value, ...}, {time: {column: value, ...}, ...} and {column: {time: value, ...}, ...}. pandas
    writes the last form, and for a table without an index it writes row numbers from 0 in place of the times.
    """
    members = list(value.values())
    if value and all(isinstance(one, dict) for one in members):
        rows = value if _are_keys(value) else _transpose_columns(value)
        if rows is None or any(_is_nested(cell) for row in rows.values() for cell in row.values()):
            return None
        return [{**({"time": key} if _TIME.fullmatch(key) else {}), **row} for key, row in rows.items()]
    is_series = len(value) >= FEWEST_MEMBERS and all(map(_TIME.fullmatch, value))
    if is_series and not any(map(_is_nested, members)):
        return [{"time": key, "value": one} for key, one in value.items()]
    return None


def _transpose_columns(columns: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]] | None:
    """Return the rows of a table from its columns; None if the columns differ in their keys or the keys are invalid.

    The keys of a column must be times or row numbers.
    """
    keys = next(iter(columns.values())).keys()
    if not _are_keys(keys) or any(one.keys() != keys for one in columns.values()):
        return None
    return {key: {name: one[key] for name, one in columns.items()} for key in keys}


def _are_keys(names: Collection[str]) -> bool:
    """Return whether at least `FEWEST_MEMBERS` names are given and all are times, or are row numbers from 0."""
    if len(names) < FEWEST_MEMBERS:
        return False
    return all(map(_TIME.fullmatch, names)) or [*names] == [str(place) for place in range(len(names))]


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def _split_samples(text: str) -> Iterator[str]:
    """Yield a row for each sample of a Prometheus or Graphite series; yield any other row unchanged.

    A series has one array of pairs. A pair is (value, time) if the name of the array is `datapoints`, else
    (time, value).
    """
    row = json.loads(text) if _TABLE.search(text) else None
    pairs = [name for name, one in row.items() if _are_pairs(one)] if isinstance(row, dict) else []
    if row is None or len(pairs) != 1 or {"time", "value"} & row.keys():
        yield text
        return
    names = ("value", "time") if pairs == ["datapoints"] else ("time", "value")
    others = {name: one for name, one in row.items() if name not in pairs}
    for pair in row[pairs[0]]:
        yield json.dumps({**others, **dict(zip(names, pair, strict=True))}, ensure_ascii=False)


def _are_pairs(value: Any) -> bool:
    return _is_list_of(list, value) and all(len(one) == 2 and not any(map(_is_nested, one)) for one in value)


def describe_members(value: dict[str, Any]) -> str:
    """Return the names and types of an object's members in words, for an error message."""
    words = []
    for name, member in list(value.items())[:8]:
        kind = {dict: "an object", list: "an array", str: "text", bool: "a truth value"}.get(
            type(member), "a number"
        )
        words.append(f"{name[:40]} ({kind})")
    return ", ".join(words) + (", ..." if len(value) > 8 else "")


class _Values:
    """Iterator over the values of a file, which are the elements of its array or its top-level values.

    line, column: position of the first character of `text` in the file, from 1.
    count: number of values before the next one.
    """

    def __init__(self, file: BufferedIOBase, path: Path) -> None:
        self.file, self.path = file, path
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.place, self.ended = "", 0, False
        self.line = self.column = 1
        self.is_array = self._mark() == "["
        self.place += self.is_array
        self.count, self.is_open = 0, True
        self.kind = "element" if self.is_array else "value"

    def following(self) -> str | None:
        """Return the text of the next value; None after the last value."""
        mark = self._mark()
        if self.is_array and mark == "]" and self.is_open:
            self.place += 1
            self.is_open = False
            if mark := self._mark():
                raise self._build_fault("there is more after the end of the array")
        if not mark:
            if self.is_array and self.is_open:
                raise self._build_cut_fault()
            return None
        if mark == "," and self.count:
            self.place += 1
            self._check_after_comma()
        elif self.is_array and self.count:
            raise self._build_fault(f"a comma is missing before element {self.count + 1:,}")
        text = self._parse_value()
        self.count += 1
        return text

    def _check_after_comma(self) -> None:
        mark = self._mark()
        if mark == ",":
            raise self._build_fault("two commas follow each other")
        if not mark and self.is_array:
            raise self._build_cut_fault()
        if not mark or mark == "]" and self.is_array:
            raise self._build_fault(f"a comma stands after the last {self.kind}")

    def _parse_value(self) -> str:
        size = BLOCK
        while True:
            try:
                _, end = _DECODER.raw_decode(self.text, self.place)
                if end < len(self.text) or self.ended:
                    text, self.place = self.text[self.place : end], end
                    return text
            except json.JSONDecodeError as error:
                if self.ended:
                    raise self._explain_value(error) from None
            if len(self.text) - self.place > LONGEST_VALUE:
                raise UserError(
                    f"{self.path}: has a value of more than {LONGEST_VALUE:,} characters, which is read at once; write "
                    "one object on each line"
                )
            self._read_more(size)
            size *= 2

    def _explain_value(self, error: json.JSONDecodeError) -> UserError:
        """Return the error for a value that is not JSON: the file ends within it, or it has a fault."""
        number = f"{self.kind} {self.count + 1:,}"
        if error.msg.startswith("Unterminated") or _UNFINISHED.fullmatch(self.text[error.pos :].strip()):
            self.place = len(self.text)
            whole = "array" if self.is_array else "file"
            return self._build_fault(f"the {whole} ends within {number}", _CUT)
        self.place = error.pos
        return self._build_fault(f"in {number}: {error.msg[:1].lower()}{error.msg[1:].removesuffix(' at')}")

    def _build_cut_fault(self) -> UserError:
        state = f"ends after element {self.count:,}, without a ]" if self.count else "is empty and has no ]"
        return self._build_fault(f"the array {state}", _CUT)

    def _build_fault(self, problem: str, remedy: str | None = None) -> UserError:
        """Return an error with the line and character of the present place."""
        line, column = self._locate()
        if remedy is None:
            is_inside = self.is_array and self.is_open
            remedy = (
                "mend it at that place"
                if is_inside
                else "write one object on each line, or one array of them"
            )
        return UserError(
            f"{self.path}: is not JSON: line {line:,}, character {column:,}: {problem}; {remedy}"
        )

    def _locate(self) -> tuple[int, int]:
        """Return the line and the character of the present place, from 1."""
        before = self.text[: self.place]
        _, is_later, last = before.rpartition("\n")
        return self.line + before.count("\n"), len(last) + (1 if is_later else self.column)

    def _mark(self) -> str:
        """Return the next character that is not a blank, without reading past it; an empty text at the end."""
        while True:
            self.place = _BLANK.match(self.text, self.place).end()  # type: ignore[union-attr]
            if self.place < len(self.text) or self.ended:
                return self.text[self.place : self.place + 1]
            self._read_more(BLOCK)

    def _read_more(self, size: int) -> None:
        block = self.file.read(size)
        self.ended = not block
        self.line, self.column = self._locate()
        self.text, self.place = self.text[self.place :], 0
        try:
            self.text += self.decoder.decode(block, self.ended)
        except UnicodeDecodeError as error:
            if not self.ended:
                self.text += error.object[: error.start].decode("utf-8-sig")
                self.place = len(self.text)
                raise self._build_fault("the text is not UTF-8", _NOT_UTF8) from None
            self.text += "\ufffd"  # the file ends within a character


def _walk_objects(value: dict[str, Any], depth: int = 3) -> Iterator[dict[str, Any]]:
    yield value
    for member in value.values() if depth else ():
        if isinstance(member, dict):
            yield from _walk_objects(member, depth - 1)
        elif isinstance(member, list) and len(member) == 1 and isinstance(member[0], dict):
            yield from _walk_objects(member[0], depth - 1)


def _is_list_of(kind: type, value: Any) -> bool:
    """Return whether a value is an array that is not empty and has elements of one kind."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, kind) for one in value)


def _has_scalars(value: dict[str, Any]) -> bool:
    return sum(not isinstance(one, dict | list) for one in value.values()) > 1


def _find_parallel(value: dict[str, Any]) -> dict[str, list[Any]] | None:
    """Return the members that are arrays, if there are at least two and all have the same length; else None."""
    arrays = {name: one for name, one in value.items() if isinstance(one, list) and one}
    flat = all(not isinstance(cell, dict | list) for one in arrays.values() for cell in one)
    return arrays if len(arrays) > 1 and flat and len({len(one) for one in arrays.values()}) == 1 else None


def _name_cells(names: list[str], row: list[Any]) -> dict[str, Any]:
    """Return the cells of a row by column name."""
    if not isinstance(row, list) or len(row) != len(names):
        raise ValueError(f"a row is no array of {len(names):,} values, as many as there are columns")
    return dict(zip(names, row, strict=True))
