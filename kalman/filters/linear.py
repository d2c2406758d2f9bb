"""The linear Kalman filter over many keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kalman import flags
from kalman.filters.clear_step import ClearStep
from kalman.filters.diffuse import compute_whole_covariance, project_columns, split, split_rows
from kalman.filters.diffuse import predict as predict_diffuse
from kalman.filters.recursions import choose, congruence, predict
from kalman.filters.state_layout import StateLayout, StepTarget, step_in_blocks
from kalman.filters.update import Scalar, Updated, mask_present, update
from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, minus, plus, times
from kalman.linalg.packing import packed_index, packed_size
from kalman.linalg.program import Program, Symbol, Tape
from kalman.models import definition as definitions
from kalman.models.columns import (
    Cell,
    Cells,
    Column,
    compute_lowest_pivot,
    find_columns,
    require_numbers,
    resolve,
    resolve_matrix,
)
from kalman.models.learned_entries import insert_entries
from kalman.models.starts import Start
from kalman.models.structures import Parameter, Structure, Values
from kalman.types import Array, Rows, Step


class Parts(NamedTuple):
    """The parts of a state, in entries: mean, packed covariance, diffuse factor (or None), parameter values."""

    m: Vector
    P: Vector
    A: Matrix | None
    values: Values


class Observed(NamedTuple):
    """A row's observation model: y = H x + offset + v, v ~ N(0, R), as entries."""

    H: Matrix
    R: Vector
    offset: Vector

    def subtract_offset(self, y: Vector) -> list[Entry]:
        """Return y - offset."""
        return [minus(a, b) for a, b in zip(y, self.offset, strict=True)]


