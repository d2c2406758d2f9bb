"""Commits of files by delta-rs: once a transaction, by one of two writers at once, into tables that take them."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from jobs.core.errors import UserError
from jobs.core.faults import find_fault
from jobs.spark.warehouse import Warehouse
from jobs.storage.part_files import write_parts
from jobs.storage.table_log import Conflict, FileTable, append_rows, commit_or_remove
from jobs.storage.warehouse import Tables
from tests.jobs.test_disk_full import Ballast, disk
from tests.support.stand_ins import stand_in

__all__ = ["disk"]  # the fixture

SCHEMA = pa.schema([("x", pa.int64()), ("values", pa.list_(pa.float64())), ("at", pa.timestamp("us", "UTC"))])


def made(root: Path, **options: Any) -> FileTable:
    DeltaTable.create(str(root / "t"), SCHEMA, **options)
    return table(root)


def table(root: Path) -> FileTable:
    spark: Any = None  # what is tested needs none
    return FileTable(Warehouse(spark, str(root)), "t")


def some_rows(*values: int) -> pa.RecordBatch:
    found = {"x": values, "values": [[float(one)] for one in values], "at": [one * 1000 for one in values]}
    return pa.RecordBatch.from_pydict(found, SCHEMA)


def add(to: FileTable, number: int, *values: int, name: str = "app") -> None:
    to.commit(write_parts(to.path, "part-00000", [some_rows(*values)]), (name, number))


def rows(root: Path) -> list[int]:
    return sorted(DeltaTable(str(root / "t")).to_pyarrow_table()["x"].to_pylist())


def test_a_transaction_is_committed_once_and_an_older_one_never(tmp_path: Path) -> None:
    first, second = made(tmp_path), table(tmp_path)
    add(first, 5, 1)
    add(second, 5, 10)  # a retry by another process
    add(second, 4, 20)
    add(first, 6, 2)
    add(second, 1, 3, name="other")
    assert rows(tmp_path) == [1, 2, 3]
    assert DeltaTable(str(tmp_path / "t")).version() == 3
    told = DeltaTable(str(tmp_path / "t")).history(1)[0]
    assert told["operation"] == "WRITE" and told["operationMetrics"]["numOutputRows"] == "1"


def test_rows_are_appended_once_a_transaction_and_their_detail_is_kept(tmp_path: Path) -> None:
    to = made(tmp_path)
    assert append_rows(to, some_rows(1, 2), ("app", 5), json.dumps({"rows": 2})) == 1
    left = len(list(tmp_path.rglob("*.parquet")))
    assert [append_rows(to, some_rows(3), ("app", number)) for number in (5, 4)] == [None, None]
    assert len(list(tmp_path.rglob("*.parquet"))) == left and rows(tmp_path) == [1, 2]
    assert Tables(str(tmp_path)).read_log_entries(to.name)[0].detail == {"rows": 2}


def test_one_commit_ends_several_transactions_or_is_refused(tmp_path: Path) -> None:
    to = made(tmp_path)

    def add_for_all(*transactions: tuple[str, int]) -> int | None:
        parts = write_parts(to.path, "part-00000", [some_rows(1, 2)])
        return commit_or_remove(to, parts, lambda parts: to.commit_for_all(parts, transactions, {}))

    to.tried = False
    assert add_for_all(("file-a", 11), ("file-b", 12)) == 1
    assert table(tmp_path)._warehouse.transactions("t") == {"file-a": 11, "file-b": 12}
    to = table(tmp_path)
    before = sorted(os.listdir(to.path))
    with pytest.raises(Conflict, match="another command has committed file-b"):
        add_for_all(("file-c", 13), ("file-b", 14))
    assert sorted(os.listdir(to.path)) == before and rows(tmp_path) == [1, 2]


def test_a_commit_that_another_process_overtakes_under_its_name_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between the look at the table and the commit, with a later or an earlier number."""
    slow, other = made(tmp_path), table(tmp_path)
    add(slow, 1, 1)
    left = [9, 3]

    def overtaken(call: Callable[[], int], self: FileTable, **_: object) -> int:
        if self is slow and left:
            add(other, left.pop(0), 100)
        return call()

    monkeypatch.setattr(FileTable, "_write", stand_in(FileTable._write, overtaken))
    monkeypatch.setattr(Warehouse, "lock", lambda *_: pytest.MonkeyPatch.context())
    add(slow, 5, 2)  # behind 9: skipped
    assert rows(tmp_path) == [1, 100]
    left[:] = [12]
    add(slow, 15, 3)  # after 12: refused once, then added once
    assert rows(tmp_path) == [1, 3, 100, 100]


