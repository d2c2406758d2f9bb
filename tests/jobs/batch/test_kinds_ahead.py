"""Every kind of filter: forecast from the rows of a snapshot as from the states that they were made of, same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import norm

import kalman
from jobs.batch.forecast_run import FUTURE, ROWS, ForecastPlan, build_forecaster, build_table_schema
from jobs.lineage.inputs_table import INPUTS
from jobs.offline.horizon import Horizon
from jobs.snapshots.state_rows import build_state_rows
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from kalman.evaluation.forecast import extract_variances, forecast
from tests.jobs.support.pipeline import random_walk_spec
from tests.jobs.test_kinds import KINDS, MODULE

HOUR = 3_600_000_000
KEYS, PAST = 5, 20
REGRESSION: dict[str, Any] = {
    "states": ["c0", "c1"],
    "measurement": ["a"],
    "control": ["x"],
    "process": None,
    "observation": None,
    "initial": None,
}
ALL: dict[str, dict[str, Any]] = {
    **KINDS,
    "mmae": {**KINDS["imm"], "filter": "mmae", "transition": None, "mmae": {"window": 5}},
    "cubature": {**KINDS["unscented"], "filter": "cubature"},
    "extended": {**KINDS["unscented"], "filter": "extended"},
    "huber": {"robust": {"huber": {"threshold": 1.5}}},
    "student": {"robust": {"student_t": {"degrees": 4.0}}},
    "adaptive unscented": {**KINDS["unscented"], "adaptive": {"R": 0.05}},
    "32 bits": {"storage": {"dtype": "float32"}},
    "by key": {"learn": {"parameters": ["level_variance", "R"], "scope": "key"}},
    "diffuse": {"initial": {"diffuse": True}},
    "rls": {**REGRESSION, "filter": "rls", "rls": {"forgetting": 0.98}},
    "lms": {**REGRESSION, "filter": "lms", "lms": {"step": 0.05}, "observation": {"R": [[1.0]]}},
    "nlms": {**REGRESSION, "filter": "nlms", "nlms": {"step": 0.5}},
}


def states_of(spec: ModelSpec, kernel: kalman.Filter) -> kalman.KeyStates:
    """Return the states of some keys after rows of random numbers, some of them missing."""
    rng = np.random.default_rng(1)
    size = KEYS * PAST
    y = rng.normal(size=(len(spec.measurement), size))
    y[:, rng.random(size) < 0.2] = np.nan
    time = np.tile(np.cumsum(rng.integers(1, HOUR, PAST)), KEYS)
    u = rng.normal(size=(kernel.controls, size))
    rows = kalman.SortedRows(np.repeat(np.arange(KEYS), PAST), time, y, u)
    begin = kalman.initial_states(kernel, KEYS)
    return kalman.run(kernel, begin, rows, spec.unit_us)[0]


def snapshot_of(kernel: kalman.Filter, states: kalman.KeyStates, **beside: pa.Array) -> pa.RecordBatch:
    """Return the states as a snapshot has them."""
    arrays = {"route": np.arange(KEYS, dtype=np.uint64), **states._asdict()}
    (rows,) = build_state_rows(kernel, Records(arrays, pa.array([f"key {k}" for k in range(KEYS)])))
    return pa.RecordBatch.from_arrays([*rows.columns, *beside.values()], [*rows.schema.names, *beside])


def forecast_batch(plan: ForecastPlan, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Return the rows of the table of forecasts."""
    constants = {"run": "r", "model_version": 1, "snapshot_id": "s", "generation": None, "batch_id": None}
    kind = KeyKind(("id",), ("string",), False)
    return list(build_forecaster(plan, kind, build_table_schema(kind), constants)(iter([batch])))


@pytest.mark.parametrize("kind", ALL)
def test_a_kind_is_forecast_from_its_snapshot(tmp_path: Path, kind: str) -> None:
    (tmp_path / "sideways.py").write_text(MODULE)
    spec = ModelSpec.model_validate(random_walk_spec(**ALL[kind])).with_folder(str(tmp_path))
    kernel = kalman.build(spec.definition())
    states = states_of(spec, kernel)
    steps, u, beside, named = 3, None, {}, None
    if spec.control:
        u = np.random.default_rng(2).normal(size=(steps, 1, KEYS))
        future = [
            [
                {
                    "time": int(states.event_time[k]) + (s + 1) * HOUR,
                    "control": u[s, :, k].tolist(),
                    INPUTS: None,
                }
                for s in range(steps)
            ]
            for k in range(KEYS)
        ]
        floats = pa.list_(pa.float64())
        row = pa.struct([("time", pa.int64()), ("control", floats), (INPUTS, floats)])
        beside, named = {FUTURE: pa.array(future, pa.list_(row))}, "later.csv"
    horizon = Horizon(steps, None, None if named else HOUR)
    plan = ForecastPlan(spec, kernel, horizon, 0.9, named)
    expected = forecast(kernel, states, np.full((steps, KEYS), HOUR / spec.unit_us), u)
    (found,) = forecast_batch(plan, snapshot_of(kernel, states, **beside))

    assert found.schema.names == ["run", "key", "id", *(part.split()[0] for part in ROWS.split(", "))]
    assert found.column("key").to_pylist() == [f"key {k}" for k in range(KEYS) for _ in range(steps)]
    assert found.column("step").to_pylist() == [1, 2, 3] * KEYS
    assert set(found.column("flag").to_pylist()) == {None}
    for name, numbers in (("mean", expected.mean), ("measurement_mean", expected.measurement_mean)):
        by_key = numbers.transpose(2, 1, 0).reshape(KEYS * steps, -1)
        np.testing.assert_array_equal(np.array(found.column(name).to_pylist()), by_key)
        assert np.isfinite(by_key).all()
    half = norm.ppf(0.95) * np.sqrt(extract_variances(expected.measurement_covariance))
    upper = (expected.measurement_mean + half).transpose(2, 1, 0).reshape(KEYS * steps, -1)
    np.testing.assert_allclose(np.array(found.column("measurement_upper").to_pylist()), upper, rtol=1e-14)


def test_a_batch_that_is_cut_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec.model_validate(random_walk_spec())
    kernel = kalman.build(spec.definition())
    batch = snapshot_of(kernel, states_of(spec, kernel))
    plan = ForecastPlan(spec, kernel, Horizon(None, None, None, direct=(HOUR, 6 * HOUR)), 0.9)
    (whole,) = forecast_batch(plan, batch)
    monkeypatch.setattr("jobs.batch.forecast_run.NUMBERS_AT_ONCE", 40)
    cut = forecast_batch(plan, batch)
    assert len(cut) > 1
    assert pa.Table.from_batches(cut).equals(pa.Table.from_batches([whole]))
