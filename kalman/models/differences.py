"""Jacobians by central differences of fourth order, with steps that fit the uncertainty of each state.

A step starts at a fraction of the state's standard deviation, because a first-order filter linearises the function on
this scale, however far from the origin the state is. If the slopes of two step lengths disagree, the function bends
within the step. The key's step is then shortened until the slopes agree or rounding prevents any gain. Each key has
separate steps.

References: Abramowitz and Stegun (1964), 25.3.6; for the shrinking steps Ridders (1982).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kalman.types import Array

FRACTION = 2.0**-8
"""The first step as a fraction of the standard deviation.

For a function that bends within one deviation, the truncation error is h^4 / 30 = 8e-12 of a slope, and the rounding
error is 1e-13 times the function's value.
"""
RESOLUTION = 2.0**-28
"""Least first step as a fraction of |x|, 16 million spacings of floats; rounding of x costs 4e-8 of a step."""
SHORTEST = 2.0**-40
"""Least step after shortening, as a fraction of |x|: 4096 spacings of floats."""
SHRINK = 2.0**-6
SHORTER = 8
"""Maximum number of times that a step is shortened, enough to go from 100 km to less than a nanometre."""
AGREED = 2.0**-13
"""Two step lengths agree if their slopes differ by less than this; the fourth-order error is about its square."""

Function = Callable[[Array, np.ndarray | slice], Array]
"""A function from points (n, P K') and the K' keys `which` to values (rows, P K')."""
Wrap = Callable[[Array], Array]
"""A function that moves differences (rows, ..., K) of angles to within half a period of 0."""


class Slope(NamedTuple):
    """A Jacobian by differences.

    value: (rows, n, K) the Jacobian; apart: (rows, n, K) difference between the slopes of two step lengths
    found: (rows, n, 4, K) the function's values; width: (n, K) or (rows, n, K) distance between the two nearer points
    """

    value: Array
    apart: Array
    found: Array
    width: Array

    @property
    def rounding(self) -> Array:
        """Bound on the error of the entries from rounding of the function's values."""
        return np.finfo(float).eps * np.abs(self.found).max(axis=2) / self.width

    @property
    def error(self) -> Array:
        """Estimated error of the entries: the difference of two step lengths, plus rounding."""
        return self.apart + self.rounding


def count_points(n: int) -> int:
    """Return the number of points P at which `compute_slope` calls a function of n states."""
    return 4 * n


def compute_slope(function: Function, x: Array, spread: Array, rows: int, wrap: Wrap | None = None) -> Slope:
    """Return the Jacobian at x (n, K) of a function of `rows` values.

    spread: (n, K) standard deviations of the states; wrap: function for values that are angles, None without angles
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
    """Return the slopes of the keys `which`, with shorter steps where the function bends within a step."""
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
        for k in range(2):  # one step to each side, then two steps
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
    """Return the largest slope of each row, times the state's standard deviation (n, K), as a scale for each state.

    The scale of a state without spread is the size of its own slope, unscaled.
    """
    known = spread > 0.0
    if known.all():
        return np.abs(slopes * spread).max(axis=1, keepdims=True)
    sizes = np.abs(slopes) * np.where(known, spread, 1.0)
    return np.where(known, np.where(known, sizes, 0.0).max(axis=1, keepdims=True), sizes)


def _find_bent(slopes: Slope, spread: Array, rounding: Array | float) -> Any:
    """Return a mask (n, K) of the steps that are too long for at least one row of the function."""
    scale = np.where(spread > 0.0, spread, 1.0)
    allowed = AGREED * compute_row_sizes(slopes.value, spread)
    return (~((slopes.apart - rounding) * scale <= allowed)).any(axis=0)
