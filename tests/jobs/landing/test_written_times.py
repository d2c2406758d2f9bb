"""What a text or a number means as a time: written forms, other beginnings, and what a rejected one is told."""

from __future__ import annotations

import json
import string
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.core.errors import UserError
from jobs.core.time_counts import COUNTS, compute_wall_us, count_of, to_datetime
from jobs.core.times import TimeParser
from jobs.landing.values.rejected import explain_reason
from jobs.landing.values.times import read_times
from jobs.specs.model_spec import ModelSpec
from tests.jobs.support.pipeline import random_walk_spec

VIENNA = ZoneInfo("Europe/Vienna")
MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2060, 12, 31))


def read(text: str, time_format: str | None = None, zone: Any = UTC) -> str | None:
    micros = TimeParser(time_format, zone)(text)
    return None if micros is None else to_datetime(micros).isoformat()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        # the clock and its zone
        ("2024-01-31 17:05:09 UTC", "2024-01-31T17:05:09"),
        ("2024-01-31 17:05 GMT", "2024-01-31T17:05:00"),
        ("2024-01-31T17:05:09.123456 UTC", "2024-01-31T17:05:09.123456"),
        ("2024-01-31 17:05:09 Z", "2024-01-31T17:05:09"),
        ("2024-01-31t17:05:09z", "2024-01-31T17:05:09"),
        ("2024-01-31 17:05:09 UTC+01:00", "2024-01-31T16:05:09"),
        ("2024-01-31T17:05:09+01:00[Europe/Vienna]", "2024-01-31T16:05:09"),
        ("2024-01-31 17:05:09,250", "2024-01-31T17:05:09.250000"),
        ("2024-01-31T17", "2024-01-31T17:00:00"),
        ("2024-01-31 7:05", "2024-01-31T07:05:00"),
        ("2024-01-31 24:00", "2024-02-01T00:00:00"),
        ("2024-01-31 05:07:09 PM", "2024-01-31T17:07:09"),
        ("2024-01-31 12:07 a.m.", "2024-01-31T00:07:00"),
        ("2024-01-31 12 PM", "2024-01-31T12:00:00"),
        # weeks, days of the year, months, quarters
        ("2024-W05-3", "2024-01-31T00:00:00"),
        ("2020W537", "2021-01-03T00:00:00"),
        ("2024-W01", "2024-01-01T00:00:00"),
        ("2024-W05-3T06:30", "2024-01-31T06:30:00"),
        ("2024-031", "2024-01-31T00:00:00"),
        ("2024-366", "2024-12-31T00:00:00"),
        ("1949-01", "1949-01-01T00:00:00"),
        ("1949Q1", "1949-01-01T00:00:00"),
        ("1949-Q4", "1949-10-01T00:00:00"),
        ("1949 q2", "1949-04-01T00:00:00"),
        # no such time, or more than one meaning
        *((text, None) for text in ("2023-366", "2024-000", "2024-W53-1", "2024-W05-8", "1949-13", "1949Q5")),
        *(
            (text, None)
            for text in ("2024-01-31 13:00 PM", "2024-01-31 0:00 AM", "2024-01-31 24:00:01", "31/1/2024")
        ),
        *(
            (text, None)
            for text in ("2024-01-31 17:05 CET", "2024-01-31 17:05:60", "2024031", "1949-1", "01:02")
        ),
    ],
)
def test_text_is_read_without_a_setting_where_it_has_one_meaning(text: str, moment: str | None) -> None:
    assert read(text) == moment