def test_a_long_log_gets_checkpoints_which_keep_transactions_and_files(tmp_path: Path) -> None:
    one = made(tmp_path)
    for number in range(25):
        add(one, number, number)
    log = tmp_path / "t" / "_delta_log"
    assert sorted(path.name[:20] for path in log.glob("*.checkpoint*.parquet")) == [
        f"{10:020d}",
        f"{20:020d}",
    ]
    for path in log.glob("*.json"):  # as Delta removes them after 30 days
        if int(path.name[:20]) < 20:
            path.unlink()
    anew = table(tmp_path)
    add(anew, 24, 100)
    add(anew, 25, 25)
    assert rows(tmp_path) == list(range(26))
    one.ready(SCHEMA)
    add(one, 26, 26)  # the first follows, though the commit that it read last may be gone
    assert rows(tmp_path) == list(range(27))


@pytest.mark.parametrize("clean", [True, False])
def test_old_entries_of_the_log_are_removed_unless_the_table_keeps_them(tmp_path: Path, clean: bool) -> None:
    one = made(tmp_path, configuration={"delta.enableExpiredLogCleanup": str(clean).lower()})
    for number in range(15):
        add(one, number, number)
    log = Path(one.path) / "_delta_log"
    ago = time.time() - 60 * 24 * 3600
    for path in log.glob("*.json"):
        os.utime(path, (ago + int(path.name[:20]), ago + int(path.name[:20])))
    for number in range(15, 22):
        add(one, number, number)
    assert (log / f"{1:020d}.json").exists() != clean
    assert rows(tmp_path) == list(range(22))


WRITES = """
import sys
from contextlib import nullcontext
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
import pyarrow as pa
from jobs.spark.warehouse import Warehouse
from jobs.storage.table_log import FileTable
from jobs.storage.part_files import write_parts

root, name, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
Warehouse.lock = lambda *_: nullcontext()  # as if the processes ran on machines that share no lock
table = FileTable(Warehouse(None, root), "t")
for number in range(first, last):
    rows = pa.RecordBatch.from_pydict({"x": pa.array([number], pa.int64())})
    table.ready(rows.schema)
    table.commit(write_parts(table.path, "part-00000", [rows]), (name, number))
    print(number, flush=True)
"""
"""A process that commits a row for each number, and prints the number after its commit."""


