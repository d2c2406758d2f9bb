"""Rows counted by what a log says: what a job would count, or no answer. No Spark."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.batch.batch_filter import Interval
from jobs.batch.history_rows import CountedRows, HistoryCounts, count_by_log
from jobs.spark.warehouse import Warehouse

START = datetime(2024, 3, 1, tzinfo=UTC)
FIRST = int(START.timestamp()) * 1_000_000
HOUR = 3_600_000_000
ALL = CountedRows(Interval(None, None), None)
TIME = pa.timestamp("us", "UTC")


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


def by_job(table: pa.Table, wanted: CountedRows) -> HistoryCounts:
    """Return what a look at each row counts."""
    first, last = wanted.interval
    times = table.column("at").cast(pa.int64()).to_numpy()
    read = np.ones(len(times), bool) if last is None else times < last
    if wanted.since is not None:
        read &= times >= wanted.since
    inside = read if first is None else read & (times >= first)
    return HistoryCounts(int(inside.sum()), int((read & ~inside).sum()), 0, 0)


WANTED = [
    CountedRows(Interval(first, last), since)
    for first in (None, FIRST - 1, FIRST, FIRST + 4 * HOUR, FIRST + 9 * HOUR + 1)
    for last in (None, FIRST, FIRST + 9 * HOUR, FIRST + 9 * HOUR + 1)
    for since in (None, FIRST, FIRST + 9 * HOUR + 1)
]


@pytest.mark.parametrize("wanted", WANTED)
def test_the_log_counts_what_a_look_at_each_row_counts(tmp_path: Path, wanted: CountedRows) -> None:
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
    assert count_by_log(warehouse, "t", 0, "at", ALL) == HistoryCounts(10, 0, 0, 0)
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
