"""Commits of files by delta-rs: once a transaction, by one of two writers at once, into tables that take them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from jobs.core.errors import UserError
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.file_commits import FileTable
from jobs.warehouse.part_files import write_parts

SCHEMA = pa.schema([("x", pa.int64()), ("values", pa.list_(pa.float64())), ("at", pa.timestamp("us", "UTC"))])


def made(root: Path, **options: Any) -> FileTable:
    DeltaTable.create(str(root / "t"), SCHEMA, **options)
    return table(root)


def table(root: Path) -> FileTable:
    spark: Any = None  # what is tested needs none
    return FileTable(Warehouse(spark, str(root)), "t")


def add(to: FileTable, number: int, *values: int, name: str = "app") -> None:
    rows = pa.RecordBatch.from_pydict(
        {"x": values, "values": [[float(one)] for one in values], "at": [one * 1000 for one in values]},
        SCHEMA,
    )
    to.commit(write_parts(to.folder, "part-00000", [rows]), (name, number))


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


def test_a_commit_that_another_process_overtakes_under_its_name_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes between the look at the table and the commit, with a later or an earlier number."""
    slow, other = made(tmp_path), table(tmp_path)
    add(slow, 1, 1)
    write, left = FileTable._write, [9, 3]

    def overtaken(self: FileTable, *arguments: Any) -> None:
        if self is slow and left:
            add(other, left.pop(0), 100)
        write(self, *arguments)

    monkeypatch.setattr(FileTable, "_write", overtaken)
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
    assert one.takes(SCHEMA)
    add(one, 26, 26)  # the first follows, though the commit that it read last may be gone
    assert rows(tmp_path) == list(range(27))


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
    assert not one.takes(SCHEMA)
    with pytest.raises(UserError, match="gone"):
        add(one, 3, 3)
    shutil.rmtree(tmp_path / "t", ignore_errors=True)
    made(tmp_path)
    add(one, 1, 30)
    assert rows(tmp_path) == [30]


def test_a_table_takes_files_only_if_nothing_else_is_asked_of_a_writer(tmp_path: Path) -> None:
    plain = made(tmp_path / "plain")
    assert plain.takes(SCHEMA)
    assert plain.takes(SCHEMA.remove(1))  # a column that is null
    assert not plain.takes(SCHEMA.append(pa.field("more", pa.int64())))
    assert not plain.takes(SCHEMA.set(0, pa.field("x", pa.int32())))
    assert not made(tmp_path / "parts", partition_by=["x"]).takes(SCHEMA)
    assert not made(tmp_path / "changes", configuration={"delta.enableChangeDataFeed": "true"}).takes(SCHEMA)
    checked = made(tmp_path / "checked")
    DeltaTable(str(checked.folder)).alter.add_constraint({"positive": "x > 0"})
    assert not checked.takes(SCHEMA)
    full = SCHEMA.set(0, pa.field("x", pa.int64(), nullable=False))
    DeltaTable.create(str(tmp_path / "full" / "t"), full)
    assert not table(tmp_path / "full").takes(SCHEMA)
    assert not table(tmp_path / "absent").takes(SCHEMA)


def test_the_size_of_files_is_what_the_table_asks_for(tmp_path: Path) -> None:
    assert made(tmp_path / "plain").file_bytes == 256 << 20
    for text, size in (("104857600", 104_857_600), ("64mb", 64 << 20), ("1g", 1 << 30)):
        assert made(tmp_path / text, configuration={"delta.targetFileSize": text}).file_bytes == size


def test_a_commit_reads_as_one_that_delta_in_java_makes(tmp_path: Path) -> None:
    one = made(tmp_path)
    add(one, 7, 1, 2)
    lines = (one.folder / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    found = {name: value for line in lines for name, value in json.loads(line).items()}
    assert found["commitInfo"]["isBlindAppend"] is True  # or else Java's deletes of other rows would conflict
    assert found["txn"] == {"appId": "app", "version": 7}
    assert found["add"]["dataChange"] is True and found["add"]["partitionValues"] == {}
    assert set(found) == {"commitInfo", "txn", "add"}
