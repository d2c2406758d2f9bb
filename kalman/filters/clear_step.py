"""A filter's step for a row that is in order: not the key's first, not flagged, and without a diffuse state.

Such a step is a record of elementwise operations, which can be compiled to walk a key's rows (`kalman.long_series`).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kalman.linalg.entries import Entry
from kalman.linalg.program import Recorded
from kalman.types import Filter


class ClearStep(NamedTuple):
    """The step of a row that is in order.

    recorded: inputs are the state, dt, u, y and, if components are missing, a mask of those present. Outputs are the
        state after the row, log-likelihood, NIS, and the extra outputs in their order.
    conditions: entries, and what holds for them if the row is in order: isfinite, or a comparison with zero
    diffuse: place of the diffuse part in the state, which is zero before a row in order
    """

    recorded: Recorded
    conditions: Sequence[tuple[str, Entry]]
    diffuse: slice = slice(0, 0)


@runtime_checkable
class Clear(Protocol):
    """A filter that gives its step for rows in order."""

    def build_clear_step(self, missing: bool) -> ClearStep | None:
        """Return the step, or None if it calls Python functions; missing: whether components may be missing."""
        ...


@runtime_checkable
class PredictionRecorder(Filter, Protocol):
    """A filter that gives the record of its `prediction` of rows in order."""

    def record_clear_prediction(self) -> Recorded | None:
        """Return the record, or None if it calls Python functions.

        Inputs: state, dt, u. Outputs: mean, gain by rows, packed rest.
        """
        ...


def build_clear_step(model: Filter, missing: bool) -> ClearStep | None:
    """Return the step of a filter for rows in order, or None where the kind of filter has no such step."""
    return model.build_clear_step(missing) if isinstance(model, Clear) else None
