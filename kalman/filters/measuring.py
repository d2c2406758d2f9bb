"""The measurement that a state predicts, for any filter."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from kalman.filters.diffuse import TOLERANCE, rows_of
from kalman.filters.linear import LinearFilter
from kalman.filters.recursions import congruence
from kalman.filters.robust.linear import RobustLinearFilter
from kalman.filters.rounded import unrounded
from kalman.linalg.entries import Entry, apply, dot, plus
from kalman.linalg.packing import packed_index
from kalman.smoothers.cross_lag import CrossLagFilter
from kalman.smoothers.fixed_lag import FixedLagFilter
from kalman.types import Array, Filter, ModelError


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
    raise silent()


def bare(model: Filter, state: Array) -> tuple[Filter, Array]:
    """Return the filter without rounding and without the rows that it keeps for smoothing, and its part of states."""
    model = unrounded(model)
    if isinstance(model, FixedLagFilter | CrossLagFilter):
        return model.inner, state[: model.inner.size]
    return model, state


def silent() -> ModelError:
    return ModelError("filter", "it does not say what it expects to measure", "choose another filter")


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
