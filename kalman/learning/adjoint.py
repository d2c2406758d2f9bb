"""The exact gradient of the log-likelihood: the adjoint of one row of the linear filter.

In the backward pass, a = d log L / d m and the symmetric B = d log L / d P take the place of the state. They correspond
to r and N of the disturbance smoother: a = r and B = (r r' - N) / 2, so that the score of Q is B (Koopman and Shephard
1992; Durbin and Koopman 2012, section 7.3.3). Unlike the smoother's moments, the adjoint form gives the derivatives by
F and the offset without further work, and is exact for diffuse rows, with C = d log L / d P_inf.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.filters.diffuse import compute_finite_covariance
from kalman.filters.diffuse import compute_flat_covariance as diffuse_covariance
from kalman.filters.recursions import choose, congruence
from kalman.filters.update import Scalar, Updated
from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, is_zero, minus, over, plus, times
from kalman.linalg.packing import packed_index, unpack_symmetric
from kalman.models.structure import Transition


class Adjoint(NamedTuple):
    """Derivatives of the log-likelihood of all later rows: a (n), B (packed), C (packed or None).

    B and C are symmetric, with d log L = trace(B dP), so that an entry off the diagonal counts twice.
    """

    a: Vector
    B: Vector
    C: Vector | None


def pull_back_update(
    adjoint: Adjoint, updated: Updated, R: Vector
) -> tuple[Adjoint, list[Entry], list[list[Entry]]]:
    """Return the adjoint before a measurement update, the derivatives by packed R, and the derivatives by H (m x n)."""
    h_bars: list[Vector] = []
    z_bars: list[Entry] = []
    r_bars: list[Entry] = []
    noise = updated.noise
    for scalar, h, r in reversed(list(zip(updated.scalars, noise.G, noise.d, strict=True))):
        adjoint, h_bar, z_bar, r_bar = _pull_back_scalar(adjoint, scalar, h, r)
        h_bars.insert(0, h_bar)
        z_bars.insert(0, z_bar)
        r_bars.insert(0, r_bar)
    m = len(r_bars)
    full = unpack_symmetric(R)
    if all(is_zero(full[i][j]) for i in range(m) for j in range(i)):
        by_R = [r_bars[i] if i == j else 0.0 for i in range(m) for j in range(i + 1)]
        return adjoint, by_R, [list(h_bar) for h_bar in h_bars]
    # G = L^-1 H, so that the derivative by H is L^-T times the derivative by G
    columns = [_solve_transposed(noise.L, list(column)) for column in zip(*h_bars, strict=True)]
    by_H = [list(row) for row in zip(*columns, strict=True)]
    by_R = _pull_back_decorrelation(updated, h_bars, z_bars, r_bars)
    return adjoint, by_R, by_H


def _pull_back_scalar(
    adjoint: Adjoint, scalar: Scalar, h: Vector, r: Entry
) -> tuple[Adjoint, list[Entry], Entry, Entry]:
    """Return the adjoint before a scalar update, and the derivatives by h, by the measurement, and by r."""
    a, B, C = adjoint
    m, P, A, (v, M, S, K, diffuse, _), has = scalar
    P = P if A is None else compute_finite_covariance(P, A)
    e = dot(K, a)
    g = apply(unpack_symmetric(B), K)
    s = dot(K, g)
    u = over(v, S)
    # proper: log L = -(log S + v^2 / S) / 2, m+ = m + M v / S, P+ = P - M M' / S
    v_bar, r_bar = e - u, s - e * u - 0.5 * (1.0 / S - u * u)
    pull = [times(b, u) for b in a]
    if diffuse is not None:
        # diffuse: log L = -log F_inf / 2, m+ = m + K v, P+ = (I - K h) P (I - K h)' + r K K'
        v_bar, r_bar = np.where(diffuse, e, v_bar), np.where(diffuse, s, r_bar)
        pull = [np.where(diffuse, 0.0, b) for b in pull]
    M_bar = [plus(minus(p, 2.0 * b), times(r_bar, c)) for p, b, c in zip(pull, g, h, strict=True)]
    if has is not None:
        v_bar, r_bar = np.where(has, v_bar, 0.0), np.where(has, r_bar, 0.0)
        M_bar = [np.where(has, b, 0.0) for b in M_bar]
    h_bar = [
        plus(minus(times(r_bar, c), times(b, v_bar)), d)
        for b, c, d in zip(m, M, apply(unpack_symmetric(P), M_bar), strict=True)
    ]
    a_before = [minus(b, times(c, v_bar)) for b, c in zip(a, h, strict=True)]
    B_before = _add_outer(B, M_bar, h)
    if C is not None and A is not None and diffuse is not None:
        P_inf = unpack_symmetric(diffuse_covariance(A))
        M_inf = apply(P_inf, h)
        CK = apply(unpack_symmetric(C), K)
        # the gain K = M_inf / F_inf depends on P_inf; L M - r K with L = I - K h is M - K (h M + r)
        proper = plus(dot(h, M), r)
        remainder = [minus(b, times(k, proper)) for b, k in zip(M, K, strict=True)]
        K_bar = [a_i * v - 2.0 * b for a_i, b in zip(a, apply(unpack_symmetric(B), remainder), strict=True)]
        f_bar = dot(K, CK) - 0.5 / S - dot(K, K_bar) / S
        N_bar = [
            np.where(diffuse, k / S - 2.0 * b + times(f_bar, c), 0.0)
            for k, b, c in zip(K_bar, CK, h, strict=True)
        ]
        f_bar = np.where(diffuse, f_bar, 0.0)
        extra = apply(P_inf, N_bar)
        h_bar = [plus(b, plus(times(f_bar, c), d)) for b, c, d in zip(h_bar, M_inf, extra, strict=True)]
        C = _add_outer(C, N_bar, h)
    return Adjoint(a_before, B_before, C), h_bar, v_bar, r_bar


def _pull_back_decorrelation(
    updated: Updated, h_bars: Sequence[Vector], z_bars: Vector, r_bars: Vector
) -> list[Entry]:
    """Return the derivative by each packed entry of R, through R = L diag(d) L', z = L^-1 y and G = L^-1 H.

    With dL = L A, A strictly lower triangular: L^-1 dR L^-T = A d + dd + d A', and dz = -A z, dG = -A G.
    """
    L, d, G, z = updated.noise
    m = len(d)
    X: list[list[Entry]] = [[0.0] * m for _ in range(m)]
    for i in range(m):
        X[i][i] = r_bars[i]
        for j in range(i):
            slope = minus(0.0, plus(times(z_bars[i], z[j]), dot(h_bars[i], G[j])))
            has = updated.scalars[j].present  # a missing component was removed from R
            determined = np.greater(d[j], 0.0) if has is None else np.greater(d[j], 0.0) & has
            X[i][j] = X[j][i] = np.where(determined, 0.5 * slope / d[j], 0.0)
    columns = [_solve_transposed(L, [X[i][j] for i in range(m)]) for j in range(m)]  # L^-T X
    rows = [_solve_transposed(L, [columns[j][i] for j in range(m)]) for i in range(m)]  # L^-T X L^-1
    return [rows[i][j] if i == j else plus(rows[i][j], rows[j][i]) for i in range(m) for j in range(i + 1)]


def _solve_transposed(L: Matrix, b: Vector) -> list[Entry]:
    """Return x with L' x = b for a unit lower triangular L."""
    m = len(b)
    x = list(b)
    for i in reversed(range(m)):
        for k in range(i + 1, m):
            x[i] = minus(x[i], times(L[k][i], x[k]))
    return x


