"""Which intervals of a model's schedule have landed, and which are missing, by the events of its asset."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from airflow.models.asset import AssetEvent, AssetModel
from airflow.utils.session import create_session
from croniter import croniter
from sqlalchemy import select

from jobs.specs.model_spec import ModelSpec

MOST = 5000
"""At most so many intervals are looked at, the newest."""


class Intervals(NamedTuple):
    """The intervals that have landed, by their beginning: the first, the last, how many, and those missing between."""

    first: str
    last: str
    landed: int
    missing: list[str]


def landed_intervals(spec: ModelSpec) -> Intervals | None:
    """Return the intervals of the schedule `airflow.ingest.schedule`; None where none has landed."""
    schedule = spec.airflow.ingest.schedule
    if schedule is None:
        return None
    uri = f"kalman://measurements/{spec.name}/by-interval"
    with create_session() as session:
        query = (
            select(AssetEvent.partition_key)
            .join(AssetModel, AssetModel.id == AssetEvent.asset_id)
            .where(AssetModel.uri == uri, AssetEvent.partition_key.is_not(None))
        )
        return among(schedule, {key for key in session.scalars(query) if key is not None})


def among(schedule: str, landed: set[str]) -> Intervals | None:
    """Return what is missing among the intervals of a cron expression that have landed, by their beginnings."""
    keys = sorted(landed)[-MOST:]
    if not keys:
        return None
    found = croniter(schedule, datetime.fromisoformat(keys[0]))
    missing: list[str] = []
    for _ in range(MOST):
        key = found.get_next(datetime).strftime("%Y-%m-%dT%H:%M:%SZ")
        if key >= keys[-1]:
            break
        if key not in landed:
            missing.append(key)
    return Intervals(keys[0], keys[-1], len(keys), missing)
