"""The Spark settings of all jobs; this module does not import Spark.

`jobs.spark.session` gives the settings to a session that Python starts, and the DAGs give them to `spark-submit`.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.core.settings import find_local_path
from jobs.spark.jars import find_jar_folder, list_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOGGING = Path(__file__).with_name("log4j2.properties")
"""File with the log settings of Spark's JVM."""

ARCHIVE = "classes.jsa"
"""Name of the archive of Java classes (class data sharing) in the folder of the jars."""

QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""Options that keep Java from reporting an unfit archive on standard output, where only JSON may appear."""

SECRETS = "(?i)secret|passw|token|access[.]?key|account[.]?key|credential|jaas"
"""Regular expression of Java for the names of settings whose values Spark hides."""

ARROW_ROWS = 131_072
"""Rows in one Arrow batch. Each batch becomes one binary row per bucket, so larger batches mean fewer, longer rows."""

_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"

STATE_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
"""Spark's naming of state files. With 1, the name has the version, so attempts of a micro-batch overwrite each other's
files. With 2, the name has the version and the attempt, and the commit of the micro-batch names the attempt that counts
(decision 0056).
"""

BLOCKS_AT_ONCE = 512
"""Number of state blocks in one answer when all blocks of a bucket are read; an answer has about ten megabytes."""
_STATE_CALLS = "spark.sql.execution.arrow.transformWithStateInPySpark"

_ARROW_JAVA = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Options that keep Arrow in Java from checking the bounds of every value, because Spark has already checked them."""

_LONGEST = 1 << 24
_AVRO_JAVA = " ".join(
    f"-Dorg.apache.avro.limits.{what}={_LONGEST}"
    for what in ("bytes.maxLength", "string.maxLength", "collectionItems.maxLength")
)
"""Limits for Avro. Without a limit, Avro allocates the length in a message's first bytes, up to 2 GiB, unchecked."""

_JAVA = f"{_ARROW_JAVA} {_AVRO_JAVA}"


def build_spark_conf() -> dict[str, str]:
    """Return the settings of every job."""
    rocksdb = "spark.sql.streaming.stateStore.rocksdb"
    return {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Event times are instants, because `ingest` applies the model's time zone to times without a zone.
        "spark.sql.session.timeZone": "UTC",
        # Tasks and delta-rs write times in this format. Spark's default, INT96, stores neither a zone nor bounds.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # Python workers must run this interpreter, because another interpreter fails with a misleading error.
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
        "spark.executorEnv.PYTHONHASHSEED": "0",
        # Workers, and their daemon, import nothing from the current folder, where specs and their modules may be.
        "spark.executorEnv.PYTHONSAFEPATH": "1",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_ROWS),
        _ARROW_BYTES: str(64 << 20),
        f"{_STATE_CALLS}.maxStateRecordsPerBatch": str(BLOCKS_AT_ONCE),
        # Spark's default of 15 s is too short while other work uses all cores.
        "spark.python.authenticate.socketTimeout": "120s",
        "spark.python.daemon.module": "jobs.spark.worker_daemon",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        # Local checkpoints and Delta commits are written without a process per step (jobs/spark/java).
        "spark.hadoop.fs.AbstractFileSystem.file.impl": "kalman.stores.LocalFiles",
        f"{rocksdb}.changelogCheckpointing.enabled": "true",
        STATE_FORMAT: "2",
        # If a snapshot of the state store cannot be loaded, Spark rebuilds the state from the changelogs.
        "spark.sql.streaming.stateStore.autoSnapshotRepair.enabled": "true",
        # A commit to a small table has one file from one writer; for a large table, each task still writes one file.
        "spark.databricks.delta.snapshotPartitions": "2",
        # Rows that are merged into one partition have its value as a constant, so they need not be sorted by it.
        "spark.sql.maxConcurrentOutputFileWriters": "4",
        "spark.sql.shuffle.partitions": os.environ.get("KALMAN_SHUFFLE_PARTITIONS", "8"),
        # Micro-batches are small and their plans are chosen by hand, so adaptive planning would only take time.
        "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
        **build_archive_conf(f"-Dlog4j2.configurationFile={LOGGING.as_uri()} {_JAVA}"),
        "spark.executor.extraJavaOptions": _JAVA,
        "spark.ui.showConsoleProgress": "false",
        # Spark's default pattern does not match Kafka's settings, whose values Spark must hide in plans, too.
        "spark.redaction.regex": SECRETS,
        "spark.sql.redaction.options.regex": f"(?i)url|{SECRETS}",
        "spark.sql.streaming.metricsEnabled": "false",
    }


COMPILED_FROM = 50_000
"""Number of rows of a micro-batch from which it pays to compile its plan."""


