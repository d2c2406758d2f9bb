"""The status of a model (snapshots, generations, positions and lag), and the alarms that follow from it.

An alarm reports a stream or query without progress, a failed driver, or a difference that a verification has found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from jobs.downstream.status import list_given_up, read_downstream_status
from jobs.lineage.generations import LIVE, REMOVED, RETIRED, SHADOW, read_position
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_log import DriverIdentity
from jobs.supervision.progress import Lag, measure_table_lag
from jobs.supervision.progress_log import read_newest_record
from jobs.verification.findings import DIFFERENT, format_difference

if TYPE_CHECKING:
    from jobs.lineage.catalog import Catalog
    from jobs.lineage.generations import Generation

ENDED = (RETIRED, REMOVED)
"""The statuses of generations that no driver runs."""
RUNNING = (LIVE, SHADOW)
"""The statuses of generations that a driver may run."""


def read_status(catalog: Catalog, verified: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return a model's status; verified: the last verification of each model (`read_last_outcomes`)."""
    warehouse, table = catalog.warehouse, measurements(name)
    landed = warehouse.exists(table)
    version = warehouse.latest_version(table) if landed else None
    return {
        "model": name,
        "measurements": {
            "version": version,
            "rows": warehouse.row_count(table) if landed else 0,
            "quarantined": catalog.count_quarantined_rows(name),
        },
        "snapshots": [
            {
                "snapshot": one.snapshot_id,
                "model_version": one.model_version,
                "version": one.version,
                "cut": one.cut,
                "keys": one.key_count,
                "rows": one.rows,
                "status": one.status,
                "committed_at": one.committed_at,
            }
            for one in catalog.manifests(name)
        ],
        "generations": [_read_generation(warehouse, one, version) for one in catalog.generations(name)],
        "followers": read_downstream_status(warehouse, name),
        "given_up": list_given_up(warehouse, name),
        "verification": verified.get(name),
    }


def _read_generation(warehouse: Tables, one: Generation, newest: int | None) -> dict[str, Any]:
    checkpoint = Checkpoint(warehouse, one.checkpoint)
    damage = checkpoint.find_damage()
    done = None if damage else checkpoint.find_progress()
    version = one.start_version if done is None else done.version
    holder = DriverIdentity.parse(one.owner)
    progress = None if one.status in ENDED else read_newest_record(warehouse, one.model, one.generation)
    last_batch_at = None if done is None else checkpoint.committed_at(done.batch)
    if one.status in ENDED or newest is None and one.topic is None:
        lag = Lag()
    elif one.topic is not None:
        lag = _read_topic_lag(progress, last_batch_at)
    else:
        lag = measure_table_lag(warehouse, measurements(one.model), version)
    running = holder is not None and holder.alive(one.heartbeat)
    return {
        "generation": one.generation,
        "model_version": one.model_version,
        "status": one.status,
        "snapshot": one.snapshot_id,
        "batches": 0 if done is None else done.batch + 1,
        "version": version,
        "position": one.start_position if damage else read_position(warehouse, one),
        "versions_behind": None
        if one.topic is not None or newest is None or one.status in ENDED
        else max(0, newest - version),
        "rows_behind": lag.rows,
        "seconds_behind": lag.seconds,
        "last_batch_at": last_batch_at,
        "progress": progress,
        "driver": None if holder is None or not running else {"host": holder.host, "pid": holder.pid},
        # The lease has no running driver: the driver was killed, and the next one resumes from the checkpoint.
        "driver_lost": holder is not None and not running,
        "heartbeat": one.heartbeat,
        "last_error": f"the checkpoint is damaged: {damage}" if damage else one.last_error,
    }


def _read_topic_lag(progress: dict[str, Any] | None, last_batch_at: datetime | None) -> Lag:
    """Return the lag as of the last micro-batch, because only the broker knows the present lag."""
    rows = None if progress is None else progress["lag_rows"]
    if not rows or last_batch_at is None:
        return Lag(rows, None if rows is None else 0.0)
    return Lag(rows, (datetime.now(UTC) - last_batch_at).total_seconds())


def find_alarms(models: Sequence[dict[str, Any]], after: float, now: datetime) -> list[str]:
    """Return sentences on streams and queries whose rows wait too long, failed drivers, and found differences.

    Args:
        models: the models in the report of `status`.
        after: how long rows may wait, in seconds.
        now: the current time.
    """
    found: list[str] = []
    for model in models:
        sentences = [
            describe_stream_alarm(one, after, now) for one in model["generations"] if one["status"] in RUNNING
        ]
        sentences += [describe_query_alarm(one, after, now) for one in model["followers"]]
        sentences += model["given_up"]
        sentences.append(describe_difference(model.get("verification")))
        found += [f"{model['model']}: {one}" for one in sentences if one is not None]
    return found


def describe_stream_alarm(generation: dict[str, Any], after: float, now: datetime) -> str | None:
    """Return the alarm of a generation's stream; None if there is no alarm."""
    name, running = generation["generation"], generation["driver"] is not None
    if not running and generation["last_error"]:
        return f"the driver of {name} ended with an error: {generation['last_error']}"
    waiting, seconds = generation["rows_behind"], generation["seconds_behind"]
    if not waiting or seconds is None:
        return None
    last: datetime | None = generation["last_batch_at"]
    since = now - timedelta(seconds=seconds)  # no row waited before this time
    quiet = (now - (since if last is None else max(since, last))).total_seconds()
    if quiet <= after:
        return None
    driver = generation["driver"]
    runs = (
        f"process {driver['pid']} on {driver['host']} runs it"
        if running
        else "its driver is lost"
        if generation["driver_lost"]
        else "no driver runs it"
    )
    batches = (
        "it has committed no micro-batch yet"
        if last is None
        else f"its last micro-batch ended {last.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
    return f"{name} makes no progress: {waiting:,} rows have waited for {_format_duration(quiet)}; {batches}; {runs}"


def describe_query_alarm(one: dict[str, Any], after: float, now: datetime) -> str | None:
    """Return the alarm of a model's monitor or forecast skill; None if there is no alarm."""
    name = one["follower"]
    if one["driver"] is None and one["last_error"]:
        return f"its {name} ended with an error: {one['last_error']}"
    waiting, seconds = one["rows_behind"], one["seconds_behind"]
    if not waiting or seconds is None:
        return None
    last: datetime | None = one["last_batch_at"]
    quiet = seconds if last is None else min(seconds, (now - last).total_seconds())
    if quiet <= after:
        return None
    driver = one["driver"]
    runs = "no driver runs it" if driver is None else f"process {driver['pid']} on {driver['host']} runs it"
    return f"its {name} makes no progress: {waiting:,} estimates have waited for {_format_duration(quiet)}; {runs}"


def describe_difference(last: dict[str, Any] | None) -> str | None:
    """Return the alarm of a model's last verification; None if it found no difference."""
    if last is None or last["outcome"] != DIFFERENT:
        return None
    at = f"{last['recorded_at'].astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    first = format_difference(json.loads(last["first_difference"])) if last["first_difference"] else ""
    return f"verification {last['run_id']} found {last['differences']:,} differences at {at}: {first}"


def _format_duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{seconds:.0f} s" if minutes < 1 else f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
