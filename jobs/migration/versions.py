"""Find the specs of a model's versions, and the way from one version to another.

A version's spec is the model's file itself, a file `versions/<model>.v<version>.yaml` beside it, or what the manifest
of any snapshot of that version keeps.
"""

from __future__ import annotations

from typing import NamedTuple

from jobs.core.errors import UserError
from jobs.snapshots.manifests import all_of
from jobs.specs.migration import Rekeying, StateMapSpec
from jobs.specs.model_spec import EARLIER, ModelSpec
from jobs.state.kernel import load_checked_spec
from jobs.warehouse.delta import Warehouse


class Step(NamedTuple):
    """One migration: from the old spec to the new; `back`: how, where that is the earlier version again."""

    old: ModelSpec
    new: ModelSpec
    back: StateMapSpec | None = None

    @property
    def rules(self) -> StateMapSpec | None:
        """Return what says what becomes of the states; None: all of them are kept under their names."""
        return self.new.migrate if self.back is None else self.back

    @property
    def later(self) -> ModelSpec:
        """Return the later version of the two, whose spec says what becomes of the states in both directions."""
        return self.new if self.back is None else self.old

    @property
    def section(self) -> str:
        """Return the section of that spec that says it."""
        return "migrate" if self.back is None else "migrate.reverse"

    @property
    def keys(self) -> Rekeying | None:
        """Return how the keys change; None: they stay. No way back changes them."""
        return None if self.back is not None or self.new.migrate is None else self.new.migrate.keys


def known_versions(warehouse: Warehouse, current: ModelSpec) -> dict[int, ModelSpec]:
    """Return the specs of a model by version: the one at hand, the files beside it, and those of manifests.

    Raises:
        SpecError: a file is no valid spec.
    """
    found = {one.model_version: one.model_spec(current.folder) for one in all_of(warehouse, current.name)}
    beside = (
        []
        if current.source_path is None
        else (current.source_path.parent / EARLIER).glob(f"{current.name}.v*.yaml")
    )
    for path in sorted(beside):
        spec = load_checked_spec(path)
        if spec.name != current.name or path.name != f"{spec.name}.v{spec.version}.yaml":
            raise UserError(f"{path}: it is version {spec.version} of {spec.name}; name the file accordingly")
        found[spec.version] = spec
    return {**found, current.version: current}


def path_between(known: dict[int, ModelSpec], first: int, last: int) -> list[Step]:
    """Return the migrations that lead from one version to another, in their order.

    Each spec says from which version it migrates (`migrate.from`, by default the one before).

    Raises:
        UserError: a version's spec is not known, or there is no way.
    """
    name = known[max(known)].name
    for version in (first, last):
        if version not in known:
            have = ", ".join(map(str, sorted(known)))
            raise UserError(
                f"model {name} has no version {version} (its specs are of {have}): put that version's spec into "
                f"{EARLIER}/{name}.v{version}.yaml in the folder of models"
            )
    steps: list[Step] = []
    at = last
    while at != first:
        spec = known.get(at)
        before = None if spec is None else _before(spec)
        if spec is None or before is None or before not in known or len(steps) > len(known):
            there = f"the spec of version {before} is not known" if spec else f"version {at} is not known"
            raise UserError(
                f"model {name} cannot be migrated from version {first} to {last}: {there}. Say in the spec of version "
                f"{last} how to come from there (migrate.from), or put the specs in between into {EARLIER}/"
            )
        steps.insert(0, Step(known[before], spec))
        at = before
    return steps


def _before(spec: ModelSpec) -> int | None:
    given = spec.migrate and spec.migrate.from_
    return given or (spec.version - 1 if spec.version > 1 else None)
