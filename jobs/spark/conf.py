"""The Spark settings of all jobs, without importing Spark.

`jobs.spark.session` gives them to a session that Python starts, and the DAGs give them to `spark-submit`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.core.roots import local_path
from jobs.spark.jars import jar_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOGGING = Path(__file__).with_name("log4j2.properties")
"""Logging of Spark's JVM."""

ARCHIVE = "classes.jsa"
"""The archive of Java's classes, in the folder of the jars."""

QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""Without these options Java reports an archive that does not fit on standard output, where JSON goes."""

SECRETS = "(?i)secret|passw|token|access[.]?key|account[.]?key|credential|jaas"
"""Names of settings whose values Spark hides, as a regular expression of Java."""

ARROW_ROWS = 131_072
"""Rows in one Arrow batch. A batch is packed into one binary row a bucket: larger ones mean fewer, longer rows."""

_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"

STATE_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
"""How Spark names the files of states. 1: by their version, so that attempts of a micro-batch overwrite each other; 2:
by version and attempt, and the commit of the micro-batch names the attempt that counts (decision 0056)."""

BLOCKS_AT_ONCE = 512
"""State blocks in one answer when all blocks of a bucket are read: some ten megabytes."""
_STATE_CALLS = "spark.sql.execution.arrow.transformWithStateInPySpark"

_ARROW_JAVA = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Without these options Arrow in Java checks the bounds of every value, which Spark has checked already."""

_LONGEST = 1 << 24
_AVRO_JAVA = " ".join(
    f"-Dorg.apache.avro.limits.{what}={_LONGEST}"
    for what in ("bytes.maxLength", "string.maxLength", "collectionItems.maxLength")
)
"""Avro allocates what a message's first bytes say, up to 2 GiB, before it looks whether the message is that long."""

_JAVA = f"{_ARROW_JAVA} {_AVRO_JAVA}"


def spark_conf() -> dict[str, str]:
    """Return the settings of every job."""
    rocksdb = "spark.sql.streaming.stateStore.rocksdb"
    return {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Event times are instants: `ingest` resolves naive times with the model's own time zone.
        "spark.sql.session.timeZone": "UTC",
        # As tasks and delta-rs write times. Spark's default is INT96, which has no zone and no bounds in the file.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # Python workers must run this interpreter: any other fails with a misleading error.
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
        "spark.executorEnv.PYTHONHASHSEED": "0",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS),
        _ARROW_BYTES: str(64 << 20),
        f"{_STATE_CALLS}.maxStateRecordsPerBatch": str(BLOCKS_AT_ONCE),
        # Spark's 15 s are too few where other work keeps the machine's cores busy.
        "spark.python.authenticate.socketTimeout": "120s",
        "spark.python.daemon.module": "jobs.spark.worker_daemon",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        # Spark's checkpoints and Delta's commits in local folders, without a process for each step (jobs/spark/java).
        "spark.hadoop.fs.AbstractFileSystem.file.impl": "kalman.stores.LocalFiles",
        f"{rocksdb}.changelogCheckpointing.enabled": "true",
        STATE_FORMAT: "2",
        # A snapshot of the store that cannot be loaded is rebuilt from the changelogs.
        "spark.sql.streaming.stateStore.autoSnapshotRepair.enabled": "true",
        # Small tables get one file a commit from one writer; large ones still get one file a task.
        "spark.databricks.delta.snapshotPartitions": "2",
        # Rows merged into one partition of a table carry its value as a constant: no need to sort by it.
        "spark.sql.maxConcurrentOutputFileWriters": "4",
        "spark.sql.shuffle.partitions": os.environ.get("KALMAN_SHUFFLE_PARTITIONS", "8"),
        # Micro-batches are small and their plans are chosen by hand: adaptive planning would only take time.
        "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
        **archive_conf(f"-Dlog4j2.configurationFile={LOGGING.as_uri()} {_JAVA}"),
        "spark.executor.extraJavaOptions": _JAVA,
        "spark.ui.showConsoleProgress": "false",
        # Spark's own list has no word of Kafka's: where it shows plans and settings, it hides these as well.
        "spark.redaction.regex": SECRETS,
        "spark.sql.redaction.options.regex": f"(?i)url|{SECRETS}",
        "spark.sql.streaming.metricsEnabled": "false",
    }


