"""The invariant: history in batch, then the rest in a stream, is one pass over everything, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("tasks_of_spark")]


@pytest.mark.core
def test_pretrain_then_stream_is_one_batch_over_everything(tmp_path: Path) -> None:
    days, spec = random_rows(4, text=True), random_walk_spec(initial={"diffuse": True})
    pipeline = Pipeline(tmp_path, spec)
    pipeline.land(*days[:2])
    first = pipeline.pretrain()
    began = pipeline.stream().data
    assert began["began"] and began["batches"] == 0  # it waits
    pipeline.land(days[2])
    assert pipeline.stream().data["rows"] == len(days[2])
    pipeline.land(days[3])
    done = pipeline.stream().data  # resumes
    assert (done["batches"], done["began"], done["generation"]) == (1, False, began["generation"])

    everything = pipeline.batch()
    streamed = pipeline.estimates()
    later = since(everything, days[2])
    assert_bit_equal(streamed, later)

    # The state at the end, too: a snapshot of everything ends where the stream ended.
    final = pipeline.snapshot(pipeline.pretrain().data["snapshot"])
    last = pd.concat([pipeline.snapshot(first.data["snapshot"]), streamed]).groupby("key").last()
    assert sorted(last.index) == sorted(final["key"])
    for key, mean in zip(final["key"], final["mean"], strict=True):
        np.testing.assert_array_equal(mean, last["mean"][key])


@pytest.mark.slow
def test_a_stream_from_a_snapshot_of_nothing_is_one_batch_over_everything(tmp_path: Path) -> None:
    days = random_rows(3, text=True)
    pipeline = Pipeline(tmp_path, random_walk_spec(initial={"diffuse": True}))
    pipeline.land(days[0])
    assert pipeline.pretrain(to_version=0).data["keys"] == 0
    pipeline.land(*days[1:])
    pipeline.stream()
    assert_bit_equal(pipeline.estimates(), pipeline.batch())


@pytest.mark.core
def test_the_offline_command_gives_the_same_bits(tmp_path: Path) -> None:
    from jobs import filter as offline

    days = random_rows(2, text=True)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(*days)
    rows = tmp_path / "all.parquet"
    pd.concat(days).to_parquet(rows, index=False)
    offline.run(pipeline.settings, "walk", str(rows), str(tmp_path / "out.parquet"))
    found = pd.read_parquet(tmp_path / "out.parquet")
    found = found.rename(columns={"id": "key", "at": "event_time", "flag": "flags"})
    found["event_time"] = found["event_time"].dt.tz_localize(None)
    for name in ("mean", "covariance"):
        found[name] = [tuple(value) for value in found[name]]
    found = found.sort_values(["key", "event_time", "log_likelihood", "mean"], ignore_index=True)
    assert_bit_equal(found, pipeline.batch())


@pytest.mark.slow
def test_several_key_columns_and_a_snapshot_pinned_while_newer_ones_arrive(tmp_path: Path) -> None:
    days = [
        frame.assign(site=np.where(frame["id"] % 2 == 0, "east", 'we,st "x"')) for frame in random_rows(4)
    ]
    pipeline = Pipeline(tmp_path, random_walk_spec(key=["site", "id"]))
    pipeline.land(*days[:2])
    first = pipeline.pretrain().data["snapshot"]
    pipeline.land(days[2])
    began = pipeline.stream()
    assert began.data["snapshot"] == first
    newer = pipeline.pretrain().data["snapshot"]
    assert newer != first
    pipeline.land(days[3])
    went_on = pipeline.stream()  # the live generation goes on; the newer snapshot does not replace its state
    assert went_on.data["generation"] == began.data["generation"]
    everything = pipeline.batch()
    later = since(everything, days[2])
    assert_bit_equal(pipeline.estimates(), later)
    assert set(pipeline.estimates()["site"]) == {"east", 'we,st "x"'}

    adopted = pipeline.stream(adopt=newer)
    assert adopted.data["began"]
    assert adopted.data["generation"] != began.data["generation"]
    day = since(everything, days[3])
    assert_bit_equal(pipeline.estimates(adopted.data["generation"]), day)
    again = pipeline.stream(adopt=newer)  # adopting it again goes on with it
    assert again.data["generation"] == adopted.data["generation"]
