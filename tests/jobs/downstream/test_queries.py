"""Cleanup of monitor and forecast skill: `maintain` removes what is old, and the remaining queries resume."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from delta.tables import DeltaTable
from pyspark.sql import functions as F

from jobs import forecast, maintain, monitor, skill, status
from jobs.downstream import retention
from jobs.downstream.queries import find_query, list_queries
from jobs.specs.model_spec import ModelSpec
from jobs.storage.row_changes import delete_rows
from jobs.storage.tables import estimates
from tests.jobs.downstream.test_forecast_skill import FORECAST, assert_skill, readings, spec
from tests.jobs.specs.test_spec import refused
from tests.jobs.support.pipeline import Pipeline
from tests.jobs.support.processes import files

OTHER: dict[str, Any] = {**FORECAST, "horizons": ["1h"]}
WATCHED: dict[str, Any] = {
    "watermark": "1h",
    "windows": [{"size": "1h"}],
    "rules": [{"name": "high", "kind": "level", "state": "level", "at_least": 0.0}],
}
NARROWER: dict[str, Any] = {**WATCHED, "windows": [{"size": "30min"}]}


def model(
    forecast: dict[str, Any] = FORECAST, watched: dict[str, Any] = WATCHED, **more: Any
) -> dict[str, Any]:
    return {**spec(), "forecast": forecast, "monitor": watched, **more}


def checkpoints(pipeline: Pipeline) -> set[str]:
    """Return the checkpoints of downstream queries, also renamed ones."""
    return {
        name
        for name in files(Path(pipeline.settings.warehouse, "checkpoints"))
        if not name.startswith("walk-g")
    }


def grow_old(pipeline: Pipeline) -> None:
    """Set all commits of the downstream queries to 100 days ago."""
    then = time.time() - 100 * 86_400
    for folder in checkpoints(pipeline):
        for path in Path(pipeline.settings.warehouse, "checkpoints", folder, "commits").iterdir():
            os.utime(path, (then, then))


def committed_long_ago(table: Path, version: int) -> None:
    """Set the time of a table's commit to ten days ago."""
    path = table / "_delta_log" / f"{version:020d}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        if "commitInfo" in action:
            action["commitInfo"]["timestamp"] -= 10 * 86_400_000 + 3_600_000
    path.write_text("\n".join(map(json.dumps, actions)) + "\n")
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def windows_of(pipeline: Pipeline) -> list[tuple[str, int]]:
    rows = (
        pipeline.warehouse.read("windows/walk").groupBy("definition").agg(F.sum("rows").alias("n")).collect()
    )
    return sorted((row["definition"], row["n"]) for row in rows)


