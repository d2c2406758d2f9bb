"""Pictures of a model's health and of the comparison of two versions: the old one in orange, the new one in blue.

Pages show two pictures side by side on a desktop, and one below the other on a phone. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from jobs.core.report import format_number
from jobs.insight.comparison import ComparisonContent
from jobs.insight.examples import Example
from jobs.insight.health import PROBABILITY, Health
from jobs.offline.plots import (
    BAND,
    BOUND,
    ESTIMATE,
    INK,
    LEGEND,
    MEASURED,
    SMOOTHED,
    Line,
    compute_axis_end,
    convert_dates,
    draw_expected,
    draw_funnel,
    draw_line,
    draw_measured,
    draw_nis_of_keys,
    finish_nis,
    fit_values,
    format_coverage,
    format_date_axis,
    render_for_page,
    shorten_name,
    use_log_scale,
)
from jobs.state.encoding.keys import format_key
from jobs.upgrades.statistics import VersionSums

Floats = NDArray[np.float64]
FLAG_COLOURS = (BOUND, SMOOTHED, "#7a4fa3", "#2e8540", MEASURED, INK)
SIDE_COLOURS = {"old": SMOOTHED, "new": ESTIMATE}


class NisCourse(NamedTuple):
    """NIS per component over time: the middle of each bin in microseconds, the ratio, and the measured components (B,).

    error: half the width of the 95 % interval of each ratio; None means unknown, and then a line joins the points.
    """

    time: NDArray[np.int64]
    ratio: Floats
    degrees: Floats
    error: Floats | None = None
    label: str = ""
    colour: str = ESTIMATE


def make_health_nis(health: Health) -> list[NisCourse]:
    """Return the NIS of a model, with the errors that hold if rows are independent."""
    one = health.over_time
    seen = one.degrees > 0
    nis, nis2, judged, degrees = (values[seen] for values in (one.nis, one.nis2, one.judged, one.degrees))
    variance = np.maximum(nis2 / judged - (nis / judged) ** 2, 0.0)
    error = BAND * np.sqrt(variance / judged) * judged / degrees
    return [NisCourse(one.time[seen], nis / degrees, degrees, error)]


def make_version_nis(content: ComparisonContent) -> list[NisCourse]:
    """Return the NIS of both versions, the new version last."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return [
            NisCourse(
                content.time,
                sums.nis / sums.degrees,
                np.nan_to_num(sums.degrees),
                label=_format_version(content, side),
                colour=SIDE_COLOURS[side],
            )
            for side, sums in content.by_time.items()
        ]


@render_for_page
def draw_nis(ax: Axes, courses: Sequence[NisCourse], first_rows: Mapping[str, int] | None = None) -> None:
    """Draw NIS per component over time, and the band in which a correct model's NIS lies (for the last course).

    first_rows: the first event time of each generation, at which the hand-over is drawn.
    """
    for one in courses:
        if one.error is None:
            _draw_joined(ax, convert_dates(one.time), one.ratio, one.colour, one.label)
            continue
        _draw_errors(ax, one.time, one.ratio, one.error, one.colour)
        # Leave room for the legend above the error bars.
        ax.set_ylim(0, 1.12 * compute_axis_end(one.ratio + one.error, least=2.0))
    _draw_hand_overs(ax, first_rows or {})
    finish_nis(ax, convert_dates(courses[-1].time), courses[-1].degrees)


def _draw_joined(ax: Axes, time: Any, values: Any, colour: str, name: str) -> None:
    """Draw dots (N,) that a line joins, with their name in the legend."""
    ax.plot(time, values, ".-", color=colour, linewidth=1.0, markersize=4, label=shorten_name(name, 70))


def _draw_errors(
    ax: Axes, time: NDArray[np.int64], value: Floats, error: Floats, colour: str = ESTIMATE
) -> None:
    ax.errorbar(convert_dates(time), value, error, fmt=".", color=colour, elinewidth=0.8, markersize=4)


@render_for_page
def draw_example(ax: Axes, one: Example, lines: Sequence[tuple[str, str, str]] = ()) -> None:
    """Draw the newest estimates of a key with their 95 % bands, over the measurements.

    lines: name, colour and style of each of the example's lines; by default those of the health page.
    """
    what = "prediction" if one.lines[0].is_predicted else "estimate"
    lines = lines or [(f"{what}, 95 % band", ESTIMATE, "-")]
    draw_measured(ax, convert_dates(one.measured_at), one.measured)
    drawn = []
    for (name, colour, style), line in zip(lines, one.lines, strict=True):
        label = "\n".join(filter(None, [name, format_coverage(line.nis, line.components)]))
        drawn.append(Line(line.mean, line.deviation, label, colour))
        draw_line(ax, convert_dates(line.time), drawn[-1], style)
    fit_values(ax, one.measured, drawn)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + (0.1 + 0.16 * len(drawn)) * (high - low))  # room for the legend
    ax.set_title(f"{shorten_name(format_key(one.key))} · {shorten_name(one.why, 60)}")
    ax.set_ylabel(shorten_name(one.quantity))
    ax.legend(loc="upper left", fontsize=LEGEND)
    format_date_axis(ax)


