"""The upgrade modes without a shadow run, which replace the live generation or change its layout; and `upgrade`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.batch.batch_filter import Interval
from jobs.batch.pretraining import pretrain_snapshot
from jobs.core.errors import UserError
from jobs.landing.sources.topics import land_present
from jobs.lineage import compatibility, generations, start_point
from jobs.lineage.compatibility import HAND_OVER, Finding
from jobs.lineage.generations import LIVE, SHADOW, DeployedModel, Generation, read_origin_manifest
from jobs.lineage.hand_over import find_last_position
from jobs.snapshots.manifests import WITHOUT_STATE, find
from jobs.snapshots.state_rows import STATE_ROWS
from jobs.snapshots.store import write
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import Cut, describe, rank
from jobs.storage.tables import measurements
from jobs.streaming.exporting import export
from jobs.supervision.driver_log import DriverIdentity
from jobs.upgrades.blue_green import prove, upgrade_blue_green
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
from jobs.upgrades.migration.apply import format_changed_parameters, format_left_out
from jobs.upgrades.migration.parameters import (
    carry_over_without_states,
    list_parameter_changes,
    list_retraining_changes,
)

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest


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
    lines, data = _report_outcome(context, manifest, new)
    changed = [*format_left_out(change), *format_changed_parameters(context.model.name, change)]
    more = {"left_out": change.get("left_out", 0), "parameters": change["parameters"]}
    return [*lines, *changed], {**data, **more}


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
    lines, data = _report_outcome(context, manifest, new)
    told = {"parameters": changes}
    return [*lines, *format_changed_parameters(context.model.name, told)], {**data, **told}


def _report_outcome(context: UpgradeContext, manifest: Manifest, new: Generation) -> Outcome:
    place = describe(manifest.position)
    details = f"of version {new.model_version} is live, from snapshot {manifest.snapshot_id} ({place})"
    return report_replacement(context, new, details)


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
    manifest = pretrain_snapshot(
        DeployedModel(spec, warehouse), table, cut, Interval(None, None), context.progress
    ).manifest
    return manifest


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
        wanted = shadow.partitions == layout.partitions
        return wanted and not _needs_relayout(context.model.with_spec(layout.spec), shadow)

    return find_shadow(context, context.live.fingerprint, fits) or _relayout(context, layout, SHADOW)


def _relayout(context: UpgradeContext, layout: RequestedLayout, status: str) -> Generation:
    """Return a new generation with the given layout, made from an export of the live generation."""
    model, live = context.model.with_spec(layout.spec), context.live
    manifest, _ = export(model, live, on_progress=context.progress.note)
    return start_point.begin_exported(model, manifest, live, status, layout.partitions)


def _needs_relayout(model: DeployedModel[Warehouse], generation: Generation) -> bool:
    _, findings = _compare_with_spec(model, generation)
    return any(one.verdict == HAND_OVER for one in findings)


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
