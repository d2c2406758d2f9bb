"""The pipeline on a real standalone cluster: workers or the master are lost in mid-stream, and nothing changes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from demo.cluster import Cluster
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


def executor_of(cluster: Cluster, name: str) -> psutil.Process:
    """Return the executor that a worker runs."""
    family = psutil.Process(cluster.workers[name].pid).children(recursive=True)
    return next(one for one in family if one.name() == "java" and one.status() != psutil.STATUS_ZOMBIE)
