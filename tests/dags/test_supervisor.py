"""A continuous stream under a real scheduler: SIGKILL of its driver, and of every part of Airflow, as it runs.

Rows arrive all the time. After each kill the rows that came after it must be estimated without anybody's help. In the
end there was one driver at any moment, by the log of drivers, and each row is estimated once, as the filter without
Spark and Airflow says.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from demo.delta_log import rows_of
from jobs.supervision.driver_log import STOPPED, DriverLog, DriverRecord
from jobs.supervision.driver_status import list_processes
from tests.jobs.support.pipeline import Pipeline, assert_as_the_filter_alone, random_rows, random_walk_spec
from tests.support.airflow_api import wait_for
from tests.support.standalone import Airflow, standalone

pytestmark = [pytest.mark.airflow, pytest.mark.spark]

DAG = "kalman_stream_forever__walk"
GENERATION = "walk-g0001"
FOR_EVER = {"schedule": "@continuous", "trigger": "2s"}
FEED_SECONDS = 4.0
PATIENCE = 300.0
KILLS_THAT_MISS = 5
"""So often a process may have done its work in the moment before it is killed."""


class Feed(threading.Thread):
    """Land one frame after another, a few seconds apart, until it is told to stop; some have landed before."""

    def __init__(self, pipeline: Pipeline, frames: list[pd.DataFrame], landed: int) -> None:
        super().__init__(daemon=True)
        self.pipeline, self.frames, self.landed = pipeline, frames, landed
        self.error: BaseException | None = None
        self._over = threading.Event()

    def run(self) -> None:
        try:
            while not self._over.wait(FEED_SECONDS) and self.landed < len(self.frames):
                self.pipeline.land(self.frames[self.landed])
                self.landed += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._over.set()
        self.join(120)
        assert self.error is None and not self.is_alive(), self.error


class Watch(threading.Thread):
    """Look all the time which drivers hold the lease and still have a process."""

    def __init__(self, log: DriverLog) -> None:
        super().__init__(daemon=True)
        self.log, self.most, self.looks = log, 0, 0
        self.error: BaseException | None = None
        self._over = threading.Event()

    def run(self) -> None:
        try:
            while not self._over.wait(0.05):
                holding = [
                    one
                    for one in self.log.history(GENERATION)
                    if one.ended_at is None and list_processes(one.owner)
                ]
                self.most, self.looks = max(self.most, len(holding)), self.looks + 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._over.set()
        self.join(30)
        assert self.error is None, self.error


class Stream:
    """The stream, its feed and its supervisor; `ends`: when the processes of a driver that was killed were gone."""

    def __init__(self, pipeline: Pipeline, airflow: Airflow, feed: Feed) -> None:
        self.pipeline, self.airflow, self.feed = pipeline, airflow, feed
        self.log = DriverLog.at(pipeline.settings.warehouse, pipeline.name)
        self.ends: dict[int, datetime] = {}

    def estimated(self) -> int:
        """Return how many estimates are committed."""
        return len(rows_of(Path(self.pipeline.settings.warehouse, "estimates", "walk")))

    def goes_on(self) -> None:
        """Wait until everything is estimated that has landed by now, and one more frame."""
        count = self.rows(self.feed.landed + 1)
        wait_for(lambda: self.estimated() >= count, PATIENCE, f"{count} estimates, not {self.estimated()}")

    def rows(self, landed: int) -> int:
        """Return how many rows there are behind the history, the first frame, when so many have landed."""
        return sum(len(frame) for frame in self.feed.frames[1:landed])

    def driver(self) -> DriverRecord:
        """Return the driver that runs."""

        def found() -> DriverRecord | None:
            drives = self.log.history(GENERATION)
            return (
                drives[-1]
                if drives and drives[-1].ended_at is None and list_processes(drives[-1].owner)
                else None
            )

        return wait_for(found, PATIENCE, "a driver")

    def task(self) -> dict[str, Any]:
        """Return the newest run's task."""
        (run,) = self.airflow.call(f"/dags/{DAG}/dagRuns?order_by=-run_after&limit=1")["dag_runs"]
        return self.airflow.call(f"/dags/{DAG}/dagRuns/{run['dag_run_id']}/taskInstances/stream")

    def kill_driver(self, part: Callable[[DriverRecord], list[int]]) -> None:
        """Kill processes of the driver, and note when all that could write was gone."""
        drive = self.driver()
        for pid in part(drive):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while list_processes(drive.owner):
            time.sleep(0.01)
        self.ends[drive.epoch] = datetime.now(UTC)

    def part(self, name: str) -> psutil.Process | None:
        """Return the process of a part of Airflow."""
        for one in psutil.Process(self.airflow.script.pid).children():
            with suppress(psutil.Error):
                words = " ".join(one.cmdline()).replace("_", "-")
                if f"airflow {name}" in words and one.status() != psutil.STATUS_ZOMBIE:
                    return one
        return None


def whole(drive: DriverRecord) -> list[int]:
    """The driver, Spark, its workers, and who writes down how it ends: as a machine's memory killer in its fury."""
    group = os.getpgid(drive.owner.pid)
    return [one.pid for one in psutil.process_iter() if _group(one.pid) == group]


def python_alone(drive: DriverRecord) -> list[int]:
    return [drive.owner.pid]


