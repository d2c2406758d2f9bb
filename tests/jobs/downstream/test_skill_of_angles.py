"""Forecasts of a measured angle are scored within half a turn."""

import numpy as np
import pyarrow as pa
import pytest

from jobs.downstream.forecast_pairs import ScoringPlan, build_forecaster, score
from jobs.lineage.compatibility import MIGRATION, compare_fields
from jobs.specs.model_spec import ModelSpec
from kalman.evaluation.scoring_rules import crps, log_score
from tests.jobs.support.pipeline import random_walk_spec

ANGLES = {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[1.0, 0.3], [0.3, 2.0]], "wrap": {"b": "degrees"}}


def test_a_forecast_beside_the_cut() -> None:
    """Forecast 179.5 degrees, measured -179: 1.5 off, not 358.5, and inside the interval."""
    spec = random_walk_spec(filter="extended", outputs={"measured": True}, observation=ANGLES)
    model = ModelSpec.model_validate(spec)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": ["k"],
            "generation": ["g"],
            "model_version": pa.array([1], pa.int32()),
            "made_at": [0],
            "event_time": [60_000_000],
            "horizon": pa.array([1], pa.int32()),
            "mean": [[359.0, 0.0]],
            "covariance": [[1.0, 0.0, 0.0, 1.0]],
            "measured": [[np.nan, -179.0]],
        }
    )
    plan = ScoringPlan({}, model.unit_us, None, 0.9)
    (found,) = score(batch, build_forecaster(model, {}), plan).to_pylist()
    mean, variance = np.array([found["mean"]]), np.array([found["variance"]])
    assert found["actual"] == -179.0 and found["inside"]
    assert found["error"] == pytest.approx(181.0 - found["mean"], rel=1e-12)
    assert found["crps"] == pytest.approx(crps(mean, variance, np.array([181.0]))[0], rel=1e-12)
    assert found["log_score"] == pytest.approx(log_score(mean, variance, np.array([181.0]))[0], rel=1e-12)


def test_another_period_changes_the_meaning_of_the_state() -> None:
    old, new = (
        ModelSpec.model_validate(random_walk_spec(filter="extended", observation={**ANGLES, "wrap": wrap}))
        for wrap in ({"b": "degrees"}, {"b": "radians"})
    )
    assert compare_fields(old, new) == {"observation": MIGRATION}
