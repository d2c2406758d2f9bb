"""`filter` and `forecast` over folders and globs, and the key from the file's name."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from jobs import filter, forecast
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.landing.raw_rows import parse_name

SPEC = """
name: walk
version: 1
key: [series]
key_from_name: series
time: at
measurement: [value]
states: [level]
process: {kind: random_walk, variance: 1.0}
observation: {R: [[1.0]]}
initial: {mean: [0.0], covariance: [[100.0]]}
"""


def files(folder: Path) -> Path:
    folder.mkdir()
    for name, values in (("b", "1,2"), ("a.1", "3,4,5")):
        rows = "".join(f"2024-01-0{day + 1},{value}\n" for day, value in enumerate(values.split(",")))
        (folder / f"{name}.csv").write_text("at,value\n" + rows)
    (folder / ".hidden.csv").write_text("nothing")
    (folder / "notes.txt").write_text("nothing")
    return folder


def model(folder: Path, text: str = SPEC) -> Settings:
    (folder / "walk.yaml").write_text(text)
    return Settings.load(str(folder / "warehouse"), str(folder), None)


@pytest.mark.parametrize("pattern", ["in", "in/*.csv"])
def test_a_key_is_the_name_of_its_file(tmp_path: Path, pattern: str) -> None:
    files(tmp_path / "in")
    settings = model(tmp_path)
    filter.run(settings, "walk", str(tmp_path / pattern), str(tmp_path / "out.csv"))
    whole = pd.read_csv(tmp_path / "out.csv")
    assert whole["series"].tolist() == ["a.1"] * 3 + ["b"] * 2
    # the same numbers as with the key in the rows
    rows = pd.concat(
        pd.read_csv(tmp_path / "in" / f"{name}.csv").assign(series=name) for name in ("a.1", "b")
    )
    rows.to_csv(tmp_path / "rows.csv", index=False)
    model(tmp_path, SPEC.replace("key_from_name: series\n", ""))
    filter.run(settings, "walk", str(tmp_path / "rows.csv"), str(tmp_path / "other.csv"))
    pd.testing.assert_frame_equal(whole, pd.read_csv(tmp_path / "other.csv"), check_exact=True)
    forecast.run(settings, "walk", str(tmp_path / "rows.csv"), str(tmp_path / "f.csv"), steps=1)
    model(tmp_path)
    forecast.run(settings, "walk", str(tmp_path / pattern), str(tmp_path / "g.csv"), steps=1)
    assert (tmp_path / "f.csv").read_text() == (tmp_path / "g.csv").read_text()


def test_a_file_with_the_key_column_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("at,value,series\n2024-01-01,1,x\n")
    with pytest.raises(UserError, match="a.csv: has a column 'series' itself.*key_from_name: series"):
        filter.run(model(tmp_path), "walk", str(tmp_path / "a.csv"), str(tmp_path / "out.csv"))


def test_columns_of_two_types_and_empty_folders_are_refused(tmp_path: Path) -> None:
    settings = model(tmp_path)
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match="no such file, or no .csv"):
        filter.run(settings, "walk", str(tmp_path / "in"), str(tmp_path / "out.csv"))
    for name, value in (("a", 1), ("b", 1.5)):
        table = pd.DataFrame({"at": pd.to_datetime(["2024-01-01"]), "value": [value]})
        table.to_parquet(tmp_path / "in" / f"{name}.parquet")
    with pytest.raises(
        UserError, match="b.parquet: column 'value' holds double, and int64 in the files before"
    ):
        filter.run(settings, "walk", str(tmp_path / "in"), str(tmp_path / "out.csv"))


def test_a_name_is_what_stands_before_the_endings() -> None:
    for path, name in (
        ("/x/a.csv", "a"),
        ("a.b.csv.gz", "a.b"),
        ("x/A.JSONL", "A"),
        ("c.json.gz", "c"),
        ("d", "d"),
    ):
        assert parse_name(path) == name
    for path in (".csv", "/x/.csv.gz"):
        with pytest.raises(UserError, match="has no name before its ending"):
            parse_name(path)


def test_only_a_key_column_comes_from_the_name(tmp_path: Path) -> None:
    settings = model(tmp_path, SPEC.replace("key_from_name: series", "key_from_name: host"))
    with pytest.raises(UserError, match="key_from_name: 'host' is not a key column; choose from series"):
        filter.run(settings, "walk", str(tmp_path / "a.csv"), str(tmp_path / "out.csv"))
