"""A stream whose drivers the launcher submits to a cluster, and the steps of the clusters' tests."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from demo.delta_log import rows_of
from jobs.supervision.driver_log import STOPPED, DriverLog, DriverRecord
from jobs.supervision.driver_status import DriverStatus, list_processes, read_driver_status, request_stop
from kalman_dags.supervision.launchers import ClusterLauncher, Work, build_launcher, format_settings
from tests.dags.conftest import ROOT
from tests.jobs.support.pipeline import Pipeline, assert_as_the_filter_alone, random_rows, random_walk_spec
from tests.support.airflow_api import wait_for

PATIENCE = 300.0


def set_environment(
    monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, connection: dict[str, Any], **variables: str
) -> None:
    """Set the environment in which a pipeline's tasks submit to a cluster by this connection."""
    for name, value in {
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(connection),
        "KALMAN_WAREHOUSE": pipeline.settings.warehouse,
        "KALMAN_MODELS": str(pipeline.settings.models),
        "PYTHONPATH": str(ROOT),
        **variables,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)


class ClusterStream:
    """A stream with a day of history and four days to process; the first two have landed."""

    def __init__(self, folder: Path) -> None:
        self.frames = random_rows(5)
        self.pipeline = Pipeline(folder, random_walk_spec())
        self.pipeline.land(self.frames[0])
        self.pipeline.pretrain()
        self.pipeline.land(*self.frames[1:3])
        self.root = self.pipeline.settings.warehouse
        self.log = DriverLog.at(self.root, "walk")

    def start(self) -> DriverStatus:
        """Submit a driver, and return its state right after."""
        chosen = build_launcher()
        assert isinstance(chosen, ClusterLauncher)
        chosen.start(self.root, Work("walk", 2.0), format_settings(seconds=2.0))
        return read_driver_status(self.log)

    def drives(self) -> list[DriverRecord]:
        """Return the stream's drivers so far, in order."""
        return self.log.history("walk-g0001")

    def estimates(self) -> list[dict[str, Any]]:
        """Return its estimates so far."""
        return rows_of(Path(self.root, "estimates", "walk"))

    def take_in(self, days: int) -> None:
        """Wait until the stream has estimates of `days` days, the history included."""
        count = sum(len(frame) for frame in self.frames[1:days])
        wait_for(lambda: len(self.estimates()) >= count, PATIENCE, f"{count} estimates")

    def kill(self, seconds: float) -> None:
        """Kill the first driver, and wait at most `seconds` until the kill is noticed."""
        (first,) = self.drives()
        for pid in list_processes(first.owner):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not read_driver_status(self.log).driven, seconds, "its end being seen")

    def land_rest(self) -> None:
        """Land the remaining days."""
        self.pipeline.land(*self.frames[3:])

    def stop(self) -> None:
        """Ask the second driver to stop, and check that it stopped and that the first was killed."""
        request_stop(self.log, read_driver_status(self.log), "by the test")
        wait_for(lambda: self.drives()[-1].ended_at, PATIENCE, "the driver's end")
        assert [one.how for one in self.drives()] == [None, STOPPED]

    def compare(self) -> None:
        """Check that the estimates of both drivers together are those of the filter alone."""
        assert_as_the_filter_alone(self.pipeline, self.estimates(), self.frames)
