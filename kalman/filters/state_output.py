"""Add the whole state to a filter's outputs if mean and covariance do not determine the state.

The modes of a mixture, adaptive noise, or a least-squares residual are in a key's state, but not in its estimates. If
the estimates include the state, later forecasts can start from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kalman.filters.clear_step import ClearStep, build_clear_step
from kalman.filters.own_parameters import find_key_parameters
from kalman.filters.state_layout import Passing, unwrap_filter
from kalman.types import Array, Filter, ModelError, Rows, Step

OUTPUT = "filter_state"


@dataclass(frozen=True)
class StateOutput(Passing):
    """A filter whose outputs include the state of the innermost filter after each row."""

    @property
    def outputs(self) -> Mapping[str, int]:
        """The inner filter's outputs, and the state."""
        return {**self.inner.outputs, OUTPUT: unwrap_filter(self.inner).size}

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`, which includes the state."""
        after, step = self.inner.step(state, rows)
        kept = after[: unwrap_filter(self.inner).size].copy()
        return after, step._replace(extra={**step.extra, OUTPUT: kept})

    def build_clear_step(self, missing: bool) -> ClearStep | None:
        """Return the inner filter's step with the innermost filter's state as the last output."""
        step = build_clear_step(self.inner, missing)
        if step is None:
            return None
        outputs = step.recorded.outputs
        state = outputs[: unwrap_filter(self.inner).size]
        return step._replace(recorded=step.recorded._replace(outputs=[*outputs, *state]))


def follows_from_moments(model: Filter) -> bool:
    """Return whether forecasts depend only on a key's mean, covariance and learned parameters."""
    model, n = unwrap_filter(model), len(model.states)
    if "log_probabilities" in model.fields or find_key_parameters(model).adapted:
        return False
    try:
        model.from_moments(np.zeros((n, 1)), np.eye(n).reshape(-1, 1))
    except ModelError:
        return False
    return True
