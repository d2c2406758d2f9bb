"""Changes of rows of small tables, in a folder and in S3: beside other commits, without an answer, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs.core import times
from jobs.core.errors import UserError
from jobs.spark.warehouse import Warehouse
from jobs.storage import table_log
from jobs.storage.row_changes import NOW, add_columns, put_rows, replace_table, update_rows
from jobs.storage.table_log import Conflict
from jobs.storage.table_rows import open_log
from jobs.storage.warehouse import Tables
from tests.support.object_store import BUCKET, Proxy

COLUMNS = "model string, name string, number int, epoch bigint, at timestamp, note string"
KEYS = ("model", "name")
TEXT = "it's \"quoted\" \\n; -- {'a': NULL}\n\u00e4\U0001f40b"


def row(name: str, number: int, **more: Any) -> dict[str, Any]:
    return {"model": "walk", "name": name, "number": number, "epoch": 1, "at": NOW, "note": None, **more}


def made(root: Path | str, *rows: dict[str, Any]) -> Tables:
    """Return a warehouse whose table `t` has these rows."""
    warehouse = Tables(str(root))
    warehouse.create("t", COLUMNS)
    put_rows(warehouse, "t", KEYS, lambda there: rows)
    return warehouse


def by_name(warehouse: Tables) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in warehouse.rows("t")}


def test_rows_are_changed_to_the_values_in_one_commit(root: str) -> None:
    warehouse = made(root, row("a", 1), row("b", 2, epoch=2**40), row("c", 3, model="other"))
    began = times.now()
    values = {"note": TEXT, "number": 7, "epoch": 2**40 + 1}
    update_rows(warehouse, "t", KEYS, {"name": ("a", "b"), "epoch": 2**40}, values)
    update_rows(warehouse, "t", KEYS, {"model": "other"}, {"at": NOW, "epoch": 5})
    before = warehouse.latest_version("t")
    update_rows(warehouse, "t", KEYS, {"name": "a", "epoch": 99}, {"note": "never"})
    assert warehouse.latest_version("t") == before, "a change of no row is no commit"
    found = by_name(warehouse)
    assert found["a"]["number"] == 1 and found["a"]["note"] is None
    assert {name: found["b"][name] for name in values} == values
    assert cast(datetime, found["b"]["at"]) < began <= cast(datetime, found["c"]["at"]) <= times.now()
    update_rows(warehouse, "t", KEYS, {}, {"note": None})
    assert {name: (one["epoch"], one["note"]) for name, one in by_name(warehouse).items()} == {
        "a": (1, None),
        "b": (2**40 + 1, None),
        "c": (5, None),
    }


@pytest.mark.spark
def test_a_table_without_spark_is_the_one_that_java_makes(spark: SparkSession, tmp_path: Path) -> None:
    made(tmp_path / "files", row("a", 1))
    java = Warehouse(spark, str(tmp_path / "java"))
    java.create("t", COLUMNS)
    ours, its = (DeltaTable(str(tmp_path / name / "t")) for name in ("files", "java"))
    assert ours.schema() == its.schema() and ours.protocol() == its.protocol()
    assert ours.metadata().configuration == its.metadata().configuration
    Tables(str(tmp_path / "files")).create("t", COLUMNS)  # it is kept
    rows = Warehouse(spark, str(tmp_path / "files")).read("t").collect()
    assert [(one["name"], one["number"], one["note"]) for one in rows] == [("a", 1, None)]


def test_rows_are_put_on_what_another_commit_has_written_in_between(root: str) -> None:
    warehouse = made(root, row("a", 1), row("b", 1))
    seen: list[int] = []

    def changed(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = {one["name"]: one for one in there}
        seen.append(found["a"]["number"])
        if len(seen) == 1:  # a tool that takes no lock
            open_log(root, "t").update({"number": "10"}, predicate="name = 'a'")
        return [{**found["a"], "number": found["a"]["number"] + 1}, row("c", 3)]

    put_rows(warehouse, "t", KEYS, changed)
    assert seen == [1, 10]
    assert {name: one["number"] for name, one in by_name(warehouse).items()} == {"a": 11, "b": 1, "c": 3}

    def refused(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        raise UserError("another command was quicker")

    before = warehouse.latest_version("t")
    with pytest.raises(UserError, match="another command was quicker"):
        put_rows(warehouse, "t", KEYS, refused)
    assert warehouse.latest_version("t") == before


def test_a_table_is_replaced_with_its_columns_right_after_the_version_seen(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse = Tables(root)
    assert replace_table(warehouse, "some/t", pa.table({"key": ["a", "b"], "x": [1.0, 2.0]})) == 0
    log = open_log(root, "some/t")
    assert [field.nullable for field in log.schema().fields] == [True, True]
    log.alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    other = pa.table({"key": pa.array([7], pa.int64()), "y": [3.0]})
    writes: list[int] = []
    write = DeltaTable.create_write_transaction

    def written(log: DeltaTable, *arguments: Any, **options: Any) -> None:
        if not writes:  # a tool that takes no lock comes first
            open_log(root, "some/t").delete("key = 'a'")
        writes.append(log.version())
        write(log, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", written)
    assert replace_table(warehouse, "some/t", other) == 3
    assert writes == [1, 2]
    assert warehouse.rows("some/t") == [{"key": 7, "y": 3.0}]
    assert len(warehouse.rows("some/t", version=0)) == 2, "readers of the former version go on"
    log = open_log(root, "some/t")
    assert log.metadata().configuration == {"delta.logRetentionDuration": "interval 9 days"}
    assert len(log.file_uris()) == 1
    log.alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(UserError, match="some/t: .* append-only"):
        replace_table(warehouse, "some/t", other)


def test_times_of_one_commit_are_one_time(tmp_path: Path) -> None:
    warehouse = made(tmp_path, row("a", 1), row("b", 2))
    found = by_name(warehouse)
    assert found["a"]["at"] == found["b"]["at"]


def test_a_commit_that_others_come_before_each_time_is_refused(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_log, "_PAUSE_SECONDS", (0.0, 0.0))
    warehouse = made(root, row("a", 1))
    seen: list[int] = []

    def changed(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        seen.append(there[0]["number"])
        open_log(root, "t").update({"number": "number + 1"})
        return [{**there[0], "note": "never"}]

    with pytest.raises(Conflict, match="/t: "):
        put_rows(warehouse, "t", KEYS, changed)
    assert seen == list(range(1, 9)) and by_name(warehouse)["a"]["note"] is None


def test_a_commit_whose_answer_is_lost_counts_once(
    proxy: Proxy, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_log, "_PAUSE_SECONDS", (0.0, 0.0))
    root = f"s3a://{BUCKET}/lost-answers"
    warehouse = made(root, row("a", 1))
    tried: list[int] = []

    def changed(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        tried.append(there[0]["number"])
        if tried[-1] != 1:
            raise UserError("another command was quicker")
        return [{**there[0], "number": 2}]

    proxy.lose = lambda asked: asked[0] == "PUT" and asked[1].endswith(f"{2:020d}.json")
    put_rows(warehouse, "t", KEYS, changed)
    proxy.behave()
    assert tried == [1] and proxy.lost and by_name(warehouse)["a"]["number"] == 2
    assert warehouse.latest_version("t") == 2


def test_a_commit_that_the_store_never_saw_fails_and_is_not_made(
    proxy: Proxy, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_log, "_LOOK_SECONDS", 0.0)
    warehouse = made(f"s3a://{BUCKET}/refused", row("a", 1))
    proxy.refuse = lambda asked: asked[0] == "PUT" and asked[1].endswith(f"{2:020d}.json")
    with pytest.raises(UserError, match="the commit failed"):
        update_rows(warehouse, "t", KEYS, {}, {"number": 2})
    proxy.behave()
    assert by_name(warehouse)["a"]["number"] == 1 and warehouse.latest_version("t") == 1


def test_columns_that_a_table_lacks_are_added_once(root: str) -> None:
    warehouse = Tables(root)
    warehouse.create("t", "model string, name string, number int")
    put_rows(warehouse, "t", KEYS, lambda there: [{"model": "walk", "name": "a", "number": 1}])
    for _ in range(2):
        add_columns(warehouse, "t", COLUMNS)
    update_rows(warehouse, "t", KEYS, {"name": "a"}, {"note": "n", "epoch": 3})
    assert warehouse.latest_version("t") == 3
    found = by_name(warehouse)["a"]
    assert (found["number"], found["note"], found["epoch"], found["at"]) == (1, "n", 3, None)


def test_the_log_gets_checkpoints(tmp_path: Path) -> None:
    warehouse = made(tmp_path, row("a", 0))
    for number in range(1, 21):
        update_rows(warehouse, "t", KEYS, {"name": "a", "number": number - 1}, {"number": number})
    assert by_name(warehouse)["a"]["number"] == 20
    assert len(list((tmp_path / "t" / "_delta_log").glob("*.checkpoint.parquet"))) == 2


def test_a_process_that_is_killed_amid_changes_leaves_each_done_or_not(tmp_path: Path) -> None:
    warehouse = made(tmp_path, row("a", 0), row("b", 0))
    script = (
        "import sys\n"
        "from tests.jobs.storage.test_row_changes import KEYS, Tables, update_rows\n"
        "warehouse = Tables(sys.argv[1])\n"
        "number = int(sys.argv[2])\n"
        "while True:\n"
        "    update_rows(warehouse, 't', KEYS, {'number': number}, {'number': number + 1})\n"
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
        found = by_name(warehouse)
        number = found["a"]["number"]
        assert found["b"]["number"] == number and told <= number <= told + 1
        update_rows(warehouse, "t", KEYS, {"number": number}, {"number": number + 1})  # the lock died with it
        number += 1
    assert {one["number"] for one in by_name(warehouse).values()} == {number}
