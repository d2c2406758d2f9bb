"""Filters whose step is one program for all keys, because it does not depend on dt or on first rows."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kalman import flags
from kalman.filters.clear_step import ClearStep
from kalman.filters.state_layout import StateLayout, StepTarget, step_in_blocks
from kalman.filters.update import Present, mask_present
from kalman.linalg.entries import Entry, Vector
from kalman.linalg.program import Program, Recorded, Symbol, Tape
from kalman.types import Array, Rows, Step


class ProgramStep(NamedTuple):
    """The result of one row: the state's entries, log-likelihood, NIS, and extra outputs by name."""

    state: Vector
    log_likelihood: Entry
    nis: Entry
    extra: Mapping[str, Vector]


class ProgramFilter(StateLayout):
    """Base class of a filter that defines one step in `step_entries`; this class adds blocks and flags.

    A key is flagged if an input or a result is not finite. A subclass is a frozen dataclass with `controls` and
    `measurements`.
    """

    measurements: int
    controls: int

    def step_entries(self, state: Vector, u: Vector, y: Vector, presents: Sequence[Present]) -> ProgramStep:
        """Return the result of one row, in entries; presents: the result of `kalman.filters.update.mask_present`."""
        raise NotImplementedError

    def codes(self, y: Array, u: Array) -> npt.NDArray[np.uint8]:
        """Return flags (K,) for rows that the filter cannot apply; infinite values are flagged elsewhere.

        y: (m, K) measurements; u: (c, K) controls.
        """
        return np.zeros(y.shape[1], np.uint8)

    def build_clear_step(self, missing: bool) -> ClearStep | None:
        """Return the step of rows in order, None where `codes` may refuse rows; missing: some lack components."""
        if type(self).codes is not ProgramFilter.codes:
            return None
        operations, inputs, (*outputs, check) = _build_program(self, missing).recorded
        inputs = [*inputs[: self.size], Tape().symbol(), *inputs[self.size :]]  # dt, which the step ignores
        return ClearStep(Recorded(operations, inputs, outputs), [("isfinite", check)])

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`."""
        return step_in_blocks(state, rows, self.outputs, self._step_block)

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        presents = mask_present(rows.y)
        program = _build_program(self, presents[0] is not None)
        check = np.empty(state.shape[1])
        extra = [row for name in self.outputs for row in target.extra[name]]
        masks = [a for a in presents if a is not None]
        buffers = np.empty((program.buffers, state.shape[1]))
        program(
            [*state, *rows.u, *rows.y, *masks],
            buffers,
            [*target.state, target.log_likelihood, target.nis, *extra, check],
        )
        wrong = np.isinf(rows.y).any(axis=0) | ~np.isfinite(rows.dt) | ~np.isfinite(rows.u).all(axis=0)
        beyond = ~np.isfinite(check)
        refused = self.codes(rows.y, rows.u)
        if wrong.any() or refused.any() or beyond.any():
            causes = [wrong, refused != flags.WELL, beyond]
            codes = np.select(causes, [flags.NON_FINITE, refused.astype(int), flags.OVERFLOW], flags.WELL)
            target.leave(state, codes.astype(np.uint8))


@lru_cache(maxsize=64)
def _build_program(model: ProgramFilter, missing: bool) -> Program:
    """Return the step as a program; missing: whether any key lacks a component."""
    tape = Tape()
    state, u, y = (tape.symbols(count) for count in (model.size, model.controls, model.measurements))
    presents: list[Any] = tape.symbols(len(y), boolean=True) if missing else [None] * len(y)
    after, log_likelihood, nis, extra = model.step_entries(state, u, y, presents)
    check = log_likelihood
    for entry in after:
        check = check + entry
    extras = [entry for name in model.outputs for entry in extra[name]]
    masks = [a for a in presents if isinstance(a, Symbol)]
    return Program(tape, [*state, *u, *y, *masks], [*after, log_likelihood, nis, *extras, check])
