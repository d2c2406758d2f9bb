"""`init` on columns for hours or months, ids of devices, words for numbers, and commas that cut numbers. No Spark."""

from __future__ import annotations

import gzip
import uuid
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.choosing.finding import Columns, Wishes, find_columns
from jobs.choosing.table import read_table
from jobs.core.errors import UserError
from jobs.core.stopwatch import Stopwatch

START = datetime(2024, 5, 6)
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()


def found(folder: Path, text: str) -> Columns:
    """Return what `init` finds in a file."""
    file = folder / "a.csv"
    file.write_text(text)
    return find_columns(str(file), read_table([file]), Wishes(), Stopwatch())


def lines(*rows: Sequence[object]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def walk(count: int, seed: int = 3) -> list[float]:
    """Return numbers with a fraction near 20."""
    return (20.0 + np.random.default_rng(seed).normal(size=count).cumsum().round(1) + 0.05).round(2).tolist()


HOURS = [
    ("clock", [f"{hour:02d}:00" for hour in range(24)], 0),
    ("number", [str(hour) for hour in range(24)], 0),
    ("hour ending", [f"HE{hour:02d}" for hour in range(1, 25)], 1),
    ("letter", [f"h{hour}" for hour in range(24)], 0),
]


@pytest.mark.parametrize(("names", "first"), [one[1:] for one in HOURS], ids=[one[0] for one in HOURS])
@pytest.mark.parametrize("written", ["%Y-%m-%d", "%m/%d/%Y"])
def test_a_column_for_each_hour_of_a_date_is_a_row_for_each_hour(
    tmp_path: Path, names: list[str], first: int, written: str
) -> None:
    values = walk(24 * 20)
    days = [(START + timedelta(days=day)).strftime(written) for day in range(20)]
    rows = [[day, *values[24 * at : 24 * at + 24]] for at, day in enumerate(days)]
    columns = found(tmp_path, lines(["OPR_DATE", *names], *rows))
    wanted = [START + timedelta(hours=hour + first) for hour in range(24 * 20)]
    seconds = columns.parsed.time // 1_000_000
    assert seconds.tolist() == [(one - datetime(1970, 1, 1)).total_seconds() for one in wanted]
    assert columns.parsed.y[0].tolist() == values
    assert columns.rhythm.unit == "hour" and columns.keys.count == 1


@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(1600, 1990), years=st.integers(5, 30), seed=st.integers(0, 99))
def test_a_column_for_each_month_of_a_year_is_a_row_for_each_month(
    tmp_path: Path, first: int, years: int, seed: int
) -> None:
    values = walk(12 * years, seed)
    table = [
        [year, *values[12 * at : 12 * at + 12], f"{sum(values[12 * at : 12 * at + 12]) / 12:.3f}"]
        for at, year in enumerate(range(first, first + years))
    ]
    columns = found(tmp_path, lines(["Year", *MONTHS, "J-D"], *table))
    days = [
        (date(y, m, 1) - date(1970, 1, 1)).days for y in range(first, first + years) for m in range(1, 13)
    ]
    assert (columns.parsed.time // 86_400_000_000).tolist() == days
    assert columns.parsed.y[0].tolist() == values
    assert columns.roles.refused["J-D"] == "is none of the series that the other columns are"


IDS = {
    "imei": [f"35693803564380{i}" for i in range(4)],
    "MMSI": [str(366999700 + 11 * i) for i in range(4)],
    "uuid": [str(uuid.UUID(int=10**30 + i)) for i in range(4)],
    "mac_address": [f"AA:BB:CC:00:00:0{i}" for i in range(4)],
    "DevEUI": [f"70B3D57ED00001{i}A" for i in range(4)],
}


@pytest.mark.parametrize("name", IDS)
def test_a_number_that_names_a_device_is_its_key(tmp_path: Path, name: str) -> None:
    draw = np.random.default_rng(7)
    rows = [
        [START + timedelta(minutes=int(minute)), IDS[name][draw.integers(0, 4)], value]
        for minute, value in zip(draw.integers(1, 90, 400).cumsum(), walk(400), strict=True)
    ]
    columns = found(tmp_path, lines(["time", name, "battery"], *rows))
    assert columns.keys.columns == [name] and columns.keys.count == 4
    assert [one.name for one in columns.roles.measurements] == ["battery"]


@pytest.mark.parametrize(("low", "high"), [("off", "on"), ("false", "true"), ("closed", "open"), ("0", "1")])
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_the_rarer_of_two_states_is_no_missing_value(
    tmp_path: Path, low: str, high: str, share: float
) -> None:
    is_low = np.random.default_rng(2).random(300) < share
    rows = [[START + timedelta(hours=i), low if one else high] for i, one in enumerate(is_low)]
    columns = found(tmp_path, lines(["at", "state"], *rows))
    assert columns.parsed.y[0].tolist() == [0.0 if one else 1.0 for one in is_low]


def test_months_and_years_are_no_days_of_the_year(tmp_path: Path) -> None:
    months = [(year, month) for year in range(1990, 2005) for month in range(1, 13)]
    rows = [[f"{month:02d}/{year}", value] for (year, month), value in zip(months, walk(180), strict=True)]
    time = found(tmp_path, lines(["period", "value"], *rows)).roles.time
    assert time.time_format == "%m/%Y"


@pytest.mark.parametrize("value", ["{},98E-08", "2{},5", "-{},125e2"])
def test_a_decimal_comma_between_commas_is_no_name_of_a_row(tmp_path: Path, value: str) -> None:
    rows = [[START + timedelta(hours=i), value.format(i % 7)] for i in range(60)]
    reasons = found(tmp_path, lines(["at", "value"], *rows)).parsed.reason
    assert set(reasons) == {"row: not as many fields as the header"}


FORMS = {
    "%Y.%m.%d %H.%M": timedelta(hours=1),
    "%d-%b-%y %I.%M.%S.%f %p": timedelta(hours=1),
    "%Y/%j %H:%M": timedelta(hours=1),
    "@%s": timedelta(hours=1),
    "%Y年%m月%d日 %H:%M": timedelta(minutes=10),
    "%Y年%m月%d日": timedelta(days=1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("begin", [datetime(1999, 12, 30, 5), datetime(2024, 2, 27)])
def test_times_as_exporters_write_them_are_read(tmp_path: Path, form: str, begin: datetime) -> None:
    begin = begin.replace(hour=0) if "%H" not in form and "%I" not in form and "%s" not in form else begin
    times = [begin + FORMS[form] * i for i in range(120)]
    micros = [int((one - datetime(1970, 1, 1)).total_seconds()) * 1_000_000 for one in times]
    texts = [
        f"@{one // 1_000_000}" if form == "@%s" else at.strftime(form)
        for one, at in zip(micros, times, strict=True)
    ]
    columns = found(tmp_path, lines(["when", "value"], *zip(texts, walk(120), strict=True)))
    assert columns.parsed.time.tolist() == micros


@pytest.mark.parametrize(("form", "parts"), [("%Y:%m", 12), ("%Y:%q", 4)])
def test_a_colon_between_year_and_part_is_a_month_or_a_quarter_by_its_steps(
    tmp_path: Path, form: str, parts: int
) -> None:
    rows = [
        [f"{year}:{part}", value]
        for (year, part), value in zip(
            product(range(1960, 1990), range(1, parts + 1)), walk(400), strict=False
        )
    ]
    assert found(tmp_path, lines(["period", "gdp"], *rows)).roles.time.time_format == form


@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.dates(date(1960, 1, 1), date(2015, 1, 1)),
    names=st.sampled_from([("Year", "Week"), ("Jahr", "KW")]),
)
def test_a_year_and_a_week_make_the_time(tmp_path: Path, first: date, names: tuple[str, str]) -> None:
    mondays = [first - timedelta(days=first.weekday()) + timedelta(weeks=i) for i in range(120)]
    rows = [[*one.isocalendar()[:2], value] for one, value in zip(mondays, walk(120), strict=True)]
    columns = found(tmp_path, lines([*names, "cases"], *rows))
    assert (columns.parsed.time // 86_400_000_000).tolist() == [
        (one - date(1970, 1, 1)).days for one in mondays
    ]


@pytest.mark.parametrize("since", [datetime(1900, 1, 1), datetime(1910, 1, 1)])
def test_hours_from_a_beginning_that_nobody_names_are_not_taken_for_others(
    tmp_path: Path, since: datetime
) -> None:
    first = int((START - since).total_seconds()) // 3600
    with pytest.raises(
        UserError, match="are times of the future; if they count from another beginning, name it"
    ):
        found(tmp_path, lines(["time", "t2m"], *([first + i, value] for i, value in enumerate(walk(200)))))


def test_a_file_of_tabs_may_say_so_by_its_ending(tmp_path: Path) -> None:
    text = lines(["at", "value"], *([START + timedelta(hours=i), value] for i, value in enumerate(walk(60))))
    for name in ("a.tsv", "b.tsv.gz"):
        file = tmp_path / name
        data = text.replace(",", "\t").encode()
        file.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        columns = find_columns(str(file), read_table([file]), Wishes(), Stopwatch())
        assert columns.parsed.y[0].tolist() == walk(60)


def test_lines_that_begin_with_percent_signs_above_a_header_are_comments(tmp_path: Path) -> None:
    text = lines(["time", "temp"], *([START + timedelta(hours=i), value] for i, value in enumerate(walk(60))))
    columns = found(tmp_path, "% exported\n% unit degC, north\n" + text)
    assert columns.parsed.y[0].tolist() == walk(60) and columns.files.comment == "%"
