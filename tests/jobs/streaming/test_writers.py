"""The two writers of estimates, Delta in Java and the tasks of the operator: the same table, for any reader."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from jobs import maintain
from jobs.storage.table_log import WRITER
from jobs.storage.table_rows import UTC_MICROSECONDS
from jobs.warehouse.tables import estimates
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.stored_types import several_types

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
    made = [one for one in actions(folder, "commitInfo") if one["operation"] == "WRITE"]
    return ["files" if "delta-rs" in one["engineInfo"] else "java" for one in made]


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


@pytest.mark.slow
def test_the_tables_of_both_writers_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    days = random_rows(5)
    monkeypatch.setenv(WRITER, "files")
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


def site_rows(days: int) -> list[pd.DataFrame]:
    """Return rows of keys of two columns, one of them a text that JSON must escape."""
    frames = random_rows(days, keys=12, rows=50, text=True)
    sites = ["plain", 'quo"te', "back\\slash", "brack]et,", "ü"]
    for frame in frames:
        frame["site"] = [
            sites[number % 5] for number in frame["id"].str.len() + frame["id"].str[4].astype(int)
        ]
        frame["id"] = frame["id"].str.extract(r"(\d+)", expand=False).astype("int32")
    return frames


def replayed(folder: Path, frames: list[pd.DataFrame]) -> Pipeline:
    """Return a pipeline whose stream replays late rows, refuses older ones, and has two more sinks."""
    spec = random_walk_spec(
        key=["site", "id"],
        order={"kind": "replay", "rows": 4},
        sinks={"latest": True, "files": {"folder": "handed", "format": "parquet"}},
    )
    pipeline = Pipeline(folder, spec)
    first, second, *later = frames
    pipeline.land(first)
    pipeline.pretrain()
    late = second.sample(10, random_state=1)
    pipeline.land(second.loc[~second.index.isin(late.index)])
    pipeline.stream()
    pipeline.land(late)
    pipeline.land(*later, first.head(3))
    pipeline.stream()
    return pipeline


def content(pipeline: Pipeline, table: str, by: list[str]) -> pd.DataFrame:
    found = pipeline.warehouse.read(table).toPandas()
    for name in found.columns:
        if name in ("mean", "covariance"):
            found[name] = [tuple(one) for one in found[name]]
    told = [name for name in ("source_range", "quarantined_at") if name in found] + ["id"] * (
        table == "quarantine"
    )
    return found.drop(columns=told).sort_values(by, ignore_index=True)


def handed(pipeline: Pipeline) -> pd.DataFrame:
    found = pipeline.warehouse.spark.read.parquet(pipeline.warehouse.path("handed")).toPandas()
    for name in ("mean", "covariance"):
        found[name] = [tuple(one) for one in found[name]]
    return found.sort_values(["batch_id", "ordinal"], ignore_index=True)


def test_every_sink_has_the_same_rows_in_the_same_places_by_either_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = site_rows(4)
    monkeypatch.setenv(WRITER, "files")
    by_files = replayed(tmp_path / "files", frames)
    monkeypatch.setenv(WRITER, "java")
    by_java = replayed(tmp_path / "java", frames)
    assert set(writers(Path(by_files.warehouse.path(estimates("walk"))))) == {"java", "files"}
    by = ["batch_id", "key", "event_time", "correction", "log_likelihood"]
    for table, order in ((estimates("walk"), by), ("latest/walk", ["key"]), ("quarantine", ["payload"])):
        found, wanted = (content(one, table, order) for one in (by_files, by_java))
        assert len(found) and list(found.columns) == list(wanted.columns)
        pd.testing.assert_frame_equal(found, wanted, check_exact=True)
    rows = content(by_files, estimates("walk"), by)
    assert bool(rows["correction"].any()) and set(rows["site"]) >= {'quo"te', "back\\slash"}
    pd.testing.assert_frame_equal(handed(by_files), handed(by_java), check_exact=True)
    for one in (by_files, by_java):
        root = Path(one.warehouse.root)
        assert several_types(root) == {}
        times = {
            pq.read_schema(path).field("event_time").type for path in root.glob("handed/*/*/part-*.parquet")
        }
        assert times == {UTC_MICROSECONDS}


def test_both_kinds_of_commit_go_on_after_each_other_and_maintenance_leaves_only_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = random_rows(6, rows=40)
    monkeypatch.setenv(WRITER, "files")
    pipeline = streamed(tmp_path, days[:3])
    folder = Path(pipeline.warehouse.path(estimates("walk")))
    (old,) = [one["path"] for one in actions(folder, "add")][-1:]
    orphan = folder / old.replace("part-0", "part-9")
    shutil.copy(folder / old, orphan)  # as a killed attempt leaves it
    ago = time.time() - 30 * 24 * 3600
    os.utime(orphan, (ago, ago))
    monkeypatch.setenv(WRITER, "java")
    pipeline.land(days[3])
    pipeline.stream()
    maintain.run(pipeline.settings, "walk")
    assert not orphan.exists() and (folder / old).exists()
    monkeypatch.setenv(WRITER, "files")
    pipeline.warehouse.spark.sql(f"ALTER TABLE delta.`{folder}` ADD COLUMNS (note string)")
    pipeline.land(days[4])
    pipeline.stream()
    # A table that asks more of its writers is left to Java.
    pipeline.warehouse.spark.sql(
        f"ALTER TABLE delta.`{folder}` SET TBLPROPERTIES (delta.enableChangeDataFeed = true)"
    )
    pipeline.land(days[5])
    pipeline.stream()
    made = [
        one["engineInfo"].split("/")[0]
        for one in actions(folder, "commitInfo")
        if one["operation"] == "WRITE"
    ]
    assert ["delta-rs" in one for one in made] == [False, True, False, True, False]
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))


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
