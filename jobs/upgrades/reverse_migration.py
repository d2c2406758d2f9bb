"""Make an earlier version live again with the newer version's state, migrated back, so that no row is lost or doubled.

The live generation is stopped after a micro-batch. Its state is exported and migrated back, and a new generation of the
earlier version continues with exactly the next row. The new generation becomes live in one commit, as in every
promotion.

If an attempt is killed before this commit, it has written only snapshots, which the next attempt reuses. After the
commit, the live generation has the earlier version, so the next attempt has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import compatibility, generations, start_point
from jobs.lineage.generations import LIVE, REMOVED, RETIRED, DeployedModel, Generation, walk_ancestors
from jobs.lineage.leases import hold_stream
from jobs.spark.warehouse import Warehouse
from jobs.streaming.exporting import export
from jobs.upgrades.migration.migrating import migrate_along
from jobs.upgrades.migration.versions import MigrationStep, find_path_back

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest
    from jobs.storage.warehouse import Tables


class ReversedMigration(NamedTuple):
    """Outcome of a reverse migration: the live generation, and the generation that it replaced, if any.

    snapshot: the snapshot from which the live generation started; in a dry run, the snapshot of an earlier attempt.
    change: the changes of states (`compute_change_summary` in `migration.apply`); empty if an earlier attempt had
        migrated the states.
    """

    live: Generation
    retired: Generation | None
    snapshot: str | None
    change: dict[str, Any]
    dry: bool = False


class _Path(NamedTuple):
    """Steps from the live generation to the version of `target`, and the parameters that this version has learned."""

    live: Generation
    target: Generation
    steps: list[MigrationStep]
    parameters: dict[str, Any]


def reverse_migration(
    model: DeployedModel[Warehouse],
    name: str | None = None,
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> ReversedMigration:
    """Make the version of an earlier generation live again, with the live generation's state. Idempotent.

    Args:
        model: the deployed model.
        name: retired or removed generation whose version becomes live; None means the live generation's nearest
            ancestor with another version.
        dry_run: whether to return only the changes of states, and to write nothing except an export.
        on_progress: function called at the start of each step with the name of the step.

    Raises:
        UserError: the generation does not exist, no path leads back, a driver does not stop, or keys have an invalid
            state.
    """
    warehouse = model.warehouse
    known = generations.read_generations(warehouse, model.name)
    live = generations.select_named(known, model.name)
    target = find_target(known, live, name)
    if target is None:
        return ReversedMigration(live, None, live.snapshot_id, {})
    with _add_alternative(live, target):
        path = _find_path(model, live, target)
    if dry_run:
        manifest, change = _migrate_back(model, path, True, on_progress)
        return ReversedMigration(live, None, manifest and manifest.snapshot_id, change, True)
    reason = f"a roll-back to version {target.model_version}"
    _ = warehouse.spark  # starts Spark before the stream is stopped, which shortens the pause
    with hold_stream(warehouse, live, reason, True, on_progress):
        manifest, change = _migrate_back(model, path, False, on_progress)
        assert manifest is not None
        to_run = compatibility.select_spec(path.steps[-1].new, model.spec)
        partitions = to_run.stream.partitions or live.partitions
        new = start_point.begin_exported(model.with_spec(to_run), manifest, live, LIVE, partitions)
    return ReversedMigration(new, live, manifest.snapshot_id, change)


def _migrate_back(
    model: DeployedModel[Warehouse], path: _Path, dry_run: bool, on_progress: Callable[[str], None]
) -> tuple[Manifest | None, dict[str, Any]]:
    """Export the live state and migrate it back; return the snapshot and the changes of states.

    In a dry run, the snapshot comes from an earlier attempt, or is None.
    """
    with _add_alternative(path.live, path.target):
        source, _ = export(model, path.live, on_progress=on_progress)
        manifest, change, _ = migrate_along(
            model.warehouse, source, path.steps, path.parameters, dry_run, on_progress
        )
    return manifest, change


@contextmanager
def _add_alternative(live: Generation, target: Generation) -> Iterator[None]:
    """Extend an error with the name of the live generation, and with the alternative to roll back without the state."""
    try:
        yield
    except UserError as error:
        alternative = ""
        if target.status == RETIRED:
            alternative = f"; without --last-state {target.generation} would continue from its own checkpoint"
        message = f"{error.message}. {live.generation} is live as before{alternative}"
        raise UserError(message, error.exit_code) from error


def find_target(known: list[Generation], live: Generation, name: str | None) -> Generation | None:
    """Return the generation whose version will become live; None if this version is already live.

    Raises:
        UserError: there is no such generation, or the named generation does not have an earlier version.
    """
    if name is None:
        others = (one for one in walk_ancestors(known, live) if one.model_version != live.model_version)
        ancestor = next(others, None)
        if ancestor is None:
            raise UserError(
                f"the live generation {live.generation} of {live.model} came from no other version than its own, "
                f"{live.model_version}: there is none to go back to"
            )
        # A live generation that came from a later version is the result of an earlier attempt.
        return ancestor if ancestor.model_version < live.model_version else None
    found = generations.select_named(known, live.model, name)
    if found.fingerprint == live.fingerprint:
        return None
    if found.status not in (RETIRED, REMOVED):
        raise UserError(f"{name} is {found.status}, not retired: there is nothing to go back to")
    if found.model_version >= live.model_version:
        raise UserError(
            f"{name} is of version {found.model_version} and the live generation {live.generation} of version "
            f"{live.model_version}: go there with `kalman-pipeline upgrade --model {live.model}`"
        )
    return found


def _find_path(model: DeployedModel[Tables], live: Generation, target: Generation) -> _Path:
    """Return the path from the live generation back to the target's version.

    Raises:
        UserError: there is no path.
    """
    origin, target_origin = (generations.read_origin_manifest(model.warehouse, one) for one in (live, target))
    steps = find_path_back(model, origin, target_origin)
    built = compatibility.describe_generation_build(model, live, origin)
    difference = compatibility.explain_source_change(built, steps[-1].new)
    if difference is not None:
        raise UserError(
            f"the state of {live.generation} is no state of version {target.model_version} of {model.name}: "
            f"{difference}"
        )
    return _Path(live, target, steps, target_origin.parameters)
