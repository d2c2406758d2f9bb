"""The layout of a filter's state: fields and their places, snapshots, and steps block by block.

The state of K keys is one array (size, K). The property `fields` lists the names and shapes of its parts in order. A
filter that inherits `StateLayout` defines `fields` and inherits the methods that depend only on `fields`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kalman import flags
from kalman.linalg.packing import pack, unpack
from kalman.types import Array, Filter, Rows, Step

Flags = npt.NDArray[np.bool_]

BLOCK = 4096
"""Number of keys in a block, chosen so that the temporary arrays (32 kB each) stay in the processor's cache.

Measured at n=2, m=1, one thread: see docs/decisions/0002.
"""


class StateLayout:
    """A state whose first two fields are `mean` (n) and `covariance` (packed lower triangle).

    A filter with another field in place of the covariance overrides `moments`, `snapshot` and `restore`.
    """

    @property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each part of a key's state, in order."""
        raise NotImplementedError

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        raise NotImplementedError

    @property
    def outputs(self) -> Mapping[str, int]:
        """Name and number of rows of each extra output; by default there are none."""
        return {}

    @cached_property
    def places(self) -> dict[str, slice]:
        """The slice of each field in a key's state."""
        return locate_fields(self.fields)

    @property
    def size(self) -> int:
        """Number of floats in a key's state."""
        return list(self.places.values())[-1].stop

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed lower covariance (n(n+1)/2, K)."""
        return state[self.places["mean"]], state[self.places["covariance"]]

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K) and the other fields, each (d, K)."""
        extras = {
            name: state[place] for name, place in self.places.items() if name not in ("mean", "covariance")
        }
        return state[self.places["mean"]], unpack(state[self.places["covariance"]]), extras

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        others = [np.asarray(extras[name], float) for name in list(self.fields)[2:]]
        return np.concatenate([np.asarray(mean, float), pack(np.asarray(covariance, float)), *others])

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Return the states of keys with this mean (n, K) and full row-major covariance (n*n, K).

        The other fields have the values of a key without rows, except that no state is diffuse.
        """
        state = self.initial(np.shape(mean)[1])
        state[self.places["mean"]] = mean
        state[self.places["covariance"]] = pack(np.asarray(covariance, float))
        if "diffuse" in self.places:
            state[self.places["diffuse"]] = 0.0
        return state

    own_start: Any = None
    """The `kalman.models.starts.Start` of a model whose keys start from columns of their first row, or None."""

    def begun(self, state: Array, first: Flags, u: Array) -> tuple[Array, Flags]:
        """Start the keys in the mask `first` from columns; return the state (size, K), and a mask of invalid starts.

        Mean and covariance come from the rows' controls u (c, K); other fields are unchanged.
        """
        which, wrong, state = np.flatnonzero(first), np.zeros(len(first), bool), state.copy()
        mean, covariance, wrong[which] = self.own_start.resolve_start(u[:, which])
        with np.errstate(all="ignore"):
            fresh = self.from_moments(mean, unpack(covariance))
        end = list(self.places.values())[1].stop
        state[:end, which] = fresh[:end]
        return state, wrong

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Write key-specific parameters (p, K) into the field `parameters` of the state."""
        state = state.copy()
        state[self.places["parameters"]] = parameters
        return state


@dataclass(frozen=True)
class Wrapping:
    """Base class of filters that wrap another filter; the wrapper's state begins with the inner filter's state."""

    inner: Filter

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states."""
        return self.inner.states

    @property
    def measurements(self) -> int:
        """Number of measured components."""
        return self.inner.measurements

    @property
    def controls(self) -> int:
        """Number of control inputs."""
        return self.inner.controls

    @property
    def own_start(self) -> Any:
        """The inner filter's start from columns, or None."""
        return getattr(self.inner, "own_start", None)

    def begun(self, state: Array, first: Flags, u: Array) -> tuple[Array, Flags]:
        """Start the inner filter from columns; arguments and results are those of `StateLayout.begun`."""
        state, size = state.copy(), self.inner.size
        state[:size], wrong = self.inner.begun(state[:size], first, u)  # type: ignore[attr-defined]
        return state, wrong


class Passing(Wrapping):
    """Base class of a filter that wraps another filter with the same state, and by default calls its methods."""

    @property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each part of a key's state, in order."""
        return self.inner.fields

    @property
    def size(self) -> int:
        """Number of floats in a key's state."""
        return self.inner.size

    @property
    def outputs(self) -> Mapping[str, int]:
        """The inner filter's extra outputs."""
        return self.inner.outputs

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        return self.inner.initial(keys)

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`."""
        return self.inner.step(state, rows)

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed lower covariance (n(n+1)/2, K)."""
        return self.inner.moments(state)

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K) and the other fields, each (d, K)."""
        return self.inner.snapshot(state)

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        return self.inner.restore(mean, covariance, extras)

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Return the states of keys with this mean (n, K) and full row-major covariance (n*n, K)."""
        return self.inner.from_moments(mean, covariance)

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Return the state with learned key-specific parameters (d, K)."""
        return self.inner.with_parameters(state, parameters)


def unwrap_filter(model: Filter) -> Filter:
    """Return the innermost filter, without wrappers; the state of this filter is the first part of the whole state."""
    while isinstance(model, Wrapping):
        model = model.inner
    return model


def locate_fields(fields: Mapping[str, tuple[int, ...]]) -> dict[str, slice]:
    """Return the slice of each field in a key's state."""
    found: dict[str, slice] = {}
    at = 0
    for name, shape in fields.items():
        found[name] = slice(at, at + int(np.prod(shape)))
        at = found[name].stop
    return found


class StepTarget(NamedTuple):
    """Output arrays for one block of k keys, which are views of the arrays of all keys.

    state: (size, k); log_likelihood, nis: (k,); flag: (k,) uint8, initially zero; extra: from output name to (d, k)
    """

    state: Array
    log_likelihood: Array
    nis: Array
    flag: npt.NDArray[np.uint8]
    extra: dict[str, Array]

    def leave(self, before: Array, codes: npt.NDArray[np.uint8]) -> None:
        """Flag keys with `codes` (k,); keys whose code is not WELL return to their state `before` (size, k)."""
        self.flag[:] = codes
        bad = codes != flags.WELL
        self.state[:, bad] = before[:, bad]
        for step in (self.log_likelihood, self.nis, *self.extra.values()):
            step[..., bad] = np.nan


def step_in_blocks(
    state: Array,
    rows: Rows,
    outputs: Mapping[str, int],
    work: Callable[[Array, Rows, StepTarget], None],
    block: int = BLOCK,
) -> tuple[Array, Step]:
    """Return the state (size, K) after the rows and their `Step`, computed `block` keys at a time.

    `work(state, rows, target)` computes one block. NumPy's warnings are off, because failures result in flags.
    """
    keys = state.shape[1]
    after = np.empty(state.shape)
    extra = {name: np.empty((width, keys)) for name, width in outputs.items()}
    step = Step(np.empty(keys), np.empty(keys), np.zeros(keys, np.uint8), extra)
    with np.errstate(all="ignore"):
        for start in range(0, keys, block):
            here = slice(start, min(start + block, keys))
            part = Rows(rows.dt[here], rows.first[here], rows.y[:, here], rows.u[:, here])
            views = {name: values[:, here] for name, values in extra.items()}
            target = StepTarget(
                after[:, here], step.log_likelihood[here], step.nis[here], step.flag[here], views
            )
            work(state[:, here], part, target)
    return after, step