COMPILED_FROM = 50_000
"""Rows of a micro-batch from which compiling its plan pays off."""


def interpreted_conf() -> dict[str, str]:
    """Return the settings with which Spark interprets its plans instead of compiling each to Java.

    Compiling takes a second when a command begins, more than the rows of a usual micro-batch, which Spark's expressions
    do not filter anyway. A stream compiles where its micro-batches are large (`set_codegen_for`).
    """
    return {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def compiled_conf() -> dict[str, str]:
    """Return the settings with which Spark compiles its plans to Java: its own defaults."""
    return {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}


def short_rows_conf() -> dict[str, str]:
    """Return the settings of jobs whose rows are a key and a few numbers: no limit on the bytes of an Arrow batch.

    With any other limit Spark sums the bytes of the batch for every row that it adds, which takes as long as adding the
    row. Where rows may be long (messages, raw fields, blocks of states) the limit must stay: a column of a batch cannot
    exceed 2 GiB.
    """
    return {_ARROW_BYTES: str(2**31 - 1)}


def stream_conf(kafka: bool) -> dict[str, str]:
    """Return the settings of streams: plans interpreted at first; from Kafka, Arrow batches of limited bytes."""
    return interpreted_conf() if kafka else {**interpreted_conf(), **short_rows_conf()}


def set_codegen_for(session: SparkSession, rows: int) -> None:
    """Let a session compile or interpret its next plans, whichever is faster for this number of rows.

    Spark reuses compiled code while its text stays the same, so numbers that change from one micro-batch to the next
    must not be literals in a plan.
    """
    for name, value in (compiled_conf() if rows >= COMPILED_FROM else interpreted_conf()).items():
        session.conf.set(name, value)


@contextmanager
def codegen_for(session: SparkSession, rows: int) -> Iterator[None]:
    """Let a session compile the plans made within, if the rows are many enough; restore its settings afterwards."""
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


def with_local_paths(session: SparkSession, root: str) -> SparkSession:
    """Let a session take paths for those of local folders if its warehouse is in one, and return it.

    Hadoop takes them for paths in the default file system of HADOOP_CONF_DIR, which may be HDFS. Only what the session
    reads and writes is changed: YARN puts the files of an application into that default. A new session lacks it.
    """
    if local_path(root) is not None:
        session.conf.set("fs.defaultFS", "file:///")
    return session


def quick_java_conf() -> dict[str, str]:
    """Return the setting with which Java starts sooner, for commands of seconds: without its optimising compiler.

    That compiler, and the counting for it, pay off in minutes. Without it Java reserves 48 MB for compiled code, which
    is full after some minutes, and then interprets; a command that watches a folder lives longer, so it gets more.
    """
    options = spark_conf()["spark.driver.extraJavaOptions"]
    return {
        "spark.driver.extraJavaOptions": f"{options} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    }


def short_command_conf() -> dict[str, str]:
    """Return the settings with which a command that reads a few small tables starts and ends sooner.

    Compiling plans to Java pays off in minutes, not in seconds, too.
    """
    return {**quick_java_conf(), "spark.sql.shuffle.partitions": "1", **interpreted_conf()}


def archive_path() -> Path:
    """Return the path of the archive: in the folder of the jars, as it belongs to them."""
    return jar_folder() / ARCHIVE


def archive_conf(java_options: str) -> dict[str, str]:
    """Return the Spark settings with `java_options`, and with the archive if there is one.

    Java archives only classes of its own class path, so the jars are on it before Spark adds them itself.
    """
    if not archive_path().is_file() or os.environ.get("KALMAN_CLASS_ARCHIVE") == "0":
        return {"spark.driver.extraJavaOptions": java_options}
    return {
        "spark.driver.extraJavaOptions": f"{java_options} {QUIET} -XX:SharedArchiveFile={archive_path()}",
        "spark.driver.extraClassPath": class_path(),
    }


def class_path() -> str:
    """Return the jars as a Java class path."""
    return os.pathsep.join(str(path) for path in sorted(jar_folder().glob("*.jar")))
