"""The offline command: its output and the order of rows, rejected rows, and errors for unusable files."""

from __future__ import annotations

import calendar
import csv
import math
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.times import TimeParser
from jobs.filter import run
from jobs.state.encoding.row_order import order_rows

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "models"

TWO_STATES = """
name: two
version: 1
key: [site, sensor]
time: at
time_unit: hour
time_zone: {zone}
time_format: {form}
measurement: [a, b]
control: [push]
states: [x, y]
process: {{kind: explicit, F: [[1.0, 0.1], [0.0, 0.9]], Q: [[0.5, 0.1], [0.1, 0.4]], B: [[0.5], [1.0]]}}
observation: {{H: [[1.0, 0.0], [0.5, 2.0]], R: [[0.5, 0.0], [0.0, 0.3]]}}
initial: {{mean: [1.0, -1.0], covariance: [[4.0, 1.0], [1.0, 9.0]]}}
"""


def filtered(model: str | Path, source: Path, output: Path) -> Report:
    return run(Settings.load(models=MODELS), str(model), str(source), str(output))


@pytest.fixture
def nile(tmp_path: Path) -> Path:
    from statsmodels.datasets import nile as data

    path = tmp_path / "nile.csv"
    values: Any = data.load_pandas().data
    path.write_text(
        "river,at,volume\n"
        + "".join(
            f"nile,{int(year)}-01-01,{volume}\n"
            for year, volume in zip(values.year, values.volume, strict=True)
        )
    )
    return path


def two_states(folder: Path, zone: str = "UTC", form: str = "null") -> Path:
    path = folder / "two.yaml"
    path.write_text(TWO_STATES.format(zone=zone, form=form))
    return path


def textbook(rows: pd.DataFrame) -> dict[int, tuple[np.ndarray, np.ndarray, float, float]]:
    """Filter every key by the textbook's equations, row by row; return results by the row's label."""
    F, B = np.array([[1.0, 0.1], [0.0, 0.9]]), np.array([0.5, 1.0])
    Q, R = np.array([[0.5, 0.1], [0.1, 0.4]]), np.diag([0.5, 0.3])
    H = np.array([[1.0, 0.0], [0.5, 2.0]])
    result = {}
    for _, own in rows.groupby(["site", "sensor"]):
        m, P = np.array([1.0, -1.0]), np.array([[4.0, 1.0], [1.0, 9.0]])
        for count, (label, row) in enumerate(own.sort_values("at", kind="stable").iterrows()):
            if count:
                m, P = F @ m + B * row.push, F @ P @ F.T + Q
            z = np.array([row.a, row.b], dtype=float)
            seen = ~np.isnan(z)
            h, S = H[seen], H[seen] @ P @ H[seen].T + R[np.ix_(seen, seen)]
            e = z[seen] - h @ m
            nis = float(e @ np.linalg.solve(S, e))
            ll = -0.5 * (nis + np.linalg.slogdet(2 * np.pi * S)[1]) if seen.any() else 0.0
            K = P @ h.T @ np.linalg.inv(S)
            m, P = m + K @ e, P - K @ S @ K.T
            result[label] = (m, P, ll, nis if seen.any() else math.nan)
    return result


def random_rows(count: int = 300) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    rows = pd.DataFrame(
        {
            "extra": rng.integers(0, 9, count),
            "sensor": rng.integers(1, 4, count),
            "site": rng.choice(["north", "south,east"], count),
            "at": datetime(2024, 1, 1, tzinfo=UTC) + pd.to_timedelta(rng.permutation(count), unit="min"),
            "a": rng.normal(size=count),
            "b": rng.normal(size=count),
            "push": rng.normal(size=count),
        }
    )
    rows.loc[rng.random(count) < 0.2, "a"] = math.nan
    rows.loc[rng.random(count) < 0.2, "b"] = math.nan
    return rows


