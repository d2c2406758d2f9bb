"""The parts that all upgrade modes share: context, refusals, migrated snapshot and dry run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import UserError
from jobs.core.progress import Progress
from jobs.core.settings import Settings
from jobs.lineage import compatibility, generations
from jobs.lineage.generations import SHADOW, DeployedModel, Generation
from jobs.lineage.leases import hold_stream
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables
from jobs.streaming.exporting import export
from jobs.upgrades.decision import VersionComparison
from jobs.upgrades.migration.apply import format_change
from jobs.upgrades.migration.migrating import migrate
from jobs.upgrades.migration.versions import MigrationStep, find_path_forward

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest

BLUE_GREEN, STOP_START, RETRAIN, STATELESS = "blue-green", "stop-start", "retrain", "stateless"

REPARTITION = "repartition"

Outcome = tuple[list[str], dict[str, Any]]
"""The lines of a report, and its data."""
Compare = Callable[[Tables, ModelSpec, Generation, Generation], tuple[VersionComparison, str]]


class UpgradeContext(NamedTuple):
    """One run of an upgrade: the deployed model, the live generation, and the options of the command.

    compare: function that returns the comparison of two generations and the path of its report. promote: whether a
    shadow becomes live if its comparison is good. partitions: requested number for the mode repartition. drain: whether
    modes that need a stopped stream stop the stream. force: whether the shadow is promoted whatever the comparison
    says.
    needed: whether a comparison without an answer yet is a reason to try again later instead of a failure. catch_up:
    whether a live generation that lags its shadow is driven before the comparison.
    """

    settings: Settings
    model: DeployedModel[Warehouse]
    live: Generation
    progress: Progress
    compare: Compare
    dry_run: bool = False
    promote: bool = True
    partitions: int | None = None
    drain: bool = False
    force: bool = False
    needed: bool = False
    catch_up: bool = False

    def exclusive(self, mode: str) -> AbstractContextManager[None]:
        """Lock the stream of the live generation, so that no driver runs it during the upgrade."""
        _ = self.model.warehouse.spark  # starts Spark before the stream is stopped, which shortens the pause
        reason = f"an upgrade to version {self.model.spec.version} ({mode})"
        return hold_stream(self.model.warehouse, self.live, reason, self.drain, self.progress.note)


def find_shadow(
    context: UpgradeContext, fingerprint: str, fits: Callable[[Generation], bool] = lambda shadow: True
) -> Generation | None:
    """Return the live generation's shadow that an earlier attempt made for a definition, or None.

    A shadow with states of format 1 is retired, because this release cannot continue it; then a new shadow is made.
    """
    warehouse, live = context.model.warehouse, context.live
    known = generations.read_generations(warehouse, live.model)
    for one in known:
        if (one.status, one.parent, one.fingerprint) != (SHADOW, live.generation, fingerprint):
            continue
        if Checkpoint(warehouse, one.checkpoint).has_states_of_format_1():
            generations.retire(warehouse, one, known)
        elif fits(one):
            return one
    return None


def check_already_upgraded(spec: ModelSpec, live: Generation) -> Outcome | None:
    """Return the outcome if the live generation already has the deployed version; else None.

    Raises:
        UserError: the deployed version is not later than the live version.
    """
    if live.fingerprint == spec.fingerprint():
        line = f"generation {live.generation} is of version {live.model_version} already: nothing to do"
        return [line], {"generation": live.generation, "promoted": False, "upgraded": False}
    if live.model_version >= spec.version:
        back = f", or roll back (`kalman-pipeline rollback --model {spec.name}`)"
        raise UserError(
            f"the live generation {live.generation} is of version {live.model_version} and the spec of version "
            f"{spec.version}: raise the spec's version{back if spec.version < live.model_version else ''}"
        )
    return None


def report_replacement(context: UpgradeContext, new: Generation, details: str) -> Outcome:
    """Return the outcome of an upgrade that made a new generation live; details: text about the new generation."""
    live = context.live
    return [
        f"generation {new.generation} {details}; {live.generation} is retired",
        f"continue with `kalman-pipeline stream --model {context.model.name}`",
    ], {
        "generation": new.generation,
        "snapshot": new.snapshot_id,
        "retired": live.generation,
        "upgraded": True,
        "promoted": True,
    }


def find_migration_steps(context: UpgradeContext) -> list[MigrationStep]:
    """Return the migrations from the live generation's version to the deployed version.

    Raises:
        UserError: no path leads to the deployed version, or the deployed version reads another source.
    """
    steps = find_path_forward(
        context.model,
        generations.read_origin_manifest(context.model.warehouse, context.live),
        context.model.spec.version,
    )
    refuse_other_source(context)
    return steps


def refuse_other_source(context: UpgradeContext) -> None:
    """Refuse a version that reads another source, because the position of the state belongs to the old source.

    Raises:
        UserError: the version reads another source.
    """
    spec, live = context.model.spec, context.live
    began_from = generations.read_origin_manifest(context.model.warehouse, live)
    built = compatibility.describe_generation_build(context.model, live, began_from)
    difference = compatibility.explain_source_change(built, spec)
    if difference is not None:
        raise UserError(f"{spec.name} cannot be upgraded to version {spec.version}: {difference}")


def refuse_other_keys(
    context: UpgradeContext, steps: Sequence[MigrationStep], in_shadow: bool = False
) -> None:
    """Refuse a version with other keys if it would read rows that have the keys of the live generation.

    In shadow it always reads such rows. Otherwise it reads landed rows that the live generation has not read.

    Args:
        context: context of the upgrade.
        steps: migrations to the version (`find_migration_steps`).
        in_shadow: whether the version will run in shadow of the live generation.

    Raises:
        UserError: the version has other keys, and would read such rows.
    """
    warehouse, spec, live = context.model.warehouse, context.model.spec, context.live
    if not any(step.keys is not None for step in steps):
        return
    if in_shadow:
        raise UserError(
            f"version {spec.version} of {spec.name} has other keys, so it cannot read the same rows in shadow: let "
            f"version {live.model_version} read all rows with its keys, stop it, and run `kalman-pipeline upgrade "
            f"--model {spec.name} --mode stop-start`"
        )
    newest = warehouse.latest_version(measurements(spec.name))
    if live.topic is None and generations.compute_progress_rank(warehouse, live) < newest:
        raise UserError(
            f"rows with the keys of version {live.model_version} have landed that {live.generation} has not read: "
            f"run `kalman-pipeline stream --model {spec.name}` first"
        )


def migrate_live_state(context: UpgradeContext) -> tuple[Manifest | None, dict[str, Any]]:
    """Export and migrate the live state; return the snapshot and the changes of states.

    In a dry run, the snapshot comes from an earlier attempt, or is None.
    """
    note = context.progress.note
    source, _ = export(context.model, context.live, on_progress=note)
    manifest, change, _ = migrate(context.model, source, context.model.spec.version, context.dry_run, note)
    return manifest, change


def preview_migration(context: UpgradeContext) -> Outcome:
    """Return the changes of states, and write nothing except the export."""
    manifest, change = migrate_live_state(context)
    live = context.live
    lines = [f"{live.generation} (version {live.model_version}) to version {context.model.spec.version}"]
    if manifest is not None:
        lines.append(f"migrated before: snapshot {manifest.snapshot_id}")
    lines += [*format_change(context.model.name, change), "dry run: nothing was written but the export"]
    return lines, {"dry_run": True, "change": change}
