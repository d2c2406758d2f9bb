"""Find the way of states back from a version of a model to an earlier one: its own, or the inverse of the way there.

The way there by state names has an inverse where no state became several: what is kept, renamed or rescaled comes
back, what was added is given up (marginalised), and what was given up begins as the earlier version's `initial` says.
A linear map has one where it is square, not singular, and adds no noise. Everything else needs `migrate.reverse`.
"""

from __future__ import annotations

import numpy as np

from jobs.core.errors import UserError
from jobs.migration.versions import Step, path_between
from jobs.specs.migration import Origin, StateMapSpec, Transform
from jobs.specs.model_spec import ModelSpec

SINGULAR = 1e6
"""The condition number, of a matrix whose rows and columns are scaled to 1, from which on it counts as singular: of a
covariance, in which it counts twice, no more than four digits would be left."""


def path_back(known: dict[int, ModelSpec], last: int, first: int) -> list[Step]:
    """Return the migrations that lead from version `last` back to the earlier version `first`, in their order.

    Raises:
        UserError: a version's spec is not known, or a step there has no inverse; it says why and what to write.
    """
    there = path_between(known, first, last)
    return [Step(step.new, step.old, way_back(step)) for step in reversed(there)]


def way_back(step: Step) -> StateMapSpec:
    """Return how the states of the newer version of a step become those of the older one again.

    Raises:
        UserError: it is not said, and what the step does has no inverse.
    """
    old, new = step.old, step.new
    if old.key != new.key or step.keys is not None:
        raise UserError(
            f"version {new.version} of {new.name} gave the keys other names, and measurements come with these now: "
            f"version {old.version} would not know them"
        )
    rules = new.migrate
    if rules is None:
        return _by_names(step)
    if rules.reverse is not None:
        return rules.reverse
    if rules.function is not None:
        raise _no_inverse(step, f"what migrate.function ({rules.function}) does cannot be turned round")
    if rules.transform is not None:
        return StateMapSpec(transform=_inverse(step, rules.transform))
    return _by_names(step)


def _by_names(step: Step) -> StateMapSpec:
    """Return the inverse of a way by the names of states."""
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
            raise _no_inverse(
                step, f"state {origin.from_} became {both}, and nothing says which of them it is now"
            )
        else:
            became[origin.from_] = name, origin
    given_up = [name for name in old.states if name not in became]
    if given_up and old.initial is None:
        raise _no_inverse(
            step,
            f"state {given_up[0]} was given up, and version {old.version} has no `initial` to begin it with",
        )
    back: dict[str, Origin] = {name: Origin(initial=True) for name in given_up}
    for name, (newer, origin) in became.items():
        if (newer, origin.scale, origin.offset) != (name, 1.0, 0.0):
            scale, offset = 1.0 / origin.scale, -origin.offset / origin.scale
            back[name] = Origin.model_validate({"from": newer, "scale": scale, "offset": offset})
    return StateMapSpec(states=back, drop=added)


def _inverse(step: Step, there: Transform) -> Transform:
    """Return the inverse of a linear map."""
    T, n = np.array(there.matrix, float), len(there.matrix)
    if T.shape != (n, n):
        raise _no_inverse(step, f"the matrix of migrate.transform has {n} rows and {T.shape[1]} columns")
    if there.noise is not None and np.any(there.noise):
        raise _no_inverse(step, "migrate.transform adds noise, which cannot be taken back")
    if _condition(T) > SINGULAR:
        raise _no_inverse(step, "the matrix of migrate.transform is singular, or nearly so")
    inverse = np.linalg.inv(T)
    offset = np.zeros(n) if there.offset is None else -inverse @ np.array(there.offset, float)
    return Transform(matrix=inverse.tolist(), offset=offset.tolist())


def _condition(T: np.ndarray) -> float:
    """Return the condition number of a square matrix, but for the units of its rows and columns."""
    largest = np.abs(T).max(axis=1, keepdims=True)
    if not largest.all():
        return np.inf
    scaled = T / largest
    columns = np.abs(scaled).max(axis=0)
    return float(np.linalg.cond(scaled / columns)) if columns.all() else np.inf


def _no_inverse(step: Step, why: str) -> UserError:
    newer, older = step.new.version, step.old.version
    return UserError(
        f"{step.new.name}: the way from version {older} to {newer} has no inverse: {why}. Say in the spec of version "
        f"{newer}, under migrate.reverse (states, drop, transform or function), how its states become those of version "
        f"{older}"
    )
