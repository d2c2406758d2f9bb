"""One log that Delta in Java and delta-rs write in turn: each reads checkpoints and transactions of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from jobs.spark.warehouse import Warehouse
from jobs.storage.table_log import FileTable
from tests.jobs.storage.test_table_log import add

pytestmark = pytest.mark.spark

COLUMNS = "x bigint, values array<double>, at timestamp"


def made(spark: SparkSession, root: Path, **properties: str) -> tuple[Warehouse, FileTable]:
    warehouse = Warehouse(spark, str(root))
    warehouse.create("t", COLUMNS, properties={f"delta.{name}": text for name, text in properties.items()})
    return warehouse, FileTable(warehouse, "t")


def append(warehouse: Warehouse, number: int, x: int) -> None:
    rows = warehouse.spark.createDataFrame([(x, [float(x)], None)], COLUMNS).coalesce(1)
    writer = rows.write.format("delta").mode("append").option("txnAppId", "app").option("txnVersion", number)
    writer.save(warehouse.path("t"))


def by_java(warehouse: Warehouse, condition: str = "true") -> list[int]:
    """Return the rows as a process sees them that has not read the table before."""
    jvm: Any = warehouse.spark._jvm
    jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    return sorted(row["x"] for row in warehouse.read("t").filter(condition).collect())


def forget_commits(folder: Path, before: int) -> None:
    """Remove the commits before a version that has a checkpoint, as both do once they are expired.

    Java cannot read a log without the commit of its checkpoint: a checkpoint is only made of the latest commit, so that
    one is not expired when others are removed.
    """
    log = folder / "_delta_log"
    assert list(log.glob(f"{before:020d}.checkpoint*.parquet"))
    for path in log.glob("*.json"):
        if path.name[:20].isdigit() and int(path.name[:20]) < before:
            path.unlink()


@pytest.mark.slow
def test_each_goes_on_from_the_checkpoint_of_the_other(spark: SparkSession, tmp_path: Path) -> None:
    warehouse, files = made(spark, tmp_path, checkpointInterval="3")
    append(warehouse, 0, 0)
    add(files, 1, 1)
    add(files, 2, 2)  # version 3: a checkpoint by delta-rs
    forget_commits(Path(files.path), 3)
    assert by_java(warehouse) == [0, 1, 2] and by_java(warehouse, "x > 1") == [2]
    append(warehouse, 2, 20)  # what the log holds of it is in the checkpoint alone
    append(warehouse, 1, 10)
    append(warehouse, 3, 3)
    append(warehouse, 4, 4)
    append(warehouse, 5, 5)  # version 6: a checkpoint by Java
    forget_commits(Path(files.path), 6)
    for one in (files, FileTable(warehouse, "t")):  # one follows the log, one reads it anew
        add(one, 5, 50)
        add(one, 3, 30)
    add(files, 6, 6)
    spark.sql(f"OPTIMIZE delta.`{files.path}`")
    add(files, 7, 7)  # version 9: a checkpoint by delta-rs of a table with removed files
    forget_commits(Path(files.path), 9)
    assert by_java(warehouse) == list(range(8)) and by_java(warehouse, "x = 5") == [5]
    read = DeltaTable(files.path)
    assert sorted(read.to_pyarrow_table()["x"].to_pylist()) == list(range(8))
    assert len(read.file_uris()) == 2 and read.transaction_version("app") == 7
    append(warehouse, 7, 70)
    assert by_java(warehouse) == list(range(8))


def test_java_heeds_the_transactions_of_files_where_old_ones_are_forgotten(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It takes a transaction without a time for one that is too old."""
    warehouse, files = made(spark, tmp_path, setTransactionRetentionDuration="interval 30 days")
    add(files, 5, 5)
    by_java(warehouse)
    append(warehouse, 5, 50)
    append(warehouse, 4, 40)
    add(files, 5, 51)
    assert by_java(warehouse) == [5]
