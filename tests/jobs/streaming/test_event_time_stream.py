"""Streams with a watermark, on Spark: pretrain, stream, export and a new generation together equal one batch pass."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import export, migrate
from jobs.core.errors import UserError
from jobs.lineage.live import live_estimates
from jobs.snapshots import manifests
from jobs.supervision.progress import progress_of
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered, random_rows, random_walk_spec
from tests.jobs.support.processes import Driver, files

pytestmark = pytest.mark.spark

DELAY = pd.Timedelta("8h")
STRICT: dict[str, Any] = {"order": {"kind": "strict", "delay": "8h"}}


def delayed(days: list[pd.DataFrame], parts: int, seed: int = 3) -> list[pd.DataFrame]:
    """Return rows in the order of their arrival, each up to `DELAY` after its event time, in so many parts."""
    rng = np.random.default_rng(seed)
    rows = pd.concat(days, ignore_index=True)
    arrival = rows["at"] + pd.to_timedelta(rng.uniform(0, DELAY.total_seconds(), len(rows)), "s")
    order = np.argsort(arrival.to_numpy(), kind="stable")
    return [rows.iloc[part].reset_index(drop=True) for part in np.array_split(order, parts)]


def newest(*parts: pd.DataFrame) -> Any:
    return max(part["at"].max() for part in parts).tz_localize(None)


def between(estimates: pd.DataFrame, first: Any, last: Any) -> pd.DataFrame:
    inside = (estimates["event_time"] >= first) & (estimates["event_time"] < last)
    return estimates.loc[inside].reset_index(drop=True)


def waiting(pipeline: Pipeline, snapshot: str) -> pd.DataFrame:
    rows = pipeline.warehouse.read("waiting").filter(f"snapshot_id = '{snapshot}'").toPandas()
    rows["measurement"] = [
        tuple(-9.0 if v is None or np.isnan(v) else v for v in m) for m in rows["measurement"]
    ]
    names = ["key", "event_time", "measurement"]
    return pd.DataFrame({name: rows[name] for name in names}).sort_values(names, ignore_index=True)


@pytest.mark.slow
def test_rows_out_of_order_within_the_delay_equal_one_batch_pass_across_snapshots(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(**STRICT))
    parts = delayed(random_rows(4, rows=80, text=True), 8)
    pipeline.land(*parts[:2])
    pretrained = pipeline.pretrain().data
    first = pretrained["snapshot"]
    start = newest(*parts[:2]) - DELAY
    rows = pd.concat(parts[:2])
    held = rows["at"].dt.tz_localize(None) >= start
    assert len(waiting(pipeline, first)) == pretrained["waiting"] == held.sum() > 0
    manifest = manifests.find(pipeline.warehouse, first)
    assert manifest is not None and manifest.rows == len(rows) - held.sum()

    pipeline.land(*parts[2:5])
    done = pipeline.stream().data
    assert (done["batches"], done["late"]) == (3, 0)
    end = newest(*parts[:5]) - DELAY
    arrived = pd.concat(parts[:5])["at"].dt.tz_localize(None)
    assert done["waiting"] == (arrived >= end).sum() > 0
    assert_bit_equal(pipeline.estimates(), between(pipeline.batch(), start, end))

    # An export in the middle equals the pretrained snapshot there, waiting rows included.
    exported = export.run(pipeline.settings, "walk", batch=1).data
    again = pipeline.pretrain(to_version=exported["version"]).data["snapshot"]
    pd.testing.assert_frame_equal(waiting(pipeline, exported["snapshot"]), waiting(pipeline, again))
    left, right = pipeline.snapshot(exported["snapshot"]), pipeline.snapshot(again)
    for name in ("key", "state_index", "event_time", "log_likelihood"):
        pd.testing.assert_series_equal(left[name], right[name], check_exact=True)
    for name in ("mean", "covariance"):
        np.testing.assert_array_equal(np.stack(left[name].to_list()), np.stack(right[name].to_list()))

    # A generation that begins there counts each waiting row once; a row beyond the delay goes to quarantine.
    too_late = parts[0].head(1)
    pipeline.land(*parts[5:], too_late)
    adopted = pipeline.stream(adopt=exported["snapshot"]).data
    assert adopted["began"] and adopted["late"] == 1
    live = ordered(live_estimates(pipeline.warehouse, "walk").toPandas())
    everything = pipeline.batch(version=pipeline.warehouse.latest_version("measurements/walk") - 1)
    assert_bit_equal(live, between(everything, start, newest(*parts) - DELAY))
    (refused,) = pipeline.warehouse.read("quarantine").collect()
    assert refused["reason"] == "late: behind the watermark"
    assert refused["generation"] == adopted["generation"]
    marks = progress_of(pipeline.warehouse, "walk").filter("batch_id = 1").select("watermark").collect()
    assert {row[0] for row in marks if row[0] is not None} >= {newest(*parts[:4]) - DELAY}

    # A migration to another version keeps the waiting rows, or refuses.
    pipeline.write_spec(random_walk_spec(**STRICT, version=2))
    moved = migrate.run(pipeline.settings, "walk", snapshot=exported["snapshot"]).data["snapshot"]
    pd.testing.assert_frame_equal(waiting(pipeline, moved), waiting(pipeline, exported["snapshot"]))
    pipeline.write_spec(random_walk_spec(version=3))
    with pytest.raises(
        UserError, match="rows wait for the watermark in snapshot .* has no order.kind: strict"
    ):
        migrate.run(pipeline.settings, "walk", snapshot=moved)


def test_silent_keys_end_and_repeats_are_dropped(tmp_path: Path) -> None:
    after = pd.Timedelta("15h")
    spec = random_walk_spec(**STRICT, duplicates={"action": "drop"}, expiry={"after": "15h"})
    pipeline = Pipeline(tmp_path, spec)
    sent = delayed(random_rows(4, rows=80), 4)
    parts = [pd.concat([part, part.sample(5, random_state=1)], ignore_index=True) for part in sent]
    pipeline.land(parts[0])
    pipeline.pretrain()
    pipeline.land(*parts[1:])
    done = pipeline.stream().data
    start, end = newest(parts[0]) - DELAY, newest(*parts) - DELAY
    everything = pipeline.batch()
    assert_bit_equal(pipeline.estimates(), between(everything, start, end))

    rows = pd.concat(sent).assign(at=lambda rows: rows["at"].dt.tz_localize(None))
    due = rows.loc[rows["at"] < end]
    once = due.drop_duplicates(["id", "at"]).sort_values(["id", "at"])
    told = pd.concat(parts).assign(at=lambda rows: rows["at"].dt.tz_localize(None))
    told = told.loc[(told["at"] < end) & (told["at"] >= start)]
    assert done["duplicates"] == len(told) - (once["at"] >= start).sum() > 0
    assert not pipeline.warehouse.exists("quarantine")
    # A life lies between two gaps; a life that ended in the history is not in the archive.
    anew = once.groupby("id")["at"].diff() > after
    lives = (
        once.groupby([once["id"], anew.cumsum()]).agg(last=("at", "max"), rows=("at", "size")).reset_index(0)
    )
    following = once.loc[anew].groupby("id")["at"].apply(list).to_dict()
    ended = []
    for key, last, count in zip(lives["id"], lives["last"], lives["rows"], strict=True):
        back = next((at for at in following.get(key, []) if at > last), None)
        if last < end - after and not (back is not None and back < start):
            ended.append((str(key), last, count))
    archive = pipeline.warehouse.read("archive/walk").toPandas()
    assert len(archive) == done["expired"] > 0
    assert sorted(zip(archive["key"], archive["event_time"], archive["state_index"], strict=True)) == sorted(
        ended
    )
    first = archive.iloc[0]
    estimate = everything.loc[
        (everything["key"] == first["key"]) & (everything["event_time"] == first["event_time"])
    ].iloc[-1]
    assert tuple(first["mean"]) == estimate["mean"]


@pytest.mark.slow
def test_late_rows_are_replayed_and_estimates_corrected(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(order={"kind": "replay", "rows": 8}))
    parts = delayed(random_rows(4, rows=120, text=True), 5)
    pipeline.land(parts[0])
    pipeline.pretrain(to_version=0)
    pipeline.land(*parts[1:])
    done = pipeline.stream().data
    assert (done["rows"], done["late"]) == (sum(map(len, parts)), 0)
    assert done["corrected"] > 0
    found = pipeline.estimates()
    same = found.groupby(["key", "event_time"])["batch_id"].transform("max")
    everything = pipeline.batch()
    assert_bit_equal(ordered(found.loc[found["batch_id"] == same].reset_index(drop=True)), everything)
    assert found["correction"].sum() == done["corrected"]

    rows = pd.concat(parts)
    most = rows["id"].value_counts().index[0]
    old = rows.loc[rows["id"] == most].sort_values("at").head(1)
    pipeline.land(old.assign(at=old["at"] - pd.Timedelta("1h")))
    assert pipeline.stream().data["late"] == 1
    (refused,) = pipeline.warehouse.read("quarantine").collect()
    assert refused["reason"] == "late: older than the rows kept for replay"


def count_of(pipeline: Pipeline, table: str) -> int:
    """Return the number of rows of a table, which may not exist yet."""
    return pipeline.warehouse.read(table).count() if pipeline.warehouse.exists(table) else 0


@pytest.mark.soak
def test_waiting_rows_of_a_feed_that_has_ended_are_released(tmp_path: Path) -> None:
    order = {"kind": "strict", "delay": "8h", "patience": "15s"}
    pipeline = Pipeline(tmp_path, random_walk_spec(order=order))
    parts = delayed(random_rows(2), 3)
    pipeline.land(parts[0])
    pipeline.pretrain(to_version=0)
    pipeline.land(*parts[1:])
    rows = sum(map(len, parts))
    driver = Driver(pipeline, "stream", "--model", "walk", "--trigger", "1")
    driver.wait_for(lambda: count_of(pipeline, "estimates/walk") == rows)
    assert driver.terminate() == 0, driver.said()
    assert_bit_equal(pipeline.estimates(), pipeline.batch())
    exported = export.run(pipeline.settings, "walk").data
    assert exported["rows"] == rows and len(waiting(pipeline, exported["snapshot"])) == 0


@pytest.mark.soak
def test_keys_end_by_processing_time_without_new_rows(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(expiry={"after": "3s", "clock": "processing"}))
    days = random_rows(2)
    pipeline.land(days[0])
    pipeline.pretrain(to_version=0)
    keys = days[0]["id"].nunique()
    driver = Driver(pipeline, "stream", "--model", "walk", "--trigger", "1")
    driver.wait_for(lambda: count_of(pipeline, "archive/walk") == keys)
    assert driver.terminate() == 0, driver.said()
    assert export.run(pipeline.settings, "walk").data["keys"] == 0
    pipeline.land(days[1])
    done = pipeline.stream().data  # with `available-now` the run ends
    assert done["rows"] == len(days[1])
    assert done["batches"] <= 2  # the driver may have planned an empty one before it was stopped


@pytest.mark.soak
@pytest.mark.parametrize("changes", [STRICT], ids=["strict"])
def test_an_event_time_stream_is_bit_equal_after_kills_of_its_driver(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    kills = 6
    pipeline = Pipeline(tmp_path, random_walk_spec(**changes))
    parts = delayed(random_rows(4, rows=150), kills + 5)
    pipeline.land(*parts[:2])
    pipeline.pretrain()
    pipeline.land(*parts[2:])
    start, moments = newest(*parts[:2]) - DELAY, random.Random(1)
    checkpoint = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001")
    for batch in range(kills):
        driver = Driver(pipeline, "stream", "--model", "walk")
        driver.wait_for(lambda batch=batch: str(batch) in files(checkpoint / "offsets"))
        time.sleep(moments.uniform(0.0, 1.5))
        assert driver.process.poll() is None
        driver.kill(moments.random() < 0.5)
    assert pipeline.stream().data["late"] == 0
    assert_bit_equal(pipeline.estimates(), between(pipeline.batch(), start, newest(*parts) - DELAY))
