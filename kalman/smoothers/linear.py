"""Fixed-interval smoothing of the linear filter.

The pass backwards carries the smoothed state itself (Rauch, Tung and Striebel), its covariance as a sum of squares:
V = (I - G F) P (I - G F)' + G (V' + Q) G' loses no digits where P is enormous, as after a wide start or a long gap, and
is positive semidefinite. While a key's state is still diffuse there is no finite P: from its last such row on backwards
it carries the moments of the later rows (`kalman.smoothers.moments`).

References: Rauch, Tung and Striebel (1965); Bucy and Joseph (1968); Durbin and Koopman (2012), section 5.3.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from kalman.filters.linear import LinearFilter
from kalman.filters.retrodiction import covariance_back, gain, gain_over, retrodicted
from kalman.filters.state_layout import BLOCK
from kalman.linalg.entries import Entry, Vector, minus, plus
from kalman.linalg.packing import packed_size, symmetric
from kalman.linalg.program import Program, Tape
from kalman.smoothers.moments import MomentSmoother
from kalman.types import Array, Rows


@dataclass(frozen=True)
class LinearSmoother:
    """The smoother of a linear filter. It carries the smoothed state (mean, packed covariance) of K keys.

    A model with diffuse states carries (depth, K) moments of later rows in their place for the keys that are diffuse
    after the row, and a last row that is 1 for these keys, else 0.
    """

    model: LinearFilter

    @cached_property
    def _moments(self) -> MomentSmoother:
        return MomentSmoother(self.model)

    @property
    def _width(self) -> int:
        n = len(self.model.states)
        return n + packed_size(n)

    def begin(self, values: Array) -> Array:
        """Return what to start from after the last rows of keys in these states (size, K)."""
        plain = values[: self._width].copy()
        if not self.model.diffuse:
            return plain
        moments = self._moments.begin(values)
        diffuse = self._diffuse(values)
        moments[: self._width] = np.where(diffuse, 0.0, plain)
        return np.concatenate([moments, diffuse[None].astype(float)])

    def smoothed(self, after: Array, later: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance (p, K) of states after a row, given the later rows too.

        What no row ever determines has an infinite variance.
        """
        n, width = len(self.model.states), self._width
        mean, covariance = later[:n], later[n:width]
        if self.model.diffuse and later[-1].any():
            mean, covariance = mean.copy(), covariance.copy()
            here = later[-1] > 0.0
            mean[:, here], covariance[:, here] = self._moments.smoothed(after[:, here], later[:-1, here])
        return mean, covariance

    def extra(self, later: Array) -> dict[str, Array]:
        """Nothing beside mean and covariance."""
        return {}

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the same before the rows, about the states (size, K) before them."""
        result = np.empty(later.shape)
        with np.errstate(all="ignore"):  # only flagged rows can go wrong, and they are left out
            for start in range(0, before.shape[1], BLOCK):
                block = slice(start, start + BLOCK)
                part = Rows(rows.dt[block], rows.first[block], rows.y[:, block], rows.u[:, block])
                self._back_block(before[: self.model.size, block], part, later[:, block], result[:, block])
        return result

    def _back_block(self, before: Array, rows: Rows, later: Array, result: Array) -> None:
        width, first = self._width, rows.which_first()
        result[width:] = later[width:]
        case = first if isinstance(first, bool) else None
        masks = [first] if isinstance(first, np.ndarray) else []
        program = _back_program(self.model, case)
        inputs = [*before, rows.dt, *rows.u, *later[:width], *masks]
        program(inputs, np.empty((program.buffers, before.shape[1])), result[:width])
        if self.model.diffuse and (here := self._diffuse(before)).any():
            part = Rows(rows.dt[here], rows.first[here], rows.y[:, here], rows.u[:, here])
            moments = self._about_after(before[:, here], part, later[:, here])
            result[:-1, here] = self._moments.back(before[:, here], part, moments)
            result[-1, here] = 1.0

    def _about_after(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the moments of the later rows about the states after these rows, of keys diffuse before them."""
        known = later[-1] == 0.0
        if not known.any():
            return later[:-1]
        after, _ = self.model.step(before, rows)
        moments = later[:-1].copy()
        made = np.zeros((len(moments), np.count_nonzero(known)))
        width = self._width
        program = _moments_program(len(self.model.states))
        inputs = [*after[:width, known], *later[:width, known]]
        program(inputs, np.empty((program.buffers, made.shape[1])), made[:width])
        moments[:, known] = made
        return moments

    def _diffuse(self, values: Array) -> np.ndarray:
        """Return which keys (K,) bool are still diffuse in these states."""
        found: np.ndarray = (values[self.model.places["diffuse"]] != 0.0).any(axis=0)
        return found


@lru_cache(maxsize=64)
def _back_program(model: LinearFilter, first: bool | None) -> Program:
    """Return one step back as a program. first: as in `kalman.filters.linear.step_program`.

    Inputs: state before, dt, control, smoothed state after (mean, packed covariance), which keys are at their first
    row. Outputs: the smoothed state before; that of a first row is the state after it.
    """
    tape = Tape()
    n = len(model.states)
    state, u, later = (tape.symbols(count) for count in (model.size, model.controls, n + packed_size(n)))
    dt = tape.symbol()
    masks: list[Any] = [tape.symbol(boolean=True)] if first is None else []
    earlier: list[Entry] = list(later)
    if first is not True:
        parts = model.split(state, False)
        prior = model.predicted(parts, dt, u, False)
        F, Q, _ = model.process.transition(dt, u, parts.values)
        G = gain_over(F, parts.P, prior.P)
        spread = [plus(a, q) for a, q in zip(later[n:], Q, strict=True)]
        mean = retrodicted(parts.m, prior.m, G, later[:n])
        earlier = [*mean, *covariance_back(parts.P, F, G, spread)]
    if masks:
        earlier = [np.where(masks[0], a, b) for a, b in zip(later, earlier, strict=True)]
    return Program(tape, [*state, dt, *u, *later, *masks], earlier)


@lru_cache(maxsize=64)
def _moments_program(n: int) -> Program:
    """Return the program of r = P^-1 (x - m) and N = P^-1 (P - V) P^-1.

    Inputs: state m, P and smoothed state x, V. Outputs: r, packed N.
    """
    tape = Tape()
    state, later = tape.symbols(n + packed_size(n)), tape.symbols(n + packed_size(n))
    m, P, mean, V = state[:n], state[n:], later[:n], later[n:]
    lost: Vector = [minus(a, b) for a, b in zip(P, V, strict=True)]
    half = gain(P, symmetric(lost))  # (P - V) P^-1
    N = gain(P, [list(column) for column in zip(*half, strict=True)])
    r = gain(P, [[minus(a, b) for a, b in zip(mean, m, strict=True)]])[0]
    return Program(tape, [*state, *later], [*r, *(N[i][j] for i in range(n) for j in range(i + 1))])
