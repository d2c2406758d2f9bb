"""The cause of a query that failed, as a sentence shows it: texts of Spark 4.2, without most of their frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from jobs.spark.failures import _OF_WORKERS
from jobs.spark.queries import find_cause

FAILED = (
    "[STREAM_FAILED] Query [id = 2dfdf782-131a-4813, runId = 48776dbf-13d4-4273] terminated with exception: "
)
PROXY = (
    FAILED
    + """[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function in foreach batch sink. \
Reason: An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/venv/pyspark/sql/utils.py", line 163, in call
    self.func(DataFrame(jdf, wrapped_session_jdf), batch_id)
  File "/work/write.py", line 28, in write
    KeyError: this is code = "of a frame"
    ^^^^^^^^^^^
"""
)
DETAILS = """
 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 2dfdf782-131a-4813, runId = 48776dbf-13d4-4273]
Current Available Offsets: {RatePerMicroBatchStream[rowsPerBatch=10]: {"offset":10,"timestamp":1000}}

Logical Plan:
~WriteToMicroBatchDataSourceV1 ForeachBatchSink, 2dfdf782-131a-4813, [checkpointLocation=/tmp/a], Append
Traceback: no such thing
"""
WORKER = """pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/venv/pyspark.zip/pyspark/worker.py", line 3622, in main
    process()
  File "/work/operator.py", line 59, in handleInputRows
    raise IndexError("tuple index out of range")
IndexError: tuple index out of range"""
DEAD = """py4j.protocol.Py4JJavaError: An error occurred while calling o620.count.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 8.0 failed 4 times, most recent \
failure: Lost task 0.3 in stage 8.0 (TID 29) (localhost executor driver): org.apache.spark.SparkException: Python \
worker exited unexpectedly (crashed).
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.applyOrElse(PythonRunner.scala:704)
Caused by: java.io.EOFException
\t... 23 more

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.$anonfun$abortStage$3(DAGScheduler.scala:3318)
"""
ABORTED = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 8.0 failed 4 times, most "
    "recent failure: Lost task 0.3 in stage 8.0 (TID 29) (localhost executor driver): org.apache.spark.SparkException: "
)
TASK = """Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times, most recent failure: Lost task 1.3 in \
stage 3.0 (TID 29) (10.0.0.7 executor 2): \
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/work/operator.py", line 59, in bad
    raise Odd("the row is odd: 7")
walk.Odd: the row is odd: 7

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
"""


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        ("KeyError: 'no such column'", "KeyError: 'no such column'"),
        ("OSError: [Errno 113] it was not so", "OSError: [Errno 113] it was not so"),
        ("pyarrow.lib.ArrowTypeError: Expected bytes, got a 'int' object",) * 2,
        (
            "Odd: first line\nsecond line: with a colon\n  third",
            "Odd: first line second line: with a colon third",
        ),
        ("Odd", "Odd"),
        ("jobs.core.errors.UserError: the lease is gone: start again",) * 2,
        (
            "pyspark.errors.exceptions.captured.AnalysisException: [PATH_NOT_FOUND] Path does not exist: /a. "
            "SQLSTATE: 42K03",
            "AnalysisException: [PATH_NOT_FOUND] Path does not exist: /a.",
        ),
        (
            "pyspark.errors.exceptions.captured.ArithmeticException: [DIVIDE_BY_ZERO] Division by zero. SQLSTATE: "
            '22012\n== DataFrame ==\n"__truediv__" was called from\n/work/write.py:65\n',
            "ArithmeticException: [DIVIDE_BY_ZERO] Division by zero.",
        ),
        (
            "KeyError: 'a'\n\nThe above exception was the direct cause of the following exception:\n\n"
            'Traceback (most recent call last):\n  File "/work/write.py", line 37, in write\n    raise RuntimeError\n'
            "RuntimeError: could not look up a",
            "RuntimeError: could not look up a",
        ),
        (WORKER, "IndexError: tuple index out of range"),
        (DEAD, _OF_WORKERS[r"Python worker exited unexpectedly \(crashed\)"]),
        (
            "pyspark.errors.exceptions.captured.SparkRuntimeException: [USER_RAISED_EXCEPTION] a row of m has no key "
            "SQLSTATE: P0001",
            "a row of m has no key",
        ),
    ],
)
def test_the_cause_of_a_micro_batch_that_failed_is_the_exception_that_was_raised(
    raised: str, cause: str
) -> None:
    assert find_cause(RuntimeError(PROXY + raised + DETAILS)) == cause


def test_the_cause_of_a_task_that_failed_is_what_its_worker_or_java_said() -> None:
    assert find_cause(RuntimeError(FAILED + TASK + DETAILS)) == "walk.Odd: the row is odd: 7"
    java = FAILED + ABORTED + "java.io.IOException: the disk is gone\n\tat java.base/java.io.File" + DETAILS
    assert find_cause(RuntimeError(java)).endswith("executor driver): org.apache.spark.SparkException: "
        "java.io.IOException: the disk is gone")  # fmt: skip


class Odd(Exception):
    """An exception of no kind that anybody knows."""


def write_badly(frame: DataFrame, number: int) -> None:
    raise Odd("the table has moved")


def read_badly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        raise LookupError("the row is odd: 7")
        yield batch


def count(frame: DataFrame, number: int) -> None:
    frame.count()


@pytest.mark.spark
@pytest.mark.parametrize(
    ("fails", "write", "cause"),
    [
        (False, write_badly, "Odd: the table has moved"),
        (True, count, "LookupError: the row is odd: 7"),
    ],
)
def test_the_cause_of_a_query_that_failed_in_spark_is_told(
    spark: SparkSession, tmp_path: Path, fails: bool, write: Callable[[DataFrame, int], None], cause: str
) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    if fails:
        rows = rows.mapInArrow(read_badly, "timestamp timestamp, value long")
    started = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "c"))
    query = started.trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException) as failed:
        query.awaitTermination()
    assert find_cause(failed.value).endswith(cause)
    assert "Traceback" not in find_cause(failed.value)
