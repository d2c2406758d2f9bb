"""Jacobians by differences: central, of fourth order, with steps that fit the state's own uncertainty.

A step begins at a fraction of the state's standard deviation, the scale on which a first-order filter linearises the
function, however far from the origin the state is. Where two step lengths disagree, the function bends within the
step: that key's step is made shorter until they agree, or rounding leaves nothing to gain. Each key has its own steps.

References: Abramowitz and Stegun (1964), 25.3.6; for the shrinking steps Ridders (1982).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kalman.types import Array

FRACTION = 2.0**-8
"""The first step as a fraction of the standard deviation.

Where the function bends within one deviation, truncation costs h^4 / 30 = 8e-12 of a slope, and rounding 1e-13 times
the function's value.
"""
RESOLUTION = 2.0**-28
"""Least first step as a fraction of |x|, 16 million spacings of floats: rounding of values like x costs 4e-8 of it."""
SHORTEST = 2.0**-40
"""Least step as a fraction of |x|, where the function bends within the first one: 4096 spacings of floats."""
SHRINK = 2.0**-6
SHORTER = 8
"""Most reductions of a step: from 100 km to less than a nanometre."""
AGREED = 2.0**-13
"""Difference of two step lengths' slopes that is small enough: the error of fourth order is about its square."""

Function = Callable[[Array, np.ndarray | slice], Array]
"""A function of points (n, P K') of the keys `which` (K' of them): values (rows, P K')."""
Wrap = Callable[[Array], Array]
"""A function that brings differences (rows, ..., K) of angles into half a period."""


class Slope(NamedTuple):
    """A Jacobian by differences.

    value (rows, n, K); apart, the difference of two step lengths' slopes, same shape; found (rows, n, 4, K), the
    function's values; width (n, K) or (rows, n, K), the distance of the nearer two values' points
    """

    value: Array
    apart: Array
    found: Array
    width: Array

    @property
    def rounding(self) -> Array:
        """Bound on the effect of rounding of the function's values on the entries."""
        return np.finfo(float).eps * np.abs(self.found).max(axis=2) / self.width

    @property
    def error(self) -> Array:
        """Estimated error of the entries, from two step lengths."""
        return self.apart + self.rounding


def count_points(n: int) -> int:
    """Return the number of points P at which `slope` calls a function of n states."""
    return 4 * n


def compute_slope(function: Function, x: Array, spread: Array, rows: int, wrap: Wrap | None = None) -> Slope:
    """Return the Jacobian at x (n, K) of a function of `rows` values.

    spread (n, K): standard deviations of the states. wrap: for values that are angles.
    """
    known = spread > 0.0
    scale = spread if known.all() else np.where(known, spread, np.maximum(np.abs(x), 1.0))
    step = np.maximum(FRACTION * scale, RESOLUTION * np.abs(x))
    slopes = _compute_differences(function, x, step, slice(None), rows, wrap)
    open_ = np.flatnonzero(_find_bent(slopes, spread, 0.0).any(axis=0))
    if len(open_):
        settled = _settle_slopes(function, x, spread, step, open_, rows, wrap, slopes)
        slopes = slopes._replace(width=np.repeat(slopes.width[None], rows, axis=0))
        for kept, new in zip(slopes, settled, strict=True):
            kept[..., open_] = new
    return slopes


def _settle_slopes(
    function: Function,
    x: Array,
    spread: Array,
    step: Array,
    which: np.ndarray,
    rows: int,
    wrap: Wrap | None,
    first: Slope,
) -> Slope:
    """Return the slopes of the keys `which` after shortening steps within which the function bends."""
    x, spread, step = x[:, which], spread[:, which], step[:, which]
    width = np.repeat(first.width[None, :, which], rows, axis=0)
    best = Slope(first.value[..., which], first.apart[..., which], first.found[..., which], width)
    least = SHORTEST * np.abs(x)
    for _ in range(SHORTER):
        bent = _find_bent(best, spread, 4.0 * best.rounding) & (step > least)
        open_ = np.flatnonzero(bent.any(axis=0))
        if not len(open_):
            break
        shorter = np.maximum(SHRINK * step[:, open_], least[:, open_])
        step[:, open_] = np.where(bent[:, open_], shorter, step[:, open_])
        again = _compute_differences(function, x[:, open_], step[:, open_], which[open_], rows, wrap)
        old = best.error[:, :, open_]
        better = (again.error < old) | np.isnan(old)
        best.found[..., open_] = np.where(better[:, :, None], again.found, best.found[..., open_])
        for kept, new in ((best.value, again.value), (best.apart, again.apart), (best.width, again.width)):
            kept[..., open_] = np.where(better, new, kept[..., open_])
    return best


def _compute_differences(
    function: Function,
    x: Array,
    step: Array,
    which: np.ndarray | slice,
    rows: int,
    wrap: Wrap | None,
) -> Slope:
    """Return the slopes at x (n, K) with steps (n, K)."""
    n, keys = x.shape
    points = np.repeat(x[:, None, :], 4 * n, axis=1)
    widths = np.empty((2, n, keys))
    for j in range(n):
        for k in range(2):  # one step to each side, and two
            upper, lower = x[j] + (k + 1) * step[j], x[j] - (k + 1) * step[j]
            points[j, 4 * j + 2 * k], points[j, 4 * j + 2 * k + 1] = upper, lower
            widths[k, j] = upper - lower  # the step after rounding
    found = function(points.reshape(n, 4 * n * keys), which).reshape(rows, n, 4, keys)
    near, far = found[:, :, 0] - found[:, :, 1], found[:, :, 2] - found[:, :, 3]
    if wrap is not None:
        near, far = wrap(near), wrap(far)
    near, far = near / widths[0], far / widths[1]
    apart = near - far
    return Slope(near + apart / 3.0, np.abs(apart), found, widths[0])


def compute_row_sizes(slopes: Array, spread: Array) -> Array:
    """Return the size of each row's slopes (rows, n, K) in standard deviations (n, K), for each state. A state without
    spread is compared only with itself, unscaled.
    """
    known = spread > 0.0
    if known.all():
        return np.abs(slopes * spread).max(axis=1, keepdims=True)
    sizes = np.abs(slopes) * np.where(known, spread, 1.0)
    return np.where(known, np.where(known, sizes, 0.0).max(axis=1, keepdims=True), sizes)


def _find_bent(slopes: Slope, spread: Array, rounding: Array | float) -> Any:
    """Return a mask of states' steps (n, K) that are too long for some row."""
    scale = np.where(spread > 0.0, spread, 1.0)
    allowed = AGREED * compute_row_sizes(slopes.value, spread)
    return (~((slopes.apart - rounding) * scale <= allowed)).any(axis=0)
