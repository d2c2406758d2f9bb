"""The linear Kalman filter over many keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kalman import flags
from kalman.checks import Numbers
from kalman.diffuse import covariance as diffuse_covariance
from kalman.diffuse import predict as predict_diffuse
from kalman.diffuse import rows_of
from kalman.entries import Entry, Matrix, Vector
from kalman.packing import pack, packed_index, packed_size, unpack
from kalman.recursions import choose, predict
from kalman.straight_line import Program, Symbol, Tape
from kalman.structures import Parameter, Structure, Values
from kalman.types import Array, Rows, Step
from kalman.update import Scalar, presence, update

BLOCK = 4096
"""Keys worked on at a time, so that the temporaries stay in the processor's cache (32 kB each).

Measured at n=2, m=1, one thread: see docs/decisions/0002.
"""


class Parts(NamedTuple):
    """A state's entries: mean, packed covariance, the diffuse part's factor or None, parameter values."""

    m: Vector
    P: Vector
    A: Matrix | None
    values: Values


@dataclass(frozen=True)
class LinearFilter:
    """A linear Gaussian model and its exact filter.

    parameters    all of them with their values: the process's and R
    own           names of those that each key has for itself, in its state
    mean, covariance (packed), diffuse (factor, row-major, () when the start is proper): the state at a
                  key's first row
    """

    states: tuple[str, ...]
    measurements: int
    controls: int
    process: Structure
    H: Numbers
    parameters: tuple[Parameter, ...]
    mean: tuple[float, ...]
    covariance: tuple[float, ...]
    diffuse: tuple[float, ...] = ()
    own: tuple[str, ...] = ()

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

    @property
    def outputs(self) -> Mapping[str, int]:
        """Nothing beyond mean and covariance."""
        return {}

    @property
    def size(self) -> int:
        """Number of floats in a key's state."""
        return list(self.places.values())[-1].stop

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each field is in a key's state."""
        ends = np.cumsum([shape[0] for shape in self.fields.values()]).tolist()
        starts = [0, *ends[:-1]]
        return {name: slice(a, b) for name, a, b in zip(self.fields, starts, ends, strict=True)}

    @cached_property
    def pooled(self) -> tuple[float, ...]:
        """The values, as in `parameters` of the state, that a new key starts with."""
        return tuple(value for p in self.parameters if p.name in self.own for value in p.value)

    @cached_property
    def _constants(self) -> dict[str, Sequence[Entry]]:
        return {p.name: p.value for p in self.parameters}

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        start = np.array([*self.mean, *self.covariance, *self.diffuse, *self.pooled])
        return np.repeat(start[:, None], keys, axis=1)

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Return the state with each key's own parameters (p, K), ordered as `own` with packed entries."""
        state = state.copy()
        state[self.places["parameters"]] = parameters
        return state

    def split(self, state: Sequence[Entry], diffuse: bool) -> Parts:
        """Return the parts of a state (size rows); its diffuse part only where some key has one."""
        places = self.places
        values: Values = self._constants
        if self.own:
            rows = iter(state[places["parameters"]])
            # an entry that the pooled matrix has as zero is zero for every key, and stays structure
            own = {
                p.name: [_structural(p, a, next(rows)) for a in p.value]
                for p in self.parameters
                if p.name in self.own
            }
            values = {**values, **own}
        return Parts(
            state[places["mean"]],
            state[places["covariance"]],
            rows_of(state[places["diffuse"]], len(self.states)) if diffuse else None,
            values,
        )

    def symbols(self, tape: Tape) -> tuple[list[Any], Any, list[Any], list[Any]]:
        """Return what a step takes: state, dt, control, measurement."""
        state, u, y = (tape.symbols(count) for count in (self.size, self.controls, self.measurements))
        return state, tape.symbol(), u, y

    def is_diffuse(self, state: Array) -> bool:
        """Tell whether any key still has an undetermined state."""
        return bool(self.diffuse) and bool(state[self.places["diffuse"]].any())

    def predicted(self, parts: Parts, dt: Array, u: Vector, first: np.ndarray | bool) -> Parts:
        """Return the parts just before the rows' measurements; first: all, none, or (K,) which keys."""
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

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and what the rows said."""
        keys = state.shape[1]
        after = np.empty((self.size, keys))
        said = Step(np.empty(keys), np.empty(keys), np.zeros(keys, np.uint8), {})
        checks = np.empty((2, min(keys, BLOCK)))
        with np.errstate(all="ignore"):  # what goes wrong ends in a flag
            for start in range(0, keys, BLOCK):
                block = slice(start, min(start + BLOCK, keys))
                part = Rows(rows.dt[block], rows.first[block], rows.y[:, block], rows.u[:, block])
                self._step_block(
                    state[:, block],
                    part,
                    after[:, block],
                    said.log_likelihood[block],
                    said.nis[block],
                    said.flag[block],
                    checks[:, : block.stop - start],
                )
        return after, said

    def _step_block(
        self,
        state: Array,
        rows: Rows,
        after: Array,
        log_likelihood: Array,
        nis: Array,
        flag: np.ndarray,
        checks: Array,
    ) -> None:
        """Write the state after the rows, and what they said, into the given arrays."""
        presents = presence(rows.y)
        first = rows.which_first()
        diffuse = self.is_diffuse(state)
        case = first if isinstance(first, bool) else None
        program = step_program(self, presents[0] is not None, case, diffuse)
        masks = [a for a in (first, *presents) if isinstance(a, np.ndarray)]
        buffers = np.empty((program.buffers, state.shape[1]))
        program([*state, rows.dt, *rows.u, *rows.y, *masks], buffers, [*after, log_likelihood, nis, *checks])
        if np.isfinite(checks[0]).all() and not (checks[1] < 0.0).any():
            return
        prior = self.predicted(self.split(list(state), diffuse), rows.dt, list(rows.u), first)
        updated = update(*prior[:3], self.H, prior.values["R"], list(rows.y), presents)
        codes = self._judge(after, checks[0], prior.P, updated.scalars, rows)
        flag[:] = codes
        bad = codes != flags.WELL
        after[:, bad] = state[:, bad]
        log_likelihood[bad] = np.nan
        nis[bad] = np.nan

    def _judge(
        self, after: Array, total: Array, P: Vector, scalars: Sequence[Scalar], rows: Rows
    ) -> np.ndarray:
        """Return a flag for each key; a variance below zero by rounding becomes zero."""
        not_psd = np.zeros(len(total), bool)
        for i in range(len(self.states)):
            variance = after[self.places["covariance"]][packed_index(i, i)]
            not_psd |= variance < -1e-9 * np.abs(P[packed_index(i, i)])
            np.maximum(variance, 0.0, out=variance)
        singular = np.zeros(len(total), bool)
        for scalar in scalars:
            here = np.isfinite(scalar.weighing.S) & (scalar.weighing.S <= 0.0)
            singular |= here if scalar.present is None else here & scalar.present
        wrong = np.isinf(rows.y).any(axis=0) | ~np.isfinite(rows.dt)
        if self.controls:
            wrong |= ~np.isfinite(rows.u).all(axis=0) & ~rows.first
        reasons = [wrong, singular, ~np.isfinite(total), not_psd]
        codes = [flags.NON_FINITE, flags.SINGULAR_INNOVATION, flags.OVERFLOW, flags.NOT_PSD]
        return np.select(reasons, codes, flags.WELL).astype(np.uint8)

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed lower covariance; what is still diffuse has infinite entries."""
        mean, covariance = state[self.places["mean"]], state[self.places["covariance"]]
        if self.is_diffuse(state):
            packed = diffuse_covariance(rows_of(list(state[self.places["diffuse"]]), len(self.states)))
            infinite = np.array([np.copysign(np.inf, part) for part in packed])
            covariance = np.where(np.array(packed) == 0.0, covariance, infinite)
        return mean, covariance

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), row-major covariance (n*n, K) without its diffuse part, other fields."""
        places = self.places
        extras = {name: state[place] for name, place in places.items() if name not in ("mean", "covariance")}
        return state[places["mean"]], unpack(state[places["covariance"]]), extras

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state of which `snapshot` gave these parts, bit for bit."""
        others = [np.asarray(extras[name], float) for name in list(self.fields)[2:]]
        return np.concatenate([np.asarray(mean, float), pack(np.asarray(covariance, float)), *others])


