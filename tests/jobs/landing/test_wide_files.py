"""Files with a column for each series, or for each time, give the rows of long files. No Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import filter as offline
from jobs import init
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.landing import csv_parquet
from jobs.landing.csv_parquet import list_parts, read, read_part, read_schema
from jobs.landing.raw_rows import CORRUPT, MISSHAPEN
from jobs.specs.files import Files, Wide
from jobs.specs.loading import load_spec

WIDE = Files(wide=Wide(key="station", measurement="level"))
COLUMNS = ["station", "at", "level"]
Rows = list[tuple[Any, ...]]


def written(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def rows_of(path: Path, named: Files, columns: list[str] | None = None) -> Rows:
    columns = columns or COLUMNS
    source = read(path, columns, named)
    assert set(read_schema(path, columns, named).names) == set(columns)
    return list(zip(*(source.columns[name].to_pylist() for name in columns), strict=True))


EXPECTED = [
    ("s1", "2024-01-01", "1.5"),
    ("s 2", "2024-01-01", "2"),
    ("s1", "2024-01-02", "x"),
    ("s3", "2024-01-02", "-"),
]
YEARS = [("AT", "1960-01-01", "1"), ("AT", "1961-01-01", "2"), ("DE", "1961-01-01", "4")]
BY_TIME = Wide(time="at", measurement="level")

# name: setting, content, the rows that a person reads (key, time, value)
CASES: dict[str, tuple[Files, str, Rows]] = {
    "by series": (WIDE, "at,s1,s 2,s3\n2024-01-01,1.5,2,\n2024-01-02,x,,-\n", EXPECTED),
    "below titles": (
        WIDE,
        "Levels; all\nof 2024\n\nat;s1;s 2;s3\n2024-01-01;1.5;2;\n2024-01-02;x;;-\n",
        EXPECTED,
    ),
    "with trailing separators": (WIDE, "at,s1,s 2,s3,\n2024-01-01,1.5,2,,\n2024-01-02,x,,-,\n", EXPECTED),
    "listed columns": (
        Files(wide=Wide(key="station", measurement="level", columns=["s1", "s3"])),
        "at,s1,other,s3\n2024-01-01,1.5,2,\n2024-01-02,x,,-\n",
        [one for one in EXPECTED if one[0] != "s 2"],
    ),
    "by year": (Files(wide=BY_TIME), "name,station,1960,1961\nA,AT,1,2\nD,DE,,4\n", YEARS),
    "of the World Bank": (
        Files(wide=BY_TIME),
        '"Source","WDI",\n\n"station","1960 [YR1960]","1961 [YR1961]",\n"AT","1","2",\n"DE","","4",\n',
        YEARS,
    ),
    "by date": (
        Files(wide=BY_TIME),
        "station,2024-01-01,2024-01-02\nAT,1,\nDE,,4\n",
        [("AT", "2024-01-01", "1"), ("DE", "2024-01-02", "4")],
    ),
    "an empty file": (WIDE, "at,s1,s2\n", []),
    "a row without a cell": (WIDE, "at,s1,s2\n2024-01-01,,\n2024-01-02,1,\n", [("s1", "2024-01-02", "1")]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_filled_cell_is_a_row(tmp_path: Path, name: str) -> None:
    named, content, expected = CASES[name]
    assert rows_of(written(tmp_path / "wide.csv", content), named) == expected


CELLS = st.one_of(st.none(), st.integers(-99, 99).map(str), st.sampled_from(["x", "1,5", 'a"b']))
NAMES = st.lists(
    st.text("abc 1_.-", min_size=1, max_size=5).map("s{}".format), min_size=1, max_size=5, unique=True
)


@settings(max_examples=100, deadline=None)
@given(NAMES, st.lists(st.lists(CELLS, min_size=5, max_size=5), max_size=6), st.integers(1, 50))
def test_wide_rows_are_those_of_pandas_melt(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], cells: list[list[str | None]], size: int
) -> None:
    at = [f"2024-01-{place:02}" for place in range(1, len(cells) + 1)]
    frame = pd.DataFrame(
        {"at": at, **{name: [row[n] for row in cells] for n, name in enumerate(names)}}, dtype=object
    )
    path = tmp_path_factory.mktemp("wide") / "wide.csv"
    frame.to_csv(path, index=False)
    long = frame.melt("at", var_name="station", value_name="level").dropna()
    expected = sorted(zip(long["station"], long["at"], long["level"], strict=True))
    named = WIDE.model_copy(update={"skip_lines": 0, "separator": ","})
    assert sorted(rows_of(path, named)) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_parquet, "PIECE_BYTES", size)
        found = [
            one for part in list_parts(path, columns=COLUMNS, named=named) for one in read_part(part, COLUMNS)
        ]
    rows = [
        row for one in found for row in zip(*(one.columns[name].to_pylist() for name in COLUMNS), strict=True)
    ]
    assert rows == rows_of(path, named)


def test_numbers_of_parquet_keep_their_type(tmp_path: Path) -> None:
    path = tmp_path / "wide.parquet"
    pd.DataFrame({"at": ["2024-01-01"], "s1": [1], "s2": [2.5]}).to_parquet(path)
    assert rows_of(path, WIDE) == [("s1", "2024-01-01", 1.0), ("s2", "2024-01-01", 2.5)]
    path = tmp_path / "text.parquet"
    pd.DataFrame({"at": ["2024-01-01"], "s1": [1], "s2": ["x"]}).to_parquet(path)
    with pytest.raises(UserError, match="columns that files.wide makes rows hold int64, string"):
        read_schema(path, COLUMNS, WIDE)


@pytest.mark.parametrize(
    ("named", "content", "said"),
    [
        (WIDE, "time,s1\n2024-01-01,1\n", "there is no column 'at'"),
        (WIDE, "at\n2024-01-01\n", "no column is left that could become rows"),
        (Files(wide=BY_TIME), "station,s1\nAT,1\n", "no column is left that could become rows"),
        (
            Files(wide=Wide(key="station", measurement="level", columns=["s1", "s2"])),
            "at,s1\n2024-01-01,1\n",
            "there is no column 's2'; mend files.wide",
        ),
    ],
)
def test_a_file_that_is_not_wide_is_refused(tmp_path: Path, named: Files, content: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(written(tmp_path / "wide.csv", content), ["station", "at", "level"], named)


def test_a_broken_row_stays_one_row(tmp_path: Path) -> None:
    path = written(tmp_path / "wide.csv", "at,s1,s2,s3\n2024-01-01,1,2,3\n2024-01-02,1,2\n2024-01-03,1,2,3\n")
    [source] = [one for part in list_parts(path, columns=COLUMNS, named=WIDE) for one in read_part(part)]
    assert source.rows == 7 and (source.reasons() == MISSHAPEN).sum() == 1
    assert source.columns[CORRUPT].to_pylist() == [*[None] * 3, "2024-01-02,1,2", *[None] * 3]


def test_names_come_as_key_or_as_time() -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        Wide(measurement="level")


def wide_file(path: Path, names: list[str], rows: int = 200, scale: float = 1.0) -> Path:
    rng = np.random.default_rng(3)
    at = pd.date_range("2024-01-01", periods=rows, freq="1h").strftime("%Y-%m-%d %H:%M")
    values = {
        name: (20 + rng.normal(size=rows).cumsum() * 0.1).round(3) * scale**n for n, name in enumerate(names)
    }
    pd.DataFrame({"at": at, **values}).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    "names",
    [
        ["s1", "s2", "s3"],
        ["Meter 1 (kWh)", "Meter 2 (kWh)", "Meter 10 (kWh)"],
        ["room_kitchen", "room_bath", "room_hall", "room_attic"],
        ["AAPL", "MSFT", "GOOG", "IBM", "^GSPC"],
        ["Graz [C]", "Linz [C]", "Wien [C]"],
    ],
)
def test_init_finds_wide_files_and_filter_reads_the_same_rows(tmp_path: Path, names: list[str]) -> None:
    path = wide_file(tmp_path / "wide.csv", names)
    setting = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    report = init.run(setting, str(path), quick=True, no_picture=True)
    assert any("a column for each series, each filled cell a row" in line for line in report.lines)
    assert (report.data["key"], report.data["measurement"], report.data["keys"]) == (
        ["series"],
        ["value"],
        len(names),
    )
    spec = load_spec("wide", tmp_path)
    assert spec.files == Files(wide=Wide(key="series", measurement="value"))
    done = offline.run(setting, "wide", str(path), str(tmp_path / "out.parquet"))
    assert (done.data["rows"], done.data["rejected"], done.data["keys"]) == (200 * len(names), 0, len(names))
    long = pd.read_csv(path).melt("at", var_name="series", value_name="value")
    long.to_csv(tmp_path / "long.csv", index=False)
    (tmp_path / "long.yaml").write_text(
        yaml.safe_dump({**yaml.safe_load((tmp_path / "wide.yaml").read_text()), "name": "long", "files": {}})
    )
    offline.run(setting, "long", str(tmp_path / "long.csv"), str(tmp_path / "other.parquet"))
    ours, theirs = (
        pd.read_parquet(tmp_path / f"{name}.parquet").sort_values(["series", "at"])
        for name in ("out", "other")
    )
    assert [list(one) for one in ours["mean"]] == [list(one) for one in theirs["mean"]]


@pytest.mark.parametrize("names", [["temp", "humidity", "pressure"], ["wind_speed", "wind_dir", "wind_gust"]])
def test_init_does_not_mix_quantities(tmp_path: Path, names: list[str]) -> None:
    path = wide_file(tmp_path / "rows.csv", names, scale=8.0)
    setting = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    report = init.run(setting, str(path), quick=True, no_picture=True)
    assert report.data["measurement"] == names and load_spec("rows", tmp_path).files.wide is None


def test_init_finds_a_column_for_each_year(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    years = [str(year) for year in range(1960, 2020)]
    rows = "".join(
        f"{name},{','.join(f'{one:.2f}' for one in 50 + rng.normal(size=60).cumsum())},\n" for name in "ABCD"
    )
    path = written(tmp_path / "bank.csv", f'"Data Source","WDI",\n\ncountry,{",".join(years)},\n{rows}')
    setting = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    report = init.run(setting, str(path), quick=True, no_picture=True)
    assert (report.data["key"], report.data["time"], report.data["keys"]) == (["country"], "time", 4)
    assert load_spec("bank", tmp_path).files.wide == Wide(time="time", measurement="value")
    done = offline.run(setting, "bank", str(path), str(tmp_path / "out.csv"))
    assert (done.data["rows"], done.data["rejected"], done.data["keys"]) == (240, 0, 4)
