"""The numerics of the filters: a number that rises where a release gives some model's rows other bits."""

import numpy as np

from kalman.filters.robust.linear import RobustLinearFilter
from kalman.filters.state_layout import Flags, innermost
from kalman.types import Array, Filter

NUMERICS = 2
"""What the bits of estimates and states are of. What is not named keeps them from number to number.

1: the first.
2: a diffuse start (`initial.diffuse`) of a linear filter, robust or not, keeps what the first rows determine only just
   as columns beside the covariance, until a measurement is predicted well. Keys that have left their diffuse start keep
   their bits. A predicted variance is judged against the terms that it is summed from, whatever the start was: a row
   that 1 flagged `not_psd` for rounding may be applied.
"""


def may_differ(model: Filter, state: Array, numerics: int) -> Flags:
    """Return which keys (K,) may have other bits after their next rows than by other numerics.

    model: the filter, also with others around it; state: (size, K), before the rows; numerics: those to compare with.
    """
    keys = np.shape(state)[1]
    if numerics == NUMERICS:
        return np.zeros(keys, bool)
    if numerics > NUMERICS:  # of a later release, which alone knows what it has changed
        return np.ones(keys, bool)
    base = innermost(model)
    base = base.base if isinstance(base, RobustLinearFilter) else base
    place = getattr(base, "places", {}).get("diffuse")
    return np.zeros(keys, bool) if place is None else (state[place] != 0.0).any(axis=0)
