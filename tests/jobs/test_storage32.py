"""A state kept in 32 bits goes through pretrain, stream and export as through the offline command, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jobs import export
from jobs import filter as filter_command
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark

NUMBERS = ("mean", "covariance", "log_likelihood", "nis")


def numbers(frame: pd.DataFrame, name: str) -> np.ndarray:
    return np.array(frame[name].tolist(), float)


def test_a_state_of_32_bits_is_the_offline_commands(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(storage={"dtype": "float32"}))
    days = [day.drop_duplicates(["id", "at"]) for day in random_rows(3, rows=60)]
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(*days[1:])
    pipeline.stream()
    identity = export.run(pipeline.settings, "walk").data["snapshot"]

    pd.concat(days).to_parquet(tmp_path / "all.parquet", index=False)
    output = tmp_path / "out.parquet"
    filter_command.run(pipeline.settings, "walk", str(tmp_path / "all.parquet"), str(output))
    offline = pd.read_parquet(output).sort_values(["id", "at"], ignore_index=True)
    offline["key"] = offline["id"].astype(str)
    offline["event_time"] = offline["at"].dt.tz_convert(None).astype("datetime64[us]")

    streamed = pipeline.estimates()
    streamed["event_time"] = streamed["event_time"].astype("datetime64[us]")
    both = streamed.merge(offline, on=["key", "event_time"], suffixes=("", "_offline"))
    assert len(both) == len(streamed) == len(days[1]) + len(days[2])
    for name in NUMBERS:
        np.testing.assert_array_equal(numbers(both, name), numbers(both, f"{name}_offline"), err_msg=name)
    mean = numbers(both, "mean")
    np.testing.assert_array_equal(mean, mean.astype(np.float32))

    exported = pipeline.snapshot(identity)
    last = offline.groupby("key").tail(1).set_index("key").loc[exported["key"].astype(str)]
    for name in ("mean", "covariance"):
        np.testing.assert_array_equal(numbers(exported, name), numbers(last, name), err_msg=name)
