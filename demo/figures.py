"""Draw the report's figures: estimates across the hand-over, innovations, NIS against chi-square."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.offline.plots import (
    BAND,
    BOUND,
    ESTIMATE,
    INK,
    MEASURED,
    SMOOTHED,
    apply_style,
    encode_figure,
    format_coverage,
    join_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from demo.upgrade import Estimate

HISTORY, STREAM, KILL = ESTIMATE, SMOOTHED, BOUND


class Series(NamedTuple):
    """One key's rows in the order in which they were applied; times in microseconds since 1970, UTC.

    measured, estimate, deviation (of the estimate), normalised (innovation over its standard deviation):
    (N,); NaN without a measurement.
    """

    title: str
    time: NDArray[np.int64]
    measured: NDArray[np.float64]
    estimate: NDArray[np.float64]
    deviation: NDArray[np.float64]
    normalised: NDArray[np.float64]


class Nis(NamedTuple):
    """Normalised innovations squared of a model: values, numbers of components observed, times: (N,)."""

    title: str
    values: NDArray[np.float64]
    components: NDArray[np.int64]
    time: NDArray[np.int64]


class Switch(NamedTuple):
    """An upgrade and its roll-back.

    routes: title and the estimates of both versions; measured: times and values of each route; days: beginnings of the
    days that landed around the upgrade, in microseconds; result: as in result.json.
    """

    routes: list[tuple[str, Estimate, Estimate]]
    measured: list[tuple[NDArray[np.int64], NDArray[np.float64]]]
    days: list[int]
    result: dict[str, Any]


class Marks(NamedTuple):
    """Moments to mark: the hand-over from history to stream, and where the driver was killed (or None)."""

    hand_over: int
    killed: int | None


@apply_style
def draw_estimates(series: list[Series], marks: Marks, unit: str) -> str:
    """Draw each key's estimate with its 95 % band over the measurements."""
    figure, axes = _grid(len(series), width=11.0, height=2.35)
    for ax, one in zip(axes, series, strict=True):
        time = _dates(one.time)
        ax.plot(time, one.measured, ".", color=MEASURED, markersize=2.6, alpha=0.55, zorder=1)
        streamed = one.time >= marks.hand_over
        for part, colour in ((~streamed, HISTORY), (streamed, STREAM)):
            if not part.any():
                continue
            mean, half = one.estimate[part], BAND * one.deviation[part]
            ax.fill_between(
                time[part], mean - half, mean + half, color=colour, alpha=0.25, linewidth=0, zorder=2
            )
            ax.plot(time[part], mean, color=colour, linewidth=1.0, zorder=3)
        _mark(ax, marks)
        _robust_limits(ax, one)
        ax.set_title(join_title(one.title, format_coverage(one.normalised**2)))
        ax.set_ylabel(unit)
    _date_axis(axes[-1])
    _legend(figure)
    return encode_figure(figure)


@apply_style
def draw_switch(switch: Switch, unit: str) -> str:
    """Draw both versions of some routes across the upgrade and the roll-back, with the live version marked."""
    figure, axes = _grid(len(switch.routes), width=11.0, height=2.35)
    shadow, promoted, back = (_dates(np.array([day]))[0] for day in switch.days)
    for ax, (title, first, second), (time, measured) in zip(
        axes, switch.routes, switch.measured, strict=True
    ):
        ax.plot(_dates(time), measured, ".", color=MEASURED, markersize=4, alpha=0.7, zorder=1)
        for one, colour in ((first, HISTORY), (second, STREAM)):
            half = BAND * one.deviation
            ax.fill_between(
                _dates(one.time),
                one.mean - half,
                one.mean + half,
                color=colour,
                alpha=0.15,
                linewidth=0,
                zorder=2,
            )
            ax.plot(_dates(one.time), one.mean, color=colour, linewidth=1.2, zorder=3)
        ax.axvspan(promoted, back, color=STREAM, alpha=0.08, linewidth=0)
        top = ax.get_xaxis_transform()
        marks: tuple[tuple[Any, str], ...] = (
            (shadow, " 2 in shadow"),
            (promoted, " 2 is live"),
            (back, " rolled back"),
        )
        for at, text in marks:
            ax.axvline(at, color=INK, linewidth=0.9, linestyle=":")
            ax.annotate(text, (at, 0.98), xycoords=top, ha="left", va="top", fontsize=8)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.15 * (high - low))
        versions = [f"version {n}: {format_coverage(one.nis)}" for n, one in enumerate((first, second), 1)]
        ax.set_title(join_title(title, *versions))
        ax.set_ylabel(unit)
    _date_axis(axes[-1])
    _legend(figure, switched=True)
    return encode_figure(figure)


@apply_style
def draw_innovations(series: list[Series], marks: Marks) -> str:
    """Draw each key's normalised innovations over time, and their distribution beside them."""
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        len(series),
        2,
        figsize=(11.0, 1.9 * len(series) + 0.7),
        sharex="col",
        sharey="row",
        squeeze=False,
        width_ratios=[4, 1],
        layout="constrained",
    )
    x = np.linspace(-5, 5, 201)
    for (left, right), one in zip(grid, series, strict=True):
        seen = np.isfinite(one.normalised)
        streamed = one.time >= marks.hand_over
        for part, colour in ((seen & ~streamed, HISTORY), (seen & streamed, STREAM)):
            left.plot(
                _dates(one.time[part]), one.normalised[part], ".", color=colour, markersize=2.6, alpha=0.6
            )
        for level in (-BAND, BAND):
            left.axhline(level, color=INK, linewidth=0.8, linestyle=":")
        _mark(left, marks)
        outside = np.mean(np.abs(one.normalised[seen]) > BAND) if seen.any() else np.nan
        left.set_title(f"{one.title}: {outside:.1%} outside ±1.96")
        left.set_ylabel("innovation / its\nstandard deviation")
        left.set_ylim(-5.5, 5.5)
        clipped = np.clip(one.normalised[seen], -5, 5)
        if clipped.size:
            right.hist(
                clipped,
                bins=40,
                range=(-5, 5),
                density=True,
                orientation="horizontal",
                color=MEASURED,
                alpha=0.7,
            )
        right.plot(np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), x, color=INK, linewidth=1.0)
        right.set_title("against N(0, 1)", fontweight="normal", fontsize=9)
    grid[-1, 1].set_xlabel("density")
    _date_axis(grid[-1, 0])
    return encode_figure(figure)


