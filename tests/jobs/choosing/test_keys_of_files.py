"""Which column tells series apart, in the shapes of files that people have; a column has one role."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import filter, init
from jobs.choosing.columns import Wishes, find_marks
from jobs.choosing.finding import Keys, find_keys, missing_values, note_left_out_texts
from jobs.choosing.table import InputTable, read_table
from jobs.core.settings import Settings
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from tests.jobs.choosing.test_finding import noise, roles

START = pd.Timestamp("2024-01-01")


def write(folder: Path, frame: pd.DataFrame, name: str = "a") -> Path:
    path = folder / f"{name}.csv"
    frame.to_csv(path, index=False)
    return path


def keys_in(*paths: Path) -> tuple[InputTable, Keys, list[str], list[str]]:
    table = read_table(list(paths))
    found = roles(table)
    keys = find_keys(table, found, Wishes())
    return table, keys, [one.name for one in found.measurements], note_left_out_texts(table, found, keys)


def devices(
    names: list[str], column: str, seed: int = 0, minutes: float = 7.0, rows: int = 60
) -> pd.DataFrame:
    """Return readings near 21 degrees of devices that report at times of their own."""
    rng = np.random.default_rng(seed)
    parts = []
    for name in names:
        gaps = rng.uniform(0.5, 1.5, rows) * minutes * rng.uniform(0.7, 1.3)
        at = START + pd.to_timedelta(np.round(rng.uniform(0, 400) + gaps.cumsum() * 60), unit="s")
        value = 21 + rng.normal(size=rows).cumsum() * 0.05
        parts.append(pd.DataFrame({"at": at, column: name, "temperature": value.round(2)}))
    return pd.concat(parts).sort_values("at")


@pytest.mark.parametrize(
    ("column", "names"),
    [
        ("device_id", ["d1", "d2", "d3"]),
        ("room", ["kitchen", "bath", "bedroom", "hall"]),
        ("sensor", ["s-1", "s-2"]),
        ("device_id", ["101", "102", "107"]),
        ("station", ["1", "2"]),
        ("entity_id", ["sensor.a", "sensor.b", "sensor.c", "sensor.d", "sensor.e"]),
        ("meterName", ["north", "south", "west"]),
        ("Zimmer", ["Bad", "Küche", "Flur"]),
        ("wo", ["oben", "unten"]),
    ],
)
def test_few_devices_that_report_at_times_of_their_own_are_series(
    tmp_path: Path, column: str, names: list[str]
) -> None:
    _, keys, measured, _ = keys_in(write(tmp_path, devices(names, column)))
    assert (keys.columns, keys.from_name, keys.count, measured) == (
        [column],
        None,
        len(names),
        ["temperature"],
    )


@given(
    st.integers(2, 6),
    st.sampled_from(["probe", "location", "station_name", "node", "Ort", "where_it_is"]),
    st.integers(0, 1000),
    st.floats(1, 90),
)
@settings(max_examples=15, deadline=None)
def test_any_few_devices_are_series(
    tmp_path_factory: pytest.TempPathFactory, count: int, column: str, seed: int, minutes: float
) -> None:
    frame = devices([f"x{k}y" for k in range(count)], column, seed, minutes)
    _, keys, _, left = keys_in(write(tmp_path_factory.mktemp("d"), frame))
    assert keys.columns == [column] or any(note.startswith(f"{column} holds") for note in left)


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        ("quality", ["good", "fair"]),
        ("comment", ["a", "b", "c"]),
        ("state", ["up", "down"]),
        ("mode", ["x", "y"]),
    ],
)
def test_texts_beside_one_series_are_no_key_and_are_said(
    tmp_path: Path, column: str, texts: list[str]
) -> None:
    at = pd.date_range(START, periods=90, freq="1h").astype(str)
    picked = np.random.default_rng(1).choice(texts, 90)
    _, keys, measured, left = keys_in(
        write(tmp_path, pd.DataFrame({"at": at, column: picked, "v": noise(90)}))
    )
    assert column not in keys.columns and measured == ["v"]
    (note,) = left
    assert note.startswith(f"{column} holds {len(texts)} texts") and f"--key {column}" in note


@pytest.mark.parametrize(
    "name", ["state", "channel", "unit", "line", "type", "metric", "code", "station", "index"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_column_is_a_key_or_a_measurement_and_never_both(tmp_path: Path, name: str, whole: bool) -> None:
    values = np.random.default_rng(2).choice([20, 21, 22, 23], 120) * (1 if whole else 1.25)
    at = pd.date_range(START, periods=120, freq="10min").astype(str)
    _, keys, measured, _ = keys_in(write(tmp_path, pd.DataFrame({"at": at, name: values})))
    assert measured == [name] and name not in keys.columns
    beside = pd.DataFrame({"at": np.repeat(at[:30], 4), name: [1, 2, 3, 4] * 30, "power": noise(120)})
    _, keys, measured, _ = keys_in(write(tmp_path, beside, "b"))
    assert (keys.columns, measured) == ([name], ["power"])


@given(
    st.sampled_from(["state", "value_id", "device", "tag", "product", "group", "place", "number", "y"]),
    st.lists(st.integers(-5, 40), min_size=2, max_size=9, unique=True),
    st.sampled_from([1, 0.5, 0.1]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_no_column_has_two_roles(
    tmp_path_factory: pytest.TempPathFactory, name: str, values: list[int], size: float, beside: bool
) -> None:
    picked = np.random.default_rng(3).choice(values, 100) * size
    frame = pd.DataFrame(
        {"at": pd.date_range(START, periods=100, freq="1min").astype(str), name: picked.round(2)}
    )
    if beside:
        frame["who"] = np.random.default_rng(4).choice(["a", "b"], 100)
    folder = tmp_path_factory.mktemp("roles")
    if len(np.unique(picked)) > 1:
        table, keys, measured, _ = keys_in(write(folder, frame))
        assert measured and not set(measured) & {*keys.columns, "at"}
        assert ModelSpec.model_validate(
            {
                "name": "m",
                "version": 1,
                "key": keys.columns,
                "key_from_name": keys.from_name,
                "time": "at",
                "measurement": measured,
                "states": ["x"],
                "process": {"kind": "random_walk", "variance": 1.0},
                "observation": {"R": [[1.0]]},
                "initial": {"diffuse": True},
            }
        )
        assert table.files


def test_an_export_of_home_automation_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    parts = []
    for name, level in (("sensor.bath", 21.0), ("sensor.hall", 20.5), ("sensor.attic", 21.2)):
        at = START + pd.to_timedelta(rng.uniform(20, 600, 80).cumsum(), unit="s")
        state = (level + rng.normal(size=80).cumsum() * 0.1).round(1).astype(str).astype(object)
        state[rng.integers(0, 80, 4)] = "unavailable"
        state[0] = "unknown"
        changed = at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        parts.append(pd.DataFrame({"entity_id": name, "state": state, "last_changed": changed}))
    path = write(tmp_path, pd.concat(parts))
    table, keys, measured, _ = keys_in(path)
    assert (keys.columns, measured) == (["entity_id"], ["state"])
    assert set(roles(table).measurements[0].absent) == {"unavailable", "unknown"}


def test_a_binary_sensor_is_measured_as_1_and_0_where_there_is_nothing_else(tmp_path: Path) -> None:
    at = pd.date_range(START, periods=80, freq="5min").astype(str)
    state = np.random.default_rng(6).choice(["on", "off"], 80)
    path = write(
        tmp_path, pd.DataFrame({"entity_id": "binary_sensor.door", "state": state, "last_changed": at})
    )
    _, keys, measured, _ = keys_in(path)
    assert (keys.columns, measured) == (["entity_id"], ["state"])
    other = write(tmp_path, pd.DataFrame({"at": at, "state": state, "power": noise(80)}), "b")
    assert keys_in(other)[2] == ["power"]


@pytest.mark.parametrize("column", ["variable", "parameter", "metric", "Messgröße"])
def test_the_name_of_the_variable_of_a_long_export_is_a_key(tmp_path: Path, column: str) -> None:
    at = pd.date_range(START, periods=60, freq="1h").astype(str)
    parts = [
        pd.DataFrame({"at": at, column: name, "value": noise(60) + k})
        for k, name in enumerate(("t", "rh", "p"))
    ]
    _, keys, measured, _ = keys_in(write(tmp_path, pd.concat(parts)))
    assert (keys.columns, keys.count, measured) == ([column], 3, ["value"])


def months(folder: Path, places: list[str], column: str, count: int = 3, overlap: bool = True) -> list[Path]:
    paths = []
    for k, place in enumerate(places):
        for month in range(1, count + 1):
            begin = pd.Timestamp(2024 if overlap else 2020 + k, month, 1)
            at = pd.date_range(begin, begin + pd.offsets.MonthEnd(1), freq="1D").astype(str)
            frame = pd.DataFrame({"at": at, column: place, "value": noise(len(at), k * 100 + month)})
            paths.append(write(folder, frame, f"{place}-2024-{month:02}"))
    return paths


@pytest.mark.parametrize(
    ("column", "places"),
    [
        ("city", ["Graz", "Linz"]),
        ("station", ["a", "b", "c"]),
        ("Messstelle", ["west", "ost"]),
        ("site_no", ["x", "y"]),
    ],
)
def test_files_by_place_and_month_are_one_series_a_place(
    tmp_path: Path, column: str, places: list[str]
) -> None:
    _, keys, _, _ = keys_in(*months(tmp_path, places, column))
    assert (keys.columns, keys.from_name, keys.count) == ([column], None, len(places))


def test_whoever_wrote_a_month_is_no_key(tmp_path: Path) -> None:
    paths = []
    for month in range(1, 9):
        begin = pd.Timestamp(2024, month, 1)
        at = pd.date_range(begin, begin + pd.offsets.MonthEnd(1), freq="1D").astype(str)
        frame = pd.DataFrame({"at": at, "observer": "AB"[month % 2], "value": noise(len(at), month)})
        paths.append(write(tmp_path, frame, f"2024-{month:02}"))
    _, keys, _, _ = keys_in(*paths)
    assert keys.columns == [] and keys.count == 1


def test_a_unit_that_every_row_has_is_no_key(tmp_path: Path) -> None:
    at = pd.date_range(START, periods=60, freq="1h").astype(str)
    _, keys, _, _ = keys_in(write(tmp_path, pd.DataFrame({"at": at, "value": noise(60), "unit": "°C"})))
    assert keys.columns == ["series"]


def init_in(folder: Path, input: str, **changes: Any) -> Any:
    given = Settings.load(str(folder / "warehouse"), str(folder / "models"), None, quiet=True)
    return init.run(given, input, name="x", quick=True, no_picture=True, force=True, **changes)


def test_the_next_command_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my files"
    folder.mkdir()
    months(folder, ["a"], "city", 2)
    done = init_in(tmp_path, str(folder / "*.csv"), structure="level")
    (line,) = (line for line in done.lines if line.startswith("next"))
    words = shlex.split(line)
    assert words[words.index("--input") + 1] == str(folder / "*.csv") and f"'{folder}/*.csv'" in line
    assert load_spec("x", tmp_path / "models").key in ([], ["city"])


@pytest.mark.parametrize(
    ("mark", "written"),
    [
        (-999, "-999"),
        (9999, "9999"),
        (-99.9, "-99.9"),
        (1e20, "1e+20"),
        (32767, "32767"),
        (0, "0"),
        (777.7, "777.7"),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_a_number_far_outside_and_frequent_is_missing(
    tmp_path: Path, mark: float, written: str, stored: bool
) -> None:
    path = with_mark(tmp_path, mark, stored)
    table = read_table([path])
    found = roles(table)
    marked, notes = find_marks(found.measurements, np.zeros(300, np.int64))
    assert missing_values(found._replace(measurements=marked))[-1] == written
    assert notes[0].startswith(f"value: {written} in ") and "take it out of missing_values" in notes[0]
    assert np.nanstd(marked[0].values) < 2


def with_mark(folder: Path, mark: float, stored: bool) -> Path:
    rng = np.random.default_rng(7)
    value = rng.normal(size=300).round(2) + (300 if mark in (0, 777.7, 32767) else 0)
    value[rng.integers(0, 300, 12)] = mark
    frame = pd.DataFrame({"at": pd.date_range(START, periods=300, freq="1h"), "value": value})
    path = folder / ("a.parquet" if stored else "a.csv")
    frame.to_parquet(path) if stored else frame.to_csv(path, index=False)
    return path


def test_a_model_is_fitted_without_the_marks(tmp_path: Path) -> None:
    done = init_in(tmp_path, str(with_mark(tmp_path, -999, stored=True)), structure="level")
    assert load_spec("x", tmp_path / "models").missing_values == ["", "NA", "NaN", "null", "-999"]
    assert any("far outside" in note for note in done.data["notes"])
    assert done.data["nis_per_component_of_spec"] < 3


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(8).poisson(0.3, 300).astype(float),  # rain: 0 is the usual value
        np.random.default_rng(9).uniform(0, 100, 300).round(0),  # 99 beside 98
        np.r_[np.random.default_rng(10).normal(size=299), 50.0],  # one outlier
        np.random.default_rng(11).lognormal(0, 2, 300),
        np.where(np.random.default_rng(12).uniform(size=300) < 0.5, 0.0, 2000.0) + 0.1,  # on and off
    ],
)
def test_values_that_are_measured_stay(tmp_path: Path, values: np.ndarray) -> None:
    frame = pd.DataFrame({"at": pd.date_range(START, periods=300, freq="1h"), "value": values})
    table = read_table([write(tmp_path, frame)])
    (found,) = roles(table).measurements
    assert not found.marks and np.isfinite(found.values).all()


def test_a_mark_that_another_measurement_has_rightly_is_said_and_stays(tmp_path: Path) -> None:
    rng = np.random.default_rng(13)
    kelvin = (300 + rng.normal(size=300)).round(2)
    kelvin[::30] = 0
    rain = rng.poisson(1.0, 300) * 0.5
    frame = pd.DataFrame({"at": pd.date_range(START, periods=300, freq="1h"), "kelvin": kelvin, "rain": rain})
    found = roles(read_table([write(tmp_path, frame)]))
    marked, (note,) = find_marks(found.measurements, np.zeros(300, np.int64))
    assert note.startswith("kelvin: 0 in 10 rows") and "rain has it too" in note
    assert missing_values(found._replace(measurements=marked)) == ["", "NA", "NaN", "null"]


def test_the_settings_of_numbers_are_in_the_spec_and_filter_agrees(tmp_path: Path) -> None:
    n = 120
    rng = np.random.default_rng(14)
    price = [
        f"{value:,.2f} €".translate(str.maketrans(",.", ".,")) for value in 1500 + rng.normal(size=n).cumsum()
    ]
    frame = pd.DataFrame(
        {"at": pd.date_range(START, periods=n, freq="1h"), "price": price, "load": rng.normal(size=n)}
    )
    frame["load"] = frame["load"].map(lambda one: f"{one:.2f}".replace(".", ","))
    path = tmp_path / "prices.csv"
    frame.to_csv(path, index=False, sep=";")
    done = init_in(tmp_path, str(path), structure="level")
    model = load_spec("x", tmp_path / "models")
    assert model.files.model_dump(exclude_defaults=True) == {
        "decimal": ",",
        "thousands": ".",
        "units": {"price": "€"},
    }
    given = Settings.load(str(tmp_path / "warehouse"), str(tmp_path / "models"), None, quiet=True)
    filtered = filter.run(given, "x", str(path), str(tmp_path / "out.csv"))
    assert (filtered.data["rows"], filtered.data["rejected"], done.data["rejected"]) == (n, 0, 0)
    assert any("price in €" in line for line in done.lines)
