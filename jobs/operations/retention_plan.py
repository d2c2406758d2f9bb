"""Decide what of a model's generations, snapshots and estimates may go. No Spark, no clock, nothing is changed here.

What is needed comes first, and no setting overrides it:

- a live or shadow generation, one that a driver still holds, and the one that `rollback` goes back to;
- the snapshot from which any generation that is kept began;
- the model's last good snapshot that a stream can start from, and the last one of each version that is deployed or
  that a generation is kept of;
- estimates that are part of the live ones now, or would be after a roll-back to a generation that is kept.

Of the rest the newest are kept, and the young ones, as the spec's section `retention` says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from jobs.lineage.generations import FAILED, LIVE, REMOVED, RETIRED, SHADOW, Generation
from jobs.snapshots.manifests import GOOD
from jobs.specs.retention import Retention

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest

_NEVER = datetime(1, 1, 1, tzinfo=UTC)


class Plan(NamedTuple):
    """What may go, by name, oldest first; and why each of the others is kept.

    estimates: generations whose estimates may go, if that is asked for.
    """

    generations: list[str]
    snapshots: list[str]
    estimates: list[str]
    why_generations: dict[str, str]
    why_snapshots: dict[str, str]


def plan(
    generations: Sequence[Generation],
    manifests: Sequence[Manifest],
    rules: Retention,
    now: datetime,
    deployed: str,
    driven: Collection[str] = (),
) -> Plan:
    """Return what of one model may go.

    Args:
        generations: all of the model's.
        manifests: all of the model's.
        rules: the spec's.
        now: ages are counted from here.
        deployed: fingerprint of the spec at hand.
        driven: generations that a driver holds, whatever their status says.
    """
    keep = kept_generations(generations, rules, now, driven)
    known = [one for one in generations if one.status != REMOVED]
    going = [one.generation for one in known if one.generation not in keep]
    stay = [one for one in known if one.generation in keep]
    snapshots = kept_snapshots(manifests, stay, rules, now, deployed)
    old = [one.snapshot_id for one in manifests if one.status == GOOD and one.snapshot_id not in snapshots]
    read = lineages(generations, stay)
    gone = [one.generation for one in generations if one.status == REMOVED or one.generation in going]
    return Plan(going, old, [one for one in gone if one not in read], keep, snapshots)


def kept_generations(
    generations: Sequence[Generation], rules: Retention, now: datetime, driven: Collection[str] = ()
) -> dict[str, str]:
    """Return the generations that stay, each with the reason."""
    live = next((one for one in generations if one.status == LIVE), None)
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
        if live is not None and one.generation == live.parent:
            keep[one.generation] = "rollback goes back to it"
        elif one.generation not in keep and place < newest:
            keep[one.generation] = f"one of the {newest} newest"
        elif one.generation not in keep and now - since < rules.generations.span:
            keep[one.generation] = f"younger than {rules.generations.age}"
    return keep


def kept_snapshots(
    manifests: Sequence[Manifest],
    generations: Sequence[Generation],
    rules: Retention,
    now: datetime,
    deployed: str,
) -> dict[str, str]:
    """Return the snapshots that stay, each with the reason; `generations` are those that stay."""
    good = sorted(
        (one for one in manifests if one.status == GOOD),
        key=lambda one: (one.committed_at or now, one.snapshot_id),
    )
    begun = {one.snapshot_id: one.generation for one in generations}
    last: dict[str, str] = {}
    for meaning in (None, deployed, *(one.fingerprint for one in generations)):
        startable = [one for one in good if one.cut is None and meaning in (None, one.fingerprint)]
        if startable:
            newest = max(startable, key=lambda one: (one.version, one.committed_at or _NEVER))
            of = "" if meaning is None else f" of version {newest.model_version}"
            last.setdefault(newest.snapshot_id, f"the last good one{of}")
    if good:
        last.setdefault(good[-1].snapshot_id, "the last good one")
    keep: dict[str, str] = {}
    for place, one in enumerate(reversed(good)):
        if one.snapshot_id in begun:
            keep[one.snapshot_id] = f"{begun[one.snapshot_id]} began from it"
        elif one.snapshot_id in last:
            keep[one.snapshot_id] = last[one.snapshot_id]
        elif place < rules.snapshots.newest:
            keep[one.snapshot_id] = f"one of the {rules.snapshots.newest} newest"
        elif now - (one.committed_at or now) < rules.snapshots.span:
            keep[one.snapshot_id] = f"younger than {rules.snapshots.age}"
    return keep


def lineages(generations: Sequence[Generation], stay: Sequence[Generation]) -> set[str]:
    """Return the generations whose estimates are read as the live ones if any of those that stay is live."""
    by_name = {one.generation: one for one in generations}
    found: set[str] = set()
    for one in stay:
        at: Generation | None = one
        while at is not None and at.generation not in found:
            found.add(at.generation)
            at = None if at.parent is None else by_name.get(at.parent)
    return found
