"""The backward pass of each kind of filter."""

from functools import lru_cache
from typing import NamedTuple, Protocol, cast

from kalman.filters.linear import LinearFilter
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.prediction import Smoothable
from kalman.filters.rounded import unwrap_rounding
from kalman.filters.sliding_likelihood import drop_sliding
from kalman.linalg.compiled import COMPILING
from kalman.long_series import CutStep, compile_step
from kalman.smoothers.fixed_lag import FixedLagFilter
from kalman.smoothers.linear import LinearSmoother
from kalman.smoothers.modes import build_mode_smoother
from kalman.smoothers.rts import CrossSmoother
from kalman.types import Array, Filter, ModelError, Rows


class Smoother(Protocol):
    """A backward pass over the rows of K keys, which carries an array (depth, K) from row to row.

    Its states (size, K) are those of the model that is smoothed (`select_smoothed_part`).
    """

    def begin(self, values: Array) -> Array:
        """Return the array after the last rows, at these states (size, K)."""
        ...

    def smoothed(self, after: Array, later: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance of the states after a row, given the later rows too."""
        ...

    def extra(self, later: Array) -> dict[str, Array]:
        """Return further outputs for the states after a row, name -> (d, K)."""
        ...

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the array before the rows, given `later` after them and the states `before` them."""
        ...


class CompiledBack(NamedTuple):
    """A compiled step back over rows in order, of an array that starts with the smoothed mean and covariance.

    missing: whether the rows have masks of the components that are present; size: number of the state's entries that
    it reads; diffuse: place of the diffuse part in a state, which is zero before a row in order
    """

    cut: CutStep
    missing: bool
    size: int
    diffuse: slice


def compile_back(backwards: Smoother, missing: bool) -> CompiledBack | None:
    """Return the compiled step back over rows in order, or None where it cannot be compiled."""
    with COMPILING:
        return _compile_back(backwards, missing)


@lru_cache(maxsize=4)
def _compile_back(backwards: Smoother, missing: bool) -> CompiledBack | None:
    if not isinstance(backwards, LinearSmoother | CrossSmoother):
        return None
    step, model = backwards.build_clear_back(missing), cast(Filter, backwards.model)
    cut = None if step is None else compile_step(step, len(step.recorded.outputs))
    return None if step is None or cut is None else CompiledBack(cut, missing, model.size, step.diffuse)


def select_smoothed_part(model: Filter) -> Filter:
    """Return the part of a filter that is smoothed; its state comes first."""
    return drop_sliding(unwrap_rounding(model))


def build_smoother(model: Filter) -> Smoother:
    """Return the smoother of a filter. Raises ModelError where the filter cannot be smoothed."""
    model = select_smoothed_part(model)
    if isinstance(model, LinearFilter):
        return LinearSmoother(model)
    if isinstance(model, FixedLagFilter):
        return LinearSmoother(model.inner)
    if isinstance(model, Smoothable):
        return CrossSmoother(model)
    if isinstance(model, MultipleModels):
        return build_mode_smoother(model)
    remedy = "choose linear, extended, unscented, cubature, imm or mmae to smooth"
    raise ModelError("filter", "its states cannot be smoothed", remedy)
