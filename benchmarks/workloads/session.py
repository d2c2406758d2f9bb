"""Start the Spark session in which works are measured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchmarks.contenders.contenders import PARTITIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jobs.core.settings import Settings


def session(settings: Settings) -> SparkSession:
    """Start the session of all runs: with the settings of a stream, except for partitions and memory."""
    from jobs.spark.conf import build_interpreted_conf, build_short_rows_conf
    from jobs.spark.session import spark_session

    return spark_session(
        settings,
        "benchmark",
        {
            **build_interpreted_conf(),
            **build_short_rows_conf(),
            "spark.sql.shuffle.partitions": str(PARTITIONS),
            # Spark's own default: 5 million keys need no more.
            "spark.driver.memory": os.environ.get("KALMAN_BENCH_MEMORY", "1g"),
        },
    )
