"""Names, checkpoints, tables and status of the queries over a model's live estimates (monitor and forecast skill).

A query's name is `monitor-<model>-windows-<definition>`, `monitor-<model>-rules-<definition>` or
`skill-<model>-<definition>`. A changed definition is a new query: it starts at the first estimate and leaves the former
query's rows in the table. The rows of a definition belong to its checkpoint: without it they are computed anew.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.table import Table

from jobs.lineage.generations import read_generations, trace_live_lineage
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint, checkpoint_of
from jobs.storage.files import SmallFiles
from jobs.storage.row_changes import delete_rows
from jobs.storage.table_rows import Filter
from jobs.storage.tables import alerts, estimates, forecast_skill, rule_states, windows, windows_open
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_log import CAUGHT_UP, DriverLog
from jobs.supervision.driver_status import format_log_name, resume_command
from jobs.supervision.progress import measure_table_lag

if TYPE_CHECKING:
    from jobs.spark.warehouse import Warehouse


MONITOR, SKILL = "monitor", "skill"
VERBS = (MONITOR, SKILL)
APPLICATIONS = "_followers"
"""Folder of files that map each checkpoint to the application name of its Delta transactions."""
SOURCES = 2
"""Maximum number of sources of a query: the skill reads estimates as origins of forecasts, and as their outcomes."""

_KINDS: dict[tuple[str, str], Callable[[str], str]] = {
    (MONITOR, "windows"): windows,
    (MONITOR, "rules"): alerts,
    (SKILL, ""): forecast_skill,
}


class Query(NamedTuple):
    """Query over the live estimates; part: windows or rules of a monitor, empty for the skill."""

    verb: str
    part: str
    model: str
    definition: str

    @property
    def name(self) -> str:
        """Return the query's name, which is also its checkpoint's name."""
        return f"{_prefix(self.verb, self.part, self.model)}{self.definition}"

    @property
    def checkpoint(self) -> str:
        """Return the checkpoint's folder in the warehouse."""
        return checkpoint_of(self.name)

    @property
    def table(self) -> str:
        """Return the table that the query writes."""
        return _KINDS[self.verb, self.part](self.model)

    @property
    def adopted_file(self) -> str:
        """Return the name of the monitor's file that names the export with which the query begins."""
        return f"adopted-{self.definition}.json"

    def name_view_file(self, source: int) -> str:
        """Return the name of the file in `APPLICATIONS` with the view of a source (`jobs.downstream.views`)."""
        return f"{self.name}-view-{source}.json"

    @property
    def rows(self) -> Filter:
        """Return the filter of the query's rows in its tables."""
        return [[("definition", "=", self.definition)]]


def list_queries(spec: ModelSpec, verb: str) -> list[Query]:
    """Return the queries that a spec defines."""
    found = []
    if verb == MONITOR and spec.monitor is not None:
        for part in ("windows", "rules"):
            if getattr(spec.monitor, part):
                found.append(Query(verb, part, spec.name, spec.monitor.definition(part)))
    if verb == SKILL and spec.forecast is not None:
        found.append(Query(verb, "", spec.name, spec.forecast.definition()))
    return found


def find_query(model: str, folder: str) -> Query | None:
    """Return a model's query with this checkpoint folder, or None if no query has it."""
    for verb, part in _KINDS:
        prefix = _prefix(verb, part, model)
        if folder.startswith(prefix):
            return Query(verb, part, model, folder.removeprefix(prefix))
    return None


def list_downstream_tables(model: str) -> list[str]:
    """Return the names of a model's downstream tables, whether they exist or not."""
    return [*(table(model) for table in _KINDS.values()), windows_open(model)]


class Started(NamedTuple):
    """How a query's checkpoint began; Spark continues it unchanged.

    application: name of its Delta transactions
    is_outer: whether the skill's join returns unmatched forecasts; joins of earlier releases do not
    with_state: whether the skill's join has the filter's states
    """

    application: str
    is_outer: bool
    with_state: bool


def begin_query(warehouse: Warehouse, query: Query, with_state: bool = False) -> Started:
    """Return how a query's checkpoint began, or begin it, with states or without.

    A new checkpoint counts micro-batches from 0, and Delta would skip them under an old name. A new checkpoint also
    removes the rows of its definition that a deleted checkpoint left.
    """
    notes = warehouse.files(APPLICATIONS)
    if Checkpoint(warehouse, query.checkpoint).find_last_planned() is None:
        remove_results(warehouse, query)
        application = f"{query.name}-{uuid.uuid4().hex[:8]}"
        note = {"application": application, "outer": True, "state": with_state}
        notes.write(f"{query.name}.json", json.dumps(note).encode())
        return Started(application, True, with_state)
    kept = notes.read(f"{query.name}.json")
    if kept is None:  # began in an early release
        return Started(query.name, False, False)
    note = json.loads(kept)
    return Started(note["application"], note.get("outer", False), note.get("state", False))


def remove_results(warehouse: Warehouse, query: Query) -> int:
    """Remove a query's rows and files, except its checkpoint; return the number of rows. Idempotent."""
    kept, notes = open_monitor_files(warehouse, query.model), warehouse.files(APPLICATIONS)
    for name in kept.names("") if query.verb == MONITOR else ():
        if name in (f"{query.name}.json", f"watermark-{query.definition}.json"):
            kept.remove(name)
    for name in (f"{query.name}.json", *map(query.name_view_file, range(SOURCES))):
        notes.remove(name)
    if query.part == "windows":
        delete_rows(warehouse, windows_open(query.model), query.rows)
    return delete_rows(warehouse, query.table, query.rows)


