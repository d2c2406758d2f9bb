"""Plots of a filter's output: estimates with their band, normalised innovations, NIS.

Also parts that several pictures use: date axes, bounds, funnel plots.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray
from scipy.special import chdtri, gammaln

from jobs.core.redaction import shorten_text
from kalman.evaluation.diagnostics import coverage, mean_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


P = ParamSpec("P")
T = TypeVar("T")
Floats = NDArray[np.float64]

ESTIMATE, SMOOTHED, MEASURED, BOUND = "#2563a8", "#d9700a", "#8a94a3", "#b3123b"
INK, FAINT = "#1f2733", "#d9dee6"
BAND = 1.959964  # standard deviations: half the width of the 95 % interval of a normal distribution
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.edgecolor": "#aab3bf",
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.dpi": 160,
    # Names of keys and columns are texts, not mathematics; a wrong formula would end the picture.
    "text.parse_math": False,
    "text.usetex": False,
}


class Line(NamedTuple):
    """An estimate over time and its standard deviation, (N,) each, with the label and the colour of its line."""

    mean: Floats
    deviation: Floats
    label: str = "estimate, 95 % band"
    colour: str = ESTIMATE


def apply_style(draw: Callable[P, T]) -> Callable[P, T]:
    """Apply `STYLE` to a function that makes and saves a figure."""

    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T:
        with plt.rc_context(STYLE):
            return draw(*args, **kwargs)

    return inner


def encode_figure(figure: Figure) -> str:
    """Return a figure as the data URI of a PNG, and close it."""
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)  # `savefig` would draw everything twice
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def join_title(*parts: str) -> str:
    """Join the non-empty parts of a title."""
    return " · ".join(part for part in parts if part)


def format_coverage(nis: Floats, components: int | NDArray[Any] = 1) -> str:
    """Return a text for a band: the share of rows with a NIS (N,) within the prediction; '' without such rows."""
    share = coverage(nis, components)
    return "" if np.isnan(share) else f"{share:.1%} of rows in their predicted 95 %"


def draw_estimate(ax: Axes, time: NDArray[Any], measured: Floats, lines: list[Line]) -> None:
    """Draw estimates with their 95 % bands over the measurements (N,), which are NaN if missing.

    time: (N,) numbers or datetime64.
    """
    draw_measured(ax, time, measured)
    for line in lines:
        draw_line(ax, time, line)
    ax.legend(loc="best", fontsize=8.5)


def draw_measured(ax: Axes, time: NDArray[Any], measured: Floats) -> None:
    """Draw measurements (N,) as dots, over the lines, which would hide them; draw nothing if there is none."""
    if np.isfinite(measured).any():
        ax.plot(time, measured, ".", color=INK, markersize=2.5, alpha=0.5, zorder=4, label="measured")


def draw_line(ax: Axes, time: NDArray[Any], line: Line, style: str = "-") -> None:
    """Draw an estimate with its 95 % band over time (N,); no band is drawn for an infinite deviation."""
    half = np.where(np.isfinite(line.deviation), BAND * line.deviation, np.nan)
    ax.fill_between(
        time, line.mean - half, line.mean + half, color=line.colour, alpha=0.2, linewidth=0, zorder=2
    )
    ax.plot(time, line.mean, style, color=line.colour, linewidth=1.1, zorder=3, label=line.label)


def fit_values(ax: Axes, measured: Floats, lines: list[Line]) -> None:
    """Set the limits of the y axis to measurements, means and usual bands, because a diffuse start has a huge band."""
    known = np.concatenate(
        [measured[np.isfinite(measured)], *(line.mean[np.isfinite(line.mean)] for line in lines)]
    )
    usual = [
        float(np.median(line.deviation[np.isfinite(line.deviation)])) for line in lines if len(line.deviation)
    ]
    if len(known):
        pad = max([0.1 * float(np.ptp(known)), *(2.2 * one for one in usual if np.isfinite(one))]) or 1.0
        ax.set_ylim(known.min() - pad, known.max() + pad)


def draw_innovations(ax: Axes, time: NDArray[Any], normalised: Floats, reach: float = 5.5) -> None:
    """Draw normalised innovations (N,) over time, with the bounds that include 95 % of them for a correct model."""
    seen = np.isfinite(normalised)
    ax.plot(time[seen], normalised[seen], ".", color=ESTIMATE, markersize=3, alpha=0.7)
    for level in (-BAND, BAND):
        ax.axhline(level, color=INK, linewidth=0.8, linestyle=":")
    outside = float(np.mean(np.abs(normalised[seen]) > BAND)) if seen.any() else np.nan
    ax.set_title(f"{outside:.1%} outside ±1.96 (5 % expected)", fontweight="normal")
    ax.set_ylabel("innovation / its\nstandard deviation")
    ax.set_ylim(-reach, reach)


def draw_nis(ax: Axes, nis: Floats, degrees: int) -> None:
    """Draw the histogram of NIS (N,) and the chi-square density with `degrees` (measured components) degrees of
    freedom.
    """
    values = nis[np.isfinite(nis)]
    bound = float(chdtri(degrees, 0.05))
    edge = 4 * bound
    if values.size:
        clipped = np.minimum(values, edge)
        bins = min(max(10, int(2 * np.sqrt(values.size))), 80)
        ax.hist(clipped, bins=bins, range=(0, edge), density=True, color=MEASURED, alpha=0.7)
    x = np.linspace(edge / 400, edge, 400)
    name = f"χ² with {degrees} degree{'s'[: degrees > 1]}"
    half = degrees / 2
    density = np.exp((half - 1) * np.log(x) - x / 2 - gammaln(half) - half * np.log(2))
    ax.plot(x, density, color=INK, linewidth=1.2, label=name)
    ax.axvline(bound, color=BOUND, linewidth=1.0, linestyle=":", label=f"95 % bound {bound:.2f}")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylim(1e-4, 5)
    ax.set_xlabel("NIS (the last bar: all above)")
    ax.set_ylabel("density")
    outside = float(np.mean(values > bound)) if values.size else np.nan
    ax.set_title(f"{outside:.1%} above the bound (5 % expected)", fontweight="normal")
    ax.legend(loc="upper right", fontsize=8.5)


LEGEND = 8.5
SIZE = (5.0, 3.0)
"""The size of a report's picture in inches. On a phone, the letters of the axes are about ten pixels high."""


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
    """Give the time axis `least` to `most` marks with short labels."""
    locator = AutoDateLocator(minticks=least, maxticks=most)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def draw_expected(ax: Axes, value: float) -> None:
    """Draw the line of the value expected for a correct model."""
    ax.axhline(value, color=INK, linewidth=0.8, linestyle=":")


