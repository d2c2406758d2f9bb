"""The linear Kalman filter over many keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kalman import flags
from kalman.checks import Numbers
from kalman.entries import Entry, Vector
from kalman.packing import pack, packed_index, packed_size, unpack
from kalman.recursions import congruence, predict
from kalman.structures import Parameter, Structure, Values
from kalman.types import Array, Rows, Step
from kalman.update import Updated, update

BLOCK = 4096
"""Keys worked on at a time, so that the temporaries stay in the processor's cache (32 kB each).

Measured at n=2, m=1, one thread: see docs/decisions/0002.
"""


@dataclass(frozen=True)
class LinearFilter:
    """A linear Gaussian model and its exact filter.

    parameters    all of them with their values: the process's and R
    own           names of those that each key has for itself, in its state
    mean, covariance (packed), diffuse (packed, () when the start is proper): the state at a key's first row
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
    outputs: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each part of a key's state, in order."""
        n = len(self.states)
        fields: dict[str, tuple[int, ...]] = {"mean": (n,), "covariance": (packed_size(n),)}
        if self.diffuse:
            fields["diffuse"] = (packed_size(n),)
        if self.own:
            fields["parameters"] = (len(self.pooled),)
        return fields

    @cached_property
    def size(self) -> int:
        """Number of floats in a key's state."""
        return sum(shape[0] for shape in self.fields.values())

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

    def split(self, state: Array) -> tuple[Vector, Vector, Vector | None, Values]:
        """Return mean, covariance, diffuse part (None where all keys are determined) and parameter values."""
        places = self.places
        diffuse = None
        if self.diffuse and state[places["diffuse"]].any():
            diffuse = list(state[places["diffuse"]])
        values: Values = self._constants
        if self.own:
            rows = iter(state[places["parameters"]])
            # an entry that the pooled matrix has as zero is zero for every key, and stays structure
            values = {
                p.name: [0.0 if p.kind == "covariance" and a == 0.0 else row for a, row in zip(p.value, rows)]
                if p.name in self.own
                else p.value
                for p in self.parameters
            }
        return list(state[places["mean"]]), list(state[places["covariance"]]), diffuse, values

    def predicted(
        self, parts: tuple[Vector, Vector, Vector | None, Values], rows: Rows
    ) -> tuple[Vector, Vector, Vector | None]:
        """Return mean, covariance and diffuse part just before the rows' measurements."""
        m, P, P_inf, values = parts
        if rows.first.all():
            return m, P, P_inf
        transition = self.process.transition(rows.dt, list(rows.u), values)
        m_next, P_next = predict(m, P, transition)
        P_inf_next = None if P_inf is None else congruence(transition.F, P_inf)
        if rows.first.any():
            m_next, P_next = _choose(rows.first, m, m_next), _choose(rows.first, P, P_next)
            if P_inf is not None and P_inf_next is not None:
                P_inf_next = _choose(rows.first, P_inf, P_inf_next)
        return m_next, P_next, P_inf_next

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and what the rows said."""
        keys = state.shape[1]
        after = np.empty((self.size, keys))
        said = Step(np.empty(keys), np.empty(keys), np.zeros(keys, np.uint8), {})
        with np.errstate(all="ignore"):  # what goes wrong ends in a flag
            for start in range(0, keys, BLOCK):
                block = slice(start, start + BLOCK)
                part = Rows(rows.dt[block], rows.first[block], rows.y[:, block], rows.u[:, block])
                self._step_block(state[:, block], part, after[:, block], *(a[block] for a in said[:3]))
        return after, said

    def _step_block(
        self, state: Array, rows: Rows, after: Array, log_likelihood: Array, nis: Array, flag: np.ndarray
    ) -> None:
        """Write the state after the rows, and what they said, into the given arrays."""
        parts = self.split(state)
        prior = self.predicted(parts, rows)
        updated = update(*prior, self.H, parts[3]["R"], list(rows.y))
        places = self.places
        _write(after[places["mean"]], updated.m)
        _write(after[places["covariance"]], updated.P)
        for name in list(places)[2:]:
            after[places[name]] = state[places[name]]
        if updated.P_inf is not None:
            _write(after[places["diffuse"]], updated.P_inf)
        log_likelihood[:] = updated.log_likelihood
        nis[:] = updated.nis
        codes = self._judge(after, prior, updated, rows)
        if codes is not None:
            flag[:] = codes
            bad = codes != flags.WELL
            after[:, bad] = state[:, bad]
            log_likelihood[bad] = np.nan
            nis[bad] = np.nan

    def _judge(
        self, after: Array, prior: tuple[Vector, Vector, Vector | None], updated: Updated, rows: Rows
    ) -> np.ndarray | None:
        """Return a flag for each key, None when all are well; a variance below zero by rounding becomes zero."""
        total = updated.log_likelihood
        for row in after[: self.places["covariance"].stop]:
            total = total + row
        finite = np.isfinite(total)
        n = len(self.states)
        variances = [after[n + packed_index(i, i)] for i in range(n)]
        lowest = variances[0]
        for variance in variances[1:]:
            lowest = np.minimum(lowest, variance)
        negative = lowest < 0.0
        if finite.all() and not negative.any():
            return None
        not_psd = np.zeros(len(finite), bool)
        for i, variance in enumerate(variances):
            not_psd |= variance < -1e-9 * np.abs(prior[1][packed_index(i, i)])
            np.maximum(variance, 0.0, out=variance)
        singular = np.zeros(len(finite), bool)
        for scalar in updated.scalars:
            here = np.isfinite(scalar.weighing.S) & (scalar.weighing.S <= 0.0)
            singular |= here if scalar.present is None else here & scalar.present
        wrong = np.isinf(rows.y).any(axis=0) | ~np.isfinite(rows.dt)
        if self.controls:
            wrong |= ~np.isfinite(rows.u).all(axis=0) & ~rows.first
        reasons = [wrong, singular, ~finite, not_psd]
        codes = [flags.NON_FINITE, flags.SINGULAR_INNOVATION, flags.OVERFLOW, flags.NOT_PSD]
        return np.select(reasons, codes, flags.WELL).astype(np.uint8)

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed lower covariance; what is still diffuse has infinite entries."""
        mean, covariance = state[self.places["mean"]], state[self.places["covariance"]]
        if self.diffuse:
            part = state[self.places["diffuse"]]
            if part.any():
                covariance = np.where(part == 0.0, covariance, np.copysign(np.inf, part))
        return mean, covariance

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K) without its diffuse part, the other fields."""
        places = self.places
        extras = {name: state[place] for name, place in places.items() if name not in ("mean", "covariance")}
        return state[places["mean"]], unpack(state[places["covariance"]]), extras

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state of which `snapshot` gave these parts, bit for bit."""
        others = [np.asarray(extras[name], float) for name in list(self.fields)[2:]]
        return np.concatenate([np.asarray(mean, float), pack(np.asarray(covariance, float)), *others])


def _choose(condition: np.ndarray, yes: Vector, no: Vector) -> list[Entry]:
    return [np.where(condition, a, b) for a, b in zip(yes, no, strict=True)]


def _write(target: Array, entries: Vector) -> None:
    for row, entry in zip(target, entries, strict=True):
        row[:] = entry
