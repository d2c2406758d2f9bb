"""The part of the covariance that is still infinite, P_inf = A A', kept as its factor A (n rows, q columns).

In factored form a measurement that determines a direction makes a column exactly zero: the rank falls by one,
and no rounding error remains that looks like a diffuse direction. q is the number of diffuse states.
"""

from collections.abc import Sequence

import numpy as np

from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, minus, over, plus, times

TOLERANCE = 1e-9
"""|A' h| below this fraction of its largest possible value is a rounded zero."""


def rows_of(entries: Sequence[Entry], n: int) -> list[list[Entry]]:
    """Return the rows of A, from the state's row-major entries."""
    q = len(entries) // n
    return [list(entries[i * q : (i + 1) * q]) for i in range(n)]


def covariance(A: Matrix) -> list[Entry]:
    """Return P_inf = A A', packed."""
    return [dot(A[i], A[j]) for i in range(len(A)) for j in range(i + 1)]


def predict(F: Matrix, A: Matrix) -> list[list[Entry]]:
    """Return F A."""
    columns = list(zip(*A, strict=True))
    return [[dot(row, column) for column in columns] for row in F]


def measure(A: Matrix, h: Vector) -> tuple[list[Entry], list[Entry], Entry, np.ndarray]:
    """Return b = A' h, M_inf = P_inf h, F_inf = h P_inf h', and for which keys h is undetermined."""
    b = [dot(h, column) for column in zip(*A, strict=True)]
    F_inf = dot(b, b)
    reach = dot([abs(a) if isinstance(a, float) else np.abs(a) for a in h], [_length(row) for row in A])
    undetermined = np.greater(np.sqrt(F_inf), times(TOLERANCE, reach))
    return b, apply(A, b), F_inf, undetermined


def determine(A: Matrix, h: Vector, where: np.ndarray) -> list[list[Entry]]:
    """Return a factor of P_inf - M_inf M_inf' / F_inf for the keys `where`, the same A for the others.

    A Householder reflection turns A' h into its largest component's column, which the measurement determines.
    Zero columns stay zero. The remainder of a determined state is rounding, and is set to zero.
    """
    b, M_inf, F_inf, _ = measure(A, h)
    size = [np.abs(a) for a in b]
    largest = size[0]
    for a in size[1:]:
        largest = np.maximum(largest, a)
    length = np.sqrt(F_inf)
    picked: list[np.ndarray] = []
    free = where
    for a in size:
        here = np.equal(a, largest) & free
        picked.append(here)
        free = free & ~here
    # w = b + sign(b_j) |b| e_j for the picked column j, and A - (A w) w' / (|b|^2 + |b_j| |b|)
    signed = [np.where(here, np.copysign(length, a), 0.0) for here, a in zip(picked, b, strict=True)]
    w = [a + s for a, s in zip(b, signed, strict=True)]
    scale = over(1.0, plus(F_inf, times(largest, length)))
    result: list[list[Entry]] = []
    for row, M in zip(A, M_inf, strict=True):
        Aw = times(plus(M, dot(row, signed)), scale)
        after = [
            np.where(here, 0.0, minus(a, times(Aw, c))) for here, a, c in zip(picked, row, w, strict=True)
        ]
        left = np.greater(_length(after), 1e-13 * _length(row))
        result.append(
            [np.where(where, np.where(left, new, 0.0), a) for new, a in zip(after, row, strict=True)]
        )
    return result


def _length(vector: Vector) -> Entry:
    return np.sqrt(dot(vector, vector))
