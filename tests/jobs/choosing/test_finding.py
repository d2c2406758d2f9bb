"""Which columns are time, key and measurement: found, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kalman
from jobs.choosing.columns import Roles, Wishes, find_roles
from jobs.choosing.finding import Keys, find_keys
from jobs.choosing.model_finding import note_long_series
from jobs.choosing.rhythm import find_rhythm, find_season, format_span
from jobs.choosing.table import InputTable, read_table
from jobs.core.errors import UserError

HOUR = 3_600_000_000


def table(folder: Path, **files: Any) -> InputTable:
    for name, frame in files.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    return read_table([folder / f"{name}.csv" for name in files])


def roles(found: InputTable, **given: object) -> Roles:
    return find_roles(found, Wishes(**given))  # type: ignore[arg-type]


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).round(4)


DAYS = pd.date_range("2024-01-09", periods=48, freq="13h")


@pytest.mark.parametrize(
    ("name", "values", "form"),
    [
        ("at", DAYS.strftime("%Y-%m-%d %H:%M"), None),
        ("when", DAYS.strftime("%Y-%m-%dT%H:%M:%SZ"), None),
        ("x", DAYS.strftime("%d.%m.%Y %H:%M"), "%d.%m.%Y %H:%M"),
        ("x", DAYS.strftime("%m/%d/%Y %H:%M"), "%m/%d/%Y %H:%M"),
        ("x", DAYS.strftime("%d/%m/%Y %H:%M"), "%d/%m/%Y %H:%M"),
        ("stamp", DAYS.strftime("%Y%m%d%H%M%S"), "%Y%m%d%H%M%S"),
        ("ts", DAYS.astype("int64") // 10**9, "epoch_seconds"),
        ("ts", DAYS.astype("int64") // 10**6, "epoch_milliseconds"),
        ("x", DAYS.astype("int64") // 10**3, "epoch_microseconds"),
        ("ts", DAYS.astype("int64"), "epoch_nanoseconds"),
        ("date", (DAYS - pd.Timestamp("1899-12-30")) / pd.Timedelta("1D"), "spreadsheet_days"),
    ],
)
@pytest.mark.parametrize("as_parquet", [False, True])
def test_the_time_is_found_whatever_its_format(
    tmp_path: Path, name: str, values: pd.Index, form: str | None, as_parquet: bool
) -> None:
    frame = pd.DataFrame({"no": range(48), "y": noise(48), name: values})
    if as_parquet:
        frame.to_parquet(tmp_path / "a.parquet")
        found = roles(read_table([tmp_path / "a.parquet"]))
    else:
        found = roles(table(tmp_path, a=frame))
    assert (found.time.name, found.time.time_format) == (name, form)
    whole = DAYS.strftime("%Y-%m-%dT%H:%M").astype("datetime64[us]").astype(np.int64)
    assert np.array_equal(found.time.micros, whole)
    assert [one.name for one in found.measurements] == ["y"]


def test_every_column_without_a_time_is_listed_with_its_reason(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "year": range(1900, 1940),
            "y": noise(40),
            "clock": ["12:30"] * 40,
            "note": ["fine"] * 40,
            "none": [""] * 40,
        }
    )
    with pytest.raises(UserError) as refused:
        roles(table(tmp_path, a=frame))
    lines = refused.value.message.splitlines()
    assert lines[0].endswith("no column is a time; name one with --time, and its format with --time-format")
    assert lines[1:] == [
        "  year: holds years; to read each as its first day, give --time year --time-format %Y",
        "  y: holds numbers that are no times",
        "  clock: holds a time of day without a date, such as '12:30'",
        "  note: holds text that is no time, such as 'fine'",
        "  none: is empty",
    ]


def test_times_in_two_forms_are_told_with_the_file_of_each(tmp_path: Path) -> None:
    hours = pd.date_range("2024-01-01", periods=48, freq="h")
    long = pd.DataFrame({"date": hours.strftime("%Y/%m/%d %H:%M:%S"), "y": noise(48)})
    short = pd.DataFrame({"date": hours.strftime("%Y/%m/%d %H:%M"), "y": noise(48)})
    with pytest.raises(UserError) as refused:
        roles(table(tmp_path, long=long, short=short))
    assert (
        "  date: holds times in two forms, '2024/01/01 00:00:00' (%Y/%m/%d %H:%M:%S) in long.csv and "
        "'2024/01/01 00:00' (%Y/%m/%d %H:%M) in short.csv; write all in one"
    ) in refused.value.message.splitlines()


def test_a_count_that_begins_anew_with_each_key_is_a_time(tmp_path: Path) -> None:
    days = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21]
    chicks = pd.DataFrame(
        {"no": range(120), "weight": noise(120), "Time": days * 10, "chick": np.repeat(range(10), 12)}
    )
    found = roles(table(tmp_path, a=chicks))
    assert (found.time.name, found.time.time_format) == ("Time", "epoch_seconds")
    assert found.time.note == "Time: read as seconds, counted from 1970-01-01"
    assert list(found.time.micros[:3]) == [0, 2_000_000, 4_000_000]
    shuffled = chicks.sample(frac=1, random_state=1)
    with pytest.raises(UserError, match="--time Time --time-format epoch_seconds"):
        roles(table(tmp_path, b=shuffled))
    given = roles(table(tmp_path, b=shuffled), time="Time", time_format="epoch_seconds")
    assert given.time.known.all()


def test_series_that_learning_takes_minutes_of_are_told_with_the_remedy() -> None:
    n = np.array([100, 8_000])
    time = np.concatenate([np.arange(size) for size in n]) * HOUR
    rows = kalman.SortedRows(np.repeat([0, 1], n), time, np.zeros((1, 8_100)), np.empty((0, 8_100)))
    assert note_long_series(rows, 2) == []
    (note,) = note_long_series(rows, 8)
    # hour 7000 after 1970-01-01 is on the 292nd day
    assert "up to 8,000 one after another" in note and "`pretrain --learn-from 1970-10-19`" in note


def test_what_is_no_measurement_says_why(tmp_path: Path) -> None:
    n = 60
    frame = pd.DataFrame(
        {
            "at": pd.date_range("2024-01-01", periods=n).strftime("%Y-%m-%d"),
            "row": range(n),
            "station_id": [7, 8, 9] * 20,
            "fixed": 3.5,
            "kind": ["a", "b"] * 30,
            "y": noise(n),
            "count": np.random.default_rng(1).poisson(5, n),
            "gappy": ["-" if k % 5 else k / 7 for k in range(n)],
        }
    )
    found = roles(table(tmp_path, a=frame))
    assert [one.name for one in found.measurements] == ["y", "count", "gappy"]
    assert found.measurements[2].absent == ("-",) and np.isnan(found.measurements[2].values).sum() == 48
    assert found.refused == {
        "row": "counts the rows",
        "station_id": "looks like an id, by its name",
        "fixed": "is 3.5 in every row",
        "kind": "holds text",
    }
    with pytest.raises(UserError, match="no column is a measurement.*\n  kind: holds text"):
        roles(table(tmp_path, b=frame[["at", "kind"]]))
    with pytest.raises(UserError, match="there is no column 'z'"):
        roles(table(tmp_path, b=frame), time="z")
    with pytest.raises(UserError, match="--time kind: holds text that is no time"):
        roles(table(tmp_path, b=frame), time="kind")
    with pytest.raises(UserError, match="--measurement kind: holds text"):
        roles(table(tmp_path, b=frame), measurement=("kind",))


def keys(found: InputTable, *given: str) -> Keys:
    return find_keys(found, roles(found, key=given), Wishes(key=given))


def test_the_key_is_a_column_or_the_files_name(tmp_path: Path) -> None:
    at = pd.date_range("2024-01-01", periods=50).strftime("%Y-%m-%d")
    alone = pd.DataFrame({"at": at, "y": noise(50), "state": ["up", "down"] * 25})
    assert keys(table(tmp_path, a=alone, b=alone))[:2] == (["series"], "series")  # states mix within a file
    several = pd.concat(alone.assign(host=f"h{k}", rack=f"r{k % 2}") for k in range(4))
    assert keys(table(tmp_path, c=several))[:2] == (["host"], None)
    named = {f"f{k}": alone.assign(host=f"h{k}") for k in range(3)}
    assert keys(table(tmp_path, **named))[:2] == (["host"], None)  # one value a file
    pairs = pd.concat(alone.assign(origin=a, dest=b) for a in ("x", "y") for b in ("p", "q", "r"))
    assert set(keys(table(tmp_path, d=pairs)).columns) == {"origin", "dest"}
    both = keys(table(tmp_path, e=several, f=several))
    assert both.columns == ["host", "series"] and both.from_name == "series" and both.count == 8
    assert keys(table(tmp_path, c=several), "rack").count == 2
    # levels far apart at times that do not repeat: a key, where its name says so
    mixed = pd.DataFrame({"at": at, "sensor": ["s1", "s2"] * 25, "y": noise(50) + np.tile([0, 9], 25)})
    assert keys(table(tmp_path, g=mixed)).columns == ["sensor"]


def test_files_that_continue_each_other_are_one_series(tmp_path: Path) -> None:
    at = pd.date_range("2024-01-01", periods=90).strftime("%Y-%m-%d")
    days = pd.DataFrame({"at": at, "y": noise(90)})
    parts = {"b": days[:31], "a": days[31:60], "c": days[60:]}
    found = keys(table(tmp_path, **parts))
    assert (found.columns, found.from_name, found.count) == ([], None, 1)
    assert found.why == "the files continue each other: all rows are one series"
    parts["a"] = days[31:50]  # a pause at one join of two: still one series
    assert keys(table(tmp_path, **parts)).columns == []
    parts["a"] = days[30:60]  # two files overlap by a day
    assert keys(table(tmp_path, **parts)).from_name == "series"
    apart = {"a": days[:20], "b": days[40:60], "c": days[70:]}  # runs at different times
    assert keys(table(tmp_path, **apart)).from_name == "series"


def test_the_rhythm_has_step_gaps_and_repeats() -> None:
    time = np.array([0, 1, 2, 3, 9, 10, 11, 11, 12]) * HOUR
    found = find_rhythm(np.zeros(9, np.int64), time)
    assert (found.step, found.gaps, found.longest, found.repeats, found.unit) == (
        HOUR,
        1,
        6 * HOUR,
        1,
        "hour",
    )
    assert found.regular == 6 / 7
    assert [format_span(x) for x in (7 * 24 * HOUR, 36 * HOUR, HOUR / 12, 1500)] == [
        "1 w",
        "1.5 d",
        "5 min",
        "1.5 ms",
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_season_is_found_in_wandering_levels_and_only_where_there_is_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    time = np.arange(1500) * (HOUR // 4)
    series, plain, odd = [], [], []
    for _ in range(6):
        level = np.cumsum(rng.normal(size=1500)) * 0.1 + rng.normal(size=1500)
        level[rng.integers(0, 1500, 5)] += 30.0
        wave = np.sin(2 * np.pi * np.arange(1500) / 96 + rng.uniform(0, 6))
        series.append((time, level + 1.5 * wave))
        plain.append((time, level))
        odd.append((time, level + 1.5 * np.sin(2 * np.pi * np.arange(1500) / 37.3)))
    found = find_season(series, HOUR // 4)
    assert found is not None and found.name == "a day" and found.harmonics == 1
    assert find_season(plain, HOUR // 4) is None
    other = find_season(odd, HOUR // 4)
    assert other is not None and abs(other.period / (HOUR / 4) - 37.3) < 0.8


@pytest.mark.parametrize("seed", [10, 87, 253, 269, 294, 359])
def test_three_or_four_waves_of_a_wandering_level_are_no_season(seed: int) -> None:
    """Months of random walks, in which waves of 30 to 41 steps stood out 15 to 50 times."""
    month = 31 * 24 * HOUR
    level = np.random.default_rng(seed).normal(size=123).cumsum()
    assert find_season([(np.arange(123) * month, level)], month) is None