@render_for_page
def draw_coverage(ax: Axes, health: Health) -> None:
    """Draw the share of rows inside their predicted 95 % interval over time, with Wilson's intervals."""
    one = health.over_time
    seen = one.scored > 0
    share = one.inside[seen] / one.scored[seen]
    low, high = compute_wilson_interval(one.inside[seen], one.scored[seen])
    _draw_errors(ax, one.time[seen], 100 * share, 100 * np.array([share - low, high - share]))
    draw_expected(ax, 100 * PROBABILITY)
    _draw_hand_overs(ax, health.first_rows)
    ax.set_ylim(min(80.0, 100 * float(low.min()) - 2), 101)
    ax.set_title("coverage: % of rows inside the 95 % interval")
    format_date_axis(ax)


def compute_wilson_interval(inside: NDArray[np.float64], rows: NDArray[np.float64]) -> tuple[Any, Any]:
    """Return Wilson's 95 % interval of a share (N,) (Wilson 1927, J. Am. Stat. Assoc. 22, 209-212)."""
    share, square = inside / rows, BAND**2
    middle = (share + square / (2 * rows)) / (1 + square / rows)
    half = BAND * np.sqrt(share * (1 - share) / rows + square / (4 * rows**2)) / (1 + square / rows)
    return np.clip(middle - half, 0.0, share), np.clip(middle + half, share, 1.0)


@render_for_page
def draw_keys(ax: Axes, health: Health) -> None:
    """Draw each key's NIS per component over its number of measured components, with the narrowing 95 % bounds."""
    known = health.keys.degrees > 0
    draw_nis_of_keys(ax, health.keys.degrees[known], health.keys.ratio[known], ESTIMATE)
    ax.set_title("NIS of each key (red: outside its 95 % bounds)")


@render_for_page
def draw_rows(ax: Axes, health: Health) -> None:
    """Draw the numbers of estimated rows and of flagged rows over time."""
    one = health.over_time
    time = convert_dates(one.time)
    ax.step(time, one.rows, where="mid", color=MEASURED, linewidth=1.2, label="rows")
    for (flag, counts), colour in zip(one.flags.items(), FLAG_COLOURS, strict=False):
        _draw_joined(ax, time, counts, colour, flag)
    _draw_hand_overs(ax, health.first_rows)
    ax.set_yscale("symlog", linthresh=1.0)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylim(bottom=0)
    ax.set_title("rows and flags by event time")
    ax.legend(loc="best", fontsize=LEGEND)
    format_date_axis(ax)


@render_for_page
def draw_lag(ax: Axes, health: Health) -> None:
    """Draw the number of rows that still waited at the end of each micro-batch."""
    some = [one for one in health.progress if one.get("lag_rows") is not None][-2000:]
    names = list(dict.fromkeys(one["generation"] for one in some))
    for name, colour in zip(names[-4:], (ESTIMATE, SMOOTHED, "#2e8540", BOUND), strict=False):
        mine = [one for one in some if one["generation"] == name]
        time = np.array([one["started_at"].timestamp() * 1e6 for one in mine], np.int64)
        _draw_joined(ax, convert_dates(time), [one["lag_rows"] for one in mine], colour, name)
    # Counts of rows are integers, and often no row waits.
    ax.set_ylim(0, max(1.0, 1.05 * max(one["lag_rows"] for one in some)))
    if len(some) == 1:  # for a single time, matplotlib would show an axis of years
        at = convert_dates(np.array([some[0]["started_at"].timestamp() * 1e6], np.int64))[0]
        minutes = np.timedelta64(5, "m")
        ax.set_xlim(at - minutes, at + minutes)
    ax.set_title("rows that waited after each micro-batch")
    ax.legend(loc="best", fontsize=LEGEND)
    format_date_axis(ax)


@render_for_page
def draw_parameter(ax: Axes, name: str, values: NDArray[np.float64], of_all: float | None) -> None:
    """Draw how a parameter is distributed over the keys, and the population's value, to which keys are shrunk."""
    bins: Any = 30
    if values.min() > 0 and values.max() > 30 * values.min():
        bins = np.geomspace(values.min(), values.max(), 31)
        use_log_scale(ax)
    ax.hist(values, bins=bins, color=MEASURED, alpha=0.8)
    if of_all is not None:
        ax.axvline(of_all, color=ESTIMATE, linewidth=1.2, label=f"population {of_all:.4g}")
        ax.legend(loc="best", fontsize=LEGEND)
    ax.set_title(f"{shorten_name(name)} of {len(values):,} key{'s'[: len(values) != 1]}")
    ax.set_ylabel("keys")


@render_for_page
def draw_shared(ax: Axes, name: str, labels: list[str], values: list[float], errors: list[float]) -> None:
    """Draw the parameter's value for all keys, or for each group, with 95 % error bars."""
    half = BAND * np.nan_to_num(np.array(errors, float))
    ax.errorbar(values, range(len(values)), xerr=half, fmt="o", color=ESTIMATE, capsize=4, markersize=5)
    ax.set_yticks(range(len(values)), [shorten_name(label) for label in labels])
    ax.set_ylim(-0.6, len(values) - 0.4)
    ax.set_title(f"{shorten_name(name)}, 95 %")


