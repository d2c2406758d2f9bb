"""Draw the report on two generations: the old one in grey, the new one in blue. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np

from jobs.offline.picture_parts import (
    axis_end,
    date_axis,
    dates,
    draw_expected,
    draw_funnel,
    draw_nis_band,
    for_page,
)
from jobs.offline.plots import BAND, BOUND, ESTIMATE, INK, MEASURED, SMOOTHED
from jobs.upgrades.comparison.content import Content, Sums
from kalman.evaluation.diagnostics import mean_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"old": SMOOTHED, "new": ESTIMATE}
COMPONENTS = "measured components of the key (red: outside the 95 % bounds)"


@for_page
def draw_likelihood(content: Content) -> Figure:
    """Draw the log-likelihood that the new version gains: cumulated over time, and by key."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.0, 3.1), width_ratios=[3, 2], layout="constrained")
    old, new = content.by_time["old"], content.by_time["new"]
    gain = np.cumsum(new.ll - old.ll)
    time = dates(content.time)
    left.axhline(0.0, color=INK, linewidth=0.8)
    left.plot(time, gain, color=ESTIMATE, linewidth=1.4)
    for sign, colour in ((1.0, ESTIMATE), (-1.0, BOUND)):
        left.fill_between(
            time, 0.0, np.where(sign * gain > 0, gain, 0.0), color=colour, alpha=0.15, linewidth=0
        )
    numbers = content.comparison.numbers
    _draw_interval(left, time, gain, numbers["gain"], numbers["rows"])
    left.set_title("log-likelihood gained by the new version, cumulated")
    date_axis(left, 4, 10)
    known = content.gain[np.isfinite(content.gain)]
    if known.size:
        edge = max(float(np.quantile(np.abs(known), 0.99)), 1e-3)
        right.hist(np.clip(known, -edge, edge), bins=41, range=(-edge, edge), color=MEASURED, alpha=0.75)
    right.axvline(0.0, color=INK, linewidth=0.8)
    right.set_title(f"by key: better {numbers['keys_better']:,}, worse {numbers['keys_worse']:,}")
    right.set_xlabel("log-likelihood gained per row (right of 0: better)")
    right.set_ylabel("keys")
    return figure


def _draw_interval(ax: Axes, time: Any, gain: Any, total: dict[str, Any], rows: int) -> None:
    """Draw the 95 % interval of the whole gain as an error bar at its end, where there is an interval."""
    if total["low"] is None or not len(gain):
        return
    below, above = (total["mean"] - total["low"]) * rows, (total["high"] - total["mean"]) * rows
    ax.errorbar(
        time[-1:], gain[-1:], yerr=[[below], [above]], color=INK, capsize=4, linewidth=1.2, label="95 %"
    )
    ax.legend(loc="best", fontsize=8.5)


@for_page
def draw_nis(content: Content) -> Figure:
    """Draw NIS per component with its bounds, over time and by key."""
    figure, axes = plt.subplot_mosaic(
        [["time", "time"], ["old", "new"]], figsize=(11.0, 5.4), height_ratios=[4, 5], layout="constrained"
    )
    for side, sums in content.by_time.items():
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = sums.nis / sums.degrees
        axes["time"].plot(
            dates(content.time),
            ratio,
            ".-",
            color=COLOURS[side],
            linewidth=1.2,
            markersize=4,
            label=_name(content, side),
        )
    draw_nis_band(axes["time"], dates(content.time), np.nan_to_num(content.by_time["new"].degrees))
    draw_expected(axes["time"], 1.0)
    axes["time"].set_title("NIS per component over time (1 is expected)")
    axes["time"].legend(loc="best", fontsize=8.5)
    date_axis(axes["time"], 4, 10)
    ratios = (one.nis / np.maximum(one.degrees, 1.0) for one in content.by_key.values())
    highest = axis_end(*ratios, least=2.0)
    for side, sums in content.by_key.items():
        known = np.isfinite(sums.nis) & (sums.degrees > 0)
        share = content.comparison.numbers["nis_outside"][side]
        ratio = sums.nis[known] / sums.degrees[known]
        draw_funnel(
            axes[side], sums.degrees[known], ratio, lambda count: mean_bounds(1, count), COLOURS[side]
        )
        axes[side].set_xlabel(COMPONENTS)
        draw_expected(axes[side], 1.0)
        axes[side].set_ylim(0.0, highest)
        axes[side].set_title(f"{_name(content, side)}: {_share(share)} of the keys outside (5 % expected)")
        axes[side].set_ylabel("NIS per component")
    return figure


@for_page
def draw_bias(content: Content) -> Figure:
    """Draw the mean normalised innovation of each key with its bounds, of the sides that have written innovations."""
    sides = [side for side in content.by_key if content.comparison.numbers["bias"][side] is not None]
    figure, grid = plt.subplots(
        1, len(sides), figsize=(5.5 * len(sides), 3.2), squeeze=False, layout="constrained"
    )
    means = {side: _mean_innovation(content.by_key[side]) for side in sides}
    highest = axis_end(*(np.abs(mean) for _, mean in means.values()), least=0.1)
    for ax, side in zip(grid[0], sides, strict=True):
        count, mean = means[side]

        def bounds(count: Any) -> tuple[Any, Any]:
            return -BAND / np.sqrt(count), BAND / np.sqrt(count)

        draw_funnel(ax, count, mean, bounds, COLOURS[side])
        ax.set_xlabel(COMPONENTS)
        draw_expected(ax, 0.0)
        ax.set_ylim(-highest, highest)
        share = content.comparison.numbers["bias_outside"][side]
        ax.set_title(f"{_name(content, side)}: {_share(share)} of the keys outside (5 % expected)")
        ax.set_ylabel("mean innovation")
    return figure


@for_page
def draw_examples(content: Content) -> Figure:
    """Draw both versions' estimates of the example keys, over the measurements."""
    examples = content.examples
    figure, grid = plt.subplots(
        len(examples), 1, figsize=(11.0, 2.5 * len(examples) + 0.4), squeeze=False, layout="constrained"
    )
    for ax, one in zip(grid[:, 0], examples, strict=True):
        ax.plot(dates(one.time), one.measured, ".", color=MEASURED, markersize=4, alpha=0.7, label="measured")
        for side in ("old", "new"):
            time, mean, deviation = getattr(one, side)
            half = np.where(np.isfinite(deviation), BAND * deviation, np.nan)
            ax.fill_between(
                dates(time), mean - half, mean + half, color=COLOURS[side], alpha=0.16, linewidth=0
            )
            style = "--" if side == "old" else "-"
            ax.plot(dates(time), mean, style, color=COLOURS[side], linewidth=1.3, label=_name(content, side))
        ax.set_title(f"{one.key} · {one.why}")
        ax.set_ylabel(one.quantity)
        date_axis(ax, 4, 10)
    grid[0, 0].legend(loc="best", fontsize=8.5)
    return figure


def _mean_innovation(sums: Sums) -> tuple[Any, Any]:
    known = sums.components > 0
    return sums.components[known], sums.innovation[known] / sums.components[known]


def _name(content: Content, side: str) -> str:
    generation = content.old if side == "old" else content.new
    return f"version {generation['version']} ({side})"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"
