"""Report a model's downstream queries, and the drivers that Airflow no longer restarts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.table import Table

from jobs.downstream.queries import VERBS, Query, find_query, open_driver_log
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import estimates
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_status import resume_command
from jobs.supervision.progress import measure_table_lag


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
    """Return the number of micro-batches, the time of the last commit, and the lag behind the estimates."""
    checkpoints = [Checkpoint(warehouse, query.checkpoint) for query in queries]
    positions = [(one, None if one.find_damage() else one.find_progress()) for one in checkpoints]
    started = [(one, at) for one, at in positions if at is not None]
    nothing = {"batches": 0, "last_batch_at": None, "rows_behind": None, "seconds_behind": None}
    if not started or not warehouse.exists(estimates(model)):
        return nothing
    lag = measure_table_lag(warehouse, estimates(model), min(at.version for _, at in started))
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
                _driver(one),
            )
    return table if table.row_count else None


def _driver(one: dict[str, Any]) -> str:
    if one["driver"] is not None:
        return f"process {one['driver']['pid']} on {one['driver']['host']}"
    if one["driver_lost"]:
        return f"lost, last seen {one['heartbeat'].astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"none ({one['ended']})" + (f": {one['last_error']}" if one["last_error"] else "")
