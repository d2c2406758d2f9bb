"""Reading Delta tables without Spark: versions, partitions, columns that came later, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from jobs.core.errors import UserError
from jobs.storage.table_rows import UTC_MICROSECONDS, read_table
from jobs.storage.warehouse import Tables


def wrote(root: Path) -> str:
    """Write a table of three versions, in a folder whose name needs care."""
    path = str(root / "states")
    for model, keys in (("a", ["x", "y"]), ("b", ["z"])):
        rows = pa.table({"model": [model] * len(keys), "key": keys})
        write_deltalake(path, rows, mode="append", partition_by=["model"])
    more = pa.table({"model": ["a"], "key": ["w"], "note": ["new"]})
    write_deltalake(path, more, mode="append", schema_mode="merge")
    return str(root)


def keys(table: pa.Table | None) -> list[str]:
    return [] if table is None else sorted(table["key"].to_pylist())


def test_a_table_is_read_at_a_version_and_by_partition(tmp_path: Path) -> None:
    folder = tmp_path / "a house ü"
    folder.mkdir()
    root = wrote(folder)
    assert keys(read_table(root, "states", ["key"])) == ["w", "x", "y", "z"]
    assert keys(read_table(root, "states", ["key"], {"model": "a"})) == ["w", "x", "y"]
    assert keys(read_table(root, "states", ["key"], {"model": "a"}, 1)) == ["x", "y"]
    assert read_table(root, "states", ["key"], {"model": "c"}) is None
    assert read_table(root, "nothing", ["key"]) is None
    both = read_table(root, "states", ["key", "note"], {"model": "a"})
    assert both is not None
    assert sorted(zip(both["key"].to_pylist(), both["note"].to_pylist(), strict=True)) == [
        ("w", "new"),
        ("x", None),
        ("y", None),
    ]
    DeltaTable(str(folder / "states")).delete("key = 'x'")
    assert keys(read_table(root, "states", ["key"])) == ["w", "y", "z"]


def test_a_small_table_has_the_columns_of_its_partitions(tmp_path: Path) -> None:
    tables = Tables(wrote(tmp_path))
    rows = [(row["model"], row["key"], row["note"]) for row in tables.rows("states")]
    assert sorted(rows) == [("a", "w", "new"), ("a", "x", None), ("a", "y", None), ("b", "z", None)]
    assert [row["key"] for row in tables.rows("states", {"model": "b"})] == ["z"]
    assert sorted(tables.columns("states", ["model"])["model"].to_pylist()) == ["a", "a", "a", "b"]


def test_what_cannot_be_read_is_refused_with_its_place(tmp_path: Path) -> None:
    root = wrote(tmp_path)
    with pytest.raises(UserError, match="states cannot be read: "):
        read_table(root, "states", ["key"], None, 9)
    next(tmp_path.glob("states/model=b/*.parquet")).unlink()
    with pytest.raises(UserError, match="states cannot be read: "):
        read_table(root, "states", ["key"])


def test_times_are_microseconds_in_utc_also_those_that_nanoseconds_cannot_hold(tmp_path: Path) -> None:
    """As Java's files of earlier releases have them (INT96), beside files of this one."""
    at = [datetime(1500, 1, 1, 0, 0, 0, 1, tzinfo=UTC), datetime(2400, 3, 1, tzinfo=UTC)]
    rows = pa.table({"key": ["x", "y"], "at": pa.array(at, UTC_MICROSECONDS)})
    for _ in range(2):
        write_deltalake(str(tmp_path / "t"), rows, mode="append")
    old = Path(DeltaTable(str(tmp_path / "t")).file_uris()[0])
    pq.write_table(rows, old, use_deprecated_int96_timestamps=True, store_schema=False)
    assert pq.ParquetFile(old).schema.column(1).physical_type == "INT96"
    for among in (None, ("key", ["x", "y"])):
        found = read_table(str(tmp_path), "t", ["key", "at"], among=among)
        assert found is not None and found.schema.field("at").type == UTC_MICROSECONDS
        assert sorted(found["at"].to_pylist()) == sorted([*at, *at])
