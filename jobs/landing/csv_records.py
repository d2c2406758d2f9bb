"""Cut the bytes of a CSV file into pieces of whole records, and parse the records of a piece.

Each piece is parsed independently, in any process, so that the rows of a file do not depend on the cuts. The rules are
the rules of Python's `csv`. Arrow's reader is many times faster, and parses each piece for which both readers must give
the same result: quotes are only around whole fields, every record has the same number of fields, and the bytes are
valid UTF-8.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from jobs.landing.raw_rows import BYTES, CORRUPT, FIELDS, MISSHAPEN, NOT_UTF8, RawRows, encode_base64
from jobs.state.encoding import arrow

PIECE_BYTES = 8 << 20
"""Approximate size of a piece in bytes. A piece becomes a Spark task; small pieces keep all cores busy."""
HEADER_BYTES = 1 << 16
"""Number of bytes of each read if only the header is needed."""

BOM = b"\xef\xbb\xbf"
_LONG = 4
"""Maximum number of bytes of a character."""
LONGEST = 16 << 20
"""Maximum number of characters of a field. A longer field is probably due to an unclosed quote."""
UNCLOSED = 1 << 17
"""Maximum number of characters of a last field with an unclosed quote.

A longer last field probably contains several rows, so the file is refused.
"""
LONGEST_RECORD = 64 << 20
"""Maximum number of bytes of a record.

A longer record is an error, because the search for its end starts again at its beginning after each block.
"""
csv.field_size_limit(LONGEST)


class Unreadable(csv.Error):
    """Error for content that is not a table of records; the message names the cause and the remedy."""


COMMA, BLANK = ",", " "
_NEWLINE = ord("\n")
_TAIL = 1 << 16
"""Number of bytes at the end of a piece in which the end of its last record is sought first."""
_RUN = re.compile(rb"[ \t]+")
_AROUND = re.compile(rb"^ +| +(?=\r?$)", re.MULTILINE)
_ANNOTATIONS = ("#group", "#datatype", "#default", "#constant")
"""First fields of the annotation lines that InfluxDB writes above each table of a file."""
_WHOLE = re.compile(r" *[+-]?[0-9]+")
_FRACTION = re.compile(r"[0-9]+(?:[eE][+-]?[0-9]+)? *")
_INVALID = re.compile("[\udc80-\udcff]")
"""Characters that Python's `surrogateescape` substitutes for bytes that are not UTF-8; valid UTF-8 never has them."""


def is_cut_number(whole: str, fraction: str) -> bool:
    """Return whether two adjacent fields may be one number with a decimal comma."""
    return _WHOLE.fullmatch(whole) is not None and _FRACTION.fullmatch(fraction) is not None


class Dialect(NamedTuple):
    """Format of a CSV file.

    separator  separator of the fields; a blank means one or more blanks or tabs
    names      names of the columns of a file without a header
    skip       number of lines above the header that are skipped
    below      number of rows of units below the header that are skipped
    comment    beginning of a comment line; "" if there are no comments
    quote      quote around a field that contains a separator
    encoding   Python's name of the encoding
    by_cr      whether lines end with a carriage return alone
    extra      number of empty fields at the end of a row that have no name in the header
    first      name of the first column if the header has no name for this column
    """

    separator: str = COMMA
    names: tuple[str, ...] = ()
    skip: int = 0
    below: int = 0
    comment: str = ""
    quote: str = '"'
    encoding: str = "utf-8"
    by_cr: bool = False
    extra: int = 0
    first: str | None = None

    @property
    def is_recoded(self) -> bool:
        """Return whether the file is recoded to UTF-8, so that positions in the text differ from those in the file."""
        return self.encoding != "utf-8"


PLAIN = Dialect()


class Header(NamedTuple):
    """Column names of a file, and the byte position at which the first row begins."""

    names: list[str]
    end: int


