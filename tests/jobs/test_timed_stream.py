"""Streams with a watermark, on Spark: what pretrain, stream, export and a new generation hand on is one batch pass."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import export, snapshots
from jobs.live import live_estimates
from tests.jobs.pipeline import Pipeline, assert_bit_equal, ordered, random_rows, random_walk_spec
from tests.jobs.processes import Driver, files

pytestmark = pytest.mark.spark

DELAY = pd.Timedelta("8h")
STRICT = {"order": {"kind": "strict", "delay": "8h"}}


def delayed(days: list[pd.DataFrame], parts: int, seed: int = 3) -> list[pd.DataFrame]:
    """Return rows in the order of their arrival, each up to `DELAY` after its event time, in so many parts."""
    rng = np.random.default_rng(seed)
    rows = pd.concat(days, ignore_index=True)
    arrival = rows["at"] + pd.to_timedelta(rng.uniform(0, DELAY.total_seconds(), len(rows)), "s")
    order = np.argsort(arrival.to_numpy(), kind="stable")
    return [rows.iloc[part].reset_index(drop=True) for part in np.array_split(order, parts)]


def newest(*parts: pd.DataFrame) -> pd.Timestamp:
    return max(part["at"].max() for part in parts).tz_localize(None)


def between(estimates: pd.DataFrame, first: pd.Timestamp, last: pd.Timestamp) -> pd.DataFrame:
    inside = (estimates["event_time"] >= first) & (estimates["event_time"] < last)
    return estimates.loc[inside].reset_index(drop=True)


def waiting(pipeline: Pipeline, snapshot: str) -> pd.DataFrame:
    rows = pipeline.warehouse.read("waiting").filter(f"snapshot_id = '{snapshot}'").toPandas()
    rows["measurement"] = [
        tuple(-9.0 if v is None or np.isnan(v) else v for v in m) for m in rows["measurement"]
    ]
    return rows[["key", "event_time", "measurement"]].sort_values(
        ["key", "event_time", "measurement"], ignore_index=True
    )


def test_rows_out_of_order_within_the_delay_are_one_batch_over_hand_overs(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(**STRICT))
    parts = delayed(random_rows(4, rows=80, text=True), 8)
    pipeline.land(*parts[:2])
    first = pipeline.pretrain().data["snapshot"]
    start = newest(*parts[:2]) - DELAY
    rows = pd.concat(parts[:2])
    held = rows["at"].dt.tz_localize(None) >= start
    assert len(waiting(pipeline, first)) == held.sum() > 0
    manifest = snapshots.find(pipeline.warehouse, first)
    assert manifest is not None and manifest.rows == len(rows) - held.sum()

    pipeline.land(*parts[2:5])
    done = pipeline.stream().data
    assert (done["batches"], done["late"]) == (3, 0)
    end = newest(*parts[:5]) - DELAY
    arrived = pd.concat(parts[:5])["at"].dt.tz_localize(None)
    assert done["waiting"] == (arrived >= end).sum() > 0
    assert_bit_equal(pipeline.estimates(), between(pipeline.batch(), start, end))

    # An export in the middle is the snapshot that batch gives there, waiting rows and all.
    exported = export.run(pipeline.settings, "walk", batch=1).data
    again = pipeline.pretrain(to_version=exported["version"]).data["snapshot"]
    pd.testing.assert_frame_equal(waiting(pipeline, exported["snapshot"]), waiting(pipeline, again))
    left, right = pipeline.snapshot(exported["snapshot"]), pipeline.snapshot(again)
    for name in ("key", "state_index", "event_time", "log_likelihood"):
        pd.testing.assert_series_equal(left[name], right[name], check_exact=True)
    for name in ("mean", "covariance"):
        np.testing.assert_array_equal(np.stack(left[name].to_list()), np.stack(right[name].to_list()))

    # A generation that begins there takes each waiting row once; a row beyond the delay goes to quarantine.
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


@pytest.mark.soak
@pytest.mark.parametrize("changes", [STRICT], ids=["strict"])
def test_a_timed_stream_whose_driver_is_killed_ends_as_if_it_had_not_been(
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
