"""Fixed-interval smoothing of the linear filter.

Two passes go backwards together, and each smoothed state comes from the pass that keeps the state's digits:

- the moments r and N of all later rows (`kalman.smoothers.moments`), which need no inverse of P, Q or R. V = P - P N P
is accurate for singular matrices too, if later rows leave each state a share of its variance, and while a state is
diffuse;
- the smoothed state (Rauch, Tung and Striebel), whose covariance is a sum of squares: V = (I - G F) P (I - G F)' + G
(V' + Q) G' loses no digits where P - P N P loses all digits, since P is enormous after a wide start or a long gap.

References: Rauch, Tung and Striebel (1965); Bucy and Joseph (1968); Durbin and Koopman (2012), sections 4.4 and 5.3.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from kalman.filters.clear_step import ClearStep
from kalman.filters.linear import LinearFilter
from kalman.filters.retrodiction import compute_back_gain, compute_covariance_back, retrodict_mean
from kalman.filters.state_layout import BLOCK
from kalman.linalg.entries import dot, plus
from kalman.linalg.packing import packed_index, packed_size
from kalman.linalg.program import Program, Recorded, Tape
from kalman.smoothers.moments import LOST, MomentSmoother, run_program
from kalman.types import Array, Rows

KEPT = 1e-2
"""P - P N P is used where later rows leave each state this share of its variance: it loses two digits there."""
LARGEST = 1e4
"""P - P N P is used up to this product of P and the largest N of later rows, whose rounding remains in N."""


@dataclass(frozen=True)
class LinearSmoother:
    """The smoother of a linear filter, which carries the smoothed state (mean, packed covariance), then `Later`."""

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

        An undetermined state has an infinite variance; a state that is lost to rounding is NaN.
        """
        n = len(self.model.states)
        return later[:n], later[n : self._width]

    def extra(self, later: Array) -> dict[str, Array]:
        """Return an empty mapping: the smoother has no outputs beside mean and covariance."""
        return {}

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the array before the rows, about the states `before` (size, K) the rows."""
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
        """Return a mask (K,) of keys for which P - P N P keeps its digits or a state has diffuse columns."""
        variances = before[self._moments.variances]
        kept: np.ndarray = np.all(earlier[self._moments.variances] >= KEPT * variances, axis=0)
        kept &= dot([*variances], [*earlier[-len(variances) :]]) <= LARGEST
        if self.model.diffuse:
            kept |= (before[self.model.places["diffuse"]] != 0.0).any(axis=0)
        return kept

    def build_clear_back(self, missing: bool) -> ClearStep:
        """Return the step back over a row in order; missing: whether components may be missing.

        Its inputs are the array, the state before the row, dt, control, measurement and masks.
        """
        model, depth = self.model, len(self.begin(self.model.initial(1))) - self._width
        back, smoothed = self._moments.record_clear_back(missing)
        at = model.size + 1 + model.controls + model.measurements
        row, carried, masks = back.inputs[:at], back.inputs[at : at + depth], back.inputs[at + depth :]
        before = row[: model.size]
        both = smoothed.follow(back, [*before, *back.outputs])
        states = _build_states_program(model).recorded.follow(both, row[: model.size + 1 + model.controls])
        place = model.places.get("diffuse", slice(0, 0))
        variances = [before[i] for i in self._moments.variances]
        largest = back.outputs[-len(variances) :]
        chosen = _record_choice(len(variances)).follow(
            states, [*variances, *largest, *both.outputs, *states.outputs]
        )
        inputs = [*states.inputs[len(both.inputs) :], *carried, *row, *masks]
        return ClearStep(Recorded(chosen.operations, inputs, [*chosen.outputs, *back.outputs]), [], place)

    def step_states_back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return mean and packed covariance before the rows from those after the rows, by a sum of squares."""
        result = np.empty(later.shape)
        for start in range(0, before.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            inputs = [*before[: self.model.size, block], rows.dt[block], *rows.u[:, block], *later[:, block]]
            run_program(_build_states_program(self.model), inputs, result[:, block])
        return result


@lru_cache(maxsize=64)
def _build_states_program(model: LinearFilter) -> Program:
    """Return one step back from a smoothed state as a program.

    Inputs: state before, dt, control, smoothed state after (mean, packed covariance). Outputs: smoothed state before.
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


def _record_choice(n: int) -> Recorded:
    """Return the choice between the smoothed states of both passes, as `back` makes it.

    Inputs: n variances before the row, n numbers `largest`, mean and packed covariance by moments, and by a sum of
    squares.
    """
    tape, width = Tape(), n + packed_size(n)
    variances, largest, moments, squares = (tape.symbols(count) for count in (n, n, width, width))
    kept: Any = np.less_equal(dot(variances, largest), LARGEST)
    first = list(moments)
    for i, variance in enumerate(variances):
        place = n + packed_index(i, i)
        first[place] = np.maximum(moments[place], 0.0)
        kept = kept & np.greater_equal(moments[place], LOST * variance)
        kept = kept & np.greater_equal(first[place], KEPT * variance)
    chosen = [np.where(kept, a, b) for a, b in zip(first, squares, strict=True)]
    return Recorded(tape.operations, [*variances, *largest, *moments, *squares], chosen)
