"""Parts that the pictures of whole models share: axes of dates, the bounds of a correct model, all keys as a funnel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from jobs.offline.plots import BOUND, INK, STYLE, Floats, inlined
from kalman.evaluation.diagnostics import mean_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
SIZE = (5.0, 3.0)
"""Inches of a picture of a report: at the width of a phone the letters of the axes are still about ten pixels high."""


def for_page(draw: Callable[P, Figure]) -> Callable[P, str]:
    """Let a function that draws a figure return it as the data URI of a PNG, in the project's style."""

    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> str:
        matplotlib.use("Agg")  # into memory: neither a command nor a driver has a display
        with plt.rc_context(STYLE):
            return inlined(draw(*args, **kwargs))

    return inner


def dates(time: NDArray[np.int64]) -> NDArray[np.datetime64]:
    """Return microseconds since 1970 as matplotlib takes times."""
    return time.astype("datetime64[us]")


def date_axis(ax: Axes, least: int, most: int) -> None:
    """Give the axis of times from `least` to `most` marks, each as short as can be understood."""
    locator = AutoDateLocator(minticks=least, maxticks=most)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def draw_expected(ax: Axes, value: float) -> None:
    """Draw the value that a correct model has."""
    ax.axhline(value, color=INK, linewidth=0.8, linestyle=":")


def draw_nis_band(ax: Axes, time: NDArray[np.datetime64], degrees: Floats) -> None:
    """Draw the band that holds 95 % of the mean NIS per component of a correct model.

    time, degrees: (B,), of each bin; degrees are its measured components.
    """
    low, high = mean_bounds(1, np.maximum(degrees, 1.0))
    ax.fill_between(time, low, high, color=INK, alpha=0.08, linewidth=0, label="95 % of a correct model")


def draw_funnel(
    ax: Axes, count: Floats, value: Floats, bounds: Callable[[Floats], tuple[Any, Any]], colour: str
) -> None:
    """Draw each key's value over its measured components (K,), and the bounds, which narrow with their number.

    bounds: returns the lower and the upper bound for numbers of components. A key outside them is drawn red.
    """
    ax.set_xscale("log")
    for set_formatter in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        set_formatter(
            LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5))
        )  # 60, 100, 200; no powers
    if not len(count):
        return
    x = np.geomspace(max(1.0, 0.8 * float(count.min())), 1.25 * float(count.max()), 200)
    low, high = bounds(x)
    ax.fill_between(x, low, high, color=INK, alpha=0.08, linewidth=0)
    low, high = bounds(count)
    outside = (value < low) | (value > high)
    ax.plot(count[~outside], value[~outside], ".", color=colour, markersize=3.5, alpha=0.55)
    ax.plot(count[outside], value[outside], ".", color=BOUND, markersize=4.5, alpha=0.8)


def axis_end(*values: Floats, least: float) -> float:
    """Return where an axis ends that starts at zero, at `least` or beyond; a few outliers may exceed it."""
    known = np.concatenate([one[np.isfinite(one)] for one in values])
    return max(least, 1.15 * float(np.quantile(known, 0.99))) if known.size else least
