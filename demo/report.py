"""Write the demo's report: one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from demo.figures import (
    Marks,
    Nis,
    Series,
    Switch,
    draw_estimates,
    draw_innovations,
    draw_nis,
    draw_switch,
)
from jobs.core.html_page import (
    Card,
    format_bars,
    format_cards,
    format_page,
    format_paragraph,
    format_picture,
    format_section,
    format_table,
)

TITLE = "A year of flights through kalman-pipeline"


class Content(NamedTuple):
    """The content of the report.

    result: the demo's result; parity: a row for each comparison, by column title; series: routes to draw; unit: unit of
    their measurements; nis: models to draw; marks: marks for both; shares: a sentence for each model on its share
    outside the bound; switch: the upgrade and its roll-back.
    """

    result: Mapping[str, Any]
    parity: list[dict[str, str]]
    series: list[Series]
    unit: str
    nis: list[Nis]
    marks: Marks
    shares: list[str]
    phases: Mapping[str, float]
    switch: Switch | None = None


def write_report(path: Path, content: Content) -> Path:
    """Write the report and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(build_page(content), encoding="utf-8")
    return path


def build_page(content: Content) -> str:
    """Return the report as HTML."""
    result = content.result
    good = result["max_abs_difference"] <= result["tolerance"] and not result["problems"]
    verdict = (
        "Every estimate of the stream and every key's last state are those of one uninterrupted batch pass."
        if good
        else "The check failed: " + "; ".join(result["problems"])
    )
    head = list(content.parity[0])
    return format_page(
        TITLE,
        format_paragraph(verdict, f"verdict {'good' if good else 'bad'}"),
        _build_cards(result),
        format_section(
            "Estimates across the hand-over",
            "Time in the air of some routes: each airport's busiest, and a rare one. Blue is history, as "
            "pretrain filtered it; orange is what the stream put out; the dashed line is where its driver "
            "was killed with SIGKILL inside a micro-batch. The band is that of the route's level, around "
            "which the flights scatter; beside each route stands how many of its flights lay inside the 95 % "
            "interval that was predicted for them.",
            format_picture(
                draw_estimates(content.series, content.marks, content.unit), "Estimates and measurements"
            ),
        ),
        format_section(
            "Innovations",
            "What each flight told the filter, over the standard deviation that the filter expected. If the "
            "model were exactly right these would be independent draws of N(0, 1), 5 % of them outside the "
            "dotted lines.",
            format_picture(draw_innovations(content.series, content.marks), "Normalised innovations"),
        ),
        format_section(
            "NIS against its chi-square bound",
            "The normalised innovation squared of every row of all keys. " + " ".join(content.shares),
            format_picture(draw_nis(content.nis, content.marks), "NIS"),
        ),
        *_show_switch(content),
        format_section(
            "Parity",
            "The largest absolute differences between the stream (history in a snapshot, then micro-batches, "
            "one of them killed and done again) and one batch pass over all rows with the same parameters.",
            format_table(head, [list(row.values()) for row in content.parity]),
        ),
        format_section("Time", "Seconds on the clock, phase by phase.", _show_phases(content.phases)),
    )


def _show_switch(content: Content) -> list[str]:
    """Show the upgrade, if there was one."""
    if content.switch is None or not content.switch.routes:
        return []
    done = content.switch.result
    likelihood = done["log_likelihood_a_row"]
    text = (
        f"While the last days landed, {done['model']} was brought to version 2, which has a state more: a gust that "
        f"decays, beside a level that hardly moves. It began in shadow from an export of version 1 and saw the next "
        f"day's {done['rows_compared']:,} flights too; log-likelihood a row: {likelihood['old']:.4f} of version 1, "
        f"{likelihood['new']:.4f} of version 2. It was promoted, was live for a day, and was rolled back: version 1 "
        f"went on from its own checkpoint, so at the end it has seen every row, each once. The comparison of both is "
        f"in {done['report']}."
    )
    drawn = format_picture(draw_switch(content.switch, content.unit), "Both versions across the switch")
    return [format_section("An upgrade, and back", text, drawn)]


def number(value: float) -> str:
    """Format a difference: 0, 3.6e-12, or a sign for missing rows."""
    if math.isinf(value):
        return "does not match"
    return "0" if value == 0 else f"{value:.1e}"


def _build_cards(result: Mapping[str, Any]) -> str:
    kills = result["driver_kills"]
    some = [
        Card(
            number(result["max_abs_difference"]),
            "largest difference",
            f"at most {result['tolerance']:.0e} is allowed",
        ),
        Card(f"{result['keys']:,}", "keys compared", "routes and aircraft, every one"),
        Card(
            f"{result['rows_sent']:,}",
            "rows sent to the streams",
            f"after {result['rows_history']:,} rows of history",
        ),
        Card(f"{result['rows_estimated']:,}", "rows estimated", "each exactly once"),
        Card(f"{result['rows_quarantined']:,}", "rows quarantined", "flights without a tail number"),
        Card(f"{kills}", f"driver{'s'[: kills != 1]} killed", "SIGKILL in mid-batch, then resumed"),
        Card(
            f"{result['rows_per_second']:,.0f}",
            "rows/s in the streams",
            f"{result['batch_rows_per_second']:,.0f} in batch",
        ),
        Card(f"{result['seconds']:,.0f} s", "in all", "from flights to this report"),
    ]
    return format_cards(some)


def _show_phases(phases: Mapping[str, float]) -> str:
    longest = max(phases.values(), default=1.0)
    return format_bars((name, seconds / longest, f"{seconds:.1f} s") for name, seconds in phases.items())