def check_against_textbook(rows: pd.DataFrame, out: pd.DataFrame) -> None:
    expected = textbook(rows)
    for label in rows.index:
        mean, covariance, ll, nis = expected[label]
        own = out.loc[label]
        np.testing.assert_allclose([own.mean_x, own.mean_y], mean, rtol=1e-10, atol=1e-12)
        got = [own.covariance_x_x, own.covariance_x_y, own.covariance_y_x, own.covariance_y_y]
        np.testing.assert_allclose(got, covariance.ravel(), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose([own.log_likelihood, own.nis], [ll, nis], rtol=1e-9, atol=1e-11)


# Output


def test_nile_gives_the_published_numbers(nile: Path, tmp_path: Path) -> None:
    report = filtered("nile", nile, tmp_path / "out.csv")
    out = pd.read_csv(tmp_path / "out.csv")
    assert list(out) == [
        "river",
        "at",
        "mean_level",
        "covariance_level_level",
        "log_likelihood",
        "nis",
        "flag",
    ]
    assert out.log_likelihood.sum() == pytest.approx(-641.585578, abs=1e-6)
    assert report.data["log_likelihood"] == pytest.approx(-641.585578, abs=1e-6)
    assert out.mean_level.iloc[-1] == pytest.approx(798.370293, abs=1e-5)
    assert out.covariance_level_level.iloc[-1] == pytest.approx(4032.157942, abs=1e-5)
    assert out["at"].tolist()[:2] == ["1871-01-01", "1872-01-01"] and out.flag.isna().all()
    wanted = {"rows": 100, "keys": 1, "rejected": 0, "flagged": 0, "model": "nile", "version": 1}
    assert {name: report.data[name] for name in wanted} == wanted
    assert report.lines[0].startswith("nile v1: 100 rows of 1 key in ")


def test_several_keys_states_and_missing_parts_against_the_textbook(tmp_path: Path) -> None:
    rows = random_rows()
    rows.to_csv(tmp_path / "in.csv", index=False)
    filtered(two_states(tmp_path), tmp_path / "in.csv", tmp_path / "out.csv")
    out = pd.read_csv(tmp_path / "out.csv")
    assert out["site"].tolist() == rows["site"].tolist() and out["sensor"].tolist() == rows["sensor"].tolist()
    assert pd.to_datetime(out["at"]).tolist() == rows["at"].tolist()
    check_against_textbook(rows, out)


def test_csv_and_parquet_agree_bit_for_bit(tmp_path: Path) -> None:
    rows = random_rows()
    rows.to_csv(tmp_path / "in.csv", index=False)
    rows.to_parquet(tmp_path / "in.parquet", index=False)
    model = two_states(tmp_path)
    for kind in ("csv", "parquet"):
        filtered(model, tmp_path / f"in.{kind}", tmp_path / f"{kind}.csv")
        filtered(model, tmp_path / f"in.{kind}", tmp_path / f"{kind}.parquet")
    names = ["mean_x", "covariance_x_y", "log_likelihood", "nis"]
    exact: Any = {"float_precision": "round_trip"}
    csv_rows = pd.read_csv(tmp_path / "csv.csv", **exact)
    parquet_rows = pd.read_csv(tmp_path / "parquet.csv", **exact)
    pd.testing.assert_frame_equal(csv_rows[names], parquet_rows[names], check_exact=True)
    one, two = (pq.read_table(tmp_path / f"{kind}.parquet") for kind in ("csv", "parquet"))
    assert one.schema.field("at").type == pa.timestamp("us", "UTC")
    assert one["at"].to_pylist() == two["at"].to_pylist()
    for name in ("mean", "covariance"):
        assert one.schema.field(name).type == pa.list_(pa.float64())
        assert one[name].to_pylist() == two[name].to_pylist()
    means = np.array(one["mean"].to_pylist())
    assert (means[:, 0] == csv_rows.mean_x).all() and (means[:, 1] == csv_rows.mean_y).all()
    covariances = np.array(one["covariance"].to_pylist())
    assert (covariances[:, 1] == csv_rows.covariance_x_y).all() and covariances.shape[1] == 4


def test_the_order_of_the_rows_changes_nothing(tmp_path: Path) -> None:
    rows = random_rows()
    rows.loc[rows.index[::3], "at"] = rows["at"].iloc[0]  # many rows of a key at one time
    model = two_states(tmp_path)
    outs = []
    for seed in range(3):
        mixed = rows.sample(frac=1.0, random_state=seed) if seed else rows
        mixed.to_parquet(tmp_path / "in.parquet", index=False)
        filtered(model, tmp_path / "in.parquet", tmp_path / "out.parquet")
        out = pd.read_parquet(tmp_path / "out.parquet")
        outs.append(out.set_index(mixed.index).sort_index())
    for out in outs[1:]:
        pd.testing.assert_frame_equal(out, outs[0], check_exact=True)


def test_rows_at_one_time_are_ordered_by_their_values() -> None:
    key = np.array([1, 0, 0, 0, 0, 0])
    time = np.array([0, 5, 5, 5, 5, 1])
    y = np.array([[0.0, math.nan, 2.0, 1.0, 2.0, 9.0]])
    u = np.array([[0.0, 0.0, 7.0, 0.0, 3.0, 0.0]])
    assert order_rows(key, time, y, u).tolist() == [5, 3, 4, 2, 1, 0]
    assert order_rows(key, time, y).tolist() == [5, 3, 2, 4, 1, 0]  # equal rows: by position
    none = np.empty(0, dtype=np.int64)
    assert order_rows(none, none, np.empty((1, 0))).tolist() == []


# Rejected rows


def test_rejected_rows_are_marked_and_the_others_filtered(tmp_path: Path) -> None:
    lines = [
        "river,at,volume",
        "r,2001-01-01,1.0",
        "r,not a time,1.0",
        ",2001-01-01,1.0",
        "r,2001-01-02,",
        "r,2001-01-03,abc",
        "r,2001-01-04,inf",
        "r,2001-01-05,1e999",
        "r,,1.0",
        "r,2001-01-06",
        "r,2001-01-06,1,2",
        "r,2001-02-30,1.0",
        "r,2001-01-07, NA ",
        "r,2001-01-08,1_000",
        "r,2001-01-09, 2.5 ",
        "",
    ]
    (tmp_path / "in.csv").write_text("\n".join(lines))
    report = filtered("nile", tmp_path / "in.csv", tmp_path / "out.csv")
    out = pd.read_csv(tmp_path / "out.csv")
    assert out.flag.fillna("").tolist() == [
        "",
        "rejected: time at: not a time",
        "rejected: key river: missing",
        "",
        "rejected: measurement volume: not a number",
        "rejected: measurement volume: not finite",
        "rejected: measurement volume: not finite",
        "rejected: time at: missing",
        "rejected: row: not as many fields as the header",
        "rejected: row: not as many fields as the header",
        "rejected: time at: not a time",
        "",
        "rejected: measurement volume: not a number",
        "",
    ]
    bad = out.flag.notna()
    assert (
        out.loc[bad, ["mean_level", "covariance_level_level", "log_likelihood", "nis"]].isna().all(axis=None)
    )
    assert out.loc[~bad, "mean_level"].notna().all()
    missing = out.iloc[3]
    assert missing.log_likelihood == 0.0 and math.isnan(missing.nis)
    assert out["at"].iloc[1] == "not a time"  # unchanged
    assert report.data["rejected"] == 10 and report.data["rejected_by_reason"]["time at: not a time"] == 2
    assert "  rejected: time at: not a time: 2" in report.lines
    # the accepted rows give the same estimates as without the rejected ones
    good = [line for line, is_bad in zip(lines[1:15], bad, strict=True) if not is_bad]
    (tmp_path / "good.csv").write_text("\n".join([lines[0], *good]))
    filtered("nile", tmp_path / "good.csv", tmp_path / "alone.csv")
    alone = pd.read_csv(tmp_path / "alone.csv")
    assert alone.mean_level.tolist() == out.loc[~bad, "mean_level"].tolist()


def test_a_row_that_is_not_utf_8_is_rejected_alone(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"river,at,volume\n\xff,2001-01-01,1\nr,2001-01-01,1\n")
    filtered("nile", tmp_path / "in.csv", tmp_path / "out.csv")
    out = pd.read_csv(tmp_path / "out.csv")
    assert out.flag.fillna("").tolist() == ["rejected: row: not UTF-8 text", ""]
    assert out.river.tolist() == ["\\xff", "r"]


def test_rejected_rows_are_null_in_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {
            "river": ["r", None, "r", ""],
            "at": ["2001-01-01"] * 4,
            "volume": pa.array([1.0, 1.0, math.inf, 1.0]),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    filtered("nile", tmp_path / "in.parquet", tmp_path / "out.parquet")
    out = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["flag"] for row in out] == [
        None,
        "rejected: key river: missing",
        "rejected: measurement volume: not finite",
        "rejected: key river: missing",
    ]
    assert [row["mean"] is None for row in out] == [False, True, True, True]
    assert out[1]["covariance"] is None and out[1]["log_likelihood"] is None and out[1]["nis"] is None


def test_a_missing_control_rejects_the_row(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("site,sensor,at,a,b,push\ns,1,2001-01-01,1,1,\ns,1,2001-01-02,,,0\n")
    filtered(two_states(tmp_path), tmp_path / "in.csv", tmp_path / "out.csv")
    out = pd.read_csv(tmp_path / "out.csv")
    assert out.flag.fillna("").tolist() == ["rejected: control push: missing", ""]
    assert out.mean_x.iloc[1] == 1.0  # the key's first row has the initial distribution


def test_csv_may_hold_a_byte_order_mark_quotes_and_other_columns(tmp_path: Path) -> None:
    text = '\ufeff"note","volume","river","at"\n"a, ""b""\nc",1.5,"r, s","2001-01-01"\n'
    (tmp_path / "in.csv").write_text(text, encoding="utf-8")
    filtered("nile", tmp_path / "in.csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as written:
        rows = list(csv.DictReader(written))
    assert len(rows) == 1 and rows[0]["river"] == "r, s" and rows[0]["flag"] == ""


# Times


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2024-03-01", datetime(2024, 3, 1)),
        ("2024-03-01T10:20", datetime(2024, 3, 1, 10, 20)),
        (" 2024-03-01 10:20:30 ", datetime(2024, 3, 1, 10, 20, 30)),
        ("2024-03-01T10:20:30.5", datetime(2024, 3, 1, 10, 20, 30, 500_000)),
        ("2024-03-01T10:20:30.123456789Z", datetime(2024, 3, 1, 10, 20, 30, 123_456)),
        ("2024-03-01T10:20:30+01:00", datetime(2024, 3, 1, 9, 20, 30)),
        ("2024-03-01T10:20:30-0530", datetime(2024, 3, 1, 15, 50, 30)),
        ("2024-03-01 10:20 +01", datetime(2024, 3, 1, 9, 20)),
        ("1871-01-01", datetime(1871, 1, 1)),
    ],
)
def test_iso_times(text: str, moment: datetime) -> None:
    expected = (moment - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    assert TimeParser(None, UTC)(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "today", "2024-3-1", "2024-13-01", "2024-02-30", "2024-03-01T24:01", "2024-03-01T10:20:60",
     "20240301", "2024-03-01T1", "2024-03-01T10:20:30+19:00", "2024-03-01 10:20 CET", "٢٠٢٤-03-01"],
)  # fmt: skip
def test_invalid_iso_times(text: str) -> None:
    assert TimeParser(None, UTC)(text) is None


def test_times_without_an_offset_are_in_the_zone() -> None:
    parser = TimeParser(None, ZoneInfo("America/New_York"))

    def utc(text: str) -> str:
        micros = parser(text)
        assert micros is not None
        return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%m-%d %H:%M")

    assert utc("2013-01-01 05:15") == "01-01 10:15"
    assert utc("2013-07-01 05:15") == "07-01 09:15"
    assert utc("2013-03-10 02:30") == "03-10 07:30"  # skipped by daylight saving: shifted forward
    assert utc("2013-11-03 01:30") == "11-03 05:30"  # repeated by daylight saving: the earlier one
    assert utc("2013-11-03 01:30Z") == "11-03 01:30"


@pytest.mark.parametrize(
    ("form", "text", "seconds"),
    [
        ("%d.%m.%Y %H:%M", "1.2.1970 03:04", 31 * 86400 + 3 * 3600 + 4 * 60),
        ("%Y%m%dT%H%M%S", "19700102T000001", 86401),
        ("%m/%d/%Y", "1/2/1970", 86400),
        ("%Y-%m-%d %H:%M:%S.%f %z", "1970-01-01 01:00:00.25 +0100", 0.25),
        ("100%% %Y-%m-%d", "100% 1970-01-02", 86400),
        ("epoch_seconds", "1.5", 1.5),
        ("epoch_milliseconds", "-1500", -1.5),
        ("epoch_microseconds", "2500000", 2.5),
        ("epoch_nanoseconds", "2500000999", 2.5),
        ("epoch_nanoseconds", "-1999", -1e-6),
        ("spreadsheet_days", "25569.5", 43200),
        ("spreadsheet_days", "25570.0833333333", 86400 + 7200),
    ],
)
def test_time_formats(form: str, text: str, seconds: float) -> None:
    assert TimeParser(form, UTC)(text) == round(seconds * 1e6)
    assert TimeParser(form, UTC)(text + "x") is None


def test_months_by_their_english_names() -> None:
    parser = TimeParser("%b %d, %Y", UTC)
    for month in range(1, 13):
        day = datetime(2024, month, 2, tzinfo=UTC)
        for name in (
            calendar.month_abbr[month],
            calendar.month_name[month],
            calendar.month_abbr[month].upper(),
        ):
            assert parser(f"{name} 2, 2024") == round(day.timestamp() * 1e6)
    assert parser("Sept 2, 2024") == parser("Sep 2, 2024")
    assert parser("Mai 2, 2024") is parser("Januar 2, 2024") is parser("Feb 30, 2024") is None
    with pytest.raises(ValueError, match="the month is given twice"):
        TimeParser("%b %d %m %Y", UTC)
    with pytest.raises(ValueError, match="%Q is not known; there are %Y %m %b %d %H %M %S %f %z"):
        TimeParser("%Q %Y", UTC)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([datetime(2013, 1, 1, 5), datetime(2013, 7, 1, 5)], pa.timestamp("us")),
        pa.array([datetime(2013, 1, 1, 5), datetime(2013, 7, 1, 5)], pa.timestamp("ns")),
        pa.array([datetime(2013, 1, 1, 10), datetime(2013, 7, 1, 9)], pa.timestamp("ms", "UTC")),
        pa.array(["2013-01-01 05:00", "2013-07-01 05:00"]),
        pa.array(["2013-01-01 05:00", "2013-07-01 05:00"]).dictionary_encode(),
    ],
    ids=["naive", "nanoseconds", "zoned", "text", "categories"],
)
def test_typed_times_follow_the_same_rule(tmp_path: Path, values: Any) -> None:
    model = tmp_path / "level.yaml"
    model.write_text(
        "{name: level, version: 1, key: [k], time: at, time_unit: day, time_zone: America/New_York,"
        " measurement: [v], states: [x], process: {kind: random_walk, variance: 1.0},"
        " observation: {R: [[1.0]]}, initial: {mean: [0.0], covariance: [[0.0]]}}"
    )
    pq.write_table(pa.table({"k": [1, 1], "at": values, "v": [None, None]}), tmp_path / "in.parquet")
    filtered(model, tmp_path / "in.parquet", tmp_path / "out.csv")
    days = pd.read_csv(tmp_path / "out.csv").covariance_x_x.iloc[1]  # variance 1 a day
    assert days == pytest.approx(181 - 1 / 24, abs=1e-12)


