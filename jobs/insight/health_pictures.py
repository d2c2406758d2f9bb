"""Draw the health of a model: small pictures, two beside each other on a desk and one on a phone. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jobs.insight.health import PROBABILITY, Health
from jobs.offline.picture_parts import (
    LEGEND,
    axis_end,
    date_axis,
    dates,
    draw_expected,
    draw_nis_of_keys,
    finish_nis,
    for_page,
    shortened,
)
from jobs.offline.plots import BAND, BOUND, ESTIMATE, INK, MEASURED, SMOOTHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = [("estimate, 95 % band", ESTIMATE, "-")]
"""Name, colour and style of the estimates of a key."""
COLOURS = (BOUND, SMOOTHED, "#7a4fa3", "#2e8540", MEASURED, INK)


@for_page
def draw_nis(ax: Axes, health: Health) -> None:
    """Draw NIS per component over time with error bars, and the band of a correct model."""
    one = health.over_time
    seen = one.degrees > 0
    time, degrees = dates(one.time[seen]), one.degrees[seen]
    ratio = one.nis[seen] / degrees
    error = _nis_error(health)[seen]
    ax.errorbar(time, ratio, yerr=error, fmt=".", color=ESTIMATE, elinewidth=0.8, markersize=4)
    _hand_overs(ax, health)
    ax.set_ylim(0, 1.12 * axis_end(ratio + error, least=2.0))  # room for the legend above the error bars
    finish_nis(ax, time, degrees)


def _nis_error(health: Health) -> NDArray[np.float64]:
    """Return half the width of the 95 % interval of each bin's NIS per component (B,), of independent rows."""
    one = health.over_time
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = one.nis / one.judged
        variance = np.maximum(one.nis2 / one.judged - mean**2, 0.0)
        return BAND * np.sqrt(variance / one.judged) * one.judged / one.degrees


@for_page
def draw_coverage(ax: Axes, health: Health) -> None:
    """Draw the share of rows inside their predicted 95 % interval over time, with Wilson's intervals."""
    one = health.over_time
    seen = one.scored > 0
    share = one.inside[seen] / one.scored[seen]
    low, high = wilson(one.inside[seen], one.scored[seen])
    ax.errorbar(
        dates(one.time[seen]),
        100 * share,
        yerr=100 * np.array([share - low, high - share]),
        fmt=".",
        color=ESTIMATE,
        elinewidth=0.8,
        markersize=4,
    )
    draw_expected(ax, 100 * PROBABILITY)
    _hand_overs(ax, health)
    ax.set_ylim(min(80.0, 100 * float(low.min()) - 2), 101)
    ax.set_title("coverage: % of rows inside the 95 % interval")
    date_axis(ax)


def wilson(inside: NDArray[np.float64], rows: NDArray[np.float64]) -> tuple[Any, Any]:
    """Return Wilson's 95 % interval of a share (N,) (Wilson 1927, J. Am. Stat. Assoc. 22, 209-212)."""
    share, square = inside / rows, BAND**2
    middle = (share + square / (2 * rows)) / (1 + square / rows)
    half = BAND * np.sqrt(share * (1 - share) / rows + square / (4 * rows**2)) / (1 + square / rows)
    return np.clip(middle - half, 0.0, share), np.clip(middle + half, share, 1.0)


@for_page
def draw_keys(ax: Axes, health: Health) -> None:
    """Draw each key's NIS per component over its measured components, with the bounds that narrow with them."""
    known = health.keys.degrees > 0
    draw_nis_of_keys(ax, health.keys.degrees[known], health.keys.ratio[known], ESTIMATE)
    ax.set_title("NIS of each key (red: outside its 95 % bounds)")


@for_page
def draw_rows(ax: Axes, health: Health) -> None:
    """Draw rows with an estimate over time, and those with a flag."""
    one = health.over_time
    time = dates(one.time)
    ax.step(time, one.rows, where="mid", color=MEASURED, linewidth=1.2, label="rows")
    for (flag, counts), colour in zip(one.flags.items(), COLOURS, strict=False):
        ax.plot(time, counts, ".-", color=colour, linewidth=1.0, markersize=4, label=flag)
    _hand_overs(ax, health)
    ax.set_yscale("symlog", linthresh=1.0)
    ax.set_ylim(bottom=0)
    ax.set_title("rows and flags by event time")
    ax.legend(loc="best", fontsize=LEGEND)
    date_axis(ax)


@for_page
def draw_lag(ax: Axes, health: Health) -> None:
    """Draw what the stream lagged behind at the end of each micro-batch."""
    some = [one for one in health.progress if one.get("lag_rows") is not None][-2000:]
    names = list(dict.fromkeys(one["generation"] for one in some))
    for name, colour in zip(names[-4:], (ESTIMATE, SMOOTHED, "#2e8540", BOUND), strict=False):
        mine = [one for one in some if one["generation"] == name]
        time = np.array([one["started_at"].timestamp() * 1e6 for one in mine], np.int64)
        ax.plot(dates(time), [one["lag_rows"] for one in mine], ".-", color=colour, linewidth=1.0, label=name)
    # Rows are whole, and often none waits.
    ax.set_ylim(0, max(1.0, 1.05 * max(one["lag_rows"] for one in some)))
    if len(some) == 1:  # matplotlib shows years around a single time
        at = dates(np.array([some[0]["started_at"].timestamp() * 1e6], np.int64))[0]
        minutes = np.timedelta64(5, "m")
        ax.set_xlim(at - minutes, at + minutes)
    ax.set_title("rows that waited after each micro-batch")
    ax.legend(loc="best", fontsize=LEGEND)
    date_axis(ax)


@for_page
def draw_parameter(ax: Axes, name: str, values: NDArray[np.float64], of_all: float | None) -> None:
    """Draw how a parameter is distributed over the keys, and the value that keys lean on."""
    bins: Any = 30
    if values.min() > 0 and values.max() > 30 * values.min():
        bins = np.geomspace(values.min(), values.max(), 31)
        ax.set_xscale("log")
    ax.hist(values, bins=bins, color=MEASURED, alpha=0.8)
    if of_all is not None:
        ax.axvline(of_all, color=ESTIMATE, linewidth=1.2, label=f"population {of_all:.4g}")
        ax.legend(loc="best", fontsize=LEGEND)
    ax.set_title(f"{name} of {len(values):,} key{'s'[: len(values) != 1]}")
    ax.set_ylabel("keys")


@for_page
def draw_shared(ax: Axes, name: str, labels: list[str], values: list[float], errors: list[float]) -> None:
    """Draw a parameter of all keys, or of each group, with error bars of 95 %."""
    half = BAND * np.nan_to_num(np.array(errors, float))
    ax.errorbar(values, range(len(values)), xerr=half, fmt="o", color=ESTIMATE, capsize=4, markersize=5)
    ax.set_yticks(range(len(values)), [shortened(label) for label in labels])
    ax.set_ylim(-0.6, len(values) - 0.4)
    ax.set_title(f"{name}, 95 %")


def _hand_overs(ax: Axes, health: Health) -> None:
    """Draw where, in event time, each later generation's live rows begin."""
    order = sorted(health.first_rows.items(), key=lambda item: item[1])
    for name, first in order[1:]:
        ax.axvline(dates(np.array([first]))[0], color=SMOOTHED, linewidth=0.9, linestyle="--")
        ax.annotate(
            name.rpartition("-")[2], (dates(np.array([first]))[0], 1.0), xycoords=("data", "axes fraction"),
            fontsize=7.5, color=SMOOTHED, ha="left", va="top", rotation=90,
        )  # fmt: skip
