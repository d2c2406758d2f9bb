"""Set the extras of a model's asset events (facts of the verb's report), and the interval as their partition."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Any

from airflow.sdk import Asset, Context

from kalman_dags.outcome import VerbOutcome

BY_INTERVAL = "/by-interval"
"""The suffix of the URI of an asset whose events have the start of the run's data interval as their partition."""


def tell(context: Context, outlets: Sequence[Any], outcome: VerbOutcome) -> None:
    """Set the extra of a task's asset events, and the partition of assets by interval."""
    events: Any = context.get("outlet_events")
    if events is None:  # outside of Airflow
        return
    for outlet in outlets:
        if not isinstance(outlet, Asset):
            continue
        events[outlet].extra.update(outcome.facts)
        key = find_interval_start(context.get("dag_run"))
        if outlet.uri.endswith(BY_INTERVAL) and key:
            events[outlet].add_partitions(key)


def find_interval_start(dag_run: Any) -> str | None:
    """Return the start of a run's data interval, ISO 8601 in UTC; None for a run by hand, which has no interval."""
    start, end = getattr(dag_run, "data_interval_start", None), getattr(dag_run, "data_interval_end", None)
    if start is None or start == end:
        return None
    return start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
