"""Forecasts from the live state, and from snapshots, are those of the filter over the same rows: the same bits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from demo.delta_log import rows_of
from jobs import forecast, inputs, upgrade
from jobs.batch import forecast_run
from jobs.core.errors import UserError
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec, streaming
from tests.jobs.support.processes import Driver, files

pytestmark = pytest.mark.spark

NUMBERS = (
    "mean",
    "covariance",
    "lower",
    "upper",
    "measurement_mean",
    "measurement_covariance",
    "measurement_lower",
    "measurement_upper",
)


def table(pipeline: Pipeline, name: str | None = None) -> Any:
    """Return a table of forecasts, in the form of the offline command's file."""
    found: Any = pipeline.warehouse.read(name or f"forecasts/{pipeline.name}").toPandas()
    found = found.rename(columns={"event_time": "at"})
    return found.sort_values(["run", "id", "step"], ignore_index=True)


def offline(pipeline: Pipeline, rows: list[Any], **options: Any) -> Any:
    """Return the forecasts of the filter without Spark over rows."""
    source, out = pipeline.folder / "all.parquet", pipeline.folder / "ahead.parquet"
    pd.concat(rows).to_parquet(source, index=False)
    forecast.run(pipeline.settings, pipeline.name, str(source), str(out), all_columns=True, **options)
    found: Any = pd.read_parquet(out)
    found["at"] = found["at"].dt.tz_localize(None)
    return found.sort_values(["id", "step"], ignore_index=True)


def assert_same(found: Any, expected: Any) -> None:
    """Check keys, times, steps, flags and all numbers, bit by bit."""
    assert len(found) == len(expected) > 0
    for name in ("id", "at", "step"):
        assert found[name].tolist() == expected[name].tolist(), name
    assert found["flag"].isna().tolist() == expected["flag"].isna().tolist()
    good = expected["flag"].isna().to_numpy()
    for name in NUMBERS:
        left, right = (np.array(one[name][good].tolist()) for one in (found, expected))
        np.testing.assert_array_equal(left, right, err_msg=name)


