"""What `status` says of what follows a model's estimates, and of what Airflow has given up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from jobs.core import clock
from jobs.core.errors import first_line
from jobs.downstream.queries import VERBS, Query, lease_log, queries_of, query_of
from jobs.lineage.generations import stream_taken_error
from jobs.observability.lag import table_lag
from jobs.supervision.driver_identity import LIVENESS_SECONDS, DriverIdentity
from jobs.supervision.driver_log import CAUGHT_UP, FAILED, QUERIES, STOPPED, DriverRecord
from jobs.supervision.driver_status import LIVE, resume_command
from jobs.supervision.launcher import LAUNCH_VARIABLE
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import estimates

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec


def followers(warehouse: Warehouse, model: str) -> list[dict[str, Any]]:
    """Return how a model's monitor, and its comparison of forecasts, stand, as far as they have ever run.

    Its queries are those of its last driver; with several it stands where the one stands that is furthest behind.
    """
    found = []
    for verb in VERBS:
        drive = lease_log(warehouse, verb, model).last(verb)
        if drive is None:
            continue
        names = drive.queries or []
        queries = [query for query in (query_of(model, name) for name in names) if query is not None]
        running = drive.ended_at is None and drive.owner.alive(drive.beat_at)
        owner = drive.owner
        found.append(
            {
                "follower": verb,
                "queries": names,
                **_progress(warehouse, model, queries),
                "driver": {"host": owner.host, "pid": owner.pid} if running else None,
                # Killed: it has not said how it ended.
                "driver_lost": drive.ended_at is None and not running,
                "ended": None if running else drive.how,
                "last_error": None if running else drive.error,
                "heartbeat": drive.beat_at,
            }
        )
    return found


def _progress(warehouse: Warehouse, model: str, queries: list[Query]) -> dict[str, Any]:
    """Return micro-batches, when the last one was committed, and how many estimates wait since when."""
    checkpoints = [Checkpoint(warehouse, query.checkpoint) for query in queries]
    done = [(one, None if one.damage() else one.progressed()) for one in checkpoints]
    begun = [(one, at) for one, at in done if at is not None]
    nothing = {"batches": 0, "last_batch_at": None, "rows_behind": None, "seconds_behind": None}
    if not begun or not warehouse.exists(estimates(model)):
        return nothing
    lag = table_lag(warehouse, estimates(model), min(at.version for _, at in begun))
    return {
        "batches": sum(at.batch + 1 for _, at in begun),
        "last_batch_at": max(one.committed_at(at.batch) for one, at in begun),
        "rows_behind": lag.rows,
        "seconds_behind": lag.seconds,
    }


def given_up(warehouse: Warehouse, model: str) -> list[str]:
    """Return a sentence for each thing of a model that Airflow does not start again, as it crashed again and again."""
    found = []
    for verb in ("stream", *VERBS):
        hold = lease_log(warehouse, verb, model).hold()
        if hold is not None and hold.crashes is not None:
            found.append(
                f"its {verb} was given up at {hold.began_at:%Y-%m-%d %H:%M} UTC: {hold.reason}; mend that, then "
                f"`{resume_command(verb, model)}`"
            )
    return found


def follower_table(data: list[dict[str, Any]]) -> Any:
    """Return the table of all models' followers, None where there are none."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("model", "follows its estimates", "behind", "last micro-batch", "driver"):
        table.add_column(column, justify="right" if column == "behind" else "left")
    for model in data:
        for one in model["followers"]:
            at: datetime | None = one["last_batch_at"]
            behind = one["rows_behind"]
            table.add_row(
                model["model"],
                one["follower"],
                "-" if behind is None else f"{behind:,} rows",
                "-" if at is None else f"{at.astimezone(UTC):%m-%d %H:%M:%S}",
                _driver(one),
            )
    return table if table.row_count else None


def _driver(one: dict[str, Any]) -> str:
    if one["driver"] is not None:
        return f"process {one['driver']['pid']} on {one['driver']['host']}"
    if one["driver_lost"]:
        return f"lost, seen {one['heartbeat'].astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return f"none ({one['ended']})" + (f": {one['last_error']}" if one["last_error"] else "")


@contextmanager
def held(warehouse: Warehouse, spec: ModelSpec, verb: str, stop: threading.Event) -> Iterator[None]:
    """Be the model's monitor, or its judge of forecasts; a request in the log, or a later one, sets `stop`.

    In the log the verb is the name of what is driven.

    Raises:
        UserError: another one runs.
    """
    log = lease_log(warehouse, verb, spec.name)
    before = log.last(verb)
    if before is not None and before.ended_at is None and before.owner.alive_after_waiting(before.beat_at):
        raise stream_taken_error(
            spec.name, f"process {before.owner.pid} on {before.owner.host} runs it", verb
        )
    jvm: Any = warehouse.spark._jvm
    owner = DriverIdentity.this_process(int(jvm.java.lang.ProcessHandle.current().pid()))
    epoch = 1 if before is None else before.epoch + 1
    launch = os.environ.get(LAUNCH_VARIABLE)
    rules = {QUERIES: [query.name for query in queries_of(spec, verb)]}
    drive = DriverRecord(
        log.model, verb, epoch, LIVE, owner, log.next_time(), clock.now(), launch, rules=rules
    )
    log.write(drive)
    log.prune(verb)
    done = threading.Event()

    def sign() -> None:
        while not done.wait(LIVENESS_SECONDS):
            try:
                log.write(replace(drive, beat_at=clock.now()))
                if log.asked_to_stop(drive) is not None or log.overtaken(verb, epoch):
                    stop.set()
            except Exception:  # one that fails must not end the run; the next one tells
                continue

    thread = threading.Thread(target=sign, name=verb, daemon=True)
    thread.start()
    how, error = FAILED, None
    try:
        yield
        how = STOPPED if stop.is_set() else CAUGHT_UP
    except BaseException as problem:
        error = first_line(problem, 500)
        raise
    finally:
        done.set()
        thread.join()
        at = clock.now()
        log.write(replace(drive, beat_at=at, ended_at=at, how=how, error=error))
