"""The functions of `unscented.yaml`, over keys on the last axis."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP = 0.05


def swing(x: NDArray[np.float64], dt: NDArray[np.float64], u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the angle and the rate (2, K) one short step later."""
    return np.stack([x[0] + STEP * x[1], x[1] - STEP * np.sin(x[0])])


def seen(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sine of the angle (1, K)."""
    return np.sin(x[:1])
