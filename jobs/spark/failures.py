"""Failures of Spark itself: a Java process or Python workers that ended, and tasks that make no progress.

A task may wait for ever, for example for a Python worker that hangs. Spark waits, too, and the driver's heartbeat goes
on. A thread of the driver therefore cancels each stage whose tasks make no progress for a time.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext

from jobs.core.errors import UserError
from jobs.core.faults import find_fault, find_full_folder, list_causes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STALL_VARIABLE = "KALMAN_STALL_MINUTES"
STALL_MINUTES = 60.0
"""Default time without progress. A task counts each batch of rows that it reads or writes, which takes seconds."""

_POLL_SECONDS = 10.0
_LOST = ("Py4JNetworkError", "ConnectionRefusedError", "ConnectionResetError")
_LAST_SECONDS = 5.0
"""Seconds for which an error of the connection to Java waits for the end of Java's process."""
_COUNTS = (
    *("numCompleteTasks", "numFailedTasks", "inputRecords", "outputRecords"),
    *("shuffleReadBytes", "shuffleWriteBytes", "memoryBytesSpilled"),
)
"""Counts of a stage that grow while its tasks work; executors report them every ten seconds."""
_TASKS_LISTED = 10_000

STATE_LOST = "CANNOT_LOAD_STATE_STORE"
"""Spark's error class for missing or damaged files of its state, and for a full disk under its local copy."""
_LEAST_ROOM = 16 << 20
"""Bytes below which a disk counts as full; Spark's error of its state does not always name a full disk."""
_OF_SPARK = re.compile("Job aborted due to stage failure|PythonException")
_AGAIN = "give the machine more memory, or use fewer tasks at once (--master local[1]), and run the same command again"
_OF_WORKERS = {
    r"Python worker exited unexpectedly \(crashed\)": (
        "a Python worker of Spark ended without a message, each time that its task was tried, as Linux ends processes "
        f"if memory is short (`dmesg` names them); nothing is lost: {_AGAIN}"
    ),
    r"MemoryError|std::bad_alloc|malloc of size": (
        f"a Python worker of Spark had too little memory; nothing is lost: {_AGAIN}"
    ),
}
"""Regular expressions of Spark's messages about its Python workers, and their sentences."""

_watched: set[str] = set()
_stalls: list[str] = []


def find_failure(error: BaseException) -> str | None:
    """Return a sentence about a failure of Spark that caused an error, or None if no such failure caused it."""
    texts = [f"{type(each).__name__}: {each}" for each in list_causes(error, handled=True)]
    lost = any(text.startswith(_LOST) for text in texts)
    stall = next((stall for stall in _stalls if any(stall in text for text in texts)), None)
    if _OF_SPARK.search(texts[0]):
        stall = stall or next((said for sign, said in _OF_WORKERS.items() if re.search(sign, texts[0])), None)
    if STATE_LOST in texts[0]:
        stall = stall or _describe_full_disk()
    return stall or _describe_java_end(lost)


def _describe_full_disk() -> str | None:
    """Return a sentence if a disk with Spark's local copies of its state is full."""
    context = SparkContext._active_spark_context
    default = tempfile.gettempdir() if context is None else context.getConf().get("spark.local.dir", "/tmp")
    folders = (os.environ.get("SPARK_LOCAL_DIRS") or str(default)).split(",")
    folder = find_full_folder(folders, _LEAST_ROOM)
    return folder and find_fault(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder))


def _describe_java_end(lost: bool) -> str | None:
    """Return a sentence if Spark's Java process ended; `lost`: whether the connection to the process failed."""
    process: subprocess.Popen[bytes] | None = getattr(SparkContext._gateway, "proc", None)
    try:  # there is no process if Java (spark-submit) started this one, whose output ends with Java
        code = None if process is None else process.wait(_LAST_SECONDS if lost else 0.0)
    except subprocess.TimeoutExpired:
        code = None
    if process is None or code is None:
        return None
    how = f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.Signals(-code).name})"
    return (
        f"Java (process {process.pid}), in which Spark runs, ended {how}; nothing is lost: run the same command again. "
        "Linux ends processes if memory is short (`dmesg` names them): then give the machine more memory, or Java less "
        "(spark.driver.memory)"
    )


