"""Carry the states of one version of a model over to another: what becomes of each state, and of a batch of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.migration.versions import Step
from kalman.filters.affine import Affine, moved
from kalman.filters.rounded import stored_as, unrounded
from kalman.filters.state_layout import places
from kalman.models.named import Named, find
from kalman.types import Filter

Floats = NDArray[np.float64]

SYMMETRY = 1e-9
"""How far, relative to the variances, a covariance may be from symmetric and from positive semidefinite."""


class StateMap(NamedTuple):
    """One migration on the way: a linear map, or a function of moments; `diffuse`: states not known at all."""

    new: tuple[str, ...]
    to: Affine | None
    function: Named | None
    diffuse: tuple[int, ...]


class Moments(NamedTuple):
    """States of K keys: mean (n, K), covariance (n*n, K), undetermined directions A (n, q, K) or None."""

    mean: Floats
    covariance: Floats
    A: Floats | None


class Carried(NamedTuple):
    """What became of K keys: the parts of a snapshot, and (K,) bool which keys came out wrong."""

    mean: Floats
    covariance: Floats
    extras: dict[str, Floats]
    wrong: NDArray[np.bool_]


@dataclass(frozen=True)
class Migration:
    """The way of states from one version's filter to another's. Picklable: it is sent to the executors."""

    legs: tuple[StateMap, ...]
    source: Filter
    target: Filter
    own: bool = False
    """Whether parameters that keys have for themselves are still those of the model."""

    @property
    def same(self) -> bool:
        """Tell if a state stays what it is, to the last bit, whatever else its fields hold."""
        plain = all(leg.to is not None and leg.to.identity and not leg.diffuse for leg in self.legs)
        return (
            plain
            and type(unrounded(self.source)) is type(unrounded(self.target))
            and stored_as(self.source) == stored_as(self.target)
            and dict(self.source.fields) == dict(self.target.fields)
        )

    def carry(self, mean: Floats, covariance: Floats, extras: Mapping[str, Floats]) -> Carried:
        """Return the states of K keys as the target keeps them.

        Args:
            mean: (n, K).
            covariance: (n*n, K), row by row.
            extras: the other fields, each (d, K).
        """
        if self.same:
            if more_than_moments(self.target) is None:
                wrong = wrong_states(mean, covariance)
            else:  # what it says of mean and covariance may be infinite or nothing
                state = self.target.restore(mean, covariance, extras)
                wrong = np.asarray(~np.isfinite(state).all(axis=0))
            return Carried(mean, covariance, dict(extras), wrong)
        n, keys = mean.shape
        A = extras["diffuse"].reshape(n, -1, keys) if "diffuse" in extras else None
        at = Moments(mean, covariance, A)
        for leg in self.legs:
            at = _through(leg, at, extras)
        state = self.target.from_moments(at.mean, at.covariance)
        if self.own and "parameters" in extras:
            state = self.target.with_parameters(state, extras["parameters"])
        lost = _put_diffuse(self.target, state, at.A)
        new_mean, new_covariance, new_extras = self.target.snapshot(state)
        return Carried(new_mean, new_covariance, new_extras, lost | wrong_states(new_mean, new_covariance))


def migration(steps: Sequence[Step], old: Mapping[str, Any], new: Mapping[str, Any]) -> Migration:
    """Return the migration that some steps make, between filters with these learned parameters.

    Raises:
        UserError: a step cannot be made; it says why and what to write.
    """
    if not steps:
        raise UserError("there is nothing to migrate: the snapshot is of that version")
    first, last = steps[0].old, steps[-1].new
    source, target = kalman.build(first.definition(), old), kalman.build(last.definition(), new)
    field = source.fields.get("parameters")
    own = (
        bool(old)
        and dict(old) == dict(new)
        and field is not None
        and field == target.fields.get("parameters")
    )
    made = Migration(tuple(state_map_of(step) for step in steps), source, target, own)
    if not made.same:
        for spec, model in ((first, source), (last, target)):
            reason = more_than_moments(model)
            if reason is not None:
                raise UserError(
                    f"{last.name} cannot be migrated from version {first.version} to {last.version}: of version "
                    f"{spec.version} ({spec.filter}) {reason.problem}, and what they know is carried over by mean and "
                    f"covariance. Pretrain version {last.version} from history instead (upgrade --mode retrain)"
                )
    return made


def more_than_moments(model: Filter) -> kalman.ModelError | None:
    """Return why a filter's state cannot be made from a mean and a covariance; None: it can."""
    n = len(model.states)
    try:
        model.from_moments(np.zeros((n, 1)), np.eye(n).reshape(n * n, 1))
    except kalman.ModelError as error:
        return error
    return None


