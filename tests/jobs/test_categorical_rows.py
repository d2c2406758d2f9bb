"""Categorical mixtures through the verbs: learned by `pretrain`, the same bits in stream, batch and offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import filter as offline
from jobs.snapshots.learned import find_learned_parameters
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered, random_walk_spec, since

pytestmark = pytest.mark.spark

KIND: dict[str, Any] = {
    "filter": "categorical_mixture",
    "states": None,
    "process": None,
    "observation": None,
    "initial": None,
    "mixture": {"components": 2, "categories": [3, 2], "step": {"minimum": 0.02}, "batch": 2},
    "learn": {"parameters": ["weights", "probabilities"]},
}


def days(count: int, rows: int = 200) -> list[pd.DataFrame]:
    """Return a frame a day of two kinds of rows, with missing codes, and a few that are no codes."""
    rng = np.random.default_rng(0)
    found = []
    for day in range(count):
        kind = rng.random(rows) < 0.4
        a = np.where(
            kind, rng.choice(3, rows, p=[0.8, 0.1, 0.1]), rng.choice(3, rows, p=[0.1, 0.2, 0.7])
        ).astype(float)
        b = np.where(kind, rng.random(rows) < 0.9, rng.random(rows) < 0.2).astype(float)
        a[rng.random(rows) < 0.1] = np.nan
        b[rng.random(rows) < 0.1] = np.nan
        a[3] = 7.0
        minute = np.sort(rng.choice(24 * 60, rows, replace=False))
        at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(day * 24 * 60 + minute, "min")
        found.append(pd.DataFrame({"id": rng.integers(0, 20, rows), "at": at, "a": a, "b": b}))
    return found


@pytest.mark.slow
def test_stream_batch_and_file_give_the_same_bits(tmp_path: Path) -> None:
    spec = {name: value for name, value in random_walk_spec(**KIND).items() if value is not None}
    pipeline = Pipeline(tmp_path, spec)
    assert pipeline.spec.states == ["a_0", "a_1", "a_2", "b_0", "b_1"]
    frames = days(3)
    pipeline.land(frames[0])
    first = pipeline.pretrain()
    learned = find_learned_parameters(pipeline.settings.warehouse, pipeline.spec, first.data["snapshot"])
    assert np.shape(learned.parameters["probabilities"]) == (2, 5)
    pipeline.land(*frames[1:])
    assert pipeline.stream().data["rows"] == 400
    streamed = pipeline.estimates()
    assert_bit_equal(streamed, since(pipeline.batch(parameters=learned.parameters), frames[1]))
    pd.concat(frames).to_parquet(tmp_path / "all.parquet", index=False)
    options = {"snapshot": first.data["snapshot"]}
    offline.run(
        pipeline.settings, "walk", str(tmp_path / "all.parquet"), str(tmp_path / "out.parquet"), **options
    )
    found = pd.read_parquet(tmp_path / "out.parquet")
    found = found.rename(columns={"id": "key", "at": "event_time", "flag": "flags"})
    found["event_time"] = found["event_time"].dt.tz_localize(None)
    found = ordered(since(found, frames[1]).astype({"key": str}))
    compared = ("key", "event_time", "mean", "covariance", "log_likelihood", "nis")
    assert_bit_equal(ordered(streamed), found, compared)
    assert streamed["log_likelihood"].isna().sum() == 2  # a code that is none
    sums = np.array(streamed["mean"].to_list())
    np.testing.assert_allclose(sums[:, :3].sum(axis=1), 1.0, rtol=1e-12)
