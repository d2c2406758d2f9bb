"""The records of the micro-batches of a model, in its table and in files. No Spark."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from jobs.storage.warehouse import Tables
from jobs.supervision.progress import read_all_records

BEGAN = datetime(2024, 1, 1, tzinfo=UTC)


def test_micro_batches_of_the_table_and_of_the_files_are_in_one_order(tmp_path: Path) -> None:
    """The table has the lines of files that no driver writes to any more; its times come without their zone."""
    times = [BEGAN + timedelta(seconds=5 * batch) for batch in range(4)]
    rows = {
        "generation": ["walk-g0001"] * 2,
        "batch_id": pa.array([0, 1], pa.int64()),
        "started_at": pa.array(times[:2], pa.timestamp("us", "UTC")),
    }
    write_deltalake(str(tmp_path / "progress" / "walk"), pa.table(rows))
    files = tmp_path / "_progress" / "walk"
    files.mkdir(parents=True)
    lines = [
        {
            "generation": "walk-g0001",
            "batch_id": batch,
            "started_at": f"{times[batch]:%Y-%m-%dT%H:%M:%S}.000Z",
        }
        for batch in (3, 2)
    ]
    (files / "walk-g0001.000001.000002.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_all_records(Tables(str(tmp_path)), "walk")
    assert [one["batch_id"] for one in found] == [0, 1, 2, 3]
    assert [one["started_at"] for one in found] == times
    assert max(times) - found[0]["started_at"] == timedelta(seconds=15)
