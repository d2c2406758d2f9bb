"""Rows counted by what their files say: what a job would count, or no answer. No Spark."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from jobs.history.counting import MOST_FILES, Counts, Wanted, count_by_ends, count_by_log
from jobs.history.source import Interval
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from tests.jobs.support.pipeline import random_walk_spec

START = datetime(2024, 3, 1, tzinfo=UTC)
FIRST = int(START.timestamp()) * 1_000_000
HOUR = 3_600_000_000
ALL = Wanted(Interval(None, None), None)
TIME = pa.timestamp("us", "UTC")


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(random_walk_spec(**changes))


def rows(hours: int = 10, **columns: Any) -> pa.Table:
    """Return rows of one key, an hour apart."""
    times = [START + timedelta(hours=i) for i in range(hours)]
    made: dict[str, Any] = {
        "id": pa.array(range(hours), pa.int64()),
        "at": pa.array(times, TIME),
        "a": pa.array(np.arange(hours, dtype=float)),
        "b": pa.array(range(hours), pa.int16()),
    }
    return pa.table({**made, **columns})


def files(folder: Path, *tables: pa.Table, **options: Any) -> list[str]:
    """Write tables as files, one each; return their paths as Hadoop has them."""
    paths = [folder / f"{i} %20.parquet" for i in range(len(tables))]
    for table, path in zip(tables, paths, strict=True):
        pq.write_table(table, path, **options)
    return [f"file:{path}" for path in paths]


def by_job(table: pa.Table, wanted: Wanted) -> Counts:
    """Return what a look at each row counts."""
    first, last = wanted.interval
    times = table.column("at").cast(pa.int64()).to_numpy()
    read = np.ones(len(times), bool) if last is None else times < last
    if wanted.since is not None:
        read &= times >= wanted.since
    inside = read if first is None else read & (times >= first)
    return Counts(int(inside.sum()), int((read & ~inside).sum()), 0, 0)


WANTED = [
    Wanted(Interval(first, last), since)
    for first in (None, FIRST - 1, FIRST, FIRST + 4 * HOUR, FIRST + 9 * HOUR + 1)
    for last in (None, FIRST, FIRST + 9 * HOUR, FIRST + 9 * HOUR + 1)
    for since in (None, FIRST, FIRST + 9 * HOUR + 1)
]


@pytest.mark.parametrize("wanted", WANTED)
def test_the_ends_of_files_count_what_a_look_at_each_row_counts(tmp_path: Path, wanted: Wanted) -> None:
    table = rows()
    found = count_by_ends(files(tmp_path, table), spec(), wanted)
    place = wanted.place(FIRST, FIRST + 9 * HOUR)
    assert (found is None) == (place is None)
    if found is not None:
        assert found == by_job(table, wanted)
    # A row group of one row lies on one side of each end.
    assert count_by_ends(files(tmp_path, table, row_group_size=1), spec(), wanted) == by_job(table, wanted)


NAN_AND_NULL = pa.array([1.0, float("nan"), None, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


def test_missing_measurements_fit(tmp_path: Path) -> None:
    for column in (NAN_AND_NULL, pa.nulls(10, pa.float64()), pa.array(range(10), pa.int32())):
        assert count_by_ends(files(tmp_path, rows(a=column)), spec(), ALL) == Counts(10, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("id", pa.array([None, *range(9)], pa.int64())),
        ("at", pa.array([None, *[START] * 9], TIME)),
        ("at", pa.array([START.replace(tzinfo=None)] * 10, pa.timestamp("us"))),
        ("at", pa.array([START.date()] * 10, pa.date32())),
        ("a", pa.array([np.inf, *range(9)], pa.float64())),
        ("a", pa.array([-np.inf, np.nan, *range(8)], pa.float64())),
        ("a", pa.array([np.nan] * 10, pa.float64())),
    ],
)
def test_rows_that_may_not_fit_are_counted_by_a_job(tmp_path: Path, name: str, column: pa.Array) -> None:
    assert count_by_ends(files(tmp_path, rows(**{name: column})), spec(), ALL) is None


def test_a_control_of_floats_is_counted_by_a_job_as_their_bounds_leave_nan_out(tmp_path: Path) -> None:
    steered = spec(control=["u"], process={"kind": "explicit", "F": [[1]], "Q": [[1]], "B": [[1]]})
    floats, integers = pa.array(np.ones(10)), pa.array(range(10), pa.int64())
    assert count_by_ends(files(tmp_path, rows(u=floats)), steered, ALL) is None
    assert count_by_ends(files(tmp_path, rows(u=integers)), steered, ALL) == Counts(10, 0, 0, 0)


def test_files_that_tell_nothing_are_counted_by_a_job(tmp_path: Path) -> None:
    good = files(tmp_path, rows())
    assert count_by_ends(files(tmp_path, rows(), write_statistics=False), spec(), ALL) is None
    assert count_by_ends(files(tmp_path, rows().drop_columns("a")), spec(), ALL) is None
    assert count_by_ends([f"file:{tmp_path / 'gone'}"], spec(), ALL) is None
    assert count_by_ends(["s3a://bucket/rows.parquet"], spec(), ALL) is None
    assert count_by_ends(good * (MOST_FILES + 1), spec(), ALL) is None
    (tmp_path / "cut").write_bytes(b"PAR1 and no end")
    assert count_by_ends([str(tmp_path / "cut")], spec(), ALL) is None


@pytest.mark.parametrize("wanted", WANTED)
def test_the_log_counts_what_a_look_at_each_row_counts(tmp_path: Path, wanted: Wanted) -> None:
    table = rows()
    for i in range(0, 10, 5):
        write_deltalake(tmp_path / "t", table.slice(i, 5), mode="append")
    _round_down(tmp_path / "t")
    write_deltalake(tmp_path / "t", table, mode="append")
    spark: Any = None  # what is tested needs none
    found = count_by_log(Warehouse(spark, str(tmp_path)), "t", 1, "at", wanted)
    # The log's bounds are of whole milliseconds, so an end within that after a bound is not known to be one.
    places = [wanted.place(FIRST + a * HOUR, FIRST + b * HOUR + 999) for a, b in ((0, 4), (5, 9))]
    assert (found is None) == (None in places)
    if found is not None:
        assert found == by_job(table, wanted)


def test_a_log_without_numbers_of_rows_or_with_features_does_not_tell(tmp_path: Path) -> None:
    spark: Any = None
    warehouse = Warehouse(spark, str(tmp_path))
    write_deltalake(tmp_path / "t", rows())
    assert count_by_log(warehouse, "t", 0, "at", ALL) == Counts(10, 0, 0, 0)
    assert count_by_log(warehouse, "none", 0, "at", ALL) is None
    assert count_by_log(warehouse, "t", 7, "at", ALL) is None
    log = tmp_path / "t" / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for change in ("protocol", "add"):
        changed = json.loads(json.dumps(actions))
        for one in changed:
            if change == "protocol" and "protocol" in one:
                one["protocol"] = {
                    "minReaderVersion": 3,
                    "minWriterVersion": 7,
                    "readerFeatures": ["deletionVectors"],
                    "writerFeatures": ["deletionVectors"],
                }
            if change == "add" and "add" in one:
                one["add"]["stats"] = "{}"
        log.write_text("\n".join(map(json.dumps, changed)))
        assert count_by_log(warehouse, "t", 0, "at", ALL) is None


def _round_down(folder: Path) -> None:
    """Write the upper bounds of a log's files as Delta in Java does, the part below milliseconds cut off."""
    for log in (folder / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in log.read_text().splitlines()]
        for one in actions:
            if "add" in one:
                stats = json.loads(one["add"]["stats"])
                for side in ("minValues", "maxValues"):
                    text = stats[side]["at"].rstrip("Z")
                    at = datetime.fromisoformat(text).replace(tzinfo=None)
                    stats[side]["at"] = f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"
                one["add"]["stats"] = json.dumps(stats)
        log.write_text("\n".join(map(json.dumps, actions)))
