"""Find the header of a CSV file: its record, the lines above it, and the rows of units below it."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jobs.landing.csv_records import BLANK

MOST_RECORDS = 200
"""Records at a file's beginning that are searched for the header."""
NUMBER_OR_TIME = re.compile(r" *[+-]?[.]?[0-9][0-9.,:/ TZ+eE-]*")
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
    "string long double datetime rfc3339 boolean unsignedlong float int integer ° º °c °f ºc ω ohm kohm ntu".split()
)  # fmt: skip


_ABSENT = frozenset(("", "na", "n/a", "none", "-", "--"))
"""Texts that mean no unit, or no value."""


class FileRecord(NamedTuple):
    """A record of a file: its first line (from 0) and its fields."""

    line: int
    fields: list[str]


class HeaderPlace(NamedTuple):
    """Position of a file's header.

    record  index of the header among the records; -1: there is no header
    first   index of the first row with numbers or times
    width   number of fields of the rows
    below   number of unit rows below the header
    """

    record: int
    first: int
    width: int
    below: int = 0


def read_records(text: str, separator: str, quote: str, is_cut: bool) -> list[FileRecord]:
    """Return the records of a text; if it is cut off and has several, without the last record."""
    lines = io.StringIO(text, newline="")
    found: list[FileRecord] = []
    begin = line = 0
    # Tabs at the end of a line are separators here, not blanks: each begins an empty field.
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
    """Return the likely position of the header: the record of texts above rows with numbers or times.

    If several records of texts stand above the rows, the lower ones are units if they look like units; else the upper
    ones are titles.
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
    # A number among titles, such as a device number, is not followed by a row.
    first = next(
        (place for i, place in enumerate(plain) if are_rows[i] and all(are_rows[i + 1 : i + 2])),
        None,
    )
    if first is not None and (block := _find_texts_above(records, first, width, plain)):
        header = max(
            block, key=lambda place: (_score_likeness(records[place].fields), -place if width > 2 else place)
        )
        return HeaderPlace(header, first, width, count_units_below(records[: first + 1], header))
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
    """Tell if a record has a text and then distinct years or dates, which are column names."""
    times = [text for text in fields if _YEAR_OR_DATE.fullmatch(text)]
    texts = [text for text in fields if text and NUMBER_OR_TIME.fullmatch(text) is None]
    return len(texts) > 0 and len(times) >= 3 and len(set(times)) == len(times)


def _find_texts_above(
    records: Sequence[FileRecord], first: int, width: int, plain: Sequence[int]
) -> list[int]:
    """Return the indices of records above the first row that may be a header or units.

    A comment counts only if it stands directly above the first row and no other record qualifies.
    """
    found: list[int] = []
    for place in range(first - 1, -1, -1):
        fields = records[place].fields
        if len(fields) != width and (len(fields) != width - 1 or width < 3):
            break
        if place in plain and len(set(fields)) > 1:
            found.append(place)
        elif place == first - 1 and place not in plain:
            return [place]
    return found


def count_units_below(records: Sequence[FileRecord], header: int) -> int:
    """Return how many rows of units stand below a header."""
    rows = [one.fields for one in records[header + 1 :]]
    count = 0
    while count < len(rows) - 1 and is_units_row(rows[count]) and not _may_name_series(rows[count:]):
        count += 1
    return count


def _may_name_series(rows: Sequence[Sequence[str]]) -> bool:
    """Tell if a text of the first row may name a series: its column repeats it, or it is the only unit, a letter.

    A row of two columns has one unit at most.
    """
    units = [text.strip() for text in rows[0] if _is_unit(text) and text.strip().casefold() not in _ABSENT]
    if len(rows[0]) > 2 and all(len(text) == 1 and text.isalpha() for text in units) and len(units) < 2:
        return True
    others = [row for row in rows[1:] if not is_units_row(row)]
    return any(
        text and row[place : place + 1] == [text] for row in others for place, text in enumerate(rows[0])
    )


def is_units_row(fields: Sequence[str]) -> bool:
    """Tell if most fields of a row are units, kinds or date formats, and no field is a number."""
    filled = [text.strip() for text in fields if text.strip()]
    if not filled or any(NUMBER_OR_TIME.fullmatch(text) for text in filled):
        return False
    return sum(_is_unit(text) for text in filled) >= 0.6 * len(filled)


def has_no_header(rows: Sequence[Sequence[str]]) -> bool:
    """Tell if the first record is a row, not a header.

    It is a row if it has a number or a time wherever the second record has one (at least once). Each of its texts must
    also occur again in its column: a column name does not.
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
    """Return the indices of fields that hold numbers or times in most rows."""
    found = []
    for place in range(width):
        cells = [row[place] for row in rows if row[place].strip()]
        values = sum(NUMBER_OR_TIME.fullmatch(cell) is not None for cell in cells)
        if cells and values >= 0.7 * len(cells):
            found.append(place)
    return found


def _is_row(fields: Sequence[str], columns: Sequence[int], width: int) -> bool:
    """Tell if a record has numbers or times in at least half of the columns that hold them."""
    if len(fields) != width:
        return False
    cells = [fields[place] for place in columns if fields[place].strip()]
    values = sum(NUMBER_OR_TIME.fullmatch(cell) is not None for cell in cells)
    return values > 0 and values >= 0.5 * len(cells)


def _score_likeness(fields: Sequence[str]) -> int:
    """Return a score of how much a record of texts looks like a header."""
    filled = [text.strip() for text in fields if text.strip()]
    unlike = is_units_row(fields) or fields[0] == "TOA5" or fields[0].endswith(":") or ": " in fields[0]
    named = any(_TIME_NAME.search(text) for text in filled)
    whole = len(set(filled)) == len(filled) >= len(fields) - 1
    return named + 2 * whole - 4 * unlike


def _is_unit(text: str) -> bool:
    bare = text.strip("[](){}<> ").casefold()
    if not bare or _FORMAT.fullmatch(bare):
        return True
    words = [word for word in re.split(r"[/*·.^ :²³⁻¹\d_-]+", bare.replace("deg ", "deg")) if word]
    return bool(words) and all(word in _UNITS or word.strip("°º") in _UNITS for word in words)
