"""The linear map from states to measurements, for pictures that show estimates over measurements."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.specs.model_spec import ModelSpec

Floats = NDArray[np.float64]


def find_measured_direction(spec: ModelSpec) -> Floats | None:
    """Return the first row of H (n,); None if this row is not constant."""
    observation = spec.definition().get("observation") or {}
    if "h" in observation or observation.get("offset"):
        return None
    H = observation.get("H")
    if H is None:
        return np.eye(1, len(spec.states))[0] if len(spec.states) == len(spec.measurement) else None
    try:
        row = np.array(H[0], np.float64)
    except (TypeError, ValueError):
        return None
    return row if row.shape == (len(spec.states),) else None


class LinearMeasuring(NamedTuple):
    """The constant matrix H (m, n) and offset (m,) by which the states give the measurements."""

    H: Floats
    offset: Floats


def find_measuring(spec: ModelSpec) -> LinearMeasuring | None:
    """Return the constant map from states to measurements; None if the map depends on the row or is not linear."""
    kernel: Any = kalman.build(spec.definition())
    try:
        H = np.array(kernel.H, float)
        offset = np.array(kernel.offset or np.zeros(len(H)), float)
    except (AttributeError, TypeError, ValueError, kalman.ModelError):
        return None
    return LinearMeasuring(H, offset) if H.shape == (len(spec.measurement), len(spec.states)) else None


def project_states(mean: Floats, covariance: Floats, h: Floats, offset: float) -> tuple[Floats, Floats]:
    """Return mean and variance (N,) of h x + offset without measurement noise; only states with h != 0 are used."""
    used = np.flatnonzero(h)
    part = covariance[:, used[:, None], used]
    with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN: no band is drawn
        return mean @ h + offset, np.einsum("i,nij,j->n", h[used], part, h[used])
