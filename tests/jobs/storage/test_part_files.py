"""Files of a table by Arrow: their sizes, their statistics, and nothing left of one that could not be written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.storage.files import open_files
from jobs.storage.part_files import PartFile, parse_partition, remove_of, write_parts


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def written(folder: Path, *batches: pa.RecordBatch, full: int = 1 << 28) -> list[PartFile]:
    return write_parts(str(folder), "part-00007-3.11", batches, full=full)


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
    assert parse_partition(part.path) == 7


def test_a_text_that_no_prefix_bounds_has_no_bounds(tmp_path: Path) -> None:
    last = "\U0010ffff"
    (part,) = written(tmp_path, batch(x=[1], text=["a" * 32 + last + "b"], short=["a" * 31 + last]))
    said = json.loads(part.stats)
    assert said["minValues"] == {"x": 1, "short": "a" * 31 + last} == said["maxValues"]


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


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.timestamp("us", "UTC"), 253_402_300_799_999_999),  # 9999-12-31T23:59:59.999999
        (pa.timestamp("us", "UTC"), 253_402_300_800_000_000),
        (pa.timestamp("us", "UTC"), -62_135_596_800_000_001),
        (pa.date32(), 2_932_897),  # 10000-01-01
        (pa.date32(), -719_163),  # the last day before year 1
    ],
)
def test_times_beyond_those_that_python_holds_have_no_bounds(
    tmp_path: Path, kind: pa.DataType, value: int
) -> None:
    size = pa.int64() if pa.types.is_timestamp(kind) else pa.int32()
    (part,) = written(tmp_path, batch(x=[1, 2], at=pa.array([0, value], size).cast(kind)))
    said = json.loads(part.stats)
    assert said["minValues"] == {"x": 1} and said["maxValues"] == {"x": 2} and said["nullCount"]["at"] == 0


def test_wide_rows_are_written_before_they_fill_the_memory(tmp_path: Path) -> None:
    wide = np.zeros(20 * 200_000)
    rows = pa.RecordBatch.from_pydict(
        {"x": pa.FixedSizeListArray.from_arrays(wide, 200_000).cast(pa.list_(pa.float64()))}
    )  # 32 MB
    (part,) = written(tmp_path, *[rows] * 5)
    about = pq.ParquetFile(tmp_path / part.path).metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [60, 40]


LIMITED = """
import resource, signal, sys
import numpy as np, pyarrow as pa
from jobs.storage.part_files import write_parts

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
rows = pa.RecordBatch.from_pydict({"x": np.random.default_rng(1).normal(size=200_000)})
try:
    write_parts(sys.argv[1], "part-00000", [rows])
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("size", [2, 100_000, 1_600_100])
def test_a_file_that_the_disk_does_not_take_is_removed_and_the_first_error_told(
    tmp_path: Path, size: int
) -> None:
    """The limit is met at the file's first bytes, amid its rows, or at its end."""
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(size)], capture_output=True, text=True, check=True
    )
    assert "File too large" in ran.stdout, (ran.stdout, ran.stderr)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_complete_go_with_the_one_whose_rows_end_in_an_error(tmp_path: Path) -> None:
    there: list[int] = []

    def rows() -> Any:
        for _ in range(3):
            yield batch(x=np.arange(200_000.0))
            there.append(len(list(tmp_path.iterdir())))
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_parts(str(tmp_path), "part-00000", rows(), full=1000)
    assert there == [1, 2, 3] and list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_file_whose_rows_end_in_an_error(tmp_path: Path) -> None:
    def rows() -> Any:
        yield batch(x=np.zeros(200_000))
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_parts(str(tmp_path), "part-00000", rows())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("proxy")
def test_a_file_of_a_store_is_there_as_a_whole_or_not_at_all() -> None:
    place = "s3a://bucket/parts/estimates/m"
    rows = batch(x=np.arange(200_000, dtype=np.float64))

    def failing() -> Iterator[pa.RecordBatch]:
        yield rows
        yield rows
        raise RuntimeError("the task failed")

    with pytest.raises(RuntimeError, match="the task failed"):
        write_parts(place, "part-00001-a-1.1", failing(), full=1)
    files = open_files(place)
    assert files.names("") == []
    (part,) = write_parts(place, "part-00001-b-1.1", [rows])
    seen = files.seen(part.path)
    assert seen is not None and seen.size == part.size
    content = files.read(part.path)
    assert content is not None and pq.read_table(pa.BufferReader(content)).equals(
        pa.Table.from_batches([rows])
    )
    remove_of(place, "other")
    assert files.names("") == [part.path]
    remove_of(place, "b")
    assert files.names("") == []
