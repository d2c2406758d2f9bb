"""The report on two generations as one self-contained HTML page."""

from __future__ import annotations

import html
from typing import Any

from jobs.upgrades.comparison.content import Content
from jobs.upgrades.comparison.decision import answer_text, gain_line

try:
    from jobs.upgrades.comparison import figures
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "matplotlib":  # which is optional
        raise
    figures = None


def page(content: Content) -> str:
    """Return the report as HTML, without pictures where matplotlib is not installed."""
    title = f"{content.model}: version {content.new['version']} against {content.old['version']}"
    good = content.comparison.good
    verdict = (
        "By the thresholds of its spec the new version may become live."
        if good
        else "The new version is not good enough: " + "; ".join(content.comparison.reasons) + "."
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(_subject(content))}</p>"
        f'<p class="verdict {"good" if good else "bad"}">{html.escape(verdict)}</p>'
        f"<p>{html.escape(_answer(content))}</p>"
        f"{_cards(content)}{_thresholds(content)}{''.join(_pictures(content))}{_keys(content)}{_generations(content)}"
        "</main></body></html>\n"
    )


def _subject(content: Content) -> str:
    numbers = content.comparison.numbers
    return (
        f"{content.description} Both versions have estimated the same {numbers['rows']:,} rows of "
        f"{numbers['keys']:,} keys; compared is how well each predicted them."
    ).strip()


def _answer(content: Content) -> str:
    """Return the answer, and the interval that it rests on."""
    comparison = content.comparison
    answer, gain = answer_text(comparison), gain_line(comparison)
    return (
        f"{answer[0].upper()}{answer[1:]}. {gain[0].upper()}{gain[1:]}. The interval allows for autocorrelation and "
        "for keys that change together."
    )


def _cards(content: Content) -> str:
    numbers = content.comparison.numbers
    gain = numbers["gain"]
    interval = (
        "no interval: too few rows"
        if gain["low"] is None
        else f"from {gain['low']:+.4f} to {gain['high']:+.4f} (95 %); above 0 the new version predicts better"
    )
    keys = numbers["keys"] or 1
    cards = [
        (f"{numbers['rows']:,}", "rows compared", f"of {numbers['keys']:,} keys"),
        (number(gain["mean"], "+.4f"), "log-likelihood gained per row", interval),
        (
            f"{numbers['keys_better'] / keys:.0%}",
            "of the keys predicted better",
            f"{numbers['keys_worse']:,} worse",
        ),
        (
            number(numbers["nis_a_component"]["new"], ".3f"),
            "NIS per component, new",
            f"1 is expected; {number(numbers['nis_a_component']['old'], '.3f')} old",
        ),
        (
            number(numbers["bias"]["new"], "+.4f"),
            "mean innovation, new",
            f"0 is expected; {number(numbers['bias']['old'], '+.4f')} old",
        ),
    ]
    if "unequal_rows" in numbers:
        cards.append((f"{numbers['unequal_rows']:,}", "rows differ", "it is the same model: none may differ"))
    parts = [
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(name)}</span>'
        f"<small>{html.escape(more)}</small></div>"
        for value, name, more in cards
    ]
    return f'<div class="cards">{"".join(parts)}</div>'


def _thresholds(content: Content) -> str:
    """Return the table of the statistics that decide, of both versions, with their thresholds."""
    numbers, limits = content.comparison.numbers, content.limits
    keys = numbers["keys"]
    worse = None if not keys else numbers["keys_worse"] / keys
    loss = numbers["log_likelihood_a_row"]
    rows: list[tuple[str, str, str, str]] = [
        ("rows compared", "", f"{numbers['rows']:,}", f"at least {limits['rows']:,} (upgrade.rows)"),
        ("keys compared", "", f"{keys:,}", f"at least {limits['keys']:,} (upgrade.keys)"),
        (
            "log-likelihood per row",
            number(loss["old"], ".6g"),
            number(loss["new"], ".6g"),
            f"at most {limits['loss']:g} less than the old, beyond the noise (upgrade.loss)",
        ),
        (
            "keys predicted worse",
            "",
            number(worse, ".1%"),
            _limit(limits["keys_worse"], "upgrade.keys_worse"),
        ),
        _pair(numbers, "nis_a_component", "NIS per component", ".4f", "1 is expected"),
        _pair(
            numbers,
            "nis_outside",
            "keys with NIS outside their 95 % bounds",
            ".1%",
            _limit(limits["nis_outside"], "upgrade.nis_outside"),
        ),
        _pair(numbers, "bias", "mean normalised innovation", "+.4f", "0 is expected"),
        _pair(
            numbers,
            "bias_outside",
            "keys with a mean innovation outside its 95 % bounds",
            ".1%",
            _limit(limits["bias_outside"], "upgrade.bias_outside"),
        ),
        (
            "flagged rows",
            f"{numbers['flagged']['old']:,}",
            f"{numbers['flagged']['new']:,}",
            "no more than the old",
        ),
    ]
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    head = "".join(f"<th>{name}</th>" for name in ("", "old", "new", "allowed"))
    return _section(
        "Thresholds",
        "Of an exactly right model, 95 % of the keys would lie within the bounds.",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>',
    )


def _pair(numbers: dict[str, Any], name: str, text: str, form: str, limit: str) -> tuple[str, str, str, str]:
    return text, number(numbers[name]["old"], form), number(numbers[name]["new"], form), limit


