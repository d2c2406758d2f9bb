"""Which of two watermarks counts where the skill joins estimates with later rows, and that it never changes halfway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import skill
from jobs.specs.monitor import ForecastSkill
from tests.jobs.specs.test_spec import refused
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

SECTION: dict[str, Any] = {"horizons": ["10min"], "probability": 0.8, "watermark": "1h"}


def spec(section: dict[str, Any]) -> dict[str, Any]:
    return random_walk_spec(outputs={"measured": True}, forecast=section)


def test_another_policy_is_another_definition_and_the_default_is_that_of_earlier_releases() -> None:
    assert ForecastSkill(**SECTION).definition() == "5638aa58"  # as an earlier release named it
    assert ForecastSkill(**SECTION, watermark_policy="min").definition() == "5638aa58"
    assert ForecastSkill(**SECTION, watermark_policy="max").definition() != "5638aa58"


def test_a_policy_by_which_every_row_is_late_is_refused(tmp_path: Path) -> None:
    for watermark, tolerance in (("9min", None), ("14min", "5min")):
        section = {**SECTION, "watermark": watermark, "tolerance": tolerance, "watermark_policy": "max"}
        assert "forecast.watermark_policy: max leaves every row late" in refused(tmp_path, spec(section))


def at(minute: int) -> Any:
    return pd.Timestamp("2024-03-01", tz="UTC") + pd.Timedelta(minute, "min")


def frame(rows: list[tuple[int, int]]) -> pd.DataFrame:
    """Return a row for each key and minute."""
    return pd.DataFrame({"id": [k for k, _ in rows], "at": [at(m) for _, m in rows], "a": 1.0, "b": 2.0})


@pytest.mark.spark
@pytest.mark.slow
def test_by_the_later_watermark_forecasts_wait_for_less_long(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, spec(SECTION))
    pipeline.land(frame([(1, 0)]))
    pipeline.pretrain()
    pipeline.land(frame([(1, minute) for minute in range(10, 130, 10)] + [(2, 55)]))
    pipeline.stream()
    found: dict[str, tuple[int, int]] = {}
    policies = ("min", "max")
    spark = pipeline.warehouse.spark
    for policy in policies:
        pipeline.write_spec(spec({**SECTION, "watermark_policy": policy}))
        other = policies[policy == "min"]
        spark.conf.set("spark.sql.streaming.multipleWatermarkPolicy", other)  # the spec's counts
        assert skill.run(pipeline.settings, "walk").data["rows"] == 22
    # The newest estimate is of minute 120, the newest forecast for 130: rows before 60, or 70, are late.
    pipeline.land(frame([(2, 65)]))
    pipeline.stream()
    for policy in policies:
        pipeline.write_spec(spec({**SECTION, "watermark_policy": policy}))
        data = skill.run(pipeline.settings, "walk").data
        found[policy] = data["rows"], data["late"]
    assert found == {"min": (2, 0), "max": (0, 1)}
