"""A filter whose state is stored in 32 bits a number, which takes half the memory and holds about seven digits.

Steps are computed in 64 bits, and the state is rounded after each row. The next row starts from exactly the stored
numbers, so results do not depend on the split of rows into calls or on storage between calls.

The relative rounding error is 6e-8, and a stable filter forgets this error like any other old error. The error is
harmless if means are below about 1e5 standard deviations and no correlation is within 1e-6 of 1. In other cases, choose
the square-root form, whose covariance stays positive semidefinite, or 64 bits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kalman import flags
from kalman.filters.clear_step import ClearStep, build_clear_step
from kalman.filters.state_layout import Passing
from kalman.linalg.compiled import ROUND
from kalman.linalg.program import Recorded, Symbol, Tape
from kalman.models import checks
from kalman.models.definition import Definition
from kalman.types import Array, Filter, ModelError, Rows, Step

DTYPES = {"float64": "<f8", "float32": "<f4"}


@dataclass(frozen=True)
class RoundedFilter(Passing):
    """A filter whose state (size, K) is an array of float64 with values that float32 can hold."""

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        return round_states(self.inner.initial(keys))

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the rounded state (size, K) after one row for each key, and the inner filter's `Step`.

        A state outside the range of float32 is an overflow: the key is flagged and its state stays unchanged.
        """
        after, step = self.inner.step(state, rows)
        kept = round_states(after)
        lost = ~np.isfinite(kept).all(axis=0) & np.isfinite(after).all(axis=0)
        if not lost.any():
            return kept, step
        kept[:, lost] = state[:, lost]
        return kept, Step(
            np.where(lost, np.nan, step.log_likelihood),
            np.where(lost, np.nan, step.nis),
            np.where(lost, flags.OVERFLOW, step.flag).astype(np.uint8),
            {name: np.where(lost, np.nan, values) for name, values in step.extra.items()},
        )

    def build_clear_step(self, missing: bool) -> ClearStep | None:
        """Return the inner filter's step with the state rounded; a row beyond the range is not in order."""
        step = build_clear_step(self.inner, missing)
        if step is None:
            return None
        tape, (operations, inputs, outputs) = Tape(), step.recorded
        rounded = [
            tape.note(ROUND, (a,), False) if isinstance(a, Symbol) else a for a in outputs[: self.size]
        ]
        recorded = Recorded([*operations, *tape.operations], inputs, [*rounded, *outputs[self.size :]])
        limits = [("isfinite", entry) for entry in rounded]
        return step._replace(recorded=recorded, conditions=[*step.conditions, *limits])

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Return the states of keys with this mean (n, K) and full row-major covariance (n*n, K)."""
        return round_states(self.inner.from_moments(mean, covariance))

    def with_parameters(self, state: Array, parameters: Array) -> Array:
        """Return the state with learned key-specific parameters (d, K)."""
        return round_states(self.inner.with_parameters(state, parameters))


def round_states(state: Array) -> Array:
    """Return the numbers rounded to float32, infinite outside the range of float32."""
    with np.errstate(over="ignore"):
        return state.astype(np.float32).astype(np.float64)


def unwrap_rounding(model: Filter) -> Filter:
    """Return the filter without the wrappers for rounding and state output, which do not change the state's layout."""
    while isinstance(model, Passing):
        model = model.inner
    return model


def find_storage_dtype(model: Filter) -> str:
    """Return the NumPy dtype, such as `<f8`, that holds all bits of a filter's state."""
    while isinstance(model, Passing) and not isinstance(model, RoundedFilter):
        model = model.inner
    return DTYPES["float32" if isinstance(model, RoundedFilter) else "float64"]


def add_rounding(definition: Definition, model: Filter) -> Filter:
    """Return the filter with the state precision that the section `storage` of a definition sets. Raises ModelError."""
    section: Any = definition.get("storage")
    if section is None:
        return model
    checks.check_keys("storage", section, ("dtype",))
    dtype = section.get("dtype", "float64")
    if dtype not in DTYPES:
        raise ModelError("storage.dtype", f"{dtype!r} is not known", f"choose {' or '.join(DTYPES)}")
    return RoundedFilter(model) if dtype == "float32" else model
