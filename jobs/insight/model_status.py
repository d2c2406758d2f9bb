"""The status of a model: its snapshots, generations, positions and lag."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jobs.downstream.status import downstream_status, given_up
from jobs.lineage.generations import REMOVED, RETIRED, position_of
from jobs.observability.lag import table_lag
from jobs.observability.progress import Lag
from jobs.observability.progress_log import newest_record
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_identity import DriverIdentity

if TYPE_CHECKING:
    from jobs.lineage.catalog import Catalog
    from jobs.lineage.generations import Generation

ENDED = (RETIRED, REMOVED)
"""The statuses of generations that no driver runs."""


def model_status(catalog: Catalog, verified: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return a model's status; verified: the last verification of each model (`last_outcomes`)."""
    warehouse, table = catalog.warehouse, measurements(name)
    landed = warehouse.exists(table)
    version = warehouse.latest_version(table) if landed else None
    return {
        "model": name,
        "measurements": {
            "version": version,
            "rows": warehouse.row_count(table) if landed else 0,
            "quarantined": catalog.held_rows(name),
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
        "generations": [_generation_status(warehouse, one, version) for one in catalog.generations(name)],
        "followers": downstream_status(warehouse, name),
        "given_up": given_up(warehouse, name),
        "verification": verified.get(name),
    }


def _generation_status(warehouse: Tables, one: Generation, newest: int | None) -> dict[str, Any]:
    checkpoint = Checkpoint(warehouse, one.checkpoint)
    damage = checkpoint.damage()
    done = None if damage else checkpoint.progressed()
    version = one.start_version if done is None else done.version
    holder = DriverIdentity.parse(one.owner)
    progress = None if one.status in ENDED else newest_record(warehouse, one.model, one.generation)
    last_batch_at = None if done is None else checkpoint.committed_at(done.batch)
    if one.status in ENDED or newest is None and one.topic is None:
        lag = Lag()
    elif one.topic is not None:
        lag = _topic_lag(progress, last_batch_at)
    else:
        lag = table_lag(warehouse, measurements(one.model), version)
    running = holder is not None and holder.alive(one.heartbeat)
    return {
        "generation": one.generation,
        "model_version": one.model_version,
        "status": one.status,
        "snapshot": one.snapshot_id,
        "batches": 0 if done is None else done.batch + 1,
        "version": version,
        "position": one.start_position if damage else position_of(warehouse, one),
        "versions_behind": None
        if one.topic is not None or newest is None or one.status in ENDED
        else max(0, newest - version),
        "rows_behind": lag.rows,
        "seconds_behind": lag.seconds,
        "last_batch_at": last_batch_at,
        "progress": progress,
        "driver": None if holder is None or not running else {"host": holder.host, "pid": holder.pid},
        # A lease without its driver: the driver was killed, and the next one resumes from the checkpoint.
        "driver_lost": holder is not None and not running,
        "heartbeat": one.heartbeat,
        "last_error": f"the checkpoint is damaged: {damage}" if damage else one.last_error,
    }


def _topic_lag(progress: dict[str, Any] | None, last_batch_at: datetime | None) -> Lag:
    """Return the lag as of the last micro-batch; the broker alone knows the present one."""
    rows = None if progress is None else progress["lag_rows"]
    if not rows or last_batch_at is None:
        return Lag(rows, None if rows is None else 0.0)
    return Lag(rows, (datetime.now(UTC) - last_batch_at).total_seconds())
