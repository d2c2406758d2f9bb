"""Read times from columns, and assign the times in an hour that the local clock repeats to its two passes.

A time stands in a column of texts, of stored timestamps or of counts of a unit, or in several columns together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.core.time_counts import MAX_US, MIN_US, UNIT_US, Count, compute_wall_us, count_of, to_datetime
from jobs.core.time_readings import suggest_number_formats
from jobs.core.times import (
    CLOCK_PARTS,
    DATE_PARTS,
    TimeParser,
    convert_local_us,
    load_zone,
    now,
    parse_date_us,
    parse_time_of_day,
)
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_DAY, _SECOND = UNIT_US["day"], UNIT_US["second"]


class Change(NamedTuple):
    """Clock change: its time in microseconds UTC, and the step of the clock in microseconds (negative for back)."""

    at: int
    forward: int


def find_changes(zone: tzinfo, days: Iterable[int]) -> list[Change]:
    """Return the clock changes on days (counted from 1970 in UTC), and on the day before and after each day."""
    around = sorted({day + one for day in days for one in (-1, 0, 1)})
    found = (_find_change(zone, day) for day in around)
    return [one for one in found if one is not None]


@cache
def _find_change(zone: tzinfo, day: int) -> Change | None:
    """Return the clock change on a UTC day; None if the clock does not change on this day."""
    low, high = day * _DAY, (day + 1) * _DAY
    if not (MIN_US + _DAY < low and high < MAX_US - _DAY):
        return None
    first, last = compute_offset_us(zone, low), compute_offset_us(zone, high)
    if first == last:
        return None
    while high - low > _SECOND:
        middle = (low + high) // 2 // _SECOND * _SECOND
        low, high = (middle, high) if compute_offset_us(zone, middle) == first else (low, middle)
    return Change(high, last - first)


def compute_offset_us(zone: tzinfo, micros: int) -> int:
    """Return the offset of a zone from UTC, in microseconds, at a time in microseconds since 1970."""
    offset = to_datetime(micros).replace(tzinfo=UTC).astimezone(zone).utcoffset() or timedelta(0)
    return offset // timedelta(microseconds=1)


def find_repeats(zone: tzinfo, first: int, last: int) -> list[datetime]:
    """Return the beginnings, in local time, of the hours that a zone repeats between two times."""
    days = range(max(first, last - 20_000 * _DAY) // _DAY, last // _DAY + 1)
    found = [
        one for one in find_changes(zone, days) if one.forward < 0 and first <= one.at <= last - one.forward
    ]
    return [to_datetime(one.at + compute_offset_us(zone, one.at)) for one in found]


class ClockChanges(NamedTuple):
    """Numbers of rows at clock changes.

    repeated number of rows in a repeated hour
    second   number of rows in the second pass of a repeated hour
    unclear  number of rows in a repeated hour whose order fits neither one nor two passes; first pass is assumed
    skipped  number of rows with a local time that the clock skipped
    is_cut   whether rows of a key begin in a repeated hour, so that only earlier rows of the file show the pass
    """

    repeated: int = 0
    second: int = 0
    unclear: int = 0
    skipped: int = 0
    is_cut: bool = False


def settle(
    zone: tzinfo,
    micros: Ints,
    known: Bools,
    key: Ints,
    walls: Callable[[Ints], tuple[Ints, Bools]],
) -> tuple[Ints, ClockChanges]:
    """Return times with corrected times in the second pass of repeated hours, and the numbers of affected rows.

    The rows of each key are assumed to be in the order of time. Therefore a step back of the local time within a
    repeated hour is the beginning of the second pass.

    Args:
        zone: time zone of the times.
        micros: (N,) microseconds UTC; in a repeated hour, the time in the first pass.
        known: (N,) mask of the valid times.
        key: (N,) code of the key of each row.
        walls: function that returns, for given rows, the local times in microseconds, and a mask of the rows without an
            explicit offset.
    """
    if zone is UTC or not known.any():
        return micros, ClockChanges()
    found = ClockChanges()
    for change in find_changes(zone, np.unique(micros[known] // _DAY).tolist()):
        start, end = sorted((change.at, change.at + change.forward))
        rows = np.flatnonzero(known & (micros >= start) & (micros < end))
        clock, is_local = walls(rows)
        rows, clock = rows[is_local], clock[is_local]
        if not len(rows):
            continue
        if change.forward > 0:
            # A skipped local time was moved forward by the gap, and therefore differs from the local time of the
            # resulting moment.
            moved = int((clock - micros[rows] != compute_offset_us(zone, change.at)).sum())
            found = found._replace(skipped=found.skipped + moved)
            continue
        micros = micros.copy()
        found = found._replace(repeated=found.repeated + len(rows))
        for those, before, after in _split_by_key(rows, key, micros, known):
            second, is_unclear = _find_second_pass(micros[those], before, after, -change.forward)
            micros[those[second]] -= change.forward
            found = found._replace(
                second=found.second + len(second),
                unclear=found.unclear + is_unclear * len(those),
                is_cut=found.is_cut or (before is None and not len(second)),
            )
    return micros, found


def _split_by_key(
    rows: Ints, key: Ints, micros: Ints, known: Bools
) -> Iterator[tuple[Ints, int | None, int | None]]:
    """Yield the given rows of each key in the order of time, and the times of the key's nearest rows before and after.

    The time before or after is None if the key has no row there.
    """
    near, has = np.zeros(len(key), bool), np.zeros(int(key.max()) + 1, bool)
    near[rows], has[key[rows]] = True, True
    wanted = np.flatnonzero(has[key] & known)
    ordered = wanted[np.argsort(key[wanted], kind="stable")]
    for of_key in np.split(ordered, np.flatnonzero(np.diff(key[ordered])) + 1):
        steps = np.diff(micros[of_key])
        if (steps < 0).sum() > (steps > 0).sum():  # the newest row is first
            of_key = of_key[::-1]
        places = np.flatnonzero(near[of_key])
        first, last = int(places[0]), int(places[-1])
        before = int(micros[of_key[first - 1]]) if first else None
        after = int(micros[of_key[last + 1]]) if last + 1 < len(of_key) else None
        yield of_key[places], before, after


def _find_second_pass(times: Ints, before: int | None, after: int | None, length: int) -> tuple[Ints, bool]:
    """Return the indices of a key's rows in the second pass of a repeated hour, and whether the pass is unclear.

    Args:
        times: times of the key's rows in the repeated hour, as if all rows were in the first pass.
        before: last time of the key before these rows; None without an earlier row.
        after: first time of the key after these rows; None without a later row.
        length: length of the repeated hour in microseconds.
    """
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back) == 1:
        return np.arange(back[0] + 1, len(times)), False
    if len(times) == 2 and times[0] == times[1]:
        # Hourly rows have the same local time in both passes. All other rows with equal times are copies.
        steps = (
            None if before is None else times[0] - before,
            None if after is None else after - times[0] - length,
        )
        if any(step is not None and step >= length for step in steps):
            return np.array([1]), False
    return np.zeros(0, np.int64), len(back) > 1


_PLAIN_TIME = "[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.][0-9]{1,6})?"
AFTER_LANDING, BEFORE_RANGE = "after its landing", "before time_range.earliest"
"""Reasons for the rejection of a valid time."""
_AHEAD = timezone(timedelta(hours=1))
_OF_UTC = "(?:Z| ?UTC| ?GMT)"
ARROW_FROM = 5_000
"""Minimum number of rows for which Arrow parses times faster than Python."""


class Times(NamedTuple):
    """Times of N rows.

    micros: (N,) microseconds since 1970 UTC.
    known: (N,) mask of the valid times.
    missing: (N,) mask of the missing times.
    clocks: numbers of local times at clock changes.
    """

    micros: Ints
    known: Bools
    missing: Bools
    clocks: ClockChanges


def find_times(spec: ModelSpec, column: pa.Array, key: Ints, file: str) -> Times:
    """Return the times of a spec's time column.

    Args:
        spec: spec of the model.
        column: N values of the time column.
        key: (N,) code of the key of each row.
        file: name of the file, for errors.

    Raises:
        UserError: see `read_times`.
    """
    zone = load_zone(spec.time_zone)
    form = None if spec.time_parts else spec.time_format  # `combine_times` has already applied it
    micros, known = read_times(column, form, zone, f"{file}: time column '{spec.time}'")
    missing = arrow.to_numpy(column.is_null()).copy()
    if pa.types.is_string(column.type):
        unknown = np.flatnonzero(~known)
        texts = column.take(arrow.build_integers(unknown)).to_pylist()
        missing[unknown] |= np.array([not text for text in texts], bool)

    def walls(rows: Ints) -> tuple[Ints, Bools]:
        taken = column.take(arrow.build_integers(rows))
        here, ahead = (read_times(taken, form, one, "the time")[0] for one in (UTC, _AHEAD))
        return here, here != ahead  # both results are equal for a time with an explicit offset

    micros, clocks = settle(zone, micros, known, key, walls)
    return Times(micros, known, missing, clocks)


def is_after_landing(spec: ModelSpec, micros: Ints, landed: int | Ints | None) -> Bools:
    """Return a mask (N,) of the times that are later than the spec allows.

    Args:
        spec: spec of the model.
        micros: (N,) times in microseconds since 1970.
        landed: time of the landing in microseconds since 1970, of all rows or (N,) of each row. None means the present
            time.
    """
    limit = spec.time_range.latest_us
    if limit is None:
        return np.zeros(len(micros), bool)
    moment = read_now_us() if landed is None else landed
    return micros > np.asarray(moment) + limit


def is_before_range(spec: ModelSpec, micros: Ints) -> Bools:
    """Return a mask (N,) of the times that are earlier than the spec allows."""
    earliest = spec.time_range.earliest_us
    return np.zeros(len(micros), bool) if earliest is None else micros < earliest


def read_now_us() -> int:
    """Return the current time in microseconds since 1970."""
    return compute_wall_us(now().replace(tzinfo=None))


def read_times(column: pa.Array, time_format: str | None, zone: tzinfo, what: str) -> tuple[Ints, Bools]:
    """Return the times (N,) of a column in microseconds since 1970 UTC, and a mask (N,) of the valid times.

    Args:
        column: N values.
        time_format: `time_format` of a spec.
        zone: time zone of times without an offset.
        what: name of the column, used in errors.

    Raises:
        UserError: the type of the column is not suitable for times, or it is a type of numbers but the format is not.
    """
    kind = column.type
    if pa.types.is_string(kind):
        return _parse_written_times(column, time_format, zone)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros, known = _convert_stored_times(column)
        is_local = pa.types.is_date(kind) or kind.tz is None
    elif arrow.is_number(kind):
        count = count_of(time_format)
        if count is None or count.is_years:
            return _parse_written_numbers(column, time_format, zone, what)
        numbers = column if pa.types.is_integer(kind) else column.cast(pa.float64())
        micros, known = _convert_counts(arrow.to_numpy(numbers), count)
        is_local = count.is_local
    else:
        raise UserError(f"{what} holds {kind}; it must hold timestamps, dates or text")
    if zone is not UTC and is_local:
        micros = _convert_local(micros, zone)
        known &= (micros >= MIN_US) & (micros <= MAX_US)
    return micros, known


def _parse_written_times(column: pa.Array, time_format: str | None, zone: tzinfo) -> tuple[Ints, Bools]:
    """Parse times in texts. Arrow parses the simplest texts of a long column, with the same result as `TimeParser`."""
    rest = np.ones(len(column), bool)
    micros, known = np.zeros(len(column), np.int64), np.zeros(len(column), bool)
    if time_format is None and len(column) >= ARROW_FROM:
        pc = arrow.load_compute()
        matched = pc.match_substring_regex(column, f"^{_PLAIN_TIME}{_OF_UTC}?$")
        plain = arrow.to_numpy(matched, False)
        cut = pc.utf8_rtrim(pc.utf8_replace_slice(column, 10, 11, " "), characters=" CGMTUZ")
        try:
            wanted = pc.if_else(matched, cut, pa.nulls(len(column), pa.string()))
            read = wanted.cast(pa.timestamp("us")).cast(pa.int64())
            micros, rest = arrow.to_numpy(read).copy(), ~plain
            known = plain & (micros >= MIN_US) & (micros <= MAX_US)
            if zone is not UTC:
                of_utc = arrow.to_numpy(pc.match_substring_regex(column, "[A-Z]$"), False)
                local = np.flatnonzero(known & ~of_utc)
                micros[local] = _convert_local(micros[local], zone)
                known &= (micros >= MIN_US) & (micros <= MAX_US)
        except pa.ArrowInvalid:
            pass  # the column has an impossible date, such as the 31st of June; the parser below rejects this date
    if rest.any():
        places, parser = np.flatnonzero(rest), TimeParser(time_format, zone)
        texts, which = arrow.find_distinct_values(column.take(arrow.build_integers(places)))
        micros[places], known[places] = spread_results([parser(text) for text in texts], which)
    return micros, known


def _convert_stored_times(column: pa.Array) -> tuple[Ints, Bools]:
    """Return stored timestamps or dates in microseconds, and a mask (N,) of those within the years 1 to 9999."""
    kind = column.type
    if pa.types.is_date32(kind):
        return _convert_counts(arrow.to_numpy(column.cast(pa.int32())), Count(UNIT_US["day"]))
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    stored = arrow.to_numpy(column.cast(pa.int64()))
    if unit == "ns":
        return _convert_counts(stored // 1000, Count(1))  # nanoseconds are cut off to microseconds
    return _convert_counts(
        stored, Count({"s": UNIT_US["second"], "ms": UNIT_US["millisecond"], "us": 1}[unit])
    )


def _convert_counts(values: NDArray[Any], count: Count) -> tuple[Ints, Bools]:
    """Return the times of numbers that count a unit, in UTC or local time, and a mask of the valid times."""
    first, last = ((end - count.origin) * count.parts for end in (MIN_US, MAX_US))
    # NumPy compares unsigned numbers with these limits correctly, even if a limit is outside the range of the type.
    known = (values <= last // count.micros) & (values >= -(-first // count.micros))
    numbers = values if known.all() else np.where(known, values, 0)
    if values.dtype.kind != "f":
        whole = numbers.astype(np.int64, copy=False)
        if count == Count(1):
            return whole, known
        cut = whole // count.parts + ((whole < 0) & (whole % count.parts != 0))  # towards 0, as for texts
        return cut * count.micros + count.origin, known
    if count.is_rounded:
        return np.floor(numbers * (count.micros // 1000) + 0.5).astype(np.int64) * 1000 + count.origin, known
    return np.trunc(numbers * count.micros / count.parts).astype(np.int64) + count.origin, known


def _parse_written_numbers(
    column: pa.Array, time_format: str | None, zone: tzinfo, what: str
) -> tuple[Ints, Bools]:
    """Parse numbers that are decimal years or whose digits are a date, in the same way as texts.

    Raises:
        UserError: the time format is not for numbers.
    """
    parser = TimeParser(time_format, zone)
    if not parser.reads_numbers:
        values = column.drop_null()
        raise UserError(
            f"{what} holds numbers ({column.type}); {suggest_number_formats(values[0].as_py() if values else None)}"
        )
    values, which = arrow.find_distinct_values(column)
    return spread_results([parser(format_digits(value)) for value in values], which)


def format_digits(value: Any) -> str:
    """Return a number as the text that a file would contain; a whole number gets no fraction."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)


