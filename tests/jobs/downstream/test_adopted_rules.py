"""Rules that have changed continue with the exported states of the former ones, and count each estimate once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import estimate, export, monitor
from jobs.core.errors import UserError
from jobs.storage.tables import rule_states
from tests.jobs.downstream import racks as functions
from tests.jobs.downstream.test_monitor import READINGS, forget_the_last_commit, readings
from tests.jobs.downstream.test_racks_of_functions import COLUMNS
from tests.jobs.downstream.test_rule_functions import BUILT_IN, CLIMBING, NEWEST, racks
from tests.jobs.support.pipeline import Pipeline

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def alerts(pipeline: Pipeline, table: str, after: str) -> pd.DataFrame:
    rows: Any = pipeline.warehouse.read(f"{table}/rack").toPandas()
    rows = rows[rows["definition"] == pipeline.spec.monitor.definition("rules")]  # type: ignore[union-attr]
    rows = rows[rows["event_time"] > pd.Timestamp(after)][COLUMNS]
    return rows.sort_values(["event_time", "rack", "rule", "status"], ignore_index=True)


def test_changed_rules_continue_with_the_states_of_the_former_ones(tmp_path: Path) -> None:
    climbing, newest = (
        {**rule, "function": rule["function"].replace("tests.jobs.downstream.", "my_")}
        for rule in (CLIMBING, NEWEST)
    )
    pipeline = Pipeline(tmp_path, racks(climbing, BUILT_IN))
    shutil.copy(functions.__file__, Path(pipeline.settings.models) / "my_racks.py")
    with pytest.raises(UserError, match="no rules of rack have run"):
        export.run(pipeline.settings, "rack", monitor=True)
    pipeline.land(readings({"rack0": [("07:00:00", 90.0)]}))
    pipeline.pretrain()
    rows: Any = readings(READINGS).sort_values("at", ignore_index=True)
    pipeline.land(rows[:5])
    pipeline.stream()
    monitor.run(pipeline.settings, "rack")
    cut = str(rows["at"][4].tz_localize(None))

    # The rules change first, as they do: what the former ones were is known from their run.
    pipeline.write_spec(racks(newest, climbing, BUILT_IN))
    done = export.run(pipeline.settings, "rack", monitor=True)
    assert done.data["made"] and done.data["keys"] == len(set(rows[:5]["rack"]))
    assert f"monitor --model rack --adopt {done.data['export']}" in "\n".join(done.lines)
    assert not export.run(pipeline.settings, "rack", monitor=True).data["made"]
    held = {row["key"]: row for row in pipeline.warehouse.read(rule_states("rack")).collect()}
    assert held["rack1"]["integers"]["climbing.run"] == [2]  # the third one is after the export
    with pytest.raises(UserError, match="--adopt nix: there is no such export of rules of rack"):
        monitor.run(pipeline.settings, "rack", adopt="nix")
    report = monitor.run(pipeline.settings, "rack", adopt=done.data["export"])
    assert report.lines[:2] == [
        "rules that continue with their states: climbing, known",
        "rules that are new: they begin without states: newest",
    ]
    assert report.data["raised"] == report.data["cleared"] == 0
    # killed before its first commit: the next start adopts again, without being told
    assert forget_the_last_commit(pipeline) == 2
    pipeline.land(rows[5:])
    pipeline.stream()
    assert monitor.run(pipeline.settings, "rack").data["raised"] >= 2
    pipeline.land(readings({"rack1": [("08:21:05", 98.0)]}))
    pipeline.stream()
    monitor.run(pipeline.settings, "rack", adopt=done.data["export"])
    with pytest.raises(UserError, match="--adopt other: the rules of rack have begun already, with "):
        monitor.run(pipeline.settings, "rack", adopt="other")

    # One pass over all history has the same alerts of the rules that have continued.
    estimate.run(pipeline.settings, "rack")
    monitor.run(pipeline.settings, "rack", history=True)
    live, once = (alerts(pipeline, table, cut) for table in ("alerts", "alerts_history"))
    live, once = (one[one["rule"] != "newest"].reset_index(drop=True) for one in (live, once))
    pd.testing.assert_frame_equal(live, once, check_exact=True)
    assert list(live["status"]) == ["raised"] * 2 + ["cleared"] * 2
    assert len(alerts(pipeline, "alerts", "2000-01-01")) == len(alerts(pipeline, "alerts", cut))
