"""Starts from columns: columns of a key's first row give the distribution of the key's state at this row."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kalman.linalg.packing import pack_lower
from kalman.models.columns import Cell, compute_lowest_pivot, resolve
from kalman.types import Array

MEAN, VARIANCE = 0.0, 1.0
"""Placeholders for columns of the mean and the covariance before the first row, as in `Filter.initial`."""


class Start(NamedTuple):
    """Mean (n) and packed covariance of a key's state at its first row; entries are numbers or columns."""

    mean: tuple[Cell, ...]
    covariance: tuple[Cell, ...]

    def resolve_start(self, u: Array) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
        """Return mean (n, K), packed covariance (p, K), and a mask (K,) of keys with an invalid mean or covariance."""
        rows, keys = list(u), u.shape[1]
        mean, covariance = (
            np.array([np.broadcast_to(a, keys) for a in resolve(cells, rows)], float)
            for cells in (self.mean, self.covariance)
        )
        with np.errstate(all="ignore"):
            sound = np.broadcast_to(np.greater_equal(compute_lowest_pivot(list(covariance)), 0.0), keys)
        finite = np.isfinite(mean).all(axis=0) & np.isfinite(covariance).all(axis=0)
        return mean, covariance, ~(sound & finite)


def replace_columns(
    mean: Sequence[Cell], covariance: Sequence[Sequence[Cell]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and packed covariance with numbers in place of columns."""

    def number(a: Cell, instead: float) -> float:
        return a if isinstance(a, float) else instead

    rows = [
        [number(a, VARIANCE if i == j else 0.0) for j, a in enumerate(row)]
        for i, row in enumerate(covariance)
    ]
    return tuple(number(a, MEAN) for a in mean), tuple(pack_lower(rows))
