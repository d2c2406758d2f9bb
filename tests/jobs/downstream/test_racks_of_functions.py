"""The racks whose readings climb past a limit, found by a function with a state: live, after a crash, over history."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import estimate, monitor
from jobs.core.errors import UserError
from tests.jobs.downstream import racks as functions
from tests.jobs.downstream.test_monitor import READINGS, forget_the_last_commit, readings
from tests.jobs.downstream.test_rule_functions import BUILT_IN, CLIMBING, NEWEST, racks
from tests.jobs.support.pipeline import Pipeline

pytestmark = [pytest.mark.spark, pytest.mark.slow]
COLUMNS = ["rack", "rule", "status", "event_time", "value", "since", "readings"]


def alerts(pipeline: Pipeline, table: str) -> Any:
    rows: Any = pipeline.warehouse.read(f"{table}/rack").toPandas()[COLUMNS]
    return rows.sort_values(["event_time", "rack", "rule", "status"], ignore_index=True)


def test_racks_by_a_function_live_and_over_history(tmp_path: Path) -> None:
    mine = [
        {**rule, "function": rule["function"].replace("tests.jobs.downstream.", "local_")}
        for rule in (CLIMBING, NEWEST)
    ]
    pipeline = Pipeline(tmp_path, racks(*mine, BUILT_IN))
    pipeline.land(readings({"rack0": [("07:00:00", 90.0)]}))
    pipeline.pretrain()
    rows: Any = readings(READINGS).sort_values("at", ignore_index=True)
    pipeline.land(rows[:5])
    pipeline.stream()
    with pytest.raises(Exception, match="there is no module local_racks"):
        monitor.run(pipeline.settings, "rack")
    shutil.copy(functions.__file__, Path(pipeline.settings.models) / "local_racks.py")
    monitor.run(pipeline.settings, "rack")
    # The run of readings goes on in the next micro-batch, of another process, which crashes before its commit.
    pipeline.land(rows[5:])
    pipeline.stream()
    done = monitor.run(pipeline.settings, "rack").data
    assert forget_the_last_commit(pipeline) == 1
    monitor.run(pipeline.settings, "rack")
    assert done["raised"] == 4 and done["failed"] == 0
    pipeline.land(
        readings({"rack1": [("08:21:05", 98.0)], "rack2": [("08:22:00", 13.0), ("08:27:00", 107.0)]})
    )
    pipeline.stream()
    done = monitor.run(pipeline.settings, "rack").data
    assert (done["cleared"], done["failed"]) == (2, 1)

    live = alerts(pipeline, "alerts")
    found = live[live["rule"] == "climbing"]
    times = found["event_time"].dt.strftime("%H:%M:%S")
    assert list(zip(found["rack"], found["status"], times, found["value"], strict=True)) == [
        ("rack1", "raised", "08:16:04", 102.0),
        ("rack1", "cleared", "08:21:05", 98.0),
    ]
    assert list(found["readings"]) == [3, 1]
    assert list(found["since"].dt.strftime("%H:%M:%S")) == ["08:06:02", "08:21:05"]
    known = live[live["rule"] == "known"].drop(columns="rule").reset_index(drop=True)
    pd.testing.assert_frame_equal(found.drop(columns="rule").reset_index(drop=True), known, check_exact=True)
    sums = live[live["rule"] == "newest"]
    assert list(zip(sums["rack"], sums["status"], sums["event_time"].dt.strftime("%H:%M"), strict=True)) == [
        ("rack2", "raised", "08:11"),
        ("rack2", "raised", "08:16"),
        ("rack2", "failed", "08:22"),
        ("rack2", "raised", "08:27"),
    ]

    # One pass over the history of all rows gives the same, to the bit.
    estimate.run(pipeline.settings, "rack")
    monitor.run(pipeline.settings, "rack", history=True)
    pd.testing.assert_frame_equal(alerts(pipeline, "alerts_history"), live, check_exact=True)

    # A function that breaks its contract ends the query, which names its rule, and loses nothing.
    file = Path(pipeline.settings.models) / "my_odd.py"
    file.write_text("def none(rows, state):\n    return {}, None\n")
    odd = {**mine[1], "name": "odd", "function": "my_odd:none"}
    pipeline.write_spec(racks(odd))
    with pytest.raises(UserError, match="rule odd: my_odd:none returned the state without fields"):
        monitor.run(pipeline.settings, "rack")
