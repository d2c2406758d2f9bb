"""The evidence, as Markdown, for the person who approves a new version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.core.redaction import escape_unprintable
from jobs.core.report import format_number, round_numbers
from jobs.specs.migration import ANSWERS, Answer
from kalman_dags.places import find_model_page, report_page

BLUE_GREEN = "blue-green"


def format_approval(
    model: str,
    mode: str,
    preview: Mapping[str, Any] | None,
    shadow: Mapping[str, Any] | None,
    caught_up: bool,
    root: str = "",
) -> str:
    """Return the text of the approval as Markdown.

    Args:
        model: the name of the model.
        mode: the mode of the upgrade.
        preview: the report of the dry run (`VerbOutcome`); None if unknown.
        shadow: the report of the last comparison; None if unknown.
        caught_up: whether the live stream caught up before this comparison.
        root: the path prefix of Airflow's address for links.
    """
    data = (shadow or {}).get("data") or {}
    parts = [
        *(_format_verdict(data, root) if data.get("comparison") else _format_output(shadow)),
        *(_format_lag(data, caught_up) if mode == BLUE_GREEN else []),
        *_format_changes((preview or {}).get("data") or {}),
        *_format_decision(model, mode, data, root),
    ]
    return "\n\n".join(parts)


def _format_verdict(data: Mapping[str, Any], root: str) -> list[str]:
    """Return the verdict with its reasons, the link to the report, and the tables of the compared figures."""
    numbers = data["comparison"]
    gain = numbers.get("gain") or {}
    good = "good" if data.get("good") else "not good"
    found = [f"**Verdict: {good}.** Answer: {ANSWERS.get(str(data.get('answer')), data.get('answer'))}."]
    if data.get("reasons"):
        found.append("\n".join(f"- {reason}" for reason in data["reasons"]))
    page = report_page(str(data.get("report") or ""))
    if page:
        found.append(f"**[Open the report]({root}{page})**, with pictures of what a promotion changes")
    rows, keys, better, worse = (
        format_number(numbers.get(name), ",", "-") for name in ("rows", "keys", "keys_better", "keys_worse")
    )
    mean = format_number(gain.get("mean"), "+.3g", "-")
    counts = [
        ("rows compared", rows, ""),
        ("keys compared", keys, ""),
        ("gain in log-likelihood per row", mean, _format_interval(gain)),
        ("keys predicted better / worse", f"{better} / {worse}", ""),
    ]
    found.append(_format_table(("what", "value", "95 % interval"), counts))
    sides = [
        (title, *(format_number(numbers[name].get(side), form, "-") for side in ("old", "new")))
        for title, name, form in SIDES
        if any(value is not None for value in (numbers.get(name) or {}).values())
    ]
    live, new = f"{data.get('live', 'the live one')} (live)", f"{data.get('generation', 'new')} (shadow)"
    if sides:
        found.append(_format_table(("", live, new), sides))
    moved = [
        (_format_code(one["key"]), *(format_number(one[name], form, "-") for name, form in MOVES))
        for one in numbers.get("moved") or []
    ]
    if moved:
        heads = f"keys that move most: {numbers['moved'][0]['quantity']}", live, new, "apart, in sd"
        found.append(_format_table(heads, moved))
    return found


def _format_output(shadow: Mapping[str, Any] | None) -> list[str]:
    """Return the driver's output lines, for a driver whose report is unreadable or has no comparison."""
    lines: Sequence[str] = (shadow or {}).get("lines") or []
    return ["```\n" + "\n".join(_escape(line) for line in lines) + "\n```"] if lines else []


def _format_lag(data: Mapping[str, Any], caught_up: bool) -> list[str]:
    """Return lines about the effect of lag on the compared rows."""
    found = []
    if caught_up:
        found.append(
            "The live stream lagged the shadow, so this run let it catch up first, and compared again: the numbers are "
            "those after it."
        )
    if data.get("live_lags"):
        found.append(
            f"**The live stream still lags**: {data.get('live', 'it')} has not read all rows that the shadow has, and "
            "rows that it has not estimated are not compared."
        )
    needed, rows = data.get("rows_needed"), (data.get("comparison") or {}).get("rows")
    if data.get("answer") == Answer.UNKNOWN and needed is not None and rows is not None and needed > rows:
        found.append(f"About {needed - rows:,} rows more would tell.")
    return found


def _format_changes(data: Mapping[str, Any]) -> list[str]:
    """Return lines about states, keys and parameters that the new version loses and gains."""
    change = data.get("change") or {}
    before, after = change.get("before") or {}, change.get("after") or {}
    lost = [name for name in before if name not in after]
    gained = [name for name in after if name not in before]
    rows = []
    if before or after:
        rows.append(("states", ", ".join(lost) or "none", ", ".join(gained) or "none"))
    if change.get("left_out"):
        some = ", ".join(map(_format_code, change.get("left_out_keys") or []))
        rows.append(
            ("keys", f"{change['left_out']:,} whose state is not a number ({some}): they begin anew", "none")
        )
    elif "keys" in change:
        rows.append(("keys", "none", f"none; {change['keys']:,} keep their state"))
    found = [_format_table(("", "lost", "gained"), rows)] if rows else []
    parameters = [
        (*(_format_code(one[name]) for name in ("name", "before", "after")), str(one["from"]))
        for one in change.get("parameters") or []
        if one["before"] != one["after"]
    ]
    if parameters:
        found.append(_format_table(("parameter", "before", "after", "from"), parameters))
    return ["**What is lost and gained**", *found] if found else []


def _format_decision(model: str, mode: str, data: Mapping[str, Any], root: str) -> list[str]:
    """Return lines about the effect of each answer, and a link to further information."""
    if mode != BLUE_GREEN:
        return [
            f"Approve: `{mode}` ends the live generation and begins the new one, without a comparison. Reject: nothing "
            f"changes. [All of {model}]({root}{find_model_page(model)})"
        ]
    if data.get("good"):
        first = "Approve: the shadow catches up, is compared once more, and becomes live. "
    else:
        first = (
            "Approve alone is **refused**, because the verdict is not good: tick *Force* below as well to promote it "
            "whatever the comparison says. "
        )
    return [
        f"{first}Reject: the live version stays, and the shadow with it; start this DAG again when more rows have "
        f"come, or give it up with `kalman-pipeline retire --model {model}`. "
        f"[All of {model}]({root}{find_model_page(model)})"
    ]


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _format_interval(gain: Mapping[str, Any]) -> str:
    low, high = gain.get("low"), gain.get("high")
    return "none" if low is None or high is None else f"{low:+.3g} to {high:+.3g}"


def _format_code(value: Any) -> str:
    """Return a value as code of Markdown, which nothing in it can end."""
    return f"`{_escape('-' if value is None else str(round_numbers(value, 4)), 80) or ' '}`"


def _escape(text: str, most: int = 500) -> str:
    return escape_unprintable(text, most).replace("`", "'")


MOVES = (("old", ".4g"), ("new", ".4g"), ("deviations", ".3g"))
"""Columns of the keys that move most, and their number formats."""

SIDES = (
    ("log-likelihood per row", "log_likelihood_a_row", ".4g"),
    ("NIS per component (1 is expected)", "nis_a_component", ".3g"),
    ("keys whose NIS is outside its bounds", "nis_outside", ".1%"),
    ("mean innovation (0 is expected)", "bias", "+.3g"),
    ("keys whose mean innovation is outside its bounds", "bias_outside", ".1%"),
    ("rows flagged", "flagged", ","),
)
"""Figures of both versions: title, name in the report's data, and number format."""
