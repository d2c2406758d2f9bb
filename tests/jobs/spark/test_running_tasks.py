"""The tasks of a stage that runs are counted while it runs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.spark.job_labels import build_task_counter
from jobs.spark.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_finished_tasks_are_counted_while_a_stage_runs(spark: SparkSession, tmp_path: Path):
    count = build_task_counter(Warehouse(spark, str(tmp_path)))
    assert count() == (0, 0)

    def work() -> None:
        spark.range(0, 6, 1, 6).selectExpr("java_method('java.lang.Thread', 'sleep', 400L)").collect()

    worker = threading.Thread(target=work)
    worker.start()
    seen = set()
    while worker.is_alive():
        seen.add(count())
        time.sleep(0.05)
    worker.join()
    assert {total for _, total in seen} <= {0, 6} and len({done for done, total in seen if total == 6}) > 1
