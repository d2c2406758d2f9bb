"""Which combination of the states a model measures, for pictures that show estimates over measurements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jobs.specs.model_spec import ModelSpec


def measured_direction(spec: ModelSpec) -> NDArray[np.float64] | None:
    """Return the first row of H (n,), None where it is not constant."""
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
