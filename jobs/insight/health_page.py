"""The page on a model's health as one self-contained HTML file."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import numpy as np

from jobs.core.html_page import (
    NO_PICTURES,
    Card,
    can_draw,
    format_bars,
    format_cards,
    format_half_picture,
    format_page,
    format_paragraph,
    format_pictures,
    format_section,
    format_table,
    place_side_by_side,
)
from jobs.core.report import format_count, format_span, suggest_other_model
from jobs.insight.health import WORST, Health, Reason
from jobs.state.encoding.keys import format_key
from kalman.evaluation.diagnostics import mean_bounds

if can_draw():
    from jobs.insight import pictures as drawing
else:
    drawing = None

POPULATION, KEY = "population", "key"
PARAMETERS = 8
"""The page draws at most this number of parameters."""


def build_health_page(health: Health) -> str:
    """Return the page as HTML, without pictures if matplotlib is not installed."""
    kind, sentence = judge_health(health)
    return format_page(
        f"{health.model}: health",
        format_paragraph(_describe_subject(health)),
        format_paragraph(sentence, f"verdict {kind}"),
        *(build(health) for build in SECTIONS),
    )


def judge_health(health: Health) -> tuple[str, str]:
    """Return the colour of the verdict (good, bad, or neutral if nothing can be judged) and its sentence."""
    if health.without:
        return "neutral", f"Not judged. {health.without}"
    total, degrees = health.over_time.nis.sum(), health.over_time.degrees.sum()
    if degrees < 30 or health.outside is None:
        return (
            "neutral",
            f"Not judged: {format_count(int(degrees), 'measurement')} with a NIS, and 30 are needed.",
        )
    ratio = float(total / degrees)
    low, high = (float(one) for one in mean_bounds(1, degrees))
    outside = f"{health.outside:.0%} of the keys are outside their 95 % bounds (5 % expected)"
    if low <= ratio <= high:
        return "good", f"The model predicts as well as it says: NIS per component is {ratio:.3f}; {outside}."
    if abs(ratio - 1) <= 0.15:
        return "good", f"NIS per component is {ratio:.3f}, near the expected 1; {outside}."
    wrong = "covariances are too small: it is surer than it should be" if ratio > 1 else (
        "covariances are too large: it is less sure than it could be"
    )  # fmt: skip
    said = f"NIS per component is {ratio:.3f}, and 1 is expected: the model's {wrong}; {outside}"
    return "bad", f"{said}. Next: {suggest_other_model(health.model)}."


def _describe_subject(health: Health) -> str:
    live = next((one for one in health.generations if one.status == "live"), None)
    of = (
        f"generation {live.generation} of version {live.model_version} is live" if live else "nothing is live"
    )
    if not health.estimates.last_batch:
        of += "; what follows is of its history"
    other = f" {health.other_version[0].upper()}{health.other_version[1:]}." if health.other_version else ""
    return (
        f"{health.description} {of[0].upper()}{of[1:]}.{other} Made {_format_time(health.made_at)}.".strip()
    )


def _format_time(at: datetime | None) -> str:
    return "–" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _format_noun(count: int | None) -> str:
    return "row" if count == 1 else "rows"


def _build_cards(health: Health) -> str:
    one, rows = health.over_time, health.rows
    flagged = int(sum(counts.sum() for counts in one.flags.values()))
    degrees, scored = one.degrees.sum(), one.scored.sum()
    held = sum(reason.rows for reason in health.fates if reason.status == "held")
    last = health.progress[-1] if health.progress else None
    some = [
        Card(f"{rows:,}", f"{_format_noun(rows)} estimated", f"of {format_count(len(health.keys.key), 'key')}"),
        Card(f"{one.nis.sum() / degrees:.3f}" if degrees else "–", "NIS per component", "1 is expected"),
        Card(
            f"{one.inside.sum() / scored:.1%}" if scored else "–",
            "inside the 95 % interval",
            "95 % is expected; gated rows count as outside",
        ),
        Card(f"{flagged / rows:.2%}", "of the rows have a flag", f"{format_count(flagged, 'row')}"),
        Card(f"{held:,}", f"{_format_noun(held)} in quarantine", "held until replayed or discarded"),
        Card(
            "–" if last is None or last.get("lag_rows") is None else f"{last['lag_rows']:,}",
            f"{_format_noun(0 if last is None else last.get('lag_rows'))} waited",
            "no micro-batch yet"
            if last is None
            else f"when the last micro-batch ended, {_format_time(last['started_at'])}",
        ),
    ]  # fmt: skip
    return format_cards(some)


def _show_fit(health: Health) -> str:
    if health.without:
        return format_section("Fit over time", health.without)
    text = (
        "NIS, the normalised innovation squared, averages to the number of measured components if the covariances are "
        "right: above, the filter is surer than it should be. Coverage is the share of measurements inside the "
        "interval that was predicted for them. Error bars hold 95 % if rows are independent. Dashed lines: hand-overs."
    )
    if drawing is None:
        return format_section("Fit over time", NO_PICTURES)
    drawn = [
        (drawing.draw_nis(drawing.make_health_nis(health), health.first_rows), "NIS per component over time"),
        (drawing.draw_coverage(health), "Coverage over time"),
    ]
    return format_section("Fit over time", text, format_pictures(drawn))


def _show_examples(health: Health) -> str:
    if drawing is None:
        return ""
    drawn = [(drawing.draw_example(one), f"Estimates of {one.key}") for one in health.examples]
    over = ", over the measurements" if any(len(one.measured) for one in health.examples) else ""
    what = (
        "estimates of some keys with their 95 % bands"
        if not any(line.is_predicted for one in health.examples for line in one.lines)
        else "rows of some keys: what was predicted of each measurement before it came, with its 95 % band"
    )
    text = (
        f"The newest {what}{over}; --key adds others. Beside each stands how many of these rows lay inside the 95 % "
        "interval that was predicted for them."
    )
    return format_section("Keys", text, format_pictures(drawn))


def _show_worst_keys(health: Health) -> str:
    keys = health.keys
    order = np.argsort(-np.abs(keys.surprise), kind="stable")[:WORST]
    rows = [
        (
            format_key(keys.key[at]),
            f"{int(keys.rows[at]):,}",
            f"{keys.ratio[at]:.3f}" if keys.degrees[at] else "–",
            f"{keys.surprise[at]:+.1f}" if keys.degrees[at] else "–",
            f"{int(keys.flagged[at]):,}",
        )
        for at in order.tolist()
    ]
    text = (
        "The keys whose NIS is farthest from what is expected, in standard deviations: at 3 or more look at the key's "
        "sensor, at many such keys at the model."
    )
    head = ("key", "rows", "NIS per component", "deviations from 1", "flagged rows")
    body = format_table(head, rows)
    if drawing is not None and not health.without:
        body = place_side_by_side(body, format_half_picture(drawing.draw_keys(health), "NIS of each key"))
    return format_section("Worst keys", text, body)


def _show_fates(health: Health) -> str:
    """Return the numbers of accepted and rejected rows as bars, on a logarithmic scale because few are rejected."""
    late = [one for one in health.fates if one.reason.startswith("late")]
    others = [one for one in health.fates if one not in late]
    counted = [("accepted", health.rows), *((_format_fate(one), one.rows) for one in (*late, *others))]
    top = np.log1p(max(count for _, count in counted))
    text = (
        "Accepted rows have an estimate that counts. The others are in quarantine with the reason, whoever found it: "
        f"`kalman-pipeline quarantine list --model {health.model}`. The bars' scale is logarithmic."
    )
    drawn = format_bars(
        (name, float(np.log1p(count) / top) if top else 0.0, f"{count:,}") for name, count in counted
    )
    return format_section("Rows by fate", text, drawn)


def _format_fate(one: Reason) -> str:
    return one.reason if one.status == "held" else f"{one.reason} ({one.status})"


def _show_flags(health: Health) -> str:
    flags = {name: int(counts.sum()) for name, counts in health.over_time.flags.items()}
    text = "A flagged row did not change its key's state: " + (
        ", ".join(f"{name} {format_count(count, 'row')}" for name, count in flags.items()) if flags else "there is none"
    )  # fmt: skip
    pictures = ""
    if drawing is not None:
        pictures = format_pictures([(drawing.draw_rows(health), "Rows and flags over time")])
    return format_section("Flags", f"{text}.", pictures)


def _show_lag(health: Health) -> str:
    if not health.progress:
        return format_section("Lag", "No stream has left a record of a micro-batch.")
    last = health.progress[-1]
    age = format_span((health.made_at - last["started_at"]).total_seconds())
    seconds = [one["seconds"] for one in health.progress if one.get("seconds")]
    text = (
        f"{format_count(len(health.progress), 'micro-batch', 'es')}, the last one {age} ago with "
        f"{format_count(int(last.get('rows') or 0), 'row')}; half of them took "
        f"{np.median(seconds or [0.0]):.1f} s or less."
    )
    pictures = ""
    if drawing is not None and any(one.get("lag_rows") is not None for one in health.progress):
        pictures = format_pictures([(drawing.draw_lag(health), "Rows that waited after each micro-batch")])
    return format_section("Lag", text, pictures)


def _show_versions(health: Health) -> str:
    rows = [
        (
            one.generation,
            str(one.model_version),
            one.status,
            "–" if one.parent is None else f"{one.parent} after micro-batch {one.parent_batch}",
            _format_time(one.created_at),
            _format_time(one.retired_at),
            _format_time(datetime.fromtimestamp(health.first_rows[one.generation] / 1e6, UTC))
            if one.generation in health.first_rows
            else "no live row",
            ", ".join(health.specs[one.generation].states) if one.generation in health.specs else "–",
        )
        for one in health.generations
    ]
    head = (
        "generation",
        "version",
        "status",
        "continues",
        "began",
        "retired",
        "first live event time",
        "states",
    )
    return format_section(
        "Versions and hand-overs",
        "Each generation continues right after one micro-batch of its parent; a switch is one commit.",
        format_table(head, rows),
    )


def _show_parameters(health: Health) -> str:
    if not health.learned:
        return format_section("Learned parameters", "Nothing more is known of them than the manifest says.")
    counted = Counter((row["scope"], row["outcome"]) for row in health.learned)
    outcomes = [(scope, outcome or "–", f"{count:,}") for (scope, outcome), count in sorted(counted.items())]
    text = f"Of snapshot {health.learned_in}: how the search ended, and what it found."
    body = format_table(("learned for", "outcome", "rows"), outcomes)
    return format_section("Learned parameters", text, body + format_pictures(_draw_parameters(health)))


def _draw_parameters(health: Health) -> list[tuple[str, str]]:
    """Return a picture of each parameter: its distribution over keys, or the values of groups with error bars."""
    if drawing is None:
        return []
    keys = [row for row in health.learned if row["scope"] == KEY]
    shared = [row for row in health.learned if row["scope"] != KEY]
    drawn = []
    for name in list(dict.fromkeys(name for row in health.learned for name in row["parameters"]))[
        :PARAMETERS
    ]:
        values = np.array([row["parameters"].get(name, np.nan) for row in keys], float)
        values = values[np.isfinite(values)]
        others = [row for row in shared if name in row["parameters"]]
        if len(values):
            whole = next((row["parameters"][name] for row in others if row["scope"] == POPULATION), None)
            drawn.append((drawing.draw_parameter(name, values, whole), f"{name} by key"))
        elif others:
            labels = [row["key_group"] or "all keys" for row in others]
            errors = [row["standard_errors"].get(name, np.nan) for row in others]
            shown = [row["parameters"][name] for row in others]
            drawn.append((drawing.draw_shared(name, labels, shown, errors), f"{name} with error bars"))
    return drawn


SECTIONS = (
    _build_cards,
    _show_fit,
    _show_examples,
    _show_worst_keys,
    _show_fates,
    _show_flags,
    _show_lag,
    _show_versions,
    _show_parameters,
)
"""Functions that build the sections after the verdict, in the order of the page."""
