"""Plan which of a model's generations, snapshots and estimates may be removed. A pure function: no Spark, no clock.

The plan always keeps the following, whatever the settings:

- a live or shadow generation, a generation that a driver still holds, and the generation to which `rollback` returns;
- the snapshot from which any kept generation started;
- the newest good snapshot from which a stream can start: of the model, of the deployed version, and of the version of
  each kept generation;
- estimates that are part of the live ones now, or would be after a roll-back to a kept generation.

Of all others, the plan keeps the newest and the young ones, as the spec's section `retention` says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from jobs.lineage.generations import (
    FAILED,
    LIVE,
    REMOVED,
    RETIRED,
    SHADOW,
    Generation,
    find_predecessor,
    select_live,
    walk_ancestors,
)
from jobs.snapshots.manifests import GOOD
from jobs.specs.retention import Retention

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest

_NEVER = datetime(1, 1, 1, tzinfo=UTC)


class RetentionPlan(NamedTuple):
    """The names that may be removed, oldest first, and for each other name the reason to keep it.

    estimates: generations whose estimates may be removed if the spec or the command asks for it.
    """

    generations: list[str]
    snapshots: list[str]
    estimates: list[str]
    why_generations: dict[str, str]
    why_snapshots: dict[str, str]


def plan_retention(
    generations: Sequence[Generation],
    manifests: Sequence[Manifest],
    rules: Retention,
    now: datetime,
    deployed: str,
    driven: Collection[str] = (),
) -> RetentionPlan:
    """Return the retention plan for one model.

    Args:
        generations: all generations of the model.
        manifests: all manifests of the model.
        rules: the spec's section `retention`.
        now: the current time.
        deployed: fingerprint of the deployed spec.
        driven: generations that a driver holds, whatever their status.
    """
    keep = choose_kept_generations(generations, rules, now, driven)
    known = [one for one in generations if one.status != REMOVED]
    removable = [one.generation for one in known if one.generation not in keep]
    kept = [one for one in known if one.generation in keep]
    snapshots = choose_kept_snapshots(manifests, kept, rules, now, deployed)
    old = [one.snapshot_id for one in manifests if one.status == GOOD and one.snapshot_id not in snapshots]
    live = list_lineages(generations, kept)
    gone = [one.generation for one in generations if one.status == REMOVED or one.generation in removable]
    return RetentionPlan(removable, old, [one for one in gone if one not in live], keep, snapshots)


def choose_kept_generations(
    generations: Sequence[Generation], rules: Retention, now: datetime, driven: Collection[str] = ()
) -> dict[str, str]:
    """Return the generations to keep, each with the reason."""
    live = select_live(generations)
    ended = sorted(
        (one for one in generations if one.status in (RETIRED, FAILED)),
        key=lambda one: (one.retired_at or one.created_at or now, one.generation),
    )
    newest = max(rules.generations.newest, 0 if live else 1)
    keep: dict[str, str] = {}
    for one in generations:
        if one.status in (LIVE, SHADOW):
            keep[one.generation] = f"it is {'live' if one.status == LIVE else 'a shadow'}"
        elif one.generation in driven and one.status != REMOVED:
            keep[one.generation] = "a driver still holds it"
    for place, one in enumerate(reversed(ended)):
        since = one.retired_at or one.created_at or now
        if live is not None and one.generation in (live.parent, find_predecessor(generations, live)):
            keep[one.generation] = "rollback goes back to it"
        elif one.generation not in keep and place < newest:
            keep[one.generation] = f"one of the {newest} newest"
        elif one.generation not in keep and now - since < rules.generations.span:
            keep[one.generation] = f"younger than {rules.generations.age}"
    return keep


def choose_kept_snapshots(
    manifests: Sequence[Manifest],
    generations: Sequence[Generation],
    rules: Retention,
    now: datetime,
    deployed: str,
) -> dict[str, str]:
    """Return the snapshots to keep, each with the reason; `generations` are the kept generations."""
    good = sorted(
        (one for one in manifests if one.status == GOOD),
        key=lambda one: (one.committed_at or now, one.snapshot_id),
    )
    started = {one.snapshot_id: one.generation for one in generations}
    last: dict[str, str] = {}
    for fingerprint in (None, deployed, *(one.fingerprint for one in generations)):
        startable = [one for one in good if one.cut is None and fingerprint in (None, one.fingerprint)]
        if startable:
            newest = max(startable, key=lambda one: (one.version, one.committed_at or _NEVER))
            of = "" if fingerprint is None else f" of version {newest.model_version}"
            last.setdefault(newest.snapshot_id, f"the last good one{of}")
    if good:
        last.setdefault(good[-1].snapshot_id, "the last good one")
    keep: dict[str, str] = {}
    for place, one in enumerate(reversed(good)):
        if one.snapshot_id in started:
            keep[one.snapshot_id] = f"{started[one.snapshot_id]} started from it"
        elif one.snapshot_id in last:
            keep[one.snapshot_id] = last[one.snapshot_id]
        elif place < rules.snapshots.newest:
            keep[one.snapshot_id] = f"one of the {rules.snapshots.newest} newest"
        elif now - (one.committed_at or now) < rules.snapshots.span:
            keep[one.snapshot_id] = f"younger than {rules.snapshots.age}"
    return keep


def list_lineages(generations: Sequence[Generation], kept: Sequence[Generation]) -> set[str]:
    """Return the generations whose estimates would be part of the live ones if a kept generation were live."""
    return {one.generation for first in kept for one in walk_ancestors(generations, first)}
