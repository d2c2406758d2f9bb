"""The files of a warehouse's reports, and an index page with one row for each model. Needs no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from jobs.core.html_page import format_links, format_page, format_paragraph, format_section, format_table
from jobs.core.report import format_count
from jobs.lineage.catalog import Catalog
from jobs.storage.files import REPORTS, SmallFiles, open_files
from jobs.storage.warehouse import Tables
from jobs.supervision.progress import read_all_records

HEALTH, INDEX = "health.html", "index.html"


class IndexEntry(NamedTuple):
    """A row of the index: a model's live generation, last micro-batch, number of quarantined rows, and pages."""

    model: str
    live: str
    version: int | None
    last: dict[str, Any] | None
    held: int
    pages: list[str]


def report_files(warehouse: Tables, model: str, generation: str) -> tuple[SmallFiles, tuple[str, str]]:
    """Return the folder of a model's reports, and the names of the JSON file and of the page of a generation."""
    return warehouse.files(f"{REPORTS}/{model}"), (f"{generation}.json", f"{generation}.html")


def write_page(root: str, model: str, text: str) -> str:
    """Write the page on a model's health, atomically, and return its path."""
    open_files(f"{root}/{REPORTS}/{model}").write(HEALTH, text.encode())
    return f"{root}/{REPORTS}/{model}/{HEALTH}"


def write_index(root: str, models: Sequence[str]) -> tuple[str, list[IndexEntry]]:
    """Write the index of the given models and of all models with a report; return its path and its entries."""
    there = [name for name in open_files(f"{root}/{REPORTS}").names("") if "." not in name]
    catalog = Catalog(Tables(root))
    entries = [_read_entry(catalog, model) for model in sorted({*models, *there})]
    open_files(f"{root}/{REPORTS}").write(INDEX, build_index(entries).encode())
    return f"{root}/{REPORTS}/{INDEX}", entries


def _read_entry(catalog: Catalog, model: str) -> IndexEntry:
    root, live = catalog.warehouse.root, catalog.live(model)
    records = read_all_records(catalog.warehouse, model)
    pages = [name for name in open_files(f"{root}/{REPORTS}/{model}").names("") if name.endswith(".html")]
    return IndexEntry(
        model,
        live.generation if live else "none",
        live.model_version if live else None,
        records[-1] if records else None,
        catalog.count_quarantined_rows(model),
        sorted(pages, key=lambda name: (name != HEALTH, name)),
    )


def build_index(entries: Sequence[IndexEntry]) -> str:
    """Return the index page as HTML."""
    rows = []
    for one in entries:
        last, folder = one.last or {}, quote(one.model, errors="replace")
        waiting = last.get("lag_rows")
        rows.append(
            [
                one.model,
                one.live,
                "–" if one.version is None else str(one.version),
                "–" if one.last is None else f"{last['started_at'].astimezone(UTC):%Y-%m-%d %H:%M}",
                "–" if waiting is None else f"{waiting:,}",
                f"{one.held:,}",
                format_links((f"{folder}/{quote(name)}", _format_report_name(name)) for name in one.pages),
            ]
        )
    head = (
        "model",
        "live",
        "version",
        "last micro-batch (UTC)",
        "rows waiting then",
        "in quarantine",
        "reports",
    )
    text = f"{format_count(len(entries), 'model')}, as of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    none = "There is no model yet: `kalman-pipeline init --input FILE` writes a first spec."
    body = format_table(head, rows) if rows else format_paragraph(none)
    more = "`kalman-pipeline report --model M` writes a model's health, and `--compare` a comparison of two versions."
    return format_page("Reports", format_paragraph(text), format_section("Models", more, body))


def _format_report_name(name: str) -> str:
    return "health" if name == HEALTH else f"comparison of {name.removesuffix('.html')}"
