"""Find the specs of a model's versions, and the path of migrations between two versions, forward or back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jobs.core.errors import UserError
from jobs.lineage.generations import DeployedModel
from jobs.snapshots.manifests import Manifest, read_manifests
from jobs.specs.migration import Migrate, Origin, Rekeying, StateMapSpec, Transform
from jobs.specs.model_spec import EARLIER, ModelSpec
from jobs.state.kernel import load_checked_spec
from jobs.storage.warehouse import Tables


class MigrationStep(NamedTuple):
    """One migration of states, from version `old` to version `new`, forward or in reverse.

    rules: mapping of states; None means that all states keep their names. rules_spec: the spec with the rules, which is
    the later version's spec in both directions. section: the section of this spec with the rules. `forward` and
    `reverse` make steps.
    """

    old: ModelSpec
    new: ModelSpec
    rules: StateMapSpec | None
    rules_spec: ModelSpec
    section: str

    @classmethod
    def forward(cls, old: ModelSpec, new: ModelSpec) -> MigrationStep:
        """Return the step to a later version, whose section `migrate` has the rules."""
        return cls(old, new, new.migrate, new, "migrate")

    @classmethod
    def reverse(cls, later: ModelSpec, earlier: ModelSpec, rules: StateMapSpec) -> MigrationStep:
        """Return the step back to an earlier version."""
        return cls(later, earlier, rules, later, "migrate.reverse")

    @property
    def where(self) -> str:
        """Return the name of the version with the rules, for error messages."""
        return f"version {self.rules_spec.version} of {self.new.name}"

    @property
    def keys(self) -> Rekeying | None:
        """Return how the keys change; None if the keys stay the same, as in every step in reverse."""
        return self.rules.keys if isinstance(self.rules, Migrate) else None


def read_known_versions(model: DeployedModel[Tables]) -> dict[int, ModelSpec]:
    """Return the specs of a model by version: from the current file, from the files beside it, and from manifests.

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
    """Return the migrations from a snapshot to a later version, in order; `model` is the deployed model.

    Raises:
        UserError: the snapshot already has this version, the spec of a version is unknown, or no path leads to it.
    """
    # The snapshot's manifest defines the meaning of the states, because the version's file may have changed since.
    known = {**read_known_versions(model), source.model_version: source.model_spec(model.spec.folder)}
    steps = find_path_between(known, source.model_version, target)
    if not steps:
        raise UserError(f"snapshot {source.snapshot_id} is of version {target} already")
    return steps


def find_path_between(known: dict[int, ModelSpec], first: int, last: int) -> list[MigrationStep]:
    """Return the migrations from version `first` to the later version `last`, in order.

    Each spec names the version from which it migrates (`migrate.from`, by default the previous version).

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


SINGULAR = 1e6
"""Condition number from which a matrix counts as singular, after its rows and columns were scaled to 1.

