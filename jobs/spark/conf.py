"""Say what Spark needs for our jobs, in one place, without importing Spark.

The same settings are given by `jobs.spark.session` to a session that Python starts and by the DAGs to `spark-submit`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.spark.class_archive import archive_conf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOGGING = Path(__file__).with_name("log4j2.properties")
"""What Spark's JVM prints."""

ARROW_ROWS = 131_072
"""Rows in one Arrow batch. A batch is packed into one binary row a bucket: larger ones mean fewer, longer rows."""

_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"

BLOCKS_AT_ONCE = 512
"""State blocks in one answer where all of a bucket are read: some ten megabytes."""
_STATE_CALLS = "spark.sql.execution.arrow.transformWithStateInPySpark"

_ARROW_JAVA = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Arrow in Java checks the bounds of every value that it reads; Spark has checked them before."""


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
        _ARROW_BYTES: str(64 << 20),
        f"{_STATE_CALLS}.maxStateRecordsPerBatch": str(BLOCKS_AT_ONCE),
        "spark.python.daemon.module": "jobs.spark.worker_daemon",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        f"{rocksdb}.changelogCheckpointing.enabled": "true",
        # One writer makes one file a commit for the small tables; large ones still get a file a task.
        "spark.databricks.delta.snapshotPartitions": "2",
        # Rows that are written to one part of a table, a snapshot's or a generation's, carry its name as a constant:
        # they need no sorting by it, and no look at each whether it has the name.
        "spark.sql.maxConcurrentOutputFileWriters": "4",
        "spark.databricks.delta.replaceWhere.constraintCheck.enabled": "false",
        "spark.sql.shuffle.partitions": os.environ.get("KALMAN_SHUFFLE_PARTITIONS", "8"),
        # Micro-batches are small and their plans are fixed by hand: adaptive planning would only add time.
        "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
        **archive_conf(f"-Dlog4j2.configurationFile={LOGGING.as_uri()} {_ARROW_JAVA}"),
        "spark.executor.extraJavaOptions": _ARROW_JAVA,
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.metricsEnabled": "false",
    }


COMPILED_FROM = 50_000
"""Rows of a micro-batch from which on compiled code is worth having."""


def interpreted_conf() -> dict[str, str]:
    """Return what lets Spark interpret its plans instead of compiling each to Java.

    Compiling takes a second when a command begins, more than the rows of a usual micro-batch, whose filtering is not
    done in Spark's expressions at all. A stream changes over where its micro-batches are large (`suit`).
    """
    return {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def compiled_conf() -> dict[str, str]:
    """Return what lets Spark compile its plans to Java: Spark's own defaults."""
    return {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}


def short_rows_conf() -> dict[str, str]:
    """Return what is for jobs whose rows are a key and a few numbers: no limit of bytes for an Arrow batch.

    With any other limit Spark adds up the bytes of the batch again for every row that it puts in, which takes as long
    as putting it in. Where rows may be long (messages, raw fields, blocks of states) the limit has to stay: a column of
    a batch cannot have more than 2 GiB.
    """
    return {_ARROW_BYTES: str(2**31 - 1)}


def stream_conf(kafka: bool) -> dict[str, str]:
    """Return what is for streams: plans interpreted at first; of a topic, Arrow batches of limited bytes."""
    return interpreted_conf() if kafka else {**interpreted_conf(), **short_rows_conf()}


def set_codegen_for(session: SparkSession, rows: int) -> None:
    """Let a session compile or interpret the plans that it makes from now on, as suits so many rows.

    The code that Spark compiles is kept and used again for as long as its text is the same, so what changes from
    micro-batch to micro-batch must not be a number in a plan.
    """
    for name, value in (compiled_conf() if rows >= COMPILED_FROM else interpreted_conf()).items():
        session.conf.set(name, value)


@contextmanager
def codegen_for(session: SparkSession, rows: int) -> Iterator[None]:
    """Let a session compile the plans that are made within, if so many rows are worth it; what was set comes back."""
    if rows < COMPILED_FROM:
        yield
        return
    before = {name: session.conf.get(name, None) for name in compiled_conf()}
    set_codegen_for(session, rows)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, value)


def short_command_conf() -> dict[str, str]:
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
