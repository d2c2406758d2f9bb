"""Find the specs of a model's versions, and the path of migrations from one version to another.

A version's spec is the model's file itself, a file `versions/<model>.v<version>.yaml` beside it, or the spec in the
manifest of any snapshot of that version.
"""

from __future__ import annotations

from typing import NamedTuple

from jobs.core.errors import UserError
from jobs.lineage.model import DeployedModel
from jobs.snapshots.manifests import Manifest, read_manifests
from jobs.specs.migration import Migrate, Rekeying, StateMapSpec
from jobs.specs.model_spec import EARLIER, ModelSpec
from jobs.state.kernel import load_checked_spec
from jobs.storage.warehouse import Tables


class MigrationStep(NamedTuple):
    """One migration of states, from version `old` to version `new`, forward or in reverse.

    rules: mapping of states; None: all keep their names. rules_spec: spec with the rules, in both directions the later
    version's; section: its section with the rules. `forward` and `reverse` make steps.
    """

    old: ModelSpec
    new: ModelSpec
    rules: StateMapSpec | None
    rules_spec: ModelSpec
    section: str

    @classmethod
    def forward(cls, old: ModelSpec, new: ModelSpec) -> MigrationStep:
        """Return the step to a later version; its section `migrate` has the rules."""
        return cls(old, new, new.migrate, new, "migrate")

    @classmethod
    def reverse(cls, later: ModelSpec, earlier: ModelSpec, rules: StateMapSpec) -> MigrationStep:
        """Return the step back to an earlier version."""
        return cls(later, earlier, rules, later, "migrate.reverse")

    @property
    def where(self) -> str:
        """Return the name of the version with the rules, for errors."""
        return f"version {self.rules_spec.version} of {self.new.name}"

    @property
    def keys(self) -> Rekeying | None:
        """Return how the keys change; None if they stay, as in every step in reverse."""
        return self.rules.keys if isinstance(self.rules, Migrate) else None


def read_known_versions(model: DeployedModel[Tables]) -> dict[int, ModelSpec]:
    """Return a model's specs by version: from the current file, the files beside it, and manifests.

    Raises:
        SpecError: a file is not a valid spec.
        UserError: a file's name and content disagree on model or version.
    """
    found = {
        one.model_version: one.model_spec(model.spec.folder)
        for one in read_manifests(model.warehouse, model.spec.name)
    }
    beside = (
        []
        if model.spec.source_path is None
        else (model.spec.source_path.parent / EARLIER).glob(f"{model.spec.name}.v*.yaml")
    )
    for path in sorted(beside):
        spec = load_checked_spec(path)
        if spec.name != model.spec.name or path.name != f"{spec.name}.v{spec.version}.yaml":
            raise UserError(f"{path}: it is version {spec.version} of {spec.name}; name the file accordingly")
        found[spec.version] = spec
    return {**found, model.spec.version: model.spec}


def find_path_forward(model: DeployedModel[Tables], source: Manifest, target: int) -> list[MigrationStep]:
    """Return the migrations from a snapshot to a later version; `model` is the deployed model.

    Raises:
        UserError: the snapshot already has that version, a version's spec is unknown, or no path leads to it.
    """
    # The snapshot's manifest defines the meaning of the states; the version's file may have changed since.
    known = {**read_known_versions(model), source.model_version: source.model_spec(model.spec.folder)}
    steps = find_path_between(known, source.model_version, target)
    if not steps:
        raise UserError(f"snapshot {source.snapshot_id} is of version {target} already")
    return steps


def find_path_between(known: dict[int, ModelSpec], first: int, last: int) -> list[MigrationStep]:
    """Return the migrations from version `first` to the later version `last`, in order.

    Each spec names the version that it migrates from (`migrate.from`, by default the previous version).

    Raises:
        UserError: a version's spec is unknown, or no path leads to it.
    """
    name = known[max(known)].name
    for version in (first, last):
        if version not in known:
            have = ", ".join(map(str, sorted(known)))
            raise UserError(
                f"model {name} has no version {version} (its specs are of {have}): put that version's spec into "
                f"{EARLIER}/{name}.v{version}.yaml in the folder of models"
            )
    steps: list[MigrationStep] = []
    version = last
    while version != first:
        spec = known.get(version)
        previous = None if spec is None else _find_previous_version(spec)
        if spec is None or previous is None or previous not in known or len(steps) > len(known):
            missing = (
                f"the spec of version {previous} is not known" if spec else f"version {version} is not known"
            )
            raise UserError(
                f"model {name} cannot be migrated from version {first} to {last}: {missing}. Say in the spec of "
                f"version {last} which version it migrates from (migrate.from), or put the specs in between into "
                f"{EARLIER}/"
            )
        steps.insert(0, MigrationStep.forward(known[previous], spec))
        version = previous
    return steps


def _find_previous_version(spec: ModelSpec) -> int | None:
    given = spec.migrate and spec.migrate.from_
    return given or (spec.version - 1 if spec.version > 1 else None)
