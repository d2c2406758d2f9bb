"""Likelihood, derivatives and innovations of many keys by compiled code, with the bits of rounds of NumPy calls.

A step is cut into three parts (`kalman.long_series.split_step`). The compiled part walks the rows of eight keys at a
time (`kalman.linalg.lanes`); NumPy computes before it what depends on known columns alone, and after it the logarithms.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kalman.filters.clear_step import ClearStep
from kalman.learning.key_rows import RoundRows
from kalman.learning.tangents import LearnedEntries, record_innovations, record_sums
from kalman.linalg.compiled import COMPILING, load_llvm
from kalman.linalg.lanes import Lanes
from kalman.linalg.program import Program, Recorded, Tape
from kalman.long_series import StepParts, split_step
from kalman.types import Array

ENOUGH_ROWS, ROUND_ROWS = 60_000, 1000
"""Rows from which compiling pays; a round of NumPy calls counts as so many rows, whatever the number of its keys."""
LONGEST = 8_000
"""Maximum number of operations of a step to compile, which takes some seconds."""
MOST_PRODUCTS = 4_000
"""Largest product of learned entries and cubed states of a model whose step is recorded to see if it is too long."""
MOST_CASES = 16
"""Maximum number of models whose compiled steps are kept."""
CHUNK = 16_384
"""Rows whose logarithms are computed at once, so that they stay in the processor's cache."""


class LaneStep:
    """One row's step for many keys, in three parts."""

    def __init__(self, parts: StepParts, size: int) -> None:
        """Compile the parts; size: number of the state's entries."""
        known, walked, late = parts
        self._known = Program(known, known.inputs, known.outputs) if known.outputs else None
        self._late = Program(late, late.inputs, late.outputs) if late.outputs else None
        self._columns, self._crossing = len(known.outputs), len(walked.outputs) - 1 - size
        # without the last output, whether the row is in order: a search refuses a value that is not finite
        self._lanes = Lanes(Recorded(walked.operations, walked.inputs, walked.outputs[:-1]), size)

    def apply(
        self, state: Array, starts: np.ndarray, rounds: tuple[int, np.ndarray], row: list[Any], found: Array
    ) -> None:
        """Apply the rounds of all keys, in place.

        Args:
            state: (size, J) states before the rows; afterwards the states after them.
            starts: (T + 1,) position of each round's first row.
            rounds: the first round and, for each key, the end of its rounds.
            row: for each input of a row an array (N,).
            found: (d, N) the step's outputs beside the state, written at the rows of these rounds.
        """
        part = slice(int(starts[rounds[0]]), int(starts[rounds[1][0]]))
        inputs = list(row)
        if self._known is not None:
            computed = np.empty((self._columns, len(row[0])))
            _run_chunks(self._known, part, row, computed)
            inputs += [*computed]
        crossing = [*np.empty((self._crossing, len(row[0])))] if self._late is not None else [*found]
        self._lanes(state, starts, rounds, inputs, crossing)
        if self._late is not None:
            _run_chunks(self._late, part, [*inputs, *crossing], found)


def _run_chunks(program: Program, part: slice, inputs: Sequence[Array], outputs: Array) -> None:
    """Compute the rows of the outputs (d, N) that are in `part`."""
    work = np.empty((program.buffers, CHUNK))
    for begin in range(part.start, part.stop, CHUNK):
        some = slice(begin, min(begin + CHUNK, part.stop))
        program([a[some] for a in inputs], work[:, : some.stop - begin], outputs[:, some])


class Phases(NamedTuple):
    """The compiled steps of a key's first row, of later rows while a state is diffuse, and of the other rows."""

    first: LaneStep
    diffuse: LaneStep | None
    later: LaneStep


def has_enough_rows(rows: RoundRows) -> bool:
    """Return whether compiling steps pays for these rows alone."""
    return rows.size + ROUND_ROWS * len(rows.missing) >= ENOUGH_ROWS


def is_compiled(of: LearnedEntries, rows: RoundRows) -> bool:
    """Return whether `sum_rows` has a result; the first call for many rows compiles the steps."""
    return _find_phases(_cut_sums, of, rows) is not None


def sum_rows(of: LearnedEntries, rows: RoundRows, entries: Array) -> Array | None:
    """Return the sums (sums, J) of J keys at their learned entries (d, J), or None where nothing is compiled."""
    phases = _find_phases(_cut_sums, of, rows)
    if phases is None:
        return None
    diffuse = of.factor > 0
    start = of.model.initial(1)[: of.model.places["covariance"].stop + of.factor]
    state = np.zeros((sum(of.sizes(diffuse)) + of.sums + len(entries), rows.keys))
    state[: len(start)], state[len(state) - len(entries) :] = start, entries
    score = np.empty((1, rows.size))
    state = _apply_phases(phases, of, rows, state, of.drop_diffuse_rows, score)
    totals = state[len(state) - len(entries) - of.sums : len(state) - len(entries)]
    total = np.zeros((1, rows.keys))
    with np.errstate(all="ignore"):
        _build_summation()(total, rows.starts, (0, rows.count_rounds()), [score[0]], ())
    totals[0] = total[0]
    return totals


