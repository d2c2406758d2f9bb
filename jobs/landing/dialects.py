"""Find the dialect of a CSV file: its encoding, separator, quotes and header, and the lines around the header."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jobs.core.redaction import show_name
from jobs.core.report import format_count
from jobs.landing.csv_records import BLANK, BOM, COMMA, Dialect, is_cut_number
from jobs.specs.files import BLANKS, SEPARATORS, Files

MOST_RECORDS = 200
"""Number of records at the beginning of a file that are searched for the header."""
NUMBER_OR_TIME = re.compile(r" *[+-]?[.]?[0-9][0-9.,:/ TZ+eE-]*")
_NUMBER = re.compile(r" *[+-]?[0-9.,]+(?:[eE][+-]?[0-9]+)?")
_TIME_NAME = re.compile(
    r"time|date|zeit|datum|fecha|heure|stamp|jahr|year|month|^(at|ts|t|when|day|hour|_time|epoch|utc)$",
    re.IGNORECASE,
)
_YEAR_OR_DATE = re.compile(
    r"(?:1[5-9]|20|21)[0-9]{2}(?:[-./][0-9]{1,2}){0,2}|[0-9]{1,2}[-./][0-9]{1,2}[-./][0-9]{2,4}"
)
_FORMAT = re.compile(r"[\[(]?(?:y{2,4}|d{1,2}|m{1,2}|h{1,2}|hh24|s{2,}|mi|z|[-/.:T ])+[\])]?", re.IGNORECASE)
_UNITS = frozenset(
    "c degc deg f degf k kelvin celsius v volt volts mv a amp ma w kw mw gw kwh wh mwh va kva var hz khz mhz rpm % pct "
    "hpa pa kpa mpa bar mbar psi mmhg m mm cm km in inch ft mi s ms us sec secs seconds min mins minutes h hr hrs hour "
    "hours d day days kmh kph mph kn kt kts knots l ml gal g mg kg t lb ug µg μg ng ppm ppb ppt lux lx db dba j kj mj "
    "eur usd chf gbp count counts n nr - -- none n/a na ts rn smp avg max tot std wvc utc local iso8601 unitless ph µs "
    "string long double datetime rfc3339 boolean unsignedlong float int integer ° º °c °f ºc ω ohm kohm ntu "
    "yr mo dy mn degt nmi".split()
)  # fmt: skip


_ABSENT = frozenset(("", "na", "n/a", "none", "-", "--"))
"""Texts that mean that a unit or a value is missing."""


class FileRecord(NamedTuple):
    """A record of a file: the number of its first line, from 0, and its fields."""

    line: int
    fields: list[str]


class HeaderPlace(NamedTuple):
    """Position of a file's header.

    record  index of the header among the records; -1 means that the file has no header
    first   index of the first row with numbers or times
    width   number of fields in a row
    """

    record: int
    first: int
    width: int


def read_records(text: str, separator: str, quote: str, is_cut: bool) -> list[FileRecord]:
    """Return the records of a text.

    If the text is cut off (`is_cut`) and has several records, the last record is incomplete and is not returned.
    """
    lines = io.StringIO(text, newline="")
    found: list[FileRecord] = []
    begin = line = 0
    # With other separators a line stays unchanged, because each tab at its end may begin an empty field.
    source = (re.sub(r"[ \t]+", BLANK, line).strip(BLANK) for line in lines) if separator == BLANK else lines
    try:
        for fields in csv.reader(source, delimiter=separator, quotechar=quote):
            if fields:
                found.append(FileRecord(line, fields))
            begin, end = lines.tell(), begin
            line += text.count("\n", end, begin)
            if len(found) > MOST_RECORDS:
                break
    except csv.Error:
        return found
    is_cut |= len(found) > MOST_RECORDS
    return found[:-1] if is_cut and len(found) > 1 else found


def record_with(records: Sequence[FileRecord], columns: Sequence[str], comment: str) -> int | None:
    """Return the index of the first record that has all columns; None if no record has them."""
    wanted = set(columns)
    for place, record in enumerate(records):
        if wanted <= set(record.fields) or wanted <= {
            record.fields[0].lstrip(comment).strip(),
            *record.fields[1:],
        }:
            return place
    return None


def find_header(records: Sequence[FileRecord], comment: str = "#") -> HeaderPlace:
    """Return the likely position of the header, which is a record of texts above rows with numbers or times.

    If several records of texts are above the rows, the record that looks most like a header is chosen.
    """
    if not records:
        return HeaderPlace(0, 1, 0)
    plain = [place for place, one in enumerate(records) if not one.fields[0].startswith(comment)]
    rows = [records[place].fields for place in plain] or [one.fields for one in records]
    widths = Counter(map(len, rows[-max(len(rows) // 2, 3) :]))
    width = max(widths, key=lambda one: (widths[one], one))
    columns = _find_value_columns(
        [row for row in rows[-max(len(rows) * 2 // 5, 1) :] if len(row) == width], width
    )
    are_rows = [_is_row(records[place].fields, columns, width) for place in plain]
    # A record is the first row only if a row follows it, because titles may also contain numbers, such as a device
    # number.
    first = next(
        (place for i, place in enumerate(plain) if are_rows[i] and all(are_rows[i + 1 : i + 2])),
        None,
    )
    if first is not None and (block := _find_texts_above(records, first, width, plain)):
        header = max(
            block, key=lambda place: (_score_likeness(records[place].fields), -place if width > 2 else place)
        )
        return HeaderPlace(header, first, width)
    begin = plain[0] if plain else 0
    if (
        first is not None
        and _has_time_names(records[first].fields)
        and not has_no_header([one.fields for one in records[first:]])
    ):
        return HeaderPlace(first, first + 1, width)
    if first is not None and has_no_header([one.fields for one in records[begin:]]):
        return HeaderPlace(-1, begin, width)
    return HeaderPlace(begin, begin + 1, width)


def _has_time_names(fields: Sequence[str]) -> bool:
    """Return whether a record has a text and at least three distinct years or dates, which are then column names."""
    times = [text for text in fields if _YEAR_OR_DATE.fullmatch(text)]
    texts = [text for text in fields if text and NUMBER_OR_TIME.fullmatch(text) is None]
    return len(texts) > 0 and len(times) >= 3 and len(set(times)) == len(times)


def _find_texts_above(
    records: Sequence[FileRecord], first: int, width: int, plain: Sequence[int]
) -> list[int]:
    """Return the indices of records above the first row that may be a header or units.

    Of comments, only the one directly above the first row is returned, alone, or the comment above it if it has units.
    """
    found: list[int] = []
    for place in range(first - 1, -1, -1):
        fields = records[place].fields
        if len(fields) != width and (len(fields) != width - 1 or width < 3):
            break
        if place in plain and len(set(fields)) > 1:
            found.append(place)
        elif place == first - 1 and place not in plain:
            is_header_above = place > 0 and is_units_row(fields) and len(records[place - 1].fields) == width
            return [place - 1 if is_header_above else place]
    return found


def count_units_below(records: Sequence[FileRecord], header: int) -> int:
    """Return the number of rows of units directly below a header."""
    rows = [one.fields for one in records[header + 1 :]]
    count = 0
    while count < len(rows) - 1 and is_units_row(rows[count]) and not _may_name_series(rows[count:]):
        count += 1
    return count


def _may_name_series(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first row, although it looks like units, may contain the name of a series.

    A text is the name of a series if it occurs again in its column. A row of more than two columns may also contain a
    name if it has at most one unit and this unit is a single letter.
    """
    units = [text.strip() for text in rows[0] if _is_unit(text) and text.strip().casefold() not in _ABSENT]
    if len(rows[0]) > 2 and all(len(text) == 1 and text.isalpha() for text in units) and len(units) < 2:
        return True
    others = [row for row in rows[1:] if not is_units_row(row)]
    return any(
        text and row[place : place + 1] == [text] for row in others for place, text in enumerate(rows[0])
    )


