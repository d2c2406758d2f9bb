"""Few rows are learned, filtered and estimated without Spark: the same tables and reports, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from deltalake import DeltaTable

from jobs import estimate
from jobs.snapshots import manifests
from tests.jobs.support.pipeline import Pipeline

pytestmark = pytest.mark.spark

LEARNING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "by key": {"learn": {"parameters": ["variance", "R"], "scope": "key"}},
    "by key in groups": {"learn": {"parameters": ["variance", "R"], "scope": "key", "by": ["region"]}},
    "pooled": {"learn": {"parameters": ["variance", "R"]}},
    "by group": {"learn": {"parameters": ["variance", "R"], "scope": "group", "by": ["region"]}},
    "robust, by key": {
        "robust": {"student_t": {"degrees": 5.0}},
        "learn": {"parameters": ["variance", "R"], "scope": "key"},
    },
}
TABLES = {
    "snapshots": ["key"],
    "learned": ["scope", "key_group", "key"],
    "estimates_history/level": ["key", "event_time"],
    "estimated": ["key", "event_time"],
}


def build_rows() -> pd.DataFrame:
    """Return rows of 40 keys of unequal lengths, some of them missing, with keys in need of escapes."""
    rng = np.random.default_rng(3)
    frames = []
    for k, length in enumerate(rng.integers(1, 80, 40).tolist()):
        y = np.cumsum(rng.normal(size=length)) + rng.normal(size=length)
        y[rng.random(length) < 0.1] = np.nan
        at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(np.arange(length), "min")
        region = 'no"rth' if k % 2 else "süd"
        frames.append(pd.DataFrame({"region": region, "id": k, "at": at.as_unit("us"), "y": y}))
    return pd.concat(frames).sample(frac=1.0, random_state=1)


def read_rows(pipeline: Pipeline, table: str, by: list[str]) -> list[str]:
    """Return a table's rows as texts, in an order of their own; `repr` tells every bit of a number."""
    path = Path(pipeline.settings.warehouse, table)
    if not path.exists():
        return []
    rows = DeltaTable(str(path)).to_pyarrow_table().to_pylist()
    return sorted(map(repr, sorted(rows, key=lambda row: [str(row[name]) for name in by])))


@pytest.mark.parametrize("learning", LEARNING)
def test_few_rows_are_pretrained_without_spark_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learning: str
) -> None:
    spec = {
        "name": "level",
        "version": 1,
        "key": ["region", "id"],
        "time": "at",
        "time_unit": "minute",
        "measurement": ["y"],
        "states": ["level"],
        "process": {"kind": "random_walk", "variance": 0.5},
        "observation": {"R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[10.0]]},
        "stream": {"partitions": 2},
        **LEARNING[learning],
    }
    begun = Pipeline(tmp_path / "here", spec)
    begun.land(build_rows())
    there = begun.copied(tmp_path / "there")

    def refuse(*given: Any) -> Any:
        raise AssertionError("Spark starts")

    with monkeypatch.context() as patched:
        patched.setattr("jobs.spark.session.spark_session", refuse)
        report = begun.pretrain(estimates=True).data
        again = begun.pretrain(estimates=True).data
        estimated = estimate.run(begun.settings, "level", output="estimated", smooth=True).data
    assert report["made"] and not again["made"] and again["learned"] == report["learned"]
    monkeypatch.setattr("jobs.batch.file_rows.FEW_ROWS", 0)
    expected = there.pretrain(estimates=True).data
    wanted = estimate.run(there.settings, "level", output="estimated", smooth=True).data
    assert {**estimated, "seconds": 0} == {**wanted, "seconds": 0}
    for table, by in TABLES.items():
        found = read_rows(begun, table, by)
        assert found == read_rows(there, table, by)
        assert found or (table == "learned" and learning == "nothing")
    assert {**report, "seconds": 0} == {**expected, "seconds": 0}
    one, other = (manifests.find(each.tables, report["snapshot"]) for each in (begun, there))
    assert one is not None and other is not None
    assert (one.checksum, one.key_count, one.rows) == (other.checksum, other.key_count, other.rows)
    assert {**(one.learned or {}), "version": 0} == {**(other.learned or {}), "version": 0}
