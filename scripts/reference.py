"""Write the pages of docs/ that follow from the code: `python scripts/reference.py`. A test holds them to it.

`tables.md` comes from the tables' columns and their comments, `commands.md` from the content of `--help`, and the list
in `environment.md` from the variables that the code reads.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.cli import VERBS  # noqa: E402
from jobs.core.command import build_application  # noqa: E402
from jobs.storage import tables  # noqa: E402
from jobs.storage.dictionary import TABLES  # noqa: E402
from jobs.storage.measurements_table import NEW_KEYS_COLUMNS  # noqa: E402
from jobs.supervision.progress import SCHEMA as PROGRESS  # noqa: E402

DOCS = ROOT / "docs"
MADE = "<!-- Made by scripts/reference.py from the code; change it there. -->\n"
SCHEMAS = {
    "quarantine": tables.QUARANTINE,
    "late_copies": tables.LATE_COPIES,
    "live": tables.LIVE_ESTIMATES,
    "snapshots": tables.SNAPSHOTS,
    "manifests": tables.MANIFESTS,
    "generations": tables.GENERATIONS,
    "learned": tables.LEARNED,
    "waiting": tables.WAITING_ROWS,
    "remembered_ids": tables.REMEMBERED_IDS,
    "new_keys": NEW_KEYS_COLUMNS,
    "progress": PROGRESS,
    "verifications": tables.VERIFICATIONS,
    "verified_ends": tables.VERIFIED_ENDS,
}
"""Schemas, from the code, of tables whose columns do not depend on a spec."""
ONE_EACH = ("quarantine", "late_copies", "live", "snapshots", "manifests", "generations", "learned", "waiting",
            "remembered_ids", "verifications", "verified_ends")  # fmt: skip
"""Tables of all models together; the others have a model's name, as in estimates/nile."""
LIKE = {
    "estimates_history": "estimates",
    "latest": "estimates",
    "new_keys": "snapshots",
    "windows_open": "windows",
    "windows_history": "windows",
    "alerts_history": "alerts",
    "forecast_skill_history": "forecast_skill",
}
"""Tables whose sections refer to another table's, and describe only the columns that differ."""
SHARED = 3
"""A column is described once for all tables if so many have it with one type and one meaning."""

COMMON = 6
"""An option is described once for all verbs if so many have it with one meaning."""


class Option(NamedTuple):
    """An option of a command, as the page prints it."""

    names: str
    default: str
    help: str


_LIST, _NUMBER, _TEXT, _WHOLE, _TIME = "array<double>", "double", "string", "bigint", "timestamp"
_ESTIMATE_TYPES = {
    **dict.fromkeys(TABLES["estimates"].columns, _LIST),
    **dict.fromkeys(("key", "flags", "generation", "source_range"), _TEXT),
    **dict.fromkeys(("log_likelihood", "nis", "lagged_age"), _NUMBER),
    **dict.fromkeys(("batch_id", "state_index"), _WHOLE),
    "event_time": _TIME,
    "model_version": "int",
    "correction": "boolean",
}
_WINDOW_TYPES = {
    **dict.fromkeys(TABLES["windows"].columns, _WHOLE),
    **dict.fromkeys(("definition", "size", "slide"), _TEXT),
    **dict.fromkeys(("window_start", "window_end"), _TIME),
    **dict.fromkeys(("nis_sum", "mean_nis", "share_gated", "share_flagged"), _NUMBER),
    **dict.fromkeys(("mean_sum", "innovation_sum", "mean", "bias"), _LIST),
    "accumulators": "map<string, binary>",
    "aggregates": "map<string, double>",
}
_ALERT_TYPES = {
    **dict.fromkeys(("key", "rule", "status", "definition"), _TEXT),
    **dict.fromkeys(("event_time", "since"), _TIME),
    **dict.fromkeys(("readings", "batch_id"), _WHOLE),
    "value": _NUMBER,
}
_SKILL_TYPES = {
    **dict.fromkeys(TABLES["forecast_skill"].columns, _NUMBER),
    **dict.fromkeys(("key", "measurement", "horizon", "generation", "definition"), _TEXT),
    **dict.fromkeys(("made_at", "event_time"), _TIME),
    "inside": "boolean",
    "model_version": "int",
    "batch_id": _WHOLE,
}
_FORECAST_TYPES = {
    **dict.fromkeys(TABLES["forecasts"].columns, _LIST),
    **dict.fromkeys(("run", "key", "flag"), _TEXT),
    **dict.fromkeys(("made_at", "event_time"), _TIME),
    "step": _WHOLE,
}
_STATE_TYPES = {
    **dict.fromkeys(("key", "generation"), _TEXT),
    **dict.fromkeys(("state_index", "batch_id"), _WHOLE),
    **dict.fromkeys(("mean", "covariance"), _LIST),
    "event_time": _TIME,
    "log_likelihood": _NUMBER,
    "extras": "map<string, array<double>>",
    "model_version": "int",
}
_HISTORY_TYPES = {name: _ESTIMATE_TYPES.get(name, _LIST) for name in TABLES["estimates_history"].columns}
TYPES: dict[str, dict[str, str]] = {
    "measurements": {
        **dict.fromkeys(("_origin", "_topic", "_topic_id"), _TEXT),
        "_landed_at": _TIME,
        "_partition": "int",
        "_offset": _WHOLE,
    },
    "estimates": _ESTIMATE_TYPES,
    "latest": _ESTIMATE_TYPES,
    "estimates_history": _HISTORY_TYPES,
    "archive": _STATE_TYPES,
    **dict.fromkeys(("windows", "windows_open", "windows_history"), _WINDOW_TYPES),
    **dict.fromkeys(("alerts", "alerts_history"), _ALERT_TYPES),
    **dict.fromkeys(("forecast_skill", "forecast_skill_history"), _SKILL_TYPES),
    "forecasts": _FORECAST_TYPES,
}
"""Fixed column types of the tables whose columns depend on a spec."""


