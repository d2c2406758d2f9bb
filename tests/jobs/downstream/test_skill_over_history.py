"""The skill over a history is that of the query over the live estimates of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import estimate, skill
from jobs.core.errors import UserError
from tests.jobs.downstream.test_forecast_skill import ORDER, readings, spec
from tests.jobs.support.pipeline import Pipeline

pytestmark = pytest.mark.spark

NUMBERS = ["mean", "variance", "lower", "upper", "actual", "error", "inside", "crps", "log_score"]


def scored(pipeline: Pipeline, table: str) -> Any:
    return pipeline.warehouse.read(f"{table}/walk").toPandas().sort_values(ORDER, ignore_index=True)


@pytest.mark.slow
def test_forecasts_from_history_have_the_scores_of_those_from_the_live_estimates(tmp_path: Path) -> None:
    by_key = {"parameters": ["R"], "scope": "key"}
    pipeline = Pipeline(tmp_path, spec(learn=by_key))
    days: Any = readings(3)
    days[1] = days[1].drop(index=days[1].index[[20, 21, 40]])  # forecasts that no row meets
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(*days[1:])
    pipeline.stream()
    skill.run(pipeline.settings, "walk")
    with pytest.raises(UserError, match="has no history .* estimate --model walk"):
        skill.run(pipeline.settings, "walk", history=True)
    estimate.run(pipeline.settings, "walk")
    report = skill.run(pipeline.settings, "walk", history=True)

    live, found = scored(pipeline, "forecast_skill"), scored(pipeline, "forecast_skill_history")
    matched = found[found["actual"].notna()]
    assert report.data["rows"] == len(matched) == sum(one["forecasts"] for one in report.data["skill"])
    begin = live["made_at"].min()
    mine: Any = matched[matched["made_at"] >= begin]
    expected: Any = live[live["actual"].notna()]
    assert len(expected) > 300 and len(matched) > len(mine)
    ours, theirs = (frame[ORDER + NUMBERS].astype({"inside": bool}) for frame in (mine, expected))
    pd.testing.assert_frame_equal(
        ours.reset_index(drop=True), theirs.reset_index(drop=True), check_exact=True
    )
    # What no row has met, up to the newest row; later forecasts are not due.
    lost = found[found["actual"].isna()]
    newest = pd.concat(days)["at"].max().tz_localize(None)
    assert len(lost) > 2 and lost["event_time"].max() <= newest
    assert 2 * report.data["unmatched"] == len(lost)
    with pytest.raises(UserError, match="leave --snapshot out"):
        skill.run(pipeline.settings, "walk", history=True, snapshot="none")
    pipeline.write_spec(spec(version=2, learn=by_key))
    with pytest.raises(UserError, match="is of the spec as it is now"):
        skill.run(pipeline.settings, "walk", history=True)
