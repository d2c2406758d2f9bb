"""The HTML of a model's page and of the list of models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from dags.kalman_dags.pages.missing import Intervals
from dags.kalman_dags.places import model_page as address
from dags.kalman_dags.places import report_page, warehouse
from jobs.core.roots import local_path
from jobs.specs.model_spec import ModelSpec

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #8884; padding: .3rem .6rem .3rem 0; text-align: left; vertical-align: top; }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.quiet { opacity: .7; }
"""

TABLES = (
    ("measurements", "what has landed"),
    ("estimates", "live and earlier estimates of the stream"),
    ("latest", "the newest state of each key"),
    ("estimates_history", "estimates of history, in batch"),
    ("forecasts", "forecasts of each key"),
    ("forecast_skill", "forecasts beside what was measured later"),
    ("windows", "the monitor's windows"),
    ("alerts", "the monitor's alerts"),
    ("archive", "last states of keys that have ended"),
)
"""The tables of a model, by their folder in the warehouse."""

COMMANDS = (
    ("status", "versions, position, lag, drivers"),
    ("quarantine list", "rows that were refused, and why"),
    ("verify --share 1%", "recompute estimates and compare them to the bit"),
    ("upgrade --dry-run", "what would become of the states with the deployed spec"),
    ("stop", "stop the stream, whoever started it"),
    ("resume", "take the stop back"),
)
"""What a person at a terminal may want, and what it does."""


class Dag(NamedTuple):
    """A DAG in Airflow: its name, what it does, whether it is paused."""

    dag_id: str
    title: str
    description: str
    paused: bool


def index_page(specs: Sequence[ModelSpec], root: str) -> str:
    """Return the list of models; `root` is the path of Airflow's address."""
    rows = [
        (_link(f"{root}{address(spec.name)}", spec.name), str(spec.version), escape(spec.description or ""))
        for spec in specs
    ]
    body = _table(("model", "version", "what it is"), rows) if rows else "<p>There is no model to see.</p>"
    return _page("Kalman models", f"<h1>Kalman models</h1>{body}")


def model_page(
    spec: ModelSpec, dags: Sequence[Dag], reports: Sequence[str], intervals: Intervals | None, root: str
) -> str:
    """Return a model's page: its DAGs, tables, reports and commands."""
    listed = [
        (
            _link(f"{root}/dags/{quote(one.dag_id)}", one.title),
            escape(one.description),
            "paused" if one.paused else "on",
        )
        for one in dags
    ]
    parts = [
        f"<h1>{escape(spec.name)}</h1><p>Version {spec.version}. {escape(spec.description or '')}</p>",
        f"<p class=quiet>spec <code>{escape(str(spec.source_path))}</code></p>",
        "<h2>DAGs</h2>" + (_table(("DAG", "does", ""), listed) if listed else "<p>Airflow has none yet.</p>"),
        *_landed(intervals),
        "<h2>Reports</h2>" + _reports(spec.name, reports, root),
        "<h2>Tables</h2>" + _table(("table", "has", ""), list(_tables(spec.name))),
        "<h2>Commands</h2>" + _table(("", ""), list(_commands(spec.name))),
        f"<p>{_link(f'{root}/kalman/', 'all models')}</p>",
    ]
    return _page(spec.name, "".join(parts))


def _landed(intervals: Intervals | None) -> list[str]:
    if intervals is None:
        return []
    count = len(intervals.missing)
    names = ", ".join(f"<code>{escape(one)}</code>" for one in intervals.missing[-20:])
    missing = (
        f"<b>{count:,} missing</b>: {names}{' and earlier ones' if count > 20 else ''}"
        if count
        else "none missing"
    )
    return [
        f"<h2>Intervals landed</h2><p>{intervals.landed:,} from <code>{escape(intervals.first)}</code> to "
        f"<code>{escape(intervals.last)}</code>, {missing}.</p>"
    ]


def _reports(model: str, names: Sequence[str], root: str) -> str:
    links = [f"<li>{_link(root + (report_page(f'{model}/{name}') or ''), name)}</li>" for name in names]
    return f"<ul>{''.join(links)}</ul>" if links else "<p>There is none yet.</p>"


def _tables(model: str) -> Iterable[tuple[str, ...]]:
    """Yield the rows of the list of tables; of a remote warehouse nobody looks whether they are there."""
    folder = local_path(warehouse())
    for name, what in TABLES:
        place = f"{warehouse().rstrip('/')}/{name}/{model}"
        there = folder is None or (folder / Path(name) / model / "_delta_log").is_dir()
        yield (
            f"<code>{escape(place)}</code>",
            escape(what),
            "" if there else "<span class=quiet>not yet</span>",
        )


def _commands(model: str) -> Iterable[tuple[str, ...]]:
    for words, what in COMMANDS:
        verb, _, rest = words.partition(" ")
        if verb == "quarantine":
            verb, rest = words, ""
        said = " ".join(filter(None, ("kalman-pipeline", verb, "--model", model, rest)))
        yield f"<code>{escape(said)}</code>", escape(what)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; the cells are HTML."""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _link(href: str, text: str) -> str:
    # Airflow shows the page in a frame of its own: links leave it.
    return f'<a href="{escape(href)}" target="_top">{escape(text)}</a>'


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>"
    )