@pytest.mark.parametrize(
    ("time_format", "text", "moment"),
    [
        ("%m/%d/%y %I:%M:%S %p", "01/31/24 05:07:09 PM", "2024-01-31T17:07:09"),
        ("%d.%m.%y", "31.01.69", "1969-01-31T00:00:00"),
        ("%y%m%d%H%M", "0101310005", "2001-01-31T00:05:00"),
        ("%Y-%j", "2024-031", "2024-01-31T00:00:00"),
        ("%Y,%j,%H%M", "2024,31,1205", "2024-01-31T12:05:00"),
        ("%G-W%V-%u", "2009-W53-7", "2010-01-03T00:00:00"),
        ("%G week %V %A", "2024 week 5 Wednesday", "2024-01-31T00:00:00"),
        ("%a %b %d %H:%M:%S %Y", "Wed Jan  3 05:06:07 2024", "2024-01-03T05:06:07"),
        ("%A, %B %d, %Y", "Wednesday, January 31, 2024", "2024-01-31T00:00:00"),
        ("%a, %d %b %Y %T %z", "Wed, 31 Jan 2024 17:05:09 +0100", "2024-01-31T16:05:09"),
        ("%d/%b/%Y:%H:%M:%S %z", "31/Jan/2024:17:05:09 +0100", "2024-01-31T16:05:09"),
        ("%-d.%-m.%Y %-H:%M", "5.1.2024 7:05", "2024-01-05T07:05:00"),
        ("%F %T", "2024-01-31 17:05:09", "2024-01-31T17:05:09"),
        ("%D %r", "01/31/24 05:07:09 PM", "2024-01-31T17:07:09"),
        ("%s.%f", "1706720709.25", "2024-01-31T17:05:09.250000"),
        ("Q%q %Y", "Q3 2024", "2024-07-01T00:00:00"),
        ("%b %Y", "Jan 1949", "1949-01-01T00:00:00"),
        ("%Y", "1871", "1871-01-01T00:00:00"),
        # fractions in some rows only, after a point or a comma
        ("%d.%m.%Y %H:%M:%S.%f", "31.01.2024 17:05:09", "2024-01-31T17:05:09"),
        ("%d.%m.%Y %H:%M:%S.%f", "31.01.2024 17:05:09,5", "2024-01-31T17:05:09.500000"),
        ("%d.%m.%Y %H:%M:%S", "31.01.2024 17:05:09.25", "2024-01-31T17:05:09.250000"),
        ("%Y%m%d%H%M%S%f", "20240131170509123", "2024-01-31T17:05:09.123000"),
        # digits alone have all their digits, but for zeros that a number has lost
        ("%Y%m%d", "20240131.0", "2024-01-31T00:00:00"),
        ("%y%m%d", "10131", "2001-01-31T00:00:00"),
        ("%d%m%Y", "1022024", "2024-02-01T00:00:00"),
        *(("%Y%m%d", text, None) for text in ("2024131", "240131", "20241301", "20240131.5")),
        ("%m/%d/%y %I:%M %p", "01/31/24 13:07 PM", None),
    ],
)
def test_directives(time_format: str, text: str, moment: str | None) -> None:
    assert read(text, time_format) == moment


@pytest.mark.parametrize(
    ("time_format", "problem"),
    [
        ("%H:%M", "%Y is missing"),
        ("%Y-%d", "%m is missing"),
        ("%G-%u", "%V is missing"),
        ("%Y-%m-%d %I:%M", "%p is missing"),
        ("%Y-%m-%d %H:%M %p", "%I is missing"),
        ("%Y %y", "the year is given twice"),
        ("%Y %m %d %j %d", "the day is given twice"),
        ("%Y %Q", "%Q is not known"),
    ],
)
def test_a_format_without_a_whole_date_is_refused(time_format: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TimeParser(time_format, UTC)


@settings(max_examples=200, deadline=None)
@given(
    MOMENTS,
    st.sampled_from(
        ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%y", "%d %B %Y", "%a %d-%b-%y", "%Y-%j", "%G-W%V-%u", "%Y%m%d"]
    ),
    st.sampled_from([" %H:%M:%S", " %I:%M:%S %p", "T%H%M%S", ", %I:%M %p", " %H:%M:%S.%f", " %H:%M:%S %Z"]),
)
def test_what_python_writes_is_read_back(moment: datetime, day: str, clock: str) -> None:
    time_format = day + clock
    text = moment.replace(tzinfo=UTC).strftime(time_format)
    fine = moment if "%f" in clock else moment.replace(microsecond=0)
    fine = fine if "%S" in clock else fine.replace(second=0)
    assert TimeParser(time_format, UTC)(text) == compute_wall_us(fine)


@settings(max_examples=200, deadline=None)
@given(
    MOMENTS,
    st.sampled_from(["", "Z", " UTC", " GMT", "+00:00", " -00:00", " UTC+00:00"]),
    st.sampled_from([".", ","]),
    st.integers(0, 6),
)
def test_iso_times_have_any_fraction_and_any_name_of_utc(
    moment: datetime, zone: str, mark: str, digits: int
) -> None:
    unit = 10 ** (6 - digits)
    moment = moment.replace(microsecond=moment.microsecond // unit * unit)
    fraction = mark + f"{moment.microsecond:06d}"[:digits] if digits else ""
    text = moment.strftime(f"%Y-%m-%d %H:%M:%S{fraction}{zone}")
    assert TimeParser(None, UTC)(text) == compute_wall_us(moment)


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(string.digits + "-:., TWQZPAM/+"), max_size=24))
def test_any_text_is_a_time_or_none(text: str) -> None:
    for time_format in (None, "%d.%m.%y %I:%M %p", "%Y%m%d", "epoch_seconds", "decimal_years"):
        micros = TimeParser(time_format, VIENNA)(text)
        assert micros is None or -(2**63) < micros < 2**63


