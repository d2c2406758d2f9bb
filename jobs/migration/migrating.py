"""Migrate a snapshot to another version of its model, step by step, and commit the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

import kalman
from jobs.core.errors import RUN_FAILED, UserError, raised_in_python
from jobs.migration.apply import apply_migration, change_of
from jobs.migration.rekey import NEWEST, Rekey, collisions, merged, rekey_of, rekeyed
from jobs.migration.state_map import kept_in_unit, migration, state_map_of
from jobs.migration.versions import known_versions, path_between
from jobs.snapshots.manifests import GOOD, all_of, find
from jobs.snapshots.store import find_whole, verify, write
from jobs.snapshots.waiting_rows import verified
from jobs.spark.conf import codegen_for
from jobs.spark.job_labels import labelled
from jobs.spark.user_functions import ship, ship_named
from jobs.warehouse.delta import Warehouse
from kalman.models.groups import GROUPS, begin_states

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.migration.versions import Step
    from jobs.snapshots.manifests import Manifest
    from jobs.snapshots.waiting_rows import Held
    from jobs.specs.model_spec import ModelSpec


def migrate(
    warehouse: Warehouse,
    source: Manifest,
    spec: ModelSpec,
    target: int,
    dry_run: bool = False,
    told: Callable[[str], None] = lambda text: None,
) -> tuple[Manifest | None, dict[str, Any], bool]:
    """Return the migrated snapshot (None if it is a dry run), what changed, and if it was made now.

    spec: the deployed one, beside whose file those of other versions are.

    Raises:
        UserError: there is no way between the versions, or some keys would come out wrong.
    """
    known = known_versions(warehouse, spec)
    # What the snapshot's states mean is what its own manifest says, not what a file of that version says today.
    known[source.model_version] = source.model_spec(spec.folder)
    steps = path_between(known, source.model_version, target)
    if not steps:
        raise UserError(f"snapshot {source.snapshot_id} is of version {target} already")
    return migrate_along(warehouse, source, steps, parameters_after(steps, source.parameters), dry_run, told)


def migrate_along(
    warehouse: Warehouse,
    source: Manifest,
    steps: list[Step],
    parameters: dict[str, Any],
    dry_run: bool = False,
    told: Callable[[str], None] = lambda text: None,
) -> tuple[Manifest | None, dict[str, Any], bool]:
    """Do what `migrate` does along these steps, to a snapshot with these learned parameters.

    Raises:
        UserError: a step cannot be made, or some keys would come out wrong.
    """
    way = migration(steps, source.parameters, parameters)
    spec, target = steps[-1].new, steps[-1].new.version
    identity = snapshot_id(source, steps, parameters)
    found = find_whole(warehouse, identity)
    if found is not None:
        return found, {}, False
    _ship(warehouse, steps)
    told("checking every key")
    doing = f"migrate {spec.name}"
    with labelled(warehouse.spark, doing, "check every key"):
        rows, held = verify(warehouse, source), waiting_for(warehouse, source, spec)
        with codegen_for(warehouse.spark, source.key_count):
            change = change_of(rows, way)
    if change["wrong"]:
        raise UserError(
            f"{change['wrong']:,} of {change['keys']:,} keys (such as {', '.join(change['wrong_keys'])}) would come "
            f"out not finite, not positive semidefinite, or with undetermined states for which version {target} has "
            f"no room: nothing was written",
            RUN_FAILED,
        )
    states = apply_migration(rows, way)
    rekey = rekey_of(warehouse, steps, way.target)
    if rekey is not None:
        if source.waiting is not None and source.waiting["rows"]:
            raise UserError(
                f"{source.waiting['rows']:,} rows wait for the watermark in snapshot {source.snapshot_id}, and version "
                f"{spec.version} gives keys other names: pretrain it instead"
            )
        held = held and held._replace(ids=None)  # they are known by their old keys alone
        told("giving every state its new key")
        with labelled(warehouse.spark, doing, "give every state its new key"):
            states, change["rekeyed"] = _rekeyed(states, rekey, spec)
    if dry_run:
        return None, change, False
    told(f"writing {change['keys']:,} keys")
    made = replace(
        source,
        snapshot_id=identity,
        model_version=spec.version,
        fingerprint=spec.fingerprint(),
        parameters=parameters,
        spec=spec.model_dump_json(by_alias=True),
        parent=source.snapshot_id,
        committed_at=None,
        waiting=None,
    )
    with labelled(warehouse.spark, doing, "write the snapshot"):
        return write(warehouse, made, states, held), change, True


def _ship(warehouse: Warehouse, steps: list[Step]) -> None:
    """Give Spark's workers the functions of the versions that are passed, and those that carry states and keys over."""
    for spec in {spec.version: spec for step in steps for spec in (step.old, step.new)}.values():
        ship(warehouse.spark, spec.definition())
    for step in steps:
        named = [
            step.rules and step.rules.function,
            step.keys and step.keys.function,
            step.keys and step.keys.merge,
        ]
        ship_named(warehouse.spark, [one for one in named if one and one != NEWEST], step.later.folder)


