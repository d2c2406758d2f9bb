"""Make an earlier version live again with the newer one's state, carried back: no row is read again, none is lost.

The live generation is stopped behind a micro-batch and its state exported, carried back, and given to a new generation
of the earlier version, which goes on from exactly the next row. Making that one live is one commit, as in every switch.

Killed before that commit nothing has changed but for snapshots, which the next attempt finds; after it, the live
generation is of the earlier version, and the next attempt finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import compatibility, generations, start_point
from jobs.lineage.generations import LIVE, REMOVED, RETIRED, Generation
from jobs.lineage.pausing import exclusive_stream
from jobs.migration.inverse import path_back
from jobs.migration.migrating import migrate_along
from jobs.migration.versions import Step, known_versions
from jobs.streaming.exporting import export
from jobs.warehouse.delta import Warehouse

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest
    from jobs.specs.model_spec import ModelSpec


class ReversedMigration(NamedTuple):
    """What was done: the generation that is live, and the one that it replaced, None if nothing was to be done.

    snapshot: what the live one began from, or, of a dry run, what an earlier attempt has left, if one has.
    change: what became of the states (`jobs.migration.apply.change_of`), empty where an earlier attempt had carried them.
    """

    live: Generation
    retired: Generation | None
    snapshot: str | None
    change: dict[str, Any]
    dry: bool = False


class _Way(NamedTuple):
    """From the live generation to the version of an earlier one: the steps, and what the states are to mean at last."""

    live: Generation
    to: Generation
    steps: list[Step]
    parameters: dict[str, Any]


def reverse_migration(
    warehouse: Warehouse,
    spec: ModelSpec,
    name: str | None = None,
    dry_run: bool = False,
    told: Callable[[str], None] = lambda text: None,
) -> ReversedMigration:
    """Make the version of an earlier generation live, with the live generation's state. Again it changes nothing.

    Args:
        warehouse: where.
        spec: the deployed one, of whatever version; it says how the new generation is laid out.
        name: the generation whose version it is to be, retired or removed; by default the nearest one, of those that
            the live one came from, that is of another version.
        dry_run: say what would become of the states, and write nothing but an export.
        told: is told what is going on.

    Raises:
        UserError: there is no such generation, no way back, a driver that does not end, or keys would come out wrong.
    """
    known = generations.all_of(warehouse, spec.name)
    live = generations.named(warehouse, spec.name)
    to = target_of(known, live, name)
    if to is None:
        return ReversedMigration(live, None, live.snapshot_id, {})
    with _with_a_hint(live, to):
        way = _way(warehouse, spec, live, to)
    if dry_run:
        manifest, change = _snapshot(warehouse, way, True, told)
        return ReversedMigration(live, None, manifest and manifest.snapshot_id, change, True)
    with exclusive_stream(warehouse, live, f"a roll-back to version {to.model_version}", True, told):
        manifest, change = _snapshot(warehouse, way, False, told)
        assert manifest is not None
        laid_out = compatibility.spec_to_run(way.steps[-1].new, spec)
        partitions = laid_out.stream.partitions or live.partitions
        made = start_point.begin(warehouse, laid_out, manifest, LIVE, partitions, behind=live)
    return ReversedMigration(made, live, manifest.snapshot_id, change)


def _snapshot(
    warehouse: Warehouse, way: _Way, dry_run: bool, told: Callable[[str], None]
) -> tuple[Manifest | None, dict[str, Any]]:
    """Return the live generation's last state, carried back, and what that does to it; None if it is a dry run."""
    with _with_a_hint(way.live, way.to):
        source, _ = export(warehouse, way.live, told=told)
        manifest, change, _ = migrate_along(warehouse, source, way.steps, way.parameters, dry_run, told)
    return manifest, change


@contextmanager
def _with_a_hint(live: Generation, to: Generation) -> Iterator[None]:
    """Let a refusal say what is left: to go back without the state."""
    try:
        yield
    except UserError as error:
        left = ""
        if to.status == RETIRED:
            left = f"; without --last-state {to.generation} would go on from its own checkpoint"
        message = f"{error.message}. {live.generation} is live as before{left}"
        raise UserError(message, error.exit_code) from error


def target_of(known: list[Generation], live: Generation, name: str | None) -> Generation | None:
    """Return the generation whose version is to be live; None: it is.

    Raises:
        UserError: there is none, or none that this can go back to.
    """
    by_name = {one.generation: one for one in known}
    if name is None:
        at, seen = live, {live.generation}
        while at is not None and at.model_version == live.model_version:
            at = by_name.get(at.parent or "")
            if at is None or at.generation in seen:
                raise UserError(
                    f"the live generation {live.generation} of {live.model} came from no other version than its own, "
                    f"{live.model_version}: there is none to go back to"
                )
            seen.add(at.generation)
        # One that came from a later version is what an earlier attempt has made.
        return at if at.model_version < live.model_version else None
    found = by_name.get(name)
    if found is None:
        have = ", ".join(by_name)
        raise UserError(f"model {live.model} has no generation {name} (it has {have})")
    if found.fingerprint == live.fingerprint:
        return None
    if found.status not in (RETIRED, REMOVED):
        raise UserError(f"{name} is {found.status}, not retired: there is nothing to go back to")
    if found.model_version >= live.model_version:
        raise UserError(
            f"{name} is of version {found.model_version} and the live generation {live.generation} of version "
            f"{live.model_version}: the way there is `kalman-pipeline upgrade --model {live.model}`"
        )
    return found


def _way(warehouse: Warehouse, spec: ModelSpec, live: Generation, to: Generation) -> _Way:
    """Return the way from the live generation back to another one's version.

    What the states of both mean is what their own snapshots say. A spec file of that very meaning goes before: how to
    come back may have been written into it since.

    Raises:
        UserError: there is none.
    """
    files = known_versions(warehouse, spec)
    origin, first = start_point.origin(warehouse, live), start_point.origin(warehouse, to)
    for manifest in (origin, first):
        there = files.get(manifest.model_version)
        if there is None or there.fingerprint() != manifest.fingerprint:
            files[manifest.model_version] = manifest.model_spec()
    steps = path_back(files, live.model_version, to.model_version)
    made = compatibility.generation_built_with(warehouse, live, origin)
    other = compatibility.other_source(made, steps[-1].new)
    if other is not None:
        raise UserError(
            f"the state of {live.generation} is no state of version {to.model_version} of {spec.name}: {other}"
        )
    return _Way(live, to, steps, first.parameters)