def test_live_snapshot_and_offline_forecasts_have_the_same_bits(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(sinks={"latest": True}))
    days = random_rows(3, keys=20, rows=60)
    pipeline.land(days[0])
    before = pipeline.pretrain().data["snapshot"]
    pipeline.land(pd.concat(days[1:]))
    generation = pipeline.stream().data["generation"]
    settings = pipeline.settings
    ahead: dict[str, Any] = {"steps": 3, "every": "10min"}

    live = forecast.run(settings, "walk", **ahead)
    expected = offline(pipeline, days, **ahead)
    assert_same(table(pipeline), expected)
    said = live.data
    assert (said["generation"], said["batch"]) == (generation, 0)
    assert (said["keys"], said["forecasts"], said["flagged"]) == (len(expected) // 3, len(expected), 0)
    assert 0 <= said["age_seconds"] < 600 and said["position"] == "measurements version 2"
    assert (
        f"state: micro-batch 0 of {generation}, of " in live.lines[1]
        and " ago), measurements" in live.lines[1]
    )

    # The same states and options are the same run: its rows are replaced. Others are another run.
    again = forecast.run(settings, "walk", **ahead).data
    assert again["run"] == said["run"] and len(table(pipeline)) == len(expected)
    some = expected["id"].unique()[[0, 3]]
    keys = [str(one) for one in some]
    few = forecast.run(settings, "walk", key=keys, until="2024-03-04T12:00", every="6h", output="mine").data
    until = offline(pipeline, days, until="2024-03-04T12:00", every="6h")
    assert_same(table(pipeline, "mine"), until[until["id"].isin(some)].reset_index(drop=True))
    assert few["keys"] == 2 and few["keys_past"] == 0 and few["run"] != said["run"]

    # From the snapshot: on Spark, and without.
    old = forecast.run(settings, "walk", snapshot="newest", run="nightly", **ahead).data
    assert (old["snapshot"], old["generation"], old["run"]) == (before, None, "nightly")
    then = offline(pipeline, days[:1], **ahead)
    found = table(pipeline)
    assert_same(found[found["run"] == "nightly"].reset_index(drop=True), then)
    shorter = forecast.run(settings, "walk", snapshot=before, run="nightly", steps=1, every="10min").data
    found = table(pipeline)
    assert (found["run"] == "nightly").sum() == shorter["forecasts"] == len(then) // 3
    out, first = tmp_path / "few.parquet", str(then["id"].iloc[0])
    alone = forecast.run(
        settings, "walk", output=str(out), key=[first], snapshot="newest", all_columns=True, **ahead
    )
    read: Any = pd.read_parquet(out)
    read["at"] = read["at"].dt.tz_localize(None)
    assert_same(read, then[then["id"] == int(first)].reset_index(drop=True))
    assert alone.data["snapshot"] == before and f"state: snapshot {before} of " in alone.lines[1]
    with pytest.raises(UserError, match=r"--key 999: micro-batch 0 of .* has no state of it"):
        forecast.run(settings, "walk", key=["999"], **ahead)
    with pytest.raises(UserError, match=r"--key 999: snapshot .* has no state of it"):
        forecast.run(settings, "walk", key=["999"], output=str(out), snapshot="newest", **ahead)
    # From the live stream's latest states, without Spark.
    now = forecast.run(settings, "walk", output=str(out), key=keys, all_columns=True, **ahead)
    read = pd.read_parquet(out)
    read["at"] = read["at"].dt.tz_localize(None)
    assert_same(read, expected[expected["id"].isin(some)].reset_index(drop=True))
    assert (
        f"state: latest states of {generation} of " in now.lines[1] and now.data["generation"] == generation
    )
    assert forecast.run(settings, "walk", output=str(out), **ahead).data["forecasts"] == len(expected)
    with pytest.raises(UserError, match=rf"--key 999: {generation} has no state of it"):
        forecast.run(settings, "walk", key=["999"], output=str(out), **ahead)
    with pytest.raises(UserError, match="add --every with the time of a step"):
        forecast.run(settings, "walk", steps=3)
    history = pipeline.warehouse.spark.sql(f"DESCRIBE HISTORY delta.`{settings.warehouse}/forecasts/walk`")
    newest: Any = history.orderBy("version", ascending=False).first()
    assert json.loads(newest["userMetadata"])["run"] == "nightly"

    # A generation has no latest states before its first row: a file starts from its snapshot, as the table does.
    pipeline.write_spec(random_walk_spec(version=2, sinks={"latest": True}))
    upgrade.run(settings, "walk", mode="retrain")
    first = forecast.run(settings, "walk", output=str(out), key=keys, **ahead)
    whole = forecast.run(settings, "walk", key=keys, output="promoted", **ahead).data
    assert first.data["forecasts"] == whole["forecasts"] == 6 and first.data["generation"] is None
    assert first.data["snapshot"] == whole["snapshot"] != before
    why = f"no row has come since {generation[:-1]}2 began from this snapshot"
    assert f"not from the live stream: {why}" in first.lines
    with pytest.raises(UserError, match=r"--key 999: snapshot .* has no state of it"):
        forecast.run(settings, "walk", key=["999"], output=str(out), **ahead)


def test_infinite_bounds_of_a_table_are_counted() -> None:
    sums = forecast_run._ForecastSums()
    upper = [[1.0, 2.0], [np.inf, np.inf], None, [0.0, np.inf], [None, 0.0]]
    columns = {"step": [1, 2, 3, 1, 2], "flag": pa.array([None, None, "late", None, None], pa.string())}
    times = pa.array([0] * 5, pa.timestamp("us"))
    sums.add(pa.RecordBatch.from_pydict({**columns, "made_at": times, "measurement_upper": upper}))
    assert sums.numbers() == {"forecasts": 5, "keys": 2, "flagged": 1, "unbounded": 2, "newest": 0}


PUSHED: dict[str, Any] = {
    "name": "pushed",
    "version": 1,
    "key": ["site", "id"],
    "time": "at",
    "time_unit": "hour",
    "measurement": ["a", "b"],
    "control": ["push"],
    "inputs": {"columns": {"noise": "db"}},
    "states": ["x", "y"],
    "process": {
        "kind": "explicit",
        "F": [[1.0, 0.1], [0.0, 0.9]],
        "Q": [[0.5, 0.1], [0.1, 0.4]],
        "B": [[0.5, 0.0], [1.0, 0.0]],
    },
    "observation": {"H": [[1.0, 0.0], [0.5, 2.0]], "R": [[0.5, 0.0], [0.0, 0.3]], "noise_scale": "noise"},
    "initial": {"mean": [1.0, -1.0], "covariance": [[4.0, 1.0], [1.0, 9.0]]},
    "learn": {"parameters": ["R"], "scope": "key", "max_iterations": 5},
    "stream": {"max_files_per_batch": 1, "partitions": 2, "keys_per_block": 4},
}


def pushed_rows(hours: int) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    at = pd.Timestamp("2024-01-01T00:00:00Z") + pd.to_timedelta(np.arange(hours), "h")
    frames = [
        pd.DataFrame({"site": site, "id": number, "at": at.as_unit("us")})
        for site, number in (("s", 1), ("n", 2), ('"w', 3), ("s", 4))
    ]
    whole = pd.concat(frames, ignore_index=True)
    whole["a"], whole["b"], whole["push"] = rng.normal(size=(3, len(whole)))
    return whole.sort_values(["at", "site", "id"], ignore_index=True)


@pytest.mark.slow
def test_few_keys_of_a_snapshot_are_forecast_without_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(random_rows(2, keys=20, rows=60)[0])
    pipeline.pretrain()

    def refuse(*given: Any) -> Any:
        raise AssertionError("Spark starts")

    ahead: dict[str, Any] = {"until": "2024-03-02T12:00", "every": "6h", "key": None}
    with monkeypatch.context() as patched:
        patched.setattr("jobs.spark.session.spark_session", refuse)
        here = forecast.run(pipeline.settings, "walk", output="here", **ahead).data
    monkeypatch.setattr("jobs.batch.forecast_run.FEW_KEYS", 0)
    there = forecast.run(pipeline.settings, "walk", output="there", **ahead).data
    own = {"output", "seconds", "age_seconds"}
    assert {name: here[name] for name in here.keys() - own} == {
        name: there[name] for name in there.keys() - own
    }
    left, right = table(pipeline, "here"), table(pipeline, "there")
    assert len(left) == here["forecasts"] > 0
    pd.testing.assert_frame_equal(left, right, check_exact=True)


def test_forecasts_with_control_inputs_and_parameters_of_each_key(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, PUSHED)
    whole: Any = pushed_rows(60)
    hour = whole["at"].dt.day * 24 + whole["at"].dt.hour - 24
    days = [whole[hour < 40], whole[(hour >= 40) & (hour < 55)]]
    later: Any = whole[hour >= 55].drop(columns=["a", "b"])
    file = tmp_path / "inputs.csv"
    keys = pd.DataFrame({"site": ["s", "n", '"w', "s"], "id": [1, 2, 3, 4], "db": [1.0, 2.5, 0.3, 0.7]})
    keys.to_csv(file, index=False)
    pipeline.land(days[0])
    inputs.run(pipeline.settings, "pushed", str(file))
    learned = pipeline.pretrain().data["snapshot"]
    pipeline.land(days[1])
    pipeline.stream()
    ahead = tmp_path / "later.csv"
    later.to_csv(ahead, index=False)
    through: dict[str, Any] = {"future": str(ahead)}

    said = forecast.run(pipeline.settings, "pushed", **through).data
    expected = offline(pipeline, days, **through, inputs=str(file), snapshot=learned)
    assert (said["forecasts"], said["keys"], said["keys_past"], said["inputs_version"]) == (20, 4, 0, 0)
    assert_same(table(pipeline), expected)
    own = {tuple(one["measurement_covariance"]) for _, one in expected[expected["step"] == 1].iterrows()}
    assert len(own) == 4
    # The snapshot's states, one key, without Spark: the table of inputs is read all the same.
    out = tmp_path / "one.parquet"
    whole[hour >= 40].drop(columns=["a", "b"]).to_csv(ahead, index=False)
    one = {"key": ['["\\"w","3"]'], "output": str(out), "steps": 2, "all_columns": True, **through}
    said_of = forecast.run(pipeline.settings, "pushed", **one).lines
    assert any("not from the live stream: it keeps no table of latest states" in line for line in said_of)
    then = offline(pipeline, days[:1], **through, steps=2, inputs=str(file), snapshot=learned)
    found: Any = pd.read_parquet(out)
    found["at"] = found["at"].dt.tz_localize(None)
    assert_same(found, then[then["id"] == 3].reset_index(drop=True))

    # A missing future row ends the run with its key and time, and leaves the table as it was.
    later.drop(later.index[-1]).to_csv(ahead, index=False)
    with pytest.raises(UserError, match=r"is the last row, the key has 4 of the 5 that --steps asks for"):
        forecast.run(pipeline.settings, "pushed", steps=5, run=said["run"], **through)
    assert_same(table(pipeline), expected)
    with pytest.raises(UserError, match="has control inputs: give their future values with --future"):
        forecast.run(pipeline.settings, "pushed", steps=5, every="1h")


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_all_of_its_rows_or_none(tmp_path: Path) -> None:
    days = random_rows(2, rows=80)
    pipeline = streaming(tmp_path, *days)
    forecast.run(pipeline.settings, "walk", steps=2, every="1min", run="nightly")
    folder = Path(pipeline.settings.warehouse, "forecasts", "walk")
    keys = len(rows_of(folder)) // 2
    arguments = ("forecast", "--model", "walk", "--steps", "300", "--every", "1min", "--run", "nightly")
    for delay in (0.0, 0.2):
        before, log = files(folder / "run=nightly"), files(folder / "_delta_log")
        driver = Driver(pipeline, *arguments)
        driver.wait_for(lambda before=before: files(folder / "run=nightly") - before)
        time.sleep(delay)
        driver.kill()
        there = len(rows_of(folder))
        assert there in (2 * keys, 300 * keys)
        assert there == 2 * keys or files(folder / "_delta_log") > log
    assert Driver(pipeline, *arguments).finish() == 0
    steps = [row["step"] for row in rows_of(folder)]
    assert len(steps) == 300 * keys and sorted(set(steps)) == list(range(1, 301))
