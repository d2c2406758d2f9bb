"""Rows of a DataFrame, written by tasks and committed by delta-rs: types, partitions, transactions, what is left."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from jobs.core.errors import UserError
from jobs.spark.warehouse import Warehouse
from jobs.storage.table_log import FileTable

pytestmark = pytest.mark.spark

AT = datetime(2024, 5, 1, 12, 30, 0, 123456, UTC)


@pytest.fixture
def warehouse(spark: SparkSession, tmp_path: Path) -> Warehouse:
    return Warehouse(spark, str(tmp_path))


def log_of(warehouse: Warehouse, table: str, version: int) -> dict[str, list[dict[str, Any]]]:
    """Return the actions of a version by kind."""
    path = Path(warehouse.path(table), "_delta_log", f"{version:020d}.json")
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        for kind, action in json.loads(line).items():
            found.setdefault(kind, []).append(action)
    return found


def parquet_files(warehouse: Warehouse, table: str) -> list[Path]:
    return list(Path(warehouse.path(table)).rglob("*.parquet"))


def test_rows_have_the_table_s_columns_types_and_order(warehouse: Warehouse) -> None:
    spark = warehouse.spark
    warehouse.create("t", "n bigint, x double, at timestamp, word string, lists map<string, array<double>>")
    rows = [(AT, 7, "a", {"p": [1.0, 2.0]}), (None, None, None, None)]
    frame = spark.createDataFrame(rows, "AT timestamp, N int, more string, lists map<string, array<double>>")
    with pytest.raises(UserError, match="t has no column more"):
        warehouse.append(frame, "t")
    assert parquet_files(warehouse, "t") == []
    assert warehouse.append(frame.coalesce(1), "t", more_columns=True) == 2  # made, a column, the rows
    found = DeltaTable(warehouse.path("t")).to_pyarrow_table()
    assert found.schema.names == ["n", "x", "at", "word", "lists", "more"]
    assert found["n"].type == pa.int64() and found["n"].to_pylist() == [7, None]
    assert found["at"].to_pylist() == [AT, None] and found["more"].to_pylist() == ["a", None]
    assert found["lists"].to_pylist() == [[("p", [1.0, 2.0])], None]
    assert found["x"].null_count == found["word"].null_count == 2
    again = warehouse.read("t").filter("n = 7").collect()
    assert [(row["n"], row["more"], row["x"]) for row in again] == [(7, "a", None)]
    wrong = spark.createDataFrame([("a",)], "n string")
    with pytest.raises(UserError, match="its column n has the type int64, and the new rows have string"):
        warehouse.append(wrong, "t")


def test_each_file_is_of_one_partition_and_rows_without_a_value_have_their_own(warehouse: Warehouse) -> None:
    warehouse.create("t", "of string, x bigint", partition_by=("of",))
    rows = [("a", 1), ("b/c d", 2), (None, 3), ("a", 4)]
    warehouse.append(warehouse.spark.createDataFrame(rows, "of string, x bigint").coalesce(1), "t")
    added = log_of(warehouse, "t", 1)["add"]
    values = sorted(str(one["partitionValues"]["of"]) for one in added)
    assert values == ["None", "a", "b/c d"]
    assert sorted(row["x"] for row in warehouse.read("t").filter("of = 'a'").collect()) == [1, 4]
    assert [row["x"] for row in warehouse.read("t").filter("of = 'b/c d'").collect()] == [2]
    assert [row["x"] for row in warehouse.read("t").filter("of IS NULL").collect()] == [3]
    found = DeltaTable(warehouse.path("t")).to_pyarrow_table().to_pylist()
    assert sorted((str(row["of"]), row["x"]) for row in found) == [
        ("None", 3), ("a", 1), ("a", 4), ("b/c d", 2),
    ]  # fmt: skip


def test_a_transaction_is_committed_once(warehouse: Warehouse) -> None:
    frame = warehouse.spark.createDataFrame([(1,)], "x bigint")
    assert warehouse.append(frame, "t", ("app", 5)) == 1  # the table is made
    left = len(parquet_files(warehouse, "t"))
    for number in (5, 4):
        assert warehouse.append(frame, "t", ("app", number)) is None
    assert len(parquet_files(warehouse, "t")) == left
    assert warehouse.append(frame, "t", ("app", 6)) == 2
    metrics = log_of(warehouse, "t", 1)["commitInfo"][0]["operationMetrics"]
    assert metrics["numOutputRows"] == "1"


def test_a_mark_without_rows_outranks_earlier_numbers(warehouse: Warehouse) -> None:
    frame = warehouse.spark.createDataFrame([(1,)], "x bigint")
    warehouse.mark("t", frame.schema, ("app", 9))
    assert warehouse.append(frame, "t", ("app", 9)) is None
    assert warehouse.append(frame, "t", ("app", 10)) == 2 and warehouse.read("t").count() == 1
    assert "add" not in log_of(warehouse, "t", 1)


def test_a_task_that_fails_leaves_no_file_and_no_version(warehouse: Warehouse) -> None:
    warehouse.create("t", "x bigint")
    rows = warehouse.spark.range(0, 300_000, 1, 2)
    failing = rows.selectExpr("IF(id = 299999, CAST(raise_error('the row is bad') AS BIGINT), id) AS x")
    with pytest.raises(PySparkException, match="the row is bad"):
        warehouse.append(failing, "t")
    assert parquet_files(warehouse, "t") == [] and warehouse.latest_version("t") == 0


def test_a_table_has_statistics_of_the_columns_that_it_asks_for(warehouse: Warehouse) -> None:
    frame = warehouse.spark.createDataFrame([(1, 2.0)], "a bigint, b double")
    for table, asked, names in (("t", "1", {"a"}), ("u", "0", set()), ("v", "-1", {"a", "b"})):
        properties = {"delta.dataSkippingNumIndexedCols": asked}
        warehouse.create(table, "a bigint, b double", properties=properties)
        warehouse.append(frame, table)
        (added,) = log_of(warehouse, table, 1)["add"]
        assert set(json.loads(added["stats"])["minValues"]) == names


def test_rows_are_replaced_in_one_commit_and_other_rows_of_their_files_stay(warehouse: Warehouse) -> None:
    """As after OPTIMIZE, which puts rows of several runs into one file."""
    spark, columns = warehouse.spark, "run string, x bigint, at timestamp"
    warehouse.create("t", columns)
    for run in ("a", "b", "c"):
        warehouse.append(spark.createDataFrame([(run, x, AT) for x in range(3)], columns).coalesce(1), "t")
    spark.sql(f"OPTIMIZE delta.`{warehouse.path('t')}`")
    warehouse.append(spark.createDataFrame([("b", 9, AT)], columns).coalesce(1), "t")
    version = warehouse.latest_version("t")
    more = spark.createDataFrame([("b", 7, "new")], "run string, x bigint, more string").coalesce(1)
    detail = json.dumps({"run": "b"})
    made = warehouse.replace(more, "t", [[("run", "=", "b")]], detail)
    assert made == version + 2 == warehouse.latest_version("t")  # a column, and the rows
    rows = warehouse.read("t").orderBy("run", "x").select("run", "x", "more").collect()
    assert [tuple(row) for row in rows] == [
        *(("a", x, None) for x in range(3)), ("b", 7, "new"), *(("c", x, None) for x in range(3)),
    ]  # fmt: skip
    assert len(log_of(warehouse, "t", made)["remove"]) == 2 and len(log_of(warehouse, "t", made)["add"]) == 2
    assert warehouse.read_log_entries("t")[0].detail == {"run": "b"}
    assert warehouse.replace(more.limit(0), "t", [[("run", "=", "z")]]) == made  # no commit of nothing
    warehouse.replace(more.limit(0), "t", [[("run", "=", "b")]])
    assert {row["run"] for row in warehouse.read("t").collect()} == {"a", "c"}


def test_a_replacement_that_is_killed_or_fails_before_its_commit_changes_nothing(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark, columns = warehouse.spark, "run string, x bigint"
    warehouse.create("t", columns, ("run",))
    frame = spark.createDataFrame([("a", 1), ("b", 2)], columns)
    warehouse.append(frame, "t")
    version, files = warehouse.latest_version("t"), set(parquet_files(warehouse, "t"))

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    def unchanged() -> bool:
        rows = sorted(tuple(row) for row in warehouse.read("t").collect())
        return rows == [("a", 1), ("b", 2)] and warehouse.latest_version("t") == version

    with monkeypatch.context() as patch:
        patch.setattr(FileTable, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            warehouse.replace(frame, "t", [[("run", "=", "a")]])
    assert unchanged() and set(parquet_files(warehouse, "t")) == files
    failing = spark.range(0, 300_000, 1, 2).selectExpr(
        "'a' AS run", "IF(id = 299999, CAST(raise_error('the row is bad') AS BIGINT), id) AS x"
    )
    with pytest.raises(PySparkException, match="the row is bad"):
        warehouse.replace(failing, "t", [[("run", "=", "a")]])
    assert unchanged()
