"""The pipeline on a real standalone cluster: a worker is lost in mid-stream, another joins, and nothing changes."""

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
    with Cluster(tmp_path / "cluster", cores=1) as cluster:

        def run(verb: str, *options: str) -> Driver:
            return Driver(pipeline, verb, "--model", "walk", *options, KALMAN_MASTER=cluster.address)

        for verb, *options in (("ingest", "--input", str(paths[0])), ("pretrain",)):
            ended = run(verb, *options)
            assert ended.finish() == 0, ended.said()
        pipeline.land_files(*paths[1:])
        stream = run("stream")
        stream.wait_for(lambda: "1" in files(commits))
        cluster.kill_worker("worker-1")
        stream.wait_for(lambda: "2" in files(commits))  # on the worker that is left
        cluster.add_worker()
        assert stream.finish() == 0, stream.said()
    assert_bit_equal(pipeline.estimates(), since(pipeline.batch(), frames[1]))
