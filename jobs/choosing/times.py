"""Find the column of the event time, and its format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, tzinfo
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.choosing.table import Table
from jobs.core.errors import UserError
from jobs.core.times import EPOCH_FORMATS, EPOCH_RANGES, USUAL_FORMATS, TimeParser
from jobs.encoding import arrow
from jobs.landing.parsing import read_times

HINT = re.compile(
    r"(^|[^a-z])(time|timestamp|ts|t|date|datetime|at|when|day|epoch|utc|sec|secs|seconds|created)([^a-z]|$)"
    r"|(time|date|timestamp|stamp)$",
    re.IGNORECASE,
)
DAYS = (10_000, 80_000)  # 1927 to 2119 as a spreadsheet counts
YEARS = (1500, 2200)
ENOUGH = 0.95
"""Share of the values that must be times."""
NEAR_START = 0.1
"""Share of the values that are no larger than those with which series begin."""
TRIED = 500
_PLAIN = re.compile(r"\s*[+-]?[0-9]+(?:[.][0-9]*)?(?:[eE][+-]?[0-9]+)?\s*")


class TimeColumn(NamedTuple):
    """The column of the event time.

    name, time_format: as in a spec; micros (N,) microseconds since 1970 UTC; known (N,) which values are times
    note: a doubt to tell of, or None
    """

    name: str
    time_format: str | None
    micros: NDArray[np.int64]
    known: NDArray[np.bool_]
    note: str | None = None


def time_of(
    table: Table, name: str, zone: tzinfo = UTC, time_format: str | None = None, is_given: bool = False
) -> TimeColumn | str:
    """Return a column as times, or why it holds none.

    Args:
        table: N rows.
        name: of the column.
        zone: of times without an offset.
        time_format: that the user says they are in; None: find it.
        is_given: the user says that it is the time, so its name need not look like one.
    """
    column = table.source.columns[name]
    kind = column.type
    if time_format is not None and not pa.types.is_temporal(kind):
        return _read(table, name, time_format, zone)
    hinted = is_given or HINT.search(name) is not None
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return _read(table, name, None, zone)
    if pa.types.is_string(kind):
        return _text(table, name, zone, hinted)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _number(table, name, zone, hinted, column.cast(pa.float64(), safe=False))
    return f"holds {kind}"


def _text(table: Table, name: str, zone: tzinfo, hinted: bool) -> TimeColumn | str:
    column = table.source.columns[name]
    texts = [text for text in column.drop_null().unique().to_pylist() if text.strip()]
    if not texts:
        return "is empty"
    tried = [texts[i] for i in np.unique(np.linspace(0, len(texts) - 1, TRIED).astype(int))]
    if sum(_PLAIN.fullmatch(text) is not None for text in tried) >= ENOUGH * len(tried):
        values = [float(text) if text and _PLAIN.fullmatch(text) else np.nan for text in column.to_pylist()]
        found = _number(table, name, zone, hinted, arrow.numbers(np.array(values)))
        compact = [
            form for form in USUAL_FORMATS if _share(form, zone, tried) >= ENOUGH and len(tried[0]) >= 8
        ]
        if not isinstance(found, str) or not compact:
            return found
        return _best(table, name, compact, zone)
    fitting = [form for form in (None, *USUAL_FORMATS) if _share(form, zone, tried) >= ENOUGH]
    if not fitting:
        if re.fullmatch(r"\s*[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?.*", tried[0]):
            return f"holds a time of day without a date, such as {tried[0]!r}"
        return _several(table, column, tried, zone) or f"holds text that is no time, such as {tried[0]!r}"
    return _best(table, name, fitting[:1] if fitting[0] is None else fitting, zone)


def _several(table: Table, column: pa.Array, tried: list[str], zone: tzinfo) -> str | None:
    """Return where times are written in one form in some rows and in another in the others, or None."""
    rest, named = tried, []
    for _ in range(2):
        form = max((None, *USUAL_FORMATS), key=lambda one: _share(one, zone, rest))
        parser = TimeParser(form, zone)
        first = next((text for text in rest if parser(text) is not None), None)
        if first is None:
            return None
        file = table.files[int(table.file[column.index(first).as_py()])].name
        named.append(f"{first!r} ({form or 'ISO 8601'}) in {file}")
        rest = [text for text in rest if parser(text) is None]
        if len(rest) <= (1 - ENOUGH) * len(tried):
            return f"holds times in two forms, {' and '.join(named)}; write all in one"
    return None


def _share(form: str | None, zone: tzinfo, texts: list[str]) -> float:
    parser = TimeParser(form, zone)
    return sum(parser(text) is not None for text in texts) / len(texts)


def _best(table: Table, name: str, forms: Sequence[str | None], zone: tzinfo) -> TimeColumn | str:
    """Return the times in the format in which most are times, and then follow one another best."""
    found = [one for form in forms if not isinstance(one := _read(table, name, form, zone), str)]
    if not found:
        return "holds too few times"
    best = min(found, key=lambda one: (-one.known.mean(), *_disorder(table, one)))
    as_good = [one for one in found if one.known.mean() == best.known.mean() and one is not best]
    if as_good:
        others = ", ".join(str(one.time_format) for one in as_good)
        return best._replace(note=f"{name}: read as {best.time_format}; {others} would fit too")
    return best


def _disorder(table: Table, found: TimeColumn) -> tuple[int, int]:
    """Return how often time goes back within a file, and the number of different steps."""
    steps = np.diff(found.micros)[np.diff(table.file) == 0]
    return int((steps < 0).sum()), len(np.unique(steps))


def _read(table: Table, name: str, form: str | None, zone: tzinfo) -> TimeColumn | str:
    column = table.source.columns[name]
    try:
        micros, known = read_times(column, form, zone, name)
    except (UserError, ValueError) as error:
        return str(error).removeprefix(f"{name} ")
    present = ~arrow.to_numpy(column.is_null())
    if not present.any() or known[present].mean() < ENOUGH:
        return f"holds times in {known.sum():,} of {present.sum():,} rows only"
    return TimeColumn(name, form, micros, known)


def _number(table: Table, name: str, zone: tzinfo, hinted: bool, column: pa.Array) -> TimeColumn | str:
    values = arrow.to_numpy(column, np.nan)
    known = values[np.isfinite(values)]
    if not len(known):
        return "is empty"
    whole = bool((known == np.floor(known)).all())
    low, high = (float(np.quantile(known, q)) for q in (0.01, 0.99))
    rising = _rises(values, table.file)
    for form, least, most in EPOCH_RANGES:
        if least <= low and high <= most and (hinted or rising):
            return _read(table, name, form, zone)
    if whole and YEARS[0] <= low and high <= YEARS[1] and (rising or re.search("year", name, re.IGNORECASE)):
        return "holds years; write them as dates, such as 1871-01-01"
    if hinted and rising and DAYS[0] <= low and high <= DAYS[1]:
        return _read(table, name, "spreadsheet_days", zone)
    if hinted and rising and low >= 0 and high < EPOCH_RANGES[0][1]:
        found = _read(table, name, "epoch_seconds", zone)
        note = f"{name}: read as seconds, counted from 1970-01-01"
        return found if isinstance(found, str) else found._replace(note=note)
    if not hinted:
        return "holds numbers that are no times"
    return (
        f"holds numbers that are no times ({low:g} to {high:g}); known are {', '.join(EPOCH_FORMATS)}; a count "
        f"of days or steps can be read as if it were of seconds: --time {name} --time-format epoch_seconds"
    )


def _rises(values: NDArray[np.float64], file: NDArray[np.int64]) -> bool:
    """Return whether numbers rise from row to row within a file, or begin anew with each of several series."""
    steps = np.diff(values)[np.diff(file) == 0]
    if not (steps > 0).any():
        return False
    if (steps >= 0).mean() >= ENOUGH:
        return True
    landed = values[1:][np.diff(file) == 0][steps < 0]
    return bool((steps >= 0).mean() > 0.5 and (landed <= np.nanquantile(values, NEAR_START)).mean() >= ENOUGH)
