"""The command `forecast`: its keys and times, its output, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from jobs import cli
from jobs import filter as offline
from jobs import forecast as command
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from tests.jobs.offline.test_filter import MODELS, nile, two_states

__all__ = ["nile"]

WALK = """
name: walk
version: 1
key: [site, id]
time: at
time_unit: hour
measurement: [a]
states: [x]
process: {kind: random_walk, variance: 2.0}
observation: {R: [[1.0]]}
initial: {diffuse: true}
"""
TREND = "local_linear_trend, level_variance: 0.1, slope_variance: 0.01"
ROWS = """site,id,at,a
s,1,2024-01-01T00:00,1.0
n,2,2024-01-01T06:00,5.0
s,1,2024-01-01T02:00,2.0
s,1,2024-01-01T03:00,3.0
s,9,2024-01-01T01:00,oops
n,2,2024-01-01T07:00,
"""


def forecast(model: str | Path, source: Path, output: Path, **options: Any) -> Report:
    wanted = {"all_columns": True, **options}
    return command.run(Settings.load(models=MODELS), str(model), str(source), str(output), **wanted)


@pytest.fixture
def walk(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "walk.yaml").write_text(WALK)
    (tmp_path / "in.csv").write_text(ROWS)
    return tmp_path / "walk.yaml", tmp_path / "in.csv"


def test_nile_ten_years_ahead(nile: Path, tmp_path: Path) -> None:
    """Durbin and Koopman (2012), section 2.8."""
    report = forecast("nile", nile, tmp_path / "out.csv", steps=10, every="365d")
    out = pd.read_csv(tmp_path / "out.csv")
    assert out["step"].tolist() == list(range(1, 11)) and report.data["forecasts"] == 10
    assert out["at"].tolist()[:2] == ["1971-01-01 00:00:00.000000Z", "1972-01-01 00:00:00.000000Z"]
    np.testing.assert_allclose(out["mean_level"], 798.370293, atol=1e-5)
    variance = out["measurement_covariance_volume_volume"]
    np.testing.assert_allclose(variance.iloc[[0, 9]], [20600.257942, 33822.157942], atol=1e-5)
    half = 1.959963984540054 * np.sqrt(variance)
    np.testing.assert_allclose(out["measurement_upper_volume"] - out["measurement_mean_volume"], half)
    np.testing.assert_allclose(out["measurement_mean_volume"] - out["measurement_lower_volume"], half)
    assert out["flag"].isna().sum() == 10


def test_steps_start_from_each_keys_newest_row(walk: tuple[Path, Path], tmp_path: Path) -> None:
    model, source = walk
    report = forecast(model, source, tmp_path / "out.parquet", steps=2)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert table.schema.field("mean").type == pa.list_(pa.float64())
    assert table["site"].to_pylist() == ["s", "s", "n", "n"]  # the key without an accepted row is left out
    assert [str(at)[11:16] for at in table["at"].to_pylist()] == ["04:00", "05:00", "08:00", "09:00"]
    assert table["mean"].to_pylist()[2:] == [[5.0], [5.0]]
    assert table["covariance"].to_pylist()[2:] == [[1.0 + 2 * 2], [1.0 + 3 * 2]]
    assert table["measurement_covariance"].to_pylist()[2:] == [[6.0], [8.0]]
    assert report.data["step_microseconds"] == 3_600_000_000
    assert report.lines[1] == "bounds hold 95 %; a step is 1 h, as usual between two rows of a key"
    text = forecast(model, source, tmp_path / "out.csv", steps=2, every="30min", probability=0.5)
    assert text.lines[1] == "bounds hold 50 %; a step is 30 min"
    flat = pd.read_csv(tmp_path / "out.csv")
    assert flat["covariance_x_x"].tolist()[2:] == [1.0 + 1.5 * 2, 1.0 + 2 * 2]


def test_infinite_bounds_are_told(walk: tuple[Path, Path], tmp_path: Path) -> None:
    model, source = walk
    report = forecast(model, source, tmp_path / "out.csv", steps=2)
    assert report.data["unbounded"] == 0 and report.lines[-1].startswith("bounds hold 95 %")
    trend = WALK.replace("[x]", "[x, slope]").replace("random_walk, variance: 2.0", TREND)
    model.write_text(trend)
    source.write_text(
        "site,id,at,a\ns,1,2024-01-01T00:00,1.0\nn,2,2024-01-01T00:00,1.0\nn,2,2024-01-01T01:00,2.0\n"
    )
    report = forecast(model, source, tmp_path / "out.csv", steps=2, every="1h")
    upper = pd.read_csv(tmp_path / "out.csv")["measurement_upper_a"]
    assert np.isinf(upper).sum() == report.data["unbounded"] == 2  # one row does not tell a slope
    assert report.lines[-1].startswith(
        "warning: the bounds of 2 forecasts are infinite: the state of the key is diffuse"
    )


def test_until_a_time(walk: tuple[Path, Path], tmp_path: Path) -> None:
    model, source = walk
    forecast(model, source, tmp_path / "out.csv", until="2024-01-01T09:00")
    out = pd.read_csv(tmp_path / "out.csv")
    assert out["at"].tolist() == ["2024-01-01 09:00:00.000000Z"] * 2
    assert out["covariance_x_x"].iloc[1] == 1.0 + 3 * 2
    report = forecast(model, source, tmp_path / "out.csv", until="2024-01-01T06:30", every="1h")
    out = pd.read_csv(tmp_path / "out.csv")
    assert out["site"].tolist() == ["s"] * 3 and out["step"].tolist() == [1, 2, 3]
    assert report.data["keys_past"] == 1
    assert report.lines[-1] == "omitted 1 key with rows after --until"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give either --steps or --until"),
        ({"steps": 1, "until": "2024-01-01"}, "give either --steps or --until"),
        ({"until": "soon"}, "--until: 'soon' is not a time; write one such as"),
        ({"steps": 1, "every": "1 fortnight"}, "--every: '1 fortnight' is not a duration; write a number"),
        ({"steps": 1, "probability": 95.0}, "--probability: 95 is not between 0 and 1"),
        ({"until": "2200-01-01", "every": "1ms"}, "are the most; take fewer or longer steps"),
        ({"steps": 9000, "every": "400d"}, "is after the year 9999"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(
    walk: tuple[Path, Path], tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        forecast(*walk, tmp_path / "out.csv", **options)
    assert not (tmp_path / "out.csv").exists()


def test_models_that_need_a_step_or_control_are_refused(nile: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes one step a row whatever the time; add --every"):
        forecast("nile", nile, tmp_path / "out.csv", until="1990-01-01")
    forecast("nile", nile, tmp_path / "out.csv", until="1990-01-01", every="365d")
    rows = "site,sensor,at,a,b,push\nn,1,2024-01-01,1,2,3\n"
    (tmp_path / "in.csv").write_text(rows)
    with pytest.raises(
        UserError, match=r"two has control inputs: give their future values with --future FILE, .*"
    ):
        forecast(two_states(tmp_path), tmp_path / "in.csv", tmp_path / "out.csv", steps=1)
    with pytest.raises(UserError, match="--future: nile takes no inputs: leave the option out"):
        forecast("nile", nile, tmp_path / "out.csv", steps=1, future=str(tmp_path / "in.csv"))


PUSHED = """
name: pushed
version: 1
key: [site, id]
time: at
time_unit: hour
measurement: [a, b]
control: [push]
inputs: {columns: {noise: db}}
states: [x, y]
process: {kind: explicit, F: [[1.0, 0.1], [0.0, 0.9]], Q: [[0.5, 0.1], [0.1, 0.4]], B: [[0.5, 0.0], [1.0, 0.0]]}
observation: {H: [[1.0, 0.0], [0.5, 2.0]], R: [[0.5, 0.0], [0.0, 0.3]], noise_scale: noise}
initial: {mean: [1.0, -1.0], covariance: [[4.0, 1.0], [1.0, 9.0]]}
"""


class Pushed:
    """A model with control and inputs, the rows of three keys until now, and rows of two of them to come."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "pushed.yaml"
        self.model.write_text(PUSHED)
        rng = np.random.default_rng(5)
        at = pd.Timestamp("2024-01-01T00:00:00Z") + pd.to_timedelta(np.arange(9), "h")
        every = pd.MultiIndex.from_product([[("s", 1), ("n", 2), ("w", 3)], at], names=["key", "at"])
        whole: Any = every.to_frame(index=False)
        whole["site"], whole["id"] = whole["key"].str[0], whole["key"].str[1]
        numbers = rng.normal(size=(len(whole), 3))
        whole["a"], whole["b"], whole["push"] = numbers.T
        whole = whole[["site", "id", "at", "a", "b", "push"]]
        # The keys' newest rows are at different times.
        newest: Any = whole["site"].map({"s": 4, "n": 5, "w": 6})
        past = whole["at"] <= at[0] + pd.to_timedelta(newest, "h")
        self.now: Any = whole[past]
        self.later: Any = whole[~past].drop(columns=["a", "b"])
        self.inputs = pd.DataFrame({"site": ["s", "n", "w"], "id": [1, 2, 3], "db": [1.0, 2.5, 0.3]})
        self.now.to_csv(folder / "now.csv", index=False)
        self.inputs.to_csv(folder / "inputs.csv", index=False)

    def forecast(self, later: pd.DataFrame, **options: Any) -> Any:
        later.to_csv(self.folder / "later.csv", index=False)
        out = self.folder / "out.parquet"
        files = {"future": str(self.folder / "later.csv"), "inputs": str(self.folder / "inputs.csv")}
        forecast(self.model, self.folder / "now.csv", out, **files, **options)
        return pd.read_parquet(out)

    def appended(self, later: pd.DataFrame) -> Any:
        """Return what the filter gives for the future rows, appended without measurements."""
        rows, out = self.folder / "appended.csv", self.folder / "appended.parquet"
        pd.concat([self.now, later]).to_csv(rows, index=False)
        inputs = str(self.folder / "inputs.csv")
        offline.run(Settings.load(models=MODELS), str(self.model), str(rows), str(out), inputs=inputs)
        return pd.read_parquet(out).iloc[len(self.now) :]


