"""Positive semidefinite matrices as L D L', in entry arithmetic: whiten and solve without LAPACK."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.linalg.entries import Entry, Matrix, Vector, minus, times
from kalman.linalg.packing import find_order, packed_index

NOTHING = 1e-13
"""A pivot below this fraction of its variance counts as zero; a density then covers only the other directions."""


class Factor(NamedTuple):
    """P = L D L': L unit lower triangular (n x n), d the diagonal of D (n), inverse 1 / d, or 0 where d is zero."""

    L: Matrix
    d: Vector
    inverse: Vector


def factor(P: Vector, present: Sequence[np.ndarray | None] | None = None, nothing: float = NOTHING) -> Factor:
    """Return the factors of a packed P; components that a key lacks (`present`) are removed from P.

    nothing: a pivot below this share of its variance counts as zero. A state of variance R after a start of variance P
    has pivots of R / P. Where rounding is harmless, 0.0 is therefore right, with which every positive pivot counts.
    """
    n = find_order(len(P))
    L: list[list[Entry]] = [[1.0 if i == j else 0.0 for j in range(n)] for i in range(n)]
    d: list[Entry] = []
    inverse: list[Entry] = []
    for i in range(n):
        own = P[packed_index(i, i)]
        has = None if present is None else present[i]
        weighed: list[Entry] = []
        for j in range(i):
            a = P[packed_index(i, j)]
            for k in range(j):
                a = minus(a, times(weighed[k], L[j][k]))
            weighed.append(a if has is None else np.where(has, a, 0.0))
            L[i][j] = times(weighed[j], inverse[j])
            own = minus(own, times(weighed[j], L[i][j]))
        real = np.greater(own, times(nothing, np.abs(P[packed_index(i, i)])))
        real = real if has is None else real & has
        d.append(np.where(real, own, 0.0))
        inverse.append(np.where(real, np.divide(1.0, own), 0.0))
    return Factor(L, d, inverse)


def whiten(L: Matrix, b: Vector) -> list[Entry]:
    """Return L^-1 b."""
    z: list[Entry] = []
    for row, value in zip(L, b, strict=True):
        for a, earlier in zip(row, z, strict=False):
            value = minus(value, times(a, earlier))
        z.append(value)
    return z


def solve(factors: Factor, b: Vector) -> list[Entry]:
    """Return x with P x = b for a b in the range of P; x has no part along directions without variance."""
    x = [times(a, z) for a, z in zip(factors.inverse, whiten(factors.L, b), strict=True)]
    for i in reversed(range(len(x))):
        for k in range(i + 1, len(x)):
            x[i] = minus(x[i], times(factors.L[k][i], x[k]))
    return x