def spread_results(found: Sequence[int | None], which: Ints) -> tuple[Ints, Bools]:
    """Return the result (N,) of each row from the results of distinct values, and a mask (N,) of rows with a result.

    Args:
        found: result of each distinct value; None if a value has no result.
        which: (N,) index of the distinct value of each row; a row with an index beyond the last value has no result.
    """
    micros = np.array([*(0 if value is None else value for value in found), 0], np.int64)
    return micros[which], np.array([*(value is not None for value in found), False])[which]


def _convert_local(micros: Ints, zone: tzinfo) -> Ints:
    """Convert local times to microseconds UTC.

    All times of a day have the same offset from UTC, unless the clock changes on this day.
    """
    day = UNIT_US["day"]
    days, places = np.unique(micros // day, return_inverse=True)
    starts = days * day
    first, last = (_compute_moments(starts + after, zone) - starts - after for after in (0, day - 1))
    changing = np.flatnonzero((first != last)[places])
    result = micros + first[places]
    values, which = np.unique(micros[changing], return_inverse=True)
    result[changing] = _compute_moments(values, zone)[which]
    return result


def _compute_moments(micros: Ints, zone: tzinfo) -> Ints:
    moments = (convert_local_us(value, zone) for value in micros.tolist())
    return np.fromiter(moments, np.int64, len(micros))


_CLOCK_DIRECTIVE = re.compile(r"%[HIMSfpzZ]")


class _ClockValues(NamedTuple):
    """Times of day (N,), or their hours, minutes or seconds.

    micros (N,) microseconds
    valid  (N,) mask of the values that can be read
    offset (N,) offset of the clock from UTC in microseconds
    zoned  (N,) mask of the values that have an offset
    """

    micros: Ints
    valid: Bools
    offset: Ints
    zoned: Bools


def combine_times(columns: Mapping[str, pa.Array], names: Mapping[str, str], form: str | None) -> pa.Array:
    """Return N times as timestamps, or as texts if a row has invalid parts or only some rows have an offset from UTC.

    A row that lacks a part has no time. The hour 24 means 0:00 of the next day.

    Args:
        columns: N values of each part of the time (`jobs.specs.column_names.TIME_PARTS`).
        names: column name of each part, used in the text of a row with invalid parts.
        form: `time_format` of the spec, for the date, or for date and time joined by a blank. None means any usual
            format.
    """
    present = np.logical_and.reduce([_are_present(column) for column in columns.values()])
    if form is not None and _find_date_form(form) is None:
        micros, valid = _read_joined(columns, form)
        zoned = np.full(len(micros), "%z" in form)
    else:
        micros, valid = _read_dates(columns, form)
        clock, zoned = np.zeros(len(micros), np.int64), np.zeros(len(micros), bool)
        for part in columns.keys() & CLOCK_PARTS.keys():
            read = _read_clock(columns[part], part)
            clock, valid, zoned = clock + read.micros, valid & read.valid, zoned | read.zoned
            micros = micros - read.offset
        micros, valid = micros + clock, valid & (clock <= _DAY)
    valid &= present
    same_zone = bool(zoned[present].all() or not zoned[present].any())
    if bool((valid == present).all()) and same_zone:
        stamps = arrow.build_times(np.where(valid, micros, 0), valid)
        return stamps if zoned[present].any() else stamps.cast(pa.timestamp("us"))
    written = np.datetime_as_string(np.where(valid, micros, 0).astype("datetime64[us]")).tolist()
    texts: list[str | None] = [
        f"{time}Z" if has_zone else time for time, has_zone in zip(written, zoned.tolist(), strict=True)
    ]
    bad = np.flatnonzero(present & ~valid)
    shown = {part: as_texts(column.take(arrow.build_integers(bad))) for part, column in columns.items()}
    for at, place in enumerate(bad.tolist()):
        texts[place] = ", ".join(f"{names[part]}={shown[part][at]}" for part in columns)
    for place in np.flatnonzero(~present).tolist():
        texts[place] = None
    return arrow.build_texts(texts)


def _read_clock(column: pa.Array, part: str) -> _ClockValues:
    """Return the times of day, hours, minutes or seconds of a column; `part` is from `jobs.core.times.CLOCK_PARTS`."""
    kind = column.type
    if not pa.types.is_temporal(kind):
        texts, which = _find_distinct_texts(column)
        found = [parse_time_of_day(text, part) for text in texts]
        micros, valid = spread_results([None if one is None else one.micros for one in found], which)
        return _ClockValues(
            micros, valid, *spread_results([None if one is None else one.offset for one in found], which)
        )
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        unit = pa.time64("us") if pa.types.is_time(kind) else pa.duration("us")
        micros = arrow.to_numpy(column.cast(unit, safe=False).cast(pa.int64()))
        valid = (micros >= 0) & (micros <= _DAY)
    else:
        micros, valid = read_times(column, None, UTC, "a column of the time")
        micros = micros % _DAY
    return _ClockValues(
        np.where(valid, micros, 0), valid, np.zeros(len(micros), np.int64), np.zeros(len(micros), bool)
    )


def _find_distinct_texts(column: pa.Array) -> tuple[list[str], Ints]:
    """Return the distinct values as trimmed texts ("" for a missing value), and (N,) the index of each row's text."""
    is_number = arrow.is_number(column.type)
    if pa.types.is_nested(column.type):
        column = arrow.build_texts(as_texts(column))
    values, places = arrow.find_distinct_values(column)
    if is_number:
        return [*("" if value != value else format_digits(value) for value in values), ""], places
    return [*(str(value).strip() for value in values), ""], places


def as_texts(column: pa.Array) -> list[str]:
    """Return values as texts; a whole number gets no fraction, and a missing value becomes ""."""
    write = format_digits if arrow.is_number(column.type) else str
    return ["" if value is None else write(value) for value in column.to_pylist()]


def _are_present(column: pa.Array) -> Bools:
    if pa.types.is_temporal(column.type):
        return arrow.to_numpy(column.is_valid())
    texts, places = _find_distinct_texts(column)
    return np.array([text != "" for text in texts])[places]


def _find_date_form(form: str) -> str | None:
    """Return the date part of a format; None if the time of day does not follow the date and a blank."""
    found = _CLOCK_DIRECTIVE.search(form)
    if found is None:
        return form
    date, clock = form[: found.start()], form[found.start() :]
    is_usual = date.endswith(" ") and re.fullmatch(r"(%[HIMSp]|%S[.,]?%f|%f|%z|[:. ])*", clock)
    return date.rstrip() if is_usual else None


def _read_rows(
    columns: Mapping[str, pa.Array], read: Callable[[dict[str, str]], int | None]
) -> tuple[Ints, Bools]:
    """Read each distinct row of texts once; return the time (N,) of each row, and a mask (N,) of valid times."""
    rows: list[dict[str, str]] = [{}]
    which = np.zeros(len(next(iter(columns.values()))), np.int64)
    for part, column in columns.items():
        texts, places = _find_distinct_texts(column)
        size = len(texts)
        pairs, which = arrow.find_distinct_values(arrow.build_integers(which * size + places))
        rows = [{**rows[pair // size], part: texts[pair % size]} for pair in pairs]
    return spread_results([read(row) for row in rows], which)


def _read_joined(columns: Mapping[str, pa.Array], form: str) -> tuple[Ints, Bools]:
    """Return the times (N,) for a format without a separate date part, and a mask (N,) of the valid times."""
    parser, blank = TimeParser(form, UTC), " " if " " in form else ""
    return _read_rows(columns, lambda row: parser(blank.join(row.values())))


def _read_dates(columns: Mapping[str, pa.Array], form: str | None) -> tuple[Ints, Bools]:
    """Return the days (N,) in microseconds since 1970, and a mask (N,) of the valid days."""
    if "date" not in columns:
        return _read_rows({part: columns[part] for part in DATE_PARTS if part in columns}, parse_date_us)
    column = columns["date"]
    if pa.types.is_string(column.type) or arrow.is_number(column.type):
        # The column of the date may also contain a time of day, such as 00:00.
        forms = (None, "%Y%m%d") if form is None else dict.fromkeys((_find_date_form(form), form))
        parsers = [TimeParser(one, UTC) for one in forms]
        micros, valid = _read_rows({"date": column}, lambda row: _parse_first(row["date"], parsers))
    else:
        micros, valid = read_times(column, None, UTC, "a column of the time")
    return micros // _DAY * _DAY, valid


def _parse_first(text: str, parsers: Sequence[TimeParser]) -> int | None:
    return next((micros for parser in parsers if (micros := parser(text)) is not None), None)
