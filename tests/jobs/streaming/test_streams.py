"""Several streams in one Spark application: each as if it ran alone, even if others fail."""

from __future__ import annotations

import signal
from pathlib import Path

import pandas as pd
import pytest

from jobs import stop
from jobs.core.errors import UserError
from jobs.lineage import generations, leases
from jobs.storage.checkpoints import Checkpoint
from jobs.streaming import several
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import read_driver_status
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since
from tests.jobs.support.processes import Driver

MODELS = ("walk", "drift")


def frames(days: int) -> dict[str, list[pd.DataFrame]]:
    return {name: random_rows(days, seed=seed) for seed, name in enumerate(MODELS)}


def landed(folder: Path, rows: dict[str, list[pd.DataFrame]]) -> dict[str, Pipeline]:
    """Return two models in one warehouse, each with one day in its snapshot and the others landed after it."""
    pipelines = {}
    for name, (first, *later) in rows.items():
        one = pipelines[name] = Pipeline(folder, random_walk_spec(name))
        one.land(first)
        one.pretrain()
        one.land(*later)
    return pipelines


def assert_whole(pipelines: dict[str, Pipeline], rows: dict[str, list[pd.DataFrame]]) -> None:
    for name, one in pipelines.items():
        assert_bit_equal(one.estimates(), since(one.batch(), rows[name][1]))


@pytest.mark.slow
@pytest.mark.spark
def test_a_stream_that_cannot_start_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = frames(2)
    pipelines = landed(tmp_path, rows)
    bare = Pipeline(tmp_path, random_walk_spec("bare"))
    bare.land(rows["walk"][0])
    report = several.run(bare.settings, ["walk", "bare", "drift"])
    (problem,) = report.errors
    assert "bare" in problem and "pretrain" in problem
    assert "the other streams continue" in capsys.readouterr().err
    assert {name: one.get("rows") for name, one in report.data["streams"].items()} == {
        "walk": 150,
        "bare": None,
        "drift": 150,
    }
    assert_whole(pipelines, rows)


def test_options_that_cannot_serve_several_models_are_refused(tmp_path: Path) -> None:
    settings = Pipeline(tmp_path, random_walk_spec("walk")).settings
    Pipeline(tmp_path, random_walk_spec("drift"))
    with pytest.raises(UserError, match="--model walk is given twice"):
        several.run(settings, ["walk", "drift", "walk"])
    with pytest.raises(UserError, match="it must contain {model}"):
        several.run(settings, list(MODELS), metrics_file="metrics.prom")


@pytest.mark.spark
@pytest.mark.slow
def test_one_stream_is_stopped_while_the_other_continues_and_a_kill_of_both_loses_nothing(
    tmp_path: Path,
) -> None:
    rows = frames(5)
    pipelines = landed(tmp_path, {name: days[:3] for name, days in rows.items()})
    walk, drift = pipelines.values()
    both = [word for name in MODELS for word in ("--model", name)]
    driver = Driver(walk, "stream", *both, "--trigger", "1")

    def committed(one: Pipeline) -> int:
        return Checkpoint(one.warehouse, f"checkpoints/{one.name}-g0001").find_last_commit() or -1

    driver.wait_for(lambda: all(committed(one) >= 1 for one in pipelines.values()))
    live = generations.find_live(walk.warehouse, "walk")
    assert live is not None
    with leases.hold_stream(walk.warehouse, live, "a trial", drain=True):
        assert not read_driver_status(DriverLog.at(walk.settings.warehouse, "walk")).driven
    stop.run(walk.settings, "walk")  # it has stopped already
    assert not read_driver_status(DriverLog.at(walk.settings.warehouse, "walk")).driven
    for name, one in pipelines.items():
        one.land(rows[name][3])
    driver.wait_for(lambda: committed(drift) >= 2)
    assert committed(walk) == 1
    driver.process.send_signal(signal.SIGSTOP)
    for name, one in pipelines.items():
        one.land(rows[name][4])
    driver.kill()

    again = Driver(walk, "stream", *both)
    assert again.finish() == 0, again.said()
    assert_whole(pipelines, rows)