def pull_back_prediction(adjoint: Adjoint, transition: Transition, predicted: np.ndarray | None) -> Adjoint:
    """Return the adjoint before a transition; predicted: (K,) bool, or None if every key was predicted."""
    backwards = [list(column) for column in zip(*transition.F, strict=True)]
    a = apply(backwards, adjoint.a)
    B = congruence(backwards, adjoint.B)
    C = None if adjoint.C is None else congruence(backwards, adjoint.C)
    if predicted is not None:
        a, B = choose(predicted, a, adjoint.a), choose(predicted, B, adjoint.B)
        C = None if C is None or adjoint.C is None else choose(predicted, C, adjoint.C)
    return Adjoint(a, B, C)


def differentiate_transition(
    adjoint: Adjoint, m: Vector, P: Vector, A_inf: Matrix | None, F: Matrix
) -> tuple[list[list[Entry]], Vector, Vector]:
    """Return the derivatives by F (n x n), packed Q and c of a transition from m, P, P_inf."""
    a, B, C = adjoint
    n = len(m)
    P = P if A_inf is None else compute_finite_covariance(P, A_inf)
    F_bar = [[times(a[i], m[j]) for j in range(n)] for i in range(n)]
    for weight, start in ((B, P), (C, None if A_inf is None else diffuse_covariance(A_inf))):
        if weight is None or start is None:
            continue
        FP = [apply(unpack_symmetric(start), row) for row in F]
        full = unpack_symmetric(weight)
        for i in range(n):
            for j in range(n):
                F_bar[i][j] = plus(F_bar[i][j], 2.0 * dot(full[i], [row[j] for row in FP]))
    Q_bar = [
        B[packed_index(i, j)] if i == j else 2.0 * B[packed_index(i, j)]
        for i in range(n)
        for j in range(i + 1)
    ]
    return F_bar, Q_bar, a


def differentiate_along(slope: tuple[list[list[Entry]], Vector, Vector], tangent: Transition) -> Entry:
    """Return the derivative of the log-likelihood along a change of the transition."""
    F_bar, Q_bar, c_bar = slope
    total = plus(dot(tangent.Q, Q_bar), dot(tangent.c, c_bar))
    for row, bars in zip(tangent.F, F_bar, strict=True):
        total = plus(total, dot(row, bars))
    return total


def _add_outer(B: Vector, x: Vector, y: Vector) -> list[Entry]:
    """Return B + (x y' + y x') / 2, packed."""
    n = len(x)
    return [
        plus(B[packed_index(i, j)], 0.5 * plus(times(x[i], y[j]), times(y[i], x[j])))
        for i in range(n)
        for j in range(i + 1)
    ]