@pytest.mark.spark
@pytest.mark.slow
def test_former_definitions_are_removed_and_may_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(tmp_path, model())
    days = readings(3)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    pipeline.stream()
    skill.run(pipeline.settings, "walk")
    monitor.run(pipeline.settings, "walk")
    told = {
        one["follower"]: one for one in status.run(pipeline.settings, "walk").data["models"][0]["followers"]
    }
    assert set(told) == {"monitor", "skill"}
    assert all(one["ended"] == "caught up" and one["rows_behind"] == 0 for one in told.values()), told
    first = {query.name for verb in told for query in list_queries(pipeline.spec, verb)}
    assert checkpoints(pipeline) == first and len(first) == 3

    # Compaction of the estimates, removal of old files and of a removed generation's rows: none of it stops queries
    # that resume or start now.
    warehouse, table = pipeline.warehouse, pipeline.warehouse.path(estimates("walk"))
    pipeline.land(days[2])
    pipeline.stream()
    last_day = warehouse.latest_version(estimates("walk"))
    gone = warehouse.read(estimates("walk")).limit(5).withColumn("generation", F.lit("walk-g0000"))
    warehouse.append(gone, estimates("walk"))
    delete_rows(warehouse, estimates("walk"), [[("generation", "=", "walk-g0000")]])
    skill.run(pipeline.settings, "walk")
    assert_skill(pipeline, pd.concat(days), FORECAST)

    # The monitor has not read the last day: if that were long ago, its files would stay.
    assert maintain.run(pipeline.settings, "walk", dry_run=True).data["not_vacuumed"] == {}
    committed_long_ago(Path(table), last_day)
    (said,) = maintain.run(pipeline.settings, "walk", dry_run=True).data["not_vacuumed"].values()
    assert said == "the monitor has not read estimates of 10 days ago: run it, or remove it from the spec"
    monitor.run(pipeline.settings, "walk")
    assert maintain.run(pipeline.settings, "walk", dry_run=True).data["not_vacuumed"] == {}
    delta = DeltaTable.forPath(warehouse.spark, table)
    delta.optimize().executeCompaction()
    warehouse.spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    delta.vacuum(0.0)
    warehouse.spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    pipeline.write_spec(model(OTHER, NARROWER))
    skill.run(pipeline.settings, "walk")
    monitor.run(pipeline.settings, "walk")
    assert_skill(pipeline, pd.concat(days), OTHER)
    both = checkpoints(pipeline)
    former = {name for name in first if "rules" not in name}  # the rules have not changed
    assert first < both and len(both) == 5

    kept = maintain.run(pipeline.settings, "walk").data["followers"]
    assert kept == {"definitions": [], "rows": {}} and checkpoints(pipeline) == both  # they are recent
    grow_old(pipeline)
    would = maintain.run(pipeline.settings, "walk", dry_run=True).data["followers"]
    assert set(would["definitions"]) == former and checkpoints(pipeline) == both
    assert set(would["rows"]) == {"forecast_skill/walk", "windows/walk"}

    # After a crash with a renamed checkpoint the next run completes.
    with monkeypatch.context() as patch:
        patch.setattr(retention, "remove_folder", killed)
        with pytest.raises(KeyboardInterrupt):
            maintain.run(pipeline.settings, "walk")
    assert any(name.startswith("removed-") for name in checkpoints(pipeline))
    maintain.run(pipeline.settings, "walk")
    assert checkpoints(pipeline) == both - former
    definitions = {
        row["definition"] for row in warehouse.read("forecast_skill/walk").select("definition").collect()
    }
    assert definitions == {query.definition for query in list_queries(pipeline.spec, "skill")}
    assert len(windows_of(pipeline)) == 1
    assert maintain.run(pipeline.settings, "walk").data["followers"] == {"definitions": [], "rows": {}}

    # The former definition starts anew, and its micro-batches are not mistaken for the earlier ones.
    pipeline.write_spec(model())
    skill.run(pipeline.settings, "walk")
    monitor.run(pipeline.settings, "walk")
    assert_skill(pipeline, pd.concat(days), FORECAST)
    assert [rows for _, rows in windows_of(pipeline)] == [sum(len(day) for day in days[1:])] * 2


def killed(*arguments: Any) -> bool:
    raise KeyboardInterrupt


@pytest.mark.spark
@pytest.mark.slow
def test_old_rows_are_removed_by_event_time(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, model(retention={"skill": "1d", "windows": "1d", "forecasts": "1d"}))
    days = readings(9)
    pipeline.land(days[0])
    pipeline.pretrain()
    for day in days[1:]:
        pipeline.land(day)
    pipeline.stream()
    skill.run(pipeline.settings, "walk")
    monitor.run(pipeline.settings, "walk")
    forecast.run(pipeline.settings, "walk", steps=40, every="1h")
    tables = {
        "forecast_skill/walk": "event_time",
        "windows/walk": "window_end",
        "forecasts/walk": "event_time",
    }
    before = {name: pipeline.warehouse.read(name).toPandas() for name in tables}
    done = maintain.run(pipeline.settings, "walk").data["followers"]["rows"]
    for name, column in tables.items():
        cut = before[name][column].max() - pd.Timedelta("1d")
        after = pipeline.warehouse.read(name).toPandas()
        assert len(after) == (before[name][column] >= cut).sum() == len(before[name]) - done[name]
        assert after[column].min() >= cut and done[name] > 0
    skill.run(pipeline.settings, "walk")  # it resumes, and restores no row
    assert pipeline.warehouse.read("forecast_skill/walk").toPandas()["event_time"].min() >= cut_of(before)


def cut_of(before: dict[str, pd.DataFrame]) -> Any:
    return before["forecast_skill/walk"]["event_time"].max() - pd.Timedelta("1d")


def test_a_checkpoints_name_identifies_its_query() -> None:
    known = ModelSpec.model_validate(model())
    for verb, count in (("monitor", 2), ("skill", 1), ("stream", 0)):
        queries = list_queries(known, verb)
        assert len(queries) == count
        assert [find_query("walk", query.name) for query in queries] == queries
    for name in ("walk-g0001", "skill-walk2-0a", "removed-skill-walk-0a", "ingest-walk"):
        assert find_query("walk", name) is None


def test_a_schedule_without_forecasts_is_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, {**spec(), "forecast": None, "airflow": {"skill": {"schedule": "@hourly"}}})
    assert "airflow.skill.schedule: there is nothing to forecast; add `forecast` with horizons" in said
    assert "retention.skill: is less than a day" in refused(
        tmp_path, {**spec(), "retention": {"skill": "1h"}}
    )
