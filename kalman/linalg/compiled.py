"""Compile recorded operations to machine code that walks the rows of one key with the state in registers.

A program of NumPy calls (`kalman.linalg.program`) does each operation for many keys. Over the rows of one key it would
cost a round of calls a row. Here the same operations, in the same order, are written as LLVM instructions without
permission to reorder or contract them, so the results have the same bits. Only operations whose result IEEE 754 fixes
are compiled: + - * / sqrt, comparisons, selections. llvmlite is optional; without it nothing is compiled.
"""

import ctypes
import importlib
import struct
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from kalman.linalg.program import Operation, Recorded, Symbol

LONGEST = 60_000
"""Maximum number of operations to compile, which takes some ten seconds."""

BINARY = {"add": "fadd", "subtract": "fsub", "multiply": "fmul", "divide": "fdiv", "true_divide": "fdiv"}
COMPARED = {
    "greater": "ogt",
    "greater_equal": "oge",
    "less": "olt",
    "less_equal": "ole",
    "equal": "oeq",
    "not_equal": "une",
}
LOGICAL = {
    "bitwise_and": "and",
    "logical_and": "and",
    "bitwise_or": "or",
    "logical_or": "or",
    "bitwise_xor": "xor",
    "logical_xor": "xor",
}
CALLED = {"sqrt": "sqrt", "absolute": "fabs", "fabs": "fabs"}
OTHERS = {
    "negative",
    "square",
    "isnan",
    "isfinite",
    "maximum",
    "minimum",
    "copysign",
    "invert",
    "logical_not",
    "where",
}
COMPILING = Lock()
"""Held while code is compiled, so that several threads compile the same once."""
ROUND = "round to float32"
"""The name of an operation that is no NumPy function: the nearest number that float32 can hold."""
COMPILED = {*BINARY, *COMPARED, *LOGICAL, *CALLED, *OTHERS, ROUND}
"""The operations that are compiled."""


@cache
def load_llvm() -> Any:
    """Return the module `llvmlite.binding`, ready to compile for this machine, or None if llvmlite does not work here.

    It is loaded when the first long series is filtered, since it is larger than all other modules together.
    """
    try:
        binding = importlib.import_module("llvmlite.binding")
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None
    return binding


def compile_module(text: str, own: bool = False) -> Any:
    """Return the engine that owns the machine code of LLVM instructions; own: for this machine alone."""
    llvm = load_llvm()
    module = llvm.parse_assembly(text)
    chosen = dict[str, str]()
    if own:
        chosen = {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, **chosen)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


class Width(NamedTuple):
    """How many keys an instruction is for, eight or one, and the types of their numbers and truth values."""

    keys: int
    number: str
    truth: str
    suffix: str

    def repeat(self, kind: str, constant: str) -> str:
        """Return the constant for all keys."""
        return constant if self.keys == 1 else "<" + ", ".join([f"{kind} {constant}"] * self.keys) + ">"


ONE = Width(1, "double", "i1", "f64")
EIGHT = Width(8, "<8 x double>", "<8 x i1>", "v8f64")


class Walk:
    """Compiled operations that are applied to the rows of one key, one after the other.

    The first inputs of the record are the state's entries, and its first outputs are the entries after a row. Its last
    output is a boolean: whether the row is in order. All other inputs and outputs have a number for each row.
    """

    def __init__(self, recorded: Recorded, size: int) -> None:
        """Compile the record; size: number of the state's entries. Needs `load_llvm`."""
        self._counts = len(recorded.inputs) - size, len(recorded.outputs) - 1
        self._engine = compile_module(_write_walk(recorded, size))  # the owner of the machine code
        pointer = ctypes.c_void_p
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, pointer, pointer, pointer)
        self._walk = kind(self._engine.get_function_address("walk"))

    def __call__(self, state: np.ndarray, inputs: Sequence[np.ndarray], outputs: np.ndarray) -> int:
        """Apply rows until one is not in order; return how many were applied.

        Args:
            state: (size,) the state before the rows; afterwards the state after the applied rows.
            inputs: one contiguous float64 array (N,) for each input after the state's entries.
            outputs: (d, N) contiguous rows for the outputs but the last, the state's entries after each row first.
        """
        if (len(inputs), len(outputs)) != self._counts:
            raise ValueError(
                f"{len(inputs)} inputs and {len(outputs)} outputs were given, not {self._counts}"
            )
        given = (ctypes.c_void_p * len(inputs))(*(a.ctypes.data for a in inputs))
        results = (ctypes.c_void_p * len(outputs))(*(a.ctypes.data for a in outputs))
        return int(self._walk(len(outputs[0]), given, results, state.ctypes.data))


