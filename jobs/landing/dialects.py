"""Find the dialect of a CSV file: encoding, separator, quotes, header, and the lines around the header."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jobs.core.redaction import show_name
from jobs.core.report import format_count
from jobs.landing.csv_records import BLANK, BOM, COMMA, Dialect, is_cut_number
from jobs.landing.shapes.header_lines import (
    NUMBER_OR_TIME,
    FileRecord,
    HeaderPlace,
    count_units_below,
    find_header,
    has_no_header,
    read_records,
    record_with,
)
from jobs.specs.files import BLANKS, SEPARATORS, Files

ANY = Files()
"""Settings of a spec that leaves the dialect open."""

BEGINNING = 1 << 16
"""Bytes at a file's beginning that are inspected to find its dialect."""
COMMENT = "#"
ROW_NAMES = "row_names"
"""Name for a first column without a name in the header, as R and pandas write it."""
_SEP = re.compile(r"\s*\"?sep=(.)\"?\s*", re.IGNORECASE)
_SINGLE_QUOTED = re.compile(r"(?:^|[,;\t| ])'[^'\n]*'(?=[,;\t| \r]|$)", re.MULTILINE)
NAMES = {COMMA: "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar (|)", BLANK: "blanks"}
"""Separators in words."""


class _Cut(NamedTuple):
    """Records under one separator, and the position of their header."""

    separator: str
    records: list[FileRecord]
    place: HeaderPlace

    @property
    def rows(self) -> list[list[str]]:
        """Return the rows that have the usual number of fields."""
        return [one.fields for one in self.records[self.place.first :] if len(one.fields) == self.place.width]


def find_dialect(beginning: bytes, columns: Sequence[str] = (), named: Files = ANY) -> Dialect:
    """Return the dialect of a CSV file.

    With `columns`, the dialect is the separator and the first line that give a header with these columns. If the spec
    names the columns of files without a header, the separator must give as many fields. Else the separator that cuts
    the records best (`_merit`) is chosen, or a comma if no separator cuts them well.

    Args:
        beginning: first bytes of the file.
        columns: columns that the file must have, if known.
        named: the spec's settings for files.
    """
    plain, text = _decode_beginning(beginning, named)
    if named.comment is None and text.startswith("%"):  # as MATLAB and LaTeX write comments
        named = named.model_copy(update={"comment": "%"})
    given = BLANK if named.separator == BLANKS else named.separator
    skip = named.skip_lines or 0
    said = _SEP.fullmatch(text.split("\n", 1)[0]) if text else None
    if said is not None and named.skip_lines is None:
        skip, given = 1, given or (said[1] if said[1] in NAMES else None)
    text = text.split("\n", skip)[-1] if skip and text.count("\n") >= skip else text
    is_cut = len(beginning) == BEGINNING
    plain = plain._replace(skip=skip, quote=_quote_of(text))
    possible = (*SEPARATORS, BLANK) if given is None else (given,)
    cuts: list[_Cut] = []
    for one in possible:
        records = read_records(text, one, plain.quote, is_cut)
        # The usual case. A blank line is not a record where blanks are separators.
        if columns and records and records[0].line == 0 and set(columns) <= set(records[0].fields):
            return _build_dialect(
                plain, _Cut(one, records, HeaderPlace(0, 1, len(records[0].fields))), 0, columns, named
            )
        cuts.append(_Cut(one, records, HeaderPlace(0, 1, 0)))
    if columns:
        mark = named.comment or COMMENT
        most = None if named.skip_lines is None else 1
        places = [(record_with(cut.records[:most], columns, mark), order) for order, cut in enumerate(cuts)]
        if sure := [(place, order) for place, order in places if place is not None]:
            place, order = min(sure, key=lambda one: (cuts[one[1]].records[one[0]].line, one[1]))
            return _build_dialect(plain, cuts[order], place, columns, named)
    cuts = [_locate_header(cut, named) for cut in cuts]
    fields = len(named.columns) or None
    best = max(cuts[: len(SEPARATORS)], key=lambda cut: _score_cut(cut, fields))
    if len(cuts) > len(SEPARATORS) and _score_cut(best, fields)[0] < 1.0:
        best = max((best, cuts[-1]), key=lambda cut: _score_cut(cut, fields))
    if named.columns:
        return plain._replace(
            separator=best.separator, names=tuple(named.columns), comment=named.comment or ""
        )
    if not any(_score_cut(best)):
        return plain._replace(
            separator=best.separator, below=named.units_rows or 0, comment=named.comment or ""
        )
    return _build_dialect(plain, best, best.place.record, columns, named)


