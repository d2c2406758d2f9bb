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
from jobs.core.times import MAX_US
from jobs.offline.future import Future, Horizon, steps_through
from jobs.specs.model_spec import ModelSpec
from kalman.evaluation.forecast import Forecast, forecast, interval, variances
from kalman.linalg.packing import unpack
from kalman.types import Filter

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MAX_FORECASTS = 50_000_000
"""Limit of the number of forecasts: a step that is much too short ends in an error before it exhausts the memory."""


class Keys(NamedTuple):
    """K keys to forecast.

    names: the texts of each key column; states: the states of the keys; inputs: (i, K) the inputs of the keys
    """

    names: Sequence[pa.Array]
    states: kalman.KeyStates
    inputs: Floats


class Ahead(NamedTuple):
    """Forecasts of the J of K keys that have a time within the horizon.

    kept (J,) their positions among the K keys; time (S, J) microseconds; wanted (S, J) whether the time is within the
    horizon; expected: the forecasts; length: microseconds of a step, None if steps have no fixed length
    """

    kept: Ints
    time: Ints
    wanted: NDArray[np.bool_]
    expected: Forecast
    length: int | None


class Column(NamedTuple):
    """Numbers (d, N) of a column of forecasts, and the names of its d parts, or pairs of names for a covariance."""

    name: str
    values: Floats
    parts: list[str]


class _Plan(NamedTuple):
    """The steps to forecast for K keys: time and wanted (S, K), u (S, c, K) or None, a step's length or None."""

    time: Ints
    wanted: NDArray[np.bool_]
    u: Floats | None
    length: int | None


def ahead(
    spec: ModelSpec,
    kernel: Filter,
    keys: Keys,
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
    if future is None:
        plan = _times(states.event_time, horizon, typical)
        u = np.tile(inputs, (len(plan.time), 1, 1)) if len(inputs) else None
        plan = plan._replace(u=u)
    else:
        through = steps_through(future, list(keys.names), states.event_time, inputs, horizon)
        plan = _Plan(*through, horizon.length)
    kept = np.flatnonzero(plan.wanted.any(axis=0))
    time, wanted = plan.time[:, kept], plan.wanted[:, kept]
    u = None if plan.u is None else plan.u[:, :, kept]
    try:
        expected = _forecast(kernel, states.take(kept), time, u, spec.unit_us, bool(horizon.direct))
    except kalman.ModelError as error:
        raise UserError(f"{spec.name} v{spec.version} cannot be forecast: {error}") from error
    return Ahead(kept, time, wanted, expected, plan.length)


def _forecast(
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


def _times(last: Ints, horizon: Horizon, typical: int | None) -> _Plan:
    """Return the times to forecast for keys whose newest rows are at `last` (K,); without keys there are no times."""
    steps, end, length = horizon.steps, horizon.end, horizon.length
    if not len(last):
        return _Plan(np.empty((0, 0), np.int64), np.empty((0, 0), bool), None, length)
    if horizon.direct or horizon.multiples:
        return _at_horizons(last, horizon)
    if end is not None and length is None:
        return _Plan(np.maximum(last, end)[None], (last <= end)[None], None, None)
    length = length or typical
    assert length is not None
    if end is not None:
        steps = max(int((end - last.min()) // length), 1)
    steps = steps or 1
    _check_size(steps * len(last), int(last.max()) + length * steps)
    time = last + length * np.arange(1, steps + 1)[:, None]
    return _Plan(time, time <= end if end is not None else np.ones(time.shape, bool), None, length)


def _at_horizons(last: Ints, horizon: Horizon) -> _Plan:
    if horizon.direct:
        away = np.array(horizon.direct, np.int64)
        wanted = np.ones(len(away), bool)
    else:
        assert horizon.length is not None
        number = np.arange(1, max(horizon.multiples) + 1)
        away, wanted = number * horizon.length, np.isin(number, horizon.multiples)
    _check_size(len(away) * len(last), int(last.max()) + int(away.max()))
    time = last + away[:, None]
    return _Plan(time, np.repeat(wanted[:, None], len(last), axis=1), None, horizon.length)


def _check_size(forecasts: int, newest: int) -> None:
    if forecasts > MAX_FORECASTS:
        raise UserError(
            f"these are {forecasts:,} forecasts, and {MAX_FORECASTS:,} are the most; take fewer or longer steps"
        )
    if newest > MAX_US:
        raise UserError("the last step is after the year 9999; take fewer or shorter steps")


def numbers_of(
    spec: ModelSpec, expected: Forecast, step: Ints, key: Ints, probability: float
) -> list[Column]:
    """Return mean, covariance and bounds of state and measurement for N pairs of a step (N,) and a key (N,)."""
    columns: list[Column] = []
    for prefix, names, mean, packed in (
        ("", spec.states, expected.mean, expected.covariance),
        ("measurement_", spec.measurement, expected.measurement_mean, expected.measurement_covariance),
    ):
        mean, packed = mean[:, step, key], packed[:, step, key]
        low, high = interval(mean, variances(packed), probability)
        pairs = [f"{a}_{b}" for a in names for b in names]
        columns += [
            Column(f"{prefix}mean", mean, names),
            Column(f"{prefix}covariance", unpack(packed), pairs),
            Column(f"{prefix}lower", low, names),
            Column(f"{prefix}upper", high, names),
        ]
    return columns
