"""Fixed-interval smoothing of any filter with a `prediction` (Rauch, Tung and Striebel).

References: Rauch, Tung and Striebel (1965); for non-linear models Särkkä (2008), equations 26-28.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kalman.filters.prediction import Prediction, Smoothable
from kalman.linalg.entries import Entry, Matrix, Vector, dot, plus
from kalman.linalg.ldl import factor, solve
from kalman.linalg.packing import packed_size, symmetric
from kalman.types import Array, Rows


@dataclass(frozen=True)
class CrossSmoother:
    """The smoother of a filter with a `prediction`. It carries back the next state, smoothed."""

    model: Smoothable

    def begin(self, values: Array) -> Array:
        """Return the moments of the last states, which are smoothed already."""
        return np.concatenate(self.model.moments(values))

    def smoothed(self, after: Array, later: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance (p, K) given all rows."""
        n = _states(len(later))
        return later[:n], later[n:]

    def extra(self, later: Array) -> dict[str, Array]:
        """Nothing beside mean and covariance."""
        return {}

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the smoothed states before the rows, from those after them."""
        m, P = self.model.moments(before)
        n = len(m)
        with np.errstate(all="ignore"):  # only flagged rows can go wrong, and they are left out
            prediction = self.model.prediction(before, rows)
            link = Link(list(m), list(P), [*prediction.mean], [*prediction.covariance], gain(prediction))
            mean, covariance = smoothed(link, [*later[:n]], [*later[n:]])
        earlier = np.array([np.broadcast_to(a, before.shape[1:]) for a in (*mean, *covariance)])
        return np.where(rows.first, later, earlier)


class Link(NamedTuple):
    """A state m, P (packed) and the prediction of the next from it, mean and packed covariance; G: the gain (n x n)."""

    m: Vector
    P: Vector
    mean: Vector
    covariance: Vector
    G: Matrix


def gain(prediction: Prediction) -> list[list[Entry]]:
    """Return G = cov(previous x, x) cov(x)^-1."""
    factors = factor(list(prediction.covariance))
    return [solve(factors, list(row)) for row in prediction.cross]


def smoothed(link: Link, mean: Vector, covariance: Vector) -> tuple[list[Entry], list[Entry]]:
    """Return mean and packed covariance of a state, given those of the next: m + G (x - m-), P + G (V - P-) G'."""
    G, n = link.G, len(link.m)
    gap = [a - b for a, b in zip(mean, link.mean, strict=True)]
    full = symmetric([a - b for a, b in zip(covariance, link.covariance, strict=True)])
    result: list[Entry] = []
    for i in range(n):
        half = [dot(G[i], column) for column in full]
        result += [plus(link.P[len(result) + j], dot(G[j], half)) for j in range(i + 1)]
    return [plus(a, dot(row, gap)) for a, row in zip(link.m, G, strict=True)], result


def _states(depth: int) -> int:
    n = 1
    while n + packed_size(n) < depth:
        n += 1
    return n