def read_header(stream: io.BufferedIOBase, dialect: Dialect = PLAIN) -> Header | None:
    """Return the header of a CSV file, which is the first record after blank lines; None without any record.

    Args:
        stream: stream at the beginning of the file.
        dialect: dialect of the file; if the dialect has names, the first record is a row.

    Raises:
        UnicodeDecodeError: a name is not UTF-8 text.
        csv.Error: the file is not CSV.
    """
    rest = stream.read(len(BOM))
    start = len(BOM) if rest == BOM else 0
    rest = b"" if rest == BOM else rest
    for _ in range(dialect.skip):
        line, mark, rest = rest.partition(b"\n")
        line += mark or stream.readline(LONGEST)
        start += len(line)
    if dialect.names:
        return Header(list(dialect.names), start)
    names: list[str] | None = None
    below = dialect.below
    for piece in cut_pieces(stream, HEADER_BYTES, rest, dialect):
        text = _decode_text(piece)
        lines = io.StringIO(text, newline="")
        while row := next(filter(None, _parse_header_rows(lines, dialect)), None):
            is_comment = bool(dialect.comment) and row[0].startswith(dialect.comment)
            if names is None:
                names = _name_columns(row, dialect)
            elif not is_comment:
                below -= 1
            if not below:
                return Header(names, start + len(_encode_text(text[: lines.tell()])))
        start += len(piece)
    return None if names is None else Header(names, start)


def _name_columns(row: list[str], dialect: Dialect) -> list[str]:
    """Return the column names of a header record."""
    for name in row:
        _encode_text(name).decode()
    if dialect.comment and row[0].startswith(dialect.comment):
        row = [row[0].removeprefix(dialect.comment).strip(), *row[1:]]
    if dialect.first is not None:
        return [dialect.first, *row]
    return row[: len(row) - dialect.extra] if dialect.extra and not any(row[-dialect.extra :]) else row


def _parse_header_rows(lines: Iterable[str], dialect: Dialect) -> Iterator[list[str]]:
    if dialect.separator == BLANK:
        lines = (_decode_text(_reduce_blanks(_encode_text(line), dialect)) for line in lines)
    return _parse_rows(lines, dialect)


def _parse_rows(lines: Iterable[str], dialect: Dialect) -> Iterator[list[str]]:
    return csv.reader(lines, delimiter=dialect.separator, quotechar=dialect.quote)


def cut_pieces(
    stream: io.BufferedIOBase, size: int = PIECE_BYTES, rest: bytes = b"", dialect: Dialect = PLAIN
) -> Iterator[bytes]:
    """Yield the remaining bytes of a stream in pieces of whole records.

    Args:
        stream: stream of bytes at the beginning of a record.
        size: approximate size of a piece in bytes.
        rest: bytes that precede the stream; if there are any, they begin with a record.
        dialect: dialect of the file.

    Raises:
        csv.Error: a record is too long, or a field is longer than Python's limit, such as after an unclosed quote.
    """
    while block := stream.read(size):
        rest += block
        end = _find_last_end(rest, dialect)
        if end:
            yield rest[:end]
            rest = rest[end:]
        elif len(rest) > LONGEST_RECORD:
            raise Unreadable(
                f"a row has more than {LONGEST_RECORD:,} bytes: write one row on each line, and close each quotation "
                "mark"
            )
    if rest:
        yield rest


def ends_record(data: bytes, dialect: Dialect = PLAIN) -> bool:
    """Return whether bytes that begin with a record also end with a whole record."""
    return _find_last_end(data, dialect) == len(data)


def _find_last_end(data: bytes, dialect: Dialect) -> int:
    """Return the end of the last record that ends within `data`; 0 if no record ends within `data`."""
    quotes = _find_quotes(data, dialect)
    if quotes is None or len(quotes) % 2 and len(data) - quotes[-1] > _LONG * csv.field_size_limit():
        return _find_any_last_end(data, dialect)  # this function raises an error if a quote is not closed
    if len(quotes) == 0:
        return data.rfind(b"\n") + 1
    for start in (max(len(data) - _TAIL, 0), 0):
        ends = start + np.flatnonzero(np.frombuffer(data, np.uint8, offset=start) == _NEWLINE)
        outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
        if len(outside):
            return int(outside[-1]) + 1
    return 0