def _write_walk(recorded: Recorded, size: int) -> str:
    """Return the function `i64 walk(i64 rows, ptr inputs, ptr outputs, ptr state)` as LLVM instructions."""
    inputs, results = recorded.inputs[size:], recorded.outputs[:-1]
    names = {id(symbol): f"%s{k}" for k, symbol in enumerate(recorded.inputs[:size])}
    entry = [line for k in range(len(inputs)) for line in load_pointer(f"%in{k}", "%inputs", k)]
    entry += [line for k in range(len(results)) for line in load_pointer(f"%out{k}", "%outputs", k)]
    for k in range(size):
        entry += [f"%state{k} = getelementptr double, ptr %state, i64 {k}"]
        entry += [f"%begin{k} = load double, ptr %state{k}"]
    body = []
    for k, symbol in enumerate(inputs):
        names[id(symbol)] = f"%i{k}"
        body += [f"%at{k} = getelementptr double, ptr %in{k}, i64 %row", f"%i{k} = load double, ptr %at{k}"]
        if symbol.boolean:  # a mask is 1.0 or 0.0
            names[id(symbol)] = f"%m{k}"
            body += [f"%m{k} = fcmp une double %i{k}, 0.0"]
    for at, operation in enumerate(recorded.select()):
        names[id(operation[2])] = f"%x{at}"
        body += write_operation(f"x{at}", operation, names)
    values = [write_operand(a, names, False) for a in results]
    states = [f"%s{k} = phi double [%begin{k}, %entry], [{values[k]}, %next]" for k in range(size)]
    store = []
    for k, value in enumerate(values):
        store += [
            f"%to{k} = getelementptr double, ptr %out{k}, i64 %row",
            f"store double {value}, ptr %to{k}",
        ]
    lines = [
        "define i64 @walk(i64 %rows, ptr noalias %inputs, ptr noalias %outputs, ptr noalias %state) {",
        "entry:",
        *entry,
        "%some = icmp sgt i64 %rows, 0",
        "br i1 %some, label %loop, label %none",
        "none:",
        "ret i64 0",
        "loop:",
        "%row = phi i64 [0, %entry], [%following, %next]",
        *states,
        *body,
        f"br i1 {write_operand(recorded.outputs[-1], names, True)}, label %next, label %stop",
        "next:",
        *store,
        "%following = add i64 %row, 1",
        "%more = icmp slt i64 %following, %rows",
        "br i1 %more, label %loop, label %done",
        "stop:",
        *(f"store double %s{k}, ptr %state{k}" for k in range(size)),
        "ret i64 %row",
        "done:",
        *(f"store double {values[k]}, ptr %state{k}" for k in range(size)),
        "ret i64 %rows",
        "}",
        *declare_functions(ONE),
    ]
    return "\n".join(lines)


def declare_functions(width: Width) -> list[str]:
    """Return the declarations of the functions that operations call."""
    _, number, _, suffix = width
    single = [f"declare {number} @llvm.{name}.{suffix}({number})" for name in ("sqrt", "fabs")]
    return [*single, f"declare {number} @llvm.copysign.{suffix}({number}, {number})"]


def load_pointer(name: str, array: str, k: int) -> list[str]:
    """Return the instructions that read the k-th pointer of an array of pointers."""
    return [f"{name}.place = getelementptr ptr, ptr {array}, i64 {k}", f"{name} = load ptr, ptr {name}.place"]


def write_operand(a: Any, names: dict[int, str], boolean: bool, width: Width = ONE) -> str:
    """Return an operand: a name or a constant."""
    if isinstance(a, Symbol):
        if a.boolean != boolean:
            raise TypeError("a truth value is used as a number")
        return names[id(a)]
    if boolean:
        return width.repeat("i1", "true" if a else "false")
    return width.repeat("double", f"0x{struct.unpack('<Q', struct.pack('<d', float(a)))[0]:016X}")


def write_operation(name: str, operation: Operation, names: dict[int, str], width: Width = ONE) -> list[str]:
    """Return the instructions of an operation, whose result is `%name`."""
    function, args, result = operation
    _, number, truth, suffix = width

    def read(a: Any, boolean: bool = False) -> str:
        return write_operand(a, names, boolean, width)

    if function in BINARY:
        return [f"%{name} = {BINARY[function]} {number} {read(args[0])}, {read(args[1])}"]
    if function in COMPARED:
        return [f"%{name} = fcmp {COMPARED[function]} {number} {read(args[0])}, {read(args[1])}"]
    if function in LOGICAL:
        return [f"%{name} = {LOGICAL[function]} {truth} {read(args[0], True)}, {read(args[1], True)}"]
    if function in CALLED:
        return [f"%{name} = call {number} @llvm.{CALLED[function]}.{suffix}({number} {read(args[0])})"]
    if function == "copysign":
        return [
            f"%{name} = call {number} @llvm.copysign.{suffix}({number} {read(args[0])}, {number} {read(args[1])})"
        ]
    if function in ("invert", "logical_not"):
        return [f"%{name} = xor {truth} {read(args[0], True)}, {width.repeat('i1', 'true')}"]
    if function == "where":
        kind = truth if result.boolean else number
        yes, no = (read(a, result.boolean) for a in args[1:])
        return [f"%{name} = select {truth} {read(args[0], True)}, {kind} {yes}, {kind} {no}"]
    if function in ("maximum", "minimum"):
        a, b = map(read, args)
        order = "ogt" if function == "maximum" else "olt"  # of two zeros the second, as in NumPy
        return [
            f"%{name}.a = fcmp {order} {number} {a}, {b}",
            f"%{name}.b = fcmp uno {number} {a}, {a}",
            f"%{name}.c = or {truth} %{name}.a, %{name}.b",  # NaN wins, as in NumPy
            f"%{name} = select {truth} %{name}.c, {number} {a}, {number} {b}",
        ]
    a = read(args[0])
    if function == "negative":
        return [f"%{name} = fneg {number} {a}"]
    if function == "square":
        return [f"%{name} = fmul {number} {a}, {a}"]
    if function == "isnan":
        return [f"%{name} = fcmp uno {number} {a}, {a}"]
    if function == "isfinite":
        size = f"%{name}.a = call {number} @llvm.fabs.{suffix}({number} {a})"
        return [
            size,
            f"%{name} = fcmp olt {number} %{name}.a, {width.repeat('double', '0x7FF0000000000000')}",
        ]
    assert function == ROUND
    short = number.replace("double", "float")
    return [f"%{name}.a = fptrunc {number} {a} to {short}", f"%{name} = fpext {short} %{name}.a to {number}"]