def build_interpreted_conf() -> dict[str, str]:
    """Return the settings with which Spark interprets its plans instead of compiling each plan to Java.

    Compiling takes a second at the start of a command, which is longer than the rows of a usual micro-batch take. Also,
    Spark's expressions do not filter these rows. A stream compiles the plans of large micro-batches
    (`set_codegen_for`).
    """
    return {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def build_compiled_conf() -> dict[str, str]:
    """Return the settings with which Spark compiles its plans to Java, which is Spark's default."""
    return {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}


def build_short_rows_conf() -> dict[str, str]:
    """Return the settings of jobs whose rows are a key and a few numbers: no limit on the bytes of an Arrow batch.

    With any other limit, Spark sums the bytes of the batch again for every added row, which takes as long as adding the
    row. The limit is necessary where rows may be long (messages, raw fields, blocks of states), because a column of a
    batch cannot exceed 2 GiB.
    """
    return {_ARROW_BYTES: str(2**31 - 1)}


def stream_conf(kafka: bool) -> dict[str, str]:
    """Return the settings of streams: interpreted plans at first, and limited bytes of Arrow batches from Kafka."""
    return build_interpreted_conf() if kafka else {**build_interpreted_conf(), **build_short_rows_conf()}


def set_codegen_for(session: SparkSession, rows: int) -> None:
    """Let a session compile or interpret its next plans, whichever is faster for this number of rows.

    Spark reuses compiled code only while the code's text stays the same. So numbers that change between micro-batches
    must not be literals in a plan.
    """
    for name, value in (build_compiled_conf() if rows >= COMPILED_FROM else build_interpreted_conf()).items():
        session.conf.set(name, value)


@contextmanager
def choose_codegen(session: SparkSession, rows: int) -> Iterator[None]:
    """Let a session compile the plans made in the block if there are enough rows; afterwards restore the settings."""
    if rows < COMPILED_FROM:
        yield
        return
    before = {name: session.conf.get(name, None) for name in build_compiled_conf()}
    set_codegen_for(session, rows)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, value)


def set_local_paths(session: SparkSession, root: str) -> SparkSession:
    """Make a session read paths as local folders if its warehouse is local, and return the session.

    By default Hadoop resolves paths in the default file system of HADOOP_CONF_DIR, which may be HDFS. Only the
    session's reads and writes are changed, because YARN puts the files of an application into the default file system.
    A new session does not have this setting.
    """
    if find_local_path(root) is not None:
        session.conf.set("fs.defaultFS", "file:///")
    return session


def build_quick_java_conf() -> dict[str, str]:
    """Return the setting with which Java starts sooner, without its optimising compiler, for commands of some seconds.

    The optimising compiler, with its counters, pays off only after minutes. Without this compiler Java reserves 48 MB
    for compiled code. This space is full after some minutes, and then Java interprets. A command that watches a folder
    lives longer, so its space is larger.
    """
    options = build_spark_conf()["spark.driver.extraJavaOptions"]
    return {
        "spark.driver.extraJavaOptions": f"{options} -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    }


def build_short_command_conf() -> dict[str, str]:
    """Return the settings with which a command that reads a few small tables starts and ends sooner.

    Also without compiling plans to Java, which pays off after minutes, not seconds.
    """
    return {**build_quick_java_conf(), "spark.sql.shuffle.partitions": "1", **build_interpreted_conf()}


def find_archive() -> Path:
    """Return the path of the class archive, which is beside the jars from which it was made."""
    return find_jar_folder() / ARCHIVE


def is_archive_trusted() -> bool:
    """Return whether the class archive exists and nobody could have written it who cannot write our code.

    Java runs the archive's classes without comparing them with the jars. So the archive and its folder must belong to
    root, to the process's user or to the owner of our code, and must be writable by their owner alone.
    """
    owners = {0, os.geteuid(), Path(__file__).stat().st_uid}
    try:
        found = [find_archive().lstat(), find_archive().parent.stat()]
    except OSError:
        return False
    return stat.S_ISREG(found[0].st_mode) and all(
        one.st_uid in owners and not one.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for one in found
    )


def build_archive_conf(java_options: str) -> dict[str, str]:
    """Return the Spark settings with `java_options`, and with the class archive if it exists and is trusted.

    Java archives only the classes of the class path. So the jars are put there before Spark adds the jars itself.

    Raises:
        UserError: the content of a jar differs from the content in the release.
    """
    if os.environ.get("KALMAN_CLASS_ARCHIVE") == "0" or not is_archive_trusted():
        return {"spark.driver.extraJavaOptions": java_options}
    return {
        "spark.driver.extraJavaOptions": f"{java_options} {QUIET} -XX:SharedArchiveFile={find_archive()}",
        "spark.driver.extraClassPath": os.pathsep.join(list_jars()),
    }