@dataclass(frozen=True)
class LinearFilter(StateLayout):
    """A linear Gaussian model and its exact filter.

    An entry of H, R, `offset`, or the process may be a Column; its value is then the value of that control in each row.

    parameters    all parameters (of the process, and R) with their values
    own           names of the key-specific parameters, whose values are in the state
    mean, covariance (packed), diffuse (row-major factor; () for a proper start): the state at a key's first row
    offset        offset of the measurement, () for no offset
    noise_scale   factor of R
    own_start     initial distribution from columns of a key's first row; mean and covariance are then placeholders
    apart         whether barely determined directions may be stored as columns beside the covariance, which needs
                  float64 (`kalman.filters.diffuse`)
    """

    states: tuple[str, ...]
    measurements: int
    controls: int
    process: Structure
    H: Cells
    parameters: tuple[Parameter, ...]
    mean: tuple[float, ...]
    covariance: tuple[float, ...]
    diffuse: tuple[float, ...] = ()
    own: tuple[str, ...] = ()
    offset: tuple[Cell, ...] = ()
    noise_scale: Cell = 1.0
    own_start: Start | None = None
    apart: bool = True

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part of a key's state, in order."""
        n = len(self.states)
        fields: dict[str, tuple[int, ...]] = {"mean": (n,), "covariance": (packed_size(n),)}
        if self.diffuse:
            fields["diffuse"] = (len(self.diffuse),)  # n rows, a column for each diffuse state
        if self.own:
            fields["parameters"] = (len(self.pooled),)
        return fields

    @cached_property
    def pooled(self) -> tuple[float, ...]:
        """The values of the key-specific parameters that a new key starts with, in the order of the state's field."""
        return tuple(
            value for p in self.parameters if p.name in self.own for value in require_numbers(p.value)
        )

    @cached_property
    def _constants(self) -> dict[str, Sequence[Cell]]:
        return {p.name: p.value for p in self.parameters}

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        start = np.array([*self.mean, *self.covariance, *self.diffuse, *self.pooled])
        return np.repeat(start[:, None], keys, axis=1)

    def split(self, state: Sequence[Entry], diffuse: bool) -> Parts:
        """Return the parts of a state (size rows); diffuse: whether to include the diffuse part."""
        places = self.places
        values: Values = self._constants
        if self.own:
            rows = iter(state[places["parameters"]])
            # a zero entry of the pooled covariance is zero for every key, so programs leave it out
            own = {
                p.name: [_keep_structural_zero(p, a, next(rows)) for a in require_numbers(p.value)]
                for p in self.parameters
                if p.name in self.own
            }
            values = {**values, **own}
        return Parts(
            state[places["mean"]],
            state[places["covariance"]],
            split_rows(state[places["diffuse"]], len(self.states)) if diffuse else None,
            values,
        )

    def symbols(self, tape: Tape) -> tuple[list[Any], Any, list[Any], list[Any]]:
        """Return the inputs of a step: state, dt, control, measurement."""
        state, u, y = (tape.symbols(count) for count in (self.size, self.controls, self.measurements))
        return state, tape.symbol(), u, y

    def is_diffuse(self, state: Array) -> bool:
        """Return whether any key still has an undetermined state."""
        return bool(self.diffuse) and bool(state[self.places["diffuse"]].any())

    def predicted(self, parts: Parts, dt: Array, u: Vector, first: np.ndarray | bool) -> Parts:
        """Return the parts just before the rows' measurements; first: True, False, or a mask (K,) of first rows."""
        if first is True:
            return parts
        m, P, A, values = parts
        transition = self.process.transition(dt, u, values)
        m_next, P_next = predict(m, P, transition)
        A_next = None if A is None else predict_diffuse(transition.F, A)
        if first is not False:
            m_next, P_next = choose(first, m, m_next), choose(first, P, P_next)
            if A is not None and A_next is not None:
                A_next = [choose(first, a, b) for a, b in zip(A, A_next, strict=True)]
        return Parts(m_next, P_next, A_next, values)

    def observed(self, u: Vector, values: Values) -> Observed:
        """Return the observation model of the rows: H, R, and the offset."""
        (scale,) = resolve([self.noise_scale], u)
        return Observed(
            insert_entries("H", resolve_matrix(self.H, u), values),
            [times(scale, r) for r in resolve(values["R"], u)],
            resolve(self.offset or (0.0,) * self.measurements, u),
        )

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return mean (m, K) and packed covariance of H x + offset + v, given states (size, K) and controls u (c, K).

        The covariance is infinite where the state is still diffuse.
        """
        keys = state.shape[1]
        parts = self.split(list(state), self.is_diffuse(state))
        H, R, offset = self.observed(list(u), parts.values)
        mean = [plus(a, b) for a, b in zip(apply(H, parts.m), offset, strict=True)]
        covariance = [plus(a, r) for a, r in zip(congruence(H, parts.P), R, strict=True)]
        if parts.A is not None:
            covariance = compute_whole_covariance(covariance, *project_columns(H, parts.A))

        def array(entries: Vector) -> Array:
            return np.array([np.broadcast_to(entry, keys) for entry in entries], float)

        return array(mean), array(covariance)

    def guard(self, u: Vector, values: Values, first: np.ndarray | bool) -> Entry | None:
        """Return an entry that is zero or more where columns give valid covariances; None without such columns."""
        guards: list[Entry] = [] if first is True else self.process.guards(u)
        if isinstance(first, np.ndarray | Symbol):
            guards = [np.where(first, 0.0, a) for a in guards]
        if isinstance(self.noise_scale, Column):
            guards += resolve([self.noise_scale], u)
        if find_columns(self._constants["R"]):
            guards.append(compute_lowest_pivot(resolve(values["R"], u)))
        if not guards:
            return None
        lowest = guards[0]
        for a in guards[1:]:
            lowest = np.minimum(lowest, a)
        return lowest

    @cached_property
    def _seen(self) -> list[int]:
        """Indices of the controls that a row's measurement depends on, also in a key's first row."""
        return sorted(find_columns([self.H, self._constants["R"], self.offset, self.noise_scale]))

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`."""
        return step_in_blocks(state, rows, self.outputs, self._step_block)

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        presents = mask_present(rows.y)
        first = rows.mask_first_rows()
        diffuse = self.is_diffuse(state)
        case = first if isinstance(first, bool) else None
        program = build_step_program(self, presents[0] is not None, case, diffuse)
        masks = [a for a in (first, *presents) if isinstance(a, np.ndarray)]
        buffers = np.empty((program.buffers, state.shape[1]))
        checks = np.empty((2, state.shape[1]))
        outputs = [*target.state, target.log_likelihood, target.nis, *checks]
        program([*state, rows.dt, *rows.u, *rows.y, *masks], buffers, outputs)
        if np.isfinite(checks[0]).all() and not (checks[1] < 0.0).any():
            return
        prior = self.predicted(self.split(list(state), diffuse), rows.dt, list(rows.u), first)
        u, y = list(rows.u), list(rows.y)
        seen = self.observed(u, prior.values)
        updated = update(*prior[:3], seen.H, seen.R, seen.subtract_offset(y), presents, self.apart)
        guard = self.guard(u, prior.values, first)
        summed = self.bound_variance_terms(state, rows)
        target.leave(state, self.judged(target.state, checks[0], summed, updated.scalars, rows, guard))

    def build_clear_step(self, missing: bool) -> ClearStep:
        """Return the step of rows in order; missing: whether components may be missing."""
        recorded = build_step_program(self, missing, False, False).recorded
        *outputs, total, lowest = recorded.outputs
        conditions = [("isfinite", total), ("greater_equal", lowest)]
        return ClearStep(
            recorded._replace(outputs=outputs), conditions, self.places.get("diffuse", slice(0, 0))
        )

    def bound_variance_terms(self, state: Array, rows: Rows) -> list[Entry]:
        """Return n bounds on the size of the terms that each predicted variance sums.

        Rounding errors are relative to these terms. The variance of a deterministic sum, such as seasonal dummies, may
        be zero although its terms are not.
        """
        parts, u = self.split(list(state), False), list(rows.u)
        F, Q, _ = self.process.transition(rows.dt, u, parts.values)
        P = [np.abs(parts.P[packed_index(i, i)]) for i in range(len(F))]
        size = [np.sqrt(a) for a in P]
        moved = [dot([np.abs(a) for a in row], size) for row in F]
        predicted = [plus(times(a, a), np.abs(Q[packed_index(i, i)])) for i, a in enumerate(moved)]
        return choose(rows.first, P, predicted)

    def judged(
        self,
        after: Array,
        total: Array,
        summed: Vector,
        scalars: Sequence[Scalar],
        rows: Rows,
        guard: Entry | None,
    ) -> np.ndarray:
        """Return a flag for each key, and set variances that rounding made negative to zero (in place)."""
        not_psd = np.zeros(len(total), bool)
        for i in range(len(self.states)):
            variance = after[self.places["covariance"]][packed_index(i, i)]
            not_psd |= variance < -1e-9 * summed[i]
            np.maximum(variance, 0.0, out=variance)
        singular = np.zeros(len(total), bool)
        for scalar in scalars:
            here = np.isfinite(scalar.weighing.S) & (scalar.weighing.S <= 0.0)
            singular |= here if scalar.present is None else here & scalar.present
        wrong = np.isinf(rows.y).any(axis=0) | ~np.isfinite(rows.dt)
        if self.controls:
            wrong |= ~np.isfinite(rows.u).all(axis=0) & ~rows.first
            wrong |= ~np.isfinite(rows.u[self._seen]).all(axis=0)
        impossible = np.zeros(len(total), bool) if guard is None else ~np.greater_equal(guard, 0.0)
        reasons = [wrong, impossible, singular, ~np.isfinite(total), not_psd]
        codes = [
            flags.NON_FINITE,
            flags.NOT_PSD,
            flags.SINGULAR_INNOVATION,
            flags.OVERFLOW,
            flags.NOT_PSD,
        ]
        return np.select(reasons, codes, flags.WELL).astype(np.uint8)

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed lower covariance, infinite for diffuse states."""
        mean, covariance = state[self.places["mean"]], state[self.places["covariance"]]
        if self.is_diffuse(state):
            A = split_rows(list(state[self.places["diffuse"]]), len(self.states))
            covariance = np.array(compute_whole_covariance(list(covariance), *split(A)))
        return mean, covariance


def build_linear(definition: definitions.Definition, learned: Mapping[str, Any]) -> LinearFilter:
    """Return the linear filter of a definition. Raises ModelError."""
    states = definitions.parse_names("states", definition.get("states"))
    measurements = len(definitions.parse_names("measurement", definition.get("measurement")))
    controls = definitions.parse_names("control", definition.get("control") or (), empty=True)
    process = definitions.parse_process(definition, len(states), controls)
    H, R, offset, scale = definitions.parse_observation(
        definition.get("observation"), process, measurements, controls
    )
    all_parameters = definitions.build_parameters(definition, process, R, learned)
    own = ()
    names, scope = definitions.learn_request(definition, all_parameters)
    if scope != "pooled":
        own = tuple(parameter.name for parameter in all_parameters if parameter.name in names)
    start, own_start = definitions.start(definition, len(states), controls)
    size = (states, measurements, len(controls))
    storage = definition.get("storage")
    apart = not isinstance(storage, Mapping) or storage.get("dtype") != "float32"
    return LinearFilter(*size, process, H, all_parameters, *start, own, offset, scale, own_start, apart)


class Traced(NamedTuple):
    """One recorded step: its inputs and results as symbols.

    inputs: state, dt, control and measurement; masks: masks of keys, which follow the inputs; first: True, False, or
    the symbol of the mask of keys at their first row.
    """

    tape: Tape
    state: list[Any]
    dt: Any
    u: list[Any]
    inputs: list[Any]
    masks: list[Any]
    first: Any
    parts: Parts
    prior: Parts
    seen: Observed
    updated: Updated

    def after(self, model: LinearFilter) -> list[Any]:
        """Return the state's entries after the step."""
        places = model.places
        after = [*self.updated.m, *self.updated.P, *self.state[places["covariance"].stop :]]
        if self.updated.A is not None:
            after[places["diffuse"]] = [entry for row in self.updated.A for entry in row]
        return after


