"""The modes of `upgrade`: replace the live generation, change its layout, or run a new generation in shadow.

A shadow runs beside the live generation until the two have been compared on the same rows; the better one becomes live.
Each step reuses the shadow and the snapshots of an earlier attempt that was killed.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.batch.batch_filter import Interval
from jobs.batch.pretraining import pretrain_snapshot
from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.landing.sources.topics import land_present
from jobs.lineage import compatibility, generations, promotion, start_point
from jobs.lineage.compatibility import HAND_OVER, Finding
from jobs.lineage.generation_checkpoint import refuse_damaged
from jobs.lineage.generations import LIVE, SHADOW, DeployedModel, Generation, read_origin_manifest
from jobs.lineage.leases import stream_lock
from jobs.lineage.start_point import find_last_position
from jobs.snapshots.manifests import WITHOUT_STATE, find
from jobs.snapshots.state_rows import STATE_ROWS
from jobs.snapshots.store import write
from jobs.spark.warehouse import Warehouse
from jobs.specs.migration import Answer
from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import Cut, describe, rank
from jobs.storage.tables import measurements
from jobs.streaming.driver import Driver
from jobs.streaming.exporting import export
from jobs.streaming.planned_rows import has_nothing_ahead
from jobs.supervision.driver_log import DriverIdentity
from jobs.upgrades.context import (
    BLUE_GREEN,
    REPARTITION,
    RETRAIN,
    STATELESS,
    STOP_START,
    Outcome,
    UpgradeContext,
    check_already_upgraded,
    find_migration_steps,
    find_shadow,
    migrate_live_state,
    preview_migration,
    refuse_other_keys,
    refuse_other_source,
    report_replacement,
)
from jobs.upgrades.decision import format_comparison, format_refusal, suggest_next_action
from jobs.upgrades.migration.apply import format_changed_parameters, format_left_out
from jobs.upgrades.migration.parameters import (
    carry_over_without_states,
    list_parameter_changes,
    list_retraining_changes,
)

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest


CATCH_UPS = 3
"""Maximum number of runs that let the live generation catch up before the comparison."""

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
    if not _is_level(context, shadow):  # a driver may be running the live generation
        rows += _drive(context, shadow)
    if context.catch_up and not _is_level(context, live, shadow):
        note(f"{live.generation} reads the rows that {shadow.generation} has read")
        _catch_up_live(context)
    note(f"comparing {shadow.generation} with {live.generation}")
    comparison, report = context.compare(context.model.warehouse, context.model.spec, live, shadow)
    lags = not _is_level(context, live, shadow)
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
        f"compared: let it catch up (`kalman-pipeline stream --model {model}`), then compare again"
    )


def _is_level(context: UpgradeContext, one: Generation, other: Generation | None = None) -> bool:
    """Return whether a generation has reached the position of another one, by default the live generation's."""
    return generations.has_reached(context.model.warehouse, one, other or context.live)


def _catch_up_live(context: UpgradeContext) -> None:
    """Drive the live generation to the newest measurements; if another driver runs it, this driver does so already.

    Rows that land meanwhile are read, too: the stream's own run for them finds the lease taken and is skipped.
    """
    try:
        for _ in range(CATCH_UPS):
            if not _drive(context, context.live):
                return
    except UserError as error:
        if error.exit_code != ALREADY_RUNNING:
            raise
        context.progress.note(str(error))


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
    generation: Generation,
    seconds: float | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Drive a generation to the newest measurements, or until `stop`; return the number of estimated rows.

    A run that finds nothing to read does not start Spark.
    """
    model, name = context.model, generation.generation
    with stream_lock(context.settings.warehouse, model.name, None if generation == context.live else name):
        if stop is None and has_nothing_ahead(model, generation):
            refuse_damaged(model.warehouse, generation)
            return 0
        driver = Driver(context.settings, model, seconds, stop or threading.Event())
        return int(driver.drive(name=name).data["rows"])


def stop_start(context: UpgradeContext) -> Outcome:
    """Replace the live generation by a generation that starts from its migrated state."""
    steps = find_migration_steps(context)
    if context.dry_run:
        refuse_other_keys(context, steps)
        return preview_migration(context)
    with context.exclusive(STOP_START):
        refuse_other_keys(context, steps)
        manifest, change = migrate_live_state(context)
        assert manifest is not None
        new = start_point.begin_exported(context.model, manifest, context.live)
    lines, data = _report_outcome(context, manifest, new, change)
    return lines, {**data, "left_out": change.get("left_out", 0)}


def retrain(context: UpgradeContext) -> Outcome:
    """Replace the live generation by one trained on history up to its last position (`find_last_position`)."""
    old, learned = _read_live_model(context)
    if context.dry_run:
        return _preview_without_state(
            context, list_retraining_changes(old, context.model.spec, learned, None)
        )
    with context.exclusive(RETRAIN):
        position, batch = find_last_position(context.model.warehouse, context.live)
        manifest = _pretrain_snapshot(context, position)
        changes = list_retraining_changes(old, context.model.spec, learned, manifest.parameters)
        return _replace(context, manifest, batch, changes)


def start_stateless(context: UpgradeContext) -> Outcome:
    """Replace the live generation by a generation that begins without the state of any key."""
    refuse_other_source(context)
    old, learned = _read_live_model(context)
    carried = carry_over_without_states(old, context.model.spec, learned)
    changes = list_parameter_changes(old, context.model.spec, learned, carried.parameters, carried)
    if context.dry_run:
        return _preview_without_state(context, changes)
    with context.exclusive(STATELESS):
        position, batch = find_last_position(context.model.warehouse, context.live)
        return _replace(context, _write_empty_snapshot(context, position, carried.parameters), batch, changes)


def _read_live_model(context: UpgradeContext) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec of the live generation, and the parameters that it has learned."""
    began_from = read_origin_manifest(context.model.warehouse, context.live)
    return began_from.model_spec(context.model.spec.folder), began_from.parameters


