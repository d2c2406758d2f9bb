"""What `init` takes for the time: dates written as digits, counts from other beginnings, forms of loggers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.choosing import times
from jobs.choosing.columns import Wishes
from jobs.choosing.model_finding import find
from jobs.choosing.table import InputTable
from jobs.choosing.times import TimeColumn, convert_to_times
from jobs.core.time_counts import COUNTS, compute_wall_us
from jobs.landing.dialects import ANY
from jobs.landing.raw_rows import RawRows
from jobs.landing.values.number_reading import find_writing

N = 200
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


def column_of(values: Any, name: str) -> TimeColumn | str:
    """Return what a file's only column is as a time."""
    column = pa.array(values)
    rows = len(column)
    source = RawRows({name: column}, rows)
    return convert_to_times(
        InputTable(
            [Path("a.csv")],
            1,
            source,
            np.zeros(rows, np.int64),
            {},
            False,
            ANY,
            find_writing(source.columns, (), ","),
        ),
        name,
    )


def moments(start: datetime, step: timedelta, count: int = N) -> list[datetime]:
    return [start + k * step for k in range(count)]


def check(values: Any, name: str, expected: list[datetime], time_format: str | None) -> None:
    found = column_of(values, name)
    assert isinstance(found, TimeColumn), found
    assert found.time_format == time_format
    wanted = np.array([compute_wall_us(one) for one in expected])
    assert np.abs(found.micros - wanted).max() <= 1000  # of a number with 10 digits


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("name", "time_format", "start", "step"),
    [
        ("day", "%Y%m%d", datetime(1990, 1, 1), DAY),
        ("x", "%Y%m%d", datetime(2019, 11, 3), DAY),
        ("time", "%y%m%d%H%M", datetime(2001, 1, 1), HOUR),
        ("date", "%y%m%d%H%M", datetime(2020, 1, 1), timedelta(minutes=10)),
        ("date", "%y%m%d%H%M", datetime(2016, 12, 30), HOUR),
        ("date", "%Y%m%d%H", datetime(2024, 1, 1), HOUR),
        ("date", "%Y%m%d%H%M", datetime(2024, 1, 1), HOUR),
        ("yyyymm", "%Y%m", datetime(1949, 1, 1), timedelta(days=31)),
        ("date", "%Y%j", datetime(2019, 10, 1), DAY),
        ("date", "%y%m%d", datetime(2009, 10, 1), DAY),
    ],
)
def test_digits_that_are_dates(
    name: str, time_format: str, start: datetime, step: timedelta, as_text: bool
) -> None:
    expected = moments(start, step)
    if time_format == "%Y%m":
        expected = [one.replace(day=1) for one in dict.fromkeys(one.replace(day=1) for one in expected)]
    texts = [one.strftime(time_format) for one in expected]
    check(texts if as_text else [int(one) for one in texts], name, expected, time_format)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("name", "time_format", "start", "step"),
    [
        ("time", "epoch_seconds", datetime(2024, 1, 1), HOUR),
        ("t", "epoch_days", datetime(2015, 1, 1), DAY),
        ("date", "spreadsheet_days", datetime(1996, 1, 1), DAY),
        ("date", "spreadsheet_days", datetime(2024, 1, 1), HOUR),
        ("date", "spreadsheet_days", datetime(1975, 1, 1), DAY),
        ("date", "julian_days", datetime(2020, 1, 1), DAY),
        ("JD", "julian_days", datetime(1955, 1, 1, 12), DAY),
        ("mjd", "modified_julian_days", datetime(2020, 1, 1), HOUR),
        ("time", "matlab_days", datetime(2020, 1, 1), DAY),
        ("datenum", "matlab_days", datetime(1985, 1, 1), HOUR),
        ("time", "windows_filetime", datetime(2024, 1, 1), HOUR),
        ("Ticks", "dotnet_ticks", datetime(2024, 1, 1), HOUR),
        ("timestamp", "dotnet_ticks", datetime(2024, 1, 1), timedelta(seconds=1)),
        ("sas_date", "sas_days", datetime(2014, 1, 1), DAY),
        ("datetime", "sas_seconds", datetime(2024, 1, 1), HOUR),
        ("gps_time", "gps_seconds", datetime(2024, 1, 1), HOUR),
        ("ntp_time", "ntp_seconds", datetime(2024, 1, 1), HOUR),
        ("decimal_date", "decimal_years", datetime(1958, 3, 15), timedelta(days=30)),
        ("year", "decimal_years", datetime(1990, 6, 1), timedelta(days=7)),
    ],
)
def test_counts_from_other_beginnings(
    name: str, time_format: str, start: datetime, step: timedelta, as_text: bool
) -> None:
    expected = moments(start, step)
    count = COUNTS[time_format]
    if count.is_years:
        years = [
            one.year
            + (one - datetime(one.year, 1, 1)) / (datetime(one.year + 1, 1, 1) - datetime(one.year, 1, 1))
            for one in expected
        ]
        values: list[Any] = [round(one, 11) for one in years]
    else:
        exact = [(compute_wall_us(one) - count.origin) * count.parts / count.micros for one in expected]
        values = [int(one) if one == int(one) and count.parts == 1 else one for one in exact]
        if count.parts > 1:
            values = [(compute_wall_us(one) - count.origin) * count.parts // count.micros for one in expected]
    values = [float(one) for one in values] if any(isinstance(one, float) for one in values) else values
    check(
        [f"{one:.11f}" if isinstance(one, float) else str(one) for one in values] if as_text else values,
        name,
        expected,
        time_format,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.dates(datetime(1955, 1, 1).date(), datetime(2023, 1, 1).date()),
    st.sampled_from(
        [("%Y%m%d", 1440), ("%Y%m%d%H%M", 10), ("%Y%m%d%H%M", 60), ("%Y%m%d%H%M%S", 1), ("%Y%m%d%H", 60)]
    ),
    st.sampled_from(["day", "date", "t", "time", "timestamp"]),
)
def test_any_run_of_digits_that_are_dates(day: Any, form: tuple[str, int], name: str) -> None:
    expected = moments(datetime(day.year, day.month, day.day), timedelta(minutes=form[1]))
    check([int(one.strftime(form[0])) for one in expected], name, expected, form[0])


@settings(max_examples=60, deadline=None)
@given(
    st.dates(datetime(1995, 1, 1).date(), datetime(2024, 1, 1).date()),
    st.sampled_from(
        [
            "julian_days",
            "matlab_days",
            "windows_filetime",
            "dotnet_ticks",
            "epoch_seconds",
            "epoch_milliseconds",
        ]
    ),
    st.sampled_from([DAY, HOUR, timedelta(minutes=15)]),
)
def test_any_run_of_counts(day: Any, time_format: str, step: timedelta) -> None:
    expected = moments(datetime(day.year, day.month, day.day), step)
    count = COUNTS[time_format]
    values = [(compute_wall_us(one) - count.origin) * count.parts / count.micros for one in expected]
    check(values if count.is_rounded else [int(one) for one in values], "time", expected, time_format)


@pytest.mark.parametrize(
    ("texts", "time_format"),
    [
        (lambda at: at.strftime("%Y-%m-%d %H:%M:%S UTC"), None),
        (lambda at: at.strftime("%Y-%m-%dT%H"), None),
        (lambda at: at.isoformat(" ") + ("" if at.hour % 3 else ",5"), None),
        (lambda at: at.strftime("%m/%d/%y %I:%M %p"), "%m/%d/%y %I:%M %p"),
        (lambda at: at.strftime("%d.%m.%y %H:%M"), "%d.%m.%y %H:%M"),
        (lambda at: at.strftime("%a %b %d %H:%M:%S %Y"), "%a %b %d %H:%M:%S %Y"),
        (lambda at: at.strftime("%d/%b/%Y:%H:%M:%S +0000"), "%d/%b/%Y:%H:%M:%S %z"),
        (lambda at: at.strftime("%d%b%Y:%H:%M:%S"), "%d%b%Y:%H:%M:%S"),
    ],
)
def test_forms_of_text(texts: Any, time_format: str | None) -> None:
    expected = moments(datetime(2024, 1, 1), HOUR)
    found = column_of([texts(one) for one in expected], "at")
    assert isinstance(found, TimeColumn), found
    assert found.time_format == time_format and found.known.all()
    assert np.abs(found.micros - [compute_wall_us(one) for one in expected]).max() <= 500_000


def test_months_quarters_and_weeks() -> None:
    for texts in (
        [f"{year}-{month:02}" for year in range(1949, 1961) for month in range(1, 13)],
        [f"{year}Q{quarter}" for year in range(1949, 1999) for quarter in range(1, 5)],
        [f"{year}-W{week:02}" for year in range(2019, 2024) for week in range(1, 53)],
    ):
        found = column_of(texts, "period")
        assert isinstance(found, TimeColumn) and found.time_format is None and found.known.all()


def test_the_other_readings_are_named_with_their_times() -> None:
    found = column_of([19000 + k for k in range(N)], "day")
    assert isinstance(found, TimeColumn)
    assert found.note is not None
    assert found.note.startswith(
        "day: read as epoch_days (2022-01-08); sas_days (2012-01-08), spreadsheet_days (19"
    )
    ambiguous = column_of([f"0{1 + k % 9}/0{1 + k % 9}/2024" for k in range(9)] + ["01/02/2024"], "at")
    assert isinstance(ambiguous, TimeColumn) and "would fit too" in str(ambiguous.note)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("day", [1 + k % 31 for k in range(N)]),
        ("hour", [k % 24 for k in range(N)]),
        ("time", [700 + k for k in range(N)]),
        ("date", [5_000 + k for k in range(N)]),
        ("counter", [45_000.5 + k for k in range(N)]),
        ("energy", [2_458_849.5 + k for k in range(N)]),
        ("population", [19_900_101 + 7 * k for k in range(N)]),
    ],
)
def test_numbers_without_a_plausible_time_are_none(name: str, values: list[float]) -> None:
    assert isinstance(column_of(values, name), str)


