"""Write the report on two generations as one HTML page that needs nothing else."""

from __future__ import annotations

import html
from typing import Any

from jobs.upgrades.comparison import figures
from jobs.upgrades.comparison.content import Content


def page(content: Content) -> str:
    """Return the report as HTML; without pictures where matplotlib is not installed."""
    title = f"{content.model}: version {content.new['version']} against {content.old['version']}"
    good = content.found.good
    verdict = (
        "By the thresholds of its spec the new version may take over."
        if good
        else "The new version is not good enough: " + "; ".join(content.found.reasons) + "."
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(_subject(content))}</p>"
        f'<p class="verdict {"good" if good else "bad"}">{html.escape(verdict)}</p>'
        f"{_cards(content)}{_table(content)}{''.join(_pictures(content))}{_keys(content)}{_lineage(content)}"
        "</main></body></html>\n"
    )


def _subject(content: Content) -> str:
    numbers = content.found.numbers
    return (
        f"{content.description} Both versions have estimated the same {numbers['rows']:,} rows of "
        f"{numbers['keys']:,} keys; what is compared is how well each foretold them."
    ).strip()


def _cards(content: Content) -> str:
    numbers = content.found.numbers
    likelihood = numbers["log_likelihood_a_row"]
    gain = None if likelihood["new"] is None else likelihood["new"] - likelihood["old"]
    keys = numbers["keys"] or 1
    cards = [
        (f"{numbers['rows']:,}", "rows compared", f"of {numbers['keys']:,} keys"),
        (number(gain, "+.4f"), "log-likelihood gained a row", "above 0 the new version predicts better"),
        (
            f"{numbers['keys_better'] / keys:.0%}",
            "of the keys predicted better",
            f"{numbers['keys_worse']:,} worse",
        ),
        (
            number(numbers["nis_a_component"]["new"], ".3f"),
            "NIS a component, new",
            f"1 is expected; {number(numbers['nis_a_component']['old'], '.3f')} old",
        ),
        (
            number(numbers["bias"]["new"], "+.4f"),
            "mean innovation, new",
            f"0 is expected; {number(numbers['bias']['old'], '+.4f')} old",
        ),
    ]
    if "unequal_rows" in numbers:
        cards.append((f"{numbers['unequal_rows']:,}", "rows differ", "it is the same model: none may"))
    parts = [
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(name)}</span>'
        f"<small>{html.escape(more)}</small></div>"
        for value, name, more in cards
    ]
    return f'<div class="cards">{"".join(parts)}</div>'


def _table(content: Content) -> str:
    """Show every number that is judged, of both, with its threshold."""
    numbers, limits = content.found.numbers, content.limits
    keys = numbers["keys"]
    worse = None if not keys else numbers["keys_worse"] / keys
    loss = numbers["log_likelihood_a_row"]
    rows: list[tuple[str, str, str, str]] = [
        ("rows compared", "", f"{numbers['rows']:,}", f"at least {limits['rows']:,} (upgrade.rows)"),
        (
            "log-likelihood a row",
            number(loss["old"], ".6g"),
            number(loss["new"], ".6g"),
            f"at most {limits['loss']:g} less than the old (upgrade.loss)",
        ),
        (
            "keys predicted worse",
            "",
            number(worse, ".1%"),
            _limit(limits["keys_worse"], "upgrade.keys_worse"),
        ),
        *_pair(numbers, "nis_a_component", "NIS a component", ".4f", "1 is expected"),
        *_pair(
            numbers,
            "nis_outside",
            "keys with NIS outside their 95 % bounds",
            ".1%",
            _limit(limits["nis_outside"], "upgrade.nis_outside"),
        ),
        *_pair(numbers, "bias", "mean normalised innovation", "+.4f", "0 is expected"),
        *_pair(
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
        "What is judged",
        "Bounds are those within which 95 % of the keys would be if the model were exactly right.",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>',
    )


def _pair(
    numbers: dict[str, Any], name: str, text: str, form: str, limit: str
) -> list[tuple[str, str, str, str]]:
    return [(text, number(numbers[name]["old"], form), number(numbers[name]["new"], form), limit)]


def _limit(value: float | None, name: str) -> str:
    return f"any ({name})" if value is None else f"at most {value:.1%} ({name})"


def _pictures(content: Content) -> list[str]:
    """Return the sections with pictures, or one that says why there are none."""
    if not content.found.numbers["rows"]:
        return [_section("Nothing to draw", "The two have no row in common yet.", "")]
    try:
        import matplotlib
    except ImportError:
        text = "Pictures need matplotlib: pip install 'kalman-pipeline[demo]', then make the report again."
        return [_section("Pictures", text, "")]
    matplotlib.use("Agg")

    sections = [
        _section(
            "Which predicts better",
            "The predictive log-likelihood says how probable a version held each measurement before it came. Left: "
            "what the new one gains over the old, added up over event time. Right: the gain a row of each key.",
            _picture(figures.draw_likelihood(content), "Log-likelihood gained, over time and by key"),
        ),
        _section(
            "Which knows its own error",
            "The normalised innovation squared is, on average, the number of measured components if a filter's "
            "covariances are right: above, it is too sure of itself; below, too cautious. Each dot is a key.",
            _picture(figures.draw_nis(content), "NIS a component, over time and by key"),
        ),
    ]
    if any(value is not None for value in content.found.numbers["bias"].values()):
        text = "The mean of a key's normalised innovations. In a right model it is zero but for chance."
        sections.append(
            _section("Bias", text, _picture(figures.draw_bias(content), "Mean innovation by key"))
        )
    else:
        text = "Not judged: a spec that says outputs: {innovation: true} has each row's innovation kept."
        sections.append(_section("Bias", text, ""))
    if content.shown:
        text = "Some keys as both versions see them: the estimate of what is measured, with its 95 % band."
        sections.append(
            _section(
                "Estimates",
                text,
                _picture(figures.draw_keys(content.shown, content), "Estimates of some keys"),
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
        head = f"<th>keys that {title}</th><th>rows</th><th>gain a row</th><th>NIS old</th><th>NIS new</th>"
        parts.append(
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        )
    return _section(
        "Keys", "By log-likelihood gained a row; more of them are in the JSON file beside this one.",
        f'<div class="two">{"".join(parts)}</div>',
    )  # fmt: skip


def _lineage(content: Content) -> str:
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(str(cell))}</td>"
            for cell in (side, one["generation"], one["version"], one["status"], one["snapshot"])
        )
        + "</tr>"
        for side, one in (("old", content.old), ("new", content.new))
    )
    head = "".join(f"<th>{name}</th>" for name in ("", "generation", "version", "status", "began from"))
    return _section(
        "Generations",
        "The new one began behind a micro-batch of the old one; rows before that are not compared.",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>',
    )


def number(value: float | None, form: str) -> str:
    """Write a number, or a dash where there is none."""
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
