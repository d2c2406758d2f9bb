"""Say what Spark needs for our jobs, in one place, without importing Spark.

The same settings are given by `jobs.session` to a session that Python starts and by the DAGs to `spark-submit`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jobs.class_archive import archive_conf

LOGGING = Path(__file__).with_name("log4j2.properties")
"""What Spark's JVM prints."""

ARROW_ROWS = 131_072
"""Rows in one Arrow batch. A batch is packed into one binary row a bucket: larger ones mean fewer, longer rows."""


def spark_conf() -> dict[str, str]:
    """Return the settings that every job runs with."""
    rocksdb = "spark.sql.streaming.stateStore.rocksdb"
    return {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Event times are instants. Every naive time is resolved when it is landed, by the model's own zone.
        "spark.sql.session.timeZone": "UTC",
        # Python workers must be this very interpreter: any other gives a misleading error.
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
        "spark.executorEnv.PYTHONHASHSEED": "0",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS),
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        f"{rocksdb}.changelogCheckpointing.enabled": "true",
        # One writer makes one file a commit for the small tables; large ones still get a file a task.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.shuffle.partitions": os.environ.get("KALMAN_SHUFFLE_PARTITIONS", "8"),
        # Micro-batches are small and their plans are fixed by hand: adaptive planning would only add time.
        "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
        **archive_conf(f"-Dlog4j2.configurationFile={LOGGING.as_uri()}"),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.metricsEnabled": "false",
    }


def interpreted_conf() -> dict[str, str]:
    """Return what lets Spark interpret its plans instead of compiling each to Java.

    A micro-batch has its own number in its plan, so its code would be generated and compiled anew every time: more work
    than the rows of a usual micro-batch, whose filtering is not done in Spark's expressions at all.
    """
    return {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def glance_conf() -> dict[str, str]:
    """Return what makes a command that only looks at a few small tables start and end sooner.

    Compiling plans to Java, and Java with the optimising compiler, pays for itself in minutes, not in seconds. Without
    that compiler Java takes 48 MB for compiled code, which is full after some minutes, and interprets from then on: a
    command that watches a folder lives longer.
    """
    options = spark_conf()["spark.driver.extraJavaOptions"]
    return {
        "spark.driver.extraJavaOptions": f"{options} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m",
        "spark.sql.shuffle.partitions": "1",
        **interpreted_conf(),
    }