def started(root: Path, name: str, first: int, last: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITES, str(root), name, str(first), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_process_that_is_killed_amid_its_commits_leaves_each_of_them_whole_or_not_there(
    tmp_path: Path,
) -> None:
    """Every second commit writes a checkpoint too, so some kills fall into that."""
    one = made(tmp_path, configuration={"delta.checkpointInterval": "2"})
    moments, told = random.Random(1), -1
    for kills in range(1, 7):
        process = started(tmp_path, "app", told + 1, 1000)
        assert process.stdout is not None
        for line in process.stdout:
            told = int(line)
            if told % 8 == 7:
                break
        time.sleep(moments.uniform(0.0, 0.05))
        process.kill()
        told = max([told, *map(int, process.stdout.read().split())])
        process.wait()
        found = rows(tmp_path)
        assert found in (
            list(range(told + 1)),
            list(range(told + 2)),
        )  # the last may be there before it is told
        assert told >= 8 * kills - 1
    add(one, told, told)  # as its next driver would repeat it
    add(one, told + 1, told + 1)
    assert rows(tmp_path) == list(range(told + 2))


@pytest.mark.parametrize("names", ["ab", "aa"])
def test_two_processes_that_share_no_lock_add_each_transaction_once(tmp_path: Path, names: str) -> None:
    """Drivers of two generations, or two drivers of one, such as a zombie and its heir."""
    made(tmp_path)
    both = [started(tmp_path, name, 0, 40) for name in names]
    assert [one.wait(120) for one in both] == [0, 0]
    assert rows(tmp_path) == sorted([*range(40)] * len(set(names)))
    log = DeltaTable(str(tmp_path / "t"))
    assert {log.transaction_version(name) for name in names} == {39}
    assert log.version() == 40 * len(set(names))


def test_a_disk_without_room_for_the_log_is_named_and_takes_the_commit_later(disk: Path) -> None:
    one = made(disk)
    parts = write_parts(one.path, "part-00000", [some_rows(1)])
    ballast = Ballast(disk)
    ballast.leave(0)
    with pytest.raises(UserError, match=r"the commit failed: .*No space left on device") as told:
        one.commit(parts, ("app", 1))
    assert (
        "no room left" in (find_fault(told.value) or "")
        and "\x1b" not in str(told.value)
        and "\n" not in str(told.value)
    )
    assert rows(disk) == []
    ballast.clear()
    one.commit(parts, ("app", 1))
    assert rows(disk) == [1]


def test_a_file_that_was_removed_before_its_commit_is_not_committed(tmp_path: Path) -> None:
    """A driver that was frozen for longer than VACUUM keeps files that no commit names."""
    one = made(tmp_path)
    parts = write_parts(one.path, "part-00000", [some_rows(1)])
    (Path(one.path) / parts[0].path).unlink()
    with pytest.raises(UserError, match="removed before it was committed; run the command again"):
        one.commit(parts, ("app", 1))
    assert rows(tmp_path) == [] and DeltaTable(one.path).version() == 0


@pytest.mark.parametrize("change", ["constraint", "columns"])
def test_a_table_that_changes_during_a_micro_batch_takes_no_files(tmp_path: Path, change: str) -> None:
    one = made(tmp_path)
    one.ready(SCHEMA)
    parts = write_parts(one.path, "part-00000", [some_rows(-1)])
    if change == "constraint":
        DeltaTable(one.path).alter.add_constraint({"positive": "x > 0"})
    else:
        shutil.rmtree(Path(one.path) / "_delta_log")
        DeltaTable.create(one.path, pa.schema([("x", pa.string())]))
    with pytest.raises(UserError, match="changed while its files were written; run the command again"):
        one.commit(parts, ("app", 1))
    assert DeltaTable(one.path).to_pyarrow_table().num_rows == 0


FEATURES = {
    (2, 5, ""): {"delta.columnMapping.mode": "name"},
    (1, 2, ""): {"delta.columnMapping.mode": "name"},
    (3, 7, "v2Checkpoint"): {"delta.checkpointPolicy": "v2"},
    (3, 7, "typeWidening"): {"delta.enableTypeWidening": "true"},
    (3, 7, "catalogManaged"): {},
    (3, 7, "aFeatureOfTomorrow"): {},
    (1, 7, "rowTracking"): {"delta.enableRowTracking": "true"},
    (1, 7, "inCommitTimestamp"): {"delta.enableInCommitTimestamps": "true"},
    (1, 7, "clustering"): {},
    (1, 7, "allowColumnDefaults"): {},
    (1, 7, "aWritersFeatureOfTomorrow"): {},
    (9, 9, ""): {},
}


@pytest.mark.parametrize(("asked", "settings"), FEATURES.items())
def test_a_table_with_a_feature_beyond_files_is_refused(
    tmp_path: Path, asked: tuple[int, int, str], settings: dict[str, str]
) -> None:
    """Those that the library does not know are no error either."""
    one = made(tmp_path)
    reader, writer, feature = asked
    protocol: dict[str, Any] = {"minReaderVersion": reader, "minWriterVersion": writer}
    if reader == 3:
        protocol["readerFeatures"] = [feature]
    if writer == 7:
        protocol["writerFeatures"] = [feature]
    path = Path(one.path) / "_delta_log" / f"{0:020d}.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "protocol" in line:
            line["protocol"] = protocol
        if "metaData" in line:
            line["metaData"]["configuration"] = settings
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match="the table cannot be written: it|its writers need|the commit failed"):
        one.ready(SCHEMA)


SETTINGS = {
    "delta.autoOptimize.autoCompact": "true",
    "delta.autoOptimize.optimizeWrite": "true",
    "delta.compatibility.symlinkFormatManifest.enabled": "true",
    "delta.dataSkippingStatsColumns": "x",
    "delta.parquet.compression.codec": "zstd",
    "delta.checkpointPolicy": "v2",
    "delta.aSettingOfTomorrow": "7",
}
"""What a table may ask of each of its commits and of its files, without a feature of its protocol."""


@pytest.mark.parametrize(("name", "text"), SETTINGS.items())
def test_a_table_that_asks_more_of_a_commit_than_its_files_is_refused(
    tmp_path: Path, name: str, text: str
) -> None:
    one = made(tmp_path)
    path = Path(one.path) / "_delta_log" / f"{0:020d}.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (about,) = (line["metaData"] for line in lines if "metaData" in line)
    harmless = {"of.ours": "1", "delta.logRetentionDuration": "interval 400 days", "delta.appendOnly": "true"}
    for asked in (harmless, {**harmless, name: text}, {name: "false"}):
        about["configuration"] = asked
        path.write_text("\n".join(map(json.dumps, lines)))
        if asked.get(name) == text:
            with pytest.raises(UserError, match=rf"UNSET TBLPROPERTIES \('{re.escape(name)}'\)"):
                table(tmp_path).ready(SCHEMA)
        else:
            table(tmp_path).ready(SCHEMA)


