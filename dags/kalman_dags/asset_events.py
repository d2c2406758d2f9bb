"""What the events of a model's assets carry: what the verb has reported, and the interval as a partition."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Any

from airflow.sdk import Asset, Context

from kalman_dags.outcome import Outcome

BY_INTERVAL = "/by-interval"
"""End of the URI of an asset whose events carry the beginning of the run's data interval as their partition."""


def tell(context: Context, outlets: Sequence[Any], outcome: Outcome) -> None:
    """Give the events of a task's assets their extra, and those of an asset by interval their partition."""
    events: Any = context.get("outlet_events")
    if events is None:  # outside of Airflow
        return
    for outlet in outlets:
        if not isinstance(outlet, Asset):
            continue
        events[outlet].extra.update(outcome.facts)
        key = interval_of(context.get("dag_run"))
        if outlet.uri.endswith(BY_INTERVAL) and key:
            events[outlet].add_partitions(key)


def interval_of(dag_run: Any) -> str | None:
    """Return the beginning of a run's data interval, ISO 8601 in UTC; None of a run by hand, which has none."""
    start, end = getattr(dag_run, "data_interval_start", None), getattr(dag_run, "data_interval_end", None)
    if start is None or start == end:
        return None
    return start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