# Counts: a number and the time that the program which wrote it shows


@pytest.mark.parametrize(
    ("time_format", "number", "moment"),
    [
        ("epoch_minutes", "28445345", "2024-01-31T17:05:00"),
        ("epoch_hours", "474073.5", "2024-01-31T01:30:00"),
        ("epoch_days", "19753", "2024-01-31T00:00:00"),
        ("spreadsheet_days", "45322.711910", "2024-01-31T17:05:09.024000"),
        ("spreadsheet_days", "45322,5", "2024-01-31T12:00:00"),
        ("spreadsheet_days_1904", "43860", "2024-01-31T00:00:00"),
        ("matlab_days", "739282.25", "2024-01-31T06:00:00"),
        ("julian_days", "2458849.5", "2020-01-01T00:00:00"),
        ("modified_julian_days", "60340.5", "2024-01-31T12:00:00"),
        ("sas_days", "23406", "2024-01-31T00:00:00"),
        ("sas_seconds", "2022339909", "2024-01-31T17:05:09"),
        ("stata_days", "23406", "2024-01-31T00:00:00"),
        ("stata_milliseconds", "2022339909250", "2024-01-31T17:05:09.250000"),
        ("spss_seconds", "13926099909", "2024-01-31T17:05:09"),
        ("windows_filetime", "133511943091234567", "2024-01-31T17:05:09.123456"),
        ("webkit_microseconds", "13351194309123456", "2024-01-31T17:05:09.123456"),
        ("dotnet_ticks", "638423175091234567", "2024-01-31T17:05:09.123456"),
        ("cocoa_seconds", "728413509.5", "2024-01-31T17:05:09.500000"),
        ("gps_seconds", "1390755909", "2024-01-31T17:05:09"),
        ("ntp_seconds", "3915709509", "2024-01-31T17:05:09"),
        ("labview_seconds", "3789565509.25", "2024-01-31T17:05:09.250000"),
        ("python_ordinal_days", "738916", "2024-01-31T00:00:00"),
        ("decimal_years", "2022.5", "2022-07-02T12:00:00"),
        ("decimal_years", "1958.2027", "1958-03-15T23:39:07.200000"),
        ("hours since 1900-01-01 00:00:0.0", "1087697", "2024-01-31T17:00:00"),
        ("days since 2000-01-01", "0.25", "2000-01-01T06:00:00"),
        ("seconds since 2000-1-1 12:00 UTC", "-3600", "2000-01-01T11:00:00"),
        ("epoch_milliseconds", "1.706720709123E12", "2024-01-31T17:05:09.123000"),
        *(("epoch_milliseconds", text, None) for text in ("1.70E+12", "1,706,720", "x", "")),
    ],
)
def test_counts(time_format: str, number: str, moment: str | None) -> None:
    assert read(number, time_format) == moment


def test_dates_are_of_the_local_clock_and_moments_of_utc() -> None:
    for name in ("epoch_days", "spreadsheet_days", "sas_days", "days since 2024-01-01"):
        text = str(round(COUNTS[name].convert_us(0)) if name in COUNTS else 0)
        assert read(text, name, VIENNA).endswith("T23:00:00")  # type: ignore[union-attr]
    for name in ("epoch_hours", "windows_filetime", "ntp_seconds", "days since 2024-01-01 UTC"):
        text = str(round(COUNTS[name].convert_us(0)) if name in COUNTS else 0)
        assert read(text, name, VIENNA).endswith("T00:00:00")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name", ["hours since then", "weeks since 2000-01-01", "days since 2000-02-30", "days_since"]
)
def test_an_unknown_count_is_refused_by_the_spec(name: str) -> None:
    assert count_of(name) is None
    with pytest.raises(Exception, match=r"is not a time format: %Y is missing"):
        ModelSpec.model_validate(random_walk_spec(time_format=name))


