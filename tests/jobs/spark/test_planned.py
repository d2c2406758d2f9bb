"""A DataFrame that Spark does not plan again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.spark.queries import plan_once

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def plan_of(rows: DataFrame) -> str:
    java: Any = rows._jdf
    return java.queryExecution().optimizedPlan().toString()


def test_the_rows_are_the_same_and_no_table_is_left_in_the_plan(spark: SparkSession, tmp_path: Path):
    table = str(tmp_path / "table")
    spark.range(100).selectExpr("id", "id * 0.5 AS half", "cast(id AS string) AS text").write.format(
        "delta"
    ).save(table)
    rows = spark.read.format("delta").load(table).filter("id % 3 = 0").repartition(2, "id")
    once = plan_once(spark, rows)
    assert once.schema == rows.schema
    assert sorted(once.collect()) == sorted(rows.collect())
    assert sorted(once.select("text").filter("id > 50").collect()) == sorted(
        rows.filter("id > 50").select("text").collect()
    )
    assert "parquet" in plan_of(rows) and "parquet" not in plan_of(once)
