"""The parts of a self-contained HTML page: head and style, sections, cards, tables, pictures.

All functions escape their texts. The page fits a phone, because wide parts scroll within their own boxes. The page is
made without a template engine: its import and first template would cost each `report` 30 ms of CPU.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from jobs.core.redaction import escape_unprintable, shorten_text

_UNFIT = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NO_PICTURES = "Pictures need matplotlib: pip install 'kalman-pipeline[demo]', then run the report again."


def can_draw() -> bool:
    """Return whether matplotlib, which is optional, is installed."""
    return find_spec("matplotlib") is not None


class Card(NamedTuple):
    """A number, its name, and a note about the number's goal or parts."""

    value: str
    name: str
    more: str = ""


def escape_html(text: str) -> str:
    """Return a text as HTML, with escapes for characters that reverse a text or that no page can have."""
    return _UNFIT.sub(lambda one: escape_unprintable(one[0]), html.escape(text))


def format_page(title: str, *parts: str) -> str:
    """Return a whole page with a title and, below it, parts in HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape_html(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><h1>{escape_html(title)}</h1>{''.join(parts)}"
        "</main></body></html>\n"
    )


def format_paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph, in which text in backticks becomes code; kind: CSS class, such as `verdict good`."""
    named = f' class="{escape_html(kind)}"' if kind else ""
    return f"<p{named}>{mark_code(text)}</p>"


def format_section(title: str, text: str, *parts: str) -> str:
    """Return a section with a title, a text and, below them, parts in HTML."""
    above = f"<h2>{escape_html(title)}</h2>{format_paragraph(text) if text else ''}"
    return f"<section>{above}{''.join(parts)}</section>"


def format_cards(some: Iterable[Card]) -> str:
    """Return cards side by side, as many in a row as fit."""
    parts = [
        f'<div class="card"><b>{escape_html(one.value)}</b><span>{escape_html(one.name)}</span>'
        f"<small>{escape_html(one.more)}</small></div>"
        for one in some
    ]
    return f'<div class="cards">{"".join(parts)}</div>'


class Html(str):
    """HTML that the functions of this module insert without escapes."""


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]], of_texts: bool = False) -> str:
    """Return a table. On a phone, a table with many columns shows its cells below each other.

    The cells are texts or `Html`. of_texts: whether to align the columns as texts, not as numbers.
    """
    names = [escape_html(name) for name in head]
    top = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{name}">{_format_cell(cell)}</td>' for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    kind = " ".join([*(["many"] if len(names) > MANY else []), *(["texts"] if of_texts else [])])
    return f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _format_cell(text: str) -> str:
    """Return a cell's text, in which long names may break after an underscore, as some names are wider than a phone."""
    if isinstance(text, Html):
        return text
    shown = escape_html(shorten_text(text, 1000, "…"))
    return re.sub(r"\S{16,}", lambda word: word[0].replace("_", "_<wbr>"), shown)


MANY = 5
"""Number of columns that fit side by side on a phone. A table with more columns shows its cells below each other, each
with the name of its column.
"""


def format_bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """Return bars below each other; each bar has a name, a length from 0 to 1, and a number."""
    parts = [
        f'<div class="bar"><span>{escape_html(name)}</span><i style="width:{100 * min(max(share, 0.0), 1.0):.2f}%"></i>'
        f"<b>{escape_html(number)}</b></div>"
        for name, share, number in rows
    ]
    return f'<div class="bars">{"".join(parts)}</div>'


def format_picture(source: str, alt: str) -> str:
    """Return a picture as wide as its column, which a phone scrolls sideways; source: a data URI."""
    return f'<div class="wide"><img alt="{escape_html(alt)}" src="{source}"></div>'


def format_pictures(some: Iterable[tuple[str, str]]) -> str:
    """Return pictures (data URI, description) of half the page's width; on a phone they stand below each other."""
    return place_side_by_side(*(format_half_picture(source, alt) for source, alt in some))


def format_half_picture(source: str, alt: str) -> str:
    """Return a picture of half the page's width; source: a data URI."""
    return f'<img class="half" alt="{escape_html(alt)}" src="{source}">'


def place_side_by_side(*parts: str) -> str:
    """Return parts in HTML, two side by side; on a phone they stand below each other."""
    return f'<div class="two">{"".join(parts)}</div>'


