"""The diffuse part of a state: x = m + A c + e with e ~ N(0, P); the columns of A are stored beside P.

The coefficients c of `flat` columns are undetermined; these columns give P_inf = A A'. A measurement that determines a
coefficient makes the coefficient's column exactly zero. The rank falls by one, and no rounding error remains that looks
like a diffuse direction.

A barely determined direction, such as a yearly wave after five days, has a huge variance. In P, this variance would
cost all digits that the next measurement needs. The direction therefore stays a `finite` column with c ~ N(0, 1): a
factor of the covariance has twice the digits, and P remains the covariance given the coefficients. Once a measurement
is predicted well, the finite columns are folded into P. Only finite columns are stored multiplied by SCALE, which
distinguishes them from flat columns. The state's size is therefore the same as in earlier releases, whose states had
flat columns only and still work.

References: de Jong (1991), The diffuse Kalman filter; Durbin and Koopman (2012), section 5.2; for Potter's square root
Anderson and Moore (1979), section 6.5.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, minus, over, plus, times
from kalman.linalg.packing import packed_index

TOLERANCE = 1e-9
"""An |A' h| below this fraction of its largest possible value counts as a zero with rounding errors."""
TRUSTED = 1e-2
"""Least variance of a well-predicted measurement, as a share of its bound from the states' variances.

Below this share, correlations would cost the covariance more than two digits.
"""
NEW = 0.05
"""Least new share of a measurement's squared projection on the flat columns that folds the determined direction into P.

Below this share the direction stays a column. Levels, trends and dummies have a share above one half; waves much longer
than the time between rows have a small share.
"""
SCALE, BELOW = 2.0**-800, 2.0**-400
"""The factor of finite columns in storage, and the upper bound of the stored entries of a finite column."""
RANGE = (1e-40, 1e70)
"""Allowed sizes of a finite column, which can be stored without loss and whose square in storage vanishes."""
ROUNDED = 1e-14
"""A conditional variance below this fraction of its largest possible value counts as a zero with rounding errors."""


def split_rows(entries: Sequence[Entry], n: int) -> list[list[Entry]]:
    """Return the rows of A, from the state's row-major entries."""
    q = len(entries) // n
    return [list(entries[i * q : (i + 1) * q]) for i in range(n)]


def compute_flat_covariance(A: Matrix) -> list[Entry]:
    """Return P_inf = A A' of the flat columns, packed; the squares of stored finite columns vanish."""
    return [dot(A[i], A[j]) for i in range(len(A)) for j in range(i + 1)]


def predict(F: Matrix, A: Matrix) -> list[list[Entry]]:
    """Return F A."""
    columns = list(zip(*A, strict=True))
    return [[dot(row, column) for column in columns] for row in F]


def split(A: Matrix) -> tuple[list[list[Entry]], list[list[Entry]]]:
    """Return two matrices like A: one with the flat columns, one with the unscaled finite columns, zeros elsewhere."""
    finite = [np.less(_find_largest([row[j] for row in A]), BELOW) for j in range(len(A[0]))]
    flat: list[list[Entry]] = [
        [np.where(few, 0.0, a) for few, a in zip(finite, row, strict=True)] for row in A
    ]
    return flat, [
        [np.where(few, times(a, 1.0 / SCALE), 0.0) for few, a in zip(finite, row, strict=True)] for row in A
    ]


def compute_finite_covariance(P: Vector, A: Matrix) -> list[Entry]:
    """Return the covariance without the flat part: P plus the squares of the finite columns."""
    _, finite = split(A)
    return fold_finite_columns(P, finite)


def project_columns(H: Matrix, A: Matrix) -> tuple[list[list[Entry]], list[list[Entry]]]:
    """Return H times the flat columns and times the finite columns; rounded zeros become exact zeros."""
    flat, finite = split(A)
    reach = [_compute_length(row) for row in flat]
    seen: list[list[Entry]] = []
    for h in H:
        b = apply(_transpose_rows(flat), h)
        size = dot([abs(a) if isinstance(a, float) else np.abs(a) for a in h], reach)
        real = np.greater(_compute_length(b), times(TOLERANCE, size))
        seen.append([np.where(real, a, 0.0) for a in b])
    return seen, [apply(_transpose_rows(finite), h) for h in H]


