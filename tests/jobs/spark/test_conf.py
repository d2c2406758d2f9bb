"""Settings of a session that follow from where its warehouse is."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.spark.conf import set_local_paths
from jobs.spark.warehouse import Warehouse

NOWHERE = "hdfs://127.0.0.1:9"
KEY = "fs.defaultFS"


@pytest.mark.spark
def test_a_warehouse_in_a_folder_stays_there_where_hadoops_default_is_another(
    spark: SparkSession, tmp_path: Path
) -> None:
    session = spark.newSession()
    session.conf.set(KEY, NOWHERE)
    warehouse = Warehouse(set_local_paths(session, str(tmp_path)), str(tmp_path))
    frame = session.createDataFrame([(1,)], "x int")
    warehouse.append(frame, "t")
    assert (warehouse.latest_version("t"), warehouse.read("t").count()) == (1, 1)
    assert (tmp_path / "t" / "_delta_log").is_dir()


@pytest.mark.spark
def test_a_warehouse_in_a_store_keeps_hadoops_default(spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set(KEY, NOWHERE)
    assert set_local_paths(session, "hdfs:///warehouse").conf.get(KEY) == NOWHERE
