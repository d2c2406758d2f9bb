"""Write the pages of docs/ that follow from the code: `python scripts/reference.py`. A test holds them to it.

`tables.md` comes from the tables' columns and their comments, `commands.md` from the content of `--help`, and the list
in `environment.md` from the variables that the code reads.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.cli import VERBS  # noqa: E402
from jobs.core.command import application  # noqa: E402
from jobs.observability.progress import SCHEMA as PROGRESS  # noqa: E402
from jobs.storage import tables  # noqa: E402
from jobs.storage.dictionary import TABLES  # noqa: E402
from jobs.storage.measurements_table import NEW_KEYS_COLUMNS  # noqa: E402

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
"""Tables shared by all models; the others have a model's name, as in estimates/nile."""

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


def tables_page() -> str:
    """Return docs/tables.md, the data dictionary."""
    parts = [
        "# Tables\n",
        MADE,
        "Every table is a Delta table below the warehouse's root. The sentences here are the comments of the columns\n"
        "in the tables' own schemas. [readers.md](readers.md) reads them with other tools; which rows of `estimates`\n"
        "are live is there, too.\n",
        "Columns that depend on the spec: measurements have the spec's columns of key, time, measurement and control;\n"
        "estimates, archive and windows have the key's columns; some columns of estimates exist only if the spec asks\n"
        "for them (`outputs`, `smoothing`, `order`) or the filter has them. A model that goes on to another version\n"
        "keeps its tables: columns are added, none is removed.\n",
    ]
    for kind, one in TABLES.items():
        name = kind if kind in ONE_EACH else f"{kind}/MODEL"
        types = columns_of(SCHEMAS[kind]) if kind in SCHEMAS else TYPES[kind]
        parts += [f"## {kind}\n", f"`{name}`: {one.row}\n", "| column | type | |\n|---|---|---|"]
        order = [*(columns_of(SCHEMAS[kind]) if kind in SCHEMAS else one.columns)]
        parts += [f"| `{column}` | {types[column]} | {one.columns[column]} |" for column in order]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def commands_page() -> str:
    """Return docs/commands.md, the reference of the command line."""
    app = application()
    for name, verb in VERBS.items():
        verb.add_to(app, name)
    root: Any = typer.main.get_command(app)
    parts = [
        "# Commands\n",
        MADE,
        "`kalman-pipeline VERB [OPTIONS]`. Every command is idempotent. Exit code 1: the run failed; 2: the input was "
        "refused; 3: another driver has the stream, or there is nothing to do that `--needed` asks for.\n",
        "## Options of every verb\n",
        "They may stand before or after the verb.\n",
        *_options(root),
    ]
    for name, command in root.commands.items():
        for full, one in _leaves(name, command):
            parts += [f"## {full}\n", f"{' '.join((one.help or '').split())}\n", *_options(one)]
    return "\n".join(parts).rstrip() + "\n"


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield a command, or each action of a verb that has actions, with its name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for action, one in command.commands.items():
        yield from _leaves(f"{name} {action}", one)


def _options(command: Any) -> list[str]:
    """Return the table of a command's options."""
    rows = []
    for one in command.params:
        if one.name == "help":
            continue
        names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
        if one.param_type_name == "argument":
            names = f"`{one.name.upper()}`"
        default = "required" if one.required else _default(one)
        text = " ".join((one.help or "").split()).replace("|", "\\|")
        rows.append(f"| {names} | {default} | {text} |")
    return ["| option | default | |\n|---|---|---|", *rows, ""] if rows else [""]


def _default(one: Any) -> str:
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
