"""The number of the filters' numerics; it rises when a release changes the bits of a model's rows."""

import numpy as np

from kalman.filters.robust.linear import RobustLinearFilter
from kalman.filters.state_layout import Flags, unwrap_filter
from kalman.types import Array, Filter

NUMERICS = 2
"""The number of the current numerics. Each number lists the changed bits; everything else keeps its bits.

1: the first.
2: a diffuse start (`initial.diffuse`) of a linear filter, robust or not, keeps barely determined directions as columns
   beside the covariance, until a measurement is predicted well. Keys that have left their diffuse start keep their
   bits. For every start, a predicted variance is judged against the terms of its sum: a row that 1 flagged `not_psd`
   for rounding may be applied.
"""


def may_differ(model: Filter, state: Array, numerics: int) -> Flags:
    """Return a mask (K,) of keys whose next rows may have other bits than under the given numerics.

    model: the filter, possibly wrapped; state: (size, K), before the rows; numerics: the number to compare with.
    """
    keys = np.shape(state)[1]
    if numerics == NUMERICS:
        return np.zeros(keys, bool)
    if numerics > NUMERICS:  # a later release: its changes are unknown here
        return np.ones(keys, bool)
    base = unwrap_filter(model)
    base = base.base if isinstance(base, RobustLinearFilter) else base
    place = getattr(base, "places", {}).get("diffuse")
    return np.zeros(keys, bool) if place is None else (state[place] != 0.0).any(axis=0)
