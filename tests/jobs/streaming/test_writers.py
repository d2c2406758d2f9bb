"""The table of estimates as files that the operator's tasks have written: for any reader, beside foreign commits."""

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
from jobs.core.errors import UserError
from jobs.storage.table_rows import UTC_MICROSECONDS
from jobs.storage.tables import estimates
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
def test_the_table_has_the_rows_of_a_batch_pass_and_says_what_is_in_its_files(tmp_path: Path) -> None:
    days = random_rows(5)
    pipeline = streamed(tmp_path, days)
    table = Path(pipeline.warehouse.path(estimates(pipeline.name)))
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))
    assert DeltaTable(str(table)).to_pyarrow_table().num_rows == len(pipeline.estimates())
    check_statistics(table)


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


def handed(pipeline: Pipeline) -> pd.DataFrame:
    found = pipeline.warehouse.spark.read.parquet(pipeline.warehouse.path("handed")).toPandas()
    for name in ("mean", "covariance"):
        found[name] = [tuple(one) for one in found[name]]
    return found.sort_values(["batch_id", "ordinal"], ignore_index=True)


@pytest.mark.slow
def test_every_sink_has_the_rows_of_the_table_in_the_same_places(tmp_path: Path) -> None:
    pipeline = replayed(tmp_path, site_rows(4))
    rows: Any = pipeline.warehouse.read(estimates("walk")).toPandas()
    for name in ("mean", "covariance"):
        rows[name] = [tuple(one) for one in rows[name]]
    assert bool(rows["correction"].any()) and set(rows["site"]) >= {'quo"te', "back\\slash"}
    assert [
        json.dumps([site, str(number)], ensure_ascii=False, separators=(",", ":"))
        for site, number in zip(rows["site"], rows["id"], strict=True)
    ] == rows["key"].to_list()
    by = ["batch_id", "key", "event_time", "correction", "log_likelihood"]
    given: Any = handed(pipeline).astype({"batch_id": "int64"})
    same = rows[[name for name in given.columns if name in rows.columns]]
    pd.testing.assert_frame_equal(
        given[list(same.columns)].sort_values(by=by, ignore_index=True),
        same.sort_values(by=by, ignore_index=True),
    )
    assert (given.groupby("batch_id")["ordinal"].nunique() == given.groupby("batch_id").size()).all()
    last = pipeline.warehouse.read("latest/walk").toPandas().set_index("key")
    newest = rows.sort_values(["event_time", "correction", "batch_id"]).groupby("key").last()
    newest = newest[newest.index.isin(last.index)]
    assert len(newest) and [tuple(last.loc[key, "mean"]) for key in newest.index] == newest["mean"].to_list()
    root = Path(pipeline.warehouse.root)
    assert several_types(root) == {}
    times = {pq.read_schema(path).field("event_time").type for path in root.glob("handed/*/*/part-*.parquet")}
    assert times == {UTC_MICROSECONDS}


@pytest.mark.slow
def test_maintenance_leaves_what_counts_and_a_table_that_asks_for_more_is_refused(tmp_path: Path) -> None:
    days = random_rows(5, rows=40)
    pipeline = streamed(tmp_path, days[:3])
    folder = Path(pipeline.warehouse.path(estimates("walk")))
    (old,) = [one["path"] for one in actions(folder, "add")][-1:]
    orphan = folder / old.replace("part-0", "part-9")
    shutil.copy(folder / old, orphan)  # as a killed attempt leaves it
    ago = time.time() - 30 * 24 * 3600
    os.utime(orphan, (ago, ago))
    maintain.run(pipeline.settings, "walk")
    assert not orphan.exists()
    sql = pipeline.warehouse.spark.sql
    sql(f"ALTER TABLE delta.`{folder}` ADD COLUMNS (note string)")
    pipeline.land(days[3])
    pipeline.stream()
    sql(f"ALTER TABLE delta.`{folder}` ADD CONSTRAINT certain CHECK (nis IS NULL OR nis >= 0)")
    pipeline.land(days[4])
    with pytest.raises(
        UserError, match="it has the constraint certain: ALTER TABLE ... DROP CONSTRAINT certain"
    ):
        pipeline.stream()
    sql(f"ALTER TABLE delta.`{folder}` DROP CONSTRAINT certain")
    pipeline.stream()
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
