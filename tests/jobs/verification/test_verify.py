"""Verification of a live stream: whole ones are equal to the bit, and every kind of damage is found and named."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from jobs import export, verify
from jobs.core.report import Report
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark


def verified(pipeline: Pipeline, **options: Any) -> Report:
    return verify.run(pipeline.settings, pipeline.name, **{"share": "100%", **options})


def late_rows(days: list[pd.DataFrame]) -> pd.DataFrame:
    """Return some rows of an earlier day, changed, which a stream refuses as late."""
    return days[0].head(20).assign(a=lambda rows: rows["a"] + 1.0)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return a pipeline whose chain has two generations: pretrained, streamed, exported, adopted, streamed."""
    days = random_rows(5, keys=30, rows=100)
    pipeline = Pipeline(tmp_path_factory.mktemp("verify") / "walk", random_walk_spec())
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1], days[2])
    pipeline.stream()
    snapshot = export.run(pipeline.settings, pipeline.name).data["snapshot"]
    pipeline.land(late_rows(days))
    pipeline.land(days[3])
    pipeline.stream(adopt=snapshot)
    pipeline.land(days[4])
    pipeline.stream()
    return pipeline


def test_a_stream_is_equal_to_the_bit(streamed: Pipeline) -> None:
    report = verified(streamed)
    assert report.data["not_verified"] == []
    assert report.data["outcome"] == "equal", report.data
    counts = report.data["counts"]
    estimates = streamed.estimates()
    assert counts["equal"] == len(estimates)
    assert counts["landed"] == counts["rows"] == len(estimates) + counts["refused"]
    assert counts["refused"] > 0
    print(report.lines)