The condition number enters a covariance squared, so that at most four digits would remain.
"""


def find_path_back(model: DeployedModel[Tables], later: Manifest, earlier: Manifest) -> list[MigrationStep]:
    """Return the migrations from a snapshot's version back to the version of an earlier snapshot, in order.

    The snapshots contain the specs of both versions. If a spec file has the same meaning, the file takes precedence,
    because it may have a later `migrate.reverse`.

    Raises:
        UserError: a version's spec is unknown, or a step has no inverse; the message gives the reason and the remedy.
    """
    known = read_known_versions(model)
    for one in (later, earlier):
        file = known.get(one.model_version)
        if file is None or file.fingerprint() != one.fingerprint:
            known[one.model_version] = one.model_spec(model.spec.folder)
    return reverse_path(known, later.model_version, earlier.model_version)


def reverse_path(known: dict[int, ModelSpec], last: int, first: int) -> list[MigrationStep]:
    """Return the migrations from version `last` back to the earlier version `first`, in order.

    Raises:
        UserError: a version's spec is unknown, or a step has no inverse; the message gives the reason and the remedy.
    """
    forward = find_path_between(known, first, last)
    return [MigrationStep.reverse(step.new, step.old, reverse_rules(step)) for step in reversed(forward)]


def reverse_rules(step: MigrationStep) -> StateMapSpec:
    """Return the rules that map states of the newer version in a step to the older version.

    Raises:
        UserError: the step has no inverse, and its spec has no `migrate.reverse`.
    """
    old, new = step.old, step.new
    if old.key != new.key or step.keys is not None:
        raise UserError(
            f"version {new.version} of {new.name} gave the keys other names, and measurements come with these now: "
            f"version {old.version} would not know them"
        )
    rules = new.migrate
    if rules is None:
        return _invert_by_names(step)
    if rules.reverse is not None:
        return rules.reverse
    if rules.function is not None:
        raise _build_no_inverse_error(step, f"migrate.function ({rules.function}) cannot be inverted")
    if rules.transform is not None:
        return StateMapSpec(transform=_invert_transform(step, rules.transform))
    return _invert_by_names(step)


def _invert_by_names(step: MigrationStep) -> StateMapSpec:
    old, new = step.old, step.new
    origins = {} if new.migrate is None else new.migrate.states
    became: dict[str, tuple[str, Origin]] = {}
    added: list[str] = []
    for name in new.states:
        origin = origins.get(name) or Origin.model_validate({"from": name})
        if origin.from_ is None:
            added.append(name)
        elif origin.from_ in became:
            both = f"{became[origin.from_][0]} and {name}"
            raise _build_no_inverse_error(
                step, f"state {origin.from_} became {both}, and which of them maps back is open"
            )
        else:
            became[origin.from_] = name, origin
    dropped = [name for name in old.states if name not in became]
    if dropped and old.initial is None:
        raise _build_no_inverse_error(
            step,
            f"state {dropped[0]} was dropped, and version {old.version} has no `initial` to start it from",
        )
    states: dict[str, Origin] = {name: Origin(initial=True) for name in dropped}
    for name, (newer, origin) in became.items():
        if (newer, origin.scale, origin.offset) != (name, 1.0, 0.0):
            scale, offset = 1.0 / origin.scale, -origin.offset / origin.scale
            states[name] = Origin.model_validate({"from": newer, "scale": scale, "offset": offset})
    return StateMapSpec(states=states, drop=added)


def _invert_transform(step: MigrationStep, forward: Transform) -> Transform:
    T, n = np.array(forward.matrix, float), len(forward.matrix)
    if T.shape != (n, n):
        raise _build_no_inverse_error(
            step, f"the matrix of migrate.transform has {n} rows and {T.shape[1]} columns"
        )
    if forward.noise is not None and np.any(forward.noise):
        raise _build_no_inverse_error(step, "migrate.transform adds noise, which cannot be subtracted")
    if _compute_condition(T) > SINGULAR:
        raise _build_no_inverse_error(step, "the matrix of migrate.transform is singular, or nearly so")
    inverse = np.linalg.inv(T)
    offset = np.zeros(n) if forward.offset is None else -inverse @ np.array(forward.offset, float)
    return Transform(matrix=inverse.tolist(), offset=offset.tolist())


def _compute_condition(T: np.ndarray) -> float:
    """Return the condition number of a square matrix, independent of the units of its rows and columns."""
    largest = np.abs(T).max(axis=1, keepdims=True)
    if not largest.all():
        return np.inf
    scaled = T / largest
    columns = np.abs(scaled).max(axis=0)
    return float(np.linalg.cond(scaled / columns)) if columns.all() else np.inf


def _build_no_inverse_error(step: MigrationStep, reason: str) -> UserError:
    newer, older = step.new.version, step.old.version
    return UserError(
        f"{step.new.name}: the way from version {older} to {newer} has no inverse: {reason}. Say in the spec of "
        f"version {newer}, under migrate.reverse (states, drop, transform or function), how its states become those of "
        f"version {older}"
    )