def format_link(target: str, text: str) -> Html:
    """Return a link that opens outside the frame in which Airflow shows the page."""
    return Html(f'<a href="{escape_html(target)}" target="_top">{escape_html(text)}</a>')


def format_links(some: Iterable[tuple[str, str]]) -> Html:
    """Return links (target, text) below each other."""
    return Html("<br>".join(format_link(target, text) for target, text in some))


def mark_code(text: str) -> Html:
    """Return a text, in which text in backticks becomes code."""
    return Html(re.sub("`([^`]+)`", r"<code>\1</code>", escape_html(text)))


def format_code(text: str) -> Html:
    """Return a text as code."""
    return Html(f"<code>{escape_html(text)}</code>")


STYLE = """
:root { color-scheme: light; --ink: #1f2733; --soft: #5b6675; --line: #e1e6ec; } * { box-sizing: border-box; } body
{ margin: 0; background: #f5f7fa; color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans",
sans-serif; overflow-wrap: anywhere; } main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; } h1
{ font-size: 1.9rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.01em; } h2 { font-size: 1.2rem; margin:
0 0 .4rem; } p { margin: 0 0 1rem; color: var(--soft); max-width: 78ch; } a { color: #2563a8; } .verdict { padding:
.7rem 1rem; border-radius: 8px; max-width: none; font-weight: 600; } .verdict.good { background: #e4f3ea; color:
#14532d; } .verdict.bad { background: #fbe5e8; color: #8f1230; } .verdict.neutral { background: #e9edf2; color:
#3d4856; } .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(155px, 100%), 1fr)); gap:
.8rem; margin: 1.25rem 0 1.5rem; } .card { background: #fff; border: 1px solid var(--line); border-radius: 10px;
padding: .9rem 1rem; display: flex; flex-direction: column; } .card b { font-size: 1.55rem; line-height: 1.2;
font-variant-numeric: tabular-nums; } .card span { font-weight: 600; font-size: .92rem; } .card small { color:
var(--soft); } section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 1.25rem;
margin-bottom: 1.25rem; } img { width: 100%; height: auto; display: block; } .wide { overflow-x: auto; } .two {
display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); } .two > * {
min-width: 0; } table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric:
tabular-nums; } th, td { padding: .45rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
white-space: nowrap; } th:first-child, td:first-child, .texts :is(th, td) { text-align: left; } td:last-child, .many
td { white-space: normal; overflow-wrap: normal; } td:last-child { min-width: 6rem; } th { color: var(--soft);
font-weight: 600; white-space: normal; overflow-wrap: normal; vertical-align: bottom; } tr:last-child td {
border-bottom: 0; } .bar { display: grid; grid-template-columns: minmax(0, 14rem) 1fr auto; gap: .2rem .8rem;
align-items: center; padding: .25rem 0; font-size: .92rem; } .bar i { display: block; height: .8rem; background:
#2563a8; border-radius: 3px; min-width: 2px; } .bar b { font-variant-numeric: tabular-nums; font-weight: 600; }
@media (max-width: 640px) { main { padding: 1.25rem .75rem 3rem; } h1 { font-size: 1.5rem; } section { padding: 1rem
.8rem; } .cards { grid-template-columns: 1fr 1fr; } .card { padding: .7rem .75rem; } .card b { font-size: 1.25rem; }
table { font-size: .8rem; } th, td { padding: .4rem .25rem; white-space: normal; overflow-wrap: normal; }
th:first-child, td:first-child { padding-left: 0; } td:first-child { min-width: 4rem; overflow-wrap: anywhere; }
td:last-child { min-width: 3rem; overflow-wrap: anywhere; } .many thead { display: none; } .many tr { display:
block; padding: .5rem 0; border-bottom: 1px solid var(--line); } .many tr:last-child { border-bottom: 0; } .many td,
.many td:first-child { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0;
text-align: right; } .many td::before { content: attr(data-name); color: var(--soft); text-align: left; white-space:
nowrap; } .wide > img { width: 720px; max-width: none; } .bar { grid-template-columns: 1fr auto; } .bar i {
grid-row: 2; grid-column: 1 / 3; } }
"""
