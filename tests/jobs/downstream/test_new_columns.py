"""A monitor goes on when the estimates get a column, as another release gives them, while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.core.progress import Progress
from jobs.downstream.rule_exports import MonitorQueries
from tests.jobs.downstream.test_monitor import RACKS, READINGS, add_column, readings
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


@pytest.mark.slow
def test_a_monitor_goes_on_when_the_estimates_get_a_column(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, RACKS)
    pipeline.land(readings({"rack0": [("07:00:00", 90.0)]}))
    pipeline.pretrain()
    rows: Any = readings(READINGS).sort_values("at", ignore_index=True)
    pipeline.land(rows[:4])
    pipeline.stream()
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
        add_column(pipeline, "of_another_release")
        pipeline.land(rows[4:])
        pipeline.stream()
        wait_until(lambda: bool(failures) or counted(pipeline) == len(rows))
    finally:
        stop.set()
        thread.join()
    assert not failures and counted(pipeline) == len(rows) == 8