@apply_style
def draw_nis(models: list[Nis], marks: Marks) -> str:
    """Draw each model's distribution of NIS, and the share of each week outside the 95 % bound."""
    import matplotlib.pyplot as plt
    from scipy.stats import chi2

    figure, grid = plt.subplots(
        len(models),
        2,
        figsize=(11.0, 2.7 * len(models)),
        squeeze=False,
        width_ratios=[2, 3],
        layout="constrained",
    )
    for (left, right), one in zip(grid, models, strict=True):
        degrees = int(one.components.max(initial=1))
        whole = one.components == degrees
        bound = float(chi2.ppf(0.95, degrees))
        edge = 4 * bound
        left.hist(
            np.minimum(one.values[whole], edge),
            bins=80,
            range=(0, edge),
            density=True,
            color=MEASURED,
            alpha=0.7,
        )
        x = np.linspace(0.02, edge, 400)
        left.plot(
            x,
            chi2.pdf(x, degrees),
            color=INK,
            linewidth=1.2,
            label=f"χ² with {degrees} degree{'s'[: degrees > 1]}",
        )
        left.axvline(bound, color=KILL, linewidth=1.0, linestyle=":", label=f"95 % bound {bound:.2f}")
        left.set_yscale("log")
        left.yaxis.set_major_formatter("{x:g}")
        left.set_ylim(1e-4, 5)
        left.set_title(one.title)
        left.set_xlabel("NIS (the last bar: all above)")
        left.set_ylabel("density")
        left.legend(loc="upper right", fontsize=8.5)
        time, share = weekly_share(one, whole & (one.values > bound), whole)
        right.plot(_dates(time), 100 * share, color=HISTORY, linewidth=1.4, marker="o", markersize=3)
        right.axhline(5, color=INK, linewidth=0.9, linestyle=":")
        _mark(right, marks)
        right.set_ylim(0, max(12.0, float(100 * share.max(initial=0.0)) * 1.1))
        right.set_title("share outside the bound, week by week (5 % expected)", fontweight="normal")
        right.set_ylabel("% of rows")
        _date_axis(right)
    return encode_figure(figure)


def weekly_share(one: Nis, outside: NDArray[np.bool_], counted: NDArray[np.bool_]) -> tuple[NDArray, NDArray]:
    """Return the middle of each week (microseconds) and the share of counted rows that are outside."""
    week = 7 * 86_400 * 1_000_000
    number = one.time // week
    weeks = np.unique(number[counted])
    rows = np.array([np.count_nonzero(counted & (number == w)) for w in weeks])
    out = np.array([np.count_nonzero(outside & (number == w)) for w in weeks])
    return weeks * week + week // 2, out / np.maximum(rows, 1)


def _grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        count, 1, figsize=(width, height * count + 0.6), sharex=True, squeeze=False, layout="constrained"
    )
    return figure, list(grid[:, 0])


def _mark(ax: Axes, marks: Marks) -> None:
    """Mark the hand-over and the kill."""
    top = ax.get_xaxis_transform()
    at: Any = _dates(np.array([marks.hand_over]))[0]
    ax.axvline(at, color=INK, linewidth=1.0)
    ax.annotate("history ", (at, 0.98), xycoords=top, ha="right", va="top", fontsize=8.5, color=HISTORY)
    ax.annotate(" stream", (at, 0.98), xycoords=top, ha="left", va="top", fontsize=8.5, color=STREAM)
    if marks.killed is not None:
        ax.axvline(_dates(np.array([marks.killed]))[0], color=KILL, linewidth=1.2, linestyle="--")


def _robust_limits(ax: Axes, one: Series) -> None:
    """Cut a few outliers from the axis, so that the other values are readable."""
    seen = one.measured[np.isfinite(one.measured)]
    if seen.size:
        low, high = np.quantile(seen, [0.002, 0.998])
        room = 0.12 * max(high - low, 1.0)
        ax.set_ylim(low - room, high + 1.8 * room)


def _date_axis(ax: Axes) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(minticks=5, maxticks=12)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    ax.set_xlabel("scheduled departure (UTC)")


def _legend(figure: Figure, switched: bool = False) -> None:
    from matplotlib.lines import Line2D

    versions = [
        Line2D([], [], color=MEASURED, label="measured", marker=".", linestyle=""),
        Line2D([], [], color=HISTORY, label="version 1, 95 % band"),
        Line2D([], [], color=STREAM, label="version 2, 95 % band"),
    ]
    handles = (
        versions
        if switched
        else [
            Line2D([], [], color=MEASURED, label="measured", marker=".", linestyle=""),
            Line2D([], [], color=HISTORY, label="estimate in history, 95 % band"),
            Line2D([], [], color=STREAM, label="estimate in the stream, 95 % band"),
            Line2D([], [], color=KILL, label="driver killed", linestyle="--"),
        ]
    )
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)


def _dates(time: NDArray[np.int64]) -> NDArray[np.datetime64]:
    return time.astype("datetime64[us]")
