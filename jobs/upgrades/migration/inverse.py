"""Find the path of migrations from a version of a model back to an earlier version.

Each step back follows the later version's `migrate.reverse`, or else the inverse of the step forward. A step forward by
state names has an inverse unless one state became several. A state that was kept, renamed or rescaled is mapped back. A
state that was added is marginalised out, and a state that was dropped starts from the earlier version's `initial`. A
linear map has an inverse if it is square, not singular and adds no noise. Any other step needs `migrate.reverse`.
"""

from __future__ import annotations

import numpy as np

from jobs.core.errors import UserError
from jobs.lineage.model import DeployedModel
from jobs.snapshots.manifests import Manifest
from jobs.specs.migration import Origin, StateMapSpec, Transform
from jobs.specs.model_spec import ModelSpec
from jobs.storage.warehouse import Tables
from jobs.upgrades.migration.versions import MigrationStep, find_path_between, read_known_versions

SINGULAR = 1e6
"""Condition number from which a matrix, its rows and columns scaled to 1, counts as singular.

It enters a covariance squared, so that at most four digits would remain.
"""


def find_path_back(model: DeployedModel[Tables], later: Manifest, earlier: Manifest) -> list[MigrationStep]:
    """Return the migrations from a snapshot's version back to the version of an earlier snapshot, in order.

    The snapshots contain the specs of both versions. A spec file with the same meaning takes precedence, because it may
    have a later `migrate.reverse`.

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
    """Return the rules that map states of a step's newer version to its older version.

    Raises:
        UserError: the step has no inverse, and its spec no `migrate.reverse`.
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