def test_a_stopwatch_counts_seconds_from_its_start() -> None:
    found = column_of([k / 2 for k in range(N)], "time")
    assert isinstance(found, TimeColumn)
    assert found.note == "time: read as seconds, counted from 1970-01-01"
    assert datetime.fromtimestamp(found.micros[-1] / 1e6, UTC).year == 1970


def test_rows_of_a_repeated_hour_are_no_repeats(tmp_path: Path) -> None:
    start = datetime(2022, 10, 28)
    moments = [start + k * timedelta(minutes=15) for k in range(4 * 24 * 4)]
    zone = ZoneInfo("Europe/Vienna")
    shown = [one.replace(tzinfo=UTC).astimezone(zone).strftime("%Y-%m-%d %H:%M") for one in moments]
    values = np.random.default_rng(1).normal(20, 1, len(shown))
    path = tmp_path / "meter.csv"
    path.write_text("at,kw\n" + "".join(f"{at},{y:.3f}\n" for at, y in zip(shown, values, strict=True)))
    found = find(
        str(path), Wishes(time_zone="Europe/Vienna", no_key=True, keys=1, rows=100, structure="level")
    )
    assert found.rhythm.repeats == 0 and found.rhythm.step == 15 * 60_000_000
    assert any("4 rows in an hour that the clocks of Europe/Vienna repeat" in note for note in found.notes)


@pytest.mark.filterwarnings("error")
def test_numbers_that_rise_between_missing_ones_do_not_rise_without_a_warning() -> None:
    values = np.array([1.0, 2.0, np.nan, np.nan, np.nan, 3.0])
    assert not times._is_rising(values, np.zeros(6, np.int64))
