"""How CSV files are written: found in files that others wrote, and said; what is wrong with rows is explained."""

from __future__ import annotations

import csv
import gzip
import io
import time
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import statsmodels
import yaml

from jobs import filter as offline
from jobs import init
from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.settings import Settings
from jobs.landing import json_rows
from jobs.landing.csv_parquet import read, read_dialect, read_schema, read_settings
from jobs.landing.dialects import find_dialect
from jobs.landing.file_parts import check_columns
from jobs.landing.raw_rows import MISSHAPEN
from jobs.landing.values.rejected import explain_reason, find_epoch_doubt
from jobs.specs.files import Files
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from tests.jobs.support.pipeline import random_walk_spec

PACKAGES = [Path(str(package.__file__)).parent for package in (statsmodels, matplotlib)]
LARGEST = 300_000


def spec_of(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**changes))


def foreign_files() -> list[Path]:
    """Return the CSV files that two packages carry, which nobody wrote for these tests."""
    found = sorted(path for package in PACKAGES for path in package.rglob("*.csv"))
    return [path for path in found if 0 < path.stat().st_size < LARGEST]


def test_files_of_other_packages_are_read_as_pandas_reads_them_or_refused_in_a_sentence() -> None:
    files, compared = foreign_files(), 0
    assert len(files) > 100
    for path in files:
        try:
            found = read(path)
        except UserError as error:
            assert str(path) in error.message and "\n" not in error.message
            assert "appears twice" in error.message  # a matrix without a header, or columns without names
            continue
        dialect = read_dialect(path, ())
        if dialect.first is not None or dialect.by_cr:
            continue  # names of rows, which pandas reads as an index
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                theirs = pd.read_csv(
                    path,
                    sep=r"\s+" if dialect.separator == " " else dialect.separator,
                    dtype=str,
                    keep_default_na=False,
                    index_col=False,
                )
            except pd.errors.ParserError:
                continue  # lines of comment before the header
        if MISSHAPEN in found.reasons() or len(theirs) != found.rows:
            continue
        compared += 1
        for place, name in enumerate(theirs.columns):
            if place >= len(found.columns):  # columns without a name, all empty
                assert set(theirs[name]) <= {""}
                continue
            ours = ["" if one is None else one for one in list(found.columns.values())[place].to_pylist()]
            assert ours == theirs[name].tolist(), (path, name)
    assert compared > 100


@pytest.mark.parametrize(
    ("name", "separator", "columns"),
    [
        ("datasets/anes96/anes96.csv", "\t", None),
        ("datasets/modechoice/modechoice.csv", ";", None),
        ("datasets/fertility/fertility.csv", ",", None),  # columns are named by years
        ("datasets/sunspots/sunspots.csv", ",", None),
        ("tsa/tests/results/bds_data.csv", ",", 4),
        ("nonparametric/tests/Xi_test_data.csv", ",", 2),
    ],
)
def test_separator_and_header_of_known_files_are_found(
    name: str, separator: str, columns: int | None
) -> None:
    path = PACKAGES[0] / name
    assert read_dialect(path, ()).separator == separator
    assert len(read_settings(path).columns) == (columns or 0)


def written(path: Path, separator: str, decimal: str, header: bool, packed: bool = False) -> Path:
    """Write carbon dioxide at Mauna Loa (statsmodels) as a program in another country would."""
    data = pd.read_csv(PACKAGES[0] / "datasets" / "co2" / "co2.csv").dropna().iloc[:400]
    text = io.StringIO()
    lines = csv.writer(text, delimiter=separator, lineterminator="\r\n")
    if header:
        lines.writerow(["week", "ppm"])
    for day, value in zip(data["date"], data["co2"], strict=True):
        lines.writerow([f"{str(day)[:4]}-{str(day)[4:6]}-{str(day)[6:8]}", f"{value}".replace(".", decimal)])
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