def _decode_beginning(beginning: bytes, named: Files) -> tuple[Dialect, str]:
    """Detect encoding and line ends; return them as a dialect, with the text of a file's beginning."""
    encoding = "utf-8" if named.encoding is None else named.encoding
    if named.encoding is None:
        encoding = _find_wide_encoding(beginning) or encoding
    data = beginning if encoding != "utf-8" else beginning.removeprefix(BOM)
    text = data.decode(encoding, "backslashreplace").removeprefix("\ufeff")
    by_cr = "\r" in text and "\n" not in text
    return Dialect(encoding=encoding, by_cr=by_cr), text.replace("\r", "\n") if by_cr else text


def _find_wide_encoding(beginning: bytes) -> str | None:
    """Return a UTF-16 encoding for a file with its mark, or with a NUL in every other byte; else None."""
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    some = beginning[:2000]
    if len(some) < 8 or some.count(0) < len(some) // 3:
        return None
    if some[::2].count(0) < len(some) // 20:
        return "utf-16-le"
    return "utf-16-be" if some[1::2].count(0) < len(some) // 20 else None


def _quote_of(text: str) -> str:
    """Return the quote: an apostrophe if it encloses fields in the header or in most lines, else a double quote."""
    if '"' in text or "'" not in text:
        return '"'
    header, lines = text.lstrip("\n").split("\n", 1)[0], text.count("\n") or 1
    is_quoted = len(_SINGLE_QUOTED.findall(header)) > 1 or len(_SINGLE_QUOTED.findall(text)) >= 0.8 * lines
    return "'" if is_quoted else '"'


def _locate_header(cut: _Cut, named: Files) -> _Cut:
    """Return records with the likely position of their header: the first record if the spec sets `skip_lines`."""
    if named.skip_lines is None:
        return cut._replace(place=find_header(cut.records, named.comment or COMMENT))
    width = len(cut.records[0].fields) if cut.records else 0
    return cut._replace(place=HeaderPlace(0, 1, width, count_units_below(cut.records, 0)))


def _build_dialect(plain: Dialect, cut: _Cut, place: int, columns: Sequence[str], named: Files) -> Dialect:
    """Return the dialect of a file whose header is the record at `place`; -1: there is no header."""
    records, mark = cut.records, named.comment or COMMENT
    if not records:
        return plain._replace(separator=cut.separator)
    first = records[max(place, 0)].fields[0]
    begin = cut.place.first if place < 0 else place
    above = [one.fields[0].startswith(mark) for one in records[:begin]]
    commented = any(above) or place >= 0 and first.startswith(mark) and first not in columns
    comment = named.comment or (mark if commented else "")
    if place < 0:
        return plain._replace(separator=cut.separator, skip=plain.skip + records[begin].line, comment=comment)
    below = count_units_below(records, place)
    header = records[place].fields
    rows = [
        one.fields
        for one in records[place + 1 + below :]
        if not (comment and one.fields[0].startswith(comment))
    ]
    extra, unnamed = _count_unnamed_fields(header, rows)
    return plain._replace(
        separator=cut.separator,
        skip=plain.skip + records[place].line,
        below=below if named.units_rows is None else named.units_rows,
        comment=comment,
        extra=extra,
        first=ROW_NAMES if unnamed else None,
    )


