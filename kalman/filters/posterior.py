"""The measurement update of a Gaussian in covariance, square-root and information form, on entries.

The model is y = h x + v, v ~ N(0, R), and e = y - E[y]. The updates return the change of the mean, which the caller
adds to the state's mean. A missing component has no effect, not even by rounding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.filters.recursions import decorrelate
from kalman.filters.update import LOG_2PI, Present, update
from kalman.linalg import cholesky
from kalman.linalg.cholesky import LOST, least
from kalman.linalg.entries import Entry, Matrix, Vector, dot, minus, over, plus, times
from kalman.linalg.packing import find_order, packed_index, unpack_symmetric


class Posterior(NamedTuple):
    """The change of the mean, the covariance or factor S after the update, and the row's scores.

    innovation  the smallest innovation variance of the present components; zero or less if an innovation is singular
    sound       negative if a covariance is not positive semidefinite
    """

    change: list[Entry]
    S: list[Entry]
    log_likelihood: Entry
    nis: Entry
    innovation: Entry
    sound: Entry


def update_by_variance(P: Vector, H: Matrix, R: Vector, e: Vector, presents: Sequence[Present]) -> Posterior:
    """Update a covariance P with one scalar measurement after another, in Joseph's form."""
    n = len(H[0])
    updated = update([0.0] * n, P, None, H, R, e, presents)
    after = list(updated.P)
    sound: Entry = np.inf
    for i in range(n):
        at = packed_index(i, i)
        sound = least(sound, plus(after[at], times(LOST, np.abs(P[at]))))
        after[at] = np.maximum(after[at], 0.0)
    seen = [(scalar.weighing.S, scalar.present) for scalar in updated.scalars]
    innovation = cholesky.find_least([_select_present(S, has, 1.0) for S, has in seen])
    return Posterior(list(updated.m), after, updated.log_likelihood, updated.nis, innovation, sound)


def update_by_rotation(
    L: Vector, H: Matrix, R: Vector, e: Vector, presents: Sequence[Present], noisy: bool
) -> Posterior:
    """Update a factor L with one scalar measurement after another, by rotations (`cholesky.condition`).

    noisy: whether R is positive definite for every key, so that divisions need no guard against zero.
    """
    change: list[Entry] = [0.0] * len(H[0])
    row_score = RowScore()
    noise = decorrelate(H, R, e, presents)
    innovation: Entry = np.inf
    for h, r, z, has in zip(noise.G, noise.d, noise.z, presents, strict=True):
        a = [_select_present(one, has, 0.0) for one in cholesky.multiply_transposed(L, h)]
        v = _select_present(minus(z, dot(h, change)), has, 0.0)
        L, gain, S, length = cholesky.condition(L, a, r, noisy)
        unit = over(v, length)
        change = [plus(m, times(k, unit)) for m, k in zip(change, gain, strict=True)]
        row_score = row_score.add(S, times(unit, unit), has)
        innovation = least(innovation, _select_present(S, has, 1.0))
    return Posterior(change, list(L), row_score.score, row_score.compute_nis(), innovation, 1.0)