SPEC = {
    "name": "air",
    "version": 1,
    "time": "week",
    "time_unit": "week",
    "measurement": ["ppm"],
    "states": ["level"],
    "process": {"kind": "local level", "level_variance": 0.1},
    "observation": {"R": [[0.1]]},
    "initial": {"mean": [315.0], "covariance": [[10.0]]},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("decimal", [".", ","])
@pytest.mark.parametrize("header", [True, False])
def test_every_dialect_gives_the_same_estimates(
    tmp_path: Path, separator: str, decimal: str, header: bool, packed: bool
) -> None:
    plain = written(tmp_path / "plain.csv", ",", ".", True)
    other = written(tmp_path / f"other.csv{'.gz' * packed}", separator, decimal, header, packed)
    files = {"decimal": decimal} | ({} if header else {"columns": ["week", "ppm"]})
    settings = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    (tmp_path / "air.yaml").write_text(yaml.safe_dump(SPEC))
    offline.run(settings, "air", str(plain), str(tmp_path / "plain.parquet"))
    (tmp_path / "air.yaml").write_text(yaml.safe_dump({**SPEC, "files": files}))
    report = offline.run(settings, "air", str(other), str(tmp_path / "other.parquet"))
    first, second = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("plain", "other"))
    assert [list(one) for one in first["mean"]] == [list(one) for one in second["mean"]]
    assert first["week"].tolist() == second["week"].tolist()
    said = " ".join(report.lines)
    assert ("fields separated by" in said) is (separator != ",")
    assert ("no header: columns are called week, ppm" in said) is not header
    assert ("a comma before fractions" in said) is (decimal == ",")


def test_init_finds_a_dialect_and_writes_it_into_the_spec(tmp_path: Path) -> None:
    path = written(tmp_path / "german.csv", ";", ",", False)
    settings = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    report = init.run(settings, str(path), quick=True, no_picture=True)
    said = "fields separated by a semicolon; a comma before fractions; no header: columns are called c1, c2"
    assert f"files        {said}" in report.lines
    spec = load_spec("german", tmp_path)
    assert spec.files == Files(decimal=",", columns=["c1", "c2"])
    done = offline.run(settings, "german", str(path), str(tmp_path / "out.csv"))
    assert (done.data["rows"], done.data["rejected"]) == (400, 0)