def find_innovations(of: LearnedEntries, rows: RoundRows, entries: Array) -> Array | None:
    """Return innovations and variances (2 m, N), or None where nothing is compiled."""
    phases = _find_phases(_cut_innovations, of, rows)
    if phases is None:
        return None
    settled = of.model.places["covariance"].stop
    start = of.model.initial(1)[: settled + of.factor]
    state = np.concatenate([np.repeat(start, rows.keys, axis=1), entries])
    found = np.empty((2 * of.model.measurements, rows.size))

    def drop(state: Array) -> Array:
        return np.delete(state, slice(settled, settled + of.factor), axis=0)

    _apply_phases(phases, of, rows, state, drop, found)
    return found


def _apply_phases(
    phases: Phases,
    of: LearnedEntries,
    rows: RoundRows,
    state: Array,
    drop: Callable[[Array], Array],
    found: Array,
) -> Array:
    """Apply all rows and return the states after them; drop: leaves out the diffuse rows of a state."""
    starts, end = rows.starts, rows.count_rounds()
    row = [rows.dt, *rows.u, *rows.y]
    if rows.missing.any():
        row += [(~np.isnan(y)).astype(float) for y in rows.y]
    row = [np.ascontiguousarray(a) for a in row]
    settled, at, last = of.model.places["covariance"].stop, 1, len(rows.missing)
    with np.errstate(all="ignore"):
        phases.first.apply(state, starts, (0, np.minimum(end, 1)), row, found)
        while phases.diffuse is not None and at < last:
            active = int(starts[at + 1] - starts[at])
            if not state[settled : settled + of.factor, :active].any():
                break
            phases.diffuse.apply(state, starts, (at, np.minimum(end, at + 1)), row, found)
            at += 1
        if at < last:
            state = state if phases.diffuse is None else np.ascontiguousarray(drop(state))
            phases.later.apply(state, starts, (at, end), row, found)
    return state


Cut = Callable[[LearnedEntries, bool, bool, bool], "tuple[ClearStep, int]"]
"""(of, missing, first, diffuse) -> the step, whose outputs are the state and others, and the size of the state."""
_PHASES: dict[tuple[Cut, LearnedEntries, bool], Phases | None] = {}
"""Compiled steps by cut, learned entries, and whether components are missing; they serve fewer rows too."""


def _find_phases(cut: Cut, of: LearnedEntries, rows: RoundRows) -> Phases | None:
    """Return the compiled steps; None if the rows are too few to compile them, or if they cannot be compiled."""
    case = cut, of, bool(rows.missing.any())
    with COMPILING:
        if case not in _PHASES:
            if not has_enough_rows(rows):
                return None
            if len(_PHASES) >= MOST_CASES:
                _PHASES.pop(next(iter(_PHASES)))
            _PHASES[case] = _compile_phases(*case)
        return _PHASES[case]


def _compile_phases(cut: Cut, of: LearnedEntries, missing: bool) -> Phases | None:
    """Return the compiled steps; None if a step cannot be compiled, is too long, or nothing can be compiled here."""
    diffuse = of.factor > 0
    if load_llvm() is None or max(1, of.slopes) * len(of.model.states) ** 3 > MOST_PRODUCTS:
        return None
    split: list[tuple[StepParts, int]] = []
    for first, flat in ((True, diffuse), (False, False), *([(False, True)] if diffuse else [])):
        step, size = cut(of, missing, first, flat)
        found = split_step(step, size)
        if found is None or len(found[0].walked.select()) > LONGEST:
            return None
        split.append((found[0], size))
    try:
        begin, later, *others = (LaneStep(*one) for one in split)
    except (AttributeError, OSError, RuntimeError) as error:  # such as no memory that may hold code
        warnings.warn(f"learning takes rounds, since nothing can be compiled here: {error}", stacklevel=2)
        return None
    return Phases(begin, others[0] if others else None, later)


def _cut_sums(of: LearnedEntries, missing: bool, first: bool, diffuse: bool) -> tuple[ClearStep, int]:
    """Return the step in which a row's score stands apart, since it has a logarithm, and is no part of the state."""
    (operations, inputs, outputs), score = record_sums(of, missing, first, diffuse)
    running = len(outputs) - of.sums
    size = len(outputs) + len(of.entries)
    after = [*outputs[:running], inputs[running], *outputs[running + 1 :], *inputs[len(outputs) : size]]
    return ClearStep(Recorded(operations, inputs, [*after, score]), ()), size


def _cut_innovations(of: LearnedEntries, missing: bool, first: bool, diffuse: bool) -> tuple[ClearStep, int]:
    operations, inputs, outputs = record_innovations(of, missing, first, diffuse)
    running = len(outputs) - 2 * of.model.measurements
    size = running + len(of.entries)
    after = [*outputs[:running], *inputs[running:size], *outputs[running:]]
    return ClearStep(Recorded(operations, inputs, after), ()), size


@lru_cache(maxsize=1)
def _build_summation() -> Lanes:
    """Return the sum of one number of each row of a key, one after the other."""
    tape = Tape()
    total, one = tape.symbols(2)
    return Lanes(Recorded(tape.operations, [total, one], [total + one]), 1)
