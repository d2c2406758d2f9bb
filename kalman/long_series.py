"""Filter the rows of one key by compiled code, as far as they are in order, with the same bits as by rounds of rows.

A step is cut into three parts. What depends on known columns alone and cannot be compiled, such as an exponential of
the time step, is computed by NumPy for many rows before. The compiled part walks the rows. What does not enter the
state and cannot be compiled, such as the logarithm in the likelihood, is computed by NumPy after.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kalman import flags
from kalman.filters.clear_step import ClearStep, build_clear_step
from kalman.linalg.compiled import COMPILED, COMPILING, LONGEST, Walk, load_llvm
from kalman.linalg.program import Program, Recorded, Symbol, Tape
from kalman.types import Array, Filter, Rows, Step

SMALLEST, LARGEST = 64, 16_384
"""Fewest and most rows that are walked together; few after a row that was not in order."""

FEW_OTHERS = 8
"""A key's rows that are not in order may be so many, and one in so many of its rows, shared by the keys of a round."""
PATIENCE = 512
"""Rounds that may pass until all keys have a row and no diffuse part; a key that has one later takes rounds."""


def walk_places(
    count: int, allowed: Callable[[int], int], walk: Callable[[int, int], int], take: Callable[[int], None]
) -> int:
    """Apply the rows of a key at the places 0 to `count` - 1, and return how many were applied.

    Args:
        count: number of the key's rows.
        allowed: (place) -> how many rows before the place may be not in order; with more, the others are left.
        walk: (first place, end) -> how many rows compiled code has applied, up to one that is not in order.
        take: (place) -> None applies a row that is not in order.
    """
    at, size, others = 0, SMALLEST, 0
    while at < count and others <= allowed(at):
        done = walk(at, min(at + size, count))
        at += done
        if done == size or at == count:
            size = min(2 * size, LARGEST)
            continue
        take(at)
        at, size, others = at + 1, SMALLEST, others + 1
    return at


class Walked(NamedTuple):
    """The results of n rows that were in order: the states after them (size, n), and their `Step`."""

    after: Array
    step: Step


class StepParts(NamedTuple):
    """The three parts of a step, each with its inputs and outputs.

    The inputs of the walked part are the state, the row, and the outputs of the known part. Its outputs are the state
    after the row, entries that the late part needs (1.0 for true and 0.0 for false), and whether the row may be in
    order. The inputs of the late part are the row, the outputs of the known part, and these entries. Its outputs are
    those of the step behind the state, and the conditions that it decides.
    """

    known: Recorded
    walked: Recorded
    late: Recorded


class CutStep:
    """A step in three parts, of which the walked one is compiled."""

    def __init__(self, parts: StepParts, size: int, undecided: int) -> None:
        """Compile the parts; size: number of the state's entries; undecided: of conditions in the late part."""
        self._parts, self._size, self._undecided = parts, size, undecided
        self._known = Program(*_unpack(parts.known)) if parts.known.outputs else None
        self._walk = Walk(parts.walked, size)
        self._late = Program(*_unpack(parts.late)) if parts.late.outputs else None

    def apply(self, state: Array, row: list[Any]) -> tuple[Array, Array]:
        """Apply rows to a state (size,) until one is not in order.

        Returns the states after the n applied rows (size, n), and the other outputs (d, n).

        Args: row: for each input of a row an array (N,), of truth values for a mask.
        """
        known, walked, late = self._parts
        given, n = list(row), len(row[0])
        with np.errstate(all="ignore"):
            if self._known is not None:
                computed = np.empty((len(known.outputs), n))
                self._known(given, np.empty((self._known.buffers, n)), computed)
                given += [*computed]
            results = np.empty((len(walked.outputs) - 1, n))
            n = self._walk(state.copy(), [np.ascontiguousarray(a, float) for a in given], results)
            if self._late is None:
                return results[:, :n], np.empty((0, n))
            symbols = late.inputs[len(given) :]
            crossing = [
                a != 0.0 if b.boolean else a for a, b in zip(results[self._size :, :n], symbols, strict=True)
            ]
            final = np.empty((len(late.outputs), n))
            self._late([a[:n] for a in given] + crossing, np.empty((self._late.buffers, n)), final)
        clear = final[len(final) - self._undecided :].all(axis=0)
        n = n if clear.all() else int(clear.argmin())
        return results[: self._size, :n], final[: len(final) - self._undecided, :n]


class SeriesWalk:
    """The compiled step of a filter, for rows that are in order."""

    def __init__(self, model: Filter, step: ClearStep, cut: CutStep) -> None:
        self._model, self._diffuse, self._cut = model, step.diffuse, cut
        self._masked = len(step.recorded.inputs) > model.size + 1 + model.controls + model.measurements

    def is_clear(self, state: Array) -> bool:
        """Return whether states (size,) or (size, K) have no diffuse part."""
        return not state[self._diffuse].any()

    def apply(self, state: Array, rows: Rows) -> Walked:
        """Return the results of the rows of one key, up to the first that is not in order.

        Args:
            state: (size,) the key's state before the rows.
            rows: the key's n rows, one after the other; each time step is that from the row before.
        """
        plain = np.isfinite(rows.dt) & ~np.isinf(rows.y).any(axis=0) & np.isfinite(rows.u).all(axis=0)
        n = len(plain) if plain.all() else int(plain.argmin())
        row = [rows.dt[:n], *rows.u[:, :n], *rows.y[:, :n]]
        row += [~np.isnan(y[:n]) for y in rows.y] if self._masked else []
        after, found = self._cut.apply(state, row)
        extra, begin = {}, 2
        for name, width in self._model.outputs.items():
            extra[name] = found[begin : begin + width]
            begin += width
        step = Step(found[0], found[1], np.full(after.shape[1], flags.WELL, np.uint8), extra)
        return Walked(after, step)