def test_init_reads_months_by_name(tmp_path: Path) -> None:
    path = tmp_path / "turnover.csv"
    names = [datetime(2000 + n // 12, n % 12 + 1, 1).strftime("%b-%-d-%Y") for n in range(120)]
    path.write_text("DATE,turnover\n" + "".join(f"{name},{n % 7}.5\n" for n, name in enumerate(names)))
    settings = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    init.run(settings, str(path), quick=True, no_picture=True)
    assert load_spec("turnover", tmp_path).time_format == "%b-%d-%Y"
    done = offline.run(settings, "turnover", str(path), str(tmp_path / "out.csv"))
    assert (done.data["rows"], done.data["rejected"]) == (120, 0)


def test_what_a_comma_that_may_separate_thousands_was_taken_for_is_said(tmp_path: Path) -> None:
    path = tmp_path / "sales.csv"
    rows = "".join(f'2024-01-{day:02};"1,{day:03}";{day * day % 7}\n' for day in range(1, 29))
    path.write_text("at;sales;other\n" + rows)
    settings = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    report = init.run(settings, str(path), quick=True, no_picture=True)
    assert report.data["measurement"] == ["sales", "other"]
    assert (
        'sales: 1,001 is read as 1.001; if it is 1001, set files: {decimal: ".", thousands: ","}'
        in (report.data["notes"])
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "1871-07-01,1120,nile\n1872-07-01,1160,nile\n",
            "name its 3 columns in order in the spec, files: {columns:",
        ),
        (
            "Nile at Aswan\n\nat,volum,river\n1871-07-01,1120,nile\n",
            "the header seems to be line 3 ('at,volum,river')",
        ),
        ("at,volum,river\n1871-07-01,1120,nile\n", "did you mean 'volum'"),
    ],
)
def test_a_file_that_lacks_a_column_says_what_is_likely(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    for attempt in (read_schema, read):
        with pytest.raises(UserError, match="there is no column") as error:
            attempt(path, ["river", "at", "volume"])
        assert said in error.value.message


@pytest.mark.parametrize(
    ("changes", "reason", "payload", "said"),
    [
        ({}, "measurement a: not a number", '{"a": "3,14"}', "'3,14': a comma before the fraction; set files: {"),
        ({}, "measurement a: not a number", '{"a": "1,234,567.5"}', "marks between thousands"),
        ({}, "measurement a: not a number", '{"a": "12.5 C"}', "a number with a unit"),
        ({}, "measurement a: not a number", '{"a": "12.5*"}', 'files: {units: {a: "*"}}'),
        ({}, "measurement a: not a number", '{"a": "-3 #!"}', 'files: {units: {a: "#!"}}'),
        ({}, "measurement a: not a number", '{"a": "true"}', 'files: {words: {"true": 1, "false": 0}}'),
        ({}, "measurement a: not a number", '{"a": "-"}', 'set missing_values: ["", "NA", "NaN", "null", "-"]'),
        ({}, "measurement a: not finite", '{"a": "inf"}', "if it stands for a missing value"),
        ({"files": {"decimal": ","}}, "measurement a: not a number", '{"a": "1.5"}', "a point may separate thousands"),
        ({}, "time at: not a time", '{"at": "1700000000"}', 'a count of seconds; set time_format: "epoch_seconds"'),
        ({}, "time at: not a time", '{"at": "1700000000000"}', 'set time_format: "epoch_milliseconds"'),
        ({}, "time at: not a time", '{"at": "1700000000000000"}', 'set time_format: "epoch_microseconds"'),
        ({}, "time at: not a time", '{"at": "1700000000000000000"}', 'set time_format: "epoch_nanoseconds"'),
        (
            {"time_format": "%Y/%m/%d"},
            "time at: not a time",
            '{"at": "2024-07-08"}',
            'it is in ISO 8601; if all times are, take time_format: "%Y/%m/%d" out of the spec',
        ),
        ({}, "time at: not a time", '{"at": "31.12.2023 17:05"}', 'set time_format: "%d.%m.%Y %H:%M"'),
        ({}, "time at: not a time", '{"at": "202401311705"}', 'set time_format: "%Y%m%d%H%M"'),
        ({}, "time at: not a time", '{"at": "Dec 31, 2023"}', 'set time_format: "%b %d, %Y"'),
        ({}, "time at: not a time", '{"at": "1871"}', "such as 1871-01-01"),
        ({}, "time at: not a time", '{"at": "17:05"}', "without a date"),
        ({}, "time at: not a time", '{"at": "2023-02-30"}', "no such date"),
        ({"time_format": "%d.%m.%Y"}, "time at: not a time", '{"at": "2023-12-31"}', 'time_format: "%d.%m.%Y" out of'),
        ({"time_format": "epoch_seconds"}, "time at: not a time", '{"at": "1700000000000"}', "that of epoch_milli"),
        ({}, "row: not UTF-8 text", '{"a": "M\\\\xfcnchen", "_bytes": "x"}', "iconv -f WINDOWS-1252"),
        ({}, "row: not as many fields as the header", '{"_corrupt": "1,2,3,4"}', "'1,2,3,4': a separator"),
        ({}, "value: not a JSON object", "{oops", "such as '{oops': each line holds one object"),
    ],
)  # fmt: skip
def test_a_rejected_row_is_explained(changes: dict[str, Any], reason: str, payload: str, said: str) -> None:
    sentence = explain_reason(spec_of(**changes), reason, payload)
    assert sentence.startswith(reason) and said in sentence


def test_seconds_that_are_read_as_milliseconds_are_doubted() -> None:
    spec = spec_of(time_format="epoch_milliseconds")
    assert "size is that of epoch_seconds" in (
        find_epoch_doubt(spec, 1_700_000_000_000, 1_700_000_060_000) or ""
    )
    assert find_epoch_doubt(spec, 1_700_000_000_000_000, 1_700_000_060_000_000) is None
    assert find_epoch_doubt(spec_of(), 0, 0) is None


def test_filter_ends_with_code_2_where_every_row_is_rejected_and_notes_repeats(tmp_path: Path) -> None:
    settings = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    (tmp_path / "air.yaml").write_text(yaml.safe_dump(SPEC))
    path, out = tmp_path / "rows.csv", str(tmp_path / "out.csv")
    path.write_text("week;ppm\n2024-01-01;315,5\n2024-01-08;316,5\n")
    report = offline.run(settings, "air", str(path), out)
    assert report.error_code == INPUT_ERROR and "every row was rejected" in report.errors[0]
    assert any("set files: {decimal:" in line for line in report.lines)
    path.write_text("week;ppm\n2024-01-01;315\n2024-01-01;316\n2024-01-08;316\n")
    report = offline.run(settings, "air", str(path), out)
    assert not report.errors
    assert any(line.startswith("note: 1 row with key and time of another row") for line in report.lines)


@pytest.mark.parametrize("cut", [0.3, 0.9, -4])
@pytest.mark.parametrize("ending", [".csv.gz", ".jsonl.gz"])
def test_a_cut_or_damaged_gzip_file_is_refused_in_a_sentence(tmp_path: Path, cut: float, ending: str) -> None:
    rng = np.random.default_rng(1)
    text = "".join(f'{{"a": {value}}}\n' for value in rng.normal(size=3000))
    whole = gzip.compress(("a\n" + text).encode())
    path = tmp_path / f"rows{ending}"
    at = int(len(whole) * cut) if cut > 0 else len(whole) + int(cut)
    for content in (whole[:at], whole[: at - 20] + b"\0" * 12 + whole[at - 8 :], b"no gzip at all"):
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            json_rows.read_json_documents(path) if "json" in ending else read(path)
        assert "is cut off or damaged: it is no whole gzip file" in error.value.message
        assert "\n" not in error.value.message


def test_damaged_parquet_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pd.DataFrame({"a": np.arange(1000.0)}).to_parquet(path)
    whole = path.read_bytes()
    for content in (
        whole[:-9],
        whole[:100],
        b"PAR1" + b"\0" * 50 + b"PAR1",
        whole[:4] + b"\xff" * 64 + whole[68:],
    ):
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            read(path)
        assert "\n" not in error.value.message and "Parquet" in error.value.message


def test_time_is_bounded_by_size_not_by_its_square(tmp_path: Path) -> None:
    began = time.monotonic()
    wide, names = tmp_path / "wide.csv", [f"c{place}" for place in range(20_000)]
    wide.write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    assert read(wide).rows == 1
    check_columns(wide, names, names)
    blank = tmp_path / "blank.json.gz"
    for content in (b" " * 10_000_000, b"\n" * 20_000_000):
        blank.write_bytes(gzip.compress(content))
        assert json_rows.read_json_documents(blank) == []
    assert time.monotonic() - began < 40  # 200 s and more before


def test_a_name_that_no_path_has_is_refused(tmp_path: Path) -> None:
    settings = Settings.load(warehouse=str(tmp_path / "warehouse"), models=tmp_path, quiet=True)
    (tmp_path / "air.yaml").write_text(yaml.safe_dump(SPEC))
    for name in ("rows\0.csv", "x" * 5000 + ".csv"):
        with pytest.raises(UserError, match="NUL|File name too long") as error:
            offline.run(settings, "air", name, str(tmp_path / "out.csv"))
        assert len(error.value.message) < 300


def test_the_separator_is_the_one_with_which_the_header_has_the_columns() -> None:
    both = b"at,day;volume\n2024,1;2\n"
    assert find_dialect(both, ["volume"]).separator == ";"
    assert find_dialect(both, ["at"]).separator == ","
    assert find_dialect(b"a\tb\n1\t2\n", ["a", "b"], Files(separator=",")).separator == ","
