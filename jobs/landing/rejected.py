"""Tell why rows were rejected: a value, the likely cause, and the setting that mends it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC
from typing import Any

from jobs.core.redaction import redacted
from jobs.core.report import plural
from jobs.core.times import EPOCH_FORMATS, EPOCH_RANGES, USUAL_FORMATS, TimeParser
from jobs.landing.raw_rows import BYTES, CORRUPT, LINE
from jobs.specs.model_spec import ModelSpec

MOST = 5
"""Reasons that are told of, the most frequent ones."""
EARLY_US = 94_694_400_000_000
"""1973-01-01, before which few measurements are and all numbers of too small a unit."""
_SHOWN = 60
_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+(?:[eE][+-]?[0-9]+)?")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:[ .,'\u00a0\u202f][0-9]{3})+(?:[.,][0-9]+)?")
_WITH_UNIT = re.compile(
    r"[^0-9+.,-]{0,3}[+-]?[0-9][0-9.,]*\s*[^0-9\s]{1,8}|[^0-9\s+.,-]{1,3}\s?[+-]?[0-9][0-9.,]*"
)
_PLAIN = re.compile(r"[+-]?[0-9]+(?:[.][0-9]*)?")
_COMPACT = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
_TRUTH = ("true", "false", "yes", "no")


def advice(spec: ModelSpec, reasons: Mapping[str, int], examples: Mapping[str, str]) -> list[str]:
    """Return a sentence for each of the most frequent reasons.

    Args:
        spec: of the model.
        reasons: number of rejected rows by reason.
        examples: the payload of a rejected row by reason.
    """
    most = sorted(reasons, key=lambda reason: (-reasons[reason], reason))[:MOST]
    return [explained(spec, reason, examples.get(reason)) for reason in most]


def explained(spec: ModelSpec, reason: str, payload: str | None) -> str:
    """Return a reason with a value that has it, the likely cause and the setting that mends it."""
    row = _row(payload)
    value = _value(reason, row, payload)
    cause = _cause(spec, reason, row, value)
    return f"{reason}" + ("" if value is None else f", such as {_short(value)}") + f": {cause}"


def _row(payload: str | None) -> dict[str, Any]:
    try:
        row = json.loads(payload or "")
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _value(reason: str, row: Mapping[str, Any], payload: str | None) -> str | None:
    """Return the value for which a row was rejected; None where there is none."""
    kind, _, rest = reason.partition(" ")
    column = rest.partition(":")[0]
    if kind in ("key", "time", "measurement", "control", "id", "input"):
        value = row.get(column)
        return None if value is None else str(value)
    for name in (CORRUPT, LINE):
        if row.get(name) is not None:
            return str(row[name])
    if row.get(BYTES) is not None:
        return next((str(text) for text in row.values() if "\\x" in str(text)), None)
    return payload


def _cause(spec: ModelSpec, reason: str, row: Mapping[str, Any], value: str | None) -> str:
    problem = reason.rpartition(": ")[2]
    if problem == "not a time":
        return _no_time(spec, (value or "").strip())
    if problem in ("not a number", "not finite"):
        return _no_number(spec, (value or "").strip())
    if problem == "not a whole number":
        return (
            "the measurements table has whole numbers in this column, from the first file that landed; a table keeps "
            "its types, so give the model another name, or write whole numbers"
        )
    if problem == "missing" and reason.startswith("control"):
        return "a known input cannot be guessed; fill it in, or take the column out of control"
    if problem == "missing":
        return "the field is empty; fill it in"
    if problem == "not as many fields as the header":
        return (
            'a separator within a text needs quotation marks around the text, and a quotation mark (") within one is '
            "written twice"
        )
    if problem == "not UTF-8 text":
        return "it is probably Windows-1252 or Latin-1; convert it with `iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`"
    if problem == "does not match line_pattern":
        return "line_pattern must match the whole line; mend it, then replay the rows from quarantine"
    if problem == "not a JSON object":
        return "each line holds one object, such as {...}"
    return "correct the rows at their source"


def _no_number(spec: ModelSpec, value: str) -> str:
    listed = json.dumps([*spec.missing_values, value], ensure_ascii=False)
    if _COMMA.fullmatch(value) and spec.files.decimal == ".":
        return 'a comma before the fraction; set files: {decimal: ","} in the spec'
    if spec.files.decimal == "," and _PLAIN.fullmatch(value):
        return (
            "with files.decimal a comma, a point may separate thousands; write 1234,5, or take files.decimal out of "
            "the spec"
        )
    if _GROUPED.fullmatch(value):
        return "marks between thousands; write the number without them"
    if value.casefold() in _TRUTH:
        return "a truth value; write 1 or 0"
    if _WITH_UNIT.fullmatch(value):
        return "a number with a unit; write the number alone, with the unit in the column's name"
    if len(value) <= _SHOWN:
        return f"if it stands for a missing value, set missing_values: {listed} in the spec"
    return "write numbers alone"


def _no_time(spec: ModelSpec, value: str) -> str:
    """Return why a text is no time in the spec's format, and which format it has."""
    found = format_of(value)
    setting = None if found is None else f"set time_format: {json.dumps(found)} in the spec"
    if spec.time_format in EPOCH_FORMATS and found in EPOCH_FORMATS:
        return f"beyond the year 9999 as {spec.time_format}; its size is that of {found}: {setting}"
    if found == spec.time_format:
        found = setting = None
    if setting is not None:
        what = (
            found.replace("_", " ").replace("epoch", "a count of")
            if found in EPOCH_FORMATS
            else f"it reads as {found}"
        )
        return f"{what}; {setting}"
    if spec.time_format is not None and TimeParser(None, UTC)(value) is not None:
        return f"it is in ISO 8601; if all times are, take time_format: {json.dumps(spec.time_format)} out of the spec"
    if re.fullmatch(r"[0-9]{4}", value):
        return f"a year alone; write a date, such as {value}-01-01"
    if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?.*", value):
        return "a time of day without a date; write both, such as 2024-01-31 17:05"
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}.*", value):
        return "there is no such date or time of day; correct it at its source"
    wanted = "ISO 8601, such as 2024-01-31 17:05" if spec.time_format is None else spec.time_format
    return f"times are read as {wanted}; name another form with time_format in the spec (%Y %m %b %d %H %M %S %f %z)"