def test_dates_and_epochs_in_parquet(tmp_path: Path) -> None:
    table = pa.table(
        {"site": ["s"], "sensor": [1], "a": [1], "b": pa.array([None], pa.null()), "push": [0.0]}
    )
    for form, values in (
        ("null", pa.array([date(2013, 1, 1)])),
        ("epoch_seconds", pa.array([1356998400])),
        ("epoch_milliseconds", pa.array([1356998400000.0])),
    ):
        pq.write_table(table.append_column("at", values), tmp_path / "in.parquet")
        filtered(two_states(tmp_path, form=form), tmp_path / "in.parquet", tmp_path / "out.csv")
        assert pd.read_csv(tmp_path / "out.csv").flag.isna().all()
    pq.write_table(table.append_column("at", pa.array([1356998400])), tmp_path / "in.parquet")
    with pytest.raises(UserError, match="time column 'at' holds numbers .*set time_format"):
        filtered(two_states(tmp_path), tmp_path / "in.parquet", tmp_path / "out.csv")


# Unusable files


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.dat", "x", "ending must be .csv"),
        ("in.txt", "x", "add line_pattern"),
        ("in.csv", "", "is empty"),
        ("in.csv", "river,at,volume\n", "has no rows"),
        (
            "in.csv",
            "river,at,Volume\nr,2001-01-01,1\n",
            "there is no column 'volume'; did you mean 'Volume'?",
        ),
        ("in.csv", "river,at,at,volume\n", "column 'at' appears twice"),
        ("in.csv", b"river,at,volume,\xff\nr,2001-01-01,1,\n", "is not UTF-8 text"),
        ("in.parquet", "river,at,volume\n", "is not a Parquet file"),
        ("in.parquet", "", "is not a Parquet file"),
    ],
)
def test_an_unusable_input_is_refused(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    source = tmp_path / name
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        filtered("nile", source, tmp_path / "out.csv")
    assert said in caught.value.message and caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]  # no output is left


