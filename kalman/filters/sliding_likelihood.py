"""The log-likelihood of a key's newest measured rows, stored beside the filter's state.

It shows that a model no longer fits, which the log-likelihood of all rows hides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kalman import flags
from kalman.filters.lms import LeastMeanSquares
from kalman.filters.state_layout import StateLayout, StepTarget, Wrapping, step_in_blocks
from kalman.models import checks
from kalman.models.definition import Definition
from kalman.types import Array, Filter, ModelError, Rows, Step

OUTPUT = "sliding_log_likelihood"
LONGEST = 1000
"""Maximum number of rows in a key's window."""
ROWS, KEPT = WINDOW_FIELDS = "recent_log_likelihoods", "recent_rows"
"""Fields of the state: the log-likelihoods in the window (oldest first), and the number of rows in the window."""


@dataclass(frozen=True)
class SlidingLikelihood(Wrapping, StateLayout):
    """A filter that also returns the sum of the log-likelihoods of the newest `window` measured rows.

    Rows without a measurement do not count. The sum is NaN until a key has `window` measured rows; terms are added from
    the oldest to the newest. The state is the inner filter's state, followed by the log-likelihoods in the window
    (oldest first) and their number.
    """

    window: int

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The inner filter's fields, followed by the fields of the window."""
        return {**self.inner.fields, ROWS: (self.window,), KEPT: (1,)}

    @property
    def outputs(self) -> Mapping[str, int]:
        """The inner filter's outputs, and the sum of the log-likelihoods."""
        return {**self.inner.outputs, OUTPUT: 1}

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        return self._append_zeros(self.inner.initial(keys))

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance."""
        return self.inner.moments(state[: self.inner.size])

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K) and the other fields, each (d, K)."""
        mean, covariance, extras = self.inner.snapshot(state[: self.inner.size])
        return mean, covariance, {**extras, **{name: state[self.places[name]] for name in (ROWS, KEPT)}}

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        inner = self.inner.restore(mean, covariance, extras)
        return np.concatenate([inner, *(np.asarray(extras[name], float) for name in (ROWS, KEPT))])

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Return the states of keys with this mean (n, K) and full row-major covariance (n*n, K)."""
        return self._append_zeros(self.inner.from_moments(mean, covariance))

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Return the state with learned key-specific parameters (d, K)."""
        size = self.inner.size
        return np.concatenate([self.inner.with_parameters(state[:size], parameters), state[size:]])

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`."""
        return step_in_blocks(state, rows, self.outputs, self._step_block)

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        size = self.inner.size
        target.state[:size], step = self.inner.step(state[:size], rows)
        target.log_likelihood[:], target.nis[:], target.flag[:] = step[:3]
        for name, values in step.extra.items():
            target.extra[name][:] = values
        recent, kept = state[self.places[ROWS]], state[self.places[KEPT]]
        well = step.flag == flags.WELL
        counted = well & ~np.isnan(rows.y).all(axis=0)
        pushed = np.concatenate([recent[1:], step.log_likelihood[None]])
        recent = target.state[self.places[ROWS]] = np.where(counted, pushed, recent)
        kept = target.state[self.places[KEPT]] = np.minimum(kept + counted, self.window)
        total = np.zeros(state.shape[1])
        for row in recent:
            total += row
        target.extra[OUTPUT][0] = np.where(well & (kept[0] == self.window), total, np.nan)

    def _append_zeros(self, inner: Array) -> Array:
        return np.concatenate([inner, np.zeros((self.window + 1, inner.shape[1]))])


def add_sliding_likelihood(definition: Definition, model: Filter) -> Filter:
    """Return the filter, wrapped if its definition has `sliding_log_likelihood`. Raises ModelError."""
    window: Any = definition.get(OUTPUT)
    if window is None:
        return model
    field = f"outputs.{OUTPUT}"
    window = checks.parse_integer(field, window, 1, LONGEST)
    if isinstance(model, LeastMeanSquares) and model.R is None:
        raise ModelError(
            field, "the filter's rows have no log-likelihood", "give observation.R, or remove it"
        )
    return SlidingLikelihood(model, window)


def drop_sliding(model: Filter) -> Filter:
    """Return the filter without the wrapper for the sum; the filter's state is the first part of the whole state."""
    return model.inner if isinstance(model, SlidingLikelihood) else model
