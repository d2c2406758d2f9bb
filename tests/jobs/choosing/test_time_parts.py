"""`init` finds the columns that make the time together, or names them; and columns of any name. No Spark."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs import filter as filter_verb
from jobs import init
from jobs.choosing.columns import Roles, Wishes, find_roles
from jobs.choosing.finding import Keys, _refuse_time_apart, build_skeleton, find_keys
from jobs.choosing.rhythm import find_rhythm, format_span
from jobs.choosing.table import InputTable, read_table
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.specs.loading import load_spec
from jobs.specs.yaml_text import format_flow, parse

Frame = Any
HOURS: Any = pd.date_range("2025-01-30", periods=240, freq="h")
QUARTERS: Any = pd.date_range("2025-01-30", periods=400, freq="15min")
DATES: Any = pd.date_range("2023-11-03", periods=120, freq="D")
QUARTERS_OF_YEARS: Any = pd.date_range("1959-01-01", periods=120, freq="QS")
MONTHS: Any = pd.date_range("1949-01-01", periods=120, freq="MS")


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).round(4)


def found(folder: Path, frame: Frame, **wishes: Any) -> tuple[InputTable, Roles, Keys, str]:
    """Return what is found in a file, and its usual step."""
    frame.to_csv(folder / "a.csv", index=False)
    return found_in(folder / "a.csv", **wishes)


def found_in(path: Path, **wishes: Any) -> tuple[InputTable, Roles, Keys, str]:
    table = read_table([path])
    given = Wishes(wishes.get("time"), wishes.get("time_format"))
    roles = find_roles(table, given)
    keys = find_keys(table, roles, given)
    _refuse_time_apart(table, roles, keys, given)
    known = roles.time.known
    rhythm = find_rhythm(keys.code[known], roles.time.micros[known])
    spec = build_skeleton(roles, keys, Wishes())
    assert spec.list_file_columns([spec.time]) == [*roles.time.columns]
    return table, roles, keys, format_span(rhythm.step)


SHAPES: list[tuple[str, Any, Any, str, Any]] = [
    (
        "date and time",
        HOURS,
        lambda t: {"DATE": t.strftime("%Y-%m-%d"), "TIME": t.strftime("%H:%M:%S")},
        "1 h",
        ["DATE", "TIME"],
    ),
    (
        "a date with midnight, twelve hours",
        QUARTERS,
        lambda t: {"Date": t.strftime("%m/%d/%Y 00:00"), "Time": t.strftime("%I:%M %p")},
        "15 min",
        ["Date", "Time"],
    ),
    (
        "German, reversed",
        QUARTERS,
        lambda t: {"Uhrzeit": t.strftime("%H:%M"), "Datum": t.strftime("%d.%m.%Y")},
        "15 min",
        ["Datum", "Uhrzeit"],
    ),
    (
        "names that say nothing",
        QUARTERS,
        lambda t: {"c1": t.strftime("%Y-%m-%d"), "c2": t.strftime("%H:%M")},
        "15 min",
        ["c1", "c2"],
    ),
    (
        "year, month, day, hour",
        HOURS,
        lambda t: {
            "No": range(1, len(t) + 1),
            "year": t.year,
            "month": t.month,
            "day": t.day,
            "hour": t.hour,
        },
        "1 h",
        ["year", "month", "day", "hour"],
    ),
    (
        "year, month, day",
        DATES,
        lambda t: {"Year": t.year, "Month": t.month, "Day": t.day},
        "1 d",
        ["Year", "Month", "Day"],
    ),
    (
        "year and quarter as fractions",
        QUARTERS_OF_YEARS,
        lambda t: {"year": t.year.astype(float), "quarter": t.quarter.astype(float)},
        "13 w",
        ["year", "quarter"],
    ),
    (
        "year and month's name",
        MONTHS,
        lambda t: {"year": t.year, "month": t.strftime("%b")},
        "31 d",
        ["year", "month"],
    ),
    (
        "year and day of the year",
        DATES,
        lambda t: {"YEAR": t.year, "DOY": t.dayofyear},
        "1 d",
        ["YEAR", "DOY"],
    ),
    (
        "loggers",
        QUARTERS,
        lambda t: {"Year": t.year, "DOY": t.dayofyear, "HHMM": t.hour * 100 + t.minute},
        "15 min",
        ["Year", "DOY", "HHMM"],
    ),
    (
        "buoys",
        QUARTERS,
        lambda t: {"#YY": t.year, "MM": t.month, "DD": t.day, "hh": t.hour, "mm": t.minute},
        "15 min",
        ["YY", "MM", "DD", "hh", "mm"],  # `#` begins a comment, which this header is not
    ),
    (
        "hour ending",
        HOURS,
        lambda t: {"Date": t.strftime("%Y-%m-%d"), "HE": t.hour + 1},
        "1 h",
        ["Date", "HE"],
    ),
    (
        "hour ending in hundreds",
        HOURS,
        lambda t: {"Date": t.strftime("%Y-%m-%d"), "Hour": (t.hour + 1) * 100},
        "1 h",
        ["Date", "Hour"],
    ),
    (
        "eight digits and a whole hour called time",
        HOURS,
        lambda t: {"date": t.strftime("%Y%m%d"), "time": t.hour},
        "1 h",
        {"date": "date", "hour": "time"},
    ),
    (
        "bicycles: a flag of the year beside the date",
        HOURS,
        lambda t: {
            "instant": range(len(t)),
            "dteday": t.strftime("%Y-%m-%d"),
            "yr": 0,
            "mnth": t.month,
            "hr": t.hour,
        },
        "1 h",
        ["dteday", "hr"],
    ),
    (
        "points in the time of day",
        HOURS,
        lambda t: {"Date": t.strftime("%d/%m/%Y"), "Time": t.strftime("%H.%M.%S")},
        "1 h",
        ["Date", "Time"],
    ),
    (
        "an h in the time of day",
        QUARTERS,
        lambda t: {"Date": t.strftime("%d/%m/%Y"), "Heure": t.strftime("%Hh%M")},
        "15 min",
        ["Date", "Heure"],
    ),
    (
        "seconds with a fraction",
        HOURS,
        lambda t: {
            "Date": t.strftime("%Y%m%d"),
            "hour": t.hour,
            "minute": t.minute,
            "second": t.second + 0.5,
        },
        "1 h",
        ["Date", "hour", "minute", "second"],
    ),
    (
        "a spreadsheet's numbers",
        HOURS,
        lambda t: {"Date": (t - pd.Timestamp("1899-12-30")).days, "Time": (t.hour / 24).round(9)},
        "1 h",
        ["Date", "Time"],
    ),
    (
        "HHMM called time",
        QUARTERS,
        lambda t: {"date": t.strftime("%Y-%m-%d"), "time": t.hour * 100 + t.minute},
        "15 min",
        {"date": "date", "hhmm": "time"},
    ),
]


@pytest.mark.parametrize("stations", [1, 3])
@pytest.mark.parametrize(
    ("times", "columns", "step", "written"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES]
)
def test_the_time_is_found_in_its_columns_and_stations_stay_keys(
    tmp_path: Path, times: Any, columns: Any, step: str, written: Any, stations: int
) -> None:
    frame = pd.DataFrame(columns(times))
    frames = [frame.assign(station=f"s{i}", value=noise(len(times), i) + 10 * i) for i in range(stations)]
    _, roles, keys, found_step = found(
        tmp_path, pd.concat(frames) if stations > 1 else frames[0].drop(columns="station")
    )
    assert roles.time.written == written and roles.time.known.all()
    assert found_step == step
    assert keys.columns == (["station"] if stations > 1 else ["series"])
    assert [one.name for one in roles.measurements] == ["value"]


def test_stored_dates_and_times_are_found(tmp_path: Path) -> None:
    table = pa.table({"d": pa.array(HOURS.date), "t": pa.array(HOURS.time), "v": noise(240)})
    assert table.schema.types[:2] == [pa.date32(), pa.time64("us")]
    pq.write_table(table, tmp_path / "a.parquet")
    _, roles, _, step = found_in(tmp_path / "a.parquet")
    assert roles.time.written == ["d", "t"] and step == "1 h"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.datetimes(datetime(1960, 1, 1), datetime(2024, 1, 1)),
    st.sampled_from(["%Y-%m-%d", "%d.%m.%Y", "%Y/%m/%d"]),
    st.sampled_from(["10min", "30min", "1h"]),
    st.booleans(),
)
def test_any_dates_and_times_side_by_side_are_one_time(
    tmp_path: Path, begin: Any, form: str, step: str, shuffled: bool
) -> None:
    times = pd.date_range(begin.replace(minute=0, second=0, microsecond=0), periods=300, freq=step)
    frame = pd.DataFrame({"D": times.strftime(form), "T": times.strftime("%H:%M"), "v": noise(300)})
    table, roles, _, _ = found(tmp_path, frame[["v", "T", "D"]] if shuffled else frame)
    assert roles.time.written == ["D", "T"]
    assert np.array_equal(roles.time.micros, times.to_numpy().astype("datetime64[us]").astype(np.int64))


def test_a_whole_time_is_preferred_to_its_parts(tmp_path: Path) -> None:
    frame = pd.DataFrame({"year": HOURS.year, "month": HOURS.month, "day": HOURS.day, "hour": HOURS.hour})
    frame = frame.assign(time_hour=HOURS.strftime("%Y-%m-%dT%H:%M:%SZ"), v=noise(240))
    assert found(tmp_path, frame)[1].time.written == "time_hour"
    daily = pd.DataFrame(
        {"date": DATES.strftime("%Y-%m-%d"), "year": DATES.year, "month": DATES.month, "day": DATES.day}
    )
    assert found(tmp_path, daily.assign(v=noise(120)))[1].time.written == "date"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("period", np.arange(960) % 48 + 1),
        ("slot", np.arange(960) % 96),
        ("SP", [f"{i % 48 + 1:02d}" for i in range(960)]),
        ("interval", [f"{i % 24:02d}:00-{i % 24 + 1:02d}:00" for i in range(960)]),
        ("unit", [f"{i % 24:02d}:00 to {i % 24 + 1:02d}:00" for i in range(960)]),
    ],
)
def test_a_part_of_the_time_that_is_not_known_is_named(tmp_path: Path, name: str, values: Any) -> None:
    days = pd.date_range("2024-01-01", periods=960).strftime("%Y-%m-%d")
    count = int(pd.Series(values).nunique())
    frame = pd.DataFrame({"date": [days[i // count] for i in range(960)], name: values, "v": noise(960)})
    with pytest.raises(
        UserError, match=f"rows of one 'date' differ in '{name}', which may be a part of the time"
    ):
        found(tmp_path, frame)
    if ":" not in str(values[0]):  # a text that would be a key is refused as long as nobody names it
        assert found(tmp_path, frame, time="date")[1].time.written == "date"


def test_the_user_names_the_columns_of_the_time(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": HOURS.strftime("%d/%m/%Y"), "h": HOURS.hour, "v": noise(240)})
    _, roles, _, step = found(tmp_path, frame, time="x,h", time_format="%d/%m/%Y")
    assert roles.time.written == ["x", "h"] and step == "1 h"
    with pytest.raises(UserError, match="--time v,h: the columns make a time in too few rows"):
        found(tmp_path, frame, time="v,h")
    with pytest.raises(UserError, match="there is no column 'hours'"):
        found(tmp_path, frame, time="x,hours")


def test_a_spec_is_written_and_read_by_filter(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "Datum": HOURS.strftime("%d.%m.%Y"),
            "Stunde (1-24)": HOURS.hour + 1,
            "Messstelle #": ["A", "B"] * 120,
            "Temp. [°C]": noise(240),
            "_value": noise(240, 1),
        }
    )
    frame = pd.concat([frame.assign(**{"Messstelle #": one}) for one in "AB"])
    path = tmp_path / "a.csv"
    frame.to_csv(path, index=False)
    given = Settings.load(str(tmp_path / "warehouse"), str(tmp_path), None)
    data = init.run(given, str(path), name="m", keys=2, rows=60, no_picture=True).data
    assert data["time"] == ["Datum", "Stunde (1-24)"] and data["key"] == ["Messstelle #"]
    spec = load_spec(tmp_path / "m.yaml")
    assert spec.columns == ["Messstelle", "time", "Temp_C", "value"] and spec.time_unit == "hour"
    output = tmp_path / "out.csv"
    done = filter_verb.run(given, model="m", input=str(path), output=str(output))
    assert done.data["rows"] == 480
    times = pd.read_csv(output)["time"].str[:19]
    assert sorted(set(times))[0] == "2025-01-30 01:00:00" and times.nunique() == 240


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12))
def test_any_name_is_written_as_yaml_reads_it_back(name: str) -> None:
    document = parse(f"a: {format_flow(name)}    # why\nb: [{format_flow(name)}, x]\n")
    assert document.value == {"a": name, "b": [name, "x"]}
