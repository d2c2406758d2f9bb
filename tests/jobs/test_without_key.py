"""A model without key columns: one filter over all rows, in a file, in batch and in the stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from jobs import export, migrate, monitor, status, verify
from jobs import filter as offline
from jobs import forecast as forecasts
from jobs.core.errors import UserError
from jobs.migration.state_map import state_map_of
from jobs.migration.versions import Step
from jobs.specs.model_spec import ModelSpec
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
        for verb, run, more in (
            ("filter", offline.run, {"smooth": True}),
            ("forecast", forecasts.run, {"steps": 3}),
        ):
            out = tmp_path / f"{name}-{verb}.parquet"
            report = run(pipeline.settings, name, str(tmp_path / f"{name}.parquet"), output=str(out), **more)
            assert report.data["keys"] == 1
            found[name, verb] = pq.read_table(out)
    for verb in ("filter", "forecast"):
        assert found["without", verb].column_names[0] == "at"
        assert found["without", verb].equals(found["constant", verb].drop_columns("id"))


def test_a_migration_between_keys_and_no_keys_is_refused_with_what_to_do(tmp_path: Path) -> None:
    keyed = random_walk_spec()
    for old, new in ((spec_without_key(), keyed), (keyed, spec_without_key())):
        for rules in ({}, {"keys": {"function": "m:f"}}):
            target = ModelSpec.model_validate({**new, "version": 2, "migrate": rules})
            step = Step.forward(ModelSpec.model_validate(old), target)
            with pytest.raises(UserError, match="--mode retrain"):
                state_map_of(step)


@pytest.mark.spark
def test_from_landing_to_migration_without_a_key_column(tmp_path: Path) -> None:
    watching = {"monitor": {"windows": [{"size": "1d"}], "rules": [{"name": "up", "at_least": 0.0}]}}
    spec = spec_without_key(learn={"parameters": ["level_variance"]}, sinks={"latest": True}, **watching)
    pipeline = Pipeline(tmp_path / "one", spec)
    settings = pipeline.settings
    pipeline.land(FRAMES[0], suffix=".csv")
    report = pipeline.pretrain()
    assert report.data["snapshots"][0]["keys"] == 1 if "snapshots" in report.data else True
    bad = FRAMES[2].assign(a=lambda rows: rows["a"].astype(object))
    bad.loc[3, "a"] = "seven"
    pipeline.land(FRAMES[1])
    pipeline.land(bad.assign(at=bad["at"].astype(str)), suffix=".csv")
    pipeline.land(FRAMES[0].head(5))  # late
    pipeline.stream()
    found = pipeline.estimates()
    assert set(found["key"]) == {"[]"} and "id" not in found
    learned = json.loads(pipeline.warehouse.read("manifests").first()["parameters"])
    streamed = found[["key", "event_time", "mean", "covariance", "log_likelihood", "nis", "flags"]]

    alone = pd.concat([FRAMES[0], FRAMES[1], bad.drop(index=3)], ignore_index=True)
    alone["a"] = alone["a"].astype(float)
    alone["at"] = pd.to_datetime(alone["at"], utc=True)
    alone.to_parquet(tmp_path / "all.parquet", index=False)
    snapshot = pipeline.warehouse.read("manifests").first()["snapshot_id"]
    offline.run(
        settings, "walk", str(tmp_path / "all.parquet"), str(tmp_path / "out.parquet"), snapshot=snapshot
    )
    lone = pq.read_table(tmp_path / "out.parquet").to_pandas()
    lone = lone[lone["at"] >= FRAMES[1]["at"].min()]
    assert sorted(map(tuple, lone["mean"])) == sorted(streamed["mean"])
    assert learned and np.isfinite(streamed["log_likelihood"]).all()

    assert "walk" in "\n".join(status.run(settings, None).lines)
    monitor.run(settings, "walk")
    windows = pipeline.warehouse.read("windows").toPandas()
    assert windows["rows"].sum() > 0 if "rows" in windows else len(windows) > 0
    assert set(pipeline.warehouse.read("alerts").toPandas()["key"]) == {"[]"}
    verified = verify.run(settings, "walk", share="100%")
    assert verified.data["estimates"] == len(found) if "estimates" in verified.data else True
    exported = export.run(settings, "walk")
    assert list(pipeline.snapshot(exported.data["snapshot"])["key"]) == ["[]"]
    pipeline.write_spec({**spec, **V2})
    migrated = migrate.run(settings, "walk")
    assert list(pipeline.snapshot(migrated.data["snapshot"])["key"]) == ["[]"]
    pipeline.land(FRAMES[3])
    pipeline.stream()
