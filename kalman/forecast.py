"""Forecasts: what a filter expects of its keys' states and measurements at times to come."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from kalman import flags
from kalman.cross_lag import CrossLagFilter
from kalman.diffuse import TOLERANCE, rows_of
from kalman.entries import Entry, apply, dot, plus
from kalman.fixed_lag import FixedLagFilter
from kalman.linear import LinearFilter
from kalman.packing import order_of, packed_index, packed_size
from kalman.recursions import congruence
from kalman.robust_linear import RobustLinearFilter
from kalman.rounded import unrounded
from kalman.run import KeyStates
from kalman.types import Array, Filter, ModelError, Rows


class Forecast(NamedTuple):
    """What is expected of K keys at S times to come; covariances packed lower, infinite where nothing is known.

    mean (n, S, K), covariance (n(n+1)/2, S, K) of the state
    measurement_mean (m, S, K), measurement_covariance (m(m+1)/2, S, K), its noise included
    flag (S, K) uint8 code of `kalman.flags`; a flagged time and those after it are NaN
    """

    mean: Array
    covariance: Array
    measurement_mean: Array
    measurement_covariance: Array
    flag: npt.NDArray[np.uint8]


@runtime_checkable
class Measuring(Protocol):
    """What a filter offers so that its measurements can be forecast and judged, beside `Filter`."""

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return the mean (m, K) and packed covariance of a measurement of these states (size, K).

        u (c, K): the control of the measurement's row, in case the measurement depends on it.
        """
        ...


def measured(model: Filter, state: Array, u: Array | None = None) -> tuple[Array, Array]:
    """Return the mean (m, K) and packed covariance of a measurement that finds the keys in these states.

    u (c, K) is the control of its row: a measurement may depend on columns. The covariance has the
    measurement's noise in it, and is infinite where the state is still diffuse. Raises ModelError where the
    filter does not say.
    """
    if u is None:
        u = np.full((model.controls, state.shape[1]), np.nan)
    model, state = bare(model, state)
    if isinstance(model, RobustLinearFilter):
        return measured(model.base, state[: model.base.size], u)
    if isinstance(model, LinearFilter):
        return _linear(model, state, u)
    if isinstance(model, Measuring):
        return model.measured(state, u)
    raise _silent()


def bare(model: Filter, state: Array) -> tuple[Filter, Array]:
    """Return the filter without rounding and without the rows that it keeps for smoothing, and its part of states."""
    model = unrounded(model)
    if isinstance(model, FixedLagFilter | CrossLagFilter):
        return model.inner, state[: model.inner.size]
    return model, state


def check_measuring(model: Filter) -> None:
    """Raise ModelError where the filter does not say what it expects to measure."""
    if not isinstance(
        unrounded(model), FixedLagFilter | CrossLagFilter | RobustLinearFilter | LinearFilter | Measuring
    ):
        raise _silent()


def _silent() -> ModelError:
    return ModelError("filter", "it does not say what it expects to measure", "choose another filter")


def forecast(model: Filter, states: KeyStates, dt: Array, u: Array | None = None) -> Forecast:
    """Return what is expected of K keys after each of S steps from where they stand.

    dt (S, K) time of each step in the model's unit, the first from the key's newest row; u (S, c, K) control
    of each step. A key without rows stands at its initial distribution, before which nothing is predicted.
    Raises ModelError where the model needs control that is not given.

    Reference: Durbin and Koopman (2012), section 4.11: a forecast is the filter's output for missing rows.
    """
    steps, keys = dt.shape
    if u is None:
        if model.controls:
            raise ModelError("control", "is not known for the time to come", "give the control of each step")
        u = np.empty((steps, 0, keys))
    model, values = bare(model, states.values)
    n, m = len(model.states), model.measurements
    result = Forecast(
        np.full((n, steps, keys), np.nan),
        np.full((packed_size(n), steps, keys), np.nan),
        np.full((m, steps, keys), np.nan),
        np.full((packed_size(m), steps, keys), np.nan),
        np.zeros((steps, keys), np.uint8),
    )
    missing = np.full((m, keys), np.nan)
    flag = np.zeros(keys, np.uint8)
    for s in range(steps):
        first = (states.count == 0) & (s == 0)
        values, said = model.step(values, Rows(np.where(first, 0.0, dt[s]), first, missing, u[s]))
        flag = np.where(flag == flags.WELL, said.flag, flag)
        good = flag == flags.WELL
        for kept, found in zip(
            result, (*model.moments(values), *measured(model, values, u[s])), strict=False
        ):
            kept[:, s] = np.where(good, found, np.nan)
        result.flag[s] = flag
    return result


def interval(mean: Array, variance: Array, probability: float) -> tuple[Array, Array]:
    """Return the lower and upper bound that a normal value is between with this probability.

    mean and variance of any one shape; an infinite variance has infinite bounds. Raises ValueError.
    """
    if not 0.0 < probability < 1.0:
        raise ValueError(f"a probability is between 0 and 1, not {probability}")
    half = ndtri(0.5 + 0.5 * probability) * np.sqrt(variance)
    return mean - half, mean + half


def variances(covariance: Array) -> Array:
    """Return the diagonal (n, ...) of packed covariances (n(n+1)/2, ...)."""
    return covariance[[packed_index(i, i) for i in range(order_of(len(covariance)))]]


def _linear(model: LinearFilter, state: Array, u: Array) -> tuple[Array, Array]:
    """Return mean and packed covariance of H x + offset + v."""
    diffuse, keys = model.is_diffuse(state), state.shape[1]
    parts = model.split(list(state), diffuse)
    H, R, offset = model.observed(list(u), parts.values)
    mean = [plus(a, b) for a, b in zip(apply(H, parts.m), offset, strict=True)]
    covariance = [plus(a, r) for a, r in zip(congruence(H, parts.P), R, strict=True)]
    if diffuse:
        A = rows_of(list(state[model.places["diffuse"]]), len(model.states))
        reach = [np.sqrt(dot(row, row)) for row in A]
        seen: list[list[Entry]] = []
        for h in H:
            b = [dot(h, column) for column in zip(*A, strict=True)]
            size = dot([abs(a) if isinstance(a, float) else np.abs(a) for a in h], reach)
            real = np.greater(np.sqrt(dot(b, b)), TOLERANCE * np.asarray(size))
            seen.append([np.where(real, a, 0.0) for a in b])
        for i in range(len(seen)):
            for j in range(i + 1):
                infinite, k = np.asarray(dot(seen[i], seen[j])), packed_index(i, j)
                covariance[k] = np.where(infinite == 0.0, covariance[k], np.copysign(np.inf, infinite))

    def whole(entries: list[Entry]) -> Array:
        return np.array([np.broadcast_to(entry, keys) for entry in entries], float)

    return whole(mean), whole(covariance)