def build_walk(model: Filter, missing: bool) -> SeriesWalk | None:
    """Return the compiled step of a filter; missing: whether components may be missing.

    None where nothing can be compiled, and for a kind of filter whose state depends on more than compiled operations.
    """
    with COMPILING:
        return _build_walk(model, missing)


@lru_cache(maxsize=4)
def _build_walk(model: Filter, missing: bool) -> SeriesWalk | None:
    step = build_clear_step(model, missing)
    cut = None if step is None else compile_step(step, model.size)
    return None if step is None or cut is None else SeriesWalk(model, step, cut)


def compile_step(step: ClearStep, size: int) -> CutStep | None:
    """Return the compiled step, None where `build_walk` is None; size: number of the state's entries."""
    found = split_step(step, size) if load_llvm() is not None else None
    if found is None:
        return None
    try:
        return CutStep(found[0], size, found[1])
    except (AttributeError, OSError, RuntimeError) as error:  # such as no memory that may hold code
        warnings.warn(f"long series take rounds, since nothing can be compiled here: {error}", stacklevel=2)
        return None


def split_step(step: ClearStep, size: int) -> tuple[StepParts, int] | None:
    """Return the parts of a step, and how many conditions the late part decides.

    None if the state after a row depends on operations that are not compiled, or is too long to compile.
    """
    operations, inputs, outputs = step.recorded
    tape = Tape()
    tape.operations = [*operations]
    conditions = _note_conditions(tape, step, size)
    whole = Recorded(tape.operations, inputs, [*outputs, *conditions])
    row, after = inputs[size:], outputs[:size]
    kinds = _find_kinds(whole, size)
    used = {id(a) for a in whole.outputs}
    computed: dict[int, Symbol] = {}
    crossing: dict[int, Symbol] = {}
    for name, args, result in whole.select():
        for a in args:
            if not isinstance(a, Symbol):
                continue
            if kinds[id(a)] == "computed" and (name in COMPILED or id(result) in used):
                computed[id(a)] = a
            if kinds[id(a)] == "walked" and kinds[id(result)] == "late":
                crossing[id(a)] = a
    for a in outputs[size:]:
        if isinstance(a, Symbol) and kinds[id(a)] == "walked":
            crossing[id(a)] = a
        elif isinstance(a, Symbol) and kinds[id(a)] == "computed":
            computed[id(a)] = a
    if any(kinds.get(id(a)) == "late" for a in after) or any(a.boolean for a in computed.values()):
        return None
    early = [a for a in conditions if kinds[id(a)] != "late"]
    decided = [a for a in conditions if kinds[id(a)] == "late"]
    clear = early[0]
    for a in early[1:]:
        clear = tape.note("bitwise_and", (clear, a), True)
    sent = [tape.note("where", (a, 1.0, 0.0), False) if a.boolean else a for a in crossing.values()]
    known = [*row, *computed.values()]
    walked = Recorded(tape.operations, [*inputs[:size], *known], [*after, *sent, clear])
    if len(walked.select()) > LONGEST:
        return None
    parts = StepParts(
        Recorded(tape.operations, row, list(computed.values())),
        walked,
        Recorded(tape.operations, [*known, *crossing.values()], [*outputs[size:], *decided]),
    )
    return parts, len(decided)


def _note_conditions(tape: Tape, step: ClearStep, size: int) -> list[Symbol]:
    """Return the conditions of a step as truth values, and that the sum of the state's entries is finite."""
    total: Any = 0.0
    for entry in step.recorded.outputs[:size]:
        total = entry if type(total) is float else tape.note("add", (total, entry), False)
    conditions = [*step.conditions, ("isfinite", total)]
    return [
        tape.note(name, (entry,) if name == "isfinite" else (entry, 0.0), True)
        for name, entry in conditions
        if isinstance(entry, Symbol)
    ]


def _find_kinds(whole: Recorded, size: int) -> dict[int, str]:
    """Return the kind of each symbol of a step, by its id.

    known: it follows from the row by compiled operations. computed: it follows from the row, by another operation.
    walked: it depends on the state, and all operations up to it are compiled. late: it depends on the state otherwise.
    """
    kinds = {id(a): "walked" if k < size else "known" for k, a in enumerate(whole.inputs)}
    for name, args, result in whole.select():
        given = {kinds[id(a)] for a in args if isinstance(a, Symbol)}
        if given <= {"known", "computed"}:
            kinds[id(result)] = "known" if name in COMPILED else "computed"
        else:
            kinds[id(result)] = "walked" if name in COMPILED and "late" not in given else "late"
    return kinds


def _unpack(part: Recorded) -> tuple[Recorded, Sequence[Symbol], Sequence[Any]]:
    return part, part.inputs, part.outputs