def _find_quotes(data: bytes, dialect: Dialect) -> NDArray[np.intp] | None:
    """Return the positions of the quotes if opening and closing quotes alternate; None if they do not.

    An opening quote is at the beginning of a field, and a closing quote is at its end. A doubled quote, which means a
    quote within a field, counts as a closing quote and an opening quote.
    """
    mark = dialect.quote.encode()
    if mark not in data:
        return np.zeros(0, np.intp)
    codes = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(codes == mark[0])
    opening, closing = places[::2], places[1::2]
    before = codes[np.maximum(opening - 1, 0)]
    after = codes[np.minimum(closing + 1, len(codes) - 1)]
    beside = np.zeros(256, bool)
    beside[list(f"{dialect.separator}\r\n".encode())] = True
    begins = (opening == 0) | beside[before]
    ends = (closing == len(codes) - 1) | beside[after]
    touching = closing[: len(opening) - 1] + 1 == opening[1:]
    begins[1:] |= touching
    ends[: len(touching)] |= touching
    return places if begins.all() and ends.all() else None


def _find_any_last_end(data: bytes, dialect: Dialect) -> int:
    """Return the result of `_find_last_end` for bytes with quotes in arbitrary positions."""
    # The added letter becomes a separate record, unless the last line break is within quotes.
    text = _decode_text(data[: data.rfind(b"\n") + 1])
    lines = io.StringIO(text + "x", newline="")
    start, stop = 0, 0
    for _ in _parse_rows(lines, dialect):
        start, stop = stop, lines.tell()
    return len(_encode_text(text[:start]))


def parse_records(
    data: bytes, names: Sequence[str], wanted: Sequence[str] | None = None, dialect: Dialect = PLAIN
) -> RawRows:
    """Return the rows of a piece with the wanted columns, or with all columns; an empty field becomes null.

    The column `_corrupt` contains the text of rows with a wrong number of fields, and the column `_bytes` contains the
    bytes of rows that are not UTF-8. Each of these two columns exists only if the piece has such rows. Comments and
    repeated headers between the rows are skipped.

    Raises:
        csv.Error: a field is longer than `LONGEST`, a long field has an unclosed quote, or a second table begins.
    """
    chosen = list(names if wanted is None else wanted)
    places = {name: place for place, name in enumerate(names)}
    if dialect.separator == BLANK:
        data = _reduce_blanks(data, dialect)
    table = _parse_by_arrow(data, len(names) + dialect.extra, dialect)
    if table is not None and not _needs_care(table, names, dialect):
        columns = {name: table.column(places[name]).combine_chunks() for name in chosen}
        return RawRows(columns, table.num_rows)
    return _parse_by_python(data, names, chosen, dialect)


def _needs_care(table: pa.Table, names: Sequence[str], dialect: Dialect) -> bool:
    """Return whether a row of a piece may be a comment or a repeated header, or has a field without a column name."""
    pc = arrow.load_compute()
    if any(column.null_count < len(column) for column in table.columns[len(names) :]):
        return True
    first = table.column(0)
    if dialect.comment and pc.any(pc.starts_with(first, dialect.comment)).as_py():
        return True
    if dialect.names or len(names) < 2:
        return False
    place = next((place for place, name in enumerate(names) if name), 0)
    # Arrow would import pandas to compare with a Python value.
    return bool(pc.any(pc.is_in(table.column(place), value_set=arrow.build_texts([names[place]]))).as_py())


def _parse_by_python(data: bytes, names: Sequence[str], chosen: list[str], dialect: Dialect) -> RawRows:
    """Parse the records of a piece with Python's `csv`."""
    text = _decode_text(data)
    rows = [row for row in _parse_rows(io.StringIO(text, newline=""), dialect) if row]
    if rows and max(map(len, rows[-1])) > UNCLOSED and not ends_record(data.rstrip(b"\n") + b"\n", dialect):
        raise csv.Error("nothing closes a quote, within the field limit")
    read = len(rows)
    rows = _drop_headers(rows, names, dialect)
    width, most = len(names), len(names) + dialect.extra
    misshapen = {place for place, row in enumerate(rows) if not width <= len(row) <= most or any(row[width:])}
    invalid: set[int] = set()
    if not text.isascii() and _INVALID.search(text):
        invalid = {place for place, row in enumerate(rows) if _INVALID.search("\n".join(row))}
    kept = _collect_originals(rows, misshapen, invalid, width, dialect)
    for place in invalid:
        rows[place] = [_escape_invalid(field) for field in rows[place]]
    for place in misshapen:
        rows[place] = [*rows[place], *[""] * (width - len(rows[place]))]
    columns = {name: arrow.build_texts([row[names.index(name)] or None for row in rows]) for name in chosen}
    found = RawRows(columns | kept, len(rows), left_out=read - len(rows))
    if not misshapen and not invalid:
        return found
    problems = found.reasons()
    problems[list(invalid)] = NOT_UTF8
    problems[list(misshapen)] = MISSHAPEN
    return found._replace(problems=problems)


