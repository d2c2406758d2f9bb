"""Draw the estimates of some keys as one picture: a PNG, or an HTML page with the picture. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from jobs.core import html_page
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.offline.estimate_series import DrawnSeries, KeySeries
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
    shorten_name,
)
from jobs.state.encoding.keys import ONLY, format_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jobs.specs.model_spec import ModelSpec

_NAMES = (("estimate, 95 % band", ESTIMATE), ("smoothed, 95 % band", SMOOTHED))


@apply_style
def draw(path: Path, found: DrawnSeries, title: str, notes: Sequence[str] = ()) -> None:
    """Save the picture of keys: measurements and estimates on the left, NIS and its distribution on the right.

    An HTML page also has the notes, and a table of the last estimates.

    Raises:
        UserError: the file cannot be written.
    """
    picture = draw_keys(found, title)
    try:
        if path.suffix.lower() == ".html":
            path.write_text(_build_page(found, title, encode_figure(picture), notes), encoding="utf-8")
        else:
            picture.savefig(path, facecolor="white")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        plt.close(picture)


def draw_keys(found: DrawnSeries, title: str) -> Figure:
    """Return the picture of keys."""
    panels = found.quantities[: found.drawn]
    picture = plt.figure(
        figsize=(12.0, 0.5 + max(2.0 * len(panels), 3.6) * len(found.series)), layout="constrained"
    )
    bands: Any = np.atleast_1d(np.array(picture.subfigures(len(found.series), 1), dtype=object))
    for band, one in zip(bands, found.series, strict=True):
        left, right = band.subfigures(1, 2, width_ratios=[3, 2])
        for number, (ax, name) in enumerate(
            zip(np.atleast_1d(left.subplots(len(panels), 1)), panels, strict=True)
        ):
            _draw_panel(ax, found.spec, one, number, name)
            of_key = name if one.key == ONLY else f"{shorten_name(format_key(one.key), 40)}: {name}"
            fits = "" if number else format_coverage(one.nis, _count_components(one))
            ax.set_title(join_title(shorten_name(of_key, 80), fits))
        over_time, spread = right.subplots(2, 1)
        _draw_nis_over_time(over_time, one)
        draw_nis(spread, one.nis, max(len(found.spec.measurement), 1))
    picture.suptitle(shorten_name(title, 120))
    return picture


def _count_components(one: KeySeries) -> NDArray[np.int64]:
    """Return the number of measured components of each row (N,); all components if the measurements are unknown."""
    seen = np.isfinite(one.measured).sum(axis=0)
    return np.where(seen > 0, seen, max(len(one.measured), 1))


def _draw_panel(ax: Axes, spec: ModelSpec, one: KeySeries, number: int, name: str) -> None:
    """Draw the estimates of a quantity, over its measurements if it is measured."""
    measured = np.full(len(one.time), np.nan)
    if name in spec.measurement:
        measured = one.measured[spec.measurement.index(name)]
    lines = [
        Line(line.mean[number], line.deviation[number], label, colour)
        for line, (label, colour) in zip(one.lines, _NAMES, strict=False)
    ]
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


def _build_page(found: DrawnSeries, title: str, picture: str, notes: Sequence[str]) -> str:
    states = found.quantities[found.drawn :]
    head = ["key", "rows", "last time", *(f"{state} ± standard deviation" for state in states), "mean NIS"]
    rows = []
    for one in found.series:
        line, known = one.lines[0], one.nis[np.isfinite(one.nis)]
        cells = [format_key(one.key), f"{len(one.time):,}", str(one.time[-1]).replace("T", " ")[:19]]
        newest = (moments[found.drawn :, -1].tolist() for moments in line)
        cells += [estimate_text(m, s) for m, s in zip(*newest, strict=True)]
        rows.append([*cells, f"{known.mean():.3f}" if len(known) else "-"])
    told = (
        f"{format_count(len(found.series), 'key')} of {found.spec.name} {found.versions}. Times are in "
        f"UTC. Where the model fits, the mean NIS is {len(found.spec.measurement)}."
    )
    drawn = html_page.format_picture(
        picture, "Measurements, estimates with their 95 % bands, and NIS of each key"
    )
    return html_page.format_page(
        title,
        html_page.format_paragraph(told),
        *map(html_page.format_paragraph, notes),
        html_page.format_section("Estimates", "", drawn),
        html_page.format_section("The last estimate of each key", "", html_page.format_table(head, rows)),
    )
