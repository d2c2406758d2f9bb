"""Compile recorded operations to machine code that walks the rows of many keys, eight keys at a time.

Rows are in the order of rounds (`kalman.run.Rounds`), so the rows of eight neighbouring keys stand side by side in each
round and are read as one vector. The state of the eight keys stays in registers from row to row. Where a round has rows
of only some of the eight, the same operations continue key by key. The results have the bits of NumPy's.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from kalman.linalg.compiled import (
    EIGHT,
    ONE,
    Width,
    compile_module,
    declare_functions,
    load_pointer,
    write_operand,
    write_operation,
)
from kalman.linalg.program import Recorded


class Lanes:
    """Compiled operations that are applied to the rows of many keys, round by round.

    The first inputs of the record are a key's state, and its first outputs are the state after a row. All other inputs
    and outputs have a number for each row.
    """

    def __init__(self, recorded: Recorded, size: int) -> None:
        """Compile the record; size: number of the state's entries. Needs `load_llvm`."""
        self._size, self._counts = size, (len(recorded.inputs) - size, len(recorded.outputs) - size)
        widths = (EIGHT, ONE)
        text = [_write_function(recorded, size, width) for width in widths]
        text += [line for width in widths for line in declare_functions(width)]
        self._engine = compile_module("\n".join(text), own=True)  # the owner of the machine code
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        kind = ctypes.CFUNCTYPE(None, number, *[pointer] * 6, number)
        self._eight, self._one = (
            kind(self._engine.get_function_address(f"walk{width.keys}")) for width in widths
        )

    def __call__(
        self,
        state: np.ndarray,
        starts: np.ndarray,
        rounds: tuple[int, np.ndarray],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """Apply rows of k keys, in place.

        Args:
            state: (size, k) contiguous states before the rows; afterwards the states after them.
            starts: (rounds,) int64 position of the first key's row in each round; the next keys' rows follow.
            rounds: the first round to apply, and (k,) int64 the end of each key's rounds; the ends do not increase.
            inputs: one contiguous float64 array (N,) for each input after the state's entries.
            outputs: one contiguous float64 array (N,) for each output after the state's entries.
        """
        if (len(state), len(inputs), len(outputs)) != (self._size, *self._counts):
            raise ValueError(f"{len(state)} entries, {len(inputs)} inputs, {len(outputs)} outputs were given")
        keys, eight, end = state.shape[1], EIGHT.keys, rounds[1]
        whole = keys - keys % eight
        first = np.full(keys, rounds[0], np.int64)
        shared = first.copy()  # the end of the rounds in which all eight keys have a row
        shared[:whole] = np.maximum(np.repeat(end[eight - 1 : whole : eight], eight), rounds[0])
        given = (ctypes.c_void_p * len(inputs))(*(a.ctypes.data for a in inputs))
        results = (ctypes.c_void_p * len(outputs))(*(a.ctypes.data for a in outputs))
        for walk, count, begin, until in (
            (self._eight, whole, first, shared),
            (self._one, keys, shared, end),
        ):
            places = (a.ctypes.data for a in (begin, until, starts))
            walk(count, *places, given, results, state.ctypes.data, keys)


def _write_function(recorded: Recorded, size: int, width: Width) -> str:
    """Return the function that applies the rows of `keys` keys, as LLVM instructions.

    `void walk(i64 keys, ptr first, ptr end, ptr starts, ptr inputs, ptr outputs, ptr state, i64 stride)`
    """
    number = width.number
    inputs, results = recorded.inputs[size:], recorded.outputs[size:]
    entry = [line for k in range(len(inputs)) for line in load_pointer(f"%in{k}", "%inputs", k)]
    entry += [line for k in range(len(results)) for line in load_pointer(f"%out{k}", "%outputs", k)]
    begin: list[str] = []
    for k in range(size):
        begin += [f"%line{k} = mul i64 %stride, {k}", f"%place{k} = add i64 %line{k}, %key"]
        begin += [f"%state{k} = getelementptr double, ptr %state, i64 %place{k}"]
        begin += [f"%begin{k} = load {number}, ptr %state{k}, align 8"]
    body, values = _write_row(recorded, size, width)
    pointers = ", ".join(
        f"ptr noalias %{a}" for a in ("first", "end", "starts", "inputs", "outputs", "state")
    )
    lines = [
        f"define void @walk{width.keys}(i64 %keys, {pointers}, i64 %stride) {{",
        "entry:",
        *entry,
        "%some = icmp sgt i64 %keys, 0",
        "br i1 %some, label %next, label %done",
        "next:",
        "%key = phi i64 [0, %entry], [%following, %close]",
        *_load_integer("%from", "%first", "%key"),
        *_load_integer("%until", "%end", "%key"),
        "%rows = icmp slt i64 %from, %until",
        "br i1 %rows, label %begin, label %close",
        "begin:",
        *begin,
        "br label %loop",
        "loop:",
        "%round = phi i64 [%from, %begin], [%later, %loop]",
        *(f"%s{k} = phi {number} [%begin{k}, %begin], [{values[k]}, %loop]" for k in range(size)),
        *_load_integer("%start", "%starts", "%round"),
        "%row = add i64 %start, %key",
        *body,
        "%later = add i64 %round, 1",
        "%again = icmp slt i64 %later, %until",
        "br i1 %again, label %loop, label %store",
        "store:",
        *(f"store {number} {values[k]}, ptr %state{k}, align 8" for k in range(size)),
        "br label %close",
        "close:",
        f"%following = add i64 %key, {width.keys}",
        "%more = icmp slt i64 %following, %keys",
        "br i1 %more, label %next, label %done",
        "done:",
        "ret void",
        "}",
    ]
    return "\n".join(lines)


def _write_row(recorded: Recorded, size: int, width: Width) -> tuple[list[str], list[str]]:
    """Return the instructions of a row, and the names of all outputs."""
    number = width.number
    names = {id(symbol): f"%s{k}" for k, symbol in enumerate(recorded.inputs[:size])}
    body: list[str] = []
    for k, symbol in enumerate(recorded.inputs[size:]):
        names[id(symbol)] = f"%i{k}"
        body += [f"%at{k} = getelementptr double, ptr %in{k}, i64 %row"]
        body += [f"%i{k} = load {number}, ptr %at{k}, align 8"]
        if symbol.boolean:  # a mask is 1.0 or 0.0
            names[id(symbol)] = f"%m{k}"
            body += [f"%m{k} = fcmp une {number} %i{k}, {width.repeat('double', '0.0')}"]
    for at, operation in enumerate(recorded.select()):
        names[id(operation[2])] = f"%x{at}"
        body += write_operation(f"x{at}", operation, names, width)
    values = [write_operand(a, names, False, width) for a in recorded.outputs]
    for k, value in enumerate(values[size:]):
        body += [f"%to{k} = getelementptr double, ptr %out{k}, i64 %row"]
        body += [f"store {number} {value}, ptr %to{k}, align 8"]
    return body, values


def _load_integer(name: str, array: str, index: str) -> list[str]:
    return [
        f"{name}.place = getelementptr i64, ptr {array}, i64 {index}",
        f"{name} = load i64, ptr {name}.place",
    ]