def spark_alone(drive: DriverRecord) -> list[int]:
    return [drive.owner.jvm]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def kill_part(stream: Stream, name: str) -> None:
    """Kill a part of Airflow: the driver does not notice. Kill the driver before the part is back: both recover."""
    before, part = stream.driver(), stream.part(name)
    assert part is not None
    part.kill()
    stream.goes_on()
    assert stream.driver().epoch == before.epoch
    part = wait_for(lambda: stream.part(name), PATIENCE, name)
    part.kill()
    stream.kill_driver(whole)
    stream.goes_on()
    assert stream.driver().epoch == before.epoch + 1
    assert f"Airflow's {name} ended (killed by signal 9)" in stream.airflow.said()


def kill_driver(stream: Stream) -> None:
    for part in (python_alone, spark_alone, whole):
        stream.kill_driver(part)
        stream.goes_on()


def kill_worker(stream: Stream) -> None:
    """Kill the process that supervises the task, as soon as the driver's end wakes it: mostly before it begins."""

    def requeued() -> int:
        log = (stream.airflow.home / "standalone.log").read_text()
        return log.count("Task stuck in queued; will try to requeue")

    for _ in range(KILLS_THAT_MISS):
        task, before = stream.task()["id"], requeued()
        stream.kill_driver(whole)

        def killed(task: str = task) -> bool:
            for one in psutil.process_iter(["cmdline"]):
                if f"LocalExecutor: {task}" in " ".join(one.info["cmdline"] or []):
                    one.kill()
                    return True
            return False

        deadline = time.monotonic() + PATIENCE
        while not killed():
            assert time.monotonic() < deadline, "the task did not wake"
            time.sleep(0.02)
        stream.goes_on()
        wait_for(lambda: stream.task()["state"] == "deferred", PATIENCE, "the task")
        # Killed before the task had begun, it is queued again; later its heartbeat is missed, and it is tried again.
        if requeued() > before or stream.task()["id"] != task:
            break
    else:
        pytest.fail("each process had done its work before it was killed")
    stream.kill_driver(python_alone)
    stream.goes_on()


KILLS: dict[str, Callable[[Stream], None]] = {
    "driver": kill_driver,
    "worker": kill_worker,
    **{
        name: lambda stream, name=name: kill_part(stream, name)
        for name in ("triggerer", "scheduler", "api-server")
    },
}


@contextmanager
def running(folder: Path, **how: Any) -> Iterator[Stream]:
    """Start Airflow and, by switching its DAG on, the stream, with rows that arrive; how: more of `airflow.stream`."""
    frames = random_rows(400)
    pipeline = Pipeline(folder, random_walk_spec(airflow={"stream": {**FOR_EVER, **how}}))
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(frames[1])
    settings = pipeline.settings
    environment = {
        "KALMAN_MODELS": str(settings.models),
        "KALMAN_WAREHOUSE": settings.warehouse,
        "KALMAN_SHUFFLE_PARTITIONS": "2",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    }
    home = folder / "airflow"
    home.mkdir()
    with standalone(home, environment) as airflow:
        feed = Feed(pipeline, frames, 2)
        stream = Stream(pipeline, airflow, feed)
        wait_for(lambda: airflow.call("/dags")["total_entries"] >= 8, 120, "the DAGs")
        airflow.switch(DAG)
        feed.start()
        try:
            stream.goes_on()
            yield stream
        finally:
            feed.stop()
            with suppress(IndexError, ProcessLookupError):  # none has begun, or the last is gone
                for pid in whole(stream.log.history(GENERATION)[-1]):
                    os.kill(pid, signal.SIGKILL)


def one_after_another(drives: list[DriverRecord], killed: dict[int, datetime]) -> None:
    """Check by the log of drivers that each began after the end of the one before."""
    assert [one.epoch for one in drives] == list(range(1, len(drives) + 1))
    for before, after in zip(drives, drives[1:], strict=False):
        end = before.ended_at or killed[before.epoch]
        assert end <= after.began_at, (before, after)


@pytest.mark.parametrize(
    "kill",
    [pytest.param(one, marks=pytest.mark.slow if one == "triggerer" else pytest.mark.soak) for one in KILLS],
)
def test_a_stream_outlives_what_keeps_it(tmp_path: Path, kill: str) -> None:
    with running(tmp_path) as stream:
        watch = Watch(stream.log)
        watch.start()
        KILLS[kill](stream)
        stream.feed.stop()
        landed = stream.feed.frames[: stream.feed.landed]
        count = stream.rows(len(landed))
        wait_for(lambda: stream.estimated() >= count, PATIENCE, f"{count} estimates")
        last = stream.driver()
        stream.airflow.switch(DAG, on=False)
        wait_for(lambda: stream.log.history(GENERATION)[-1].ended_at, PATIENCE, "the driver's end")
        watch.stop()
        drives = stream.log.history(GENERATION)
        assert drives[-1].epoch == last.epoch and drives[-1].how == STOPPED
        assert watch.most == 1 and watch.looks > 100
        one_after_another(drives, stream.ends)
        # A new driver for each one that was killed, and no other.
        assert set(stream.ends) == {one.epoch for one in drives[:-1]}

    estimates = rows_of(Path(stream.pipeline.settings.warehouse, "estimates", "walk"))
    assert_as_the_filter_alone(stream.pipeline, estimates, landed)
