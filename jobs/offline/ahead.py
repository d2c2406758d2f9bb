"""Forecast keys from their states: for steps, until a time, at given horizons, or through future rows. No Spark.

The states may come from a filtered file, from a snapshot, or from a stream: the forecasts are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.offline.future import Future, plan_future_steps
from jobs.offline.horizon import Horizon, plan_steps
from jobs.specs.model_spec import ModelSpec
from kalman.evaluation.forecast import Forecast, extract_variances, forecast, interval
from kalman.linalg.packing import unpack
from kalman.types import Filter

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class ForecastKeys(NamedTuple):
    """K keys that are to be forecast.

    names: the texts of each key column; states: the states of the keys; inputs: (i, K) the inputs of the keys
    """

    names: Sequence[pa.Array]
    states: kalman.KeyStates
    inputs: Floats


class Ahead(NamedTuple):
    """Forecasts of the J of K keys that have a time within the horizon.

    kept (J,) their places among the keys; time (S, J) microseconds; wanted (S, J) whether the time is within the
    horizon; expected: the forecasts; length: microseconds of a step, None where steps have none; omitted: keys without
    a time within the horizon
    """

    kept: Ints
    time: Ints
    wanted: NDArray[np.bool_]
    expected: Forecast
    length: int | None
    omitted: int

    @property
    def count(self) -> int:
        """Return the number of forecasts."""
        return int(self.wanted.sum())

    @property
    def flagged(self) -> int:
        """Return how many of the forecasts have a flag."""
        return int((self.expected.flag != 0)[self.wanted].sum())


class ForecastColumn(NamedTuple):
    """Numbers (d, N) of a column of forecasts, and the names of the d parts, or of the pairs of a covariance."""

    name: str
    values: Floats
    parts: list[str]


def forecast_ahead(
    spec: ModelSpec,
    kernel: Filter,
    keys: ForecastKeys,
    horizon: Horizon,
    future: Future | None = None,
    typical: int | None = None,
) -> Ahead:
    """Forecast K keys from their states.

    Args:
        spec: spec of the model.
        kernel: filter of the model.
        keys: the keys.
        horizon: the horizon of the forecasts.
        future: inputs of future rows, for a model with controls or inputs.
        typical: microseconds of a step if the horizon has no length.

    Raises:
        UserError: the horizon is out of range, a future input is missing, or the model cannot be forecast.
    """
    states, inputs = keys.states, keys.inputs
    if future is not None:
        steps = plan_future_steps(future, list(keys.names), states.event_time, inputs, horizon)
    else:
        steps = plan_steps(states.event_time, horizon, typical)
        if len(inputs):
            steps = steps._replace(u=np.tile(inputs, (len(steps.time), 1, 1)))
    kept = np.flatnonzero(steps.wanted.any(axis=0))
    time, wanted = steps.time[:, kept], steps.wanted[:, kept]
    u = None if steps.u is None else steps.u[:, :, kept]
    try:
        expected = _forecast_steps(kernel, states.take(kept), time, u, spec.unit_us, bool(horizon.direct))
    except kalman.ModelError as error:
        raise UserError(f"{spec.name} v{spec.version} cannot be forecast: {error}") from error
    return Ahead(kept, time, wanted, expected, steps.length, len(states.count) - len(kept))


def _forecast_steps(
    kernel: Filter, states: kalman.KeyStates, time: Ints, u: Floats | None, unit: float, direct: bool
) -> Forecast:
    """Forecast step by step; `direct`: reach each time by one step from the state, as `skill` does."""
    if not direct:
        dt = np.diff(time, axis=0, prepend=states.event_time[None]) / unit
        return forecast(kernel, states, dt, u)
    dt = (time - states.event_time) / unit
    parts = [
        forecast(kernel, states, dt[s : s + 1], None if u is None else u[s : s + 1]) for s in range(len(dt))
    ]
    return Forecast(*(np.concatenate(each, axis=-2) for each in zip(*parts, strict=True)))


class ForecastRows(NamedTuple):
    """N forecasts, those of a key together.

    key (N,) its place among the K keys that were given; step (N,) the number among its wanted steps, from 1; time (N,)
    microseconds; flag (N,) codes of `kalman.FLAGS`; columns: mean, covariance and bounds of state and measurement
    """

    key: Ints
    step: Ints
    time: Ints
    flag: NDArray[np.uint8]
    columns: list[ForecastColumn]


def list_forecasts(spec: ModelSpec, found: Ahead, probability: float) -> ForecastRows:
    """Return the wanted forecasts of a model's keys as rows; probability: that a value lies between its bounds."""
    key, step = np.nonzero(found.wanted.T)
    expected, columns = found.expected, list[ForecastColumn]()
    for prefix, names, mean, packed in (
        ("", spec.states, expected.mean, expected.covariance),
        ("measurement_", spec.measurement, expected.measurement_mean, expected.measurement_covariance),
    ):
        mean, packed = mean[:, step, key], packed[:, step, key]
        low, high = interval(mean, extract_variances(packed), probability)
        pairs = [f"{a}_{b}" for a in names for b in names]
        columns += [
            ForecastColumn(f"{prefix}mean", mean, names),
            ForecastColumn(f"{prefix}covariance", unpack(packed), pairs),
            ForecastColumn(f"{prefix}lower", low, names),
            ForecastColumn(f"{prefix}upper", high, names),
        ]
    number = np.cumsum(found.wanted, axis=0, dtype=np.int64)[step, key]
    return ForecastRows(found.kept[key], number, found.time[step, key], expected.flag[step, key], columns)