def read_stall_minutes() -> float:
    """Return the minutes without progress after which a stage is cancelled; 0 means never.

    Raises:
        UserError: the environment variable has no such number.
    """
    text = os.environ.get(STALL_VARIABLE, str(STALL_MINUTES))
    try:
        minutes = float(text)
        if minutes >= 0:
            return minutes
    except ValueError:
        pass
    raise UserError(f"{STALL_VARIABLE}={text}: give a number of minutes, such as 60, or 0 to wait for ever")


def watch_tasks(session: SparkSession) -> None:
    """Start, once for each Spark application, the thread that cancels stages without progress.

    Raises:
        UserError: the environment variable has no number of minutes.
    """
    minutes, context = read_stall_minutes(), session.sparkContext
    if minutes and context.applicationId not in _watched:
        _watched.add(context.applicationId)
        threading.Thread(target=_watch, args=(context, minutes), name="stalled tasks", daemon=True).start()


def _watch(context: SparkContext, minutes: float) -> None:
    pause = min(_POLL_SECONDS, minutes * 60 / 6)
    unchanged: dict[tuple[int, int], tuple[list[int], int]] = {}
    while context._jsc is not None:
        time.sleep(pause)
        try:
            # Measurements are counted, and not the time, because the machine may sleep.
            unchanged = {
                stage: (counts, unchanged[stage][1] + 1 if unchanged.get(stage, ((),))[0] == counts else 0)
                for stage, counts in _measure(context)
            }
            for stage in [stage for stage, (_, times) in unchanged.items() if times * pause >= minutes * 60]:
                _cancel(context, stage, minutes)
        except Exception:  # Spark has ended, or is busy; the next measurement may succeed
            continue


def _measure(context: SparkContext) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yield number and attempt of each stage with running tasks, and the counts of its progress."""
    stages: Any = _get_java(context).statusStore().activeStages()
    for stage in (stages.apply(place) for place in range(stages.size())):
        if stage.numActiveTasks():
            yield (stage.stageId(), stage.attemptId()), [getattr(stage, name)() for name in _COUNTS]


def _cancel(context: SparkContext, stage: tuple[int, int], minutes: float) -> None:
    """Cancel a stage; its driver gets an error with the cause."""
    tasks: Any = _get_java(context).statusStore().taskList(*stage, _TASKS_LISTED)
    every = (tasks.apply(place) for place in range(tasks.size()))
    task = next(each for each in every if each.status() == "RUNNING")
    stall = (
        f"task {task.index()} of stage {stage[0]} made no progress for {minutes:g} minutes (executor "
        f"{task.executorId()}, {task.host()}): {_describe_wait(context, task)}; nothing is lost: run the same command "
        f"again, and set {STALL_VARIABLE} if a task may take longer"
    )
    _stalls.append(stall)
    _get_java(context).cancelStage(stage[0], stall)


def _describe_wait(context: SparkContext, task: Any) -> str:
    """Return where a task waits, from the threads of its executor."""
    dump: Any = _get_java(context).getExecutorThreadDump(task.executorId())
    threads = dump.get() if dump.isDefined() else ()
    mine = [each for each in threads if f"TID {task.taskId()})" in each.threadName()]
    if not mine:
        return "its executor does not answer"
    frames = mine[0].stackTrace().elems().mkString("\n").splitlines()
    if any(".python." in frame for frame in frames):
        return "it waits for its Python worker"
    return f"it is in {frames[0]}"


def _get_java(context: SparkContext) -> Any:
    java: Any = context._jsc
    return java.sc()