def both_ways(numbers: list[int] | list[float], time_format: str, zone: Any) -> None:
    """Compare stored numbers with the same ones as text."""
    kind = pa.int64() if isinstance(numbers[0], int) else pa.float64()
    texts = [str(one) if isinstance(one, int) else f"{one:.9f}".rstrip("0").rstrip(".") for one in numbers]
    stored, fits = read_times(pa.array(numbers, kind), time_format, zone, "t")
    written, known = read_times(pa.array(texts), time_format, zone, "t")
    assert fits.tolist() == known.tolist()
    assert np.abs(stored - written)[fits].max(initial=0) <= 1


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(set(COUNTS) - {"decimal_years"})), st.lists(MOMENTS, min_size=1, max_size=5))
def test_stored_counts_equal_written_ones(name: str, moments: list[datetime]) -> None:
    count = COUNTS[name]
    exact = [(compute_wall_us(one) - count.origin) * count.parts // count.micros for one in moments]
    for zone in (UTC, VIENNA):
        both_ways(exact, name, zone)
        if count.micros >= 86_400_000_000:
            both_ways([one + 0.25 for one in exact], name, zone)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(MOMENTS, min_size=1, max_size=5),
    st.sampled_from(
        ["%Y%m%d", "%Y%m%d%H%M", "%y%m%d%H%M", "%Y%m%d%H%M%S", "%d%m%Y", "%Y%j", "%Y%m", "%y%m%d"]
    ),
)
def test_stored_digits_equal_written_ones(moments: list[datetime], time_format: str) -> None:
    numbers = [
        int(one.strftime(time_format)) for one in moments if "%y" not in time_format or 1970 < one.year < 2060
    ]
    expected = [
        compute_wall_us(datetime.strptime(one.strftime(time_format), time_format))
        for one in moments
        if "%y" not in time_format or 1970 < one.year < 2060
    ]
    for kind in (pa.int64(), pa.float64()):
        micros, known = read_times(pa.array(numbers, kind), time_format, UTC, "t")
        assert known.all() and micros.tolist() == expected
    if numbers:
        both_ways(numbers, time_format, VIENNA)


def test_numbers_without_a_format_are_refused_with_what_each_would_give() -> None:
    with pytest.raises(UserError) as refused:
        read_times(pa.array([19753, 19754]), None, UTC, "t.csv: time column 'day'")
    message = refused.value.message
    assert (
        "day' holds numbers (int64); 19753 may be epoch_days (2024-01-31), sas_days (2014-01-30)" in message
    )
    with pytest.raises(UserError, match=r"%Y%m%d \(2024-01-31\): set time_format"):
        read_times(pa.array([20240131]), "%Y-%m-%d", UTC, "t")


# What a rejected value is told


@pytest.mark.parametrize(
    ("changes", "value", "said"),
    [
        (
            {},
            "1/2/2024",
            'time_format: "%d/%m/%Y" in the spec, which reads it as 2024-02-01; it may also be %m/%d/%Y',
        ),
        ({}, "31/01/24 5:07 PM", 'time_format: "%d/%m/%y %I:%M %p"'),
        ({}, "Wed Jan 31 17:05:09 2024", 'time_format: "%a %b %d %H:%M:%S %Y"'),
        ({}, "Q3 1949", 'time_format: "Q%q %Y"'),
        ({}, "Jan 1949", 'time_format: "%b %Y"'),
        ({}, "2024-1-3", 'time_format: "%Y-%m-%d"'),
        (
            {},
            "2458849.5",
            'julian days; set time_format: "julian_days" in the spec, which reads it as 2020-01-01',
        ),
        ({}, "20240131", 'time_format: "%Y%m%d"'),
        ({}, "1871", 'such as 1871-01-01, or set time_format: "%Y"'),
        ({}, "1.70E+12", "a spreadsheet has rounded the number"),
        ({}, "2024-01-31 17:05 CET", 'with time_zone: "Europe/Berlin" in the spec'),
        ({}, "2024-01-31 17:05 XYZ", "UTC has no clock named XYZ; set time_zone"),
        ({}, "2023-02-30", "no such date"),
        ({"time_format": "%d.%m.%Y"}, "31/01/2024", 'time_format: "%d/%m/%Y"'),
        ({"time_format": "%d.%m.%Y"}, "yesterday", "times are read as %d.%m.%Y; name another form"),
    ],
)
def test_a_rejected_time_is_told_the_remedy(changes: dict[str, Any], value: str, said: str) -> None:
    spec = ModelSpec.model_validate(random_walk_spec(**changes))
    sentence = explain_reason(spec, "time at: not a time", json.dumps({"at": value}))
    assert repr(value) in sentence and said in sentence


def test_an_abbreviation_of_the_spec_s_zone_tells_the_two_passes_apart() -> None:
    hour = timedelta(hours=1)
    summer, winter = (TimeParser(None, VIENNA)(f"2024-10-27 02:30 {name}") for name in ("CEST", "CET"))
    assert summer is not None and winter is not None
    assert (winter - summer) == hour // timedelta(microseconds=1)
    assert read("2024-07-01 02:30 CET", None, VIENNA) is None
