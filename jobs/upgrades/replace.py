"""Replace a live generation without a running driver: from its migrated state, from history, or without any state.

The snapshot is found or written first. One commit then makes the new generation live and retires the old one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.batch.batch_filter import Interval
from jobs.batch.pretraining import pretrain_snapshot
from jobs.landing.sources.topics import land_present
from jobs.lineage import compatibility, start_point
from jobs.lineage.generations import read_origin_manifest
from jobs.lineage.hand_over import find_last_position
from jobs.lineage.model import DeployedModel
from jobs.snapshots.manifests import WITHOUT_STATE, find
from jobs.snapshots.state_rows import STATE_ROWS
from jobs.snapshots.store import write
from jobs.storage.positions import Cut, describe, rank
from jobs.storage.tables import measurements
from jobs.upgrades.context import (
    RETRAIN,
    STATELESS,
    STOP_START,
    Outcome,
    UpgradeContext,
    find_migration_steps,
    migrate_live_state,
    preview_migration,
    refuse_other_keys,
    refuse_other_source,
    report_replacement,
)
from jobs.upgrades.migration.apply import format_left_out
from jobs.upgrades.migration.parameters import (
    carry_over_without_states,
    list_parameter_changes,
    list_retraining_changes,
)
from jobs.upgrades.migration.report import format_changed_parameters

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest
    from jobs.specs.model_spec import ModelSpec


def stop_start(context: UpgradeContext) -> Outcome:
    """Replace the live generation by one that starts from its migrated state."""
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
    """Replace the live generation by one that is trained on history up to its last position (`find_last_position`)."""
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
    """Replace the live generation by one without any key's state."""
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
    """Return the spec of the live generation and its learned parameters."""
    began_from = read_origin_manifest(context.model.warehouse, context.live)
    return began_from.model_spec(context.model.spec.folder), began_from.parameters


def _replace(
    context: UpgradeContext, manifest: Manifest, batch: int, changes: list[dict[str, Any]]
) -> Outcome:
    """Make a generation from a snapshot live; it continues after a micro-batch of the former generation."""
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
    """Train the new version on history up to a position of the live generation."""
    warehouse, spec, live = context.model.warehouse, context.model.spec, context.live
    table = measurements(spec.name)
    compatibility.refuse_other_measurements(warehouse, live, read_origin_manifest(warehouse, live))
    if live.topic is None:
        cut = Cut(rank(position), None)
    else:
        # The stream may be ahead of the landed rows. So land the rest, and train up to the stream's offsets.
        land_present(warehouse, spec)
        cut = Cut(warehouse.latest_version(table), None, position)
    manifest = pretrain_snapshot(
        DeployedModel(spec, warehouse), table, cut, Interval(None, None), context.progress
    ).manifest
    return manifest


def _write_empty_snapshot(
    context: UpgradeContext, position: dict[str, Any], parameters: dict[str, Any]
) -> Manifest:
    """Write a snapshot without keys, with these learned parameters, at a position of the live generation."""
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