def _drop_headers(rows: list[list[str]], names: Sequence[str], dialect: Dialect) -> list[list[str]]:
    """Return rows without the comments and repeated headers between the rows.

    Raises:
        Unreadable: a header with other columns is between the rows.
    """
    mark = dialect.comment
    if dialect.names or len(names) < 2:
        return [row for row in rows if not (mark and row[0].startswith(mark))]
    header = [dialect.first, *names[1:]] if dialect.first is not None else list(names)
    found: list[list[str]] = []
    annotated, units = False, 0
    for row in rows:
        bare = [row[0].removeprefix(mark).strip(), *row[1:]] if mark and row[0].startswith(mark) else row
        if bare[: len(names)] == header or dialect.first is not None and row == header[1:]:
            annotated, units = False, dialect.below
        elif bare is not row:
            annotated |= row[0] in _ANNOTATIONS
        elif units:
            units -= 1
        elif annotated:
            header = dialect.separator.join(row)[:80]
            raise Unreadable(
                f"another table with other columns begins between its rows ({header}); write each table into a file of "
                "its own"
            )
        else:
            found.append(row)
    return found


def _collect_originals(
    rows: Sequence[Sequence[str]], misshapen: set[int], invalid: set[int], width: int, dialect: Dialect
) -> dict[str, pa.Array]:
    """Return columns with the unchanged content of misshapen rows and of rows that are not UTF-8; empty if none."""
    kept: dict[str, pa.Array] = {}
    places = range(len(rows))
    if misshapen:
        kept[CORRUPT] = arrow.build_texts(
            [_escape_invalid(_format_line(rows[at], dialect)) if at in misshapen else None for at in places]
        )
    if invalid:
        kept[BYTES] = encode_base64(
            [_encode_text(_format_line(rows[at], dialect)) if at in invalid else None for at in places]
        )
    if misshapen:
        kept[FIELDS] = arrow.build_texts(
            [f"{len(rows[at])}, the header {width}" if at in misshapen else None for at in places]
        )
    return kept


def _parse_by_arrow(data: bytes, width: int, dialect: Dialect) -> pa.Table | None:
    """Parse records by Arrow; return None if Arrow and Python may give different results."""
    quotes = _find_quotes(data, dialect)
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
            parse_options=arrow_csv.ParseOptions(
                delimiter=dialect.separator, quote_char=dialect.quote, newlines_in_values=len(quotes) > 0
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=kinds, null_values=[""], strings_can_be_null=True
            ),
        )
    except pa.ArrowException:
        return None
    if len(data) <= csv.field_size_limit():
        return table
    lengths = [
        arrow.load_compute().max(arrow.load_compute().binary_length(column)).as_py()
        for column in table.columns
    ]
    return table if max(length or 0 for length in lengths) <= csv.field_size_limit() else None


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _escape_invalid(text: str) -> str:
    """Return a text in which escapes such as `\\xff` replace invalid bytes."""
    return _encode_text(text).decode("utf-8", "backslashreplace")


def _format_line(fields: Sequence[str], dialect: Dialect) -> str:
    line = io.StringIO()
    writer = csv.writer(line, delimiter=dialect.separator, quotechar=dialect.quote, lineterminator="")
    writer.writerow(fields)
    return line.getvalue()


def _reduce_blanks(data: bytes, dialect: Dialect) -> bytes:
    """Replace each run of blanks outside quotes by one blank, and remove the blanks at both ends of each line."""
    mark = dialect.quote.encode()
    if mark not in data:
        return _AROUND.sub(b"", _RUN.sub(b" ", data))
    outside, *rest = data.split(mark)
    found = [_RUN.sub(b" ", outside)]
    for place, text in enumerate(rest):
        found.append(_RUN.sub(b" ", text) if place % 2 else text)
    return _AROUND.sub(b"", mark.join(found))
