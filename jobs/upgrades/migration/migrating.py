"""Migrate a snapshot to another version of its model, step by step, and commit the migrated snapshot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError, extract_python_error
from jobs.core.report import format_count
from jobs.lineage.generations import DeployedModel
from jobs.snapshots.manifests import GOOD, find, read_manifests
from jobs.snapshots.model_runtime import ship, ship_named
from jobs.snapshots.state_rows import read_stored_rows
from jobs.snapshots.store import find_whole, find_whole_states, write
from jobs.snapshots.verified_rows import read_rows
from jobs.snapshots.waiting_rows import read_waiting_rows
from jobs.spark.job_labels import label_jobs
from jobs.spark.warehouse import Warehouse
from jobs.storage.positions import is_in_table
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables
from jobs.streaming.refused_rows import build_rejected_rows, keep
from jobs.upgrades.migration.apply import (
    NO_NUMBER,
    apply_migration,
    compute_change_summary,
    select_without_number,
)
from jobs.upgrades.migration.parameters import carry_over_parameters, list_parameter_changes
from jobs.upgrades.migration.rekey import NEWEST, Rekey, build_rekey, find_collisions, merge_rows, rekey_rows
from jobs.upgrades.migration.state_map import Migration, build_migration
from jobs.upgrades.migration.versions import find_path_forward
from kalman.filters.own_parameters import find_key_parameters

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.snapshots.manifests import Manifest
    from jobs.snapshots.waiting_rows import Held
    from jobs.specs.model_spec import ModelSpec
    from jobs.upgrades.migration.versions import MigrationStep

MOST_LEFT_OUT = 0.5
"""Maximum share of keys that a migration or an import of states leaves out because their state is invalid."""


def migrate(
    model: DeployedModel[Warehouse],
    source: Manifest,
    target: int,
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[Manifest | None, dict[str, Any], bool]:
    """Return the migrated snapshot (None in a dry run), the changes of states, and whether this call wrote it.

    model: the deployed model, whose folder also has the specs of other versions.

    Raises:
        UserError: no path leads to the version, or some keys would have an invalid state.
    """
    steps = find_path_forward(model, source, target)
    return migrate_along(model.warehouse, source, steps, None, dry_run, on_progress)


def migrate_along(
    warehouse: Warehouse,
    source: Manifest,
    steps: list[MigrationStep],
    parameters: dict[str, Any] | None = None,
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[Manifest | None, dict[str, Any], bool]:
    """Migrate a snapshot along steps; return the same values as `migrate`.

    This process checks every key before Spark starts, since it can read and migrate half a million keys per second. A
    dry run ends after the check, unless the migration renames keys.

    parameters: parameters that the last version learned earlier; None means the parameters that are carried over.

    Raises:
        UserError: a step is impossible, or some keys would have an invalid state.
    """
    plan, spec = plan_migration(source, steps, parameters), steps[-1].new
    migration, identity = plan.migration, plan.snapshot_id
    found = find(warehouse, identity) if dry_run else find_whole(warehouse, identity)
    if found is not None:
        return found, {"parameters": plan.changes}, False
    on_progress("checking every key")
    version, change = _check_keys(warehouse, source, spec, plan)
    if dry_run and not any(step.keys is not None for step in steps):
        return None, change, False
    spark, activity = warehouse.spark, f"migrate {spec.name}"
    ship_functions(warehouse, steps)
    with label_jobs(spark, activity, "check the waiting rows"):
        held = _convert_waiting_rows(warehouse, source, spec)
    states = apply_migration(read_stored_rows(warehouse, source, version), migration)
    rekey = build_rekey(warehouse, steps, migration.target)
    if rekey is not None:
        _refuse_waiting_rows(source, f"version {spec.version} gives keys other names")
        held = held and held._replace(ids=None)  # the remembered ids belong to the old keys
        on_progress("giving every state its new key")
        with label_jobs(spark, activity, "give every state its new key"):
            states, change["rekeyed"] = _apply_rekey(states.frame, rekey, spec)
    if dry_run:
        return None, change, False
    if change["left_out"]:
        rows = read_rows(warehouse, source.snapshot_id, source.model, version)
        keys = select_without_number(rows, migration)
        why = F.lit(f"{NO_NUMBER}; left out of the migration to version {spec.version}")
        keep_left_out(
            warehouse, keys, source.model, f"snapshots/{source.snapshot_id}", why, identity, "migrate"
        )
    on_progress(f"writing {format_count(change['keys'], 'key')}")
    manifest = _describe_snapshot(source, spec, plan)
    with label_jobs(spark, activity, "write the snapshot"):
        return write(warehouse, manifest, states, held), change, True


def _describe_snapshot(source: Manifest, spec: ModelSpec, plan: MigrationPlan) -> Manifest:
    """Return the manifest of the migrated snapshot, not yet committed."""
    return replace(
        source,
        snapshot_id=plan.snapshot_id,
        model_version=spec.version,
        fingerprint=spec.fingerprint(),
        parameters=plan.parameters,
        spec=spec.format_stored_text(),
        parent=source.snapshot_id,
        committed_at=None,
        waiting=None,
    )


def _check_keys(
    warehouse: Warehouse, source: Manifest, spec: ModelSpec, plan: MigrationPlan
) -> tuple[int, dict[str, Any]]:
    """Check every key of a snapshot in this process; return the version of its rows, and the changes of states.

    Raises:
        UserError: the rows are incomplete, the target cannot read the waiting rows, or states would be invalid.
    """
    _refuse_waiting(source, spec)
    here = warehouse.work(in_process=True)
    version = find_whole_states(here, source)
    change = compute_change_summary(read_stored_rows(here, source, version).batches, plan.migration)
    _refuse_without_numbers(change, source)
    _refuse_wrong_keys(change, spec.version)
    return version, {**change, "parameters": plan.changes}


def _refuse_without_numbers(change: dict[str, Any], source: Manifest) -> None:
    """Refuse a snapshot with too many invalid keys, because then the model is wrong, and not some keys."""
    count, keys = change["left_out"], change["left_out"] + change["keys"]
    if count > MOST_LEFT_OUT * keys:
        raise UserError(
            f"the state of {count:,} of {keys:,} keys in snapshot {source.snapshot_id} is not a number (such as "
            f"{', '.join(change['left_out_keys'])}), which is more than a migration leaves out: nothing was written. "
            f"Find out what made them so, and pretrain from history instead (`kalman-pipeline upgrade --model "
            f"{source.model} --mode retrain`)",
            RUN_FAILED,
        )


def keep_left_out(
    warehouse: Warehouse, keys: DataFrame, model: str, source: str, reason: Column, snapshot: str, verb: str
) -> None:
    """Write the keys that a snapshot leaves out to quarantine, with their states, once per snapshot.

    Args:
        warehouse: warehouse of the quarantine.
        keys: frame with `key` and `state` (text).
        model: name of the model.
        source: source of the states.
        reason: reason why each key is left out.
        snapshot: id of the snapshot.
        verb: verb of the command that made the snapshot.
    """
    rows = build_rejected_rows(
        keys,
        model,
        F.lit(source),
        F.to_json(F.struct(F.lit(snapshot).alias("snapshot"), "key")),
        F.to_json(F.struct(F.struct("key", "state").alias("left_out"))),
        reason,
    )
    keep(warehouse, rows, (f"{verb}-{snapshot}", 1))


def _refuse_wrong_keys(change: dict[str, Any], target: int) -> None:
    if change["wrong"]:
        raise UserError(
            f"{change['wrong']:,} of {change['keys']:,} keys (such as {', '.join(change['wrong_keys'])}) would come "
            f"out not finite, not positive semidefinite, or with undetermined states for which version {target} has "
            f"no room: nothing was written",
            RUN_FAILED,
        )


def _refuse_waiting_rows(source: Manifest, reason: str) -> None:
    if source.waiting is not None and source.waiting["rows"]:
        raise UserError(
            f"{source.waiting['rows']:,} rows wait for the watermark in snapshot {source.snapshot_id}, and {reason}: "
            f"pretrain it instead"
        )


def ship_functions(warehouse: Warehouse, steps: list[MigrationStep]) -> None:
    """Send the user functions of all versions on the path, and of the migration, to Spark's workers."""
    for spec in {spec.version: spec for step in steps for spec in (step.old, step.new)}.values():
        ship(warehouse.spark, spec.definition())
    for step in steps:
        names = [
            step.rules and step.rules.function,
            step.keys and step.keys.function,
            step.keys and step.keys.merge,
        ]
        ship_named(
            warehouse.spark,
            [name for name in names if name and name != NEWEST],
            step.rules_spec.functions_folder,
        )


