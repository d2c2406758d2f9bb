"""Skill of filters whose estimates do not determine their state: they are forecast from the state beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kalman
from jobs.downstream.forecast_pairs import ScoringPlan, build_forecaster, needs_state, score
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import build_lists
from kalman.evaluation.forecast import extract_variances, forecast
from kalman.filters.state_output import OUTPUT, StateOutput, follows_from_moments
from tests.jobs.batch.test_kinds_ahead import ALL, HOUR
from tests.jobs.support.pipeline import random_walk_spec
from tests.jobs.test_kinds import MODULE

FORECAST: dict[str, Any] = {
    "outputs": {"measured": True},
    "forecast": {"horizons": ["1h", "3h"], "step": "1h"},
}
BY_STATE = [
    "imm",
    "mmae",
    "adaptive",
    "adaptive unscented",
    "mixture",
    "rls",
    "nlms",
    "adaptive in 32 bits, lagged",
]
KINDS = {
    **ALL,
    "adaptive in 32 bits, lagged": {
        **ALL["adaptive"],
        "storage": {"dtype": "float32"},
        "smoothing": {"lag": 2},
    },
}
ROWS = 12


def spec_of(folder: Path, kind: str) -> ModelSpec:
    (folder / "sideways.py").write_text(MODULE)
    return ModelSpec.model_validate(random_walk_spec(**KINDS[kind])).with_folder(str(folder))


@pytest.mark.parametrize("kind", BY_STATE)
def test_it_is_forecast_from_the_state_after_the_row(tmp_path: Path, kind: str) -> None:
    """As the filter that has seen the rows up to there alone: to the bit."""
    spec = spec_of(tmp_path, kind)
    assert needs_state(spec)
    built = kalman.build(spec.definition())
    kernel = StateOutput(built)
    rng = np.random.default_rng(4)
    m, c = kernel.measurements, kernel.controls
    time = HOUR * np.arange(ROWS, dtype=np.int64)
    rows = kalman.SortedRows(
        np.zeros(ROWS, np.int64), time, rng.normal(size=(m, ROWS)), rng.normal(size=(c, ROWS))
    )
    _, outputs = kalman.run(kernel, kalman.initial_states(kernel, 1), rows, spec.unit_us)
    _, plain = kalman.run(built, kalman.initial_states(built, 1), rows, spec.unit_us)
    np.testing.assert_array_equal(outputs.mean, plain.mean)  # the estimates are what they were

    made, steps = 7, 3
    forecaster = build_forecaster(spec, {})
    batch = pa.RecordBatch.from_pydict(
        {
            "key": ["k"],
            "generation": ["g"],
            "model_version": pa.array([1], pa.int32()),
            "made_at": time[[made]],
            "event_time": time[[made + steps]],
            "horizon": pa.array([1], pa.int32()),
            "mean": build_lists(outputs.mean[:, [made]]),
            "covariance": [[1.0] * len(spec.states) ** 2],
            "measured": build_lists(rows.y[:, [made + steps]]),
            OUTPUT: build_lists(outputs.extra[OUTPUT][:, [made]]),
        }
    )
    between = slice(made + 1, made + 1 + steps)
    if c:
        control = [
            [
                {"time": int(t), "control": u.tolist()}
                for t, u in zip(time[between], rows.u.T[between], strict=True)
            ]
        ]
        kinds = pa.list_(pa.struct([("time", pa.int64()), ("control", pa.list_(pa.float64()))]))
        batch = batch.append_column("rows", pa.array(control, kinds))
    plan = ScoringPlan({}, spec.unit_us, (1, steps), 0.9, controls=c)
    found = score(batch, forecaster, plan).to_pylist()

    before = rows.take(np.arange(made + 1))
    states, _ = kalman.run(built, kalman.initial_states(built, 1), before, spec.unit_us)
    dt = np.full((steps, 1), HOUR / spec.unit_us)
    expected = forecast(built, states, dt, rows.u.T[between, :, None] if c else None)
    assert [one["mean"] for one in found] == expected.measurement_mean[:, -1, 0].tolist()
    spread = extract_variances(expected.measurement_covariance)[:, -1, 0]
    assert [one["variance"] for one in found] == [a if np.isfinite(a) else None for a in spread]


@pytest.mark.parametrize("kind", ["square root", "by key", "fixed lag", "gated", "unscented", "diffuse"])
def test_others_need_no_more_than_mean_and_covariance(tmp_path: Path, kind: str) -> None:
    spec = spec_of(tmp_path, kind)
    assert not needs_state(spec) and follows_from_moments(build_forecaster(spec, {}))


def test_an_estimate_of_an_earlier_release_has_no_forecast(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "adaptive")
    batch = pa.RecordBatch.from_pydict(
        {
            "key": ["k"],
            "generation": ["g"],
            "model_version": pa.array([1], pa.int32()),
            "made_at": [0],
            "event_time": [HOUR],
            "horizon": pa.array([0], pa.int32()),
            "mean": [[0.0, 0.0]],
            "covariance": [[1.0, 0.0, 0.0, 1.0]],
            "measured": [[0.5, 1.0]],
            OUTPUT: pa.array([[]], pa.list_(pa.float64())),
        }
    )
    found = score(batch, build_forecaster(spec, {}), ScoringPlan({}, spec.unit_us, None, 0.9)).to_pylist()
    assert [(one["actual"], one["mean"], one["crps"]) for one in found] == [
        (0.5, None, None),
        (1.0, None, None),
    ]
