"""Tell from a model's status when somebody should look: no progress though rows wait, or a driver that failed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from jobs.lineage.generations import LIVE, SHADOW

GOING = (LIVE, SHADOW)


def alarms(models: list[dict[str, Any]], after: float, now: datetime) -> list[str]:
    """Return a sentence for each stream that has something to do and has done nothing for `after` seconds, or failed.

    Args:
        models: as `status` reports them.
        after: seconds.
        now: the time.
    """
    found: list[str] = []
    for model in models:
        said = [alarm_of(one, after, now) for one in model["generations"] if one["status"] in GOING]
        said += [alarm_of_follower(one, after, now) for one in model["followers"]]
        said += model["given_up"]
        found += [f"{model['model']}: {one}" for one in said if one is not None]
    return found


def alarm_of(lineage: dict[str, Any], after: float, now: datetime) -> str | None:
    """Return what is wrong with a stream, None if nothing is."""
    name, running = lineage["generation"], lineage["driver"] is not None
    if not running and lineage["last_error"]:
        return f"the driver of {name} ended with an error: {lineage['last_error']}"
    waiting, seconds = lineage["rows_behind"], lineage["seconds_behind"]
    if not waiting or seconds is None:
        return None
    last: datetime | None = lineage["last_batch_at"]
    since = now - timedelta(seconds=seconds)  # before, there was nothing to do
    quiet = (now - (since if last is None else max(since, last))).total_seconds()
    if quiet <= after:
        return None
    driver = lineage["driver"]
    who = (
        f"process {driver['pid']} on {driver['host']} drives it"
        if running
        else "its driver is gone"
        if lineage["driver_lost"]
        else "nothing drives it"
    )
    seen = (
        "none has ended yet"
        if last is None
        else f"the last ended {last.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
    wait = f"{waiting:,} rows have waited for {_time(quiet)}"
    return f"{name} makes no progress: {wait}; of its micro-batches {seen}; {who}"


def alarm_of_follower(one: dict[str, Any], after: float, now: datetime) -> str | None:
    """Return what is wrong with a monitor, or with a comparison of forecasts; None if nothing is."""
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
    who = "nothing runs it" if driver is None else f"process {driver['pid']} on {driver['host']} runs it"
    return f"its {name} makes no progress: {waiting:,} estimates have waited for {_time(quiet)}; {who}"


def _time(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{seconds:.0f} s" if minutes < 1 else f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
