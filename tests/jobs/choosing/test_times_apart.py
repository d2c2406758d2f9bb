"""Parts of a time in columns of their own are found, or refused with the column's name; never something else."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.choosing.columns import Wishes
from jobs.choosing.finding import Columns, find_columns
from jobs.choosing.table import read_table
from jobs.core.errors import UserError
from jobs.core.stopwatch import Stopwatch
from jobs.core.time_counts import compute_wall_us

START = datetime(2025, 3, 3)
HOUR = timedelta(hours=1)
Line = Callable[[str, datetime, float], str]


def found(path: Path, head: str, line: Line, **wishes: object) -> Columns:
    """Return the roles of the columns of a file with 96 hours of two stations, or of one if the head has none."""
    rng = random.Random(7)
    stations = ("n", "s") if head.endswith("*") else ("n",)
    rows = [(one, START + place * HOUR, 20 + rng.gauss(0, 1)) for place in range(96) for one in stations]
    path.write_text(head.rstrip("*") + "\n" + "".join(line(*row) + "\n" for row in rows))
    return find_columns(str(path), read_table([path]), Wishes(**wishes), Stopwatch())  # type: ignore[arg-type]


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["OPR", "Delivery ", "start_", "trade-", "Interval.", "local "]),
    st.sampled_from(["HR", "Hour", "hour", "Hours", "Stunde", "Heure"]),
    st.sampled_from(["%Y-%m-%d", "%d.%m.%Y", "%Y%m%d"]),
)
def test_an_hour_is_found_by_the_end_of_its_columns_name(
    tmp_path_factory: pytest.TempPathFactory, begin: str, end: str, form: str
) -> None:
    begin = begin if begin != "OPR" else "OPR_"
    columns = found(
        tmp_path_factory.mktemp("hours") / "a.csv",
        f"{begin}Date,{begin}{end},NODE,LMP*",
        lambda key, at, value: f"{at:{form}},{at.hour + 1},{key},{value:.2f}",
    )
    assert [one.name for one in columns.measurements] == ["LMP"]
    assert columns.keys.columns == ["NODE"] and columns.rhythm.unit == "hour"
    assert int(columns.parsed.time.min()) == compute_wall_us(START + HOUR)
    assert len(np.unique(columns.parsed.time)) == 96


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("settlement_period", lambda at: at.hour * 2 + 1),
        ("seconds", lambda at: at.hour * 3600),
        ("minutes", lambda at: at.hour * 60),
        ("interval", lambda at: at.hour + 1),
        ("slot", lambda at: f"{at.hour:02}:00"),
    ],
)
def test_a_number_within_the_day_beside_stations_is_refused_with_both_names(
    tmp_path: Path, name: str, part: Callable[[datetime], object]
) -> None:
    def line(key: str, at: datetime, value: float) -> str:
        return f"{at:%Y-%m-%d},{part(at)},{key},{value:.2f}"

    try:
        columns = found(tmp_path / "a.csv", f"date,{name},region,load*", line)
    except UserError as error:
        assert re.search(f"'{name}' differ in 'date'|differ in '{name}'.*--key region", error.message)
        joined = re.search(r"--time (date,\w+)", error.message)
        assert (joined is not None) == name.endswith("s")
        if joined is not None:
            columns = found(tmp_path / "a.csv", f"date,{name},region,load*", line, time=joined[1])
            assert columns.keys.columns == ["region"]
            assert np.unique(columns.parsed.time).tolist() == [
                compute_wall_us(START + place * HOUR) for place in range(96)
            ]
        columns = found(tmp_path / "a.csv", f"date,{name},region,load*", line, time="date", key=["region"])
        assert len(np.unique(columns.parsed.time)) == 4
    else:
        assert (
            name == "slot"
            and columns.keys.columns == ["region"]
            and len(np.unique(columns.parsed.time)) == 96
        )


@pytest.mark.parametrize("name", ["minute_of_day", "Minutes of day", "seconds_of_day", "Second Of Day [s]"])
@pytest.mark.parametrize("stations", [True, False])
def test_a_count_within_the_day_is_read_by_a_name_that_says_its_unit(
    tmp_path: Path, name: str, stations: bool
) -> None:
    size = 60 if name.casefold().startswith("sec") else 1
    columns = found(
        tmp_path / "a.csv",
        f"date,{name},region,load{'*' * stations}",
        lambda key, at, value: f"{at:%Y-%m-%d},{(at.hour * 60 + 15) * size},{key},{value:.2f}",
    )
    assert columns.roles.time.columns == ("date", name)
    assert np.unique(columns.parsed.time).tolist() == [
        compute_wall_us(START + place * HOUR + HOUR / 4) for place in range(96)
    ]


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["AM PM", "am pm", "a.m. p.m.", "a. m. p. m."]),
    st.sampled_from(["AM/PM", "half", "x"]),
    st.booleans(),
)
def test_am_and_pm_in_a_column_of_their_own_are_refused(
    tmp_path_factory: pytest.TempPathFactory, words: str, name: str, keyed: bool
) -> None:
    size = len(words) // 2
    halves = words[:size], words[size + 1 :]

    def line(key: str, at: datetime, value: float) -> str:
        return f"{at:%m/%d/%Y},{at:%I:%M},{halves[at.hour > 11]},{value:.2f}" + (f",{key}" if keyed else "")

    with pytest.raises(UserError, match=f"'{name}' has AM and PM, .* into one column"):
        found(tmp_path_factory.mktemp("halves") / "a.csv", f"date,time,{name},v" + ",station*" * keyed, line)


@pytest.mark.parametrize(
    ("name", "zone", "noted"),
    [
        ("utc_offset", "+02:00", True),
        ("tz", "Europe/Berlin", True),
        ("gmt", "UTC+2", True),
        ("zone", "CEST", True),
        ("where", "America/Argentina/Ushuaia", True),
        ("tz", "UTC", False),
        ("tz", "+00:00", False),
        ("unit", "degC", False),
        ("place", "Vienna/North", False),
    ],
)
def test_a_zone_in_a_column_of_its_own_is_said(tmp_path: Path, name: str, zone: str, noted: bool) -> None:
    def line(key: str, at: datetime, value: float) -> str:
        return f"{at:%Y-%m-%d %H:%M},{zone},{value:.2f}"

    notes = found(tmp_path / "a.csv", f"time,{name},v", line).notes
    assert any(f"{name} holds {zone}, and the times are read as UTC" in one for one in notes) is noted
    assert not any(
        "read as UTC" in one
        for one in found(tmp_path / "a.csv", f"time,{name},v", line, time_zone="Europe/Berlin").notes
    )
    offset = found(tmp_path / "b.csv", f"time,{name},v", lambda *row: line(*row).replace(",", "+02:00,", 1))
    assert not any("read as UTC" in one for one in offset.notes)


@pytest.mark.parametrize("form", ["%m%d%y", "%d%m%y", "%m%d%Y", "%d%m%Y", "%y%m%d"])
@pytest.mark.parametrize("days", [90, 400])
def test_digits_of_a_date_in_any_order_are_that_date(tmp_path: Path, form: str, days: int) -> None:
    path = tmp_path / "a.csv"
    moments = [START + timedelta(days=place) for place in range(days)]
    path.write_text("date,v\n" + "".join(f"{at:{form}},{20 + at.day % 7}.5\n" for at in moments))
    try:
        columns = find_columns(str(path), read_table([path]), Wishes(), Stopwatch())
    except UserError as error:
        assert "no column is a time" in error.message and days == 400 and form != "%y%m%d"
    else:
        assert columns.parsed.time.tolist() == [compute_wall_us(at) for at in moments]


def test_of_two_comments_above_the_rows_the_units_are_not_the_header(tmp_path: Path) -> None:
    def line(key: str, at: datetime, value: float) -> str:
        return f"{at:%Y %m %d %H %M} 180 {value:5.1f} {value + 1:5.1f}"

    head = "#YY  MM DD hh mm WDIR WSPD GST\n#yr  mo dy hr mn degT m/s  m/s"
    columns = found(tmp_path / "a.csv", head, line, measurement=["WSPD"])
    assert columns.parsed.time[:2].tolist() == [compute_wall_us(START), compute_wall_us(START + HOUR)]


def test_a_wide_file_without_a_key_and_a_name_twice(tmp_path: Path) -> None:
    names = [f"s{place}" for place in range(6)]

    def line(key: str, at: datetime, value: float) -> str:
        return f"{at:%Y-%m-%d %H:%M}," + ",".join(f"{value + place:.2f}" for place in range(6))

    columns = found(tmp_path / "a.csv", "time," + ",".join(names), line, no_key=True)
    assert columns.keys.columns == [] and columns.spec.measurement == names[:4]
    with pytest.raises(UserError, match="column 's1' appears twice; rename one of them"):
        found(tmp_path / "a.csv", "time," + ",".join([*names[:5], "s1"]), line, measurement=["s0"])


def test_a_refused_text_is_cut_and_hides_secrets(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name,v\n" + f"token=ghp_{'a1B2' * 9} {'x' * 500},1\n" * 9)
    with pytest.raises(UserError, match="no column is a time") as error:
        find_columns(str(path), read_table([path]), Wishes(), Stopwatch())
    assert "a1B2" not in error.value.message and max(map(len, error.value.message.split("\n"))) < 200
