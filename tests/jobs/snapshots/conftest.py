"""A warehouse whose Arrow batches are short, so that a few rows fill several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from jobs.spark.warehouse import Warehouse

BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture
def warehouse(spark: SparkSession, tmp_path: Path) -> Iterator[Warehouse]:
    """An empty warehouse; Spark gives tasks 500 rows at a time."""
    before = spark.conf.get(BATCH_ROWS)
    assert before is not None
    spark.conf.set(BATCH_ROWS, 500)
    yield Warehouse(spark, str(tmp_path / "warehouse"))
    spark.conf.set(BATCH_ROWS, before)
