"""Forecasts of keys' states and measurements."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from kalman import flags
from kalman.filters.prediction import Measuring, build_no_measurement_error, predict_measurement
from kalman.filters.state_layout import unwrap_filter
from kalman.linalg.packing import find_order, packed_index, packed_size
from kalman.run import KeyStates, begin_states
from kalman.types import Array, Filter, ModelError, Rows


class Forecast(NamedTuple):
    """Forecasts for K keys at S times; covariances packed lower, infinite where nothing is known.

    mean (n, S, K), covariance (n(n+1)/2, S, K) of the state
    measurement_mean (m, S, K), measurement_covariance (m(m+1)/2, S, K), its noise included
    flag (S, K) uint8 code of `kalman.flags`; NaN from the first flagged time on
    """

    mean: Array
    covariance: Array
    measurement_mean: Array
    measurement_covariance: Array
    flag: npt.NDArray[np.uint8]


def check_measuring(model: Filter) -> None:
    """Raise ModelError where the filter does not predict its measurements."""
    if not isinstance(unwrap_filter(model), Measuring):
        raise build_no_measurement_error()


def forecast(model: Filter, states: KeyStates, dt: Array, u: Array | None = None) -> Forecast:
    """Return the forecasts of K keys after each of S steps.

    dt (S, K) time of each step in the model's unit, the first counted from the key's newest row; u (S, c, K)
    control of each step. A key without rows starts at its initial distribution, without a prediction.

    Raises:
        ModelError: the model needs control and none is given, or it predicts no measurement.

    Reference: Durbin and Koopman (2012), section 4.11: a forecast is the filter's output for missing rows.
    """
    steps, keys = dt.shape
    if u is None:
        if model.controls:
            raise ModelError("control", "is not known in the future", "give the control of each step")
        u = np.empty((steps, 0, keys))
    model = unwrap_filter(model)
    values = states.values[: model.size]
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
        rows = Rows(np.where(first, 0.0, dt[s]), first, missing, u[s])
        values, step = model.step(begin_states(model, values, rows)[0], rows)
        flag = np.where(flag == flags.WELL, step.flag, flag)
        good = flag == flags.WELL
        for kept, found in zip(
            result, (*model.moments(values), *predict_measurement(model, values, u[s])), strict=False
        ):
            kept[:, s] = np.where(good, found, np.nan)
        result.flag[s] = flag
    return result


def interval(mean: Array, variance: Array, probability: float) -> tuple[Array, Array]:
    """Return the bounds of the central interval that holds a normal value with this probability.

    mean and variance have the same shape. An infinite variance has infinite bounds. Raises ValueError.
    """
    if not 0.0 < probability < 1.0:
        raise ValueError(f"a probability is between 0 and 1, not {probability}")
    half = ndtri(0.5 + 0.5 * probability) * np.sqrt(variance)
    return mean - half, mean + half


def extract_variances(covariance: Array) -> Array:
    """Return the diagonal (n, ...) of packed covariances (n(n+1)/2, ...)."""
    return covariance[[packed_index(i, i) for i in range(find_order(len(covariance)))]]
