"""Files of the warehouse: the same promises whichever file system holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.spark.hadoop_files import HadoopFiles
from jobs.storage.files import LocalFiles

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("kind", [LocalFiles, HadoopFiles])
def test_files_and_folders_are_renamed_and_removed(spark: SparkSession, tmp_path: Path, kind: type) -> None:
    read = LocalFiles(tmp_path / "a").read
    files = LocalFiles(tmp_path / "a") if kind is LocalFiles else HadoopFiles(spark, f"file://{tmp_path}/a")
    assert not files.exists("x") and read("x/1") is None and files.names("x") == []
    files.write("x/1", b"old")
    files.write("x/1", b"new")
    files.write("x/2", b"\xff")
    assert files.exists("x") and files.exists("x/1") and files.names("x") == ["1", "2"]
    assert files.rename("x/1", "y/1")
    assert (files.names("x"), files.names("y")) == (["2"], ["1"])
    assert read("y/1") == b"new" and read("x/2") == b"\xff"
    assert files.rename("y", "z") and files.names("") == ["x", "z"]
    assert files.remove_tree("z") and files.remove_tree("z") and files.names("") == ["x"]
    files.remove("x/2")
    files.remove("x/2")
    assert files.names("x") == []


def test_an_append_returns_the_size(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert files.append("a/b", b"one\n") == 4
    assert files.append("a/b", b"two\n") == 8
    assert files.read("a/b") == b"one\ntwo\n"
