"""Copies of late rows reach only the streams that refused them, also those that ran before the first copy was made."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import quarantine
from jobs.landing.rejected import replay
from jobs.lineage import generations
from jobs.lineage.generations import DeployedModel
from jobs.storage.quarantine import RowSelection
from jobs.streaming.driver import Driver
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark


def fails(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_the_first_copies_do_not_reach_a_stream_that_has_the_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = random_rows(3, rows=60)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1], days[1].assign(at=days[0]["at"] + pd.Timedelta(seconds=1)))
    refused = pipeline.stream().data["late"]
    assert refused > 20
    pipeline.write_spec(random_walk_spec(late="apply"))
    with monkeypatch.context() as patch:
        # The rows are chosen for the generation that refused them, and the replay is killed before it lands them.
        patch.setattr(replay, "_complete", fails)
        with pytest.raises(KeyboardInterrupt):
            quarantine.act(pipeline.settings, "replay", "walk", RowSelection(reason="late"))
    # Meanwhile another generation begins from a batch pass, which has applied the originals, and its stream runs.
    again = pipeline.pretrain().data["snapshot"]
    assert pipeline.stream(adopt=again).data["rows"] == 0
    pipeline.land(days[2])
    stop = threading.Event()
    running = Driver(pipeline.settings, DeployedModel(pipeline.spec, pipeline.warehouse), 0.1, stop)
    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(running.drive()), daemon=True)
    thread.start()
    wait_for(pipeline, thread)
    assert not pipeline.warehouse.exists("late_copies")
    done = quarantine.act(pipeline.settings, "replay", "walk").data
    assert done["landed_of_interrupted"] == refused
    wait_for(pipeline, thread)
    stop.set()
    thread.join(60)
    (report,) = reports
    assert report.data["rows"] == len(days[2])


def wait_for(pipeline: Pipeline, thread: threading.Thread) -> None:
    """Wait until the live generation has read the newest version of the measurements."""
    warehouse, deadline = pipeline.warehouse, time.monotonic() + 60
    while True:
        live = generations.read_named(warehouse, "walk")
        if generations.compute_progress_rank(warehouse, live) == warehouse.latest_version(
            "measurements/walk"
        ):
            return
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.2)
