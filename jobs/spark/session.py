"""Start the Spark session that every job uses, and keep useless lines away from standard error."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.accumulators import AccumulatorTCPServer, AccumulatorUnixServer
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from jobs.core.errors import RUN_FAILED, UserError, extract_first_line
from jobs.core.faults import find_fault_in_text, require_open_files
from jobs.core.settings import Settings
from jobs.spark.conf import build_quick_java_conf, build_spark_conf, set_local_paths
from jobs.spark.doctor import find_java_problem
from jobs.spark.failures import watch_tasks
from jobs.spark.jars import fetch_optional_jars, list_jars, store_jars
from jobs.spark.job_labels import set_label
from jobs.spark.warehouse import Warehouse
from jobs.storage.object_files import build_store_conf, ensure_probed
from jobs.storage.table_rows import measure_files
from jobs.storage.tables import measurements

FEWEST_FILES = 512
"""Fewest open files with which Java can start Spark, which opens each of its jars."""
LAST_WORDS_SECONDS = 0.1
"""Seconds for which this process, at its end, waits for remaining lines."""

_NOISE = (
    b"Starting Streaming TransformWithStateInPandas",
    b"Streaming TransformWithStateInPandas Python worker",
    b"WARNING: Using incubator modules",
)


@contextmanager
def filter_output() -> Iterator[deque[bytes]]:
    """Filter the standard error of processes that are started in the `with` block, and yield its last lines.

    These processes keep the filter until they end. Lines that they write after the end of this process are lost.
    """
    console = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    # The thread ends with the last process that has the pipe; without such a process, it ends at once.
    last: deque[bytes] = deque(maxlen=200)
    arguments = read, os.dup(console), last
    reader = threading.Thread(target=_forward, args=arguments, name="java output", daemon=True)
    reader.start()
    atexit.register(reader.join, LAST_WORDS_SECONDS)
    try:
        yield last
    finally:
        os.dup2(console, 2)
        os.close(console)


def _forward(read: int, console: int, last: deque[bytes]) -> None:
    after_noise = False
    with os.fdopen(read, "rb") as lines, os.fdopen(console, "wb", buffering=0) as out:
        for line in lines:
            last.append(line)
            noise = line.startswith(_NOISE)
            if not noise and not (after_noise and line == b"\n"):  # an empty line follows each filtered line
                out.write(line)
            after_noise = noise


QUICK_BYTES = 16 << 20
"""Size of the measurements, in bytes, that are read within seconds (about a million rows)."""


def open_warehouse(
    settings: Settings,
    app: str,
    conf: Mapping[str, str] | None = None,
    kafka: bool = False,
    reads_all_of: str | None = None,
) -> Warehouse:
    """Return the warehouse of a command; it starts Spark (`spark_session`) when its session is first needed.

    Args:
        settings: settings of the command.
        app: name of the session.
        conf: settings of the session in addition to the settings of every job.
        kafka: whether the session needs Kafka's connector.
        reads_all_of: model whose measurements the command reads completely; if there are few measurements, Java starts
            as for a short command. None means no such model.
    """

    def start() -> SparkSession:
        sizes = (
            None if reads_all_of is None else measure_files(settings.warehouse, measurements(reads_all_of))
        )
        few = not warehouse.moves_rows or (sizes is not None and sizes[1] <= QUICK_BYTES)
        return spark_session(
            settings, app, {**(conf or {}), **(build_quick_java_conf() if few else {})}, kafka
        )

    warehouse = Warehouse(start, settings.warehouse)
    return warehouse


def spark_session(
    settings: Settings, app: str, conf: Mapping[str, str] | None = None, kafka: bool = False
) -> SparkSession:
    """Start or return the session named `app` on the configured master; `kafka` adds Kafka's connector.

    Under `spark-submit`, the master and the jars come from its command line. Otherwise they come from `settings` and
    from the jars that the installation has fetched.

    Raises:
        UserError: Java is missing, the jars have not been fetched, a cluster's master does not accept this driver, or
            the store of the warehouse has no client here or is not safe.
    """
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    require_open_files(FEWEST_FILES)  # Java would print a stack that names no cause
    jars = [] if submitted else _list_jars(kafka, settings.warehouse)
    ensure_probed(settings.warehouse)
    # PySpark logs each exception as JSON with a stack trace, although the command prints the exception as a sentence.
    logging.getLogger("DataFrameQueryContextLogger").disabled = True
    logging.getLogger("SQLQueryContextLogger").disabled = True
    logging.getLogger().addFilter(_is_not_of_gateway)
    for server in (AccumulatorTCPServer, AccumulatorUnixServer):  # prints a stack trace if Java is killed
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ["PYTHONSAFEPATH"] = "1"  # Java's processes of Python import nothing from the current folder
    builder = SparkSession.builder.appName(app)
    for name, value in {**build_spark_conf(), **build_store_conf(settings.warehouse), **(conf or {})}.items():
        builder = builder.config(name, value)
    if not submitted:
        builder = builder.master(settings.master).config("spark.jars", ",".join(jars))
        builder = builder.config("spark.ui.enabled", os.environ.get("KALMAN_SPARK_UI", "false"))
        if settings.master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        if os.environ.get("LC_ALL") in ("C", "POSIX"):
            os.environ["LC_ALL"] = "C.UTF-8"  # otherwise Java cannot find files with names outside ASCII
    try:
        with filter_output() as last, _interrupt_kept():
            session = builder.getOrCreate()
    except PySparkRuntimeError as error:
        time.sleep(LAST_WORDS_SECONDS)
        text = b"".join(last).decode(errors="replace")
        why = find_fault_in_text(text) or find_java_problem() or "its messages above name the cause"
        raise UserError(f"Spark did not start ({error.getCondition()}): {why}", RUN_FAILED) from error
    except Py4JJavaError as error:
        if not settings.master.startswith("spark:"):
            raise
        raise UserError(
            f"the Spark master {settings.master} did not take this driver: see that it runs, and that the folder in "
            "SPARK_CONF_DIR has a spark-defaults.conf with its secret (`make cluster` prints that folder); Spark said: "
            f"{extract_first_line(error, 200)}",
            RUN_FAILED,
        ) from error
    session.sparkContext.setLogLevel(os.environ.get("KALMAN_LOG_LEVEL", "FATAL"))
    set_label(session, app)
    watch_tasks(session)
    return set_local_paths(session, settings.warehouse)


@contextmanager
def _interrupt_kept() -> Iterator[None]:
    """Keep the command's handler of Ctrl-C, which PySpark would replace by a handler that cancels Spark's jobs."""
    before = signal.getsignal(signal.SIGINT)
    ours = callable(before) and before is not signal.default_int_handler
    try:
        yield
    finally:
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _is_not_of_gateway(record: logging.LogRecord) -> bool:
    """Return whether a record is not of Py4J's gateway, which logs a stack trace if Java is killed amid a call."""
    return record.module != "java_gateway"


def _list_jars(kafka: bool, root: str) -> list[str]:
    # No jars can be added to a running session; KALMAN_KAFKA_JARS=1 adds them to a session that several jobs share.
    wanted = kafka or os.environ.get("KALMAN_KAFKA_JARS") == "1"
    return [*list_jars(), *(fetch_optional_jars("kafka") if wanted else []), *store_jars(root)]