def _rekeyed(states: DataFrame, way: Rekey, spec: ModelSpec) -> tuple[DataFrame, dict[str, Any]]:
    """Return states with their new keys, and how many keys that makes.

    Raises:
        UserError: keys come out as one and nothing says what becomes of them, or a function returns what it should not.
    """
    try:
        renamed = rekeyed(states, way)
        old, new, some = collisions(renamed)
        if old and way.merge is None:
            raise UserError(
                f"version {spec.version} of {spec.name}: {old:,} keys come out as {new:,} (such as {'; '.join(some)}), "
                f"and nothing says what becomes of their states: write migrate.keys.merge, newest or module:function. "
                f"Nothing was written",
                RUN_FAILED,
            )
        joined = merged(renamed, way)
        return joined, {"keys": joined.count(), "merged": old, "into": new}
    except PySparkException as error:
        raise UserError(f"{raised_in_python(error)}. Nothing was written", RUN_FAILED) from error


def waiting_for(warehouse: Warehouse, source: Manifest, spec: ModelSpec) -> Held | None:
    """Return the rows that wait in a snapshot, as rows that wait for another version of its model.

    Raises:
        UserError: the other version could not take them.
    """
    held = verified(warehouse, source)
    if held is None or source.waiting is None:
        return None
    old = source.model_spec()
    for field, before, now in (
        ("measurement", old.measurement, spec.measurement),
        ("control", old.control, spec.control),
        ("duplicates.id", old.id_columns, spec.id_columns),
    ):
        if before != now and source.waiting["rows"]:
            raise UserError(
                f"{source.waiting['rows']:,} rows wait for the watermark in snapshot {source.snapshot_id}, and version "
                f"{spec.version} reads other columns ({field}): pretrain it instead"
            )
    if old.id_columns != spec.id_columns:
        held = held._replace(ids=None)
    if not spec.order.waits and source.waiting["rows"]:
        raise UserError(
            f"{source.waiting['rows']:,} rows wait for the watermark in snapshot {source.snapshot_id}, and version "
            f"{spec.version} has no order.kind: strict to take them: pretrain it instead"
        )
    return held if spec.timed else None


def parameters_after(steps: list[Step], learned: dict[str, Any]) -> dict[str, Any]:
    """Return the learned parameters of the last version: those of the same name and shape are kept where it says so."""
    for step in steps:
        rules = step.new.migrate
        policy = rules and rules.parameters
        if policy is None:
            policy = "keep" if kept_in_unit([state_map_of(step)]) else "spec"
        learned = _kept(step.new, learned) if policy == "keep" else {}
    return learned


def snapshot_id(source: Manifest, steps: list[Step], parameters: dict[str, Any]) -> str:
    """Return the id of the snapshot that these inputs give."""
    spec = steps[-1].new
    # How to come back does not count on the way there.
    rules = [step.rules and step.rules.model_dump(by_alias=True, exclude={"reverse"}) for step in steps]
    inputs = [source.snapshot_id, [step.new.fingerprint() for step in steps], rules, parameters]
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-v{spec.version}-{source.version}-{digest[:10]}"


def _kept(spec: ModelSpec, learned: dict[str, Any]) -> dict[str, Any]:
    """Return the learned parameters that a spec's model has too, in the same shape."""
    kept: dict[str, Any] = {}
    for name, value in learned.items():
        try:
            kalman.build(spec.definition(), {**kept, name: value})
        except kalman.ModelError:
            continue
        kept[name] = value
    try:
        begin_states(kalman.build, spec.definition(), kept)
    except kalman.ModelError:
        kept.pop(GROUPS, None)
    return kept


def source_snapshot(warehouse: Warehouse, model: str, snapshot: str | None, target: int) -> Manifest:
    if snapshot is not None:
        found = find(warehouse, snapshot)
        if found is None or found.model != model:
            raise UserError(f"model {model} has no snapshot {snapshot}")
        return found
    fit = [
        one
        for one in all_of(warehouse, model)
        if one.status == GOOD and one.cut is None and one.model_version < target
    ]
    if not fit:
        raise UserError(
            f"model {model} has no snapshot of a version before {target} that a stream could start from"
        )
    return max(fit, key=lambda one: (one.version, one.snapshots_version))
