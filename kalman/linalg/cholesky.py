"""Lower triangular factors of covariances, on entries: P = L L' with L packed by rows and a diagonal of zero or more.

All operations are square roots and rotations of entries, separately for each key. A direction without variance is a
column of zeros; no operation divides by such a zero.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.linalg.entries import Entry, Matrix, Vector, dot, is_zero, minus, plus, times
from kalman.linalg.packing import find_order, packed_index

LOST = 1e-9
"""If a pivot is below minus this fraction of its variance, the matrix is not positive semidefinite.

Negative pivots closer to zero are rounding errors.
"""


class Factored(NamedTuple):
    """A packed factor L, and `sound`, which is negative for the keys whose matrix was not positive semidefinite."""

    L: list[Entry]
    sound: Entry


def cholesky(P: Vector) -> Factored:
    """Return the Cholesky factor of a packed covariance; pivots that rounding made negative count as zero.

    References: Golub and Van Loan (2013), section 4.2.
    """
    n = find_order(len(P))
    L: list[Entry] = [0.0] * len(P)
    sound: Entry = math.inf
    total = dot([1.0] * n, [P[packed_index(j, j)] for j in range(n)])  # the scale of the first pivot
    for j in range(n):
        row = L[packed_index(j, 0) : packed_index(j, j)]
        variance = P[packed_index(j, j)]
        pivot = minus(variance, dot(row, row))
        sound = least(sound, plus(pivot, times(LOST, variance if j else total)))
        diagonal = root(pivot)
        L[packed_index(j, j)] = diagonal
        inverse = reciprocal(diagonal)
        for i in range(j + 1, n):
            other = L[packed_index(i, 0) : packed_index(i, j)]
            L[packed_index(i, j)] = times(minus(P[packed_index(i, j)], dot(other, row)), inverse)
    return Factored(L, sound)


def triangulate_rows(columns: Matrix) -> list[Entry]:
    """Return the packed factor L of A A' by Householder reflections from the right; columns: A, n rows of q entries.

    References: Golub and Van Loan (2013), section 5.2; Kailath, Sayed and Hassibi (2000), section 12.3.
    """
    n, q = len(columns), len(columns[0])
    rows = [[*row, *[0.0] * max(0, n - q)] for row in columns]
    L: list[Entry] = [0.0] * (n * (n + 1) // 2)
    for i in range(n):
        row = rows[i]
        tail = [k for k in range(i + 1, len(row)) if not is_zero(row[k])]
        pivot = row[i]
        if not tail:  # nothing to eliminate; only the sign of the pivot's column may have to change
            L[packed_index(i, i)] = _absolute(pivot)
            turned = _sign(pivot)
            for j in range(i + 1, n):
                L[packed_index(j, i)] = times(turned, rows[j][i])
            continue
        square = plus(times(pivot, pivot), dot([row[k] for k in tail], [row[k] for k in tail]))
        length = root(square)
        sign = _sign(pivot)
        head = plus(pivot, times(sign, length))  # v = row + sign |row| e_pivot
        weight = reciprocal(plus(square, times(length, _absolute(pivot))))  # 2 / v v'
        L[packed_index(i, i)] = length
        seen = [row[k] for k in tail]
        for j in range(i + 1, n):
            below = rows[j]
            along = times(weight, plus(times(head, below[i]), dot(seen, [below[k] for k in tail])))
            # the reflection puts -sign |row| into the pivot, so the column's sign is changed to make the pivot positive
            L[packed_index(j, i)] = times(sign, minus(times(along, head), below[i]))
            for k, v in zip(tail, seen, strict=True):
                below[k] = minus(below[k], times(along, v))
    return L


class Rotated(NamedTuple):
    """A factor after one scalar measurement: L, the gain times the square root of S (n entries), S, and this root."""

    L: list[Entry]
    gain: list[Entry]
    S: Entry
    root: Entry


def condition(L: Vector, a: Vector, r: Entry, noisy: bool) -> Rotated:
    """Return the factor given one scalar measurement of variance r, with a = L' h'; noisy: whether r is above zero.

    The array [[sqrt r, a'], [0, L]] is rotated into [[sqrt S, 0], [K sqrt S, L+]]. One Givens rotation for each column,
    from the last to the first, keeps L triangular. No difference of variances is formed.

    References: Carlson (1973); Kailath, Sayed and Hassibi (2000), section 12.4.
    """
    n = len(a)
    after = list(L)
    gain: list[Entry] = [0.0] * n
    S, length = r, root(r)
    for j in reversed(range(n)):
        if is_zero(a[j]):
            continue
        S = plus(S, times(a[j], a[j]))
        longer = root(S)
        c, s = np.divide(length, longer), np.divide(a[j], longer)
        if not noisy:  # without noise, 0 / 0 is possible
            positive = np.greater(longer, 0.0)
            c, s = np.where(positive, c, 1.0), np.where(positive, s, 0.0)
        for i in range(j, n):
            at = packed_index(i, j)
            before = after[at]
            after[at] = minus(times(c, before), times(s, gain[i]))
            gain[i] = plus(times(s, before), times(c, gain[i]))
        length = longer
    return Rotated(after, gain, S, length)


def downdate(L: Vector, v: Vector) -> Factored:
    """Return the factor of L L' - v v', and whether this matrix is a covariance (`sound`).

    With a = L^-1 v the matrix is L (I - a a') L', and the factor of I - a a' is small and well scaled.
    """
    n = len(v)
    a: list[Entry] = []
    for i in range(n):
        known = dot(L[packed_index(i, 0) : packed_index(i, i)], a)
        a.append(times(minus(v[i], known), reciprocal(L[packed_index(i, i)])))
    inner = [minus(1.0 if i == j else 0.0, times(a[i], a[j])) for i in range(n) for j in range(i + 1)]
    factored = cholesky(inner)
    return Factored(product(L, factored.L), factored.sound)


def product(L: Vector, M: Vector) -> list[Entry]:
    """Return the product L M (packed) of two packed lower triangles."""
    n = find_order(len(L))
    return [
        dot(
            [L[packed_index(i, k)] for k in range(j, i + 1)],
            [M[packed_index(k, j)] for k in range(j, i + 1)],
        )
        for i in range(n)
        for j in range(i + 1)
    ]


def gram(L: Vector) -> list[Entry]:
    """Return the packed covariance L L'."""
    n = find_order(len(L))
    rows = [L[packed_index(i, 0) : packed_index(i, i) + 1] for i in range(n)]
    return [dot(rows[i][: j + 1], rows[j]) for i in range(n) for j in range(i + 1)]


def square(rows: Matrix) -> list[Entry]:
    """Return A A' (packed) of a matrix A given by its rows."""
    return [dot(rows[i], rows[j]) for i in range(len(rows)) for j in range(i + 1)]


def unpack_triangle(L: Vector) -> list[list[Entry]]:
    """Return the full matrix of a packed lower triangle, with zeros above the diagonal."""
    n = find_order(len(L))
    return [[L[packed_index(i, j)] if j <= i else 0.0 for j in range(n)] for i in range(n)]


def multiply_transposed(L: Vector, h: Vector) -> list[Entry]:
    """Return L' h' for a packed lower triangle and a row h."""
    n = len(h)
    return [dot(h[j:], [L[packed_index(i, j)] for i in range(j, n)]) for j in range(n)]


def apply(L: Vector, x: Vector) -> list[Entry]:
    """Return L x for a packed lower triangle."""
    return [dot(L[packed_index(i, 0) : packed_index(i, i) + 1], x[: i + 1]) for i in range(len(x))]


def root(a: Entry) -> Entry:
    """Return the square root of a; negative numbers give 0."""
    if isinstance(a, float):
        return math.sqrt(a) if a > 0.0 else 0.0
    return np.sqrt(np.maximum(a, 0.0))


def reciprocal(a: Entry) -> Entry:
    """Return 1 / a, or 0 if a is 0."""
    if isinstance(a, float):
        return 1.0 / a if a != 0.0 else 0.0
    return np.where(np.equal(a, 0.0), 0.0, np.divide(1.0, a))


def least(a: Entry, b: Entry) -> Entry:
    """Return the smaller of two entries."""
    if isinstance(a, float) and isinstance(b, float):
        return min(a, b)
    return np.minimum(a, b)


def find_least(entries: Sequence[Entry]) -> Entry:
    """Return the smallest of several entries."""
    result: Entry = math.inf
    for entry in entries:
        result = least(result, entry)
    return result


def _absolute(a: Entry) -> Entry:
    return abs(a) if isinstance(a, float) else np.abs(a)


def _sign(a: Entry) -> Entry:
    return math.copysign(1.0, a) if isinstance(a, float) else np.copysign(1.0, a)
