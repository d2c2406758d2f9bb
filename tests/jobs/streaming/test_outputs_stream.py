"""What `outputs` asks for, in stream, batch and offline alike; restarts, and options that are switched on and off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import filter as offline
from jobs import upgrade, verify
from jobs.core.errors import UserError
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
    streaming,
)

ALL = {
    "innovation": True,
    "measured": True,
    "residual": True,
    "matrices": ["F", "H", "Q", "R"],
    "state_index": True,
}
LISTS = ("innovation", "measured", "residual", "residual_covariance", *(f"system_{name}" for name in "FHQR"))
DAYS = random_rows(4)


def same_outputs(found: pd.DataFrame, wanted: pd.DataFrame, more: tuple[str, ...] = ()) -> None:
    """Check that two sets of estimates, in order, have the same outputs to the bit."""
    assert_bit_equal(found, wanted, ["key", "event_time", "state_index", *more])
    for name in LISTS:
        for a, b in zip(found[name], wanted[name], strict=True):
            np.testing.assert_array_equal(np.asarray(a, float), np.asarray(b, float), err_msg=name)


def alone(pipeline: Pipeline, *frames: pd.DataFrame) -> pd.DataFrame:
    """Return what `filter` writes for these rows, as estimates are ordered."""
    rows, out = pipeline.folder / "rows.parquet", pipeline.folder / "filtered.parquet"
    pd.concat(frames).to_parquet(rows, index=False)
    offline.run(pipeline.settings, pipeline.name, str(rows), str(out))
    found = pd.read_parquet(out).rename(columns={"id": "key", "at": "event_time"}).astype({"key": str})
    found["event_time"] = found["event_time"].dt.tz_localize(None)
    return ordered(found)


@pytest.mark.slow
@pytest.mark.spark
def test_stream_batch_and_offline_give_the_same_outputs_and_a_restart_goes_on_with_them(
    tmp_path: Path,
) -> None:
    asked = {**ALL, "sliding_log_likelihood": 3}
    pipeline = Pipeline(tmp_path, random_walk_spec(outputs=asked, sinks={"latest": True}))
    pipeline.land(DAYS[0])
    pipeline.pretrain()
    for day in DAYS[1:3]:  # a start of the stream for each
        pipeline.land(day)
        pipeline.stream()
    found = pipeline.estimates()
    batch = since(pipeline.batch(), DAYS[1])
    file = since(alone(pipeline, *DAYS[:3]), DAYS[1])
    same_outputs(found, batch, ("sliding_log_likelihood", "mean", "covariance"))
    same_outputs(found, file, ("sliding_log_likelihood", "mean", "covariance"))
    assert found["sliding_log_likelihood"].notna().sum() > 50
    assert found["state_index"].dtype == np.int64
    every: Any = pd.concat(DAYS[:3])
    counts = every.groupby("id").size()
    newest: Any = found.groupby("key")["state_index"].max().to_dict()
    assert {int(key): int(index) for key, index in newest.items()} == {
        key: counts[key] for key in {*DAYS[1]["id"], *DAYS[2]["id"]}
    }
    latest = pipeline.warehouse.read(f"latest/{pipeline.name}").toPandas()
    assert dict(zip(latest["key"].astype(int), latest["state_index"], strict=True)) == dict(counts)
    checked = verify.run(pipeline.settings, pipeline.name, share="100%")
    assert checked.data["differences"] == 0 and checked.data["counts"]["equal"] == len(found), checked.data


@pytest.mark.spark
@pytest.mark.slow
def test_outputs_may_be_switched_between_two_starts_and_the_window_with_a_new_version(tmp_path: Path) -> None:
    pipeline = streaming(tmp_path, DAYS[0], DAYS[1])
    pipeline.write_spec(random_walk_spec(outputs=ALL))
    pipeline.land(DAYS[2])
    pipeline.stream()
    found = pipeline.estimates()
    later = since(found, DAYS[2])
    assert found["state_index"].isna().sum() == len(DAYS[1]) and found["residual"].isna().sum() == len(
        DAYS[1]
    )
    same_outputs(later, since(pipeline.batch(), DAYS[2]))

    pipeline.write_spec(random_walk_spec(outputs={"sliding_log_likelihood": 2}))
    with pytest.raises(UserError, match=r"outputs\.sliding_log_likelihood"):
        pipeline.stream()
    pipeline.write_spec(
        random_walk_spec(version=2, outputs={"sliding_log_likelihood": 2, "state_index": True})
    )
    upgrade.run(pipeline.settings, pipeline.name, mode="stop-start")
    pipeline.land(DAYS[3])
    pipeline.stream()
    newest, batch = since(pipeline.estimates(), DAYS[3]), since(pipeline.batch(), DAYS[3])
    assert set(newest["model_version"]) == {2}
    assert_bit_equal(newest, batch, ["key", "event_time", "mean", "covariance", "state_index"])
    # The window begins with the hand-over: its first sum is at the second measured row after it.
    rows = DAYS[3].assign(missing=DAYS[3][["a", "b"]].isna().all(axis=1)).sort_values(["at", "missing"])
    full = (~rows["missing"]).groupby(rows["id"]).cumsum() >= 2
    known = newest["sliding_log_likelihood"].notna()
    assert 0 < known.sum() == full.sum() < batch["sliding_log_likelihood"].notna().sum()
    assert (newest["sliding_log_likelihood"][known] == batch["sliding_log_likelihood"][known]).all()
