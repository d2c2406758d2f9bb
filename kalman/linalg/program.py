"""Compile entry arithmetic to a straight-line program of NumPy calls over many keys.

The recursions are written once, on entries. If they are called with a `Symbol` in place of each array, they only record
their operations on a `Tape`. The program runs the recorded operations in the same order, with temporary results in a
few reused buffers and without the Python code in between. The program gives the same bits, four times as fast over 100
keys and twice as fast over 100,000 keys (measured in docs/decisions/0002).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from kalman.types import ModelError

LONGEST = 120_000
"""Maximum number of operations of a program. Compiling 200,000 (40 dense states) took 1.4 GB and two minutes."""

Operation = tuple[str, tuple[Any, ...], "Symbol"]


class Tape:
    """The recorded operations; each has its name in NumPy, its operands, and its result."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def symbol(self, boolean: bool = False) -> Any:
        """Return a new input symbol, typed Any because the recursions expect an array."""
        return Symbol(self, boolean)

    def symbols(self, count: int, boolean: bool = False) -> list[Any]:
        """Return several new input symbols."""
        return [self.symbol(boolean) for _ in range(count)]

    def note(self, name: str, operands: tuple[Any, ...], boolean: bool) -> "Symbol":
        """Add an operation and return its result. Raises ModelError if the tape has too many operations."""
        if len(self.operations) >= LONGEST:
            raise ModelError(
                "states",
                f"are too many for one step, which would take more than {LONGEST:,} operations on numbers",
                "use fewer states (about 34, if each depends on all others), a sparser F, or several models",
            )
        result = Symbol(self, boolean)
        self.operations.append((name, operands, result))
        return result

    def call(self, function: Callable[..., Any], count: int, operands: Sequence[Any]) -> list[Any]:
        """Add a call of an elementwise function from arrays (K,) to an array (count, K); return the result's rows."""
        whole = self.note("call", (function, *operands), False)
        return [self.note("item", (whole, k), False) for k in range(count)]


def call_recorded(function: Callable[..., Any], count: int, operands: Sequence[Any]) -> list[Any]:
    """Return the rows of function(*operands), which has shape (count, K); record the call if an operand is a symbol.

    This is for functions that are not straight-line, such as loops whose length depends on the numbers.
    """
    tape = next((a.tape for a in operands if isinstance(a, Symbol)), None)
    return list(function(*operands)) if tape is None else tape.call(function, count, operands)


class Symbol(NDArrayOperatorsMixin):
    """A placeholder for an array (K,) that is an input or a result of the recorded operations."""

    def __init__(self, tape: Tape, boolean: bool = False) -> None:
        self.tape = tape
        self.boolean = boolean

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> "Symbol":
        if method != "__call__" or options or ufunc.nout != 1:
            raise TypeError(f"{ufunc.__name__}.{method} is not elementwise")
        truth = all(isinstance(a, bool | np.bool_) or (isinstance(a, Symbol) and a.boolean) for a in operands)
        boolean = truth or ufunc.types[-1].endswith("?") or ufunc.__name__ in COMPARISONS
        return self.tape.note(ufunc.__name__, operands, boolean)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any
    ) -> "Symbol":
        if function is not np.where or kwargs or len(args) != 3:
            raise TypeError(f"{function.__name__} is not elementwise")
        truth = all(isinstance(a, Symbol) and a.boolean for a in args[1:])
        return self.tape.note("where", args, truth)


class Recorded(NamedTuple):
    """Recorded operations in their order, with the symbols of the inputs, and the outputs (symbols or numbers)."""

    operations: Sequence[Operation]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def select(self) -> list[Operation]:
        """Return the operations that the outputs depend on, in their order; inputs depend on nothing."""
        given = {id(a) for a in self.inputs}
        needed = {id(a) for a in self.outputs if isinstance(a, Symbol)} - given
        found: list[Operation] = []
        for operation in reversed(self.operations):
            if id(operation[2]) in needed:
                found.append(operation)
                needed.update(id(a) for a in operation[1] if isinstance(a, Symbol) and id(a) not in given)
        return found[::-1]

    def follow(self, earlier: "Recorded", given: Sequence[Any]) -> "Recorded":
        """Return both records as one; given: values of `earlier`, or numbers, for the first inputs of this record.

        The inputs are those of `earlier`, then the others of this record.
        """
        known = {id(symbol): value for symbol, value in zip(self.inputs, given, strict=False)}

        def replace(a: Any) -> Any:
            return known.get(id(a), a)

        own = [(name, tuple(map(replace, args)), result) for name, args, result in self.operations]
        inputs = [*earlier.inputs, *self.inputs[len(given) :]]
        return Recorded([*earlier.operations, *own], inputs, [replace(a) for a in self.outputs])


