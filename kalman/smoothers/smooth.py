"""Fixed-interval smoothing: every row's state given all rows of its key."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from kalman import flags
from kalman.filters.linear import LinearFilter
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.prediction import Smoothable
from kalman.filters.rounded import unrounded
from kalman.filters.sliding_likelihood import without_sliding
from kalman.run import KeyStates, Outputs, Round, SortedRows, among, late_rows, rounds, run, spread
from kalman.smoothers.fixed_lag import FixedLagFilter
from kalman.smoothers.linear import LinearSmoother
from kalman.smoothers.modes import mode_smoother
from kalman.smoothers.rts import CrossSmoother
from kalman.types import Array, Filter, ModelError, Rows


class Smoothed(NamedTuple):
    """State given all rows of its key, for each of N rows: mean (n, N), packed covariance (p, N).

    extra: name -> (d, N), further outputs given all rows. NaN where the row is late. A flagged row repeats its key's
    last good row.
    """

    mean: Array
    covariance: Array
    extra: Mapping[str, Array]


class Smoother(Protocol):
    """A backward pass over the rows of K keys, which carries an array (depth, K) from row to row."""

    def begin(self, values: Array) -> Array:
        """Return the array to start from, after the last rows, at these states (size, K)."""
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


def smoother(model: Filter) -> Smoother:
    """Return the smoother of a filter. Raises ModelError where the filter cannot be smoothed."""
    model = without_sliding(unrounded(model))
    if isinstance(model, LinearFilter):
        return LinearSmoother(model)
    if isinstance(model, FixedLagFilter):
        return LinearSmoother(model.inner)
    if isinstance(model, Smoothable):
        return CrossSmoother(model)
    if isinstance(model, MultipleModels):
        return mode_smoother(model)
    remedy = "choose linear, extended, unscented, cubature, imm or mmae to smooth"
    raise ModelError("filter", "its states cannot be smoothed", remedy)


def smooth(
    model: Filter,
    states: KeyStates,
    rows: SortedRows,
    unit: float,
    on_round: Callable[[Round], None] | None = None,
) -> tuple[KeyStates, Outputs, Smoothed]:
    """Return the results of `run`, and each row's state given all rows of its key; `on_round` as in `run`.

    Exact for the linear filter, whatever the time steps, control, missing components and diffuse start;
    approximate as the filter itself is for the others. Takes memory for one state a row.
    Raises ModelError where the filter cannot be smoothed.

    References: Durbin and Koopman (2012), chapters 4 and 5; Rauch, Tung and Striebel (1965); for several models see
    `kalman.smoothers.modes`.
    """
    backwards, size = smoother(model), without_sliding(unrounded(model)).size
    late = late_rows(states, rows)
    if late.any():
        kept = np.flatnonzero(~late)
        part = SortedRows(rows.key[kept], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
        states, outputs, smoothed = smooth(model, states, part, unit, on_round)
        mean, covariance = (among(array, kept, len(late)) for array in smoothed[:2])
        extra = {name: among(array, kept, len(late)) for name, array in smoothed.extra.items()}
        return states, spread(outputs, kept, late), Smoothed(mean, covariance, extra)
    history: list[Round] = []

    def keep(taken: Round) -> None:
        if on_round is not None:
            on_round(taken)
        history.append(taken._replace(before=taken.before[:size].copy()))

    plan = rounds(rows.key)
    states, outputs = run(model, states, rows, unit, keep)
    values = states.values[:size, plan.keys]
    later = backwards.begin(values)
    mean, covariance = np.empty_like(outputs.mean), np.empty_like(outputs.covariance)
    extra = {name: np.empty((len(a), mean.shape[1])) for name, a in backwards.extra(later).items()}
    while history:
        place, keys, before, taken, step = history.pop()
        mean[:, place], covariance[:, place] = backwards.smoothed(values[:, keys], later[:, keys])
        for name, value in backwards.extra(later[:, keys]).items():
            extra[name][:, place] = value
        earlier = backwards.back(before, taken, later[:, keys])
        later[:, keys] = np.where(step.flag == flags.WELL, earlier, later[:, keys])
        values[:, keys] = before
    extra = {name: array[:, plan.place] for name, array in extra.items()}
    return states, outputs, Smoothed(mean[:, plan.place], covariance[:, plan.place], extra)
