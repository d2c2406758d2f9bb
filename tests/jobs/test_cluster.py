"""The pipeline on a real standalone cluster: workers or the master are lost in mid-stream, and nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.cluster import Cluster
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
