"""The invariant: history in batch, then the rest in a stream, is one pass over everything, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = pytest.mark.spark

INITIALS = {
    "proper": {"mean": [0.0, 0.0], "covariance": [[10.0, 0.0], [0.0, 1.0]]},
    "diffuse": {"diffuse": True},
}


@pytest.mark.core
@pytest.mark.parametrize(
    ("text", "initial"), [pytest.param(False, "proper", marks=pytest.mark.slow), (True, "diffuse")]
)
def test_pretrain_then_stream_is_one_batch_over_everything(tmp_path: Path, text: bool, initial: str) -> None:
    days = random_rows(6, text=text)
    split = Pipeline(tmp_path / "split", random_walk_spec(initial=INITIALS[initial]))
    split.land(*days[:3])
    first = split.pretrain()
    split.land(days[3])
    split.stream()
    split.land(*days[4:])
    done = split.stream()  # resumes
    assert done.data["batches"] == 2
    assert not done.data["began"]

    everything = split.batch()
    streamed = split.estimates()
    later = since(everything, days[3])
    assert_bit_equal(streamed, later)

    # The state at the end, too: a snapshot of everything ends where the stream ended.
    final = split.snapshot(split.pretrain().data["snapshot"])
    last = pd.concat([split.snapshot(first.data["snapshot"]), streamed]).groupby("key").last()
    assert sorted(last.index) == sorted(final["key"])
    for key, mean in zip(final["key"], final["mean"], strict=True):
        np.testing.assert_array_equal(mean, last["mean"][key])

    # And one stream over everything, from a snapshot of nothing.
    whole = Pipeline(tmp_path / "whole", random_walk_spec(initial=INITIALS[initial]))
    whole.land(days[0])
    assert whole.pretrain(to_version=0).data["keys"] == 0
    whole.land(*days[1:])
    whole.stream()
    assert_bit_equal(whole.estimates(), everything)


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


def test_a_caught_up_source_waits_and_counts_nothing_twice(tmp_path: Path) -> None:
    days = random_rows(2)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(days[0])
    pipeline.pretrain()
    began = pipeline.stream()
    assert began.data["batches"] == 0
    again = pipeline.stream()
    assert (again.data["batches"], again.data["generation"]) == (0, began.data["generation"])
    pipeline.land(days[1])
    assert pipeline.stream().data["rows"] == len(days[1])
    assert len(pipeline.estimates()) == len(days[1])
