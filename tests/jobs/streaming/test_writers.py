"""The two writers of estimates, Delta in Java and the tasks of the operator: the same table, for any reader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs.streaming.sinks.written_files import WRITER
from jobs.warehouse.tables import estimates
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

pytestmark = pytest.mark.spark


def actions(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the actions of a kind in a table's log, in order."""
    lines = [
        line
        for one in sorted((folder / "_delta_log").glob("*.json"))
        for line in one.read_text().splitlines()
    ]
    return [found[kind] for found in map(json.loads, lines) if kind in found]


def writers(folder: Path) -> list[str]:
    """Return who made each commit that added files."""
    return ["files" if "delta-rs" in one["engineInfo"] else "java" for one in actions(folder, "commitInfo")]


def streamed(folder: Path, days: list[pd.DataFrame]) -> Pipeline:
    """Return a pipeline whose stream has processed each day but the first in a run of its own."""
    pipeline = Pipeline(folder, random_walk_spec())
    first, *later = days
    pipeline.land(first)
    pipeline.pretrain()
    for rows in later:
        pipeline.land(rows)
        pipeline.stream()
    return pipeline


def test_the_tables_of_both_writers_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    days = random_rows(5)
    by_files = streamed(tmp_path / "files", days)
    monkeypatch.setenv(WRITER, "java")
    by_java = streamed(tmp_path / "java", days)
    tables = [Path(one.warehouse.path(estimates(one.name))) for one in (by_files, by_java)]
    assert writers(tables[0]) == ["java", *["files"] * 3]  # the first micro-batch makes the table
    assert writers(tables[1]) == ["java"] * 4
    assert_bit_equal(by_files.estimates(), since(by_files.batch(), days[1]))
    frames = [one.warehouse.read(estimates(one.name)) for one in (by_files, by_java)]
    assert frames[0].schema == frames[1].schema
    pd.testing.assert_frame_equal(by_files.estimates(), by_java.estimates(), check_exact=True)
    for folder in tables:
        read = DeltaTable(str(folder)).to_pyarrow_table()
        assert read.num_rows == len(by_java.estimates())
    check_statistics(tables[0])
    numbers = [[one["version"] for one in actions(folder, "txn")] for folder in tables]
    assert numbers[0] == numbers[1]


def check_statistics(folder: Path) -> None:
    """Compare the statistics of each file with its rows."""
    for add in actions(folder, "add"):
        said = json.loads(add["stats"])
        path = folder / add["path"]
        rows = pq.read_table(path).to_pandas()
        assert add["size"] == os.path.getsize(path)
        assert said["numRecords"] == len(rows)
        assert said["nullCount"] == {name: int(rows[name].isna().sum()) for name in said["nullCount"]}
        assert set(said["nullCount"]) == set(rows.columns)
        for name, least in said["minValues"].items():
            column, most = rows[name].dropna(), said["maxValues"][name]
            if name == "event_time":
                times = column.dt.tz_localize("UTC") if column.dt.tz is None else column
                assert pd.Timestamp(least) <= times.min() < pd.Timestamp(least) + pd.Timedelta("1ms")
                assert abs(times.max() - pd.Timestamp(most)) < pd.Timedelta("1ms")
            else:
                assert least == column.min() or str(column.min()).startswith(least)
                assert most == column.max() or most[:-1] == column.max()[:32]
        have = set(said["minValues"])
        assert {"key", "event_time", "log_likelihood", "nis", "batch_id", "generation"} <= have
