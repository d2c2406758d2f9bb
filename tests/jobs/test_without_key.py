"""A model without key columns: one filter over all rows, in a file, in batch and in the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row

from jobs import estimate, export, migrate, monitor, status, verify
from jobs import filter as offline
from jobs import forecast as forecasts
from jobs.core.errors import UserError
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.upgrades.migration.state_map import build_state_map
from jobs.upgrades.migration.versions import MigrationStep
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

FRAMES = [frame.drop(columns="id") for frame in random_rows(4, rows=60)]
V2: dict[str, Any] = {
    "version": 2,
    "process": {"kind": "local_linear_trend", "level_variance": 0.7, "slope_variance": 0.01},
    "migrate": {},
}


def spec_without_key(**changes: Any) -> dict[str, Any]:
    spec = random_walk_spec(**changes)
    del spec["key"]
    return spec


def test_a_file_is_filtered_and_forecast_as_one_series(tmp_path: Path) -> None:
    written = {"without": spec_without_key(name="without"), "constant": random_walk_spec(name="constant")}
    rows = pd.concat(FRAMES, ignore_index=True).sample(frac=1.0, random_state=1)
    found = {}
    for name, spec in written.items():
        pipeline = Pipeline(tmp_path / name, spec)
        source = rows if name == "without" else rows.assign(id=7)
        source.to_parquet(tmp_path / f"{name}.parquet", index=False)
        given, out = str(tmp_path / f"{name}.parquet"), str(tmp_path / "out.parquet")
        assert offline.run(pipeline.settings, name, given, out, smooth=True).data["keys"] == 1
        found[name, "filter"] = pq.read_table(out)
        assert forecasts.run(pipeline.settings, name, given, out, steps=3).data["keys"] == 1
        found[name, "forecast"] = pq.read_table(out)
    for verb in ("filter", "forecast"):
        assert found["without", verb].column_names[0] == "at"
        assert found["without", verb].equals(found["constant", verb].drop_columns("id"))


def test_a_migration_between_keys_and_no_keys_is_refused_with_what_to_do(tmp_path: Path) -> None:
    keyed = random_walk_spec()
    for old, new in ((spec_without_key(), keyed), (keyed, spec_without_key())):
        for rules in ({}, {"keys": {"function": "m:f"}}):
            target = ModelSpec.model_validate({**new, "version": 2, "migrate": rules})
            step = MigrationStep.forward(ModelSpec.model_validate(old), target)
            with pytest.raises(UserError, match="--mode retrain"):
                build_state_map(step)


@pytest.mark.slow
@pytest.mark.spark
def test_from_landing_to_migration_without_a_key_column(tmp_path: Path) -> None:
    rules = [{"name": "up", "kind": "level", "at_least": -100.0, "readings": 1}]
    spec = spec_without_key(
        learn={"parameters": ["level_variance"]},
        sinks={"latest": True},
        monitor={"windows": [{"size": "1d"}], "rules": rules},
    )
    pipeline = Pipeline(tmp_path / "one", spec)
    settings, warehouse = pipeline.settings, pipeline.warehouse
    pipeline.land(FRAMES[0], suffix=".csv")
    assert pipeline.pretrain().data["keys"] == 1
    broken = FRAMES[2].assign(a=FRAMES[2]["a"].astype(object))
    broken.loc[3, "a"] = "seven"
    pipeline.land(FRAMES[1])
    pipeline.land(broken, suffix=".csv")
    pipeline.land(FRAMES[0].head(5))  # late
    pipeline.stream()
    assert warehouse.read("measurements/walk").columns[:3] == ["at", "a", "b"]
    streamed = pipeline.estimates()
    assert set(streamed["key"]) == {"[]"} and list(streamed.columns[:2]) == ["key", "event_time"]
    assert len(streamed) == 2 * 60 - 1

    applied = pd.concat([FRAMES[0], FRAMES[1], FRAMES[2].drop(index=3)], ignore_index=True)
    applied.to_parquet(tmp_path / "all.parquet", index=False)
    files = str(tmp_path / "all.parquet"), str(tmp_path / "out.parquet")
    snapshot = one_row(warehouse, "manifests")["snapshot_id"]
    offline.run(settings, "walk", *files, snapshot=snapshot)
    alone = pq.read_table(files[1]).to_pandas()
    alone = alone[alone["at"] >= FRAMES[1]["at"].min()]
    for name in ("mean", "covariance"):
        assert sorted(map(tuple, alone[name])) == sorted(map(tuple, streamed[name]))
    assert sorted(alone["log_likelihood"]) == sorted(streamed["log_likelihood"])

    assert status.run(settings, "walk").data
    assert one_row(warehouse, "latest/walk")["key"] == "[]"
    monitor.run(settings, "walk")
    assert len(warehouse.read("windows/walk").toPandas()) > 0
    assert one_row(warehouse, "alerts/walk")["key"] == "[]"
    report = verify.run(settings, "walk", share="100%")
    assert report.data["outcome"] == "equal", report.data
    exported = export.run(settings, "walk").data["snapshot"]
    state = pipeline.snapshot(exported)
    assert list(state["key"]) == ["[]"] and state["state_index"][0] == 3 * 60 - 1
    check_history_and_forecasts(pipeline, files, snapshot, exported)
    pipeline.write_spec({**spec, **V2})
    migrate.run(settings, "walk")
    migrated = warehouse.read("manifests").filter("model_version = 2").first()
    assert migrated is not None and migrated["key_count"] == 1
    same = pipeline.snapshot(migrated["snapshot_id"])
    assert same["mean"][0].tolist() == state["mean"][0].tolist()


def check_history_and_forecasts(
    pipeline: Pipeline, files: tuple[str, str], snapshot: str, exported: str
) -> None:
    """History, and forecasts from live state, a snapshot and rows, with and without Spark, are the same."""
    settings, warehouse = pipeline.settings, pipeline.warehouse
    estimate.run(settings, "walk", snapshot=snapshot)
    history, streamed = warehouse.read("estimates_history/walk").toPandas(), pipeline.estimates()
    later = history[history["event_time"] >= streamed["event_time"].min()]
    for name in ("mean", "covariance"):
        assert sorted(map(tuple, later[name])) == sorted(map(tuple, streamed[name]))
    ahead: dict[str, Any] = {"steps": 3, "every": "1h"}
    forecasts.run(settings, "walk", *files, snapshot=snapshot, **ahead)
    expected = pq.read_table(files[1])
    sources: list[dict[str, Any]] = [{}, {"snapshot": exported}]
    for source in sources:
        forecasts.run(settings, "walk", output=files[1], **ahead, **source)
        assert pq.read_table(files[1]).column("mean").to_pylist() == expected.column("mean").to_pylist()
    forecasts.run(settings, "walk", **ahead)
    table = warehouse.read("forecasts/walk").toPandas().sort_values("step")
    assert [list(one) for one in table["mean"]] == expected.column("mean").to_pylist()


def one_row(warehouse: Warehouse, table: str) -> Row:
    (row,) = warehouse.read(table).collect()
    return row