def _apply_rekey(states: DataFrame, rekey: Rekey, spec: ModelSpec) -> tuple[DataFrame, dict[str, Any]]:
    """Return the states with their new keys, and the number of new keys.

    Raises:
        UserError: keys collide without a merge rule, or a function returns invalid keys or states.
    """
    try:
        renamed = rekey_rows(states, rekey)
        old, new, some = find_collisions(renamed)
        if old and rekey.merge is None:
            raise UserError(
                f"version {spec.version} of {spec.name}: {old:,} keys come out as {new:,} (such as {'; '.join(some)}), "
                f"and nothing says what becomes of their states: write migrate.keys.merge, newest or module:function. "
                f"Nothing was written",
                RUN_FAILED,
            )
        joined = merge_rows(renamed, rekey)
        return joined, {"keys": joined.count(), "merged": old, "into": new}
    except PySparkException as error:
        raise UserError(f"{extract_python_error(error)}. Nothing was written", RUN_FAILED) from error


def _convert_waiting_rows(warehouse: Warehouse, source: Manifest, spec: ModelSpec) -> Held | None:
    """Return the waiting rows of a snapshot in the form of another version of its model; None without such rows."""
    held = read_waiting_rows(warehouse, source)
    if held is None:
        return None
    if source.model_spec().id_columns != spec.id_columns:
        held = held._replace(ids=None)
    return held if spec.timed else None


