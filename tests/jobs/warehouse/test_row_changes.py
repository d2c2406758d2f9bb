"""Changes of rows of small tables: by delta-rs and by Delta in Java alike, beside other commits, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs.core import clock
from jobs.core.errors import UserError
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.file_commits import FILES, JAVA, WRITER
from jobs.warehouse.local_tables import LocalTables
from jobs.warehouse.row_changes import NOW, create_small_table, put_rows, small_table, update_rows

COLUMNS = "model string, name string, number int, epoch bigint, at timestamp, note string"
TEXT = "it's \"quoted\" \\n; -- {'a': NULL}\n\u00e4\U0001f40b"


def without_spark(root: Path) -> Warehouse:
    """Return a warehouse for what needs no Spark."""
    return Warehouse(cast(SparkSession, None), str(root))


def row(name: str, number: int, **more: Any) -> dict[str, Any]:
    return {"model": "walk", "name": name, "number": number, "epoch": 1, "at": NOW, "note": None, **more}


def made(root: Path, *rows: dict[str, Any]) -> Warehouse:
    """Return a warehouse whose table `t` has these rows."""
    warehouse = without_spark(root)
    create_small_table(warehouse, "t", COLUMNS)
    files = small_table(warehouse, "t")
    assert files is not None
    put_rows(files, ("model", "name"), lambda there: rows)
    return warehouse


def by_name(root: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in LocalTables(root).rows("t")}


@pytest.mark.spark
@pytest.mark.parametrize("writer", [FILES, JAVA])
def test_both_writers_change_the_same_rows_to_the_same_values(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    made(tmp_path, row("a", 1), row("b", 2, epoch=2**40), row("c", 3, model="other"))
    warehouse = Warehouse(spark, str(tmp_path))
    monkeypatch.setenv(WRITER, writer)
    assert (small_table(warehouse, "t") is None) == (writer == JAVA)
    began = clock.now()
    update_rows(
        warehouse, "t", {"name": ("a", "b"), "epoch": 2**40}, {"note": TEXT, "number": 7, "epoch": 2**40 + 1}
    )
    update_rows(warehouse, "t", {"model": "other"}, {"at": NOW, "epoch": 5})
    before = warehouse.latest_version("t")
    update_rows(warehouse, "t", {"name": "a", "epoch": 99}, {"note": "never"})
    assert warehouse.latest_version("t") == before, "a change of no row is no commit"
    found = by_name(str(tmp_path))
    assert found["a"]["number"] == 1 and found["a"]["note"] is None
    assert {name: found["b"][name] for name in ("number", "epoch", "note")} == {
        "number": 7,
        "epoch": 2**40 + 1,
        "note": TEXT,
    }
    assert cast(datetime, found["b"]["at"]) < began <= cast(datetime, found["c"]["at"]) <= clock.now()
    update_rows(warehouse, "t", {}, {"note": None})
    rows = {one["name"]: one.asDict() for one in warehouse.read("t").collect()}
    assert {name: (one["epoch"], one["note"]) for name, one in rows.items()} == {
        "a": (1, None),
        "b": (2**40 + 1, None),
        "c": (5, None),
    }


@pytest.mark.spark
def test_a_table_without_spark_is_the_one_that_java_makes(spark: SparkSession, tmp_path: Path) -> None:
    made(tmp_path / "files", row("a", 1))
    warehouse = Warehouse(spark, str(tmp_path / "java"))
    warehouse.create("t", COLUMNS)
    ours, java = (DeltaTable(str(tmp_path / name / "t")) for name in ("files", "java"))
    assert ours.schema() == java.schema() and ours.protocol() == java.protocol()
    assert ours.metadata().configuration == java.metadata().configuration
    create_small_table(Warehouse(spark, str(tmp_path / "files")), "t", COLUMNS)  # it is kept
    assert len(by_name(str(tmp_path / "files"))) == 1


def test_rows_are_put_on_what_another_commit_has_written_in_between(tmp_path: Path) -> None:
    warehouse = made(tmp_path, row("a", 1), row("b", 1))
    files = small_table(warehouse, "t")
    assert files is not None
    seen: list[int] = []

    def changed(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = {one["name"]: one for one in there}
        seen.append(found["a"]["number"])
        if len(seen) == 1:  # a tool that takes no lock
            DeltaTable(str(tmp_path / "t")).update({"number": "10"}, predicate="name = 'a'")
        return [{**found["a"], "number": found["a"]["number"] + 1}, row("c", 3)]

    put_rows(files, ("model", "name"), changed)
    assert seen == [1, 10]
    assert {name: one["number"] for name, one in by_name(str(tmp_path)).items()} == {"a": 11, "b": 1, "c": 3}

    def refused(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        raise UserError("another command was quicker")

    before = DeltaTable(str(tmp_path / "t")).version()
    with pytest.raises(UserError, match="another command was quicker"):
        put_rows(files, ("model", "name"), refused)
    assert DeltaTable(str(tmp_path / "t")).version() == before


def test_times_of_one_commit_are_one_time(tmp_path: Path) -> None:
    made(tmp_path, row("a", 1), row("b", 2))
    found = by_name(str(tmp_path))
    assert found["a"]["at"] == found["b"]["at"]


def test_a_table_of_a_further_feature_is_left_to_java(tmp_path: Path) -> None:
    warehouse = made(tmp_path, row("a", 1))
    DeltaTable(str(tmp_path / "t")).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    assert small_table(warehouse, "t") is None


def test_the_log_gets_checkpoints(tmp_path: Path) -> None:
    warehouse = made(tmp_path, row("a", 0))
    for number in range(1, 21):
        update_rows(warehouse, "t", {"name": "a", "number": number - 1}, {"number": number})
    assert by_name(str(tmp_path))["a"]["number"] == 20
    assert len(list((tmp_path / "t" / "_delta_log").glob("*.checkpoint.parquet"))) == 2


def test_a_process_that_is_killed_amid_changes_leaves_each_done_or_not(tmp_path: Path) -> None:
    warehouse = made(tmp_path, row("a", 0), row("b", 0))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.jobs.warehouse.test_row_changes import without_spark, update_rows\n"
        "warehouse = without_spark(Path(sys.argv[1]))\n"
        "number = int(sys.argv[2])\n"
        "while True:\n"
        "    update_rows(warehouse, 't', {'number': number}, {'number': number + 1})\n"
        "    number += 1\n"
        "    print(number, flush=True)\n"
    )
    number = 0
    for wait in (0.0, 0.006, 0.013):
        command = [sys.executable, "-c", script, str(tmp_path), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()) as process:
            assert process.stdout is not None
            told = [int(process.stdout.readline()) for _ in range(3)][-1]
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
            told = max([told, *(int(line) for line in process.stdout if line.endswith("\n"))])
        found = by_name(str(tmp_path))
        number = found["a"]["number"]
        assert found["b"]["number"] == number and told <= number <= told + 1
        update_rows(warehouse, "t", {"number": number}, {"number": number + 1})  # the lock died with it
        number += 1
    assert {one["number"] for one in by_name(str(tmp_path)).values()} == {number}
