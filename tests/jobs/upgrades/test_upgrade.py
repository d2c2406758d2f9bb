"""A stream is upgraded from version to version of its model while rows keep coming, and rolled back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kalman
from jobs import migrate, promote, report, retire, rollback, upgrade
from jobs.core.errors import UserError
from jobs.lineage import promotion, start_point
from jobs.lineage.generations import read_live_lineage
from jobs.lineage.leases import stream_lock
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.row_order import order_rows
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
    streaming,
)

pytestmark = pytest.mark.spark

DAYS = random_rows(5, rows=70)
V2: dict[str, Any] = {
    # A state added: the two measurements' common error.
    "version": 2,
    "states": ["level", "slope", "bias"],
    "process": {
        "kind": "sum",
        "parts": [
            {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.01},
            {"kind": "ornstein_uhlenbeck", "rate": 0.01, "variance": 0.5},
        ],
    },
    "observation": {"H": [[1.0, 0.0, 1.0], [0.5, 1.0, 1.0]], "R": [[1.0, 0.3], [0.3, 2.0]]},
    "initial": {"mean": [0.0, 0.0, 0.0], "covariance": [[10.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.5]]},
    "migrate": {"states": {"bias": {"initial": True}}},
    "upgrade": {"loss": 10.0},
}
HALF = [[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 1.0]]
V3: dict[str, Any] = {
    # Units changed: level and slope in halves; written as matrices, with another filter.
    **V2,
    "version": 3,
    "filter": "unscented",
    "process": {"kind": "explicit", "F": np.eye(3).tolist(), "Q": (0.01 * np.eye(3)).tolist()},
    "observation": {"H": [[0.5, 0.0, 1.0], [0.25, 0.5, 1.0]], "R": [[1.0, 0.3], [0.3, 2.0]]},
    "migrate": {
        "states": {"level": {"from": "level", "scale": 2.0}, "slope": {"from": "slope", "scale": 2.0}}
    },
}


def oracle(specs: list[dict[str, Any]], days: list[pd.DataFrame], cuts: list[int]) -> dict[int, np.ndarray]:
    """Filter each key alone with the first model, mapping its state at the cuts (before these days) by hand."""
    T12 = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    maps = [(T12, np.diag([0.0, 0.0, 0.5])), (np.diag([2.0, 2.0, 1.0]), np.zeros((3, 3)))]
    models = [kalman.build(ModelSpec.model_validate(random_walk_spec(**one)).definition()) for one in specs]
    ends: dict[int, np.ndarray] = {}
    for key in sorted({int(k) for day in days for k in day["id"]}):
        states, used = kalman.initial_states(models[0], 1), 0
        for number, day in enumerate(days):
            if number in cuts:
                T, N = maps[used]
                used += 1
                mean, covariance, _ = models[used - 1].snapshot(states.values)
                n = len(mean)
                P = T @ covariance.reshape(n, n) @ T.T + N
                values = models[used].from_moments(T @ mean, P.reshape(-1, 1))
                values = values if states.count[0] else models[used].initial(1)
                states = states._replace(values=values)
            mine: Any = day[day["id"] == key]
            time = mine["at"].astype("int64").to_numpy()
            y = np.ascontiguousarray(mine[["a", "b"]].to_numpy().T)
            order = order_rows(np.zeros(len(mine), np.int64), time, y, np.empty((0, len(mine))))
            rows = kalman.SortedRows(
                np.zeros(len(mine), np.int64), time[order], y[:, order], np.empty((0, len(mine)))
            )
            states, _ = kalman.run(models[used], states, rows, 60e6)
        if states.count[0]:
            ends[key] = models[used].moments(states.values)[0][:, 0]
    return ends


def live(pipeline: Pipeline) -> pd.DataFrame:
    return ordered(live_estimates(pipeline.warehouse, "walk").toPandas())


class Ended(Exception):
    """Stands for the end of the process."""


def test_a_live_stream_that_lags_catches_up_in_the_spark_of_its_shadow_and_the_rest_needs_no_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])
    pipeline.write_spec(random_walk_spec(**V2))
    pipeline.land(DAYS[2])
    with stream_lock(pipeline.settings.warehouse, "walk"):  # as the driver of another task
        driven = upgrade.run(pipeline.settings, "walk", promote=False, catch_up=True).data
    assert (driven["live_lags"], driven["comparison"]["rows"]) == (True, 0)
    level = upgrade.run(pipeline.settings, "walk", promote=False, catch_up=True).data
    assert (level["live_lags"], level["comparison"]["rows"]) == (False, len(DAYS[2]))
    assert pipeline.stream().data["rows"] == 0 and len(live(pipeline)) == sum(map(len, DAYS[1:3]))

    def start_none(*arguments: Any) -> None:
        raise AssertionError("there is nothing to read, so nothing needs Spark")

    monkeypatch.setattr("jobs.spark.session.spark_session", start_none)
    again = upgrade.run(pipeline.settings, "walk", promote=False).data
    assert (again["good"], again["comparison"]["rows"]) == (level["good"], len(DAYS[2]))
    assert upgrade.run(pipeline.settings, "walk").data["promoted"]


@pytest.mark.core
def test_a_version_is_compared_in_shadow_promoted_and_rolled_back(tmp_path: Path) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])
    pipeline.write_spec(random_walk_spec(**V2))
    shadowed = upgrade.run(pipeline.settings, "walk", promote=False).data
    assert (shadowed["generation"], shadowed["promoted"]) == ("walk-g0002", False)
    assert len(manifests.read_manifests(pipeline.warehouse, "walk")) == 3
    pipeline.land(DAYS[2])
    resumed = pipeline.stream().data
    assert (resumed["generation"], resumed["rows"]) == ("walk-g0001", len(DAYS[2]))
    with pytest.raises(
        UserError, match="has reached measurements version 2 and walk-g0001 measurements version 3"
    ):
        promote.run(pipeline.settings, "walk")
    done = upgrade.run(pipeline.settings, "walk").data  # takes up the shadow that is there
    assert (done["generation"], done["promoted"]) == ("walk-g0002", True)
    assert done["comparison"]["rows"] == len(DAYS[2])
    table = live(pipeline)
    assert len(table) == len(DAYS[1]) + len(DAYS[2]) and sorted(set(table["model_version"])) == [1, 2]
    assert check_ends(table, 2, oracle([{}, V2], DAYS[:3], [2])) > 20

    back = rollback.run(pipeline.settings, "walk").data
    assert (back["generation"], back["retired"]) == ("walk-g0001", "walk-g0002")
    table = live(pipeline)
    assert len(table) == len(DAYS[1]) + len(DAYS[2]) and set(table["model_version"]) == {1}


def check_ends(table: pd.DataFrame, version: int, ends: dict[int, np.ndarray]) -> int:
    """Check the newest estimate of each key by a version, and return how many were checked."""
    checked = 0
    table = table.loc[table["model_version"] == version]
    for key, mean in ends.items():
        mine: Any = table[table["key"] == str(key)]
        newest: Any = mine[mine["event_time"] == mine["event_time"].max()]
        if len(newest) == 1:  # of two rows of one time the table does not say which came last
            np.testing.assert_allclose(newest["mean"].iloc[0], mean, rtol=1e-9, atol=1e-9)
            checked += 1
    return checked


@pytest.mark.slow
def test_a_stream_is_upgraded_twice_and_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])

    # Version 2 is deployed: the stream goes on with version 1 until the upgrade.
    pipeline.write_spec(random_walk_spec(**V2))
    preview = migrate.run(pipeline.settings, "walk", dry_run=True).data
    assert preview["snapshot"] is None and preview["change"]["added"] == ["bias"]
    assert upgrade.run(pipeline.settings, "walk", dry_run=True).data["change"]["wrong"] == 0

    def die(*_: Any, **__: Any) -> None:
        raise Ended

    with (
        monkeypatch.context() as patch
    ):  # ended when the state has been exported and migrated: both are found
        patch.setattr(start_point, "begin", die)
        with pytest.raises(Ended):
            upgrade.run(pipeline.settings, "walk", promote=False)
    shadowed = upgrade.run(pipeline.settings, "walk", promote=False).data
    assert (shadowed["generation"], shadowed["promoted"]) == ("walk-g0002", False)
    pipeline.land(DAYS[2])
    resumed = pipeline.stream().data
    assert (resumed["generation"], resumed["rows"]) == ("walk-g0001", len(DAYS[2]))
    with pytest.raises(
        UserError, match="has reached measurements version 2 and walk-g0001 measurements version 3"
    ):
        promote.run(pipeline.settings, "walk")
    before = live(pipeline)
    switched = promotion.promote

    def promote_and_die(*arguments: Any) -> None:
        switched(*arguments)
        raise Ended

    with monkeypatch.context() as patch:  # ended right after the switch
        patch.setattr(promotion, "promote", promote_and_die)
        with pytest.raises(Ended):
            upgrade.run(pipeline.settings, "walk")
    after = live(pipeline)
    assert len(after) == len(before) == len(DAYS[1]) + len(DAYS[2])
    assert sorted(set(after["model_version"])) == [1, 2]
    assert upgrade.run(pipeline.settings, "walk").data["upgraded"] is False

    # Version 3, at once; then the rest of the rows.
    pipeline.write_spec(random_walk_spec(**V3))
    stopped = upgrade.run(pipeline.settings, "walk", mode="stop-start").data
    assert stopped["generation"] == "walk-g0003"
    pipeline.land(*DAYS[3:])
    assert pipeline.stream().data["rows"] == len(DAYS[3]) + len(DAYS[4])
    table = live(pipeline)
    assert [link.generation for link in read_live_lineage(pipeline.warehouse, "walk")] == [
        "walk-g0003",
        "walk-g0002",
        "walk-g0001",
    ]
    assert len(table) == sum(map(len, DAYS[1:]))
    ends = oracle([{}, V2, V3], DAYS, [2, 3])
    assert check_ends(table, 3, ends) > 20

    # Back to version 2, which catches up from its own checkpoint.
    back = rollback.run(pipeline.settings, "walk").data
    assert (back["generation"], back["retired"]) == ("walk-g0002", "walk-g0003")
    assert pipeline.stream().data["rows"] == len(DAYS[3]) + len(DAYS[4])
    assert len(live(pipeline)) == sum(map(len, DAYS[1:]))
    again = rollback.run(pipeline.settings, "walk", to="walk-g0002").data
    assert (again["generation"], again["retired"]) == ("walk-g0002", None)


@pytest.mark.slow
def test_the_same_model_agrees_bit_for_bit_and_a_worse_one_is_not_promoted(tmp_path: Path) -> None:
    innovation: dict[str, Any] = {"outputs": {"innovation": True}}
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1], **innovation)
    worse = random_walk_spec(
        version=2,
        observation={"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[400.0, 0.0], [0.0, 400.0]]},
        **innovation,
    )
    pipeline.write_spec(worse)
    upgrade.run(pipeline.settings, "walk", promote=False)
    pipeline.land(DAYS[2])
    pipeline.stream()
    with pytest.raises(UserError, match="was not promoted; it predicts worse"):
        upgrade.run(pipeline.settings, "walk")
    assert read_live_lineage(pipeline.warehouse, "walk")[0].generation == "walk-g0001"
    compared = report.run(pipeline.settings, "walk", compare=True).data
    assert (compared["generation"], compared["against"], compared["good"]) == (
        "walk-g0002",
        "walk-g0001",
        False,
    )
    check_comparison(pipeline, compared["comparison"], DAYS[2])
    page = Path(compared["report"])
    assert page.read_text().startswith("<!doctype html>") and "it predicts worse" in page.read_text()
    assert json.loads(page.with_suffix(".json").read_text())["numbers"]["rows"] == len(DAYS[2])
    assert retire.run(pipeline.settings, "walk").data["generation"] == "walk-g0002"

    pipeline.write_spec(random_walk_spec(version=3, **innovation))
    upgrade.run(pipeline.settings, "walk", promote=False)
    pipeline.land(DAYS[3])
    pipeline.stream()
    done = upgrade.run(pipeline.settings, "walk").data
    assert done["promoted"] and done["comparison"]["keys_better"] == done["comparison"]["keys_worse"] == 0
    assert done["comparison"]["unequal_rows"] == 0 and Path(done["report"]).exists()
    found, wanted = live(pipeline), since(pipeline.batch(), DAYS[1])
    assert_bit_equal(found, wanted)
    for ours, theirs in zip(found["innovation"], wanted["innovation"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def check_comparison(pipeline: Pipeline, numbers: dict[str, Any], rows: pd.DataFrame) -> None:
    """Check a comparison against sums over the estimates and the rows themselves, with no join between the two."""
    table = pipeline.estimates()
    first: Any = rows["at"].min()
    mine: Any = table[table["event_time"] >= first.tz_localize(None)]
    for side, generation in (("old", "walk-g0001"), ("new", "walk-g0002")):
        one: Any = mine[mine["generation"] == generation]
        assert len(one) == numbers["rows"] == len(rows)
        innovations = np.concatenate([np.asarray(value, float) for value in one["innovation"]])
        seen = innovations[np.isfinite(innovations)]
        measured = int(rows[["a", "b"]].notna().to_numpy().sum())
        assert len(seen) == measured  # every key had been seen the day before, or has a proper start
        for name, wanted in (
            ("log_likelihood_a_row", one["log_likelihood"].sum() / len(one)),
            ("nis_a_component", one["nis"].sum() / measured),
            ("bias", seen.sum() / measured),
        ):
            np.testing.assert_allclose(numbers[name][side], wanted, rtol=1e-9, atol=1e-12)
    totals = mine.groupby(["key", "generation"])["log_likelihood"].sum().unstack()
    assert numbers["keys"] == len(totals)
    assert numbers["keys_worse"] == int((totals["walk-g0002"] < totals["walk-g0001"]).sum())


@pytest.mark.slow
def test_retrain_and_stateless_lose_no_row(tmp_path: Path) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])
    pipeline.write_spec(random_walk_spec(**V2))
    upgrade.run(pipeline.settings, "walk", mode="retrain")
    pipeline.land(DAYS[2])
    pipeline.stream()
    table = live(pipeline)
    assert len(table) == len(DAYS[1]) + len(DAYS[2])
    later: Any = table[table["model_version"] == 2].reset_index(drop=True)
    assert_bit_equal(later, since(pipeline.batch(), DAYS[2]))

    pipeline.write_spec(random_walk_spec(**{**V2, "version": 3, "key": ["id"]}))
    with pytest.raises(UserError, match="--lose-state"):
        upgrade.run(pipeline.settings, "walk", mode="stateless")
    upgrade.run(pipeline.settings, "walk", mode="stateless", lose_state=True)
    pipeline.land(DAYS[3])
    assert pipeline.stream().data["rows"] == len(DAYS[3])
    assert len(live(pipeline)) == sum(map(len, DAYS[1:4]))


@pytest.mark.slow
def test_an_upgrade_from_a_generation_without_commits_continues_from_its_start(tmp_path: Path) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])
    pipeline.write_spec(random_walk_spec(version=2))
    upgrade.run(pipeline.settings, "walk", mode="stop-start")
    pipeline.write_spec(random_walk_spec(version=3))
    pipeline.land(DAYS[2])
    begun = upgrade.run(pipeline.settings, "walk", promote=False).data
    # It finds the shadow that is there, and no row that the live one has estimated too.
    done = upgrade.run(pipeline.settings, "walk", force=True).data
    assert (begun["generation"], done["generation"], done["promoted"]) == ("walk-g0003", "walk-g0003", True)
    links = [(link.generation, link.last_batch) for link in read_live_lineage(pipeline.warehouse, "walk")]
    assert links == [("walk-g0003", None), ("walk-g0002", -1), ("walk-g0001", 0)]
    assert_bit_equal(live(pipeline), since(pipeline.batch(), DAYS[1]))
    assert rollback.run(pipeline.settings, "walk").data["generation"] == "walk-g0002"
