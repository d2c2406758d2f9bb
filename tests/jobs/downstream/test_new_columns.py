"""A monitor goes on when the estimates get a column, as another release gives them, while it runs and between runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import monitor
from jobs.core.progress import Progress
from jobs.downstream.rule_exports import MonitorQueries
from jobs.storage.tables import estimates
from tests.jobs.downstream.test_monitor import RACKS, READINGS, readings
from tests.jobs.support.pipeline import Pipeline

pytestmark = pytest.mark.spark


def counted(pipeline: Pipeline) -> int:
    if not pipeline.warehouse.exists("windows/rack"):
        return 0
    table = pipeline.warehouse.read("windows/rack").filter("size = '1h'")
    return int(table.agg({"rows": "sum"}).collect()[0][0] or 0)


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 180
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.5)


def grow(pipeline: Pipeline, column: str) -> None:
    path = pipeline.warehouse.path(estimates("rack"))
    pipeline.warehouse.spark.sql(f"ALTER TABLE delta.`{path}` ADD COLUMN {column} double")


def test_a_monitor_goes_on_when_the_estimates_get_a_column(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, RACKS)
    pipeline.land(readings({"rack0": [("07:00:00", 90.0)]}))
    pipeline.pretrain()
    rows: Any = readings(READINGS).sort_values("at", ignore_index=True)
    pipeline.land(rows[:4])
    pipeline.stream()
    # while it runs
    stop, failures, spec = threading.Event(), [], pipeline.spec
    assert spec.monitor is not None
    queries = MonitorQueries(pipeline.warehouse, spec, 0.5, stop, spec.monitor)

    def run() -> None:
        try:
            queries.run(Progress("monitor rack", None, quiet=True))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: bool(failures) or counted(pipeline) == 4)
        grow(pipeline, "of_another_release")
        pipeline.land(rows[4:6])
        pipeline.stream()
        wait_until(lambda: bool(failures) or counted(pipeline) == 6)
    finally:
        stop.set()
        thread.join()
    assert not failures and counted(pipeline) == 6
    # between two runs
    grow(pipeline, "of_a_third_release")
    pipeline.land(rows[6:])
    pipeline.stream()
    monitor.run(pipeline.settings, "rack")
    assert counted(pipeline) == len(rows) == 8