def compute_whole_covariance(P: Vector, flat: Matrix, finite: Matrix) -> list[Entry]:
    """Return the packed covariance including the columns; an entry is infinite where flat columns contribute to it."""
    result: list[Entry] = []
    size = [_compute_length(row) for row in flat]
    for i in range(len(flat)):
        for j in range(i + 1):
            value = dot(flat[i], flat[j])
            real = np.greater(np.abs(value), times(TOLERANCE, times(size[i], size[j])))
            known = plus(P[packed_index(i, j)], dot(finite[i], finite[j]))
            result.append(np.where(real, np.copysign(np.inf, value), known))
    return result


class Projection(NamedTuple):
    """The projection of a measurement z = h x + noise on the columns.

    M, S: covariance of z with the state, and variance of z, given the coefficients; an S within rounding of zero is 0
    b, F_inf: A' h of the flat columns, and its square; beta: A' h of the finite columns; flat, finite: the columns
    undetermined: (K,) bool, keys at which z determines a flat coefficient
    apart: (K,) bool, keys whose columns stay beside the covariance
    trusted: (K,) bool, keys at which z is predicted well enough to fold the columns into the covariance
    """

    M: Vector
    S: Entry
    b: Vector
    F_inf: Entry
    beta: Vector
    flat: Matrix
    finite: Matrix
    undetermined: np.ndarray
    apart: np.ndarray
    trusted: np.ndarray

    @property
    def precision(self) -> Entry:
        """1 / S, or 0 if S is 0."""
        return np.where(np.greater(self.S, 0.0), over(1.0, self.S), 0.0)


def project_measurement(P: Vector, A: Matrix, h: Vector, M: Vector, S: Entry, apart: bool) -> Projection:
    """Return the projection of a measurement with M = P h, S = h P h' + r; apart: whether finite columns may exist."""
    flat, finite = split(A)
    b, beta = apply(_transpose_rows(flat), h), apply(_transpose_rows(finite), h)
    F_inf = dot(b, b)
    size = [abs(a) if isinstance(a, float) else np.abs(a) for a in h]
    reach = dot(size, [_compute_length(row) for row in flat])
    undetermined = np.greater(np.sqrt(F_inf), times(TOLERANCE, reach))
    variances = [P[packed_index(i, i)] for i in range(len(A))]
    own = dot(size, [np.sqrt(np.maximum(a, 0.0)) for a in variances])
    real = np.greater(S, times(ROUNDED, times(own, own)))
    S = np.where(real, S, 0.0)
    total = [np.sqrt(np.maximum(plus(a, dot(c, c)), 0.0)) for a, c in zip(variances, finite, strict=True)]
    largest = dot(size, total)
    trusted = np.greater_equal(plus(S, dot(beta, beta)), times(TRUSTED, times(largest, largest)))
    before = np.greater(_find_largest([a for row in finite for a in row]), 0.0)
    badly = np.less(F_inf, times(NEW, times(reach, reach)))
    width = _find_largest([over(times(dot(row, b), np.sqrt(S)), F_inf) for row in flat])
    fits = np.greater(width, RANGE[0]) & np.less(width, RANGE[1])
    stays: Any = (before | (undetermined & badly & fits)) & apart
    return Projection(M, S, b, F_inf, beta, flat, finite, undetermined, stays, trusted & ~undetermined)


def compute_flat_gains(given: Projection, rows: Matrix) -> list[Entry]:
    """Return each state's gain A A' h / F_inf if z determines a flat coefficient; rows: rows of the flat columns."""
    return [over(dot(row, given.b), given.F_inf) for row in rows]