@lru_cache(maxsize=64)
def step_program(model: LinearFilter, missing: bool, first: bool | None, diffuse: bool) -> Program:
    """Return one step as a straight line, for the case at hand.

    missing: some key lacks a component. first: all keys (True), none (False), or some (None) are at
    their first row. diffuse: some key is. Outputs: the state's rows, log-likelihood, NIS, a number that is
    finite when all is well, the lowest variance.
    """
    tape = Tape()
    state, dt, u, y = model.symbols(tape)
    is_first: Any = tape.symbol(boolean=True) if first is None else first
    presents: list[Any] = tape.symbols(len(y), boolean=True) if missing else [None] * len(y)
    prior = model.predicted(model.split(state, diffuse), dt, u, is_first)
    updated = update(*prior[:3], model.H, prior.values["R"], y, presents)
    places = model.places
    after = [*updated.m, *updated.P, *state[places["covariance"].stop :]]
    if updated.A is not None:
        after[places["diffuse"]] = [entry for row in updated.A for entry in row]
    total = updated.log_likelihood
    for entry in (*updated.m, *updated.P):
        total = total + entry
    lowest = updated.P[0]
    for i in range(1, len(model.states)):
        lowest = np.minimum(lowest, updated.P[packed_index(i, i)])
    masks = [a for a in (is_first, *presents) if isinstance(a, Symbol)]
    outputs = [*after, updated.log_likelihood, updated.nis, total, lowest]
    return Program(tape, [*state, dt, *u, *y, *masks], outputs)


def _structural(parameter: Parameter, pooled: float, row: Entry) -> Entry:
    return 0.0 if parameter.kind == "covariance" and pooled == 0.0 else row
