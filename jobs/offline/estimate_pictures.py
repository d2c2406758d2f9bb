"""Draw the estimates of some keys as one picture: a PNG, or an HTML page with the picture. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from jobs.core import html_page
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.offline.estimate_series import KeySeries
from jobs.offline.plots import (
    BOUND,
    ESTIMATE,
    SMOOTHED,
    Line,
    apply_style,
    draw_estimate,
    draw_nis,
    encode_figure,
    fit_values,
    format_coverage,
    format_date_axis,
    join_title,
)
from jobs.state.encoding.keys import ONLY, format_key
from jobs.state.kernel import LinearMeasuring, project_states

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jobs.specs.model_spec import ModelSpec

Floats = NDArray[np.float64]
PANELS = 3
"""The maximum number of panels per key: a panel for each measurement, or for each state if H is not constant."""
FORMATS = (".png", ".html")
_NAMES = (("estimate, 95 % band", ESTIMATE), ("smoothed, 95 % band", SMOOTHED))


@apply_style
def draw(
    path: Path, spec: ModelSpec, series: list[KeySeries], measuring: LinearMeasuring | None, title: str
) -> None:
    """Save the picture of keys: measurements and estimates on the left, NIS and its distribution on the right.

    An HTML page also has a table of the last estimates.

    Raises:
        UserError: the file cannot be written.
    """
    picture = draw_keys(spec, series, measuring, title)
    try:
        if path.suffix.lower() == ".html":
            path.write_text(_build_page(spec, series, title, encode_figure(picture)), encoding="utf-8")
        else:
            picture.savefig(path, facecolor="white")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        plt.close(picture)


def draw_keys(
    spec: ModelSpec, series: list[KeySeries], measuring: LinearMeasuring | None, title: str
) -> Figure:
    """Return the picture of keys."""
    panels = (spec.states if measuring is None else spec.measurement)[:PANELS]
    picture = plt.figure(
        figsize=(12.0, 0.5 + max(2.0 * len(panels), 3.6) * len(series)), layout="constrained"
    )
    bands: Any = np.atleast_1d(np.array(picture.subfigures(len(series), 1), dtype=object))
    for band, one in zip(bands, series, strict=True):
        left, right = band.subfigures(1, 2, width_ratios=[3, 2])
        for number, (ax, name) in enumerate(
            zip(np.atleast_1d(left.subplots(len(panels), 1)), panels, strict=True)
        ):
            _draw_panel(ax, one, number, measuring)
            of_key = name if one.key == ONLY else f"{one.key}: {name}"
            ax.set_title(join_title(of_key, format_coverage(one.nis, _count_components(one))))
        over_time, spread = right.subplots(2, 1)
        _draw_nis_over_time(over_time, one)
        draw_nis(spread, one.nis, max(len(spec.measurement), 1))
    picture.suptitle(title)
    return picture


def _count_components(one: KeySeries) -> NDArray[np.int64]:
    """Return the number of measured components of each row (N,); all components if the measurements are unknown."""
    seen = np.isfinite(one.measured).sum(axis=0)
    return np.where(seen > 0, seen, max(len(one.measured), 1))


def _draw_panel(ax: Axes, one: KeySeries, number: int, measuring: LinearMeasuring | None) -> None:
    """Draw a measurement or, if the states do not give the measurements by constant numbers, a state."""
    measured = one.measured[number] if measuring is not None else np.full(len(one.time), np.nan)
    lines = []
    for line, (label, colour) in zip(one.lines, _NAMES, strict=False):
        if measuring is None:
            mean, variance = line.mean[:, number], line.covariance[:, number, number]
        else:
            mean, variance = project_states(
                line.mean, line.covariance, measuring.H[number], measuring.offset[number]
            )
        lines.append(Line(mean, np.sqrt(np.maximum(variance, 0.0)), label, colour))
    draw_estimate(ax, one.time, measured, lines)
    fit_values(ax, measured, lines)
    _format_date_axis(ax, one)


def _format_date_axis(ax: Axes, one: KeySeries) -> None:
    format_date_axis(ax, 3, 7)
    margin = (one.time[-1] - one.time[0]) / 50
    if margin:
        ax.set_xlim(one.time[0] - margin, one.time[-1] + margin)


def _draw_nis_over_time(ax: Axes, one: KeySeries) -> None:
    ax.plot(one.time, one.nis, ".", color=ESTIMATE, markersize=3, alpha=0.7)
    if one.flagged.any():
        ax.plot(one.time[one.flagged], one.nis[one.flagged], "x", color=BOUND, label="flagged")
        ax.legend(loc="best", fontsize=8.5)
    _format_date_axis(ax, one)
    ax.set_ylabel("NIS")
    ax.set_title("NIS over time: large where a row surprised the model", fontweight="normal")


def estimate_text(mean: float, deviation: float) -> str:
    """Return an estimate and its standard deviation as text, rounded to two digits of the deviation."""
    if not (math.isfinite(mean) and math.isfinite(deviation)) or deviation <= 0.0:
        return f"{mean:.6g} ± {deviation:.3g}"
    last = 1 - math.floor(math.log10(deviation))
    return f"{round(mean, last):.12g} ± {float(f'{deviation:.2g}'):.12g}"


def _build_page(spec: ModelSpec, series: list[KeySeries], title: str, picture: str) -> str:
    head = [
        "key",
        "rows",
        "last time",
        *(f"{state} ± standard deviation" for state in spec.states),
        "mean NIS",
    ]
    rows = []
    for one in series:
        line, at = one.lines[0], len(one.time) - 1
        deviations = np.sqrt(np.diagonal(line.covariance[at]))
        known = one.nis[np.isfinite(one.nis)]
        cells = [format_key(one.key), f"{len(one.time):,}", str(one.time[at]).replace("T", " ")[:19]]
        cells += [
            estimate_text(m, s) for m, s in zip(line.mean[at].tolist(), deviations.tolist(), strict=True)
        ]
        rows.append([*cells, f"{known.mean():.3f}" if len(known) else "-"])
    told = (
        f"{format_count(len(series), 'key')} of {spec.name}, version {spec.version}. Times are in UTC. "
        f"Where the model fits, the mean NIS is {len(spec.measurement)}."
    )
    drawn = html_page.format_picture(
        picture, "Measurements, estimates with their 95 % bands, and NIS of each key"
    )
    return html_page.format_page(
        title,
        html_page.format_paragraph(told),
        html_page.format_section("Estimates", "", drawn),
        html_page.format_section("The last estimate of each key", "", html_page.format_table(head, rows)),
    )
