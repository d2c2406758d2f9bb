"""The types that all filters share: rows in, steps out, and the protocol of a filter."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Entry = float | Array
"""One entry of a matrix: a number shared by all keys, or an array (K,) with a number for each key."""


class ModelError(ValueError):
    """The error of a model definition that cannot be built: the field, the problem and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self):  # an exception with several arguments does not unpickle by itself
        return type(self), (self.field, self.problem, self.remedy)


class Rows(NamedTuple):
    """One row for each of K keys.

    dt    (K,) time since the key's previous row in the model's time unit, 0 on a first row
    first (K,) bool, the key's first row: the initial distribution applies and there is no prediction
    y     (m, K) measurement, NaN where a component is missing
    u     (c, K) control input that acted between the previous row and this one
    """

    dt: Array
    first: npt.NDArray[np.bool_]
    y: Array
    u: Array

    def mask_first_rows(self) -> "npt.NDArray[np.bool_] | bool":
        """Return True if all keys are at their first row, False if no key is, and otherwise the mask `first`."""
        if not self.first.any():
            return False
        return True if self.first.all() else self.first

    def repeated(self, times: int) -> "Rows":
        """Return the rows of `times` copies of the keys, one copy after the other."""
        dt, first = np.tile(self.dt, times), np.tile(self.first, times)
        return Rows(dt, first, np.tile(self.y, times), np.tile(self.u, times))


class Step(NamedTuple):
    """The result of one row for each of K keys.

    log_likelihood (K,) of the row, with its constant; 0 without a measurement, NaN when flagged
    nis            (K,) normalised innovation squared; NaN without a prediction or a measurement, and when flagged for
                   another reason than the gate
    flag           (K,) uint8, a code of `kalman.flags`; a flagged key's state is as it was before the row
    extra          name -> (d, K), the outputs beside mean and covariance
    """

    log_likelihood: Array
    nis: Array
    flag: npt.NDArray[np.uint8]
    extra: Mapping[str, Array]


class Filter(Protocol):
    """A filter over K independent keys, immutable and picklable.

    The state of K keys is one array (size, K), laid out by `fields` in order. All operations are elementwise
    along the key axis, so a key's numbers do not depend on the other keys in the call.
    """

    @property
    def states(self) -> tuple[str, ...]: ...
    @property
    def measurements(self) -> int: ...
    @property
    def controls(self) -> int: ...
    @property
    def fields(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def size(self) -> int: ...
    @property
    def outputs(self) -> Mapping[str, int]: ...

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        ...

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`."""
        ...

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed lower covariance (n(n+1)/2, K)."""
        ...

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K) and the other fields, each (d, K)."""
        ...

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        ...

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Return the states of keys with this mean (n, K) and full row-major covariance (n*n, K).

        The other fields are those of a key without rows.

        Raises:
            ModelError: mean and covariance do not determine the filter's state.
        """
        ...

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Write each key's learned parameters (d, K) into the field `parameters` of the state."""
        ...