def state_map_of(step: Step) -> StateMap:
    """Return what a step does to the states.

    Raises:
        UserError: a state's origin is not said, or keys or time have changed.
    """
    old, new = step.old, step.new
    _refuse_other_keys(step)
    rules, section = step.rules, step.section
    where = f"version {step.later.version} of {new.name}"
    before, after = tuple(old.states), tuple(new.states)
    if rules is not None and rules.function is not None:
        found = function_named(rules.function, f"{section}.function", step.later.folder)
        return StateMap(after, None, found, ())
    if rules is not None and rules.transform is not None:
        return StateMap(after, _transform(step), None, ())
    origins = {} if rules is None else rules.states
    unknown = [name for name in origins if name not in after]
    if unknown:
        raise UserError(f"{where}: {section}.states.{unknown[0]} is no state of version {new.version}")
    n = len(after)
    T = np.zeros((n, len(before)))
    b, N = np.zeros(n), np.zeros((n, n))
    diffuse: list[int] = []
    taken: list[str] = []
    for i, name in enumerate(after):
        origin = origins.get(name)
        if origin is None and name not in before:
            raise UserError(
                f"{where}: state {name} is new, and {section}.states does not say what it begins with: write "
                f"{name}: {{initial: true}}, {{mean: ..., variance: ...}} or {{from: OLD_STATE}}"
            )
        if origin is None or origin.from_ is not None:
            source = name if origin is None or origin.from_ is None else origin.from_
            if source not in before:
                raise UserError(
                    f"{where}: {section}.states.{name}.from: version {old.version} has no state {source} "
                    f"(it has {', '.join(before)})"
                )
            T[i, before.index(source)] = 1.0 if origin is None else origin.scale
            b[i] = 0.0 if origin is None else origin.offset
            taken.append(source)
        elif origin.initial:
            diffuse += _begin_as_initial(
                step, i, b, N, [j for j, other in enumerate(after) if _initial(origins, other)]
            )
        else:
            b[i], N[i, i] = float(origin.mean or 0.0), float(origin.variance or 0.0)
            for other, value in origin.covariance.items():
                if other not in after or other in before and other not in origins:
                    raise UserError(f"{where}: {section}.states.{name}.covariance.{other} is no new state")
                N[i, after.index(other)] = N[after.index(other), i] = value
    dropped = [] if rules is None else rules.drop
    for name in before:
        if name not in taken and name not in dropped:
            raise UserError(
                f"{where}: state {name} of version {old.version} goes nowhere: name it in {section}.drop if it is to "
                f"be given up, or say under {section}.states what it becomes"
            )
    wrong = [name for name in dropped if name in taken or name not in before]
    if wrong:
        raise UserError(
            f"{where}: {section}.drop: {wrong[0]} is kept, or is no state of version {old.version}"
        )
    if np.linalg.eigvalsh(N).min() < -SYMMETRY * max(1.0, float(np.abs(N).max())):
        raise UserError(f"{where}: the new states' variances and covariances are not positive semidefinite")
    return StateMap(after, _affine(T, b, N), None, tuple(diffuse))


def kept_in_unit(legs: Sequence[StateMap]) -> bool:
    """Tell if every state that is carried over keeps its unit, so that parameters keep their meaning."""
    rows = [row for leg in legs if leg.to is not None for row in leg.to.T]
    return all(leg.to is not None for leg in legs) and all(
        value in (0.0, 1.0) for row in rows for value in row
    )


def function_named(name: str, field: str, folder: str | None = None) -> Named:
    """Return the function `module:function` of a field; `folder` is one more place to look for the module.

    Raises:
        UserError: there is no such function.
    """
    try:
        find(name, folder, field)
    except kalman.ModelError as error:
        raise UserError(str(error)) from error
    return Named(name, folder)


def _through(leg: StateMap, at: Moments, extras: Mapping[str, Floats]) -> Moments:
    keys = at.mean.shape[1]
    if leg.to is None:
        assert leg.function is not None
        mean, covariance = (np.asarray(a, float) for a in leg.function(at.mean, at.covariance, extras))
        n = len(leg.new)
        if mean.shape != (n, keys) or covariance.shape != (n * n, keys):
            raise UserError(
                f"the migration's function {leg.function.name} returned mean {mean.shape} and covariance "
                f"{covariance.shape}, not {(n, keys)} and {(n * n, keys)}"
            )
        return Moments(mean, covariance, None)
    mean, covariance = moved(at.mean, at.covariance, leg.to)
    T = np.array(leg.to.T)
    parts = []
    if at.A is not None:
        parts.append(np.array([[T[i] @ at.A[:, j] for j in range(at.A.shape[1])] for i in range(len(T))]))
    for i in leg.diffuse:
        column = np.zeros((len(T), 1, keys))
        column[i] = 1.0
        parts.append(column)
    return Moments(mean, covariance, np.concatenate(parts, axis=1) if parts else None)


