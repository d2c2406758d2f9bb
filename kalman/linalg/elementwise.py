"""Functions of the numbers of single keys, recorded once, for very many keys at once."""

from collections.abc import Sequence

import numpy as np

from kalman.linalg.compiled import COMPILED, COMPILING, LONGEST, load_llvm
from kalman.linalg.lanes import Lanes
from kalman.linalg.program import Program, Recorded
from kalman.types import Array

MANY_KEYS = 4096
"""Keys from which a function is compiled, which takes a tenth of a second."""
BLOCK = 2048
"""Keys of one program of NumPy calls, so that its buffers stay in the processor's cache."""


class Elementwise:
    """A recorded function from input rows (J,) to output rows (J,), compiled once it is called for many keys.

    Compiled code and NumPy calls give the same bits.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._program = Program(recorded, recorded.inputs, recorded.outputs)
        operations = recorded.select()
        self._fits = len(operations) <= LONGEST and all(name in COMPILED for name, _, _ in operations)
        self._lanes: Lanes | None = None

    def __call__(self, inputs: Sequence[np.ndarray]) -> Array:
        """Return the outputs (d, J) of inputs (J,), which are numbers or truth values as recorded."""
        keys = len(inputs[0])
        found = np.empty((len(self._recorded.outputs), keys))
        lanes = self._find_lanes(keys)
        with np.errstate(all="ignore"):
            if lanes is not None:
                numbers = [np.ascontiguousarray(a, float) for a in inputs]
                one = np.zeros(1, np.int64), (0, np.ones(keys, np.int64))
                lanes(np.empty((0, keys)), *one, numbers, [*found])
                return found
            work = np.empty((self._program.buffers, BLOCK))
            for begin in range(0, keys, BLOCK):
                some = slice(begin, min(begin + BLOCK, keys))
                here = some.stop - begin
                self._program([a[some] for a in inputs], work[:, :here], found[:, some])
        return found

    def _find_lanes(self, keys: int) -> Lanes | None:
        """Return the compiled function, or None if it is not compiled."""
        if self._lanes is None and self._fits and keys >= MANY_KEYS:
            with COMPILING:
                self._fits = load_llvm() is not None
                if self._fits and self._lanes is None:
                    try:
                        self._lanes = Lanes(self._recorded, 0)
                    except (AttributeError, OSError, RuntimeError):  # such as no memory that may hold code
                        self._fits = False
        return self._lanes