def test_unusable_paths_are_refused(nile: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for source, output, said in (
        (tmp_path / "none.csv", tmp_path / "out.csv", "there is no such file"),
        (tmp_path / "folder.csv", tmp_path / "out.csv", "is a folder"),
        (nile, tmp_path / "out.json", "ending must be .csv"),
        (nile, tmp_path / "no" / "out.csv", "there is no folder"),
        (nile, tmp_path / "folder.csv", "is a folder"),
        (nile, nile, "is the input itself"),
    ):
        with pytest.raises(UserError, match=said):
            filtered("nile", source, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.csv", "nile.csv"]


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("volume", [True], "measurement column 'volume' holds bool; it must hold numbers"),
        ("volume", [[1.0]], "measurement column 'volume' holds list"),
        ("river", [[1.0]], "key column 'river' holds list"),
        ("at", [True], "time column 'at' holds bool"),
    ],
)
def test_columns_of_the_wrong_type(tmp_path: Path, column: str, values: list[Any], said: str) -> None:
    columns = {"river": ["r"], "at": ["2001-01-01"], "volume": [1.0], column: values}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    with pytest.raises(UserError, match=said):
        filtered("nile", tmp_path / "in.parquet", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_an_old_output_survives_a_failure(nile: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    target.write_text("kept")
    nile.write_text("river,at\n")
    with pytest.raises(UserError):
        filtered("nile", nile, target)
    assert target.read_text() == "kept"