COMPARISONS = {"greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "isnan", "isfinite"}


class Program:
    """A straight-line program of NumPy calls that computes output rows (K,) from input rows (K,)."""

    def __init__(self, tape: Tape | Recorded, inputs: Sequence[Symbol], outputs: Sequence[Any]) -> None:
        """Compile the program; outputs: symbols (also inputs) or numbers; an input may be a result of the tape."""
        self.recorded = Recorded(tape.operations, inputs, outputs)
        operations = self.recorded.select()
        names: dict[int, str] = {id(symbol): f"i{k}" for k, symbol in enumerate(inputs)}
        arguments = list(names.values())
        last = {
            id(a): at for at, (_, args, _) in enumerate(operations) for a in args if isinstance(a, Symbol)
        }
        rows: dict[int, str] = {}
        for k, output in enumerate(outputs):
            if isinstance(output, Symbol) and id(output) not in names:
                rows.setdefault(id(output), f"o{k}")
        free: list[str] = []
        self.buffers = 0
        lines: list[str] = []
        functions: dict[str, Any] = {}
        for at, (function, args, result) in enumerate(operations):
            calls = function == "call"
            if calls:
                functions[f"f{at}"] = args[0]
                function = f"f{at}"
            given = (names[id(a)] if isinstance(a, Symbol) else _format_constant(a) for a in args[calls:])
            operands = ", ".join(given)
            if function == "item":
                names[id(result)] = f"x{at}"
                lines.append(f"x{at} = {names[id(args[0])]}[{args[1]}]")
            elif function == "where" or result.boolean or calls:
                names[id(result)] = f"x{at}"
                lines.append(f"x{at} = {function}({operands})")
            else:
                target = rows.get(id(result))
                if target is None:
                    if not free:
                        free.append(f"b{self.buffers}")
                        self.buffers += 1
                    target = free.pop()
                names[id(result)] = target
                lines.append(f"{function}({operands}, out={target})")
            for a in {id(a) for a in args if isinstance(a, Symbol)}:
                if last[a] == at and names[a][0] == "b":
                    free.append(names[a])
                elif last[a] == at and names[a][0] == "x" and a not in rows:
                    lines.append(f"del {names[a]}")
        for k, output in enumerate(outputs):
            name = names[id(output)] if isinstance(output, Symbol) else repr(float(output))
            if name != f"o{k}":
                lines.append(f"o{k}[:] = {name}")
        arguments += [*(f"b{i}" for i in range(self.buffers)), *(f"o{k}" for k in range(len(outputs)))]
        self.source = f"def line({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in lines)
        named = {name for name, _, _ in operations} - {"call", "item"}
        scope: dict[str, Any] = {name: getattr(np, name) for name in named} | functions
        scope.update(inf=np.inf, nan=np.nan)
        # exec is safe: the source has only operation names, generated variable names and numbers
        exec(compile(self.source, "<straight line>", "exec"), scope)
        self._line = scope["line"]

    def __call__(
        self, inputs: Sequence[Any], buffers: Iterable[np.ndarray], outputs: Iterable[np.ndarray]
    ) -> None:
        """Run the program; inputs: in the order of compilation; buffers: (self.buffers, K); outputs: rows (K,)."""
        self._line(*inputs, *buffers, *outputs)


def _format_constant(a: Any) -> str:
    """Return a constant operand as Python source text."""
    return repr(bool(a) if isinstance(a, bool | np.bool_) else float(a))
