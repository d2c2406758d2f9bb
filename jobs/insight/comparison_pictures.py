"""Draw the report on two generations: the old one in orange, the new one in blue. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.core.report import number
from jobs.encoding.keys import readable
from jobs.insight.comparison import Content, Sums
from jobs.insight.examples import Example
from jobs.offline.picture_parts import (
    LEGEND,
    axis_end,
    date_axis,
    dates,
    draw_funnel,
    draw_nis_of_keys,
    finish_nis,
    for_page,
    shortened,
)
from jobs.offline.plots import (
    BAND,
    BOUND,
    ESTIMATE,
    INK,
    MEASURED,
    SMOOTHED,
    Line,
    coverage_text,
    draw_line,
    draw_measured,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"old": SMOOTHED, "new": ESTIMATE}


@for_page
def draw_gain(ax: Axes, content: Content) -> None:
    """Draw the log-likelihood that the new version gains, cumulated over time."""
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
    date_axis(ax)


@for_page
def draw_gain_by_key(ax: Axes, content: Content) -> None:
    """Draw the log-likelihood that the new version gains per row of each key."""
    numbers = content.comparison.numbers
    known = content.gain[np.isfinite(content.gain)]
    if known.size:
        edge = max(float(np.quantile(np.abs(known), 0.99)), 1e-3)
        ax.hist(np.clip(known, -edge, edge), bins=41, range=(-edge, edge), color=MEASURED, alpha=0.75)
    ax.axvline(0.0, color=INK, linewidth=0.8)
    ax.set_title(f"by key: better {numbers['keys_better']:,}, worse {numbers['keys_worse']:,}")
    ax.set_xlabel("log-likelihood gained per row (right of 0: better)")
    ax.set_ylabel("keys")


def _draw_interval(ax: Axes, time: Any, gain: Any, total: dict[str, Any], rows: int) -> None:
    """Draw the 95 % interval of the whole gain as an error bar at its end, where there is an interval."""
    if total["low"] is None or not len(gain):
        return
    below, above = (total["mean"] - total["low"]) * rows, (total["high"] - total["mean"]) * rows
    ax.errorbar(
        time[-1:], gain[-1:], yerr=[[below], [above]], color=INK, capsize=4, linewidth=1.2, label="95 %"
    )
    ax.legend(loc="best", fontsize=LEGEND)


@for_page
def draw_nis(ax: Axes, content: Content) -> None:
    """Draw both versions' NIS per component over time, and the band of a correct model."""
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
    finish_nis(ax, dates(content.time), np.nan_to_num(content.by_time["new"].degrees))


@for_page
def draw_nis_by_key(ax: Axes, content: Content, side: str) -> None:
    """Draw NIS per component of one version's keys, with the bounds of a correct model."""
    sums = content.by_key[side]
    known = np.isfinite(sums.nis) & (sums.degrees > 0)
    ratio = sums.nis[known] / sums.degrees[known]
    others = [one.nis / np.maximum(one.degrees, 1.0) for one in content.by_key.values()]
    draw_nis_of_keys(ax, sums.degrees[known], ratio, COLOURS[side], others)
    _name_keys(ax, content, side, content.comparison.numbers["nis_outside"][side])
    ax.set_ylabel("NIS per component")


def biased(content: Content) -> list[str]:
    """Return the sides that have written innovations."""
    return [side for side in content.by_key if content.comparison.numbers["bias"][side] is not None]


@for_page
def draw_bias(ax: Axes, content: Content, side: str) -> None:
    """Draw the mean normalised innovation of each key of one version, with its bounds."""
    means = {one: _mean_innovation(content.by_key[one]) for one in biased(content)}
    count, mean = means[side]

    def bounds(count: Any) -> tuple[Any, Any]:
        return -BAND / np.sqrt(count), BAND / np.sqrt(count)

    draw_funnel(ax, count, mean, bounds, 0.0, COLOURS[side])
    highest = axis_end(*(np.abs(one) for _, one in means.values()), least=0.1)
    ax.set_ylim(-highest, highest)
    _name_keys(ax, content, side, content.comparison.numbers["bias_outside"][side])
    ax.set_ylabel("mean innovation")


def _name_keys(ax: Axes, content: Content, side: str, outside: float | None) -> None:
    """Write what the dots of one version's keys are."""
    ax.set_title(
        f"{_name(content, side)}\n{number(outside, '.1%', '?')} of the keys outside (red; 5 % expected)"
    )


@for_page
def draw_example(ax: Axes, one: Example, lines: Sequence[tuple[str, str, str]]) -> None:
    """Draw the newest estimates of a key with their 95 % bands, over the measurements.

    lines: name, colour and style of each of its lines.
    """
    if len(one.measured):
        draw_measured(ax, dates(one.measured_at), one.measured)
    for (name, colour, style), line in zip(lines, one.lines, strict=True):
        label = "\n".join(filter(None, [name, coverage_text(line.nis, line.components)]))
        draw_line(ax, dates(line.time), Line(line.mean, line.deviation, label, colour), style)
    ax.set_title(f"{shortened(readable(one.key))} · {one.why}")
    ax.set_ylabel(one.quantity)
    ax.legend(loc="best", fontsize=LEGEND)
    date_axis(ax)


def sides(content: Content) -> list[tuple[str, str, str]]:
    """Return name, colour and style of both versions' lines."""
    return [(_name(content, side), COLOURS[side], style) for side, style in (("old", "--"), ("new", "-"))]


def _mean_innovation(sums: Sums) -> tuple[Any, Any]:
    known = sums.components > 0
    return sums.components[known], sums.innovation[known] / sums.components[known]


def _name(content: Content, side: str) -> str:
    generation = content.old if side == "old" else content.new
    return f"version {generation['version']} ({side})"