def is_units_row(fields: Sequence[str]) -> bool:
    """Return whether most fields of a row are units, types or date formats, and no field is a number or a time."""
    filled = [text.strip() for text in fields if text.strip()]
    if not filled or any(NUMBER_OR_TIME.fullmatch(text) for text in filled):
        return False
    return sum(_is_unit(text) for text in filled) >= 0.6 * len(filled)


def has_no_header(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first record is a row and not a header.

    The first record is a row if it has a number or a time in every column in which the second record has a number or a
    time, and in at least one column. Each text of the first record must also occur again in the same column, because a
    column name usually does not occur again.
    """
    if len(rows) < 2 or len(rows[0]) != len(rows[1]):
        return False
    values = [[NUMBER_OR_TIME.fullmatch(text) is not None for text in row] for row in rows[:2]]
    named = any(below and not above for above, below in zip(*values, strict=True))
    if named or not any(values[0]):
        return False
    texts = [place for place, is_value in enumerate(values[0]) if not is_value and rows[0][place]]
    return all(any(row[place : place + 1] == [rows[0][place]] for row in rows[1:]) for place in texts)


def _find_value_columns(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the indices of the columns that contain numbers or times in most rows."""
    found = []
    for place in range(width):
        cells = [row[place] for row in rows if row[place].strip()]
        values = sum(NUMBER_OR_TIME.fullmatch(cell) is not None for cell in cells)
        if cells and values >= 0.7 * len(cells):
            found.append(place)
    return found


def _is_row(fields: Sequence[str], columns: Sequence[int], width: int) -> bool:
    """Return whether a record has numbers or times in at least half of its filled fields in these columns."""
    if len(fields) != width:
        return False
    cells = [fields[place] for place in columns if fields[place].strip()]
    values = sum(NUMBER_OR_TIME.fullmatch(cell) is not None for cell in cells)
    return values > 0 and values >= 0.5 * len(cells)


def _score_likeness(fields: Sequence[str]) -> int:
    """Return a score that is higher the more a record of texts looks like a header."""
    filled = [text.strip() for text in fields if text.strip()]
    unlike = is_units_row(fields) or fields[0] == "TOA5" or fields[0].endswith(":") or ": " in fields[0]
    named = any(_TIME_NAME.search(text) for text in filled)
    whole = len(set(filled)) == len(filled) >= len(fields) - 1
    return named + 2 * whole - 4 * unlike


def _is_unit(text: str) -> bool:
    bare = text.strip("[](){}<># ").casefold()
    if not bare or _FORMAT.fullmatch(bare):
        return True
    words = [word for word in re.split(r"[/*·.^ :²³⁻¹\d_-]+", bare.replace("deg ", "deg")) if word]
    return bool(words) and all(word in _UNITS or word.strip("°º") in _UNITS for word in words)


ANY = Files()
"""Settings of a spec that does not set the dialect."""

BEGINNING = 1 << 16
"""Number of bytes at the beginning of a file that are inspected to find the dialect."""
COMMENT = "#"
ROW_NAMES = "row_names"
"""Name for the first column if the header has no name for it, as in files that R and pandas write."""
_SEP = re.compile(r"\s*\"?sep=(.)\"?\s*", re.IGNORECASE)
_SINGLE_QUOTED = re.compile(r"(?:^|[,;\t| ])'[^'\n]*'(?=[,;\t| \r]|$)", re.MULTILINE)
NAMES = {COMMA: "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar (|)", BLANK: "blanks"}
"""Name of each separator in words."""


class _Cut(NamedTuple):
    """Records of a text that is cut at one separator, and the position of the header."""

    separator: str
    records: list[FileRecord]
    place: HeaderPlace


def find_dialect(beginning: bytes, columns: Sequence[str] = (), named: Files = ANY) -> Dialect:
    """Return the dialect of a CSV file.

    With `columns`, the separator and the header line are chosen so that the header has these columns. If the spec
    names the columns of files without a header, the separator must give as many fields as there are names. In all other
    cases the separator with the highest score (`_score_cut`) is chosen, or a comma if all scores are 0.

    Args:
        beginning: first bytes of the file.
        columns: columns that the file must have; empty if they are not known.
        named: settings of the spec for files.
    """
    plain, text = _decode_beginning(beginning, named)
    if named.comment is None and text.startswith("%"):  # MATLAB and LaTeX begin comments with a percent sign
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
        # In most files the first line is the header.
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
    """Return a dialect with the detected encoding and line ends, and the decoded text of a file's beginning."""
    encoding = "utf-8" if named.encoding is None else named.encoding
    if named.encoding is None:
        encoding = _find_wide_encoding(beginning) or encoding
    data = beginning if encoding != "utf-8" else beginning.removeprefix(BOM)
    text = data.decode(encoding, "backslashreplace").removeprefix("\ufeff")
    by_cr = "\r" in text and "\n" not in text
    return Dialect(encoding=encoding, by_cr=by_cr), text.replace("\r", "\n") if by_cr else text


def _find_wide_encoding(beginning: bytes) -> str | None:
    """Return a UTF-16 encoding if a file has a byte order mark or a NUL in nearly every other byte; else None."""
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    some = beginning[:2000]
    if len(some) < 8 or some.count(0) < len(some) // 3:
        return None
    if some[::2].count(0) < len(some) // 20:
        return "utf-16-le"
    return "utf-16-be" if some[1::2].count(0) < len(some) // 20 else None


def _quote_of(text: str) -> str:
    """Return the quote of a text: a double quote, or an apostrophe if apostrophes enclose fields.

    Apostrophes count only if the text has no double quote, and if they enclose at least two fields of the header, or
    fields in most lines.
    """
    if '"' in text or "'" not in text:
        return '"'
    header, lines = text.lstrip("\n").split("\n", 1)[0], text.count("\n") or 1
    is_quoted = len(_SINGLE_QUOTED.findall(header)) > 1 or len(_SINGLE_QUOTED.findall(text)) >= 0.8 * lines
    return "'" if is_quoted else '"'


def _locate_header(cut: _Cut, named: Files) -> _Cut:
    """Return records with the likely position of the header; with `skip_lines`, the header is the first record."""
    if named.skip_lines is None:
        return cut._replace(place=find_header(cut.records, named.comment or COMMENT))
    width = len(cut.records[0].fields) if cut.records else 0
    return cut._replace(place=HeaderPlace(0, 1, width))


def _build_dialect(plain: Dialect, cut: _Cut, place: int, columns: Sequence[str], named: Files) -> Dialect:
    """Return the dialect of a file whose header is the record at `place`; -1 means that the file has no header."""
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
    header = records[place].fields
    rows = [one.fields for one in records[place + 1 :] if not (comment and one.fields[0].startswith(comment))]
    units = named.units_rows
    below = count_units_below(records, place) if units is None else _count_units_rows(rows, units)
    extra, unnamed = _count_unnamed_fields(header, rows[below:])
    return plain._replace(
        separator=cut.separator,
        skip=plain.skip + records[place].line,
        below=below,
        comment=comment,
        extra=extra,
        first=ROW_NAMES if unnamed else None,
    )


def _count_units_rows(rows: Sequence[Sequence[str]], most: int) -> int:
    """Return how many of the first rows are rows of units: at most `most`, and none from the first measured row on.

    A row is measured if it has a time where the row after the rows of units has one, or a number where that row has one
    and no time. So a file without its rows of units loses no measured row.
    """
    kinds = [[_find_kind(text) for text in row] for row in rows[: most + 1]]
    usual = kinds[most] if len(kinds) > most else None
    for count, found in enumerate(kinds[:most]):
        if max(found) > 0 and (usual is None or (max(usual), max(usual)) in zip(found, usual, strict=False)):
            return count
    return most


def _find_kind(text: str) -> int:
    """Return 2 for a time, 1 for a number, and 0 for another text."""
    return 0 if NUMBER_OR_TIME.fullmatch(text) is None else 1 if _NUMBER.fullmatch(text) else 2


def _count_unnamed_fields(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[int, bool]:
    """Return the number of empty fields without a name at the end of rows, and whether the first field has no name."""
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
    # A row such as `20,5` may be one number with a decimal comma. In this case the header names the first field.
    is_fraction = all(is_cut_number(*row[-2:]) for row in rows)
    return 0, numbered or len(rows) > 1 and len({row[0] for row in rows}) == len(rows) and not is_fraction


def describe_header(dialect: Dialect) -> list[str]:
    """Return descriptions of the unusual features of a file: its encoding, header, comments and quotes."""
    lines = "the line above it is" if dialect.skip == 1 else f"the {dialect.skip:,} lines above it are"
    header = "the first row" if dialect.names else "the header"
    features = (
        (dialect.is_recoded, f"text in {dialect.encoding}"),
        (dialect.skip, f"{header} is line {dialect.skip + 1:,}, and {lines} left out"),
        (dialect.below, f"{format_count(dialect.below, 'row')} of units below the header left out"),
        (dialect.comment, f"lines that begin with {dialect.comment} left out"),
        (dialect.first, f"the header has no name for the first column, which is called {dialect.first}"),
        (dialect.quote != '"', "texts within apostrophes"),
    )
    return [words for is_so, words in features if is_so]


def suggest_setting(beginning: bytes, columns: Sequence[str], named: Files = ANY) -> str:
    """Return why a header may lack columns, with the setting to change; empty if the dialect is not the cause."""
    found = find_dialect(beginning, columns, named)
    rows = _parse_rows_below(beginning, found)
    if found.names or not rows:
        return ""
    if not set(columns) & set(rows[0]) and has_no_header(rows):
        names = ", ".join(columns) if len(columns) == len(rows[0]) else f"{', '.join(columns)}, ..."
        return (
            f"its first line looks like a row ({_quote_name(found.separator.join(rows[0]))}): if it has no "
            f"header, name its "
            f"{len(rows[0])} columns in order in the spec, files: {{columns: [{names}]}}"
        )
    if found.skip:
        return (
            f"the header seems to be line {found.skip + 1} ({_quote_name(found.separator.join(rows[0]))}); "
            f"if another line "
            "is, name the number of lines above it in the spec, such as files: {skip_lines: 1}"
        )
    if len(rows[0]) == 1 and named.separator is not None:
        return f"with {NAMES[found.separator]} as files.separator its header is one field ({_quote_name(rows[0][0])})"
    return ""


def _parse_rows_below(beginning: bytes, found: Dialect) -> list[list[str]]:
    """Return the fields of the header and of all records below it, without the skipped lines."""
    _, text = _decode_beginning(beginning, Files(encoding=found.encoding if found.is_recoded else None))
    below = text.split("\n", found.skip)[-1]
    records = read_records(below, found.separator, found.quote, len(beginning) == BEGINNING)
    return [one.fields for one in records]


def detect_settings(beginning: bytes) -> Files:
    """Return the settings that a spec needs for a file: encoding, lines above the header, units and comments.

    The settings of a file without a header also contain made-up column names.
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
    """Return whether bytes are probably Windows-1252, because they are neither UTF-8 nor UTF-16."""
    if _find_wide_encoding(beginning) or beginning.isascii():
        return False
    return beginning.decode("utf-8", "ignore").isascii()


def _make_up_names(beginning: bytes, found: Dialect) -> tuple[str, ...]:
    """Return made-up column names for a file without a header; return no names for other files."""
    records = _parse_rows_below(beginning, found)
    rows = [one for one in records if not (found.comment and one[0].startswith(found.comment))]
    if found.first is not None or not has_no_header(rows):
        return ()
    above = records[0]  # this record may be a header that begins like a comment, such as `#YY,MM,DD`
    if len(above) == len(rows[0]) and not any(NUMBER_OR_TIME.fullmatch(text) for text in above):
        return ()
    return tuple(f"c{place}" for place in range(1, len(rows[0]) + 1))


def _score_cut(cut: _Cut, fields: int | None = None) -> tuple[float, int]:
    """Return a score of how well a separator cuts records; below 1 the records have different numbers of fields.

    A good separator gives each record the same number of fields (`fields`, if known), and most of these fields are
    numbers or times. Among equal separators, the separator with more fields is better. Numbers are counted because a
    decimal comma may cut all records into the same number of fields, but these fields are not all numbers.
    """
    width = cut.place.width
    begin = cut.place.first if cut.place.record < 0 else cut.place.record
    rows = [one.fields for one in cut.records[begin:]]
    if width < 2 or not rows:
        return 0.0, 0
    even = [row for row in rows if len(row) == width]
    # If all rows end with extra separators, the number of fields before these separators counts, as in the header.
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
