"""Map states from one version of a model to another version by the rules in the spec, for K keys at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.core.errors import UserError
from jobs.specs.migration import Origin, Transform
from jobs.upgrades.migration.versions import MigrationStep
from kalman.filters.affine import Affine, move_moments
from kalman.filters.diffuse import fold
from kalman.filters.own_parameters import find_key_parameters, with_key_parameters
from kalman.filters.rounded import DTYPES, find_storage_dtype, unwrap_rounding
from kalman.filters.sliding_likelihood import WINDOW_FIELDS, drop_sliding
from kalman.filters.state_layout import locate_fields
from kalman.linalg.packing import pack, unpack
from kalman.models.named import Named, find
from kalman.types import Filter

Floats = NDArray[np.float64]

SYMMETRY = 1e-9
"""Relative tolerance (to the variances) in the check that a covariance is symmetric and positive semidefinite."""


class StateMap(NamedTuple):
    """Map of one step to `states`: affine, or a function of moments; `diffuse`: new states that start undetermined."""

    states: tuple[str, ...]
    affine: Affine | None
    function: Named | None
    diffuse: tuple[int, ...]


class StateMoments(NamedTuple):
    """States of K keys: mean (n, K), covariance (n*n, K), and undetermined directions A (n, q, K) or None."""

    mean: Floats
    covariance: Floats
    A: Floats | None


class MigratedStates(NamedTuple):
    """Migrated states of K keys as the parts of a snapshot, and a mask (K,) of the keys whose state is invalid."""

    mean: Floats
    covariance: Floats
    extras: dict[str, Floats]
    wrong: NDArray[np.bool_]


@dataclass(frozen=True)
class Migration:
    """Maps from states of one version's filter to states of another version's filter. Picklable, for the executors.

    key_parameters: pairs of names, in the target and in the source, of the per-key parameters that are carried over, in
    the target's order. None means that the rule of earlier releases applies: all, if `keeps_key_parameters` or if
    nothing else changes.
    """

    state_maps: tuple[StateMap, ...]
    source: Filter
    target: Filter
    keeps_key_parameters: bool = False
    key_parameters: tuple[tuple[str, str], ...] | None = None

    @property
    def is_identity(self) -> bool:
        """Return whether every state stays equal bit for bit, with all its fields except learned parameters."""
        identity = all(
            one.affine is not None and one.affine.identity and not one.diffuse for one in self.state_maps
        )
        return (
            identity
            and type(_unwrap_filter(self.source)) is type(_unwrap_filter(self.target))
            and find_storage_dtype(self.source) == find_storage_dtype(self.target)
            and dict(_unwrap_filter(self.source).fields) == dict(_unwrap_filter(self.target).fields)
            and (
                self.key_parameters is None
                or find_key_parameters(self.source).rows == find_key_parameters(self.target).rows
            )
        )

    def apply(self, mean: Floats, covariance: Floats, extras: Mapping[str, Floats]) -> MigratedStates:
        """Return the states of K keys with the fields of the target.

        Args:
            mean: (n, K) mean of each key.
            covariance: (n*n, K) covariance of each key, row by row.
            extras: the other fields of the states by name, each (d, K).
        """
        if self.is_identity:
            extras = self._carry_window(self._reset_learned(extras), mean.shape[1])
            if check_moments_suffice(self.target) is None:
                wrong = find_wrong_states(mean, covariance)
            else:  # mean and covariance may be infinite or NaN, but the state may not
                state = self.target.restore(mean, covariance, extras)
                wrong = np.asarray(~np.isfinite(state).all(axis=0))
            return MigratedStates(mean, covariance, dict(extras), wrong)
        n, keys = mean.shape
        A = extras["diffuse"].reshape(n, -1, keys) if "diffuse" in extras else None
        moments = StateMoments(mean, covariance, A)
        for state_map in self.state_maps:
            moments = _map_moments(state_map, moments, extras)
        if not _has_room(self.target, moments.A):
            moments = _fold_moments(moments)
        state = self.target.from_moments(moments.mean, moments.covariance)
        if "parameters" in extras:
            state = self._carry_key_parameters(state, extras["parameters"])
        no_room = _put_diffuse(self.target, state, moments.A)
        new_mean, new_covariance, new_extras = self.target.snapshot(state)
        wrong = no_room | find_wrong_states(new_mean, new_covariance)
        return MigratedStates(new_mean, new_covariance, new_extras, wrong)

    def _carry_key_parameters(self, state: Floats, field: Floats) -> Floats:
        """Return the target's states with the per-key parameters carried over from the source's field (p, K)."""
        if self.key_parameters is None:
            return self.target.with_parameters(state, field) if self.keeps_key_parameters else state
        rows = find_key_parameters(self.source).rows
        return with_key_parameters(
            self.target, state, {new: field[rows[old]] for new, old in self.key_parameters}
        )

    def _carry_window(self, extras: Mapping[str, Floats], keys: int) -> Mapping[str, Floats]:
        """Return the fields, with the rows of the target's sliding log-likelihood kept, restarted, or removed."""
        window = {name: shape[0] for name, shape in self.target.fields.items() if name in WINDOW_FIELDS}
        if all(self.source.fields.get(name) == (width,) for name, width in window.items()) and window:
            return extras
        others = {name: values for name, values in extras.items() if name not in WINDOW_FIELDS}
        return {**others, **{name: np.zeros((width, keys)) for name, width in window.items()}}

    def _reset_learned(self, extras: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """Return the fields of unchanged states; learned parameters that are not carried over start again."""
        own = find_key_parameters(self.target)
        if self.key_parameters is None or len(self.key_parameters) == len(own.learned):
            return extras
        field = extras["parameters"].copy()
        fresh = self.target.initial(1)[locate_fields(self.target.fields)["parameters"]]
        kept = [new for new, _ in self.key_parameters]
        for name in own.learned:
            if name not in kept:
                field[own.rows[name]] = fresh[own.rows[name]]
        return {**extras, "parameters": field}


def build_migration(
    steps: Sequence[MigrationStep],
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    carried: Mapping[str, str] | None = None,
) -> Migration:
    """Return the migration along steps, between filters with the learned parameters `old` and `new`.

    carried: names of the parameters that are carried over, and their names in the first version
    (`jobs.upgrades.migration.parameters`). None means that per-key parameters follow the rule of earlier releases.

    Raises:
        UserError: a step is impossible; the message gives the reason and the remedy.
    """
    if not steps:
        raise UserError("there is nothing to migrate: the snapshot is of that version")
    first, last = steps[0].old, steps[-1].new
    source, target = kalman.build(first.definition(), old), kalman.build(last.definition(), new)
    maps = tuple(build_state_map(step) for step in steps)
    if carried is None:
        migration = Migration(maps, source, target, _has_kept_parameters(source, target, old, new))
    else:
        migration = Migration(maps, source, target, False, pair_key_parameters(source, target, carried))
    if not migration.is_identity:
        for spec, model in ((first, source), (last, target)):
            reason = check_moments_suffice(model)
            if reason is not None:
                raise UserError(
                    f"{last.name} cannot be migrated from version {first.version} to {last.version}: of version "
                    f"{spec.version} ({spec.filter}) {reason.problem}, and a migration passes on mean and covariance "
                    f"alone. Pretrain version {last.version} from history instead (`kalman-pipeline upgrade --model "
                    f"{last.name} --mode retrain`)"
                )
    return migration


def pair_key_parameters(
    source: Filter, target: Filter, carried: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Return pairs of names, in the target and in the source, of the per-key parameters that are carried over."""
    before, after = find_key_parameters(source), find_key_parameters(target)
    return tuple(
        (name, carried[name])
        for name in after.learned
        if carried.get(name) in before.rows
        and len(after.parameters[name].value) == len(before.parameters[carried[name]].value)
    )


def _unwrap_filter(model: Filter) -> Filter:
    """Return the filter without the wrappers of its state, which are rounding and the sliding log-likelihood."""
    return drop_sliding(unwrap_rounding(model))


def _has_kept_parameters(
    source: Filter, target: Filter, old: Mapping[str, Any], new: Mapping[str, Any]
) -> bool:
    """Return whether earlier releases carried over all per-key parameters, as they did if pooled parameters stay."""
    field = source.fields.get("parameters")
    same = bool(old) and dict(old) == dict(new)
    return same and field is not None and field == target.fields.get("parameters")


def check_moments_suffice(model: Filter) -> kalman.ModelError | None:
    """Return why a filter's state cannot be made from a mean and a covariance; None if it can be made."""
    n = len(model.states)
    try:
        model.from_moments(np.zeros((n, 1)), np.eye(n).reshape(n * n, 1))
    except kalman.ModelError as error:
        return error
    return None


def build_state_map(step: MigrationStep) -> StateMap:
    """Return the map of states for a step.

    Raises:
        UserError: a state has no origin, an old state is neither mapped nor dropped, or the keys have changed.
    """
    _refuse_other_keys(step)
    rules, states = step.rules, tuple(step.new.states)
    if rules is not None and rules.function is not None:
        function = load_function(rules.function, f"{step.section}.function", step.rules_spec.functions_folder)
        return StateMap(states, None, function, ())
    if rules is not None and rules.transform is not None:
        return StateMap(states, _build_transform(step, rules.transform), None, ())
    return _map_by_names(step)


def _map_by_names(step: MigrationStep) -> StateMap:
    """Return the map for states that are kept, renamed, rescaled, dropped or added."""
    old, new, where, section = step.old, step.new, step.where, step.section
    before, after = tuple(old.states), tuple(new.states)
    origins = {} if step.rules is None else step.rules.states
    unknown = [name for name in origins if name not in after]
    if unknown:
        raise UserError(f"{where}: {section}.states.{unknown[0]} is no state of version {new.version}")
    n = len(after)
    T, b, N = np.zeros((n, len(before))), np.zeros(n), np.zeros((n, n))
    diffuse: list[int] = []
    mapped: list[str] = []
    for i, name in enumerate(after):
        if name not in origins and name not in before:
            raise UserError(
                f"{where}: state {name} is new, and {section}.states does not say what it begins with: write "
                f"{name}: {{initial: true}}, {{mean: ..., variance: ...}} or {{from: OLD_STATE}}"
            )
        origin = origins.get(name) or Origin.model_validate({"from": name})
        if origin.from_ is not None:
            if origin.from_ not in before:
                raise UserError(
                    f"{where}: {section}.states.{name}.from: version {old.version} has no state {origin.from_} "
                    f"(it has {', '.join(before)})"
                )
            T[i, before.index(origin.from_)], b[i] = origin.scale, origin.offset
            mapped.append(origin.from_)
        elif origin.initial:
            together = [j for j, other in enumerate(after) if other in origins and origins[other].initial]
            diffuse += _put_initial(step, i, b, N, together)
        else:
            b[i], N[i, i] = float(origin.mean or 0.0), float(origin.variance or 0.0)
            for other, value in origin.covariance.items():
                if other not in after or other in before and other not in origins:
                    raise UserError(f"{where}: {section}.states.{name}.covariance.{other} is no new state")
                N[i, after.index(other)] = N[after.index(other), i] = value
    _check_dropped(step, mapped)
    if np.linalg.eigvalsh(N).min() < -SYMMETRY * max(1.0, float(np.abs(N).max())):
        raise UserError(f"{where}: the new states' variances and covariances are not positive semidefinite")
    return StateMap(after, _build_affine(T, b, N), None, tuple(diffuse))


def _check_dropped(step: MigrationStep, mapped: Sequence[str]) -> None:
    """Refuse an old state that is neither mapped nor dropped, or that is both mapped and dropped."""
    old, where, section = step.old, step.where, step.section
    dropped = [] if step.rules is None else step.rules.drop
    for name in old.states:
        if name not in mapped and name not in dropped:
            raise UserError(
                f"{where}: state {name} of version {old.version} goes nowhere: name it in {section}.drop if it is to "
                f"be given up, or say under {section}.states what it becomes"
            )
    wrong = [name for name in dropped if name in mapped or name not in old.states]
    if wrong:
        raise UserError(
            f"{where}: {section}.drop: {wrong[0]} is kept, or is no state of version {old.version}"
        )


def has_unchanged_units(state_map: StateMap) -> bool:
    """Return whether every mapped state keeps its unit, so that parameters keep their meaning."""
    return state_map.affine is not None and all(
        value in (0.0, 1.0) for row in state_map.affine.T for value in row
    )


def load_function(name: str, field: str, folder: str | None = None) -> Named:
    """Return the function `module:function` in a field of the spec; the module may also be in `folder`.

    Raises:
        UserError: the function does not exist.
    """
    try:
        find(name, folder, field)
    except kalman.ModelError as error:
        raise UserError(str(error)) from error
    return Named(name, folder)


def _map_moments(state_map: StateMap, moments: StateMoments, extras: Mapping[str, Floats]) -> StateMoments:
    keys = moments.mean.shape[1]
    if state_map.affine is None:
        assert state_map.function is not None
        moments = _fold_moments(moments)
        mean, covariance = (
            np.asarray(a, float) for a in state_map.function(moments.mean, moments.covariance, extras)
        )
        n = len(state_map.states)
        if mean.shape != (n, keys) or covariance.shape != (n * n, keys):
            raise UserError(
                f"the migration's function {state_map.function.name} returned mean {mean.shape} and covariance "
                f"{covariance.shape}, not {(n, keys)} and {(n * n, keys)}"
            )
        return StateMoments(mean, covariance, None)
    mean, covariance = move_moments(moments.mean, moments.covariance, state_map.affine)
    T, A = np.array(state_map.affine.T), moments.A
    parts = []
    if A is not None:
        parts.append(np.array([[T[i] @ A[:, j] for j in range(A.shape[1])] for i in range(len(T))]))
    for i in state_map.diffuse:
        column = np.zeros((len(T), 1, keys))
        column[i] = 1.0
        parts.append(column)
    return StateMoments(mean, covariance, np.concatenate(parts, axis=1) if parts else None)


def _fold_moments(moments: StateMoments) -> StateMoments:
    """Return the moments after barely determined directions were added to the covariance (`kalman.filters.diffuse`)."""
    A = moments.A
    if A is None:
        return moments
    packed = list(pack(moments.covariance))
    P, flat = fold(packed, [list(row) for row in A], np.ones(A.shape[2], bool))
    return StateMoments(moments.mean, unpack(np.array(P)), np.array(flat))


def _has_room(target: Filter, A: Floats | None) -> bool:
    """Return whether the states of a model have room for the columns of A."""
    if A is None:
        return True
    width = target.fields.get("diffuse", (0,))[0] // len(target.states)
    return bool(A.any(axis=(0, 2)).sum() <= width) and find_storage_dtype(target) == DTYPES["float64"]


def _put_diffuse(target: Filter, state: Floats, A: Floats | None) -> NDArray[np.bool_]:
    """Write the undetermined directions into states, in place; return a mask of the keys with too many directions."""
    keys = state.shape[1]
    if A is None or not A.any():
        return np.zeros(keys, bool)
    n = A.shape[0]
    width = target.fields.get("diffuse", (0,))[0] // n
    used = np.flatnonzero(A.any(axis=(0, 2)))  # a column that no key uses needs no room
    if len(used) <= width:
        at = locate_fields(target.fields)["diffuse"]
        full = np.zeros((n, width, keys))
        full[:, : len(used)] = A[:, used]
        state[at] = full.reshape(n * width, keys)
        return np.zeros(keys, bool)
    return np.asarray(A.any(axis=(0, 1)))


def find_wrong_states(mean: Floats, covariance: Floats) -> NDArray[np.bool_]:
    """Return a mask (K,) of the keys whose state is not finite, not symmetric or not positive semidefinite."""
    n, keys = mean.shape
    P = covariance.reshape(n, n, keys)
    finite = np.isfinite(mean).all(axis=0) & np.isfinite(P).all(axis=(0, 1))
    scale = np.abs(np.array([P[i, i] for i in range(n)])).max(axis=0)
    with np.errstate(invalid="ignore"):  # infinity minus infinity: the key is not finite
        skew = np.abs(P - P.transpose(1, 0, 2)).max(axis=(0, 1))
    bad = ~finite | (skew > SYMMETRY * scale)
    good = np.flatnonzero(~bad)
    # The covariances are scaled to unit variances, so that the units of the states do not matter.
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


def _build_affine(T: Floats, b: Floats, N: Floats) -> Affine:
    return Affine(
        tuple(tuple(float(a) for a in row) for row in T),
        tuple(float(a) for a in b),
        tuple(tuple(float(a) for a in row) for row in N),
    )


def _build_transform(step: MigrationStep, transform: Transform) -> Affine:
    where = f"{step.where}: {step.section}.transform"
    n, m = len(step.new.states), len(step.old.states)
    T = transform.matrix
    if len(T) != n or any(len(row) != m for row in T):
        raise UserError(f"{where}.matrix: {n} rows (the new states) of {m} numbers (the old ones) are needed")
    b = transform.offset or [0.0] * n
    if len(b) != n:
        raise UserError(f"{where}.offset: {n} numbers are needed")
    N = np.array(transform.noise or np.zeros((n, n)), float)
    if (
        N.shape != (n, n)
        or not np.allclose(N, N.T)
        or np.linalg.eigvalsh(N).min() < -SYMMETRY * np.abs(N).max()
    ):
        raise UserError(f"{where}.noise: a covariance of {n} x {n} is needed")
    return _build_affine(np.array(T, float), np.array(b, float), N)


def _put_initial(step: MigrationStep, i: int, b: Floats, N: Floats, together: Sequence[int]) -> list[int]:
    """Write the mean of new state i, and its covariances with the states `together`, from the spec's `initial`.

    The arrays `b` and `N` are changed in place. Return [i] if the state is diffuse, else [].
    """
    new, initial = step.new, step.new.initial
    if initial is None:
        raise UserError(
            f"{step.where}: {step.section}.states.{new.states[i]}: the spec of version {new.version} has no `initial`"
        )
    diffuse = initial.diffuse
    if diffuse is True or (isinstance(diffuse, list) and diffuse[i]):
        return [i]
    assert initial.mean is not None and initial.covariance is not None
    numbers = [initial.mean[i], *(initial.covariance[i][j] for j in together)]
    written = [a for a in numbers if isinstance(a, str)]
    if written:
        raise UserError(
            f"{step.where}: {step.section}.states.{new.states[i]}: `initial` of version {new.version} takes it from "
            f"column {written[0]} of a key's first row, which a key with a state does not have again: write mean and "
            f"variance"
        )
    b[i], *covariances = (float(a) for a in numbers)
    N[i, list(together)] = covariances
    return []


def _refuse_other_keys(step: MigrationStep) -> None:
    old, new = step.old, step.new
    if step.keys is not None and not (old.key and new.key):
        raise UserError(
            f"migrate.keys: version {old.version} or {new.version} of {new.name} has no key columns, so that "
            f"the states are of other systems: remove it, and pretrain version {new.version} from history "
            f"(`kalman-pipeline upgrade --model {new.name} --mode retrain`)"
        )
    if old.key != new.key and step.keys is None:
        raise UserError(
            f"{new.name} cannot be migrated from version {old.version} to {new.version}: the key columns changed from "
            f"{', '.join(old.key) or 'none'} to {', '.join(new.key) or 'none'}, so the states are of other systems. "
            f"Say in migrate.keys how the old keys become the new ones, or pretrain version {new.version} from history "
            f"instead (`kalman-pipeline upgrade --model {new.name} --mode retrain`)"
        )