def _refuse_waiting(source: Manifest, spec: ModelSpec) -> None:
    """Refuse a snapshot if another version of its model cannot read the rows that wait for the watermark.

    Raises:
        UserError: the other version cannot read the waiting rows.
    """
    if source.waiting is None:
        return
    old, version = source.model_spec(), f"version {spec.version}"
    for field, before, now in (
        ("measurement", old.measurement, spec.measurement),
        ("control", old.control, spec.control),
        ("duplicates.id", old.id_columns, spec.id_columns),
    ):
        if before != now:
            _refuse_waiting_rows(source, f"{version} reads other columns ({field})")
    if not spec.order.waits:
        _refuse_waiting_rows(source, f"{version} has no order.kind: strict to take them")


class MigrationPlan(NamedTuple):
    """The migration of a snapshot along steps.

    parameters: learned parameters of the last version. changes: changes of parameters
    (`jobs.upgrades.migration.parameters.list_parameter_changes`).
    """

    migration: Migration
    parameters: dict[str, Any]
    snapshot_id: str
    changes: list[dict[str, Any]]


def plan_migration(
    source: Manifest, steps: list[MigrationStep], parameters: dict[str, Any] | None = None
) -> MigrationPlan:
    """Return the migration of a snapshot along steps.

    parameters: parameters that the last version learned earlier; None means the parameters that are carried over.

    Raises:
        UserError: a step is impossible.
    """
    carried = carry_over_parameters(steps, source.parameters)
    after = carried.parameters if parameters is None else parameters
    migration = build_migration(steps, source.parameters, after, carried.names)
    has_own = any(find_key_parameters(one).rows for one in (migration.source, migration.target))
    chosen = migration.key_parameters if has_own else None
    identity = compute_snapshot_id(source, steps, after, chosen)
    changes = list_parameter_changes(steps[0].old, steps[-1].new, source.parameters, after, carried)
    return MigrationPlan(migration, after, identity, changes)


def find_original_migration(
    manifest: Manifest, source: Manifest, steps: list[MigrationStep]
) -> Migration | None:
    """Return the migration by which the steps made a snapshot from another; None if the steps did not make it."""
    plan = plan_migration(source, steps, manifest.parameters)
    if plan.snapshot_id == manifest.snapshot_id:
        return plan.migration
    if (
        compute_snapshot_id(source, steps, manifest.parameters) == manifest.snapshot_id
    ):  # an earlier release made the snapshot
        return build_migration(steps, source.parameters, manifest.parameters)
    return None


def compute_snapshot_id(
    source: Manifest,
    steps: list[MigrationStep],
    parameters: dict[str, Any],
    of_keys: tuple[tuple[str, str], ...] | None = None,
) -> str:
    """Return the id of the snapshot that results from the source, the steps and the parameters.

    of_keys: per-key parameters that are carried over (`pair_key_parameters`); None if there are none, or if the id
    comes from a release that did not choose among them.
    """
    spec = steps[-1].new
    # A step forward does not depend on the `reverse` rules.
    rules = [step.rules and step.rules.model_dump(by_alias=True, exclude={"reverse"}) for step in steps]
    inputs: list[Any] = [source.snapshot_id, [step.new.fingerprint() for step in steps], rules, parameters]
    if of_keys is not None:
        inputs.append(of_keys)
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-v{spec.version}-{source.version}-{digest[:10]}"


def select_source_snapshot(warehouse: Tables, model: str, snapshot: str | None, target: int) -> Manifest:
    """Return the named snapshot, or the newest snapshot of an earlier version from which a stream can start now.

    Raises:
        UserError: there is no such snapshot.
    """
    if snapshot is not None:
        found = find(warehouse, snapshot)
        if found is None or found.model != model:
            raise UserError(f"model {model} has no snapshot {snapshot}")
        return found
    table = measurements(model)
    known = warehouse.table_id(table) if warehouse.exists(table) else None
    startable = [
        one
        for one in read_manifests(warehouse, model)
        if one.status == GOOD
        and one.cut is None
        and one.model_version < target
        and (known is None or one.position.get("id", known) == known and is_in_table(warehouse, one.position))
    ]
    if not startable:
        raise UserError(
            f"model {model} has no snapshot of a version before {target} that a stream could start from"
        )
    return max(startable, key=lambda one: (one.version, one.snapshots_version))