def condition_columns(given: Projection, A: Matrix, M: Vector, has: np.ndarray | None) -> list[list[Entry]]:
    """Return the columns of states after the measurement; columns of keys without the measurement are unchanged.

    A: rows of the columns, for the measured state or for other states with the same coefficients; M: covariances of
    these states with the measurement given the coefficients; has: mask of keys with the measurement, None means all.
    """
    flat, finite = split(A)
    turn = build_reflection(given)
    root, S = np.sqrt(given.S), plus(given.S, dot(given.beta, given.beta))
    step = over(1.0, plus(S, np.sqrt(times(S, given.S))))
    precision = given.precision
    result: list[list[Entry]] = []
    for undetermined, row, a, m in zip(flat, finite, compute_flat_gains(given, flat), M, strict=True):
        # z fixes the flat coefficient given the others: (z - beta c - h e - noise) / b
        fixed = minus(times(a, root), times(m, np.sqrt(precision)))
        new = [
            plus(minus(c, times(a, b)), np.where(here, fixed, 0.0))
            for c, b, here in zip(row, given.beta, turn.picked, strict=True)
        ]
        # otherwise z informs about all coefficients: the gain updates the state, Potter's square root the coefficients
        moved = [minus(c, times(times(m, precision), b)) for c, b in zip(row, given.beta, strict=True)]
        along = times(dot(moved, given.beta), step)
        told = [minus(c, times(along, b)) for c, b in zip(moved, given.beta, strict=True)]
        stored = [
            np.where(given.apart, np.where(given.undetermined, x, y), c)
            for x, y, c in zip(new, told, row, strict=True)
        ]
        left = _drop_determined(given, turn, undetermined)
        result.append([plus(a, times(c, SCALE)) for a, c in zip(left, stored, strict=True)])
    if has is None:
        return result
    return [[np.where(has, a, b) for a, b in zip(*rows, strict=True)] for rows in zip(result, A, strict=True)]


def fold(P: Vector, A: Matrix, where: np.ndarray) -> tuple[list[Entry], list[list[Entry]]]:
    """Fold the finite columns into P and keep only the flat columns, for the keys `where`."""
    flat, finite = split(A)
    together: list[Entry] = [
        np.where(where, a, b) for a, b in zip(fold_finite_columns(P, finite), P, strict=True)
    ]
    return together, [
        [np.where(where, a, b) for a, b in zip(*rows, strict=True)] for rows in zip(flat, A, strict=True)
    ]


class Reflection(NamedTuple):
    """A Householder reflection I - scale w w' that turns A' h into `value` times the picked column's unit vector."""

    picked: list[np.ndarray]
    value: Entry
    w: Vector
    scale: Entry

    def of(self, row: Vector) -> list[Entry]:
        """Return the reflection of a row (q,)."""
        along = times(dot(row, self.w), self.scale)
        return [minus(a, times(along, c)) for a, c in zip(row, self.w, strict=True)]


def build_reflection(given: Projection) -> Reflection:
    """Return the reflection that turns A' h into the column of its largest component, for the undetermined keys."""
    size = [np.abs(a) for a in given.b]
    largest = _find_largest(given.b)
    length = np.sqrt(given.F_inf)
    picked: list[np.ndarray] = []
    free = given.undetermined
    for a in size:
        here = np.equal(a, largest) & free
        picked.append(here)
        free = free & ~here
    # w = b + sign(b_j) |b| e_j for the picked column j, and w'w / 2 = |b|^2 + |b_j| |b|
    signed = [np.where(here, np.copysign(length, a), 0.0) for here, a in zip(picked, given.b, strict=True)]
    w = [a + s for a, s in zip(given.b, signed, strict=True)]
    total = signed[0]
    for a in signed[1:]:
        total = total + a
    return Reflection(picked, -total, w, over(1.0, plus(given.F_inf, times(largest, length))))


def _drop_determined(given: Projection, turn: Reflection, row: Vector) -> list[Entry]:
    """Return a row of the flat columns without the determined direction; zero columns stay zero.

    A determined state leaves only a rounding error in its row, which is set to zero.
    """
    after = [np.where(here, 0.0, a) for here, a in zip(turn.picked, turn.of(row), strict=True)]
    left = np.greater(_compute_length(after), 1e-13 * _compute_length(row))
    return [
        np.where(given.undetermined, np.where(left, new, 0.0), a) for new, a in zip(after, row, strict=True)
    ]


def fold_finite_columns(P: Vector, finite: Matrix) -> list[Entry]:
    """Return P + C C' for the rows of finite columns C."""
    n = len(finite)
    return [plus(P[packed_index(i, j)], dot(finite[i], finite[j])) for i in range(n) for j in range(i + 1)]


def _transpose_rows(rows: Matrix) -> list[tuple[Entry, ...]]:
    return list(zip(*rows, strict=True))


def _find_largest(vector: Vector) -> Entry:
    size = [np.abs(a) for a in vector]
    largest = size[0]
    for a in size[1:]:
        largest = np.maximum(largest, a)
    return largest


def _compute_length(vector: Vector) -> Entry:
    return np.sqrt(dot(vector, vector))
