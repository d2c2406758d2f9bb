"""The version number of the filters' arithmetic; it rises if a release changes the bits of a model's results."""

import numpy as np

from kalman.filters.robust.linear import RobustLinearFilter
from kalman.filters.state_layout import Flags, unwrap_filter
from kalman.types import Array, Filter

NUMERICS = 2
"""The version number of the current arithmetic. Each item lists the changed results; all others keep their bits.

1: the first version.
2: A linear filter (robust or not) with a diffuse start (`initial.diffuse`) stores barely determined directions as
   columns beside the covariance until a measurement is predicted well. Keys that have left their diffuse start keep
   their bits. With any start, a predicted variance is compared with the terms of its sum, so that a row may be applied
   that version 1 flagged `not_psd` because of rounding.
"""


def may_differ(model: Filter, state: Array, numerics: int) -> Flags:
    """Return a mask (K,) of keys whose next rows may give other bits than under an earlier version of the arithmetic.

    model: the filter, possibly wrapped; state: (size, K) states before the rows; numerics: the version to compare with.
    """
    keys = np.shape(state)[1]
    if numerics == NUMERICS:
        return np.zeros(keys, bool)
    if numerics > NUMERICS:  # a later version, whose changes are unknown to this release
        return np.ones(keys, bool)
    base = unwrap_filter(model)
    base = base.base if isinstance(base, RobustLinearFilter) else base
    place = getattr(base, "places", {}).get("diffuse")
    return np.zeros(keys, bool) if place is None else (state[place] != 0.0).any(axis=0)
