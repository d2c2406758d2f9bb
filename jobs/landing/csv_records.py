"""Cut the bytes of a CSV file into pieces of whole records, and parse the records of a piece.

A small file is parsed in the driver, a large one in Spark's workers, piece by piece. Both use the same functions, so
that a file gives the same rows wherever it is read. The rules are those of Python's `csv`. Arrow's reader, which is
many times faster, parses the pieces in which both readers cannot disagree: quotes around whole fields alone, the same
number of fields in every record, valid UTF-8.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from jobs.encoding import arrow
from jobs.landing.raw_rows import BYTES, CORRUPT, Source

PIECE_BYTES = 8 << 20
"""Approximate size of a piece: a task of Spark, so small enough for all cores to have some."""

BOM = b"\xef\xbb\xbf"
_LONG = 4
"""Bytes that a character has at most."""
LONGEST = 16 << 20
"""Characters of the longest field; a longer one follows a quote that nothing closes."""
UNCLOSED = 1 << 17
"""Characters of the last field from which on a quote that nothing closes has swallowed rows: the file is refused."""
LONGEST_RECORD = 64 << 20
"""Bytes of the longest record. A longer one is no row: each further block would be searched with all before it."""
csv.field_size_limit(LONGEST)


class TooLong(csv.Error):
    """A record has more than `LONGEST_RECORD` bytes."""


COMMA = ","
_NEWLINE, _QUOTE = b'\n"'
_BESIDE_FIELDS = {
    mark: np.isin(np.arange(256), list(f"{mark}\r\n".encode())) for mark in (COMMA, ";", "\t", "|")
}
_INVALID = re.compile("[\udc80-\udcff]")
"""How Python decodes bytes that are not UTF-8, with `surrogateescape`; no valid UTF-8 decodes to these."""


class Header(NamedTuple):
    """The names of the columns, and the place in the file's bytes at which the first row begins."""

    names: list[str]
    end: int


def read_header(
    stream: io.BufferedIOBase, size: int = PIECE_BYTES, separator: str = COMMA, given: Sequence[str] = ()
) -> tuple[Header, Iterator[bytes]] | None:
    """Return the header of a CSV file, its first record that is no blank line, and the pieces after it.

    None if there is no such record. The stream may be a pipe: it is read once, from its beginning.

    Args:
        stream: of the bytes.
        size: of a piece.
        separator: of the fields.
        given: names of the columns of a file without a header, whose first record is a row.

    Raises:
        UnicodeDecodeError: a name is not UTF-8 text.
        csv.Error: the file is not CSV.
    """
    first = stream.read(len(BOM))
    found = pieces(stream, size, b"" if first == BOM else first, separator)
    start = len(BOM) if first == BOM else 0
    if given:
        return Header(list(given), start), found
    for piece in found:
        text = _decoded(piece)
        lines = io.StringIO(text, newline="")
        names = next((row for row in csv.reader(lines, delimiter=separator) if row), None)
        if names is not None:
            for name in names:
                _encoded(name).decode()
            end = len(_encoded(text[: lines.tell()]))
            return Header(names, start + end), chain([piece[end:]], found)
        start += len(piece)
    return None


def pieces(
    stream: io.BufferedIOBase, size: int = PIECE_BYTES, rest: bytes = b"", separator: str = COMMA
) -> Iterator[bytes]:
    """Cut the rest of a stream, which begins with a record, into pieces of whole records of about `size` bytes.

    Args:
        stream: of the bytes.
        size: of a piece.
        rest: bytes before those of the stream.
        separator: of the fields.

    Raises:
        csv.Error: a field is longer than Python's limit, as after a quote that nothing closes, or a record too long.
    """
    while block := stream.read(size):
        rest += block
        end = _last_end(rest, separator)
        if end:
            yield rest[:end]
            rest = rest[end:]
        elif len(rest) > LONGEST_RECORD:
            raise TooLong(f"a row has more than {LONGEST_RECORD:,} bytes")
    if rest:
        yield rest


def ends_record(data: bytes, separator: str = COMMA) -> bool:
    """Tell if bytes that begin with a record end with a whole one."""
    return _last_end(data, separator) == len(data)


def _last_end(data: bytes, separator: str) -> int:
    """Return the end of the last record that ends within `data`, 0 if none does."""
    quotes = _quotes(data, separator)
    if quotes is None or len(quotes) % 2 and len(data) - quotes[-1] > _LONG * csv.field_size_limit():
        return _last_end_of_any(data, separator)  # raises an error if nothing closes a quote
    if len(quotes) == 0:
        return data.rfind(b"\n") + 1
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
    outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return int(outside[-1]) + 1 if len(outside) else 0