def test_a_table_that_was_put_back_or_made_anew_is_read_anew(tmp_path: Path) -> None:
    one = made(tmp_path)
    add(one, 1, 1)
    shutil.copytree(tmp_path / "t", tmp_path / "backup")
    add(one, 2, 2)
    shutil.rmtree(tmp_path / "t")
    shutil.copytree(tmp_path / "backup", tmp_path / "t")
    add(one, 2, 20)
    assert rows(tmp_path) == [1, 20]
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(UserError, match="gone"):
        add(one, 3, 3)
    shutil.rmtree(tmp_path / "t", ignore_errors=True)
    made(tmp_path)
    add(one, 1, 30)
    assert rows(tmp_path) == [30]


def test_a_table_is_made_ready_for_files_or_says_why_it_cannot_be(tmp_path: Path) -> None:
    plain = made(tmp_path / "plain")
    plain.ready(SCHEMA)
    plain.ready(SCHEMA.remove(1))  # a column that is null
    assert DeltaTable(plain.path).version() == 0
    plain.ready(SCHEMA.append(pa.field("more", pa.int64())))
    assert plain.columns().names == [*SCHEMA.names, "more"] and DeltaTable(plain.path).version() == 1

    def refused(one: FileTable, why: str) -> None:
        with pytest.raises(UserError, match=why):
            one.ready(SCHEMA)

    other = made(tmp_path / "other")
    with pytest.raises(UserError, match="its column x has the type int64, and the new rows have string"):
        other.ready(SCHEMA.set(0, pa.field("x", pa.string())))
    refused(made(tmp_path / "parts", partition_by=["x"]), "it is partitioned by x")
    for name in ("delta.enableChangeDataFeed", "delta.enableDeletionVectors"):
        made(tmp_path / name, configuration={name: "true"}).ready(SCHEMA)
    checked = made(tmp_path / "checked")
    DeltaTable(checked.path).alter.add_constraint({"positive": "x > 0"})
    refused(checked, "constraint positive: ALTER TABLE ... DROP CONSTRAINT positive")
    full = SCHEMA.set(0, pa.field("x", pa.int64(), nullable=False))
    DeltaTable.create(str(tmp_path / "full" / "t"), full)
    refused(table(tmp_path / "full"), "its column x has NOT NULL")
    refused(table(tmp_path / "absent"), "the table is gone")


def test_the_size_of_files_is_what_the_table_asks_for(tmp_path: Path) -> None:
    assert made(tmp_path / "plain").file_bytes == 256 << 20
    for text, size in (("104857600", 104_857_600), ("64mb", 64 << 20), ("1g", 1 << 30)):
        assert made(tmp_path / text, configuration={"delta.targetFileSize": text}).file_bytes == size


def test_a_commit_reads_as_one_that_delta_in_java_makes(tmp_path: Path) -> None:
    one = made(tmp_path)
    add(one, 7, 1, 2)
    lines = (Path(one.path) / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    found = {name: value for line in lines for name, value in json.loads(line).items()}
    assert found["commitInfo"]["isBlindAppend"] is True  # or else Java's deletes of other rows would conflict
    now = found["txn"].pop("lastUpdated")
    assert found["txn"] == {"appId": "app", "version": 7} and 0 <= time.time() * 1000 - now < 600_000
    assert found["add"]["dataChange"] is True and found["add"]["partitionValues"] == {}
    assert set(found) == {"commitInfo", "txn", "add"}


def test_files_of_a_partitioned_table_say_of_which_partition_they_are(tmp_path: Path) -> None:
    columns = SCHEMA.append(pa.field("of", pa.string()))
    DeltaTable.create(str(tmp_path / "t"), columns, partition_by=["of"])
    one = table(tmp_path)
    with pytest.raises(UserError, match="it is partitioned by of"):
        one.ready(SCHEMA)
    one.ready(columns, by_partition=True)
    parts = write_parts(one.path, "part-00000", [some_rows(1, 2)])
    one.commit([part._replace(values=(("of", "a b"),)) for part in parts], ("app", 1))
    found = DeltaTable(one.path).to_pyarrow_table()
    assert found["of"].to_pylist() == ["a b", "a b"] and found["x"].to_pylist() == [1, 2]
