"""Alarms from a model's status: a stream or query without progress, a failed driver, or a difference."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs.lineage.generations import LIVE, SHADOW
from jobs.verification.findings import DIFFERENT, sentence

RUNNING = (LIVE, SHADOW)
"""The statuses of generations that a driver may run."""


def alarms(models: list[dict[str, Any]], after: float, now: datetime) -> list[str]:
    """Return a sentence for each stream or query that has let rows wait for `after` seconds, or whose driver failed.

    Args:
        models: the models of the report of `status`.
        after: seconds.
        now: the current time.
    """
    found: list[str] = []
    for model in models:
        sentences = [
            stream_alarm(one, after, now) for one in model["generations"] if one["status"] in RUNNING
        ]
        sentences += [query_alarm(one, after, now) for one in model["followers"]]
        sentences += model["given_up"]
        sentences.append(verification_alarm(model.get("verification")))
        found += [f"{model['model']}: {one}" for one in sentences if one is not None]
    return found


def stream_alarm(generation: dict[str, Any], after: float, now: datetime) -> str | None:
    """Return the alarm of a generation's stream, None without one."""
    name, running = generation["generation"], generation["driver"] is not None
    if not running and generation["last_error"]:
        return f"the driver of {name} ended with an error: {generation['last_error']}"
    waiting, seconds = generation["rows_behind"], generation["seconds_behind"]
    if not waiting or seconds is None:
        return None
    last: datetime | None = generation["last_batch_at"]
    since = now - timedelta(seconds=seconds)  # before that, no row waited
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
    return f"{name} makes no progress: {waiting:,} rows have waited for {_duration(quiet)}; {batches}; {runs}"


def query_alarm(one: dict[str, Any], after: float, now: datetime) -> str | None:
    """Return the alarm of a model's monitor or forecast skill, None without one."""
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
    return f"its {name} makes no progress: {waiting:,} estimates have waited for {_duration(quiet)}; {runs}"


def verification_alarm(last: dict[str, Any] | None) -> str | None:
    """Return the alarm of a model's last verification, None if nothing differed."""
    if last is None or last["outcome"] != DIFFERENT:
        return None
    at = f"{last['recorded_at'].astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    first = sentence(json.loads(last["first_difference"])) if last["first_difference"] else ""
    return f"verification {last['run_id']} found {last['differences']:,} differences at {at}: {first}"


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{seconds:.0f} s" if minutes < 1 else f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
