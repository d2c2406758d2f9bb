"""Filter the rows of one key by compiled code, as far as they are in order, with the same bits as by rounds of rows.

A step is cut into three parts. What depends on known columns alone and cannot be compiled, such as an exponential of
the time step, is computed by NumPy for many rows before. The compiled part walks the rows. What does not enter the
state and cannot be compiled, such as the logarithm in the likelihood, is computed by NumPy after.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kalman import flags
from kalman.filters.clear_step import ClearStep, build_clear_step
from kalman.linalg.compiled import COMPILED, LONGEST, Walk, load_llvm
from kalman.linalg.program import Program, Recorded, Symbol, Tape
from kalman.types import Array, Filter, Rows, Step

SMALLEST, LARGEST = 64, 16_384
"""Fewest and most rows that are walked together; few after a row that was not in order."""


class Walked(NamedTuple):
    """The results of n rows that were in order: the states after them (size, n), and their `Step`."""

    after: Array
    step: Step


class Parts(NamedTuple):
    """The three parts of a step, each with its inputs and outputs.

    The inputs of the walked part are the state, the row, and the outputs of the known part. Its outputs are the state
    after the row, entries for the late part (with 1.0 for true and 0.0 for false), and whether the row may be in order.
    The inputs of the late part are the row, the outputs of the known part, and those of the walked part. Its outputs
    are log-likelihood, NIS, extra outputs, and the conditions that it decides.
    """

    known: Recorded
    walked: Recorded
    late: Recorded


class SeriesWalk:
    """The compiled step of a filter, for rows that are in order."""

    def __init__(self, model: Filter, step: ClearStep, parts: Parts) -> None:
        """Compile the parts of a step."""
        self._model, self._diffuse, self._parts = model, step.diffuse, parts
        self._known = Program(*_unpack(parts.known)) if parts.known.outputs else None
        self._walk = Walk(parts.walked, model.size)
        self._late = Program(*_unpack(parts.late))
        self._masked = len(parts.known.inputs) > 1 + model.controls + model.measurements

    def is_clear(self, state: Array) -> bool:
        """Return whether a state (size,) has no diffuse part."""
        return not state[self._diffuse].any()

    def apply(self, state: Array, rows: Rows) -> Walked:
        """Return the results of the rows of one key, up to the first that is not in order.

        Args:
            state: (size,) the key's state before the rows.
            rows: the key's n rows, one after the other; each time step is that from the row before.
        """
        plain = np.isfinite(rows.dt) & ~np.isinf(rows.y).any(axis=0) & np.isfinite(rows.u).all(axis=0)
        n = len(plain) if plain.all() else int(plain.argmin())
        given = [rows.dt[:n], *rows.u[:, :n], *rows.y[:, :n]]
        given += [~np.isnan(y[:n]) for y in rows.y] if self._masked else []
        with np.errstate(all="ignore"):
            return self._apply_plain(state.copy(), given, n)

    def _apply_plain(self, state: Array, given: list[Any], n: int) -> Walked:
        known, walked, late = self._parts
        if self._known is not None:
            computed = np.empty((len(known.outputs), n))
            self._known(given, np.empty((self._known.buffers, n)), computed)
            given += [*computed]
        results = np.empty((len(walked.outputs) - 1, n))
        n = self._walk(state, [np.ascontiguousarray(a, float) for a in given], results)
        size = self._model.size
        crossing = [
            a != 0.0 if symbol.boolean else a
            for a, symbol in zip(results[:, :n], late.inputs[len(given) :], strict=True)
        ]
        final = np.empty((len(late.outputs), n))
        self._late([a[:n] for a in given] + crossing, np.empty((self._late.buffers, n)), final)
        names = self._model.outputs
        at = 2 + sum(names.values())
        wrong = ~final[at:].all(axis=0)
        n = int(wrong.argmax()) if wrong.any() else n
        extra, begin = {}, 2
        for name, width in names.items():
            extra[name] = final[begin : begin + width, :n]
            begin += width
        step = Step(final[0, :n], final[1, :n], np.full(n, flags.WELL, np.uint8), extra)
        return Walked(results[:size, :n], step)


@lru_cache(maxsize=64)
def build_walk(model: Filter, missing: bool) -> SeriesWalk | None:
    """Return the compiled step of a filter; missing: whether components may be missing.

    None where llvmlite is not installed, and for a kind of filter whose state depends on more than compiled operations.
    """
    if load_llvm() is None:
        return None
    step = build_clear_step(model, missing)
    parts = None if step is None else split_step(step, model.size)
    return None if step is None or parts is None else SeriesWalk(model, step, parts)


def split_step(step: ClearStep, size: int) -> Parts | None:
    """Return the parts of a step, or None if the state after a row depends on operations that are not compiled."""
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
    states = [Tape().symbol() for _ in after]  # the late part reads crossing entries alone
    return Parts(
        Recorded(tape.operations, row, list(computed.values())),
        walked,
        Recorded(tape.operations, [*known, *states, *crossing.values()], [*outputs[size:], *decided]),
    )


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
