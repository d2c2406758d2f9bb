"""The transactions of a table, read from its log: in a folder and in S3, with checkpoints of each form, and expired."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import SparkSession

from jobs.core.errors import UserError
from jobs.storage import warehouse
from jobs.storage.columns import parse_schema
from jobs.storage.table_log import NO_HOOKS
from jobs.storage.table_rows import build_location, open_log
from jobs.storage.warehouse import Tables

DAY = 24 * 3600 * 1000


def now() -> int:
    return int(time.time() * 1000)


def made(root: str, settings: dict[str, str] | None = None) -> Tables:
    tables = Tables(root)
    DeltaTable.create(**build_location(root, "t"), schema=parse_schema("txn string"), configuration=settings)
    return tables


def end(tables: Tables, *transactions: Transaction) -> None:
    """Commit a row in transactions, of which the library does not compare the numbers."""
    log = open_log(tables.root, "t")
    properties = CommitProperties(app_transactions=list(transactions))
    log.create_write_transaction(
        [], "append", log.schema(), commit_properties=properties, post_commithook_properties=NO_HOOKS
    )


def checkpoint(tables: Tables) -> None:
    open_log(tables.root, "t").create_checkpoint()


def as_the_library_says(tables: Tables, applications: set[str], table: str = "t") -> dict[str, int]:
    log = open_log(tables.root, table)
    found = {name: log.transaction_version(name) for name in applications}
    return {name: number for name, number in found.items() if number is not None}


def test_a_table_without_transactions_has_none_and_one_that_is_absent(root: str) -> None:
    assert Tables(root).transactions("t") == {}
    tables = made(root)
    assert tables.transactions("t") == {}
    checkpoint(tables)
    assert tables.transactions("t") == {}


def test_the_last_number_of_each_application_is_that_of_the_library(root: str) -> None:
    """Before and after each of several checkpoints, whose commits go."""
    tables, chance, names = made(root), random.Random(5), [f"app/{i} 'x' -> {i}" for i in range(5)]
    files = tables.files("t/_delta_log")
    for step in range(24):
        some = chance.sample(names, chance.randint(0, 3))
        end(
            tables,
            *(Transaction(one, chance.randint(0, 2**60), chance.choice([None, now()])) for one in some),
        )
        if step in (7, 8, 15):
            checkpoint(tables)
        if step in (9, 18):
            for version in range(tables.latest_version("t") - 1):
                if version < (8 if step == 9 else 15):
                    files.remove(f"{version:020d}.json")
        if step % 3 == 0:
            assert tables.transactions("t") == as_the_library_says(tables, set(names))
    assert len(tables.transactions("t")) == len(names)


@pytest.mark.parametrize(
    "hint", [None, b"", b"{}", b"[1]", b'{"version": 99}', b'{"version": 2, "parts": 3}', b'{"version": "x"}']
)
def test_the_newest_checkpoint_is_found_where_the_log_names_another(root: str, hint: bytes | None) -> None:
    tables = made(root)
    files = tables.files("t/_delta_log")
    for number in range(1, 7):
        end(tables, Transaction("a", number, now()), Transaction(f"b{number}", number, None))
        if number in (2, 5):
            checkpoint(tables)
    for version in range(5):
        files.remove(f"{version:020d}.json")
    if hint is None:
        files.remove("_last_checkpoint")
    else:
        files.write("_last_checkpoint", hint)
    assert tables.transactions("t") == {"a": 6, **{f"b{number}": number for number in range(1, 7)}}


@pytest.mark.parametrize("setting", ["interval 30 days", "interval 1 week", "interval 1 month", "nonsense"])
def test_expired_transactions_count_as_the_library_says(root: str, setting: str) -> None:
    tables = made(root, {"delta.setTransactionRetentionDuration": setting})
    for name, age in (("old", 60), ("later", 10), ("new", 0)):
        end(tables, Transaction(name, 1, now() - age * DAY), Transaction(f"{name} too", 2, None))
    end(tables, Transaction("new too", 3, now() - 60 * DAY))
    names = {"old", "later", "new", "old too", "later too", "new too"}
    for _ in range(2):
        found = tables.transactions("t")
        assert found == as_the_library_says(tables, names)
        assert found.keys() >= {"new", "old too"} and ("old" in found) == (
            setting in ("interval 1 month", "nonsense")
        )
        checkpoint(tables)


def test_a_log_that_is_removed_while_it_is_read_is_read_again(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, read, left = made(root), warehouse._read_pointer, [2]
    files = tables.files("t/_delta_log")
    end(tables, Transaction("a", 1, now()))

    def overtaken(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            end(tables, Transaction("a", 5 - left[0], now()))
            checkpoint(tables)
            last = f"{tables.latest_version('t'):020d}"
            for name in files.names(""):
                if name[:20].isdigit() and not name.startswith(last):
                    files.remove(name)
            return warehouse._NONE
        return read(*arguments)

    monkeypatch.setattr(warehouse, "_read_pointer", overtaken)
    assert tables.transactions("t") == {"a": 5}


def test_a_log_whose_files_are_gone_is_refused(tmp_path: Path) -> None:
    tables = made(str(tmp_path))
    end(tables, Transaction("a", 1, now()))
    end(tables, Transaction("a", 2, now()))
    (tmp_path / "t/_delta_log" / f"{1:020d}.json").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        tables.transactions("t")


@pytest.mark.spark
@pytest.mark.parametrize(
    "form", ["classic", *(pytest.param(one, marks=pytest.mark.slow) for one in ("parts", "v2"))]
)
def test_checkpoints_of_java_are_read(spark: SparkSession, tmp_path: Path, form: str) -> None:
    """In one file, in several parts, and of the second format, whose files of rows are elsewhere."""
    path, tables = str(tmp_path / form), Tables(str(tmp_path))
    session = spark.newSession()
    if form == "parts":
        session.conf.set("spark.databricks.delta.checkpoint.partSize", "3")
    policy = ", 'delta.checkpointPolicy' = 'v2'" if form == "v2" else ""
    settings = f"'delta.checkpointInterval' = '3'{policy}"
    session.sql(f"CREATE TABLE delta.`{path}` (x bigint) USING delta TBLPROPERTIES ({settings})")
    for number in range(1, 5):
        writer = session.range(number).toDF("x").write.format("delta").mode("append")
        writer.option("txnAppId", f"app {number % 3}").option("txnVersion", number).save(path)
    log = tmp_path / form / "_delta_log"
    hint = json.loads((log / "_last_checkpoint").read_text())
    assert (hint["version"], "v2Checkpoint" in hint, hint.get("parts", 0) > 1) == (
        3,
        form == "v2",
        form == "parts",
    )
    wanted = {"app 0": 3, "app 1": 4, "app 2": 2}
    assert tables.transactions(form) == wanted == as_the_library_says(tables, set(wanted), form)
    (log / "_last_checkpoint").unlink()
    for version in range(3):
        (log / f"{version:020d}.json").unlink()
    assert tables.transactions(form) == wanted
