"""Failures of Spark itself: tasks that wait for ever, a killed Java process, killed workers, workers without memory."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from pyspark.sql import SparkSession

from jobs.core import errors
from jobs.core.errors import RUN_FAILED, UserError
from jobs.snapshots.manifests import read_manifests
from jobs.spark import failures
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver, files

pytestmark = pytest.mark.spark

_STALL = {failures.STALL_VARIABLE: "0.1"}
"""Six seconds instead of half an hour."""


def prepared(folder: Path, days: int = 4) -> tuple[Pipeline, pd.DataFrame]:
    """Return a pipeline with one day in its snapshot and the others landed, and the estimates of these."""
    frames = random_rows(days)
    pipeline = Pipeline(folder, random_walk_spec())
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:])
    return pipeline, since(pipeline.batch(), frames[1])


def started(pipeline: Pipeline, **environment: str) -> Driver:
    """Start the stream, and wait for its first micro-batch."""
    driver = Driver(pipeline, "stream", "--model", "walk", **environment)
    commits = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001", "commits")
    driver.wait_for(lambda: "0" in files(commits))
    return driver


def the_sentence(driver: Driver, code: int = RUN_FAILED) -> str:
    """Return the only error of a driver that ended without a traceback."""
    assert driver.finish() == code, driver.said()
    said = driver.said()
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in said and "\tat " not in said, said
    return lines[0]


def java_of(driver: Driver) -> psutil.Process:
    children = psutil.Process(driver.process.pid).children(recursive=True)
    return next(one for one in children if one.name() == "java")


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_time_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(failures.STALL_VARIABLE, text)
    with pytest.raises(UserError, match=f"KALMAN_STALL_MINUTES={text}: give a number of minutes"):
        failures.read_stall_minutes()


def test_a_task_that_waits_ends_its_job_with_the_cause_and_a_busy_one_does_not(spark: SparkSession) -> None:
    def wait(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            time.sleep(600 if frame["id"].iloc[0] == 1 else 0)
            yield frame

    def work(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            time.sleep(0.2)
            yield frame

    spark.range(0, 2, 1, 2).mapInPandas(work, "id long").count()  # the workers have started
    context = SimpleNamespace(_jsc=spark.sparkContext._jsc)
    threading.Thread(target=failures._watch, args=(context, 0.025), daemon=True).start()
    try:
        busy = spark.range(0, 18, 1, 18).mapInPandas(work, "id long")
        assert busy.count() == 18  # longer than the time, in many tasks
        with pytest.raises(Exception, match="made no progress") as caught:
            spark.range(0, 2, 1, 2).mapInPandas(wait, "id long").count()
    finally:
        context._jsc = None  # it ends
    told = StringIO()
    assert errors.show(caught.value, stream=told) == RUN_FAILED
    (line,) = told.getvalue().splitlines()
    assert line.startswith("error: task 1 of stage ")
    assert "it waits for its Python worker; nothing is lost: run the same command again" in line


@pytest.mark.slow
def test_a_stream_whose_worker_hangs_ends_with_the_cause_and_goes_on_after(tmp_path: Path) -> None:
    pipeline, expected = prepared(tmp_path)
    driver = started(pipeline, **_STALL)
    workers = driver.python_workers()
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGSTOP)
    try:
        said = the_sentence(driver)
    finally:
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
    assert "the stream of walk failed: task " in said and "made no progress for 0.1 minutes" in said
    assert "it waits for its Python worker" in said
    pipeline.stream()
    assert_bit_equal(pipeline.estimates(), expected)


def killed_java(driver: Driver) -> str:
    """Kill the Java process of a driver as Linux does if memory is short; return the beginning of the sentence."""
    java = java_of(driver)
    java.kill()
    return f"error: Java (process {java.pid}), in which Spark runs, ended by signal 9 (SIGKILL); nothing is lost: "


@pytest.mark.slow
def test_a_stream_whose_java_is_killed_says_so_and_goes_on_after(tmp_path: Path) -> None:
    pipeline, expected = prepared(tmp_path)
    driver = started(pipeline)
    sentence, began = killed_java(driver), time.monotonic()
    assert the_sentence(driver).startswith(sentence)
    assert time.monotonic() - began < 30
    pipeline.stream()
    assert_bit_equal(pipeline.estimates(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["verify", "export", "upgrade"])
def test_a_verb_whose_java_is_killed_says_so(tmp_path: Path, verb: str) -> None:
    pipeline, _ = prepared(tmp_path, days=2)
    pipeline.stream()
    local = tmp_path / "local"
    more = ["--mode", "repartition"] if verb == "upgrade" else []
    if verb == "upgrade":
        pipeline.write_spec(random_walk_spec(stream={"partitions": 3, "keys_per_block": 8}))
    driver = Driver(pipeline, verb, "--model", "walk", *more, SPARK_LOCAL_DIRS=str(local))
    driver.wait_for(lambda: list(local.glob("blockmgr-*")))  # Spark has begun
    time.sleep(1)
    sentence = killed_java(driver)
    assert the_sentence(driver).startswith(sentence)


FAULTY = '''
"""A motion whose Python worker fails as a file orders: a fault, and how often."""
import os
import resource
import signal
from pathlib import Path

import numpy as np

ORDERS = Path("the file of orders")

def move(x, dt, u):
    if ORDERS.exists() and b"worker_daemon" in Path("/proc/self/cmdline").read_bytes():
        fault, times = ORDERS.read_text().split()
        ORDERS.unlink() if times == "once" else None
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, used + 2**24))
        np.ones(2**23)
    return np.stack([x[0] + 0.01 * dt * x[1], 0.999 * x[1]])

def see(x):
    return np.stack([x[0], x[1] + 0.1 * x[0]])
'''
SENTENCES = {
    "kill": "a Python worker of Spark ended without a message, each time that its task was tried",
    "memory": "a Python worker of Spark had too little memory",
}


def faulty(folder: Path) -> tuple[Pipeline, Path, list[pd.DataFrame]]:
    """Return a pipeline without rows whose workers fail as ordered, and the file of the orders."""
    module = f"faulty_{uuid.uuid4().hex}"  # the session and its workers keep modules
    functions = {
        "filter": "extended",
        "process": {"kind": "function", "f": f"{module}:move", "Q": [[0.1, 0.0], [0.0, 0.1]]},
        "observation": {"h": f"{module}:see", "R": [[1.0, 0.3], [0.3, 2.0]]},
    }
    pipeline, orders = Pipeline(folder, random_walk_spec(**functions)), folder / "orders"
    text = FAULTY.replace("the file of orders", str(orders))
    (pipeline.settings.models / f"{module}.py").write_text(text)
    return pipeline, orders, random_rows(3, rows=60)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "memory"])
def test_a_stream_whose_worker_dies_loses_nothing(tmp_path: Path, fault: str) -> None:
    pipeline, orders, days = faulty(tmp_path)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    orders.write_text(f"{fault} once")
    driver = Driver(pipeline, "stream", "--model", "walk")
    assert driver.finish() == 0, driver.said()  # Spark tried the task again
    assert not orders.exists()
    pipeline.land(days[2])
    orders.write_text(f"{fault} always")
    said = the_sentence(Driver(pipeline, "stream", "--model", "walk"))
    assert f"the stream of walk failed: {SENTENCES[fault]}" in said
    orders.unlink()
    pipeline.stream()
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), days[1]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "memory"])
def test_a_batch_verb_whose_worker_dies_loses_nothing(
    tmp_path: Path, tasks_of_spark: None, fault: str
) -> None:
    pipeline, orders, days = faulty(tmp_path)
    pipeline.land(*days)
    orders.write_text(f"{fault} always")
    with pytest.raises(Exception) as caught:
        pipeline.pretrain()
    told = StringIO()
    assert errors.show(caught.value, stream=told) == RUN_FAILED
    assert SENTENCES[fault] in told.getvalue(), told.getvalue()
    orders.write_text(f"{fault} once")
    pipeline.pretrain()  # Spark tries the task again
    assert not orders.exists()
    found = pipeline.snapshot(read_manifests(pipeline.warehouse, "walk")[0].snapshot_id)
    last = pipeline.batch().groupby("key").tail(1).sort_values("key", ignore_index=True)
    assert list(found["mean"].map(tuple)) == list(last["mean"])
    assert list(found["covariance"].map(tuple)) == list(last["covariance"])
