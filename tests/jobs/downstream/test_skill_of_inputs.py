"""Skill of a model with control, inputs and parameters by group; and forecasts that no row has ever matched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import forecast, inputs, skill, verify
from tests.jobs.batch.test_live_forecast import PUSHED, pushed_rows
from tests.jobs.support.pipeline import Pipeline, random_walk_spec
from tests.jobs.test_kinds import KINDS

pytestmark = pytest.mark.spark

BY_SITE: dict[str, Any] = {
    **PUSHED,
    "learn": {"parameters": ["R"], "scope": "group", "by": ["site"], "max_iterations": 5},
    "outputs": {"measured": True},
    "forecast": {"horizons": ["2h"], "watermark": "1h", "probability": 0.8},
}
START = pd.Timestamp("2024-01-01T00:00:00Z")
GAPS = {("s", 1): 60, ("n", 2): 70}
"""The hours at which a key has no row."""
BLIND, AT = ("s", 4), 65
"""A key with a row without measurements, which has the control alone, and the hour of it."""


@pytest.mark.slow
def test_control_inputs_and_groups_are_scored_and_lost_forecasts_are_told(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, BY_SITE)
    whole: Any = pushed_rows(80)
    hour = (whole["at"] - START) // pd.Timedelta("1h")
    for (site, number), at in GAPS.items():
        kept = ~((whole["site"] == site) & (whole["id"] == number) & (hour == at))
        whole, hour = whole[kept], hour[kept]
    whole.loc[(whole["site"] == BLIND[0]) & (whole["id"] == BLIND[1]) & (hour == AT), ["a", "b"]] = np.nan
    file = tmp_path / "inputs.csv"
    keys = pd.DataFrame({"site": ["s", "n", '"w', "s"], "id": [1, 2, 3, 4], "db": [1.0, 2.5, 0.3, 0.7]})
    keys.to_csv(file, index=False)
    pipeline.land(whole[hour < 40])
    inputs.run(pipeline.settings, "pushed", str(file))
    learned = pipeline.pretrain().data["snapshot"]
    pipeline.land(whole[hour >= 40])
    pipeline.stream()
    report = skill.run(pipeline.settings, "pushed")

    found: Any = pipeline.warehouse.read("forecast_skill/pushed").toPandas()
    lost = found[found["actual"].isna()].sort_values(["key", "measurement"])
    assert lost["key"].tolist() == ['["n","2"]'] * 2 + ['["s","1"]'] * 2 + ['["s","4"]'] * 2
    assert lost["measurement"].tolist() == ["a", "b"] * 3
    hours = (lost["event_time"].dt.tz_localize("UTC") - START) // pd.Timedelta("1h")
    assert hours.tolist() == [70, 70, 60, 60, AT, AT]
    assert (lost["event_time"] - lost["made_at"]).nunique() == 1
    for name in ("error", "inside", "crps", "log_score"):
        assert lost[name].isna().all()
    # Without a row the control at their time is not known.
    assert lost["mean"].isna().tolist() == lost["variance"].isna().tolist() == [True] * 4 + [False] * 2
    assert (report.data["unmatched"], report.data["unmatched_keys"]) == (3, 3)
    assert report.data["rows"] == len(found) - len(lost)
    assert any(
        'never matched: 3 forecasts, as nothing was measured at their time, of ["n","2"] (1)' in one
        for one in report.lines
    )
    assert sum(one["forecasts"] for one in report.data["skill"]) == len(found) - len(lost)
    assert skill.run(pipeline.settings, "pushed").data["rows"] == 0

    # As the filter without Spark forecasts through the same rows, with each group's parameters.
    ahead, past, out = tmp_path / "later.csv", tmp_path / "past.parquet", tmp_path / "out.parquet"
    for made in (45, 57, AT - 2, 69):
        whole[hour <= made].to_parquet(past, index=False)
        whole[hour > made].drop(columns=["a", "b"]).to_csv(ahead, index=False)
        options = {"future": str(ahead), "inputs": str(file), "snapshot": learned, "until": "2024-01-05"}
        forecast.run(pipeline.settings, "pushed", str(past), str(out), **options)
        expected: Any = pd.read_parquet(out)
        at = (START + pd.Timedelta(f"{made}h")).tz_localize(None)
        mine = found[(found["made_at"] == at) & found["mean"].notna()]
        assert len(mine) >= 6 and (made != AT - 2 or mine["actual"].isna().sum() == 2)
        for one in mine.itertuples():
            same = (expected["id"] == one.id) & (expected["at"].dt.tz_localize(None) == one.event_time)
            (row,) = expected[same].to_dict("records")
            place = "ab".index(one.measurement)
            np.testing.assert_allclose(one.mean, row["measurement_mean"][place], rtol=1e-12)
            np.testing.assert_allclose(one.variance, row["measurement_covariance"][3 * place], rtol=1e-12)
    variances = found.dropna(subset=["variance"]).groupby("key")["variance"].first()
    assert variances.nunique() == 4


@pytest.mark.slow
def test_modes_are_scored_from_the_state_beside_their_estimates(tmp_path: Path) -> None:
    section = {"horizons": ["1h"], "step": "1h", "watermark": "30d"}
    given = random_walk_spec(
        **KINDS["imm"], outputs={"measured": True}, forecast=section, sinks={"latest": True}
    )
    pipeline = Pipeline(tmp_path, given)
    days = hourly(2)
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    pipeline.stream()
    assert skill.run(pipeline.settings, "walk").data["rows"] > 0
    found: Any = pipeline.warehouse.read("forecast_skill/walk").toPandas()
    for made in (30, 40):
        rows = pd.concat(days)
        past, out = tmp_path / "past.parquet", tmp_path / "out.parquet"
        at = pd.Timestamp("2024-03-01", tz="UTC") + pd.Timedelta(f"{made}h")
        rows[rows["at"] <= at].to_parquet(past, index=False)
        forecast.run(pipeline.settings, "walk", str(past), str(out), steps=1, every="1h")
        expected = pd.read_parquet(out).set_index("id")
        mine = found[found["made_at"] == at.tz_localize(None)]
        assert len(mine) >= 6
        for one in mine.itertuples():
            place = "ab".index(one.measurement)
            assert one.mean == expected.loc[one.id, "measurement_mean"][place]  # to the bit
            assert one.variance == expected.loc[one.id, "measurement_covariance"][3 * place]
    # The same streams verify, and are forecast from what is live.
    assert verify.run(pipeline.settings, "walk", share="100%").data["outcome"] == "equal"
    live = forecast.run(pipeline.settings, "walk").data  # at the section's horizons
    assert (live["keys"], live["forecasts"]) == (4, 4)
    ahead = pipeline.warehouse.read("forecasts/walk").toPandas().sort_values("id")
    forecast.run(pipeline.settings, "walk", output=str(out))  # and without Spark, from the latest states
    alone = pd.read_parquet(out)
    for name in ("mean", "covariance", "measurement_mean", "measurement_covariance"):
        assert [list(one) for one in alone[name]] == [list(one) for one in ahead[name]]


def hourly(days: int) -> list[pd.DataFrame]:
    rng = np.random.default_rng(8)
    frames = []
    for day in range(days):
        number, hour = (grid.ravel() for grid in np.meshgrid(np.arange(4), np.arange(24)))
        at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(24 * day + hour, "h")
        values = rng.normal(size=(2, len(hour)))
        frames.append(pd.DataFrame({"id": number, "at": at.as_unit("us"), "a": values[0], "b": values[1]}))
    return [frame.sort_values(["at", "id"], ignore_index=True) for frame in frames]