def open_monitor_files(warehouse: Tables, model: str) -> SmallFiles:
    """Return the files of a model's monitor: notes on its queries, exports of the states of rules, and watermarks."""
    return warehouse.files(f"_monitor/{model}")


def remove_exports(warehouse: Warehouse, query: Query) -> None:
    """Remove the exports of a query's states. Idempotent."""
    if query.part != "rules":
        return
    files = open_monitor_files(warehouse, query.model)
    for name in files.names(""):
        if name.startswith(f"export-{query.name}-"):
            files.remove(name)
    # The range of all texts with this prefix: "." is the character after "-".
    mine = [[("export", ">=", f"{query.name}-"), ("export", "<", f"{query.name}.")]]
    delete_rows(warehouse, rule_states(query.model), mine)


def open_driver_log(warehouse: Tables, verb: str, model: str) -> DriverLog:
    """Return the log of drivers of a model's stream, monitor or skill."""
    return DriverLog.at(warehouse.root, format_log_name(verb, model))


def _prefix(verb: str, part: str, model: str) -> str:
    return f"{verb}-{model}-{part}-" if part else f"{verb}-{model}-"


def read_downstream_status(warehouse: Tables, model: str) -> list[dict[str, Any]]:
    """Return the status of a model's monitor and forecast skill, if they have ever run.

    It describes the last driver's queries; the lag is the largest lag of these queries.
    """
    found = []
    for verb in VERBS:
        last = open_driver_log(warehouse, verb, model).last(verb)
        if last is None:
            continue
        names = last.queries or []
        queries = [query for query in (find_query(model, name) for name in names) if query is not None]
        owner, running = last.owner, last.runs
        found.append(
            {
                "follower": verb,
                "queries": names,
                **_progress(warehouse, model, queries),
                "driver": {"host": owner.host, "pid": owner.pid} if running else None,
                # A killed driver did not record its end.
                "driver_lost": last.ended_at is None and not running,
                "ended": None if running else last.how,
                "last_error": None if running else last.error,
                "heartbeat": last.beat_at,
            }
        )
    return found


def _progress(warehouse: Tables, model: str, queries: list[Query]) -> dict[str, Any]:
    """Return the number of micro-batches, the time of the last commit, and the lag behind the live estimates."""
    checkpoints = [Checkpoint(warehouse, query.checkpoint) for query in queries]
    positions = [(one, None if one.find_damage() else one.find_progress()) for one in checkpoints]
    started = [(one, at) for one, at in positions if at is not None]
    nothing = {"batches": 0, "last_batch_at": None, "rows_behind": None, "seconds_behind": None}
    if not started or not warehouse.exists(estimates(model)):
        return nothing
    known = read_generations(warehouse, model)
    others = {one.generation for one in known} - {one.generation for one in trace_live_lineage(known)}
    lag = measure_table_lag(warehouse, estimates(model), min(at.version for _, at in started), others)
    return {
        "batches": sum(at.batch + 1 for _, at in started),
        "last_batch_at": max(one.committed_at(at.batch) for one, at in started),
        "rows_behind": lag.rows,
        "seconds_behind": lag.seconds,
    }


def list_given_up(warehouse: Tables, model: str) -> list[str]:
    """Return a sentence for each driver of a model that Airflow no longer restarts because it kept crashing."""
    found = []
    for verb in ("stream", *VERBS):
        hold = open_driver_log(warehouse, verb, model).hold()
        if hold is not None and hold.crashes is not None:
            found.append(
                f"its {verb} was given up at {hold.began_at:%Y-%m-%d %H:%M} UTC: {hold.reason}; fix that, then run "
                f"`{resume_command(verb, model)}`"
            )
    return found


def build_downstream_table(data: list[dict[str, Any]]) -> Any:
    """Return the table of all models' downstream queries, or None without queries."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("model", "downstream", "lag", "last micro-batch", "driver"):
        table.add_column(column, justify="right" if column == "lag" else "left")
    for model in data:
        for one in model["followers"]:
            at: datetime | None = one["last_batch_at"]
            lag = one["rows_behind"]
            table.add_row(
                model["model"],
                one["follower"],
                "-" if lag is None else f"{lag:,} rows",
                "-" if at is None else f"{at.astimezone(UTC):%m-%d %H:%M:%S}",
                format_driver(one),
            )
    return table if table.row_count else None


def format_driver(one: dict[str, Any]) -> str:
    """Return the driver of a generation or query as text, and how the last driver of a query has ended."""
    driver, beat = one["driver"], one["heartbeat"]
    if driver is not None:
        return f"process {driver['pid']} on {driver['host']}"
    if one["driver_lost"]:
        return "lost" if beat is None else f"lost, last seen {beat.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    if "ended" not in one:
        return "none"
    # After `caught up`, rows may have come since.
    ended = "ended" if one["ended"] == CAUGHT_UP and one["rows_behind"] else one["ended"]
    return f"none ({ended})" + (f": {one['last_error']}" if one["last_error"] else "")
