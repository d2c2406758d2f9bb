"""Draw the report on two generations: the old one in orange, the new one in blue. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np

from jobs.offline.picture_parts import (
    SIZE,
    axis_end,
    date_axis,
    dates,
    draw_expected,
    draw_funnel,
    draw_nis_band,
    for_page,
)
from jobs.offline.plots import BAND, BOUND, ESTIMATE, INK, MEASURED, SMOOTHED, coverage_text
from jobs.upgrades.comparison.content import Content, Example, Sums
from kalman.evaluation.diagnostics import mean_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"old": SMOOTHED, "new": ESTIMATE}


@for_page
def draw_gain(content: Content) -> Figure:
    """Draw the log-likelihood that the new version gains, cumulated over time."""
    figure, ax = plt.subplots(figsize=SIZE, layout="constrained")
    old, new = content.by_time["old"], content.by_time["new"]
    gain = np.cumsum(new.ll - old.ll)
    time = dates(content.time)
    ax.axhline(0.0, color=INK, linewidth=0.8)
    ax.plot(time, gain, color=ESTIMATE, linewidth=1.4)
    for sign, colour in ((1.0, ESTIMATE), (-1.0, BOUND)):
        shown = np.where(sign * gain > 0, gain, 0.0)
        ax.fill_between(time, 0.0, shown, color=colour, alpha=0.15, linewidth=0)
    numbers = content.comparison.numbers
    _draw_interval(ax, time, gain, numbers["gain"], numbers["rows"])
    ax.set_title("log-likelihood gained, cumulated")
    date_axis(ax, 3, 6)
    return figure


@for_page
def draw_gain_by_key(content: Content) -> Figure:
    """Draw the log-likelihood that the new version gains per row of each key."""
    figure, ax = plt.subplots(figsize=SIZE, layout="constrained")
    numbers = content.comparison.numbers
    known = content.gain[np.isfinite(content.gain)]
    if known.size:
        edge = max(float(np.quantile(np.abs(known), 0.99)), 1e-3)
        ax.hist(np.clip(known, -edge, edge), bins=41, range=(-edge, edge), color=MEASURED, alpha=0.75)
    ax.axvline(0.0, color=INK, linewidth=0.8)
    ax.set_title(f"by key: better {numbers['keys_better']:,}, worse {numbers['keys_worse']:,}")
    ax.set_xlabel("log-likelihood gained per row (right of 0: better)")
    ax.set_ylabel("keys")
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
    """Draw both versions' NIS per component over time, and the band of a correct model."""
    figure, ax = plt.subplots(figsize=SIZE, layout="constrained")
    for side, sums in content.by_time.items():
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = sums.nis / sums.degrees
        ax.plot(
            dates(content.time),
            ratio,
            ".-",
            color=COLOURS[side],
            linewidth=1.2,
            markersize=4,
            label=_name(content, side),
        )
    draw_nis_band(ax, dates(content.time), np.nan_to_num(content.by_time["new"].degrees))
    draw_expected(ax, 1.0)
    ax.set_title("NIS per component over time (1 is expected)")
    ax.legend(loc="best", fontsize=8.5)
    date_axis(ax, 3, 6)
    return figure


@for_page
def draw_nis_by_key(content: Content, side: str) -> Figure:
    """Draw NIS per component of one version's keys, with the bounds of a correct model."""
    figure, ax = plt.subplots(figsize=SIZE, layout="constrained")
    sums = content.by_key[side]
    known = np.isfinite(sums.nis) & (sums.degrees > 0)
    ratio = sums.nis[known] / sums.degrees[known]
    draw_funnel(ax, sums.degrees[known], ratio, lambda count: mean_bounds(1, count), COLOURS[side])
    draw_expected(ax, 1.0)
    ratios = (one.nis / np.maximum(one.degrees, 1.0) for one in content.by_key.values())
    ax.set_ylim(0.0, axis_end(*ratios, least=2.0))
    _name_keys(ax, content, side, content.comparison.numbers["nis_outside"][side])
    ax.set_ylabel("NIS per component")
    return figure


def biased(content: Content) -> list[str]:
    """Return the sides that have written innovations."""
    return [side for side in content.by_key if content.comparison.numbers["bias"][side] is not None]


@for_page
def draw_bias(content: Content, side: str) -> Figure:
    """Draw the mean normalised innovation of each key of one version, with its bounds."""
    figure, ax = plt.subplots(figsize=SIZE, layout="constrained")
    means = {one: _mean_innovation(content.by_key[one]) for one in biased(content)}
    count, mean = means[side]

    def bounds(count: Any) -> tuple[Any, Any]:
        return -BAND / np.sqrt(count), BAND / np.sqrt(count)

    draw_funnel(ax, count, mean, bounds, COLOURS[side])
    draw_expected(ax, 0.0)
    highest = axis_end(*(np.abs(one) for _, one in means.values()), least=0.1)
    ax.set_ylim(-highest, highest)
    _name_keys(ax, content, side, content.comparison.numbers["bias_outside"][side])
    ax.set_ylabel("mean innovation")
    return figure


def _name_keys(ax: Axes, content: Content, side: str, outside: float | None) -> None:
    """Write what the dots of one version's keys are."""
    ax.set_title(f"{_name(content, side)}\n{_share(outside)} of the keys outside (red; 5 % expected)")
    ax.set_xlabel("measured components of the key")


@for_page
def draw_example(content: Content, one: Example) -> Figure:
    """Draw both versions' estimates of an example key, over the measurements."""
    figure, ax = plt.subplots(figsize=SIZE, layout="constrained")
    ax.plot(dates(one.time), one.measured, ".", color=MEASURED, markersize=4, alpha=0.7, label="measured")
    for side, nis in zip(("old", "new"), one.nis, strict=True):
        time, mean, deviation = getattr(one, side)
        label = "\n".join([_name(content, side), *filter(None, [coverage_text(nis)])])
        half = np.where(np.isfinite(deviation), BAND * deviation, np.nan)
        ax.fill_between(dates(time), mean - half, mean + half, color=COLOURS[side], alpha=0.16, linewidth=0)
        style = "--" if side == "old" else "-"
        ax.plot(dates(time), mean, style, color=COLOURS[side], linewidth=1.3, label=label)
    ax.set_title(f"{one.key} · {one.why}")
    ax.set_ylabel(one.quantity)
    date_axis(ax, 3, 6)
    ax.legend(loc="best", fontsize=8.5)
    return figure


def _mean_innovation(sums: Sums) -> tuple[Any, Any]:
    known = sums.components > 0
    return sums.components[known], sums.innovation[known] / sums.components[known]


def _name(content: Content, side: str) -> str:
    generation = content.old if side == "old" else content.new
    return f"version {generation['version']} ({side})"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"