def columns_of(schema: str) -> dict[str, str]:
    """Return the types of the columns of a schema in DDL."""
    parts, depth = [""], 0
    for letter in " ".join(schema.split()):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return dict(part.strip().split(" ", 1) for part in parts)


def types_of(kind: str) -> dict[str, str]:
    """Return the types of a table's columns by name, in the order of the table."""
    return (
        columns_of(SCHEMAS[kind])
        if kind in SCHEMAS
        else {name: TYPES[kind][name] for name in TABLES[kind].columns}
    )


def _described(kind: str) -> dict[str, tuple[str, str]]:
    """Return the type and the sentence of each column of a table."""
    return {name: (one, TABLES[kind].columns[name]) for name, one in types_of(kind).items()}


def _shared() -> dict[str, tuple[str, str]]:
    """Return the columns that several tables have with one meaning."""
    found = Counter(column for kind in TABLES if kind not in LIKE for column in _described(kind).items())
    return {name: about for (name, about), count in found.items() if count >= SHARED}


def _column_table(columns: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the rows of a table of columns; no row if there is no column."""
    rows = [f"`{name}` | `{kind}` | {text}" for name, (kind, text) in columns.items()]
    return ["column | type | meaning\n---|---|---", *rows, ""] if rows else []


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in columns)


def _section(kind: str, shared: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the section of a table: its row, the columns described elsewhere, and the others."""
    name = kind if kind in ONE_EACH else f"{kind}/MODEL"
    parts, own = [f"## {kind}\n"], _described(kind)
    like = LIKE.get(kind)
    if like is not None:
        base = _described(like)
        absent = [column for column in base if column not in own]
        without = f" without {_names(absent)}" if absent else ""
        own = {column: about for column, about in own.items() if base.get(column) != about}
        elsewhere = f" Columns of [{like}](#{like}){without}{', and:' if own else '.'}"
    else:
        known = [column for column, about in own.items() if shared.get(column) == about]
        own = {column: about for column, about in own.items() if column not in known}
        elsewhere = f" [Shared columns](#shared-columns): {_names(known)}." if known else ""
    return [*parts, f"`{name}`: {TABLES[kind].row}{elsewhere}\n", *_column_table(own)]


def tables_page() -> str:
    """Return docs/tables.md, the data dictionary."""
    shared = _shared()
    parts = [
        "# Tables\n",
        MADE,
        "Every table is a Delta table below the warehouse's root. The sentences about columns are also comments\n"
        "in the tables' schemas. [readers.md](readers.md) reads the tables with other tools.\n",
        "The spec adds columns:\n",
        "- `measurements` has its columns of key, time, measurement and control.\n"
        "- `estimates`, `archive` and `windows` have its key columns, unless there is one text column named `key`.\n"
        "- `estimates` has columns of `outputs`, `smoothing`, `order` and the filter only if the spec uses them.\n",
        "Another version of the model keeps the tables: it adds columns and removes none.\n",
        "## Shared columns\n",
        "They mean the same in every table.\n",
        *_column_table(shared),
    ]
    for kind in TABLES:
        parts += _section(kind, shared)
    return "\n".join(parts).rstrip() + "\n"


def commands_page() -> str:
    """Return docs/commands.md, the reference of the command line."""
    app = build_application()
    for name, verb in VERBS.items():
        verb.add_to(app, name)
    root: Any = typer.main.get_command(app)
    leaves = [leaf for name, command in root.commands.items() for leaf in list_leaves(name, command)]
    rows = [(full, one, _options(one)) for full, one in leaves]
    counts = Counter(option for _, _, options in rows for option in options)
    shared = [option for option, count in counts.items() if count >= COMMON]
    parts = [
        "# Commands\n",
        MADE,
        "`kalman-pipeline VERB [OPTIONS]`. Every command is idempotent.\n",
        "| exit code | meaning |\n|---|---|\n| 1 | the run failed |\n| 2 | the input was refused |\n"
        "| 3 | another driver has the stream, or `--needed` found nothing to do |\n",
        "## Options of every verb\n",
        "They may stand before or after the verb.\n",
        *_option_table(_options(root)),
        "## Shared options\n",
        "They mean the same in every verb that names them.\n",
        *_option_table(shared),
    ]
    for full, one, options in rows:
        known = ", ".join(option.names for option in options if option in shared)
        text = " ".join((one.help or "").split())
        elsewhere = f" [Shared options](#shared-options): {known}." if known else ""
        parts += [f"## {full}\n", f"{text}{elsewhere}\n"]
        parts += _option_table([option for option in options if option not in shared])
    return "\n".join(parts).rstrip() + "\n"


def list_leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield a command, or each action of a verb that has actions, with its name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for action, one in command.commands.items():
        yield from list_leaves(f"{name} {action}", one)


def _options(command: Any) -> list[Option]:
    """Return the options and arguments of a command."""
    found = []
    for one in command.params:
        if one.name == "help":
            continue
        names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
        if one.param_type_name == "argument":
            names = f"`{one.name.upper()}`"
        default = "required" if one.required else format_default(one)
        found.append(Option(names, default, " ".join((one.help or "").split()).replace("|", "\\|")))
    return found


def _option_table(options: Iterable[Option]) -> list[str]:
    """Return the table of some options; no row if there is none."""
    rows = [f"{one.names} | {one.default} | {one.help}".replace("  ", " ") for one in options]
    return ["option | default | meaning\n---|---|---", *rows, ""] if rows else []


def format_default(one: Any) -> str:
    """Return the default of an option as code; empty for a flag and where there is none."""
    if one.is_flag or one.default in (None, False, [], ()) or callable(one.default):
        return ""
    return f"`{getattr(one.default, 'value', one.default)}`"


def variables() -> dict[str, list[str]]:
    """Return the environment variables of ours that the code reads, with the files that name them, sorted."""
    found: dict[str, list[str]] = {}
    places = [ROOT / name for name in ("jobs", "kalman", "dags", "demo", "scripts", "benchmarks", "tests")]
    files = [path for place in places for path in sorted(place.rglob("*")) if path.suffix in (".py", "")]
    for path in [*files, ROOT / "Makefile", ROOT / "docker-compose.yml", ROOT / "Dockerfile"]:
        if path.is_file() and path != Path(__file__) and "__pycache__" not in path.parts:
            for name in re.findall(
                r"\bKALMAN_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8", errors="ignore")
            ):
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return {name: sorted(set(paths)) for name, paths in sorted(found.items())}


PAGES = {"tables.md": tables_page, "commands.md": commands_page}

if __name__ == "__main__":
    for file, make in PAGES.items():
        (DOCS / file).write_text(make(), encoding="utf-8")
    for variable, paths in variables().items():
        print(variable, *paths)