def finish_nis(ax: Axes, time: NDArray[np.datetime64], degrees: Floats) -> None:
    """Add the band with 95 % of a correct model's values to a picture of NIS per component over time.

    time, degrees: (B,) the time of each bin and its number of measured components.
    """
    low, high = mean_bounds(1, np.maximum(degrees, 1.0))
    ax.fill_between(time, low, high, color=INK, alpha=0.08, linewidth=0, label="95 % of a correct model")
    draw_expected(ax, 1.0)
    ax.set_title("NIS per component over time (1 is expected)")
    ax.legend(loc="best", fontsize=LEGEND)
    format_date_axis(ax)


def use_log_scale(ax: Axes) -> None:
    """Make the x axis logarithmic, with labels such as 60, 100, 200 instead of powers of ten, which are mathematics."""
    ax.set_xscale("log")
    for set_formatter in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        set_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))


def draw_funnel(
    ax: Axes,
    count: Floats,
    value: Floats,
    bounds: Callable[[Floats], tuple[Any, Any]],
    expected: float,
    colour: str,
) -> None:
    """Draw each key's value over its number of measured components (K,), and bounds that narrow with this number.

    bounds: a function that returns the lower and the upper bound for numbers of components; keys outside are drawn red.
    expected: the value expected for a correct model.
    """
    draw_expected(ax, expected)
    ax.set_xlabel("measured components of the key")
    use_log_scale(ax)
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

    others: ratios in adjacent pictures, whose axes must have the same length.
    """
    draw_funnel(ax, degrees, ratio, lambda count: mean_bounds(1, count), 1.0, colour)
    ax.set_ylim(0.0, compute_axis_end(ratio, *others, least=2.0))


def shorten_name(text: str, most: int = 28) -> str:
    """Return a name for a picture: one line of at most `most` characters, with escapes for those the font lacks.

    A space goes before an underscore, because a legend leaves out labels that begin with it.
    """
    text = "".join(
        one if one.isprintable() and ord(one) in _list_glyphs() else one.encode("unicode_escape").decode()
        for one in f"{' ' * text.startswith('_')}{text[: most + 1]}"
    )
    return shorten_text(text, most, "…")


@cache
def _list_glyphs() -> set[int]:
    """Return the characters of the fonts of labels and of titles."""
    paths = [font_manager.findfont(font_manager.FontProperties(weight=one)) for one in ("normal", "bold")]
    return set.intersection(*(set(font_manager.get_font(path).get_charmap()) for path in paths))


def compute_axis_end(*values: Floats, least: float) -> float:
    """Return the end of an axis that starts at zero: at least `least`, and possibly exceeded by a few outliers."""
    known = np.concatenate([one[np.isfinite(one)] for one in values])
    return max(least, 1.15 * float(np.quantile(known, 0.99))) if known.size else least
