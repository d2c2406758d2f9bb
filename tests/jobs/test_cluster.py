"""The pipeline on a real standalone cluster: workers or the master are lost in mid-stream, and nothing changes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from unittest import mock

import psutil
import pytest

from demo.cluster import Cluster
from tests.conftest import ROOT
from tests.jobs.soak.state_kills import ARRIVED, DENSE, SPARSE
from tests.jobs.soak.state_world import StateWorld
from tests.jobs.soak.world import MODEL
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver, files

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_worker_that_is_lost_and_one_that_joins_change_nothing(tmp_path: Path) -> None:
    frames = random_rows(6)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    paths = [tmp_path / f"day-{number}.parquet" for number in range(len(frames))]
    for frame, path in zip(frames, paths, strict=True):
        frame.to_parquet(path, index=False)
    commits = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001", "commits")
    with Cluster(tmp_path / "cluster", cores=1, encrypt=True) as cluster:

        def run(verb: str, *options: str) -> Driver:
            return Driver(pipeline, verb, "--model", "walk", *options, **cluster.environment)

        for verb, *options in (("ingest", "--input", str(paths[0])), ("pretrain",)):
            ended = run(verb, *options)
            assert ended.finish() == 0, ended.said()
        for path in paths[1:]:
            pipeline.land_files(path)  # a micro-batch each
        stream = run("stream")
        stream.wait_for(lambda: "1" in files(commits))
        cluster.kill_worker("worker-1")
        stream.wait_for(lambda: "2" in files(commits))  # on the worker that is left
        cluster.add_worker()
        assert stream.finish() == 0, stream.said()
        # Without a live generation it would be refused before it asks the master.
        stranger = Driver(pipeline, "verify", "--model", "walk", KALMAN_MASTER=cluster.address)
        assert stranger.finish() == 1, stranger.said()
        assert "did not take this driver" in stranger.said() and "Traceback" not in stranger.said()
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))


def test_a_master_that_is_killed_and_started_again_changes_nothing(tmp_path: Path) -> None:
    frames = random_rows(6)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    commits = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001", "commits")
    pipeline.land(frames[0])
    pipeline.pretrain()
    with Cluster(tmp_path / "cluster", cores=1) as cluster:
        words = ("stream", "--model", "walk", "--trigger", "1")
        stream = Driver(pipeline, *words, **cluster.environment)
        pipeline.land(frames[1])
        stream.wait_for(lambda: "0" in files(commits))
        cluster.kill_master()
        pipeline.land(frames[2])
        stream.wait_for(lambda: "1" in files(commits))  # without a master
        cluster.restart_master()
        pipeline.land(frames[3])
        stream.wait_for(lambda: "2" in files(commits))
        # The new master knows the application: it gives it an executor for each one that is lost from now on.
        for name in list(cluster.workers):
            cluster.kill_worker(name)
        joined = cluster.add_worker()
        pipeline.land(frames[4])
        stream.wait_for(lambda: "3" in files(commits))
        assert list((tmp_path / "cluster" / joined).glob("app-*"))
        cluster.kill_master()  # and again
        cluster.restart_master()
        pipeline.land(frames[5])
        stream.wait_for(lambda: "4" in files(commits))
        assert stream.terminate() == 0, stream.said()
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))


SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.task.duration.threshold": "1s",  # of a task that is alone in its stage
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.sql.streaming.stateStore.maintenanceInterval": "1s",
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "1",
}
"""A task that takes longer than the other gets a second attempt, on the other executor."""


def test_second_attempts_of_tasks_and_a_killed_executor_change_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "SPARK_SUBMIT_OPTS", os.environ["SPARK_SUBMIT_OPTS"]
    )  # of which the world makes its own
    world = StateWorld(tmp_path / "world", 1, ARRIVED, 2)
    for kind in (DENSE, *[SPARSE] * 5, DENSE, *[SPARSE] * 5):
        world.land_day(kind)
    checkpoint = Path(world.pipeline.settings.warehouse, "checkpoints", f"{MODEL}-g0001")
    offsets, commits, events = checkpoint / "offsets", checkpoint / "commits", tmp_path / "events"
    events.mkdir()
    given = {**SPECULATION, "spark.eventLog.dir": events.as_uri()}
    options = " ".join(
        [os.environ["SPARK_SUBMIT_OPTS"], *(f"-D{name}={value}" for name, value in given.items())]
    )
    with Cluster(tmp_path / "cluster", cores=1) as cluster:
        cluster.kill_worker("worker-2")
        cluster.add_worker("127.0.0.2")  # Spark makes no second attempt on the same host
        words = ("stream", "--model", MODEL)
        stream = Driver(world.pipeline, *words, SPARK_SUBMIT_OPTS=options, **cluster.environment)
        for number, batch in enumerate((3, 5, 8, 10)):
            stream.wait_for(lambda batch=batch: str(batch) in files(offsets))
            executor = executor_of(cluster, ("worker-1", "worker-3")[number % 2])
            executor.suspend()
            stream.wait_for(lambda batch=batch: str(batch) in files(commits))
            executor.resume()
        stream.wait_for(lambda: "11" in files(offsets))
        executor_of(cluster, "worker-1").kill()
        assert stream.finish() == 0, stream.said()
    told = "".join(file.read_text() for file in events.rglob("*") if file.is_file())
    assert told.count('"Speculative":true') >= 4
    assert world.problems() == []


HOLDS = """
import sys

