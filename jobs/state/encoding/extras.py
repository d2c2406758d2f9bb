"""The extra columns of estimates: names, widths and types. This module works without Spark, so `filter` can use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.state.encoding.arrow import build_lists
from jobs.state.encoding.packets import CONTROL, MEASURED, STATE_INDEX
from kalman.evaluation.row_figures import INNOVATION, RESIDUAL, RESIDUAL_COVARIANCE, SYSTEM, figures
from kalman.filters.sliding_likelihood import OUTPUT as SLIDING

if TYPE_CHECKING:
    from kalman.types import Filter

COMPUTED = frozenset([INNOVATION, RESIDUAL, RESIDUAL_COVARIANCE, *SYSTEM, STATE_INDEX])
"""Names of the extras that are not outputs of the filter, and are computed in addition."""

SCALARS = {STATE_INDEX: ("bigint", pa.int64()), SLIDING: ("double", pa.float64())}
"""The extras with one number per row, with their types; all other extras are lists."""


def find_extra_widths(kernel: Filter) -> dict[str, int]:
    """Return the names and widths of the extras that a filter's estimates may have besides the filter's outputs."""
    return {**figures(kernel), MEASURED: kernel.measurements, CONTROL: kernel.controls, STATE_INDEX: 1}


def find_extra_type(name: str) -> str:
    """Return the SQL type of an extra's column."""
    return SCALARS[name][0] if name in SCALARS else "array<double>"


def build_extra_column(name: str, values: NDArray[np.float64]) -> pa.Array:
    """Return the column of an extra (d, N) as lists of d numbers, or as numbers for `SCALARS`, with null for NaN."""
    if name not in SCALARS:
        return build_lists(values)
    unknown = np.isnan(values[0])
    return pa.array(np.where(unknown, 0.0, values[0]), mask=unknown).cast(SCALARS[name][1])