def _replace(
    context: UpgradeContext, manifest: Manifest, batch: int, changes: list[dict[str, Any]]
) -> Outcome:
    """Make a generation from a snapshot live; it continues after the given micro-batch of the former generation."""
    parent = context.live.generation, batch
    new = start_point.begin(context.model, manifest, parent, context.live)
    return _report_outcome(context, manifest, new, {"parameters": changes})


def _report_outcome(
    context: UpgradeContext, manifest: Manifest, new: Generation, change: Mapping[str, Any]
) -> Outcome:
    place = describe(manifest.position)
    details = f"of version {new.model_version} is live, from snapshot {manifest.snapshot_id} ({place})"
    lines, data = report_replacement(context, new, details)
    changed = [*format_left_out(change), *format_changed_parameters(context.model.name, change)]
    return [*lines, *changed], {**data, "parameters": change["parameters"]}


def _preview_without_state(context: UpgradeContext, changes: list[dict[str, Any]]) -> Outcome:
    spec, told = context.model.spec, {"parameters": changes}
    line = f"dry run: version {spec.version} would start without the states of {context.live.generation}"
    return [line, *format_changed_parameters(spec.name, told)], {"dry_run": True, **told}


def _pretrain_snapshot(context: UpgradeContext, position: dict[str, Any]) -> Manifest:
    """Train the new version on the history up to a position of the live generation; return the snapshot."""
    warehouse, spec, live = context.model.warehouse, context.model.spec, context.live
    table = measurements(spec.name)
    compatibility.refuse_other_measurements(warehouse, live, read_origin_manifest(warehouse, live))
    if live.topic is None:
        cut = Cut(rank(position), None)
    else:
        # The stream may be ahead of the landed rows. So the missing rows are landed, and training ends at its offsets.
        land_present(warehouse, spec)
        cut = Cut(warehouse.latest_version(table), None, position)
    # Its own object, because a pretraining of few rows does the work of tasks in this process.
    apart = DeployedModel(spec, warehouse.at(warehouse.root))
    return pretrain_snapshot(apart, table, cut, Interval(None, None), context.progress).manifest


def _write_empty_snapshot(
    context: UpgradeContext, position: dict[str, Any], parameters: dict[str, Any]
) -> Manifest:
    """Write a snapshot without keys, with the given parameters, at a position of the live generation."""
    warehouse, spec, live = context.model.warehouse, context.model.spec, context.live
    began_from = read_origin_manifest(warehouse, live)
    compatibility.refuse_other_measurements(warehouse, live, began_from)
    position = compatibility.add_commit_to_position(warehouse, live, position)
    snapshot_id = _compute_empty_id(spec, position, parameters)
    found = find(warehouse, snapshot_id)
    if found is not None:
        return found
    manifest = replace(
        began_from,
        snapshot_id=snapshot_id,
        model_version=spec.version,
        fingerprint=spec.fingerprint(),
        parameters=parameters,
        spec=spec.format_stored_text(),
        position=position,
        cut=None,
        learn_from=None,
        learn_to=None,
        generation=None,
        batch_id=None,
        parent=None,
        committed_at=None,
    )
    no_rows = warehouse.spark.createDataFrame(
        [], f"key string, {STATE_ROWS}".replace("event_time bigint", "event_time timestamp")
    )
    return write(warehouse, manifest, no_rows)


def _compute_empty_id(spec: ModelSpec, position: dict[str, Any], parameters: dict[str, Any]) -> str:
    """Return the id of the snapshot without keys at a position."""
    learned = [parameters] if parameters else []
    inputs = json.dumps([spec.fingerprint(), position, *learned], sort_keys=True)
    digest = hashlib.sha256(inputs.encode()).hexdigest()
    return f"{spec.name}-v{spec.version}-{rank(position)}-{digest[:10]}{WITHOUT_STATE}"


