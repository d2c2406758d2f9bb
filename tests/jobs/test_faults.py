"""Drivers killed at any moment, workers killed, two drivers at once: nothing is lost, doubled, or half visible."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from jobs.core.errors import ALREADY_RUNNING
from jobs.lineage import generations
from jobs.snapshots import manifests
from jobs.storage.tables import QUARANTINE
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver, files

pytestmark = pytest.mark.spark


def prepared(folder: Path, days: int) -> tuple[Pipeline, list[pd.DataFrame]]:
    """Return a pipeline with one day in its snapshot and the others landed behind it."""
    frames = random_rows(days)
    pipeline = Pipeline(folder, random_walk_spec())
    pipeline.land(frames[0])
    pipeline.pretrain()
    pipeline.land(*frames[1:])
    return pipeline, frames


def expected(pipeline: Pipeline, frames: list[pd.DataFrame]) -> pd.DataFrame:
    return since(pipeline.batch(), frames[1])


def killed_in_batch(pipeline: Pipeline, batch: int, delay: float, whole_group: bool) -> bool:
    """Run the stream, kill its driver `delay` seconds after micro-batch `batch` was planned; False if it had ended."""
    checkpoint = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001")
    driver = Driver(pipeline, "stream", "--model", "walk")
    driver.wait_for(lambda: str(batch) in files(checkpoint / "offsets"))
    time.sleep(delay)
    ended = driver.process.poll() is not None
    driver.kill(whole_group) if not ended else None
    return not ended


@pytest.mark.core
@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_a_stream_whose_driver_is_killed_ends_as_if_it_had_not_been(tmp_path: Path, kills: int) -> None:
    pipeline, frames = prepared(tmp_path, kills + 2)
    moments = random.Random(kills)
    for batch in range(kills):
        whole_group = moments.random() < 0.5
        assert killed_in_batch(pipeline, batch, moments.uniform(0.0, 1.5), whole_group)
    done = pipeline.stream()
    assert not done.data["began"]
    assert_bit_equal(pipeline.estimates(), expected(pipeline, frames))
    lineages = generations.read_generations(pipeline.warehouse, "walk")
    assert [(one.status, one.owner, one.last_error) for one in lineages] == [("live", None, None)]
    assert lineages[0].epoch >= kills + 1


@pytest.mark.slow
def test_python_workers_that_are_killed_are_replaced(tmp_path: Path) -> None:
    pipeline, frames = prepared(tmp_path, 5)
    checkpoint = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001")
    driver = Driver(pipeline, "stream", "--model", "walk")
    killed = 0
    for batch in range(2):
        driver.wait_for(lambda batch=batch: str(batch) in files(checkpoint / "offsets"))
        for worker in driver.python_workers()[:1]:
            try:
                worker.kill()
                killed += 1
            except psutil.NoSuchProcess:
                pass
    assert driver.finish() == 0, driver.said()
    assert killed
    assert_bit_equal(pipeline.estimates(), expected(pipeline, frames))


@pytest.mark.slow
def test_of_two_drivers_started_at_once_one_runs_and_stops_cleanly(tmp_path: Path) -> None:
    pipeline, frames = prepared(tmp_path, 3)
    drivers = [Driver(pipeline, "stream", "--model", "walk", "--trigger", "1") for _ in range(2)]
    deadline = time.monotonic() + 120
    while all(one.process.poll() is None for one in drivers) and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = [one for one in drivers if one.process.poll() is not None]
    assert [one.process.returncode for one in ended] == [ALREADY_RUNNING], [one.said() for one in drivers]
    assert "error: the stream of walk already has a driver" in ended[0].said()
    running = next(one for one in drivers if one not in ended)
    commits = Path(pipeline.settings.warehouse, "checkpoints", "walk-g0001", "commits")
    running.wait_for(lambda: "1" in files(commits))
    assert running.interrupt() == 0, running.said()  # Ctrl-C, as SIGTERM does, lets it end in good order
    assert "estimated" in running.said()
    assert_bit_equal(pipeline.estimates(), expected(pipeline, frames))
    live = generations.find_live(pipeline.warehouse, "walk")
    assert live is not None
    assert (live.owner, live.last_error) == (None, None)


@pytest.mark.slow
def test_a_pretrain_killed_before_its_manifest_leaves_nothing_visible(tmp_path: Path) -> None:
    frames = random_rows(2)
    pipeline = Pipeline(tmp_path / "killed", random_walk_spec())
    pipeline.land(*frames)
    log = Path(pipeline.settings.warehouse, "snapshots", "_delta_log")
    driver = Driver(pipeline, "pretrain", "--model", "walk")
    driver.wait_for(lambda: "00000000000000000001.json" in files(log))  # its rows are committed
    driver.kill()
    assert manifests.read_manifests(pipeline.warehouse) == []
    (killed,) = pipeline.warehouse.read("snapshots").select("snapshot_id").distinct().collect()
    whole = Pipeline(tmp_path / "whole", random_walk_spec())
    whole.land(*frames)
    for one in (whole, pipeline):
        one.pretrain()
        one.pretrain()  # finds what it made
    (undisturbed,), (retried,) = (
        manifests.read_manifests(whole.warehouse),
        manifests.read_manifests(pipeline.warehouse),
    )
    assert (
        retried.snapshot_id == killed["snapshot_id"]
    )  # a digest of the inputs, the table's identity among them
    assert (retried.checksum, retried.key_count) == (undisturbed.checksum, undisturbed.key_count)
    assert pipeline.warehouse.read("snapshots").count() == retried.key_count


@pytest.mark.core
def test_an_ingest_killed_between_its_commits_is_completed_by_the_next(tmp_path: Path) -> None:
    frame = random_rows(1)[0].astype({"a": "string"})
    frame.loc[:4, "a"] = "many"
    pipeline = Pipeline(tmp_path, random_walk_spec())
    path = tmp_path / "rows.csv"
    frame.to_csv(path, index=False)
    pipeline.warehouse.create("quarantine", QUARANTINE)
    log = Path(pipeline.settings.warehouse, "quarantine", "_delta_log")
    driver = Driver(pipeline, "ingest", "--model", "walk", "--input", str(path))
    driver.wait_for(lambda: "00000000000000000001.json" in files(log))
    driver.kill()
    for _ in range(2):
        pipeline.land(frame, suffix=".csv")  # the same content under another name
    assert pipeline.warehouse.read("quarantine").count() == 5
    assert pipeline.warehouse.read("measurements/walk").count() == len(frame) - 5