def format_of(value: str) -> str | None:
    """Return the `time_format` that a text is written in, other than ISO 8601; None if it is none of the usual ones."""
    if re.fullmatch(r"[0-9]{4}", value):
        return None
    compact = _COMPACT.get(len(value)) if value.isdigit() else None
    for form in ([] if compact is None else [compact]) if value.isdigit() else USUAL_FORMATS:
        if TimeParser(form, UTC)(value) is not None:
            return form
    if _PLAIN.fullmatch(value):
        return next((form for form, low, high in EPOCH_RANGES if low <= float(value) <= high), None)
    return None


def doubtful_epoch(spec: ModelSpec, first: int | None, last: int | None) -> str | None:
    """Return a doubt about the unit of times (microseconds since 1970) that are numbers, or None.

    A count of seconds that is read as milliseconds lies in January 1970.
    """
    epoch = EPOCH_FORMATS.get(spec.time_format or "")
    if epoch is None or epoch.is_spreadsheet or first is None or last is None:
        return None
    number = last * epoch.parts / epoch.micros
    fitting = next((form for form, low, high in EPOCH_RANGES if low <= number <= high), None)
    if not 0 <= first <= last < EARLY_US or fitting is None or fitting == spec.time_format:
        return None
    return (
        f"all times lie before 1973, as {spec.time_format} of the spec reads them; their size is that of {fitting}: "
        f"set time_format: {fitting}, in a model of another name if rows have landed, as those stay"
    )


def repeated(rows: int) -> str:
    """Return the note about accepted rows that repeat key and time of another row of their file."""
    return (
        f"note: {plural(rows, 'row')} with key and time of another row of the file: each counts as a measurement of "
        "its own; if they are copies, set duplicates: {action: drop} in the spec"
    )


def _short(value: str) -> str:
    value = redacted(value)
    text = value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "..."
    return repr(text)