def the_same(found: Any, expected: Any) -> None:
    order = ["site", "id", "at"]
    columns = {"id": int}
    left, right = (one.astype(columns).sort_values(order, ignore_index=True) for one in (found, expected))
    right["at"] = pd.to_datetime(right["at"], utc=True)
    for name in order:
        assert left[name].tolist() == right[name].tolist()
    for name in ("mean", "covariance"):
        np.testing.assert_array_equal(np.stack(left[name].to_list()), np.stack(right[name].to_list()))


def test_a_forecast_through_future_inputs_is_the_filter_over_rows_without_measurements(
    tmp_path: Path,
) -> None:
    pushed = Pushed(tmp_path)
    later = pushed.later.sample(frac=1.0, random_state=3)  # in any order
    expected = pushed.appended(pushed.later)
    the_same(found := pushed.forecast(later), expected)
    assert found["step"].tolist() == [1, 2, 3, 4, 1, 2, 3, 1, 2]
    # Of the measurement, noise_scale is the input of the key: 0.5 x 2.5 of key n.
    of_n, wide = found[found["site"] == "n"].iloc[0], np.array([[1.0, 0.0], [0.5, 2.0]])
    P = np.array(of_n["covariance"]).reshape(2, 2)
    S = wide @ P @ wide.T + 2.5 * np.diag([0.5, 0.3])
    np.testing.assert_allclose(np.array(of_n["measurement_covariance"]).reshape(2, 2), S, rtol=1e-14)
    the_same(pushed.forecast(later, steps=2), expected.groupby(["site", "id"]).head(2))
    # Every second hour: the rows between are steps too, and are not given.
    second = expected.groupby(["site", "id"]).nth([1, 3])
    the_same(seldom := pushed.forecast(later, until="2024-01-01T08:00", every="2h"), second)
    assert seldom["step"].tolist() == [1, 2, 1, 1]
    own = pushed.later.assign(db=7.0)
    wider = pushed.forecast(own, steps=1)  # the file's inputs come before the keys'
    np.testing.assert_allclose(
        np.array(wider[wider["site"] == "n"].iloc[0]["measurement_covariance"]).reshape(2, 2),
        S + 4.5 * np.diag([0.5, 0.3]),
        rtol=1e-14,
    )


