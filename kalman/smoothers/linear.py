"""Fixed-interval smoothing of the linear filter.

Two passes go backwards together, and each state comes from the pass that keeps its digits there:

- the moments r and N of all later rows (`kalman.smoothers.moments`), for which no P, Q or R is inverted: V = P - P N P
  is accurate for singular matrices too, where later rows leave each state a share of its variance, and while a state is
  diffuse;
- the smoothed state itself (Rauch, Tung and Striebel), its covariance as a sum of squares: V = (I - G F) P (I - G F)' +
  G (V' + Q) G' loses no digits where the difference loses all, since P is enormous after a wide start or a long gap.

References: Rauch, Tung and Striebel (1965); Bucy and Joseph (1968); Durbin and Koopman (2012), sections 4.4 and 5.3.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from kalman.filters.linear import LinearFilter
from kalman.filters.retrodiction import compute_back_gain, compute_covariance_back, retrodict_mean
from kalman.filters.state_layout import BLOCK
from kalman.linalg.entries import plus
from kalman.linalg.packing import packed_size
from kalman.linalg.program import Program, Tape
from kalman.smoothers.moments import MomentSmoother, run_program
from kalman.types import Array, Rows

KEPT = 1e-2
"""Least share of each state's variance left by later rows where P - P N P is used: it loses two digits there."""
LARGEST = 1e4
"""Largest product of P and the largest N of later rows there: N keeps the rounding of the largest."""


@dataclass(frozen=True)
class LinearSmoother:
    """The smoother of a linear filter. It carries the smoothed state (mean, packed covariance), then `Later`."""

    model: LinearFilter

    @cached_property
    def _moments(self) -> MomentSmoother:
        return MomentSmoother(self.model)

    @property
    def _width(self) -> int:
        n = len(self.model.states)
        return n + packed_size(n)

    def begin(self, values: Array) -> Array:
        """Return the array after the last rows of keys in these states (size, K)."""
        mean, covariance = self.model.moments(values[: self.model.size])
        return np.concatenate([mean, covariance, self._moments.begin(values)])

    def smoothed(self, after: Array, later: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance (p, K) of states after a row, given the later rows too.

        An undetermined state has an infinite variance; a state lost to rounding is NaN.
        """
        n = len(self.model.states)
        return later[:n], later[n : self._width]

    def extra(self, later: Array) -> dict[str, Array]:
        """No outputs beside mean and covariance."""
        return {}

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the array before the rows, about the states (size, K) before them."""
        moments = self._moments.back(before, rows, later[self._width :])
        earlier = np.concatenate([*self._moments.smoothed(before, moments), moments])
        here = np.flatnonzero(~self._kept(before, earlier) & ~rows.first)
        if len(here):
            some = Rows(rows.dt[here], rows.first[here], rows.y[:, here], rows.u[:, here])
            earlier[: self._width, here] = self.step_states_back(
                before[:, here], some, later[: self._width, here]
            )
        return earlier

    def _kept(self, before: Array, earlier: Array) -> np.ndarray:
        """Return a mask (K,) of keys where the moments keep the covariance's digits; always with columns."""
        variances = before[self._moments.variances]
        kept: np.ndarray = np.all(earlier[self._moments.variances] >= KEPT * variances, axis=0)
        kept &= (variances * earlier[-len(variances) :]).sum(axis=0) <= LARGEST
        if self.model.diffuse:
            kept |= (before[self.model.places["diffuse"]] != 0.0).any(axis=0)
        return kept

    def step_states_back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return mean and packed covariance before the rows from those after them, as a sum of squares."""
        result = np.empty(later.shape)
        for start in range(0, before.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            inputs = [*before[: self.model.size, block], rows.dt[block], *rows.u[:, block], *later[:, block]]
            run_program(_build_states_program(self.model), inputs, result[:, block])
        return result


@lru_cache(maxsize=64)
def _build_states_program(model: LinearFilter) -> Program:
    """Return one step back from a smoothed state as a program.

    Inputs: state before, dt, control, smoothed state after (mean, packed covariance). Outputs: the one before.
    """
    tape = Tape()
    n = len(model.states)
    state, u, later = (tape.symbols(count) for count in (model.size, model.controls, n + packed_size(n)))
    dt = tape.symbol()
    parts = model.split(state, False)
    prior = model.predicted(parts, dt, u, False)
    F, Q, _ = model.process.transition(dt, u, parts.values)
    G = compute_back_gain(F, parts.P, prior.P)
    spread = [plus(a, q) for a, q in zip(later[n:], Q, strict=True)]
    mean = retrodict_mean(parts.m, prior.m, G, later[:n])
    return Program(tape, [*state, dt, *u, *later], [*mean, *compute_covariance_back(parts.P, F, G, spread)])
