"""Windows and alerts over a history are those of the monitor over the live estimates of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import estimate, monitor, report
from jobs.core.errors import UserError
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark

MONITOR: dict[str, Any] = {
    "watermark": "400d",
    "by": ["id"],
    "windows": [{"size": "6h", "slide": "3h"}, {"size": "1d"}],
    "rules": [
        {"name": "high", "kind": "level", "at_least": 3.0, "readings": 2, "clear_below": 2.5},
        {"name": "odd", "kind": "nis", "at_least": 3.0, "clear_readings": 2},
    ],
}
SILENCE = {"name": "silent", "kind": "silence", "after": "12h"}
ALERT = ["key", "rule", "event_time", "status", "value", "since", "readings"]


def table(pipeline: Pipeline, name: str, by: list[str]) -> pd.DataFrame:
    return pipeline.warehouse.read(f"{name}/walk").toPandas().sort_values(by, ignore_index=True)


@pytest.mark.slow
def test_windows_and_alerts_over_history_are_those_over_the_live_estimates(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(monitor=MONITOR, outputs={"innovation": True}))
    days = random_rows(3, keys=20, rows=80)
    with pytest.raises(UserError, match="has no history .* estimate --model walk"):
        monitor.run(pipeline.settings, "walk", history=True)
    pipeline.land(days[0])
    pipeline.pretrain(to_version=0)
    pipeline.land(*days[1:])
    pipeline.stream()
    live = monitor.run(pipeline.settings, "walk").data
    run = estimate.run(pipeline.settings, "walk").data["run"]
    for _ in range(2):  # run again, nothing is doubled
        found = monitor.run(pipeline.settings, "walk", history=True).data
    assert (found["raised"], found["cleared"]) == (live["raised"], live["cleared"])
    assert found["raised"] > found["cleared"] > 0

    alerts = table(pipeline, "alerts_history", ALERT[:4])
    pd.testing.assert_frame_equal(
        alerts[ALERT], table(pipeline, "alerts", ALERT[:4])[ALERT], check_exact=True
    )

    place = ["size", "window_start", "id"]
    ours, theirs = (table(pipeline, name, place) for name in ("windows_history", "windows"))
    assert len(ours) == len(theirs) > 100
    exact = [*place, "slide", "window_end", "rows", "late", "gated", "flagged", "nis_rows"]
    pd.testing.assert_frame_equal(ours[exact], theirs[exact], check_exact=True)
    for name in ("mean_nis", "nis_sum", "share_flagged"):  # sums in another order
        pd.testing.assert_series_equal(ours[name], theirs[name], rtol=1e-12)
    for name in ("mean", "bias"):
        left, right = (np.stack(frame[name].dropna().to_list()) for frame in (ours, theirs))
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12)

    # The report compares the run with the live generation: of the same model and parameters, to the bit.
    compared = report.run(pipeline.settings, "walk", history=True).data
    assert compared["generation"] == run and compared["against"] == "walk-g0001"
    assert (compared["comparison"]["unequal_rows"], compared["comparison"]["rows"]) == (0, 240)
    assert compared["good"]
    with pytest.raises(UserError, match="no such run over its history .*last runs are"):
        report.run(pipeline.settings, "walk", history=True, generation="other")

    # Silence is judged at the newest event time of the table; other definitions keep their rows.
    pipeline.write_spec(random_walk_spec(monitor={"rules": [SILENCE]}, outputs={"innovation": True}))
    found = monitor.run(pipeline.settings, "walk", history=True).data
    rows = pd.concat(days).sort_values("at")
    times = rows.groupby("id")["at"]
    limit = pd.Timedelta("12h")
    inside = int((times.diff() > limit).sum())
    at_end = int((rows["at"].max() - times.max() > limit).sum())
    assert (found["raised"], found["cleared"]) == (inside + at_end, inside)
    assert len(table(pipeline, "alerts_history", ALERT[:4])) == len(alerts) + 2 * inside + at_end


def test_each_run_over_history_is_read_by_the_version_that_made_it(tmp_path: Path) -> None:
    old = random_walk_spec(
        states=["slope", "level"],
        process={"kind": "explicit", "F": np.eye(2).tolist(), "Q": np.eye(2).tolist()},
        observation={"H": [[0.0, 1.0]] * 2, "R": np.eye(2).tolist()},
        initial={"mean": [100.0, 0.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
    )
    rule = {"name": "high", "kind": "level", "at_least": 50.0, "clear_below": 50.0}
    new = random_walk_spec(version=2, monitor={"rules": [rule]})
    pipeline = Pipeline(tmp_path, old)
    days = random_rows(2, keys=2, rows=10)
    pipeline.land(*days)
    pipeline.pretrain()
    estimate.run(pipeline.settings, "walk")
    pipeline.write_spec(new)
    estimate.run(pipeline.settings, "walk", since=str(days[1]["at"].min()))
    found = monitor.run(pipeline.settings, "walk", history=True)
    assert found.data["raised"] == 0  # the level, not the slope of version 1, which is 100
    assert not any("unknown" in line for line in found.lines)
