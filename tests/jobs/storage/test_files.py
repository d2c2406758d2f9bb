"""Files of the warehouse: the same promises whichever file system holds them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.spark.hadoop_files import HadoopFiles
from jobs.storage.files import LocalFiles, WarehouseFiles

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("kind", [LocalFiles, HadoopFiles])
def test_files_and_folders_are_renamed_and_removed(spark: SparkSession, tmp_path: Path, kind: type) -> None:
    local = kind is LocalFiles
    files: WarehouseFiles = (
        LocalFiles(tmp_path / "a") if local else HadoopFiles(spark, f"file://{tmp_path}/a")
    )
    assert not files.exists("x") and files.read("x/1") is None and files.names("x") == []
    files.write("x/1", b"old")
    files.write("x/1", b"new")
    files.write("x/2", b"\xff")
    assert files.exists("x") and files.exists("x/1") and files.names("x") == ["1", "2"]
    assert files.rename("x/1", "y/1")
    assert (files.names("x"), files.names("y")) == (["2"], ["1"])
    assert files.read("y/1") == b"new" and files.read("x/2") == b"\xff"
    assert files.rename("y", "z") and files.names("") == ["x", "z"]
    assert files.remove_tree("z") and files.remove_tree("z") and files.names("") == ["x"]
    files.remove("x/2")
    files.remove("x/2")
    assert files.names("x") == []
    if isinstance(files, HadoopFiles):
        files.write("x/3", b"")
        assert abs(files.read_modified_time("x/3") - datetime.now(UTC)) < timedelta(minutes=1)


def test_an_append_returns_the_size(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert files.append("a/b", b"one\n") == 4
    assert files.append("a/b", b"two\n") == 8
    assert files.read("a/b") == b"one\ntwo\n"