def _draw_hand_overs(ax: Axes, first_rows: Mapping[str, int]) -> None:
    """Draw the event time at which the live rows of each later generation begin."""
    order = sorted(first_rows.items(), key=lambda item: (item[1], item[0]))
    for name, first in order[1:]:
        at, short = convert_dates(np.array([first]))[0], name.rpartition("-")[2]
        ax.axvline(at, color=SMOOTHED, linewidth=0.9, linestyle="--")
        how: Any = {"color": SMOOTHED, "ha": "left", "va": "top", "rotation": 90, "fontsize": 7.5}
        ax.annotate(short, (at, 1.0), xycoords=("data", "axes fraction"), **how)


@render_for_page
def draw_gain(ax: Axes, content: ComparisonContent) -> None:
    """Draw the log-likelihood that the new version gains, cumulated over time."""
    old, new = content.by_time["old"], content.by_time["new"]
    gain = np.cumsum(new.ll - old.ll)
    time = convert_dates(content.time)
    ax.axhline(0.0, color=INK, linewidth=0.8)
    ax.plot(time, gain, color=ESTIMATE, linewidth=1.4)
    for sign, colour in ((1.0, ESTIMATE), (-1.0, BOUND)):
        shown = np.where(sign * gain > 0, gain, 0.0)
        ax.fill_between(time, 0.0, shown, color=colour, alpha=0.15, linewidth=0)
    numbers = content.comparison.numbers
    _draw_interval(ax, time, gain, numbers["gain"], numbers["rows"])
    ax.set_title("log-likelihood gained, cumulated")
    format_date_axis(ax)


@render_for_page
def draw_gain_by_key(ax: Axes, content: ComparisonContent) -> None:
    """Draw the distribution over keys of the log-likelihood that the new version gains per row."""
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
    """Draw the 95 % interval of the total gain as an error bar at the end of the line, if the interval is known."""
    if total["low"] is None or not len(gain):
        return
    below, above = (total["mean"] - total["low"]) * rows, (total["high"] - total["mean"]) * rows
    ax.errorbar(
        time[-1:], gain[-1:], yerr=[[below], [above]], color=INK, capsize=4, linewidth=1.2, label="95 %"
    )
    ax.legend(loc="best", fontsize=LEGEND)


@render_for_page
def draw_nis_by_key(ax: Axes, content: ComparisonContent, side: str) -> None:
    """Draw NIS per component of each key of one version, with the bounds of a correct model."""
    sums = content.by_key[side]
    known = np.isfinite(sums.nis) & (sums.degrees > 0)
    ratio = sums.nis[known] / sums.degrees[known]
    others = [one.nis / np.maximum(one.degrees, 1.0) for one in content.by_key.values()]
    draw_nis_of_keys(ax, sums.degrees[known], ratio, SIDE_COLOURS[side], others)
    _write_keys_title(ax, content, side, content.comparison.numbers["nis_outside"][side])
    ax.set_ylabel("NIS per component")


def list_biased(content: ComparisonContent) -> list[str]:
    """Return the sides whose estimates have innovations."""
    return [side for side in content.by_key if content.comparison.numbers["bias"][side] is not None]


@render_for_page
def draw_bias(ax: Axes, content: ComparisonContent, side: str) -> None:
    """Draw the mean normalised innovation of each key of one version, with the bounds of a correct model."""
    means = {one: _compute_mean_innovation(content.by_key[one]) for one in list_biased(content)}
    count, mean = means[side]

    def bounds(count: Any) -> tuple[Any, Any]:
        return -BAND / np.sqrt(count), BAND / np.sqrt(count)

    draw_funnel(ax, count, mean, bounds, 0.0, SIDE_COLOURS[side])
    highest = compute_axis_end(*(np.abs(one) for _, one in means.values()), least=0.1)
    ax.set_ylim(-highest, highest)
    _write_keys_title(ax, content, side, content.comparison.numbers["bias_outside"][side])
    ax.set_ylabel("mean innovation")


def _write_keys_title(ax: Axes, content: ComparisonContent, side: str, outside: float | None) -> None:
    """Write the title of a picture with a dot for each key of one version."""
    ax.set_title(
        f"{_format_version(content, side)}\n{format_number(outside, '.1%', '?')} of the keys outside (red; "
        f"5 % expected)"
    )


def list_lines(content: ComparisonContent) -> list[tuple[str, str, str]]:
    """Return name, colour and style of the lines of both versions."""
    return [
        (_format_version(content, side), SIDE_COLOURS[side], style)
        for side, style in (("old", "--"), ("new", "-"))
    ]


def _compute_mean_innovation(sums: VersionSums) -> tuple[Any, Any]:
    known = sums.components > 0
    return sums.components[known], sums.innovation[known] / sums.components[known]


def _format_version(content: ComparisonContent, side: str) -> str:
    generation = content.old if side == "old" else content.new
    return f"version {generation['version']} ({side})"
