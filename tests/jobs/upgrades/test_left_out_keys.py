"""Keys whose state is not a number do not hold up the migration of all others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from jobs import migrate, quarantine
from jobs.core.errors import RUN_FAILED, UserError
from jobs.snapshots import manifests, store, verified_rows
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = pytest.mark.spark

DAYS = random_rows(2, keys=20, rows=60)
PERCENT: dict[str, Any] = {
    "version": 2,
    "migrate": {"states": {"level": {"from": "level", "scale": 2.0}}},
}


def broken(pipeline: Pipeline, good: manifests.Manifest, name: str, nan: list[str], inf: list[str]) -> None:
    """Write a copy of a snapshot in which some keys have a mean that is NaN, and others an infinite covariance."""
    key = F.col("key")
    rows = verified_rows.read_rows(pipeline.warehouse, good.snapshot_id, "walk").withColumns(
        {
            "mean": F.when(key.isin(nan), F.array(F.lit(float("nan")), F.lit(0.0))).otherwise(F.col("mean")),
            "covariance": F.when(key.isin(inf), F.array(*(F.lit(float("inf")) for _ in range(4)))).otherwise(
                F.col("covariance")
            ),
        }
    )
    store.write(pipeline.warehouse, replace(good, snapshot_id=name), rows)


@pytest.mark.slow
def test_keys_without_a_number_are_left_out_listed_and_start_anew(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(DAYS[0])
    pipeline.pretrain()
    (good,) = manifests.read_manifests(pipeline.warehouse)
    seen = DAYS[0]["id"].unique()
    later = [str(key) for key in DAYS[1]["id"].unique() if key in seen]
    nan, inf = later[:1], later[1:2]
    broken(pipeline, good, "broken", nan, inf)
    broken(pipeline, good, "ruined", [str(key) for key in seen[: len(seen) // 2 + 1]], [])
    pipeline.write_spec(random_walk_spec(**PERCENT))
    assert migrate.run(pipeline.settings, "walk", snapshot=good.snapshot_id).data["change"]["left_out"] == 0
    sound = pipeline.snapshot(manifests.read_manifests(pipeline.warehouse)[-1].snapshot_id)

    said = f"left out 2 of {len(seen)} keys, whose state is not a number (such as {', '.join(sorted(nan + inf))})"
    preview = migrate.run(pipeline.settings, "walk", snapshot="broken", dry_run=True)
    assert any(line.startswith(said) for line in preview.lines) and preview.data["change"]["wrong"] == 0
    assert not pipeline.warehouse.exists("quarantine")
    done = migrate.run(pipeline.settings, "walk", snapshot="broken")
    assert any(line.startswith(said) for line in done.lines)
    change = done.data["change"]
    assert (change["keys"], change["left_out"], change["left_out_keys"]) == (
        len(seen) - 2,
        2,
        sorted(nan + inf),
    )
    found = pipeline.snapshot(done.data["snapshot"])
    rest = sound.loc[~sound["key"].isin(nan + inf)].reset_index(drop=True)
    columns = ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood"]
    assert found.loc[:, columns].to_json() == rest.loc[:, columns].to_json()

    held = pipeline.warehouse.read("quarantine").toPandas()
    assert set(held["reason"]) == {
        "state: the key's state is not a number; left out of the migration to version 2"
    }
    assert set(held["source"]) == {"snapshots/broken"} and set(held["model"]) == {"walk"}
    assert sorted(json.loads(text)["left_out"]["key"] for text in held["payload"]) == sorted(nan + inf)
    # They are no measurements: a replay lands none of them.
    quarantine.act(pipeline.settings, "replay", "walk")
    assert pipeline.warehouse.latest_version("measurements/walk") == 1
    assert pipeline.warehouse.read("quarantine").filter("status IS NULL").count() == 2

    pipeline.land(DAYS[1])
    assert pipeline.stream(adopt=done.data["snapshot"]).data["bad_state"] == 0
    estimates = pipeline.estimates()
    assert len(estimates) == len(DAYS[1])
    for key in nan + inf:  # as if the key's first row were its first after the snapshot
        alone = Pipeline(tmp_path / key, random_walk_spec(**PERCENT))
        alone.land(DAYS[1].loc[DAYS[1]["id"] == int(key)])
        mine = estimates.loc[estimates["key"] == key].reset_index(drop=True)
        assert_bit_equal(mine, since(alone.batch(), DAYS[1]))

    with pytest.raises(
        UserError, match=r"is more than a migration leaves out: nothing was written"
    ) as refused:
        migrate.run(pipeline.settings, "walk", snapshot="ruined")
    assert refused.value.exit_code == RUN_FAILED
