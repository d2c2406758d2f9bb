"""Draw the result of `init`: some keys' series with the filter's estimate, and the ranking of the structures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np

from jobs.choosing.model_finding import ModelFinding
from jobs.offline.plots import (
    BOUND,
    ESTIMATE,
    INK,
    MEASURED,
    Line,
    apply_style,
    draw_estimate,
    draw_innovations,
    draw_nis,
    fit_values,
    format_coverage,
    format_date_axis,
    join_title,
    shorten_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 3
"""The maximum number of series that are drawn."""
ROWS = 1_500
"""The maximum number of a series' last rows that are drawn."""


@apply_style
def draw(path: Path, name: str, found: ModelFinding) -> None:
    """Save the picture: series with their estimates on the left; ranking, innovations and NIS on the right."""
    shown = _select_series(found)
    picture = plt.figure(figsize=(13.0, 2.2 + 2.2 * max(len(shown), 2)), layout="constrained")
    halves: Any = picture.subfigures(1, 2, width_ratios=[3, 2])
    left, right = halves
    for ax, (key, m) in zip(np.atleast_1d(left.subplots(len(shown), 1)), shown, strict=True):
        _draw_series(ax, found, key, m)
    ranking, innovations, nis = right.subplots(3, 1, height_ratios=[2, 1, 1])
    _draw_ranking(ranking, found)
    key, m = shown[0]
    mine = found.filtered.rows.key == key
    time = found.filtered.rows.time[mine].astype("datetime64[us]")
    draw_innovations(innovations, time[-ROWS:], found.filtered.innovations[m, mine][-ROWS:])
    format_date_axis(innovations, 3, 6)
    draw_nis(nis, found.filtered.nis, len(found.measurements))
    picture.suptitle(shorten_name(name, 120))
    try:
        picture.savefig(path, facecolor="white")
    finally:
        plt.close(picture)


def _select_series(found: ModelFinding) -> list[tuple[int, int]]:
    """Return the (sampled key, measurement) pairs to draw: all measurements of the first keys, up to SHOWN pairs."""
    count = len(found.series.keys)
    pairs = [(key, m) for key in range(min(count, SHOWN)) for m in range(len(found.measurements))]
    return pairs[:SHOWN]


def _draw_series(ax: Axes, found: ModelFinding, key: int, m: int) -> None:
    filtered = found.filtered
    mine = np.flatnonzero(filtered.rows.key == key)[-ROWS:]
    time = filtered.rows.time[mine].astype("datetime64[us]")
    line = Line(filtered.mean[m, mine], filtered.deviation[m, mine])
    measured = filtered.rows.y[m, mine]
    draw_estimate(ax, time, measured, [line])
    format_date_axis(ax, 4, 9)
    fit_values(ax, measured, [line])
    text = format_coverage(filtered.nis[mine], np.isfinite(filtered.rows.y[:, mine]).sum(axis=0))
    names = found.names[found.series.keys[key]], found.measurements[m].name
    ax.set_title(join_title(": ".join(shorten_name(one, 40) for one in names), text))


def _draw_ranking(ax: Axes, found: ModelFinding) -> None:
    scores = found.choice.ranking.scores[::-1]
    chosen = set(found.choice.names)
    for at, one in enumerate(scores):
        colour = ESTIMATE if one.name in chosen else MEASURED
        ax.errorbar(
            -one.behind, at, xerr=2 * one.error if np.isfinite(one.error) else 0.0, fmt="o", color=colour
        )
    ax.axvline(0.0, color=INK, linewidth=0.8, linestyle=":")
    ax.set_yticks(range(len(scores)), [one.name for one in scores])
    for label, one in zip(ax.get_yticklabels(), scores, strict=True):
        label.set_color(BOUND if one.name in chosen else INK)
    ax.set_title("held-out log-likelihood a row, ± 2 standard errors", fontweight="normal")
