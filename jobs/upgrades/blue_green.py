"""Run a new generation in shadow of the live one, compare the two on the same rows, and promote the better one.

Each step reuses the shadow and the snapshots of an earlier attempt that was killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.lineage import generations, promotion, start_point
from jobs.lineage.generations import SHADOW, Generation
from jobs.lineage.leases import stream_lock
from jobs.streaming.driver import Driver
from jobs.upgrades.comparison.answers import Answer
from jobs.upgrades.comparison.decision import format_comparison, format_refusal, suggest_next_action
from jobs.upgrades.context import (
    Outcome,
    UpgradeContext,
    find_migration_steps,
    find_shadow,
    migrate_live_state,
    preview_migration,
    refuse_other_keys,
)
from jobs.upgrades.migration.apply import format_changed_parameters, format_left_out

CATCH_UPS = 1
"""Maximum number of additional runs of a shadow before the comparison, if the live generation has moved ahead."""

LEVEL_SECONDS, LEVEL_POLL_SECONDS = 300.0, 0.2
"""Timeout and poll interval, in seconds, for a shadow that must catch up with a running live generation."""


def upgrade_blue_green(context: UpgradeContext) -> Outcome:
    """Start the deployed version in shadow from the migrated state, compare it, and promote it."""
    refuse_other_keys(context, find_migration_steps(context), in_shadow=True)
    if context.dry_run:
        return preview_migration(context)
    shadow, changed = _find_or_start_shadow(context)
    lines, data = prove(context, shadow)
    return [*changed, *lines], data


def _find_or_start_shadow(context: UpgradeContext) -> tuple[Generation, list[str]]:
    """Return this upgrade's shadow, from an earlier attempt or new, and lines on keys that its snapshot leaves out."""
    found = find_shadow(context, context.model.spec.fingerprint())
    if found is not None:
        return found, []
    manifest, change = migrate_live_state(context)
    assert manifest is not None
    shadow = start_point.begin_exported(context.model, manifest, context.live, SHADOW)
    return shadow, [*format_left_out(change), *format_changed_parameters(context.model.name, change)]


def prove(context: UpgradeContext, shadow: Generation) -> Outcome:
    """Let a shadow catch up, compare it with the live generation, and promote it if the comparison is good.

    Raises:
        UserError: the comparison is not good, although a promotion is wanted, and the promotion is not forced.
    """
    live, name, note = context.live, context.model.name, context.progress.note
    note(f"{shadow.generation} catches up in shadow")
    rows = _drive(context, shadow)
    for _ in range(CATCH_UPS):  # a driver may be running the live generation
        if _is_level(context, shadow):
            break
        rows += _drive(context, shadow)
    note(f"comparing {shadow.generation} with {live.generation}")
    comparison, report = context.compare(context.model.warehouse, context.model.spec, live, shadow)
    lags = not generations.has_reached(context.model.warehouse, live, shadow)
    lines = [
        f"{shadow.generation} (version {shadow.model_version}) shadows {live.generation} (version "
        f"{live.model_version}) from snapshot {shadow.snapshot_id}; {rows:,} rows now",
        *format_comparison(comparison),
        *([_format_lag(live, name)] if lags else []),
        f"report: {report}",
    ]
    data: dict[str, Any] = {
        "generation": shadow.generation,
        "live": live.generation,
        "live_lags": lags,
        "from_version": live.model_version,
        "snapshot": shadow.snapshot_id,
        "comparison": comparison.numbers,
        "good": comparison.good,
        "answer": comparison.answer,
        "reasons": comparison.reasons,
        "rows_needed": comparison.rows_needed,
        "report": report,
        "upgraded": True,
        "promoted": False,
    }
    if not context.promote:
        return [*lines, suggest_next_action(comparison, shadow.generation, name)], data
    if not comparison.good and not context.force:
        waits = context.needed and comparison.answer == Answer.UNKNOWN
        raise UserError(
            format_refusal(comparison, shadow.generation, name, report),
            ALREADY_RUNNING if waits else RUN_FAILED,
        )
    if not comparison.good:
        lines.append("forced: it is promoted whatever the verdict")
    _promote(context, shadow)
    return [*lines, f"promoted {shadow.generation}; {live.generation} is retired"], {**data, "promoted": True}


def _format_lag(live: Generation, model: str) -> str:
    """Return why rows are missing in a comparison: the live generation has read fewer rows than its shadow."""
    return (
        f"lag: {live.generation} has not read all rows that its shadow has, and what it has not estimated is not "
        f"compared: let it catch up (kalman-pipeline stream --model {model}), then compare again"
    )


def _is_level(context: UpgradeContext, shadow: Generation) -> bool:
    """Return whether a shadow has reached the live generation's position."""
    return generations.has_reached(context.model.warehouse, shadow, context.live)


def _promote(context: UpgradeContext, shadow: Generation) -> None:
    """Promote a shadow; if it lags, first run it beside the live generation until it has caught up.

    Raises:
        UserError: the shadow has not caught up in `LEVEL_SECONDS`.
    """
    warehouse, name = context.model.warehouse, context.model.name
    try:
        promotion.promote(warehouse, name, shadow.generation)
        return
    except promotion.ShadowLags:
        context.progress.note(f"{shadow.generation} runs beside {context.live.generation} until it is level")
    deadline = time.monotonic() + LEVEL_SECONDS
    with _drive_shadow(context, shadow) as ended:
        while True:
            late = time.monotonic() > deadline
            if late or ended.wait(LEVEL_POLL_SECONDS) or _is_level(context, shadow):
                try:
                    promotion.promote(warehouse, name, shadow.generation)
                    return
                except promotion.ShadowLags:
                    if late or ended.is_set():
                        raise


@contextmanager
def _drive_shadow(context: UpgradeContext, shadow: Generation) -> Iterator[threading.Event]:
    """Drive a shadow in a thread, as fast as rows arrive; yield an event that is set if the driver ends early.

    If the driver fails, its error replaces an error raised in the `with` body.
    """
    stop, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _drive(context, shadow, 0.0, stop)
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name=f"drive {shadow.generation}", daemon=True)
    thread.start()
    try:
        yield ended
    except Exception:
        if errors:
            raise errors[0] from None
        raise
    finally:
        stop.set()
        thread.join()


def _drive(
    context: UpgradeContext,
    shadow: Generation,
    seconds: float | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Drive a shadow to the newest measurements, or until `stop`; return the number of estimated rows."""
    with stream_lock(context.settings.warehouse, context.model.name, shadow.generation):
        driver = Driver(context.settings, context.model, seconds, stop or threading.Event())
        return int(driver.drive(name=shadow.generation).data["rows"])
