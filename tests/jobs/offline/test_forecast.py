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
ROWS = """site,id,at,a
s,1,2024-01-01T00:00,1.0
n,2,2024-01-01T06:00,5.0
s,1,2024-01-01T02:00,2.0
s,1,2024-01-01T03:00,3.0
s,9,2024-01-01T01:00,oops
n,2,2024-01-01T07:00,
"""


def forecast(model: str | Path, source: Path, output: Path, **options: Any) -> Report:
    return command.run(Settings.load(models=MODELS), str(model), str(source), str(output), **options)


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
    assert report.lines[1] == "bounds hold 95 %; a step is 1 h, the median time between two rows of a key"
    text = forecast(model, source, tmp_path / "out.csv", steps=2, every="30min", probability=0.5)
    assert text.lines[1] == "bounds hold 50 %; a step is 30 min"
    flat = pd.read_csv(tmp_path / "out.csv")
    assert flat["covariance_x_x"].tolist()[2:] == [1.0 + 1.5 * 2, 1.0 + 2 * 2]


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
        ({"until": "2200-01-01", "every": "1ms"}, "forecasts; take fewer or longer steps"),
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
    with pytest.raises(UserError, match="control inputs, whose future values forecast does not know"):
        forecast(two_states(tmp_path), tmp_path / "in.csv", tmp_path / "out.csv", steps=1)


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