def record_step(model: LinearFilter, tape: Tape, missing: bool, first: bool | None, diffuse: bool) -> Traced:
    """Record a step for one of the cases of `build_step_program`."""
    state, dt, u, y = model.symbols(tape)
    is_first: Any = tape.symbol(boolean=True) if first is None else first
    presents: list[Any] = tape.symbols(len(y), boolean=True) if missing else [None] * len(y)
    parts = model.split(state, diffuse)
    prior = model.predicted(parts, dt, u, is_first)
    seen = model.observed(u, prior.values)
    updated = update(*prior[:3], seen.H, seen.R, seen.subtract_offset(y), presents, model.apart)
    masks = [a for a in (is_first, *presents) if isinstance(a, Symbol)]
    return Traced(tape, state, dt, u, [*state, dt, *u, *y], masks, is_first, parts, prior, seen, updated)


def check_length(model: LinearFilter) -> None:
    """Record one step and discard the record. Raises ModelError if the step has too many operations for a program."""
    record_step(model, Tape(), True, None, False)


@lru_cache(maxsize=64)
def build_step_program(model: LinearFilter, missing: bool, first: bool | None, diffuse: bool) -> Program:
    """Return the program of one step, for one case.

    missing: whether any key lacks a component. first: whether all keys (True), no keys (False), or some keys (None)
    are at their first row. diffuse: whether any key is diffuse. Outputs: the state's rows, log-likelihood, NIS, a
    number that is finite if the other outputs are, the lowest variance.
    """
    step = record_step(model, Tape(), missing, first, diffuse)
    updated = step.updated
    after = step.after(model)
    total = updated.log_likelihood
    for entry in (*updated.m, *updated.P):
        total = total + entry
    lowest = updated.P[0]
    for i in range(1, len(model.states)):
        lowest = np.minimum(lowest, updated.P[packed_index(i, i)])
    guard = model.guard(step.u, step.prior.values, step.first)
    if guard is not None:
        lowest = np.where(np.greater_equal(guard, 0.0) & np.isfinite(guard), lowest, -1.0)
    outputs = [*after, updated.log_likelihood, updated.nis, total, lowest]
    return Program(step.tape, [*step.inputs, *step.masks], outputs)


def _keep_structural_zero(parameter: Parameter, pooled: float, row: Entry) -> Entry:
    return 0.0 if parameter.kind == "covariance" and pooled == 0.0 else row
