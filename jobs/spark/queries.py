"""Start streaming queries whose rows are planned once, wait for their end, and find the cause of a failure."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from jobs.core.faults import find_fault
from jobs.spark.failures import find_failure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


POLL_SECONDS = 0.2

_TRACEBACK = "Traceback (most recent call last):\n"
_DETAILS = "\n=== Streaming Query ==="
_AFTER = r"^(?: SQLSTATE: |\tat |== DataFrame ==|Driver stacktrace:|Caused by: |\s*$)"
"""Regular expression for the first line after the message of an exception."""
_CALLED = "py4j.protocol.Py4JJavaError: An error occurred while calling "
_CAPTURED = "pyspark.errors.exceptions.captured."

LOG_TAKEN = "CONCURRENT_STREAM_LOG_UPDATE"
"""Spark's error class if another driver has planned or committed a micro-batch first."""

FINISH_SECONDS = 120.0
"""Seconds for which a stop waits for the running micro-batch before it interrupts it; an interruption loses nothing."""


def set_trigger(writer: DataStreamWriter, seconds: float | None) -> DataStreamWriter:
    """Return the writer with the interval of micro-batches; None means to process the available rows and then end."""
    if seconds is None:
        return writer.trigger(availableNow=True)
    return writer.trigger(processingTime=f"{seconds} seconds")


def start_micro_batches(
    rows: DataFrame, name: str, checkpoint: str, sink: Callable[[DataFrame, int], Any], seconds: float | None
) -> StreamingQuery:
    """Start a query that calls a sink with each micro-batch.

    Args:
        rows: streaming rows that the sink takes.
        name: name of the query.
        checkpoint: path of the checkpoint.
        sink: called with the rows and the number of each micro-batch.
        seconds: as in `set_trigger`.
    """
    writer = rows.writeStream.queryName(name).foreachBatch(sink).option("checkpointLocation", checkpoint)
    return set_trigger(writer, seconds).start()


def await_queries(
    queries: Sequence[StreamingQuery], stop: threading.Event, is_outdated: Callable[[], bool] = lambda: False
) -> list[BaseException]:
    """Wait until all queries end, or one fails; return the failures.

    On a stop signal, on a failure, and once `is_outdated`, the running queries are stopped after their micro-batches.
    """
    try:
        while any(query.isActive for query in queries) and not stop.wait(POLL_SECONDS):
            failed = any(not query.isActive and query.exception() is not None for query in queries)
            if failed or is_outdated():
                break
    finally:
        for query in queries:
            _stop(query)
    return [problem for query in queries if (problem := query.exception()) is not None]


def await_end(
    query: StreamingQuery, stop: threading.Event, is_outdated: Callable[[], bool] = lambda: False
) -> None:
    """Wait for the query's end; on a stop signal, or once `is_outdated`, stop it after the running micro-batch.

    Raises the query's failure.
    """
    for problem in await_queries([query], stop, is_outdated):
        raise problem


def _stop(query: StreamingQuery) -> None:
    """Stop a query after its running micro-batch, if it runs."""
    if query.isActive:
        running = query.status["isTriggerActive"]
        before = _find_last_batch(query)
        waited = 0.0
        while running and query.isActive and _find_last_batch(query) == before and waited < FINISH_SECONDS:
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
            running = query.status["isTriggerActive"]
        query.stop()


def _find_last_batch(query: StreamingQuery) -> int:
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


def find_cause(error: BaseException) -> str:
    """Return the most informative part of an error: the last exception raised in Python, or else the first line."""
    fault = find_failure(error) or find_fault(error)
    if fault is not None:
        return fault
    ours = re.findall(r"\[USER_RAISED_EXCEPTION\] (.+?)(?: SQLSTATE: \w+)?\s*$", str(error), re.MULTILINE)
    if ours:
        return ours[-1][:600]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (_find_python_error(str(error)) or (lines[0] if lines else type(error).__name__))[:600]


def _find_python_error(text: str) -> str | None:
    """Return type and message of the exception in the last traceback of a text from Spark, as one line.

    The traceback of a worker comes after the traceback of the driver, which only reports that a task has failed.
    """
    *_, last = text.partition(_DETAILS)[0].rpartition(_TRACEBACK)
    found = re.search(r"^[A-Za-z_][\w.]*(?::.*)?$", last, re.MULTILINE)  # the first line that is not indented
    if _TRACEBACK not in text or found is None:
        return None
    said = re.split(_AFTER, last[found.start() :], maxsplit=1, flags=re.MULTILINE)[0]
    raised, _, java = said.partition(_CALLED)
    if java:  # the message from Java comes after the name of the call
        raised = java.partition("\n: ")[2]
    return re.sub(r" SQLSTATE: \w+", "", " ".join(raised.split())).removeprefix(_CAPTURED)


def plan_once(spark: SparkSession, rows: DataFrame) -> DataFrame:
    """Return the same rows as a DataFrame whose plan is hidden from the queries that contain the DataFrame.

    Spark plans each micro-batch of a stream anew, including the initial state, which only the first micro-batch reads.
    If the initial state contained a table, each plan would read the table's log, which takes a tenth of a second.
    """
    java: Any = rows._jdf
    session: Any = spark._jsparkSession  # type: ignore[attr-defined]
    planned = session.internalCreateDataFrame(java.queryExecution().toRdd(), java.schema(), False)
    return DataFrame(planned, spark)
