"""Explain why a CSV row has another number of fields than the header."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from typing import Any

from jobs.landing.csv_records import BLANK, COMMA, is_cut_number
from jobs.landing.dialects import NAMES
from jobs.landing.raw_rows import CORRUPT, FIELDS
from jobs.specs.files import SEPARATORS

_QUOTE_IT = (
    'a separator within a text needs quotation marks around the text, and a quotation mark (") within one is '
    "written twice"
)


def explain_shape(row: Mapping[str, Any]) -> str:
    """Return the likely cause why a rejected row has another number of fields than the header, and the remedy.

    row: members of the row's payload.
    """
    line, said = (
        str(row.get(CORRUPT) or ""),
        re.fullmatch(r"([0-9]+), the header ([0-9]+)", str(row.get(FIELDS))),
    )
    if said is None:
        return _QUOTE_IT
    count, wanted = int(said[1]), int(said[2])
    separator, fields = _split_fields(line, count)
    differ = f"it has {count:,} fields" if count != 1 else "it has 1 field"
    differ += f", the header {wanted:,}: "
    if count == 1:
        return differ + (
            "if it is a title, a total or a remark, it is no row; if its fields have another separator than the "
            "header's, write all with one"
        )
    if count < wanted:
        return differ + (
            "the row ends early; if it is the last one, the file was cut off while it was written: copy it again; if "
            "it is a total or a remark, it is no row; else a line break within a text needs quotation marks around it"
        )
    if not any(fields[wanted:]):
        return (
            differ
            + f"it ends with {NAMES.get(separator, 'a separator')} that most rows have not; take it away"
        )
    more = count - wanted
    pairs = sum(map(is_cut_number, fields, fields[1:]))
    if separator == COMMA and pairs >= more:
        return differ + (
            "a comma before a fraction looks like one between fields; write fractions with a point, put such numbers "
            'within quotation marks and set files: {decimal: ","}, or export with semicolons between the fields'
        )
    return differ + _QUOTE_IT


def _split_fields(line: str, count: int) -> tuple[str, list[str]]:
    """Return the separator that splits a line into `count` fields, and the fields."""
    for separator in (*SEPARATORS, BLANK):
        try:
            fields = next(csv.reader([line], delimiter=separator), [])
        except csv.Error:
            continue
        if len(fields) == count:
            return separator, fields
    return "", []
