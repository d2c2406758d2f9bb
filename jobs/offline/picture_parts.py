"""Shared parts of the pictures of whole models: date axes, the bounds of a correct model, funnel plots of all keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from jobs.offline.plots import BOUND, INK, STYLE, Floats, encode_figure
from kalman.evaluation.diagnostics import mean_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

P = ParamSpec("P")
LEGEND = 8.5
SIZE = (5.0, 3.0)
"""Size of a report's picture in inches: at the width of a phone the axes' letters are still about ten pixels high."""


def render_for_page(draw: Callable[Concatenate[Axes, P], None]) -> Callable[P, str]:
    """Wrap a function that draws into axes so that it returns the data URI of a PNG in the project's style."""

    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> str:
        matplotlib.use("Agg")  # draw in memory: neither a command nor a driver has a display
        with plt.rc_context(STYLE):
            figure, ax = plt.subplots(figsize=SIZE, layout="constrained")
            draw(ax, *args, **kwargs)
            return encode_figure(figure)

    return inner


def convert_dates(time: NDArray[np.int64]) -> NDArray[np.datetime64]:
    """Convert microseconds since 1970 to matplotlib's type of times."""
    return time.astype("datetime64[us]")


def format_date_axis(ax: Axes, least: int = 3, most: int = 6) -> None:
    """Give the time axis from `least` to `most` marks with short labels."""
    locator = AutoDateLocator(minticks=least, maxticks=most)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def draw_expected(ax: Axes, value: float) -> None:
    """Draw the line of the value expected for a correct model."""
    ax.axhline(value, color=INK, linewidth=0.8, linestyle=":")


def finish_nis(ax: Axes, time: NDArray[np.datetime64], degrees: Floats) -> None:
    """Add the band with 95 % of a correct model's values to a picture of NIS per component over time.

    time, degrees: (B,) time and number of measured components of each bin.
    """
    low, high = mean_bounds(1, np.maximum(degrees, 1.0))
    ax.fill_between(time, low, high, color=INK, alpha=0.08, linewidth=0, label="95 % of a correct model")
    draw_expected(ax, 1.0)
    ax.set_title("NIS per component over time (1 is expected)")
    ax.legend(loc="best", fontsize=LEGEND)
    format_date_axis(ax)


def draw_funnel(
    ax: Axes,
    count: Floats,
    value: Floats,
    bounds: Callable[[Floats], tuple[Any, Any]],
    expected: float,
    colour: str,
) -> None:
    """Draw each key's value over its number of measured components (K,), and bounds that narrow with this number.

    bounds: returns the lower and the upper bound for numbers of components. A key outside the bounds is drawn red.
    expected: the value expected for a correct model.
    """
    draw_expected(ax, expected)
    ax.set_xlabel("measured components of the key")
    ax.set_xscale("log")
    for set_formatter in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        set_formatter(
            LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5))
        )  # labels 60, 100, 200, without powers
    if not len(count):
        return
    x = np.geomspace(max(1.0, 0.8 * float(count.min())), 1.25 * float(count.max()), 200)
    low, high = bounds(x)
    ax.fill_between(x, low, high, color=INK, alpha=0.08, linewidth=0)
    low, high = bounds(count)
    outside = (value < low) | (value > high)
    ax.plot(count[~outside], value[~outside], ".", color=colour, markersize=3.5, alpha=0.55)
    ax.plot(count[outside], value[outside], ".", color=BOUND, markersize=4.5, alpha=0.8)


def draw_nis_of_keys(
    ax: Axes, degrees: Floats, ratio: Floats, colour: str, others: Sequence[Floats] = ()
) -> None:
    """Draw each key's NIS per component over its number of measured components (K,).

    others: ratios in adjacent pictures, whose axes get the same length.
    """
    draw_funnel(ax, degrees, ratio, lambda count: mean_bounds(1, count), 1.0, colour)
    ax.set_ylim(0.0, compute_axis_end(ratio, *others, least=2.0))


def shorten_name(text: str, most: int = 28) -> str:
    """Return the name of a key or group, shortened to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def compute_axis_end(*values: Floats, least: float) -> float:
    """Return the end of an axis that starts at zero, at `least` or more; a few outliers may exceed it."""
    known = np.concatenate([one[np.isfinite(one)] for one in values])
    return max(least, 1.15 * float(np.quantile(known, 0.99))) if known.size else least
