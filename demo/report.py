"""Write the demo's report: one self-contained HTML file."""

from __future__ import annotations

import html
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
    path.write_text(page(content), encoding="utf-8")
    return path


def page(content: Content) -> str:
    """Return the report as HTML."""
    result = content.result
    good = result["max_abs_difference"] <= result["tolerance"] and not result["problems"]
    verdict = (
        "Every estimate of the stream and every key's last state are those of one uninterrupted batch pass."
        if good
        else "The check failed: " + "; ".join(result["problems"])
    )
    sections = [
        _section(
            "Estimates across the hand-over",
            "Time in the air of some routes: each airport's busiest, and a rare one. Blue is history, as "
            "pretrain filtered it; orange is what the stream put out; the dashed line is where its driver "
            "was killed with SIGKILL inside a micro-batch. The band is that of the route's level, around "
            "which the flights scatter; beside each route stands how many of its flights lay inside the 95 % "
            "interval that was predicted for them.",
            _picture(
                draw_estimates(content.series, content.marks, content.unit), "Estimates and measurements"
            ),
        ),
        _section(
            "Innovations",
            "What each flight told the filter, over the standard deviation that the filter expected. If the "
            "model were exactly right these would be independent draws of N(0, 1), 5 % of them outside the "
            "dotted lines.",
            _picture(draw_innovations(content.series, content.marks), "Normalised innovations"),
        ),
        _section(
            "NIS against its chi-square bound",
            "The normalised innovation squared of every row of all keys. " + " ".join(content.shares),
            _picture(draw_nis(content.nis, content.marks), "NIS"),
        ),
        *_switched(content),
        _section(
            "Parity",
            "The largest absolute differences between the stream (history in a snapshot, then micro-batches, "
            "one of them killed and done again) and one batch pass over all rows with the same parameters.",
            _table(content.parity),
        ),
        _section("Time", "Seconds on the clock, phase by phase.", _timing(content.phases)),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main>"
        f'<h1>{TITLE}</h1><p class="verdict {"good" if good else "bad"}">{html.escape(verdict)}</p>'
        f"{_cards(result)}{''.join(sections)}</main></body></html>\n"
    )


def _switched(content: Content) -> list[str]:
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
    picture = _picture(draw_switch(content.switch, content.unit), "Both versions across the switch")
    return [_section("An upgrade, and back", text, picture)]


def number(value: float) -> str:
    """Format a difference: 0, 3.6e-12, or a sign for missing rows."""
    if math.isinf(value):
        return "does not match"
    return "0" if value == 0 else f"{value:.1e}"


def _cards(result: Mapping[str, Any]) -> str:
    kills = result["driver_kills"]
    cards = [
        (
            number(result["max_abs_difference"]),
            "largest difference",
            f"at most {result['tolerance']:.0e} is allowed",
        ),
        (f"{result['keys']:,}", "keys compared", "routes and aircraft, every one"),
        (
            f"{result['rows_sent']:,}",
            "rows sent to the streams",
            f"after {result['rows_history']:,} rows of history",
        ),
        (f"{result['rows_estimated']:,}", "rows estimated", "each exactly once"),
        (f"{result['rows_quarantined']:,}", "rows quarantined", "flights without a tail number"),
        (f"{kills}", f"driver{'s'[: kills != 1]} killed", "SIGKILL in mid-batch, then resumed"),
        (
            f"{result['rows_per_second']:,.0f}",
            "rows/s in the streams",
            f"{result['batch_rows_per_second']:,.0f} in batch",
        ),
        (f"{result['seconds']:,.0f} s", "in all", "from flights to this report"),
    ]
    parts = [
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(name)}</span>'
        f"<small>{html.escape(more)}</small></div>"
        for value, name, more in cards
    ]
    return f'<div class="cards">{"".join(parts)}</div>'


def _section(title: str, text: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{body}</section>"


def _picture(source: str, alt: str) -> str:
    return f'<img alt="{html.escape(alt)}" src="{source}">'


def _table(rows: list[dict[str, str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    lines = ["".join(f"<td>{html.escape(value)}</td>" for value in row.values()) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _timing(phases: Mapping[str, float]) -> str:
    longest = max(phases.values(), default=1.0)
    rows = "".join(
        f'<tr><td>{html.escape(name)}</td><td class="n">{seconds:.1f} s</td>'
        f'<td class="bar"><i style="width:{100 * seconds / longest:.1f}%"></i></td></tr>'
        for name, seconds in phases.items()
    )
    return f'<table class="time"><tbody>{rows}</tbody></table>'


_STYLE = """
:root { color-scheme: light; --ink: #1f2733; --soft: #5b6675; --line: #e1e6ec; --accent: #2563a8; } * {
box-sizing: border-box; } body { margin: 0; background: #f5f7fa; color: var(--ink); font: 16px/1.55
system-ui, "Segoe UI", "DejaVu Sans", sans-serif; } main { max-width: 1080px; margin: 0 auto; padding:
2.5rem 1.25rem 4rem; } h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.01em;
} h2 { font-size: 1.2rem; margin: 0 0 .4rem; } p { margin: 0 0 1rem; color: var(--soft); max-width: 78ch; }
.verdict { padding: .7rem 1rem; border-radius: 8px; max-width: none; font-weight: 600; } .verdict.good {
background: #e4f3ea; color: #14532d; } .verdict.bad { background: #fbe5e8; color: #8f1230; } .cards {
display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: .8rem; margin: 1.25rem 0
1.5rem; } .card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem;
display: flex; flex-direction: column; } .card b { font-size: 1.55rem; line-height: 1.2;
font-variant-numeric: tabular-nums; } .card span { font-weight: 600; font-size: .92rem; } .card small {
color: var(--soft); } section { background: #fff; border: 1px solid var(--line); border-radius: 10px;
padding: 1.25rem; margin-bottom: 1.25rem; } img { width: 100%; height: auto; display: block; } .wide {
overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric:
tabular-nums; } th, td { padding: .45rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
white-space: nowrap; } th:first-child, td:first-child { text-align: left; } th { color: var(--soft);
font-weight: 600; white-space: normal; vertical-align: bottom; } tr:last-child td {
border-bottom: 0; } .time td:first-child { width: 1%; padding-right: 1.5rem; } .time .n { width: 1%; } .time .bar {
padding-left: 1rem; } .time i { display: block; height: .7rem;
min-width: 2px; border-radius: 3px; background: var(--accent); opacity: .75; }
"""
