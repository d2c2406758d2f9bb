"""Explain why rows were rejected, with an example value, the likely cause, and the setting that helps."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from datetime import UTC
from typing import Any

from jobs.core.redaction import redact_beginning, shorten_text
from jobs.core.report import format_count
from jobs.core.time_counts import COUNTS, count_of, to_datetime
from jobs.core.time_readings import (
    EARLY_US,
    EPOCHS,
    TimeReading,
    describe_readings,
    find_forms,
    find_readings,
    lacks_date,
)
from jobs.core.times import DIRECTIVES, UNIT_US, TimeParser, load_zone
from jobs.landing.csv_records import BLANK, COMMA, is_cut_number
from jobs.landing.dialects import NAMES
from jobs.landing.raw_rows import BYTES, CORRUPT, FIELDS, LINE, parse_payload
from jobs.landing.values.keys import NOT_WHOLE
from jobs.landing.values.number_reading import find_setting, format_setting
from jobs.landing.values.time_forms import explain_texts
from jobs.landing.values.times import AFTER_LANDING, BEFORE_RANGE, ClockChanges, find_repeats, read_now_us
from jobs.specs.files import SEPARATORS
from jobs.specs.model_spec import ModelSpec

_QUOTE_IT = (
    'a separator within a text needs quotation marks around the text, and a quotation mark (") within one is '
    "written twice"
)


def explain_shape(row: Mapping[str, Any]) -> str:
    """Return the likely reason why the number of fields of a row differs from that of the header, and the remedy.

    row: members of the payload of the rejected row.
    """
    line = str(row.get(CORRUPT) or "")
    said = re.fullmatch(r"([0-9]+), the header ([0-9]+)", str(row.get(FIELDS)))
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
    """Return the separator that splits a line into `count` fields, and the fields; empty if no separator does."""
    for separator in (*SEPARATORS, BLANK):
        try:
            fields = next(csv.reader([line], delimiter=separator), [])
        except csv.Error:
            continue
        if len(fields) == count:
            return separator, fields
    return "", []


MOST = 5
"""Maximum number of reasons that are explained; the most frequent reasons are chosen."""
_SHOWN = 60
_THREE = re.compile(r"(?<![0-9])[1-9][0-9]{0,2},[0-9]{3}(?![0-9])")
_PLAIN = re.compile(r"[+-]?[0-9]+(?:[.][0-9]*)?")


_CAUSES = {
    "control missing": "a known input cannot be guessed; fill it in, or take the column out of control",
    "missing": "the field is empty; fill it in",
    "not UTF-8 text": "it is probably Windows-1252 or Latin-1; set files: {encoding: windows-1252} in the spec, or "
    "convert it with `iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`",
    "does not match line_pattern": "line_pattern must match the whole line; mend it, then replay the rows from "
    "quarantine",
    "not a JSON object": "each line holds one object, such as {...}",
}
"""Causes that follow from the problem alone."""


def explain_reasons(
    spec: ModelSpec, reasons: Mapping[str, int], examples: Mapping[str, str], newest: int | None = None
) -> list[str]:
    """Return a sentence for each of the most frequent reasons.

    Args:
        spec: spec of the model.
        reasons: number of rejected rows, by reason.
        examples: payload of one rejected row, by reason.
        newest: time of the newest accepted row, in microseconds since 1970.
    """
    most = sorted(reasons, key=lambda reason: (-reasons[reason], reason))[:MOST]
    return [explain_reason(spec, reason, examples.get(reason), newest) for reason in most]


def explain_reason(spec: ModelSpec, reason: str, payload: str | None, newest: int | None = None) -> str:
    """Return a reason with an example value, the likely cause, and the setting that helps.

    Args:
        spec: spec of the model.
        reason: reason of the rejection.
        payload: payload of a row that was rejected for this reason.
        newest: time of the newest accepted row, in microseconds since 1970.
    """
    row = parse_payload(payload) or {}
    value = _find_value(spec, reason, row, payload)
    if reason.endswith((AFTER_LANDING, BEFORE_RANGE)):
        cause = _explain_range(spec, reason, value or "", newest)
    else:
        cause = _find_cause(spec, reason, row, value)
    return f"{reason}" + ("" if value is None else f", such as {_shorten_value(value)}") + f": {cause}"


def _find_value(spec: ModelSpec, reason: str, row: Mapping[str, Any], payload: str | None) -> str | None:
    """Return the value that caused the rejection of a row; None if no single value caused the rejection."""
    kind, _, rest = reason.partition(" ")
    column = rest.partition(":")[0]
    if kind in ("key", "time", "measurement", "control", "id", "input"):
        if row.get(column) is None and spec.files.names:
            names = spec.list_file_columns([column])
            values = [str(row[name]) for name in names if row.get(name) is not None]
            return " ".join(values) or None
        value = row.get(column)
        return None if value is None else str(value)
    for name in (CORRUPT, LINE):
        if row.get(name) is not None:
            return str(row[name])
    if row.get(BYTES) is not None:
        return next((str(text) for text in row.values() if "\\x" in str(text)), None)
    return payload


def _find_cause(spec: ModelSpec, reason: str, row: Mapping[str, Any], value: str | None) -> str:
    problem = reason.rpartition(": ")[2]
    if problem == "not a time" and spec.time_parts:
        return _explain_joined_time(spec)
    if problem == "not a time":
        return _explain_time(spec, (value or "").strip())
    if problem in ("not a number", "not finite"):
        return _explain_number(spec, (value or "").strip(), reason.partition(" ")[2].rpartition(": ")[0])
    if problem == NOT_WHOLE:
        return _explain_not_whole(value or "")
    if problem == "not as many fields as the header":
        return explain_shape(row)
    kind = "control missing" if reason.startswith("control") and problem == "missing" else problem
    return _CAUSES.get(kind, "correct the rows at their source")


def _explain_not_whole(value: str) -> str:
    """Explain why a text cannot be a key in a table with whole-number keys, and how to correct this."""
    table = "the measurements table has whole numbers in this column, from the first file that landed"
    try:
        number = int(float(value.strip()))
    except (ValueError, OverflowError):
        return f"{table}; a table keeps its types, so give the model another name, or write whole numbers"
    return (
        f"{table}, and this is not how {number} is written: it may name another system; write {number} if it is the "
        "same one, else give the model another name and land files with texts first"
    )


def _explain_joined_time(spec: ModelSpec) -> str:
    """Explain why several columns together may not be a time, and name the setting that helps."""
    parts = spec.time_parts
    names = " and ".join(parts.values())
    if "time" in parts:
        date, clock = (
            json.dumps(parts.get(part, next(iter(parts.values()))), ensure_ascii=False)
            for part in ("date", "time")
        )
        return (
            f"{names} make no time; if {clock} has hours, or hours and minutes as 1730, say so in the spec: time: "
            f"{{date: {date}, hour: {clock}}}, or hhmm: {clock}; if the date is not ISO 8601, set its time_format, "
            'such as "%d.%m.%Y"'
        )
    if "date" in parts:
        return f'{names} make no time; if the date is not ISO 8601, set its time_format, such as "%d.%m.%Y"'
    return f"{names} make no time; correct the rows at their source"


def _explain_number(spec: ModelSpec, value: str, column: str) -> str:
    """Describe a text that is not a number by the rules of the spec, and name the setting that helps."""
    listed = json.dumps([*spec.missing_values, value], ensure_ascii=False)
    if spec.files.decimal == "," and _PLAIN.fullmatch(value):
        return (
            "with files.decimal a comma, a point may separate thousands; write 1234,5, or take files.decimal out of "
            "the spec"
        )
    changed = find_setting(value, spec.files, column)
    if changed:
        return _describe_notation(spec, value, changed)
    if len(value) <= _SHOWN:
        return f"if it stands for a missing value, set missing_values: {listed} in the spec"
    return "write numbers alone"


def _describe_notation(spec: ModelSpec, value: str, changed: Mapping[str, Any]) -> str:
    """Describe the notation of a number, and the settings for this notation."""
    setting = f"set {format_setting(changed)} in the spec"
    if value.count(",") == 1 and "." not in value and changed.get("decimal") == "," and _THREE.search(value):
        other = format_setting({**{k: v for k, v in changed.items() if k != "decimal"}, "thousands": ","})
        return f"a comma before the fraction or between thousands; {setting}, or {other}"
    unit = changed.get("units", {})
    if unit and spec.files.units.keys() & unit.keys():
        return f"another unit than files.units has for this column; write all in one, or {setting}"
    words = {
        "decimal": "a comma before the fraction"
        if changed.get("decimal") == ","
        else "a point before the fraction",
        "thousands": "marks between thousands",
        "negative": f"a negative number written otherwise ({changed.get('negative')})",
        "units": "a number with a unit",
        "words": "a word for a number",
    }
    return f"{', '.join(words[name] for name in changed)}; {setting}"


def _explain_time(spec: ModelSpec, value: str) -> str:
    """Explain why a text is not a time in the format of the spec, and name a format that fits."""
    if spec.time_format is not None and TimeParser(None, UTC)(value) is not None:
        return f"it is in ISO 8601; if all times are, take time_format: {json.dumps(spec.time_format)} out of the spec"
    readings = [one for one in find_readings(value) if one.form != spec.time_format]
    if readings:
        found, others = readings[0], readings[1:]
        setting = f"set time_format: {json.dumps(found.form)} in the spec, which reads it as {found}"
        setting += f"; it may also be {describe_readings(others)}" if others else ""
        if spec.time_format in COUNTS and found.form in COUNTS:
            return f"out of range as {spec.time_format}; its size is that of {found.form}: {setting}"
        unit = found.form.replace("_", " ").replace("epoch", "a count of")
        return f"{unit if found.form in COUNTS else f'it reads as {found.form}'}; {setting}"
    if re.fullmatch(r"[0-9]{4}", value):
        return f'a year alone; write a date, such as {value}-01-01, or set time_format: "%Y" in the spec'
    if lacks_date(value):
        return "a time of day without a date; write both, such as 2024-01-31 17:05"

    def write(form: str | None, zone: str | None) -> str:
        changed = {} if zone is None else {"time_zone": zone}
        changed |= {} if form == spec.time_format else {"time_format": form}
        settings = (f"{name}: {json.dumps(text, ensure_ascii=False)}" for name, text in changed.items())
        return f"with {' and '.join(settings)} in the spec" if changed else "the spec as it is"

    if advice := explain_texts([value], load_zone(spec.time_zone), write) if value else None:
        return advice
    if re.fullmatch(r"[0-9][.,]?[0-9]*[eE][+]?[0-9]+", value):
        return "a spreadsheet has rounded the number; save its column with all digits"
    zone = re.fullmatch(r"(.*[0-9]) ?([A-Z]{3,5})", value)
    if zone and TimeParser(None, UTC)(zone[1]) is not None:
        return (
            f"{spec.time_zone} has no clock named {zone[2]}; set time_zone in the spec to the zone that has"
        )
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}.*", value):
        return "there is no such date or time of day; correct it at its source"
    wanted = "ISO 8601, such as 2024-01-31 17:05" if spec.time_format is None else spec.time_format
    return f"times are read as {wanted}; name another form with time_format in the spec ({DIRECTIVES})"


def _explain_range(spec: ModelSpec, reason: str, value: str, newest: int | None) -> str:
    """Explain how far a time is outside the range of the spec, and name the setting that allows this time."""
    zone = load_zone(spec.time_zone)
    found = (TimeParser(form, zone)(value) for form in (spec.time_format, None))
    micros = next((one for one in found if one is not None), None)
    if micros is None:
        where = ""
    elif newest is not None:
        where = f"at {_format_moment(micros)}, {_format_span(micros - newest)} the newest row; "
    else:
        where = f"at {_format_moment(micros)}, {_format_span(micros - read_now_us())} now; "
    if reason.endswith(BEFORE_RANGE):
        return f"{where}the first time is {spec.time_range.earliest}; set time_range: {{earliest: ...}} in the spec"
    return (
        f"{where}a row may be {spec.time_range.latest} after its landing, else later rows of its key are late; "
        "correct the clock at the source, or set time_range: {latest: null} in the spec for rows of the future"
    )


def _format_moment(micros: int) -> str:
    return str(TimeReading("", micros))


def _format_span(micros: int) -> str:
    """Return a difference of times in words, with `after` or `before`."""
    size = abs(micros) / UNIT_US["day"]
    number, unit = (
        (size / 365.25, "year") if size >= 730 else (size, "day") if size >= 2 else (size * 24, "hour")
    )
    return f"{format_count(round(number), unit)} {'after' if micros >= 0 else 'before'}"


def describe_clock_changes(spec: ModelSpec, clocks: ClockChanges) -> list[str]:
    """Return notes on the rows whose local times are near a clock change."""
    zone = spec.time_zone
    told = (
        (
            clocks.second,
            f"in an hour that the clocks of {zone} repeat: a step back within a key began the second pass",
        ),
        (
            clocks.unclear,
            f"in an hour that the clocks of {zone} repeat, in no order that tells the first pass from the second: "
            "taken for the first; write times with an offset, such as +01:00",
        ),
        (
            clocks.skipped,
            f"at times that the clocks of {zone} skip: moved on by the gap; if the source never puts its clock "
            "forward, set time_zone to one without changes, such as Etc/GMT-1",
        ),
    )
    return [f"note: {format_count(count, 'row')} {what}" for count, what in told if count]


def find_epoch_doubt(spec: ModelSpec, first: int | None, last: int | None) -> str | None:
    """Return a warning if the unit of numeric times is probably wrong, else None.

    For example, seconds that are read as milliseconds give times in January 1970.

    Args:
        spec: spec of the model.
        first: first time, in microseconds since 1970; None without rows.
        last: last time, in microseconds since 1970; None without rows.
    """
    count = count_of(spec.time_format)
    if count is None or count.is_years or first is None or last is None:
        return None
    end = count.origin + EARLY_US
    number = count.convert_us(last)
    fitting = next((form for form in find_forms(number, number) if form in EPOCHS), None)
    if not count.origin <= first <= last < end or fitting is None or fitting == spec.time_format:
        return None
    return (
        f"all times lie before {to_datetime(end).year}, as {spec.time_format} of the spec reads them; their size is "
        f"that of {fitting}: set time_format: {fitting}, in a model of another name if rows have landed, as those stay"
    )


def describe_repeats(
    spec: ModelSpec,
    rows: int,
    span: tuple[int, int] | tuple[None, None] = (None, None),
    in_part: bool = False,
) -> str:
    """Return the note on accepted rows that have the same key and time as another row of the same file.

    Args:
        spec: spec of the model.
        rows: number of repeated rows.
        span: first and last time of the accepted rows, in microseconds since 1970.
        in_part: whether rows were compared only within each part of a large file.
    """
    first, last = span
    dates = [] if first is None or last is None else find_repeats(load_zone(spec.time_zone), first, last)
    clocks = (
        f"if they are in an hour that the clocks of {spec.time_zone} repeat, the last on {dates[-1]:%Y-%m-%d}, write "
        "times with an offset, such as +01:00; "
        if dates
        else ""
    )
    count = f"{'at least ' if in_part else ''}{format_count(rows, 'row')}"
    return (
        f"note: {count} with key and time of another row of the file: each counts as a measurement of "
        f"its own; {clocks}if they are copies, set duplicates: {{action: drop}} in the spec"
    )


def _shorten_value(value: str) -> str:
    return repr(shorten_text(redact_beginning(value), _SHOWN))
