"""Files of a table by Arrow: their sizes, their statistics, and nothing left of one that could not be written."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.warehouse.part_files import PartFile, partition_of, write_parts


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def written(folder: Path, *batches: pa.RecordBatch, full: int = 1 << 28) -> list[PartFile]:
    return write_parts(folder, "part-00007-3.11", batches, full=full)


def test_statistics_bound_every_value_and_leave_out_what_json_cannot_say(tmp_path: Path) -> None:
    late = datetime(2024, 5, 1, 12, 0, 0, 123_456, UTC)
    (part,) = written(
        tmp_path / "new",
        batch(
            number=[3.5, None, -1.0],
            nan=[1.0, float("nan"), 2.0],
            endless=[1.0, float("inf"), 2.0],
            time=pa.array([late, late - timedelta(days=1), None], pa.timestamp("us", "UTC")),
            text=["b", "a", None],
            long=["x" * 40, "w" * 33, "y" * 33],
            nothing=pa.nulls(3, pa.string()),
            list=pa.array([[1.0], [2.0], None], pa.list_(pa.float64())),
            same=pa.DictionaryArray.from_arrays(pa.array([0, 0, 0]), pa.array(["g1"])),
            yes=[True, False, True],
        ),
    )
    said = json.loads(part.stats)
    assert said["numRecords"] == part.rows == 3
    assert said["minValues"] == {
        "number": -1.0,
        "time": "2024-04-30T12:00:00.123Z",
        "text": "a",
        "long": "w" * 32,
        "same": "g1",
        "yes": False,
    }
    assert said["maxValues"] == {
        "number": 3.5,
        "time": "2024-05-01T12:00:00.124Z",
        "text": "b",
        "long": "y" * 32 + "\U0010ffff",
        "same": "g1",
        "yes": True,
    }
    nulls = {"number": 1, "nan": 0, "endless": 0, "time": 1, "text": 1, "long": 0, "nothing": 3, "list": 1}
    assert said["nullCount"] == {**nulls, "same": 0, "yes": 0}
    file = tmp_path / "new" / part.path
    assert part.size == file.stat().st_size
    assert pq.read_schema(file).field("same").type == pa.string()
    assert PartFile.decode(part.encode()) == part
    assert partition_of(part.path) == 7


def test_a_full_file_is_followed_by_another_and_no_row_is_lost(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(6, 131_072))
    parts = written(tmp_path, *(batch(x=one) for one in values), full=2_000_000)
    assert len(parts) == 3 and len({one.path for one in parts}) == 3
    read = np.concatenate([pq.read_table(tmp_path / one.path)["x"].to_numpy() for one in parts])
    assert (read == values.ravel()).all()
    assert written(tmp_path, batch(x=[]), batch(x=[])) == []
    for one in parts:
        rows, said = pq.read_table(tmp_path / one.path)["x"].to_numpy(), json.loads(one.stats)
        assert (said["minValues"]["x"], said["maxValues"]["x"]) == (rows.min(), rows.max())


def test_nothing_is_left_of_a_file_whose_rows_end_in_an_error(tmp_path: Path) -> None:
    def rows() -> Any:
        yield batch(x=np.zeros(200_000))
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_parts(tmp_path, "part-00000", rows())
    assert list(tmp_path.iterdir()) == []