def _put_diffuse(target: Filter, state: Floats, A: Floats | None) -> NDArray[np.bool_]:
    """Write the undetermined directions into states, in place; return the keys that have more than fit."""
    keys = state.shape[1]
    if A is None or not A.any():
        return np.zeros(keys, bool)
    n = A.shape[0]
    width = target.fields.get("diffuse", (0,))[0] // n
    used = np.flatnonzero(A.any(axis=(0, 2)))  # a column that no key uses takes no room
    if len(used) <= width:
        at = places(target.fields)["diffuse"]
        full = np.zeros((n, width, keys))
        full[:, : len(used)] = A[:, used]
        state[at] = full.reshape(n * width, keys)
        return np.zeros(keys, bool)
    return np.asarray(A.any(axis=(0, 1)))


def wrong_states(mean: Floats, covariance: Floats) -> NDArray[np.bool_]:
    """Return which keys are not finite, not symmetric or not positive semidefinite."""
    n, keys = mean.shape
    P = covariance.reshape(n, n, keys)
    finite = np.isfinite(mean).all(axis=0) & np.isfinite(P).all(axis=(0, 1))
    scale = np.abs(np.array([P[i, i] for i in range(n)])).max(axis=0)
    skew = np.abs(P - P.transpose(1, 0, 2)).max(axis=(0, 1))
    bad = ~finite | (skew > SYMMETRY * scale)
    good = np.flatnonzero(~bad)
    # Scaled to unit variances, so that states of very different units are judged alike.
    part = np.moveaxis(P[:, :, good], 2, 0)
    spread = np.sqrt(np.maximum(np.einsum("kii->ki", part), 0.0))
    unit = np.where(spread > 0, spread, 1.0)
    lowest = (
        np.linalg.eigvalsh(part / (unit[:, :, None] * unit[:, None, :])).min(axis=1)
        if len(good)
        else np.zeros(0)
    )
    bad[good] = (lowest < -1e-7) | (np.einsum("kii->ki", part) < 0).any(axis=1)
    return bad


def _affine(T: Floats, b: Floats, N: Floats) -> Affine:
    return Affine(
        tuple(tuple(float(a) for a in row) for row in T),
        tuple(float(a) for a in b),
        tuple(tuple(float(a) for a in row) for row in N),
    )


def _transform(step: Step) -> Affine:
    rules = step.rules
    assert rules is not None and rules.transform is not None
    where = f"version {step.later.version} of {step.new.name}: {step.section}.transform"
    n, m = len(step.new.states), len(step.old.states)
    T = rules.transform.matrix
    if len(T) != n or any(len(row) != m for row in T):
        raise UserError(f"{where}.matrix: {n} rows (the new states) of {m} numbers (the old ones) are needed")
    b = rules.transform.offset or [0.0] * n
    if len(b) != n:
        raise UserError(f"{where}.offset: {n} numbers are needed")
    N = np.array(rules.transform.noise or np.zeros((n, n)), float)
    if (
        N.shape != (n, n)
        or not np.allclose(N, N.T)
        or np.linalg.eigvalsh(N).min() < -SYMMETRY * np.abs(N).max()
    ):
        raise UserError(f"{where}.noise: a covariance of {n} x {n} is needed")
    return _affine(np.array(T, float), np.array(b, float), N)


def _initial(origins: Mapping[str, Any], name: str) -> bool:
    return name in origins and origins[name].initial


def _begin_as_initial(step: Step, i: int, b: Floats, N: Floats, together: Sequence[int]) -> list[int]:
    """Fill in a new state's mean and covariances from the spec's initial distribution; return it if it is diffuse."""
    new, initial = step.new, step.new.initial
    if initial is None:
        raise UserError(
            f"version {step.later.version} of {new.name}: {step.section}.states.{new.states[i]}: the spec of "
            f"version {new.version} has no `initial`"
        )
    diffuse = initial.diffuse
    if diffuse is True or (isinstance(diffuse, list) and diffuse[i]):
        return [i]
    assert initial.mean is not None and initial.covariance is not None
    b[i] = initial.mean[i]
    for j in together:
        N[i, j] = initial.covariance[i][j]
    return []


def _refuse_other_keys(step: Step) -> None:
    old, new = step.old, step.new
    if old.key != new.key and step.keys is None:
        raise UserError(
            f"{new.name} cannot be migrated from version {old.version} to {new.version}: the key columns changed from "
            f"{', '.join(old.key)} to {', '.join(new.key)}, so the states are of other systems. Say in migrate.keys "
            f"how the old keys become the new ones, or pretrain version {new.version} from history instead (upgrade "
            f"--mode retrain)"
        )