def _count_unnamed_fields(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[int, bool]:
    """Return the number of empty fields at the end of rows without a name, and whether the first field lacks one."""
    if not rows:
        return 0, False
    named = len(header)
    while named > 1 and not header[named - 1].strip():
        named -= 1
    width = max(map(len, rows))
    if width > named and all(not any(row[named:]) for row in rows):
        return width - named if width >= len(header) else len(header) - named, False
    if width != len(header) + 1 or not all(len(row) == width for row in rows) or named < len(header):
        return 0, False
    numbered = [row[0] for row in rows] == [str(place) for place in range(1, len(rows) + 1)]
    # `20,5` below `at,value` may be a decimal fraction: then the header does name the first field.
    is_fraction = all(is_cut_number(*row[-2:]) for row in rows)
    return 0, numbered or len(rows) > 1 and len({row[0] for row in rows}) == len(rows) and not is_fraction


def describe_header(dialect: Dialect) -> list[str]:
    """Describe in words where a file's encoding, header, comments and quotes differ from most files."""
    words = []
    if dialect.encoding != "utf-8":
        words.append(f"text in {dialect.encoding}")
    if dialect.skip:
        lines = "the line" if dialect.skip == 1 else f"the {dialect.skip:,} lines"
        verb = "is" if dialect.skip == 1 else "are"
        what = "the first row" if dialect.names else "the header"
        words.append(f"{what} is line {dialect.skip + 1:,}, and {lines} above it {verb} left out")
    if dialect.below:
        words.append(f"{format_count(dialect.below, 'row')} of units below the header left out")
    if dialect.comment:
        words.append(f"lines that begin with {dialect.comment} left out")
    if dialect.first is not None:
        words.append(f"the header has no name for the first column, which is called {dialect.first}")
    if dialect.quote != '"':
        words.append("texts within apostrophes")
    return words


def suggest_setting(beginning: bytes, columns: Sequence[str], named: Files = ANY) -> str:
    """Return why a file's header may lack columns, and the setting to change; empty if not due to its dialect."""
    found = find_dialect(beginning, columns, named)
    rows = _parse_rows_below(beginning, found)
    if found.names or not rows:
        return ""
    if not set(columns) & set(rows[0]) and has_no_header(rows):
        names = ", ".join(columns) if len(columns) == len(rows[0]) else f"{', '.join(columns)}, ..."
        return (
            f"its first line looks like a row ({_quote_name(found.separator.join(rows[0]))}): if it has no header, name its "
            f"{len(rows[0])} columns in order in the spec, files: {{columns: [{names}]}}"
        )
    if found.skip:
        return (
            f"the header seems to be line {found.skip + 1} ({_quote_name(found.separator.join(rows[0]))}); if another line "
            "is, name the number of lines above it in the spec, such as files: {skip_lines: 1}"
        )
    if len(rows[0]) == 1 and named.separator is not None:
        return f"with {NAMES[found.separator]} as files.separator its header is one field ({_quote_name(rows[0][0])})"
    return ""


def _parse_rows_below(beginning: bytes, found: Dialect) -> list[list[str]]:
    """Return the fields of the records from the header on, below the skipped lines."""
    _, text = _decode_beginning(beginning, Files(encoding=found.encoding if found.is_recoded else None))
    below = text.split("\n", found.skip)[-1]
    records = read_records(below, found.separator, found.quote, len(beginning) == BEGINNING)
    return [one.fields for one in records]


def detect_settings(beginning: bytes) -> Files:
    """Return the settings that a spec needs for a file: encoding, lines above the header, units and comments.

    A file without a header also gets made-up column names.
    """
    encoding = "cp1252" if _is_windows(beginning) else None
    found = find_dialect(beginning, (), Files(encoding=encoding))
    return Files(
        columns=list(_make_up_names(beginning, found)),
        skip_lines=found.skip or None,
        units_rows=found.below or None,
        comment=found.comment or None,
        encoding=found.encoding if found.is_recoded else None,
    )


def _is_windows(beginning: bytes) -> bool:
    """Tell if bytes are neither UTF-8 nor UTF-16, so probably Windows-1252."""
    if _find_wide_encoding(beginning) or beginning.isascii():
        return False
    return beginning.decode("utf-8", "ignore").isascii()


def _make_up_names(beginning: bytes, found: Dialect) -> tuple[str, ...]:
    """Return made-up column names for a file without a header; empty for any other file."""
    records = _parse_rows_below(beginning, found)
    rows = [one for one in records if not (found.comment and one[0].startswith(found.comment))]
    if found.first is not None or not has_no_header(rows):
        return ()
    above = records[0]  # may be a header that begins like a comment, as in `#YY,MM,DD`
    if len(above) == len(rows[0]) and not any(NUMBER_OR_TIME.fullmatch(text) for text in above):
        return ()
    return tuple(f"c{place}" for place in range(1, len(rows[0]) + 1))


def _score_cut(cut: _Cut, fields: int | None = None) -> tuple[float, int]:
    """Return a score of how well a separator cuts records; below 1 the records have different numbers of fields.

    A good separator gives each record the same number of fields (`fields`, if known), and most fields are numbers or
    times; after that, more fields are better. A decimal comma cuts as evenly as a semicolon between fields, but not
    into numbers.
    """
    width = cut.place.width
    begin = cut.place.first if cut.place.record < 0 else cut.place.record
    rows = [one.fields for one in cut.records[begin:]]
    if width < 2 or not rows:
        return 0.0, 0
    even = [row for row in rows if len(row) == width]
    # If all rows end with extra separators, the header is as wide as the fields before them.
    named = width if even and not any(any(row[len(rows[0]) :]) for row in even) else len(rows[0])
    if (
        len(even) < 0.5 * len(rows)
        or fields not in (None, width)
        or named < max(width - 1, 2)
        or len(rows[0]) < 2
    ):
        return 0.0, 0
    if len(even) < 0.9 * len(rows) - 1 or named < width:
        return len(even) / len(rows) - 0.1, width
    cells = [text for row in even for text in row if text]
    values = sum(NUMBER_OR_TIME.fullmatch(text) is not None for text in cells)
    return 1.0 + values / max(len(cells), 1), width


def _quote_name(text: str) -> str:
    return repr(show_name(text))