words = getattr(sys, "orig_argv", [])
if "jobs.cli" in words:
    import os

    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from jobs.storage.checkpoints import Checkpoint

    start = DataStreamWriter.start

    def started(self, *arguments, **options):
        self._spark.conf.set("spark.sql.streaming.stateStore.checkpointFormatVersion", os.environ["STATES"])
        return start(self, *arguments, **options)

    DataStreamWriter.start = started
    Checkpoint.has_states_of_format_1 = lambda checkpoint: False  # a driver of an earlier release goes on
if "jobs.spark.worker_daemon" in words:
    import os
    import time
    from pathlib import Path

    from pyspark import TaskContext

    from jobs.streaming.processors import FilterProcessor

    handle = FilterProcessor.handleInputRows

    def held(self, *arguments):
        yield from handle(self, *arguments)
        task, notes = TaskContext.get(), Path(os.environ["NOTES"])
        if (task.getLocalProperty("streaming.sql.batchId"), task.partitionId()) == ("BATCH", 0):
            name = f"attempt-{task.attemptNumber()}"
            (notes / "new").write_text(str(os.getpid()))
            (notes / "new").rename(notes / name)
            while not (notes / f"{name}-goes-on").exists():
                time.sleep(0.01)

    FilterProcessor.handleInputRows = held
"""
"""The drivers write a format of states, and both attempts of a task wait before Spark commits the state."""
HELD = 2
"""The micro-batch in which two attempts meet: the sparse one behind a dense one."""


@pytest.mark.parametrize("states", ["2", "1"])
def test_two_attempts_of_a_task_both_write_the_state_and_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    """One attempt writes a change, the other one blocks; the first one ends last, and then its machine is lost."""
    for name in ("SPARK_SUBMIT_OPTS", "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with mock.patch.object(StateWorld, "catch_up"):  # only the driver writes states
        world = StateWorld(tmp_path / "world", 1, ARRIVED, 2)
    for kind in (DENSE, *[SPARSE] * 4):
        world.land_day(kind)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "sitecustomize.py").write_text(HOLDS.replace("BATCH", str(HELD)))
    path = os.pathsep.join([str(notes), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("NOTES", str(notes))
    patient = {**SPECULATION, "spark.speculation.minTaskRuntime": "10s"}
    patient = {
        name: value for name, value in patient.items() if "stateStore" not in name and "eventLog" not in name
    }
    options = " ".join(
        [os.environ["SPARK_SUBMIT_OPTS"], *(f"-D{name}={value}" for name, value in patient.items())]
    )
    checkpoint = Path(world.pipeline.settings.warehouse, "checkpoints", f"{MODEL}-g0001")

    def written() -> set[tuple[str, int, int]]:
        """Return the changelogs of the micro-batch; one that replaced another has a file of its own."""
        return {
            (file.name, file.stat().st_ino, file.stat().st_size)
            for file in (checkpoint / "state" / "0" / "0").glob(f"{HELD + 1}*.changelog")
        }

    with Cluster(tmp_path / "cluster", cores=1) as cluster:
        cluster.kill_worker("worker-2")
        cluster.add_worker("127.0.0.2")
        stream = Driver(
            world.pipeline, "stream", "--model", MODEL,
            SPARK_SUBMIT_OPTS=options, STATES=states, **cluster.environment,
        )  # fmt: skip
        stream.wait_for(lambda: "attempt-1" in files(notes))
        lost = worker_of(cluster, int((notes / "attempt-0").read_text()))
        assert lost != worker_of(cluster, int((notes / "attempt-1").read_text()))
        os.killpg(
            stream.process.pid, signal.SIGSTOP
        )  # else it ends the first attempt when the second one is done
        (notes / "attempt-1-goes-on").touch()
        stream.wait_for(written)
        second = written()
        (notes / "attempt-0-goes-on").touch()
        stream.wait_for(lambda: written() - second)
        first = written() - second
        cluster.kill_worker(lost)
        os.killpg(stream.process.pid, signal.SIGCONT)
        assert stream.finish() == 0, stream.said()
    sizes = [size for some in (first, second) for _, _, size in some]
    assert len(sizes) == 2 and sizes[0] < sizes[1] / 2, "one wrote a change, the other one blocks"
    problems = world.problems()
    if states == "2":
        assert problems == []
    else:  # the files of the two were read as one
        assert len(problems) == 1 and re.search(r"lacks \d+ rows of \d+ keys", problems[0]), problems


def worker_of(cluster: Cluster, pid: int) -> str:
    """Return the worker below whose executor a process runs."""
    above = {one.pid for one in psutil.Process(pid).parents()}
    return next(name for name, process in cluster.workers.items() if process.pid in above)


def executor_of(cluster: Cluster, name: str) -> psutil.Process:
    """Return the executor that a worker runs."""
    family = psutil.Process(cluster.workers[name].pid).children(recursive=True)
    return next(one for one in family if one.name() == "java" and one.status() != psutil.STATUS_ZOMBIE)