def _quotes(data: bytes, separator: str) -> NDArray[np.intp] | None:
    """Return the places of the quotes if, from the first on, they open and close in turn; None for any others.

    An opening quote begins a field, a closing one ends it; two that touch are a quote within a field, which by this
    rule closes and opens.
    """
    if b'"' not in data:
        return np.zeros(0, np.intp)
    codes = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(codes == _QUOTE)
    opening, closing = places[::2], places[1::2]
    before = codes[np.maximum(opening - 1, 0)]
    after = codes[np.minimum(closing + 1, len(codes) - 1)]
    beside = _BESIDE_FIELDS[separator]
    begins = (opening == 0) | beside[before]
    ends = (closing == len(codes) - 1) | beside[after]
    touching = closing[: len(opening) - 1] + 1 == opening[1:]
    begins[1:] |= touching
    ends[: len(touching)] |= touching
    return places if begins.all() and ends.all() else None


def _last_end_of_any(data: bytes, separator: str) -> int:
    """Return what `_last_end` does, of any bytes."""
    # The mark is a record of its own, unless the last line break is within quotes.
    text = _decoded(data[: data.rfind(b"\n") + 1])
    lines = io.StringIO(text + "x", newline="")
    start, stop = 0, 0
    for _ in csv.reader(lines, delimiter=separator):
        start, stop = stop, lines.tell()
    return len(_encoded(text[:start]))


def parse_records(
    data: bytes, names: Sequence[str], wanted: Sequence[str] | None = None, separator: str = COMMA
) -> Source:
    """Parse the records of a piece into the wanted columns, or all of them; an empty field is null.

    With all columns, the text of misshapen rows is in the column `_corrupt`, and the bytes of rows that are not UTF-8
    are in the column `_bytes`.

    Raises:
        csv.Error: a field is longer than `LONGEST`, or nothing closes the quote before a long one.
    """
    chosen = list(names if wanted is None else wanted)
    places = {name: place for place, name in enumerate(names)}
    table = _by_arrow(data, len(names), separator)
    if table is not None:
        columns = {name: table.column(places[name]).combine_chunks() for name in chosen}
        return Source(columns, np.zeros(table.num_rows, bool), table.num_rows, np.zeros(table.num_rows, bool))
    text = _decoded(data)
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row]
    if rows and max(map(len, rows[-1])) > UNCLOSED and not ends_record(data.rstrip(b"\n") + b"\n", separator):
        raise csv.Error("nothing closes a quote, within the field limit")
    count = len(rows)
    misshapen = np.fromiter((len(row) != len(names) for row in rows), bool, count)
    invalid = np.zeros(count, bool)
    if not text.isascii() and _INVALID.search(text):
        invalid = np.fromiter((_INVALID.search("\n".join(row)) is not None for row in rows), bool, count)
    lines = {int(place): _line(rows[place], separator) for place in np.flatnonzero(misshapen | invalid)}
    for place in np.flatnonzero(invalid):
        rows[place] = [_shown(field) for field in rows[place]]
    columns = {}
    for name in chosen:
        place = places[name]
        if misshapen.any():
            values = [(row[place] or None) if place < len(row) else None for row in rows]
        else:
            values = [row[place] or None for row in rows]
        columns[name] = arrow.texts(values)
    if wanted is None:
        columns |= _originals(misshapen.tolist(), invalid.tolist(), lines)
    return Source(columns, misshapen, count, invalid)


def _originals(misshapen: list[bool], invalid: list[bool], lines: dict[int, str]) -> dict[str, pa.Array]:
    """Return the columns that keep misshapen rows and rows that are not UTF-8 without loss; none if there is no row."""
    kept: dict[str, pa.Array] = {}
    if any(misshapen):
        kept[CORRUPT] = arrow.texts([_shown(lines[at]) if bad else None for at, bad in enumerate(misshapen)])
    if any(invalid):
        kept[BYTES] = arrow.texts(
            [
                base64.b64encode(_encoded(lines[at])).decode() if bad else None
                for at, bad in enumerate(invalid)
            ]
        )
    return kept


def _by_arrow(data: bytes, width: int, separator: str) -> pa.Table | None:
    """Parse records that Arrow's reader and Python's read alike; None for any others."""
    quotes = _quotes(data, separator)
    if quotes is None or len(quotes) % 2 or data.count(b"\r") != data.count(b"\r\n") or data.startswith(BOM):
        return None
    names = [str(place) for place in range(width)]
    kinds = {name: pa.string() for name in names}
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(data),
            read_options=arrow_csv.ReadOptions(
                use_threads=False, block_size=max(len(data), 1), column_names=names
            ),
            parse_options=arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=len(quotes) > 0),
            convert_options=arrow_csv.ConvertOptions(
                column_types=kinds, null_values=[""], strings_can_be_null=True
            ),
        )
    except pa.ArrowException:
        return None
    if len(data) <= csv.field_size_limit():
        return table
    lengths = [arrow.compute().max(arrow.compute().binary_length(column)).as_py() for column in table.columns]
    return table if max(length or 0 for length in lengths) <= csv.field_size_limit() else None


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _shown(text: str) -> str:
    """Return a text with invalid bytes as `\\xff` and the like."""
    return _encoded(text).decode("utf-8", "backslashreplace")


def _line(fields: Sequence[str], separator: str) -> str:
    line = io.StringIO()
    csv.writer(line, delimiter=separator, lineterminator="").writerow(fields)
    return line.getvalue()