def update_by_information(
    P: Vector, H: Matrix, R: Vector, e: Vector, presents: Sequence[Present]
) -> Posterior:
    """Update a covariance P with the information of all components at once, H' R^-1 H and H' R^-1 e.

    Each component costs n(n+1)/2 products, or none if H and R are constant and no component is missing; the covariance
    is updated only once. With P = L L', W = H' R^-1 H and C C' = I + L' W L, the updated covariance is
    (L C'^-1)(L C'^-1)'. P may be singular, and no difference of variances is formed.

    References: Anderson and Moore (1979), section 6.3; Kailath, Sayed and Hassibi (2000), section 9.5.
    """
    n = len(H[0])
    noise = decorrelate(H, R, e, presents)
    W: list[Entry] = [0.0] * (n * (n + 1) // 2)
    b: list[Entry] = [0.0] * n
    precisions: list[Entry] = []
    for g, d, z, has in zip(noise.G, noise.d, noise.z, presents, strict=True):
        precision = _select_present(1.0 / d, has, 0.0)
        precisions.append(precision)
        weighed = times(_select_present(z, has, 0.0), precision)
        W = [
            plus(w, times(times(g[i], g[j]), precision)) for w, (i, j) in zip(W, _list_pairs(n), strict=True)
        ]
        b = [plus(a, times(k, weighed)) for a, k in zip(b, g, strict=True)]
    L, sound = cholesky.cholesky(P)
    rows = cholesky.unpack_triangle(L)
    columns = list(zip(*rows, strict=True))
    full = unpack_symmetric(W)
    seen = [[dot(row, column) for row in full] for column in columns]  # L' W
    inner = [plus(1.0 if i == j else 0.0, dot(columns[j], seen[i])) for i in range(n) for j in range(i + 1)]
    C = cholesky.cholesky(inner).L
    pulled = _solve_forward(C, cholesky.multiply_transposed(L, b))
    spread = [_solve_forward(C, row) for row in rows]  # rows of L C'^-1
    change = [dot(row, pulled) for row in spread]
    unit = _solve_backward(C, pulled)  # the change, in units of the prior's factor
    nis, constants, count = dot(unit, unit), 0.0, 0.0
    for g, d, z, has, precision in zip(noise.G, noise.d, noise.z, presents, precisions, strict=True):
        left = _select_present(minus(z, dot(g, change)), has, 0.0)
        nis = plus(nis, times(times(left, left), precision))
        constants = plus(constants, _select_present(plus(_take_log(d), LOG_2PI), has, 0.0))
        count = plus(count, _select_present(1.0, has, 0.0))
    for i in range(n):
        constants = plus(constants, times(2.0, np.log(C[packed_index(i, i)])))
    row_score = RowScore(times(-0.5, plus(nis, constants)), nis, count)
    return Posterior(change, cholesky.square(spread), row_score.score, row_score.compute_nis(), 1.0, sound)


def condition_by_elimination(G: Matrix, S: Vector, e: Vector, presents: Sequence[Present]) -> Posterior:
    """Condition states of unit covariance on components of covariance S (packed); G: cross-covariance with the states.

    The components are eliminated from the joint covariance one by one, and the remaining covariance is factored.
    Unlike in the other forms, the remaining covariance may not be positive semidefinite.
    """
    n, m = len(G[0]), len(G)
    P: list[Entry] = [1.0 if i == j else 0.0 for i, j in _list_pairs(n)]
    rows, joint, left = [list(row) for row in G], unpack_symmetric(S), list(e)
    change: list[Entry] = [0.0] * n
    row_score = RowScore()
    innovation: Entry = np.inf
    for i in range(m):
        has, variance = presents[i], joint[i][i]
        inverse = _select_present(over(1.0, variance), has, 0.0)
        v = _select_present(left[i], has, 0.0)
        c = [_select_present(a, has, 0.0) for a in rows[i]]
        gain = [times(a, inverse) for a in c]
        change = [plus(a, times(k, v)) for a, k in zip(change, gain, strict=True)]
        P = [minus(p, times(gain[a], c[b])) for p, (a, b) in zip(P, _list_pairs(n), strict=True)]
        row_score = row_score.add(variance, times(times(v, v), inverse), has)
        innovation = least(innovation, _select_present(variance, has, 1.0))
        for j in range(i + 1, m):
            weight = times(_select_present(joint[j][i], has, 0.0), inverse)
            left[j] = minus(left[j], times(weight, v))
            rows[j] = [minus(a, times(weight, b)) for a, b in zip(rows[j], c, strict=True)]
            for k in range(i + 1, j + 1):
                joint[j][k] = joint[k][j] = minus(
                    joint[j][k], times(weight, _select_present(joint[k][i], has, 0.0))
                )
    L, sound = cholesky.cholesky(P)
    return Posterior(change, L, row_score.score, row_score.compute_nis(), innovation, sound)


def mask_rows(rows: Sequence[Vector], presents: Sequence[Present]) -> list[list[Entry]]:
    """Return the rows with zeros for the keys that lack a component, so that a missing component has no effect."""
    return [
        [a if isinstance(a, float) else _select_present(a, has, 0.0) for a in row]
        for row, has in zip(rows, presents, strict=True)
    ]


class RowScore(NamedTuple):
    """Sums over the present components: log-likelihood (score), NIS, and the number of components."""

    score: Entry = 0.0
    nis: Entry = 0.0
    count: Entry = 0.0

    def add(self, variance: Entry, square: Entry, has: Present) -> "RowScore":
        """Return the sums with one more component; square: the squared innovation divided by its variance."""
        score = times(-0.5, plus(plus(np.log(variance), square), LOG_2PI))
        counts: Entry = 1.0
        if has is not None:
            score, square, counts = (np.where(has, a, 0.0) for a in (score, square, counts))
        return RowScore(plus(self.score, score), plus(self.nis, square), plus(self.count, counts))

    def compute_nis(self) -> Entry:
        """Return the NIS, NaN for keys without a present component."""
        if isinstance(self.count, float):
            return self.nis
        return np.where(np.greater(self.count, 0.0), self.nis, np.nan)


def _select_present(a: Entry, has: Present, otherwise: float) -> Entry:
    if has is None or (isinstance(a, float) and a == otherwise):
        return a
    return np.where(has, a, otherwise)


def _take_log(a: Entry) -> Entry:
    return float(np.log(a)) if isinstance(a, float) else np.log(a)


def _list_pairs(n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(n) for j in range(i + 1)]


def _solve_forward(C: Vector, b: Vector) -> list[Entry]:
    """Solve C x = b for a packed lower triangle without zeros on its diagonal."""
    x: list[Entry] = []
    for i in range(len(b)):
        known = dot(C[packed_index(i, 0) : packed_index(i, i)], x)
        x.append(over(minus(b[i], known), C[packed_index(i, i)]))
    return x


def _solve_backward(C: Vector, b: Vector) -> list[Entry]:
    """Solve C' x = b."""
    n = find_order(len(C))
    x: list[Entry] = [0.0] * n
    for i in reversed(range(n)):
        known = dot([C[packed_index(k, i)] for k in range(i + 1, n)], x[i + 1 :])
        x[i] = over(minus(b[i], known), C[packed_index(i, i)])
    return x