class RequestedLayout(NamedTuple):
    """The requested layout of a generation's state: the spec of the state, and the number of partitions.

    reasons: differences from the present layout of the generation; empty if there are no differences.
    """

    spec: ModelSpec
    partitions: int
    reasons: list[str]


def repartition(context: UpgradeContext) -> Outcome:
    """Continue the live generation's state in a new generation that has the same version and the requested layout."""
    live = context.live
    layout = _select_layout(context)
    if not layout.reasons:
        present = f"{live.generation} has {live.partitions} state partitions of {live.blocks} blocks"
        return [f"{present}, as wanted: nothing to do"], {
            "generation": live.generation,
            "promoted": False,
            "upgraded": False,
            "partitions": live.partitions,
            "blocks": live.blocks,
        }
    if context.dry_run:
        return [*layout.reasons, "dry run: nothing was written"], {"dry_run": True}
    if not context.drain and _has_driver(live):
        shadow = _find_or_make_shadow(context, layout)
        lines, data = prove(context, shadow)
        return [*layout.reasons, *lines], {**data, "partitions": shadow.partitions, "blocks": shadow.blocks}
    with context.exclusive(REPARTITION):
        new = _relayout(context, layout, LIVE)
    details = f"is live, with {new.partitions} state partitions of {new.blocks} blocks"
    lines, data = report_replacement(context, new, f"{details}, from snapshot {new.snapshot_id}")
    return [*layout.reasons, *lines], {**data, "partitions": new.partitions, "blocks": new.blocks}


def _select_layout(context: UpgradeContext) -> RequestedLayout:
    """Return the layout that the option or the spec requests; by default the number of partitions does not change.

    Raises:
        UserError: the option and the spec request different numbers, or the spec changes the meaning of the state.
    """
    spec, live, option = context.model.spec, context.live, context.partitions
    of_spec = spec.stream.partitions
    if option is not None and of_spec is not None and option != of_spec:
        raise UserError(
            f"--partitions {option}: the spec of {spec.name} says stream.partitions: {of_spec}, which a new generation "
            f"would take: change it there"
        )
    built, findings = _compare_with_spec(context.model, live)
    number = option or of_spec or live.partitions
    reasons = [one.text for one in findings if one.verdict == HAND_OVER]
    if number != live.partitions and of_spec is None:
        reasons.append(f"{number} state partitions are wanted, and {live.generation} has {live.partitions}")
    return RequestedLayout(compatibility.select_spec(built.spec, spec), number, reasons)


def _has_driver(generation: Generation) -> bool:
    """Return whether a driver holds a generation's lease."""
    holder = DriverIdentity.parse(generation.owner)
    return holder is not None and holder.is_alive_after_waiting(generation.heartbeat)


def _find_or_make_shadow(context: UpgradeContext, layout: RequestedLayout) -> Generation:
    """Return the shadow of this repartitioning, from an earlier attempt with the same layout or newly made."""

    def fits(shadow: Generation) -> bool:
        if shadow.partitions != layout.partitions:
            return False
        _, findings = _compare_with_spec(context.model.with_spec(layout.spec), shadow)
        return all(one.verdict != HAND_OVER for one in findings)

    return find_shadow(context, context.live.fingerprint, fits) or _relayout(context, layout, SHADOW)


def _relayout(context: UpgradeContext, layout: RequestedLayout, status: str) -> Generation:
    """Return a new generation with the given layout, made from an export of the live generation."""
    model, live = context.model.with_spec(layout.spec), context.live
    manifest, _ = export(model, live, on_progress=context.progress.note)
    return start_point.begin_exported(model, manifest, live, status, layout.partitions)


def _compare_with_spec(
    model: DeployedModel[Warehouse], generation: Generation
) -> tuple[compatibility.BuiltWith, list[Finding]]:
    """Return the properties with which a generation was built, and its differences from the spec.

    Raises:
        UserError: a difference is refused.
    """
    built = compatibility.describe_generation_build(
        model, generation, generations.read_origin_manifest(model.warehouse, generation)
    )
    deployed = compatibility.describe_deployment(model, built.settings)
    compatibility.check(built, deployed)
    return built, compatibility.find_differences(built, deployed)


MODES: dict[str, Callable[[UpgradeContext], Outcome]] = {
    BLUE_GREEN: upgrade_blue_green,
    STOP_START: stop_start,
    RETRAIN: retrain,
    STATELESS: start_stateless,
    REPARTITION: repartition,
}


def upgrade(context: UpgradeContext, mode: str) -> Outcome:
    """Upgrade in the given mode, or report that there is nothing to upgrade.

    Raises:
        UserError: the deployed version is not later than the live version, or the upgrade in this mode fails.
    """
    done = None if mode == REPARTITION else check_already_upgraded(context.model.spec, context.live)
    return MODES[mode](context) if done is None else done