def test_the_inputs_of_a_key_stay_where_no_others_are_given(tmp_path: Path) -> None:
    pushed = Pushed(tmp_path)
    own = PUSHED.replace("control: [push]\n", "").replace("B: [[0.5, 0.0], [1.0, 0.0]]", "B: [[0.5], [1.0]]")
    pushed.model.write_text(own)
    out, inputs = tmp_path / "out.parquet", str(tmp_path / "inputs.csv")
    ahead = {"steps": 4, "every": "1h", "inputs": inputs}
    forecast(pushed.model, tmp_path / "now.csv", out, **ahead)
    found = pd.read_parquet(out)
    rows: Any = found[["site", "id", "at"]].copy()
    rows["at"] = rows["at"].astype(str)
    the_same(found, pushed.appended(rows))
    with pytest.raises(UserError, match="pushed has inputs: give a file of them, a row a key, with --inputs"):
        forecast(pushed.model, tmp_path / "now.csv", out, steps=1)


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda rows: rows.drop(rows.index[1]), {"until": "2024-01-01T08:00", "every": "1h"},
         r"later.csv: has no row of key s, 1 at 2024-01-01T06:00:00\+00:00, whose inputs the forecast needs"),
        (lambda rows: rows, {"steps": 3, "every": "90min"}, r"no row of key s, 1 at 2024-01-01T05:30:00\+00:00"),
        (lambda rows: rows, {"steps": 4},
         r"key n, 2 at 2024-01-01T08:00:00\+00:00 is the last row, the key has 3 of the 4 that --steps asks for"),
        (lambda rows: rows.assign(push=rows["push"].where(rows.index != rows.index[2])), {},
         r"row 3 \(key s, 1?.*at 2024-01-01 07:00:00\+00:00\): control push: missing; a forecast needs every input"),
        (lambda rows: pd.concat([rows, rows.iloc[:1]]), {}, r"key s, 1 at 2024-01-01T05:00:00\+00:00 is there twice"),
        (lambda rows: rows.drop(columns="push"), {}, "there is no column 'push'"),
        (lambda rows: rows, {"every": "1h"}, "--every: with --future, say how far with --steps or --until"),
    ],
)  # fmt: skip
def test_a_missing_future_input_is_named_by_key_and_time(
    tmp_path: Path, change: Any, options: dict[str, Any], said: str
) -> None:
    pushed = Pushed(tmp_path)
    later = pushed.later[pushed.later["site"] != "w"]
    with pytest.raises(UserError, match=said):
        pushed.forecast(change(later), **options)


