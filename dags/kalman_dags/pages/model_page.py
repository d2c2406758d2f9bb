"""The HTML of a model's page and of the list of models."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from dags.kalman_dags.pages.missing import Intervals
from dags.kalman_dags.pages.waiting import WaitingRun
from dags.kalman_dags.places import find_model_page as address
from dags.kalman_dags.places import find_models_path, find_warehouse_root, report_page
from jobs.core.html_page import (
    Html,
    format_code,
    format_link,
    format_links,
    format_page,
    format_paragraph,
    format_section,
    format_table,
    mark_code,
)
from jobs.core.settings import find_local_path
from jobs.specs.model_spec import ModelSpec

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
"""The tables of a model, by their folder in the warehouse, with their content."""

COMMANDS = (
    ("status", "versions, position, lag, drivers"),
    ("quarantine list", "rows that were refused, and why"),
    ("verify --share 1%", "recompute estimates and compare them to the bit"),
    ("upgrade --dry-run", "what would become of the states with the deployed spec"),
    ("stop", "stop the stream, whoever started it"),
    ("resume", "take the stop back"),
)
"""Commands for a person at a terminal, and their effect."""


class Dag(NamedTuple):
    """A DAG in Airflow: its name, title and description, and whether it is paused."""

    dag_id: str
    title: str
    description: str
    paused: bool


def build_index_page(specs: Sequence[ModelSpec], live: Mapping[str, str], root: str) -> str:
    """Return the list of models; live: the live version of each; root: the path prefix of Airflow's address."""
    links = [format_link(f"{root}{address(one.name)}", one.name) for one in specs]
    rows = [
        (link, live[one.name], str(one.version), one.description or "")
        for link, one in zip(links, specs, strict=True)
    ]
    body = _build_table(("model", "live", "deployed", "what it is"), rows, "There is no model to see.")
    return format_page("Kalman models", body)


def build_model_page(
    spec: ModelSpec,
    now: Mapping[str, str],
    dags: Sequence[Dag],
    waiting: Sequence[WaitingRun],
    reports: Sequence[str],
    intervals: Intervals | None,
    root: str,
) -> str:
    """Return a model's page: what is live now (`describe_model`), waiting runs, DAGs, tables, reports and commands."""
    links = [format_link(f"{root}/dags/{quote(one.dag_id)}", one.title) for one in dags]
    states = ["paused" if one.paused else "on" for one in dags]
    listed = list(zip(links, (one.description for one in dags), states, strict=True))
    written = [(f"{root}{report_page(f'{spec.name}/{name}') or ''}", name) for name in reports]
    commands = [(what, format_code(write_command(words, spec.name))) for words, what in COMMANDS]
    table = _build_table(("", ""), [(name, _complete(text)) for name, text in now.items()])
    parts = [
        format_paragraph(spec.description or ""),
        format_section("Now", f"The deployed spec is version {spec.version}, `{spec.source_path}`.", table),
        _format_waiting(waiting, root),
        format_section("DAGs", "", _build_table(("DAG", "does", ""), listed, "Airflow has none yet.")),
        "" if intervals is None else format_section("Intervals landed", _format_landed(intervals)),
        format_section("Reports", "" if written else "There is none yet.", format_links(written)),
        format_section("Tables", "", _build_table(("table", "has", ""), list(_list_tables(spec.name)))),
        format_section("Commands", "For a shell on this machine.", _build_table(("", ""), commands)),
        format_link(f"{root}/kalman/", "all models"),
    ]
    return format_page(spec.name, *parts)


def _format_waiting(waiting: Sequence[WaitingRun], root: str) -> str:
    """Return the section of runs that wait; empty if none waits."""
    rows = []
    for dag_id, run_id, reason, remedy, asks in waiting:
        target = f"{root}/dags/{quote(dag_id)}/runs/{quote(run_id)}"
        if asks:
            remedy = format_link(f"{target}/tasks/{quote(asks)}/required_actions", remedy)
        rows.append((format_link(target, dag_id.partition("__")[0].removeprefix("kalman_")), reason, remedy))
    head = ("run of", "waits because", "what to do")
    return format_section("Runs that wait", "", _build_table(head, rows)) if rows else ""


def _format_landed(intervals: Intervals) -> str:
    count = len(intervals.missing)
    names = ", ".join(f"`{one}`" for one in intervals.missing[-20:])
    missing = (
        f"{count:,} missing: {names}{' and earlier ones' if count > 20 else ''}" if count else "none missing"
    )
    return f"{intervals.landed:,} from `{intervals.first}` to `{intervals.last}`, {missing}."


def _list_tables(model: str) -> Iterable[tuple[str, ...]]:
    """Yield the rows of the list of tables; for a remote warehouse the tables' existence is not checked."""
    folder = find_local_path(find_warehouse_root())
    for name, what in TABLES:
        there = folder is None or (folder / Path(name) / model / "_delta_log").is_dir()
        path = f"{find_warehouse_root().rstrip('/')}/{name}/{model}"
        yield format_code(path), what, "" if there else "not yet"


def write_command(words: str, model: str) -> str:
    """Return a command for a model that runs from any folder, without Airflow's environment."""
    beside = Path(sys.executable).with_name("kalman-pipeline")
    program = str(beside) if beside.exists() else beside.name
    options = {"--model": model, "--warehouse": find_warehouse_root(), "--models": find_models_path()}
    return shlex.join([program, *words.split(), *(part for option in options.items() for part in option)])


def _complete(text: str) -> Html:
    """Return a sentence as HTML, with its commands as `write_command` writes them."""
    return mark_code(
        re.sub(
            r"`kalman-pipeline ([^`]+?) --model ([^\s`]+)",
            lambda one: f"`{write_command(*one.groups())}",
            text,
        )
    )


def _build_table(head: Sequence[str], rows: Sequence[Sequence[str]], otherwise: str = "") -> str:
    return format_table(head, rows, of_texts=True) if rows else format_paragraph(otherwise)