def _limit(value: float | None, name: str) -> str:
    return f"any ({name})" if value is None else f"at most {value:.1%} ({name})"


def _pictures(content: Content) -> list[str]:
    """Return the sections with pictures, or one with the reason why there are none."""
    if not content.comparison.numbers["rows"]:
        return [_section("Nothing to draw", "The two have no row in common yet.", "")]
    if figures is None:
        text = "Pictures need matplotlib: pip install 'kalman-pipeline[demo]', then run the report again."
        return [_section("Pictures", text, "")]
    figures.without_display()
    sections = [
        _section(
            "Which predicts better",
            "The predictive log-likelihood is that of each measurement before the filter has seen it. Left: the new "
            "version's gain over the old one, cumulated over event time. Right: each key's gain per row.",
            _picture(figures.draw_likelihood(content), "Log-likelihood gained, over time and by key"),
        ),
        _section(
            "Which is better calibrated",
            "The normalised innovation squared (NIS) averages to the number of measured components if a filter's "
            "covariances are right; above, they are too small, below, too large. Each dot is a key.",
            _picture(figures.draw_nis(content), "NIS per component, over time and by key"),
        ),
    ]
    if any(value is not None for value in content.comparison.numbers["bias"].values()):
        text = "The mean of a key's normalised innovations. In a correct model it differs from zero only by chance."
        sections.append(
            _section("Bias", text, _picture(figures.draw_bias(content), "Mean innovation by key"))
        )
    else:
        text = "Not judged: it needs each row's innovation, which outputs: {innovation: true} in the spec writes."
        sections.append(_section("Bias", text, ""))
    if content.examples:
        text = "Both versions' estimates of some keys, with their 95 % bands, over the measurements."
        sections.append(
            _section(
                "Estimates",
                text,
                _picture(figures.draw_examples(content), "Estimates of some keys"),
            )
        )
    return sections


def _keys(content: Content) -> str:
    data = content.data()
    parts = []
    for name, title in (("keys_worst", "lose most"), ("keys_best", "gain most")):
        rows = "".join(
            f"<tr><td>{html.escape(one['key'])}</td><td>{one['rows']:,}</td><td>{one['gain_a_row']:+.4f}</td>"
            f"<td>{number(one['nis_a_component_old'], '.3f')}</td>"
            f"<td>{number(one['nis_a_component_new'], '.3f')}</td></tr>"
            for one in data[name][:8]
        )
        head = f"<th>keys that {title}</th><th>rows</th><th>gain per row</th><th>NIS old</th><th>NIS new</th>"
        parts.append(
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )
    return _section(
        "Keys", "By log-likelihood gained per row; the JSON file beside this one has more of them.",
        f'<div class="two">{"".join(parts)}</div>',
    )  # fmt: skip


def _generations(content: Content) -> str:
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(str(cell))}</td>"
            for cell in (side, one["generation"], one["version"], one["status"], one["snapshot"])
        )
        + "</tr>"
        for side, one in (("old", content.old), ("new", content.new))
    )
    head = "".join(f"<th>{name}</th>" for name in ("", "generation", "version", "status", "started from"))
    return _section(
        "Generations",
        "The new generation starts after a micro-batch of the old one; rows before that are not compared.",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>',
    )


def number(value: float | None, form: str) -> str:
    """Return a number as text, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def _section(title: str, text: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{body}</section>"


def _picture(source: str, alt: str) -> str:
    return f'<img alt="{html.escape(alt)}" src="{source}">'


_STYLE = """
:root { color-scheme: light; --ink: #1f2733; --soft: #5b6675; --line: #e1e6ec; } * { box-sizing: border-box; }
body { margin: 0; background: #f5f7fa; color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans",
sans-serif; } main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; } h1 { font-size: 1.9rem;
line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.01em; } h2 { font-size: 1.2rem; margin: 0 0 .4rem; }
p { margin: 0 0 1rem; color: var(--soft); max-width: 78ch; } .verdict { padding: .7rem 1rem; border-radius: 8px;
max-width: none; font-weight: 600; } .verdict.good { background: #e4f3ea; color: #14532d; } .verdict.bad {
background: #fbe5e8; color: #8f1230; } .cards { display: grid; grid-template-columns: repeat(auto-fit,
minmax(190px, 1fr)); gap: .8rem; margin: 1.25rem 0 1.5rem; } .card { background: #fff; border: 1px solid
var(--line); border-radius: 10px; padding: .9rem 1rem; display: flex; flex-direction: column; } .card b {
font-size: 1.55rem; line-height: 1.2; font-variant-numeric: tabular-nums; } .card span { font-weight: 600;
font-size: .92rem; } .card small { color: var(--soft); } section { background: #fff; border: 1px solid
var(--line); border-radius: 10px; padding: 1.25rem; margin-bottom: 1.25rem; } img { width: 100%; height: auto;
display: block; } .wide { overflow-x: auto; } .two { display: grid; gap: 1.5rem; grid-template-columns:
repeat(auto-fit, minmax(420px, 1fr)); } table { border-collapse: collapse; width: 100%; font-size: .92rem;
font-variant-numeric: tabular-nums; } th, td { padding: .45rem .6rem; border-bottom: 1px solid var(--line);
text-align: right; white-space: nowrap; } th:first-child, td:first-child { text-align: left; } th { color:
var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; } tr:last-child td { border-bottom: 0; }
"""
