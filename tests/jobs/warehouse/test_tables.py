"""Tables that other processes make while this one runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.warehouse.delta import Warehouse

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
