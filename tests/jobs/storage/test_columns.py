"""Columns as text become the table that Spark would make of the same text, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.spark.warehouse import Warehouse, format_ddl, parse_struct
from jobs.storage.columns import parse_schema
from jobs.storage.dictionary import list_comments
from jobs.storage.row_changes import describe_columns

TEXTS = [
    "id string, at timestamp, day date, ok boolean, n bigint, i int, s smallint, t tinyint, x double, f float",
    "raw binary, mean array<double>, extras map<string,array<double>>, deep map<string,map<string,array<bigint>>>",
    "`odd name` bigint, `with ``tick``` string, `a,b` double, price decimal(10,2), more decimal(5, 0)",
    "one struct<a:bigint,b:struct<c:string,d:array<double>>>, two array<struct<a:int,b:map<string,double>>>",
]


@pytest.mark.spark
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_gives_the_columns_that_spark_reads_in_it(spark: SparkSession, text: str) -> None:
    wanted = parse_struct(text)
    assert json.loads(parse_schema(text).to_json()) == json.loads(wanted.json())
    assert json.loads(parse_schema(format_ddl(wanted)).to_json()) == json.loads(wanted.json())


@pytest.mark.parametrize("text", ["id", "id varchar(3)", "a bigint, b what", "x array<nothing>"])
def test_a_type_that_no_table_has_is_an_error(text: str) -> None:
    with pytest.raises(KeyError):
        parse_schema(text)


@pytest.mark.spark
def test_columns_get_the_comments_that_they_lack_and_spark_reads_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    warehouse = Warehouse(spark, str(tmp_path))
    warehouse.create("generations", "model string, own bigint")
    warehouse.append(spark.createDataFrame([("walk", 1)], "model string, own bigint"), "generations")

    def told() -> dict[str, str | None]:
        fields = warehouse.read("generations").schema.fields
        return {field.name: field.metadata.get("comment") for field in fields}

    about = list_comments("generations")["model"]
    assert told() == {"model": about, "own": None}
    assert not describe_columns(warehouse, "generations")
    odd = {"model": "It's \\ a `name`", "own": "Ours", "none": "No column"}
    assert describe_columns(warehouse, "generations", odd)
    assert told() == {"model": odd["model"], "own": "Ours"}
    version = warehouse.latest_version("generations")
    assert not describe_columns(warehouse, "generations", odd)
    assert describe_columns(warehouse, "generations") and told()["own"] == "Ours"
    assert warehouse.latest_version("generations") == version + 1  # one column differs
    assert [tuple(row) for row in warehouse.read("generations").collect()] == [("walk", 1)]
