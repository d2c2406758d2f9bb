"""Find landed and missing intervals of a model's schedule from the events of its asset."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from airflow.models.asset import AssetEvent, AssetModel
from airflow.utils.session import create_session
from croniter import croniter
from sqlalchemy import select

from jobs.specs.model_spec import ModelSpec

MOST = 5000
"""The maximum number of intervals to check, back from the last landed interval."""


class Intervals(NamedTuple):
    """The newest intervals, by their starts: first, last, number of landed intervals, and missing intervals between."""

    first: str
    last: str
    landed: int
    missing: list[str]


def find_landed_intervals(spec: ModelSpec) -> Intervals | None:
    """Return the intervals of the schedule `airflow.ingest.schedule`; None if none has landed."""
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
        return find_missing_intervals(schedule, {key for key in session.scalars(query) if key is not None})


def find_missing_intervals(schedule: str, landed: set[str]) -> Intervals | None:
    """Return the missing intervals of a cron expression, given the starts of the landed intervals."""
    keys = sorted(landed)
    if not keys:
        return None
    first = key = keys[-1]
    found = croniter(schedule, datetime.fromisoformat(key))
    missing: list[str] = []
    for _ in range(MOST - 1):
        key = found.get_prev(datetime).strftime("%Y-%m-%dT%H:%M:%SZ")
        if key <= keys[0]:
            first = keys[0]
            break
        first = key
        if key not in landed:
            missing.append(key)
    return Intervals(first, keys[-1], sum(one >= first for one in keys), missing[::-1])
