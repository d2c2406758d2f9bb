"""Tables that other processes make while this one runs, and columns whose names differ in case."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import read_key_types
from tests.jobs.support.pipeline import random_walk_spec

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("local", [True, False], ids=["folder", "uri"])
def test_a_table_that_another_process_has_made_is_seen(
    spark: SparkSession, tmp_path: Path, local: bool
) -> None:
    from delta.tables import DeltaTable

    elsewhere = Warehouse(spark, str(tmp_path / "elsewhere"))
    elsewhere.create("things", "number bigint")
    elsewhere.append(spark.createDataFrame([(1,)], "number bigint"), "things", ("test", 1))
    here = Warehouse(spark, ("" if local else "file://") + str(tmp_path / "here"))
    log = tmp_path / "here" / "things" / "_delta_log"
    for left in (tmp_path, log.parent, log):  # as left by a process that is just making the table
        left.mkdir(parents=True, exist_ok=True)
        assert not here.exists("things")
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "here", dirs_exist_ok=True)
    assert here.exists("things")
    assert here.read("things").count() == 1
    assert DeltaTable.forPath(spark, here.path("things")).toDF().count() == 1


def test_the_types_of_keys_are_found_whatever_the_case_of_their_names(
    spark: SparkSession, tmp_path: Path
) -> None:
    spec = ModelSpec.model_validate(random_walk_spec(key=["station"]))
    warehouse = Warehouse(spark, str(tmp_path))
    warehouse.create("measurements/walk", "Station bigint, AT timestamp, a double, b double")
    assert read_key_types(warehouse, spec) == {"station": "bigint"}