def test_a_column_with_the_name_of_an_output_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "walk.yaml").write_text(WALK.replace("[site, id]", "[step]"))
    (tmp_path / "in.csv").write_text("step,at,a\n1,2024-01-01,1\n")
    with pytest.raises(UserError, match="column step of the input has the name of an output column"):
        forecast(tmp_path / "walk.yaml", tmp_path / "in.csv", tmp_path / "out.csv", steps=1)


def test_the_command_line(walk: tuple[Path, Path], tmp_path: Path) -> None:
    args = ["--model", str(walk[0]), "--input", str(walk[1]), "--output", str(tmp_path / "out.csv")]
    done = CliRunner().invoke(
        cli.app, ["forecast", *args, "--until", "2024-01-02", "--every", "6h", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert '"forecasts": 5' in done.output
    assert CliRunner().invoke(cli.app, ["forecast", *args, "--steps", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("freq", "zone", "step"),
    [
        ("MS", "UTC", "1 month"),
        ("ME", "UTC", "1 month"),
        ("QS", "UTC", "3 months"),
        ("QE", "UTC", "3 months"),
        ("YS", "UTC", "12 months"),
        ("YE-JUN", "UTC", "12 months"),
        ("2MS", "UTC", "2 months"),
        ("MS", "Europe/Berlin", "1 month"),
        ("ME", "America/New_York", "1 month"),
    ],
)
def test_steps_follow_the_calendar_of_the_rows(tmp_path: Path, freq: str, zone: str, step: str) -> None:
    at: Any = pd.date_range("1979-03-01", periods=44, freq=freq, tz=zone).delete(3)  # a row is missing
    spec = f"name: walk\nversion: 1\nkey: []\ntime: at\ntime_zone: {zone}\nmeasurement: [a]\nstates: [x]\n"
    (tmp_path / "walk.yaml").write_text(spec + WALK[WALK.index("process") :])
    rows = pd.DataFrame({"at": at.strftime("%Y-%m-%dT%H:%M:%S"), "a": 1.0})
    rows.iloc[:30].to_csv(tmp_path / "in.csv", index=False)
    options = {"all_columns": False, "steps": 13}
    report = forecast(tmp_path / "walk.yaml", tmp_path / "in.csv", tmp_path / "out.csv", **options)
    assert f"a step is {step} of the calendar, as usual" in report.lines[1]
    assert report.data["step"] == f"{step} of the calendar" and report.data["step_microseconds"] is None
    out = pd.read_csv(tmp_path / "out.csv", parse_dates=["at"])
    assert out["at"].tolist() == at[30:].tz_convert("UTC").tolist()
    # The file is what a person reads; a table keeps all columns.
    numbers = ["measurement_mean_a", "measurement_lower_a", "measurement_upper_a"]
    assert out.columns.tolist() == ["at", "step", *numbers]


def test_a_step_of_months_may_be_asked_for(walk: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    (tmp_path / "in.csv").write_text("site,id,at,a\ns,1,2024-01-31,1\nn,1,2024-01-30T05:00,1\n")
    report = forecast(*walk, out, until="2024-07-30", every="1mo")
    assert report.lines[1] == "bounds hold 95 %; a step is 1 month of the calendar"
    days = pd.read_csv(out)["at"].str[:13].tolist()
    ends = ["2024-02-29", "2024-03-31", "2024-04-30", "2024-05-31", "2024-06-30"]  # from one end to the next
    same = ["2024-02-29", "2024-03-30", "2024-04-30", "2024-05-30", "2024-06-30"]
    assert days == [f"{day} 00" for day in ends] + [f"{day} 05" for day in same]
    for every, last in (("2q", "2024-07-31 00"), ("1y", "2025-01-31 00"), ("31d", "2024-03-02 00")):
        forecast(*walk, out, steps=1, every=every)
        assert str(pd.read_csv(out)["at"].iloc[0]).startswith(last)
    with pytest.raises(UserError, match="--every: '1m' is not a duration; write .*, d, w, mo, q, y"):
        forecast(*walk, out, steps=1, every="1m")


@pytest.mark.parametrize("every", [None, "1mo"])
def test_each_key_goes_on_at_the_day_of_its_rows(
    walk: tuple[Path, Path], tmp_path: Path, every: str | None
) -> None:
    months = pd.period_range("2021-01", "2022-02", freq="M")
    days = {1: 28, 2: 30, 3: 31, 4: 28}  # the last key has one row alone, which may be a month's end
    rows = [
        (key, f"{month}-{min(day, month.days_in_month)}")
        for key, day in days.items()
        for month in (months[-1:] if key == 4 else months)
    ]
    lines = "".join(f"s,{key},{at},1\n" for key, at in rows)
    (tmp_path / "in.csv").write_text("site,id,at,a\n" + lines)
    report = forecast(*walk, tmp_path / "out.csv", steps=3, every=every)
    out = pd.read_csv(tmp_path / "out.csv")
    found = {key: one["at"].str[5:10].tolist() for key, one in out.groupby("id")}
    ends = ["03-31", "04-30", "05-31"]
    assert found == {1: ["03-28", "04-28", "05-28"], 2: ["03-30", "04-30", "05-30"], 3: ends, 4: ends}
    assert report.data["step"] == "1 month of the calendar"


def test_one_late_row_does_not_move_a_keys_day(walk: tuple[Path, Path], tmp_path: Path) -> None:
    rows = [f"s,1,2023-{month:02d}-{17 if month == 3 else 1:02d},1\n" for month in range(1, 13)]
    (tmp_path / "in.csv").write_text("site,id,at,a\n" + "".join(rows))
    forecast(*walk, tmp_path / "out.csv", steps=2, every="1mo")
    assert pd.read_csv(tmp_path / "out.csv")["at"].str[:10].tolist() == ["2024-01-01", "2024-02-01"]


def test_a_short_file_says_which_forecasts_have_a_flag(walk: tuple[Path, Path], tmp_path: Path) -> None:
    walk[0].write_text(WALK.replace("variance: 2.0", "variance: 1.0e+308"))
    (tmp_path / "in.csv").write_text("site,id,at,a\ns,1,2024-01-01T00:00,1\n")
    report = forecast(*walk, tmp_path / "out.csv", steps=2, every="1h", all_columns=False)
    out = pd.read_csv(tmp_path / "out.csv")
    assert report.data["flagged"] == 1 and out["flag"].fillna("").tolist() == ["", "overflow"]
    assert "mean_x" not in out


def test_four_weeks_are_no_month(walk: tuple[Path, Path], tmp_path: Path) -> None:
    at = pd.date_range("2024-01-01", periods=12, freq="28D")
    pd.DataFrame({"site": "s", "id": 1, "at": at, "a": 1.0}).to_csv(tmp_path / "in.csv", index=False)
    assert forecast(*walk, tmp_path / "out.csv", steps=1).data["step_microseconds"] == 28 * 86_400_000_000
