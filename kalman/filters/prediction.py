"""Protocols that a `Filter` may also have: predictions of the state for smoothers, of measurements for forecasts."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from kalman.filters.state_layout import unwrap_filter
from kalman.models.angles import turn_angles
from kalman.types import Array, Filter, ModelError, Rows


class Prediction(NamedTuple):
    """The predicted mean (n, K) of the state at a row, and the retrodiction from this state to the previous state.

    gain: (n, n, K) and rest: (n(n+1)/2, K) packed, as in `kalman.filters.retrodiction`
    """

    mean: Array
    gain: Array
    rest: Array


@runtime_checkable
class Smoothable(Protocol):
    """A filter whose states can be smoothed."""

    def prediction(self, state: Array, rows: Rows) -> Prediction:
        """Return the prediction from the states (size, K) before the rows; the results of first rows are not used."""
        ...

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance."""
        ...


@runtime_checkable
class Measuring(Protocol):
    """A filter that predicts its measurements."""

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return mean (m, K) and packed covariance of a measurement of keys in these states (size, K).

        u: (c, K) controls of the measurement's row, because a measurement may depend on columns. The covariance
        includes the measurement noise, and is infinite where the state is still diffuse.
        """
        ...


@runtime_checkable
class Residual(Protocol):
    """A regression, which computes residuals, not innovations, because its errors are not normally distributed."""

    def residual(self, state: Array, rows: Rows) -> tuple[Array, Array]:
        """Return the residuals (m, K) of the rows and their packed covariances, given the states before the rows.

        The covariance is infinite if the earlier rows do not determine the prediction or its error variance.
        """
        ...


def predict_measurement(model: Filter, state: Array, u: Array | None = None) -> tuple[Array, Array]:
    """Return the result of `Measuring.measured` for any filter; u: controls (c, K), None means unknown controls (NaN).

    Raises:
        ModelError: the filter does not predict measurements.
    """
    if u is None:
        u = np.full((model.controls, state.shape[1]), np.nan)
    model = unwrap_filter(model)
    if isinstance(model, Measuring):
        return model.measured(state[: model.size], u)
    raise build_no_measurement_error()


def turn_measurements(model: Filter, y: Array, expected: Array) -> Array:
    """Return measurements (m, K), with angles moved by whole periods to within half a period of `expected`."""
    periods = getattr(unwrap_filter(model), "periods", ())
    return np.array(turn_angles(periods, list(y), list(expected))) if periods else y


def build_no_measurement_error() -> ModelError:
    """Return the ModelError for a filter that is not `Measuring`."""
    return ModelError("filter", "it does not predict its measurements", "choose another filter")
