"""Forecast skill: pairs, forecasts and scores against a direct computation, exactly once also after crashes."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from scipy.stats import norm

from demo.delta_log import rows_of
from jobs import resume, skill, status, stop, upgrade
from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.downstream.forecast_pairs import ScoringPlan, build_forecaster, check_spec, score
from jobs.specs.model_spec import ModelSpec
from tests.jobs.specs.test_spec import refused
from tests.jobs.support.pipeline import Pipeline, random_walk_spec
from tests.jobs.support.processes import Driver, files

FORECAST: dict[str, Any] = {
    "horizons": ["30min", "2h"],
    "tolerance": "6min",
    "probability": 0.8,
    "watermark": "30d",
}
DIFFUSE = {"diffuse": True}
LEVEL, SLOPE = 0.5, 0.01
H = np.array([[1.0, 0.0], [0.5, 1.0]])
R = np.array([[1.0, 0.3], [0.3, 2.0]])


def spec(**changes: Any) -> dict[str, Any]:
    return random_walk_spec(outputs={"measured": True}, forecast=FORECAST, **changes)


def readings(days: int, keys: int = 6, first: str = "2024-03-01") -> list[pd.DataFrame]:
    """Return a frame a day: a row of each key every half hour, of odd keys up to four minutes late; some incomplete."""
    rng = np.random.default_rng(days)
    frames = []
    for day in range(days):
        number, slot = (grid.ravel() for grid in np.meshgrid(np.arange(keys), np.arange(16)))
        minute = 30 * slot + np.where(number % 2 == 1, rng.integers(0, 5, len(slot)), 0)
        at = pd.Timestamp(first, tz="UTC") + pd.to_timedelta(480 * day + minute, "min")
        values = rng.normal(size=(2, len(slot))) + number / 10
        values[rng.random((2, len(slot))) < 0.15] = np.nan
        frame = pd.DataFrame({"id": number, "at": at.as_unit("us"), "a": values[0], "b": values[1]})
        frames.append(frame.sort_values("at", ignore_index=True))
    return frames


def by_hand(estimates: pd.DataFrame, rows: pd.DataFrame, section: dict[str, Any]) -> pd.DataFrame:
    """Forecast and score every pair by the formulas of the local linear trend, one at a time."""
    reach = pd.Timedelta(section.get("tolerance", 0))
    measured = rows.assign(key=rows["id"].astype(str), at=rows["at"].dt.tz_localize(None)).set_index("key")
    quantile = norm.ppf(0.5 + section["probability"] / 2)
    out = []
    origin: Any
    found: Any
    for origin in estimates.itertuples():
        mine = measured.loc[[origin.key]]
        for horizon in section["horizons"]:
            away = (mine["at"] - origin.event_time - pd.Timedelta(horizon)).abs()
            for found in mine.loc[away <= reach].itertuples():
                dt = (found.at - origin.event_time).total_seconds() / 60
                F = np.array([[1.0, dt], [0.0, 1.0]])
                Q = LEVEL * np.diag([dt, 0.0]) + SLOPE * np.array([[dt**3 / 3, dt**2 / 2], [dt**2 / 2, dt]])
                m, P = np.array(origin.mean), np.array(origin.covariance).reshape(2, 2)
                expected, S = H @ F @ m, H @ (F @ P @ F.T + Q) @ H.T + R
                for place, name in enumerate("ab"):
                    y, mean, sd = getattr(found, name), expected[place], S[place, place] ** 0.5
                    if np.isnan(y):
                        continue
                    z = (y - mean) / sd
                    crps = sd * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - np.pi**-0.5)
                    low, high = mean - quantile * sd, mean + quantile * sd
                    said = (mean, sd**2, low, high, y, y - mean, crps, -norm.logpdf(y, mean, sd))
                    out.append(
                        (origin.key, name, horizon, origin.event_time, found.at, *said, low <= y <= high)
                    )
    numbers = ["mean", "variance", "lower", "upper", "actual", "error", "crps", "log_score"]
    return pd.DataFrame.from_records(out, columns=[*ORDER, *numbers, "inside"])


ORDER = ["key", "measurement", "horizon", "made_at", "event_time"]


def assert_skill(pipeline: Pipeline, rows: pd.DataFrame, section: dict[str, Any]) -> pd.DataFrame:
    """Check that the table has each pair once, with the expected numbers."""
    definition = pipeline.spec.forecast.definition() if pipeline.spec.forecast else ""
    found = pipeline.warehouse.read("forecast_skill/walk").toPandas()
    found = found.loc[found["definition"] == definition].sort_values(ORDER, ignore_index=True)
    expected = by_hand(pipeline.estimates(), rows, section).sort_values(ORDER, ignore_index=True)
    assert len(expected) > 100
    for name in (*ORDER, "inside"):
        assert found[name].to_list() == expected[name].to_list(), name
    for name in ("mean", "variance", "lower", "upper", "actual", "error", "crps", "log_score"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-10, err_msg=name)
    assert found["id"].astype(str).to_list() == found["key"].to_list()
    return found


def forget_the_last(pipeline: Pipeline, batches: int) -> None:
    """Undo the commits of some micro-batches and everything after them, as if the command had crashed before."""
    (folder,) = Path(pipeline.settings.warehouse, "checkpoints").glob("skill-*")
    last = max(int(name) for name in files(folder / "commits"))
    first = last - batches + 1
    gone = [f"commits/{n}" for n in range(first, last + 1)] + [
        f"offsets/{n}" for n in range(first + 1, last + 1)
    ]
    for name in gone:
        (folder / name).unlink()
        (folder / name).with_name(f".{name.rpartition('/')[2]}.crc").unlink(missing_ok=True)


@pytest.mark.spark
def test_forecasts_are_scored_against_later_measurements_each_once(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec())
    days = readings(2, keys=10, first="1921-03-01")  # before 1970, where Spark's watermark starts
    pipeline.land(days[0])
    pipeline.pretrain()
    with pytest.raises(UserError, match="model walk has no live estimates in .*: make them with"):
        skill.run(pipeline.settings, "walk")
    pipeline.land(days[1])
    pipeline.stream()
    first = skill.run(pipeline.settings, "walk").data["rows"]
    # After a crash before the commit of a micro-batch, the run repeats it, which is idempotent; the last micro-batch
    # only removed state, the second last had rows.
    forget_the_last(pipeline, 2)
    again = skill.run(pipeline.settings, "walk").data
    table = assert_skill(pipeline, pd.concat(days), FORECAST)
    assert again["rows"] == first == len(table)
    assert_summary(again["skill"], table)


def assert_summary(skill: list[dict[str, Any]], table: pd.DataFrame) -> None:
    """Check the summary of each measurement and horizon."""
    told: dict[Any, Any] = {(one["measurement"], one["horizon"]): one for one in skill}
    assert len(told) == 4
    for name, group in table.groupby(["measurement", "horizon"]):
        one = told[name]
        assert one["forecasts"] == len(group)
        assert one["coverage"] == pytest.approx(group["inside"].mean(), rel=1e-12)
        assert one["rmse"] == pytest.approx((group["error"] ** 2).mean() ** 0.5, rel=1e-12)
        for field in ("crps", "log_score"):
            assert one[field] == pytest.approx(group[field].mean(), rel=1e-12)


def planned(pipeline: Pipeline) -> set[str]:
    """Return the planned micro-batches of the query."""
    folders = Path(pipeline.settings.warehouse, "checkpoints").glob("skill-*")
    return {name for folder in folders for name in files(folder / "offsets")}


@pytest.mark.spark
@pytest.mark.slow
def test_killed_at_any_moment_it_scores_each_pair_once(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec())
    days = readings(5)
    pipeline.land(days[0])
    pipeline.pretrain()
    moments = random.Random(5)
    for day in days[1:]:
        pipeline.land(day)
        pipeline.stream()
        driver = Driver(pipeline, "skill", "--model", "walk")
        before = planned(pipeline)
        driver.wait_for(lambda before=before: planned(pipeline) != before)
        time.sleep(moments.uniform(0.0, 3.0))
        if driver.process.poll() is None:
            driver.kill()
    done = skill.run(pipeline.settings, "walk").data
    rows = pd.concat(days)
    table = assert_skill(pipeline, rows, FORECAST)
    assert_summary(done["skill"], table)
    night = days[2]["at"].min().tz_localize(None)
    crossing = (table["made_at"] < night) & (table["event_time"] >= night)
    assert crossing.any()  # pairs of one run's forecasts with the next run's rows

    # With other horizons, without tolerance, it starts anew beside the existing rows.
    section = {"horizons": ["1h"], "probability": 0.8, "watermark": "30d"}
    pipeline.write_spec({**spec(), "forecast": section})
    skill.run(pipeline.settings, "walk")
    exact = assert_skill(pipeline, rows, section)
    assert set(exact["key"]) > {"0", "2", "4"}
    assert set(exact["event_time"] - exact["made_at"]) == {pd.Timedelta("1h")}


@pytest.mark.spark
@pytest.mark.slow
def test_late_rows_are_counted_and_old_state_is_removed(tmp_path: Path) -> None:
    section = {**FORECAST, "watermark": "5min"}
    pipeline = Pipeline(tmp_path, spec(late="apply") | {"forecast": section})
    days = readings(4)
    pipeline.land(days[0])
    pipeline.pretrain()
    late = days[1].loc[days[1]["id"] == 0]
    for day in (days[1].loc[days[1]["id"] != 0], days[2], days[3], late):
        pipeline.land(day)
        pipeline.stream()
        told = skill.run(pipeline.settings, "walk").data
    assert told["late"] > 0
    # A forecast waits two hours and a row minutes: of three days the state has the end of the last day.
    assert 0 < told["state_rows"] < sum(len(one) for one in days[3:])
    found = pipeline.warehouse.read("forecast_skill/walk").toPandas()
    day = days[2]["at"].min().tz_localize(None)
    of_late = (found["key"] == "0") & (found["event_time"] < day)
    assert not of_late.any() and (found["key"] == "0").any()


def compared(pipeline: Pipeline) -> set[str]:
    """Return the generations whose forecasts were scored."""
    rows = rows_of(Path(pipeline.settings.warehouse, "forecast_skill", "walk"))
    return {row["generation"] for row in rows}


def status_of(pipeline: Pipeline) -> dict[str, Any]:
    """Return the status of the one query."""
    (follower,) = status.run(pipeline.settings, "walk").data["models"][0]["followers"]
    return follower


def forecasts(pipeline: Pipeline) -> int:
    return len(rows_of(Path(pipeline.settings.warehouse, "forecast_skill", "walk")))


def restarted_on(pipeline: Pipeline, generation: str) -> bool:
    """Tell if the query has restarted with this live generation: it writes what each of its sources counts first."""
    views = list(Path(pipeline.settings.warehouse, "_followers").glob("skill-walk-*-view-*.json"))
    return len(views) == 2 and all(generation in view.read_text() for view in views)


@pytest.mark.spark
@pytest.mark.slow
def test_a_running_query_switches_to_another_generation_and_is_killed_and_stopped(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec())
    days = readings(6)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    pipeline.stream()
    running = ("skill", "--model", "walk", "--trigger", "1")
    driver = Driver(pipeline, *running)
    driver.wait_for(lambda: forecasts(pipeline) > 0)
    before = forecasts(pipeline)
    pipeline.land(days[2])
    pipeline.stream()
    driver.wait_for(lambda: forecasts(pipeline) > before)
    # A second run is refused; status shows the first and its lag.
    with pytest.raises(
        UserError, match="the skill of walk already has a driver: process .* of this machine drives it"
    ) as told:
        skill.run(pipeline.settings, "walk")
    assert told.value.exit_code == ALREADY_RUNNING
    (follower,) = status.run(pipeline.settings, "walk").data["models"][0]["followers"]
    assert (follower["follower"], follower["driver"]["pid"]) == ("skill", driver.process.pid)
    assert follower["batches"] > 0 and follower["last_error"] is None

    # Another generation becomes live while it runs.
    pipeline.write_spec({**spec(version=2, migrate={"from": 1}), "upgrade": {"rows": 0}})
    upgrade.run(pipeline.settings, "walk", mode="stop-start")
    driver.wait_for(lambda: "walk-g0002 is live, the forecast skill switches over to it" in driver.said())
    driver.wait_for(lambda: restarted_on(pipeline, "walk-g0002"))
    pipeline.land(days[3])
    pipeline.stream()
    driver.wait_for(lambda: "walk-g0002" in compared(pipeline))
    driver.wait_for(lambda: status_of(pipeline)["rows_behind"] == 0)  # Spark has noted the micro-batch too
    driver.kill()
    pipeline.land(days[4])
    pipeline.stream()
    follower = status_of(pipeline)
    assert follower["driver"] is None and follower["driver_lost"] and follower["rows_behind"] == len(days[4])
    (said,) = status.run(pipeline.settings, "walk", alarm_after="1ms").errors
    assert "its skill makes no progress" in said and "its driver is lost" in said
    driver = Driver(pipeline, *running)
    last = forecasts(pipeline)
    driver.wait_for(lambda: forecasts(pipeline) > last)
    pipeline.land(days[5])
    pipeline.stream()
    # Stopped by request, as by `kalman-pipeline stop --skill`; the next run takes the remaining rows.
    assert stop.run(pipeline.settings, "walk", skill=True).data["stopped"]
    assert driver.finish() == 0, driver.said()
    assert resume.run(pipeline.settings, "walk", skill=True).data["held"]
    skill.run(pipeline.settings, "walk")
    table = assert_skill(pipeline, pd.concat(days), FORECAST)
    assert set(table["generation"]) == {"walk-g0001", "walk-g0002"}
    night = days[3]["at"].min().tz_localize(None)
    assert ((table["made_at"] < night) & (table["event_time"] >= night)).any()  # pairs of both generations


# Without Spark


def pairs(mean: list[float], covariance: list[float], measured: list[float], ahead: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "key": ["k"],
            "generation": ["g"],
            "model_version": pa.array([1], pa.int32()),
            "made_at": [0],
            "event_time": [ahead],
            "horizon": pa.array([1], pa.int32()),
            "mean": [mean],
            "covariance": [covariance],
            "measured": [measured],
        }
    )


def test_a_process_of_steps_is_forecast_by_the_horizons_steps() -> None:
    F, Q = np.array([[1.0, 1.0], [0.0, 0.9]]), np.array([[0.5, 0.1], [0.1, 0.2]])
    model = ModelSpec.model_validate(
        spec(process={"kind": "explicit", "F": F.tolist(), "Q": Q.tolist()})
        | {"forecast": {"horizons": ["1d", "3d"], "step": "1d"}}
    )
    assert model.forecast is not None
    steps = check_spec(model, model.forecast)
    assert steps == (1, 3)
    m, P = np.array([1.0, -2.0]), np.array([[2.0, 0.3], [0.3, 1.0]])
    plan = ScoringPlan({}, model.unit_us, steps, 0.9)
    batch = pairs(m.tolist(), P.ravel().tolist(), [0.5, np.nan], 3 * 86_400_000_000)
    found = score(batch, build_forecaster(model, {}), plan).to_pylist()
    for _ in range(3):
        m, P = F @ m, F @ P @ F.T + Q
    assert [one["measurement"] for one in found] == [0]  # the other measurement is missing
    assert found[0]["mean"] == pytest.approx((H @ m)[0], rel=1e-12)
    assert found[0]["variance"] == pytest.approx((H @ P @ H.T + R)[0, 0], rel=1e-12)


def test_a_diffuse_state_gives_a_row_without_a_forecast() -> None:
    model = ModelSpec.model_validate(spec(initial=DIFFUSE))
    plan = ScoringPlan({}, model.unit_us, None, 0.9)
    batch = pairs([0.0, 0.0], [np.inf, 0.0, 0.0, np.inf], [0.5, 1.0], 60_000_000)
    for one in score(batch, build_forecaster(model, {}), plan).to_pylist():
        assert one["actual"] is not None
        assert [one[name] for name in ("mean", "variance", "lower", "inside", "crps", "log_score")] == [
            None
        ] * 6


def test_a_forecast_that_nothing_has_matched_is_a_row_without_an_actual() -> None:
    model = ModelSpec.model_validate(spec())
    plan = ScoringPlan({}, model.unit_us, None, 0.9)
    batch = pairs([1.0, 0.5], [1.0, 0.0, 0.0, 1.0], [0.5, 1.0], 60_000_000)
    lost = batch.set_column(8, "measured", pa.array([None], batch.schema.field("measured").type))
    both = pa.Table.from_batches([batch, lost]).combine_chunks().to_batches()[0]
    found = score(both, build_forecaster(model, {}), plan).to_pylist()
    assert [(one["measurement"], one["actual"]) for one in found] == [
        (0, 0.5),
        (1, 1.0),
        (0, None),
        (1, None),
    ]
    for matched, one in zip(found[:2], found[2:], strict=True):
        for name in ("mean", "variance", "lower", "upper"):
            assert one[name] == matched[name]
        assert {one[name] for name in ("error", "inside", "crps", "log_score")} == {None}


def test_control_acts_on_the_way_to_the_row() -> None:
    """Each row between is a step with its control, and the key's inputs are those of every step."""
    minute = 60_000_000
    given = spec(control=["push"], inputs={"columns": {"noise": "db"}})
    given["process"] = {"kind": "explicit", "F": [[1.0, 0.1], [0.0, 0.9]], "Q": [[0.5, 0.1], [0.1, 0.2]],
                        "B": [[0.5, 0.0], [1.0, 0.0]]}  # fmt: skip
    given["observation"]["noise_scale"] = "noise"
    model = ModelSpec.model_validate(given)
    assert model.forecast is not None and check_spec(model, model.forecast) is None
    m, P = np.array([1.0, -2.0]), np.array([[2.0, 0.3], [0.3, 1.0]])
    kinds = pa.list_(pa.struct([("time", pa.int64()), ("control", pa.list_(pa.float64()))]))
    rows = [(20, 3.0), (5, 1.0), (30, -2.0), (30, 9.0)]  # in any order; of the row's own time the first
    steps = [{"time": at * minute, "control": [u]} for at, u in rows]
    batch = pairs(m.tolist(), P.ravel().tolist(), [0.5, 1.5], 30 * minute)
    batch = batch.append_column("rows", pa.array([steps], kinds))
    batch = batch.append_column("inputs", pa.array([[2.5]]))
    plan = ScoringPlan({}, model.unit_us, None, 0.9, controls=1, inputs=1)
    found = score(batch, build_forecaster(model, {}), plan).to_pylist()
    F, Q = np.array([[1.0, 0.1], [0.0, 0.9]]), np.array([[0.5, 0.1], [0.1, 0.2]])
    for u in (1.0, 3.0, -2.0):
        m, P = F @ m + np.array([0.5, 1.0]) * u, F @ P @ F.T + Q
    np.testing.assert_allclose([one["mean"] for one in found], H @ m, rtol=1e-12)
    S = H @ P @ H.T + 2.5 * R
    np.testing.assert_allclose([one["variance"] for one in found], S.diagonal(), rtol=1e-12)
    # Without the row's own control there is no forecast.
    gone = batch.set_column(9, "rows", pa.array([steps[:2]], kinds))
    assert {one["mean"] for one in score(gone, build_forecaster(model, {}), plan).to_pylist()} == {None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"outputs": {}},
            "forecast: needs the measurements beside the estimates; add outputs: {measured: true}",
        ),
        ({"forecast": {"horizons": []}}, "forecast.horizons: is empty"),
        ({"forecast": {"horizons": ["1h", "60min"]}}, "forecast.horizons[1]: '60min' is given twice"),
        ({"forecast": {"horizons": ["soon"]}}, "forecast.horizons[0]: 'soon' is not a duration"),
        (
            {"forecast": {"horizons": ["1h"], "tolerance": "1h"}},
            "forecast.tolerance: reaches back to the estimate",
        ),
        ({"forecast": {"horizons": ["90min"], "step": "1h"}}, "is not a multiple of the step 1h"),
    ],
)
def test_mistakes_in_a_spec_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refused(tmp_path, {**spec(), **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"control": ["wind"], "forecast": {"horizons": ["1h"], "step": "1h"}},
            "the model has control, whose rows are the steps: remove it",
        ),
        ({"outputs": {"measured": True, "covariance": "diagonal"}}, "write outputs: {covariance: full}"),
        ({"forecast": {"horizons": ["1h"], "step": "1h"}}, "the model is in continuous time: remove it"),
    ],
)
def test_a_model_that_cannot_be_forecast_is_refused(changes: dict[str, Any], said: str) -> None:
    model = ModelSpec.model_validate({**spec(), **changes})
    assert model.forecast is not None
    with pytest.raises(UserError, match=said.replace("{", r"\{").replace("}", r"\}")):
        check_spec(model, model.forecast)
    adaptive = ModelSpec.model_validate(spec(adaptive={"R": 0.02}))
    with pytest.raises(UserError, match="which lack its adaptive noise"):
        build_forecaster(adaptive, {}, with_state=False)
