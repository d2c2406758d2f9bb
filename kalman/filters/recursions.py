"""The Gaussian recursions on entries: predict, weigh one scalar measurement, update in Joseph's form.

Symbols: m mean (n entries), P covariance (packed lower entries), F transition, Q process noise (packed lower),
c offset, h one row of H, r the noise variance of that row, M = P h, S = h P h' + r, K gain.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.filters.diffuse import Projection, compute_flat_gains, project_measurement
from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, is_zero, minus, over, plus, times
from kalman.linalg.packing import unpack_symmetric
from kalman.models.structure import Transition


def predict(m: Vector, P: Vector, transition: Transition) -> tuple[list[Entry], list[Entry]]:
    """Return mean and covariance after one transition."""
    F, Q, c = transition
    mean = [plus(a, b) for a, b in zip(apply(F, m), c, strict=True)]
    return mean, [plus(a, q) for a, q in zip(congruence(F, P), Q, strict=True)]


def congruence(F: Matrix, P: Vector) -> list[Entry]:
    """Return F P F' (packed lower) of a packed symmetric P."""
    full = unpack_symmetric(P)
    result: list[Entry] = []
    for i, row in enumerate(F):
        half = [dot(row, column) for column in full]  # row i of F P
        result += [dot(F[j], half) for j in range(i + 1)]
    return result


def choose(condition: np.ndarray, yes: Vector, no: Vector) -> list[Entry]:
    """Return the entries of `yes` for the keys where the condition holds, else those of `no`."""
    return [np.where(condition, a, b) for a, b in zip(yes, no, strict=True)]


def joseph(P: Vector, K: Vector, M: Vector, h: Vector, r: Entry) -> list[Entry]:
    """Return (I - K h) P (I - K h)' + r K K', packed lower.

    If h has one nonzero entry, the factor 1 - K_i h_i is formed before it multiplies P. For a measurement far sharper
    than the prior, this factor is a rounding error and enters the result squared; in P - K S K' the error would enter
    once. If h has several nonzero entries, (I - K h) P is computed as P - K M' with M = P h. A combination of states
    may be known well while each state has an enormous variance. M is then small by cancellation, which must not be
    repeated.
    """
    n = len(h)
    full = unpack_symmetric(P)
    support = [i for i in range(n) if not is_zero(h[i])]
    seen = [h[k] for k in support]
    noise = [times(r, k) for k in K]
    alone = {i: minus(1.0, times(K[i], h[i])) for i in support} if len(support) == 1 else {}
    result: list[Entry] = []
    for i in range(n):
        # the part of row i of (I - K h) P that the lower triangle needs
        row: list[Entry] = [0.0] * n
        for j in sorted({*range(i + 1), *support}):
            row[j] = times(alone[i], full[i][j]) if i in alone else minus(full[i][j], times(K[i], M[j]))
        weighed = dot(seen, [row[k] for k in support])
        for j in range(i + 1):
            entry = times(alone[j], row[j]) if j in alone else minus(row[j], times(K[j], weighed))
            result.append(plus(entry, times(K[i], noise[j])))
    return result


class Weighing(NamedTuple):
    """One scalar measurement compared with its prediction.

    v innovation, M = P h, S variance of v, K gain. P includes the finite columns here. For the keys in `diffuse`, S and
    K are those of the diffuse part (F_inf and M_inf / F_inf in Durbin and Koopman's notation).
    diffuse: (K,) bool, keys whose measurement determines a flat coefficient, or None
    seen: the projection of the measurement on the columns, None if the projection is zero
    """

    v: Entry
    M: Vector
    S: Entry
    K: Vector
    diffuse: np.ndarray | None
    seen: Projection | None = None


def weigh(
    m: Vector, P: Vector, A: Matrix | None, h: Vector, r: Entry, y: Entry, apart: bool = True
) -> Weighing:
    """Weigh the measurement y = h x + noise of variance r.

    apart: whether barely determined directions may stay columns beside the covariance

    References: Durbin and Koopman (2012), section 6.4 (univariate treatment), 5.2 (exact diffuse start).
    """
    M = apply(unpack_symmetric(P), h)
    S = plus(dot(h, M), r)
    v = minus(y, dot(h, m))
    if A is None or all(is_zero(a) for a in h):
        return Weighing(v, M, S, [over(a, S) for a in M], None)
    given = project_measurement(P, A, h, M, S, apart)
    M = [plus(a, dot(row, given.beta)) for a, row in zip(M, given.finite, strict=True)]
    S = np.where(given.apart, plus(given.S, dot(given.beta, given.beta)), S)
    diffuse = given.undetermined
    gain = [
        np.where(diffuse, a, over(b, S))
        for a, b in zip(compute_flat_gains(given, given.flat), M, strict=True)
    ]
    return Weighing(v, M, np.where(diffuse, given.F_inf, S), gain, diffuse, given)


class Decorrelated(NamedTuple):
    """Measurements with independent noise: z = L^-1 y, G = L^-1 H, variances d, with R = L diag(d) L'."""

    L: Matrix
    d: Vector
    G: Matrix
    z: Vector


def decorrelate(H: Matrix, R: Vector, y: Vector, observed: Sequence[np.ndarray | None]) -> Decorrelated:
    """Turn measurements with correlated noise into independent scalar measurements; any components may be missing.

    observed[i]: (K,) bool, keys with component i; None means all keys. A missing component is first removed from R, so
    that its noise does not affect the other components.
    """
    m = len(H)
    full = unpack_symmetric(R)
    if all(is_zero(full[i][j]) for i in range(m) for j in range(i)):
        identity = [[1.0 if i == j else 0.0 for j in range(m)] for i in range(m)]
        return Decorrelated(identity, [full[i][i] for i in range(m)], H, y)
    L: list[list[Entry]] = [[1.0 if i == j else 0.0 for j in range(m)] for i in range(m)]
    d: list[Entry] = []
    G: list[list[Entry]] = []
    z: list[Entry] = []
    for i in range(m):
        own, present = full[i][i], observed[i]
        row: list[Entry] = list(H[i])
        value = y[i]
        if present is not None:
            own, value = np.where(present, own, 1.0), np.where(present, value, 0.0)
        for j in range(i):
            noise = _mask_pair(full[i][j], observed[i], observed[j])
            for k in range(j):
                noise = minus(noise, times(times(L[i][k], d[k]), L[j][k]))
            L[i][j] = _divide_or_zero(noise, d[j])
            own = minus(own, times(times(L[i][j], L[i][j]), d[j]))
            value = minus(value, times(L[i][j], z[j]))
            row = [minus(a, times(L[i][j], b)) for a, b in zip(row, G[j], strict=True)]
        d.append(own)
        G.append(row)
        z.append(value)
    return Decorrelated(L, d, G, z)


def _mask_pair(a: Entry, one: np.ndarray | None, other: np.ndarray | None) -> Entry:
    """Return a for the keys with both components, else 0."""
    for present in (one, other):
        if present is not None and not is_zero(a):
            a = np.where(present, a, 0.0)
    return a


def _divide_or_zero(a: Entry, b: Entry) -> Entry:
    """Return a / b, or 0 where a component without noise gives 0 / 0."""
    if is_zero(a):
        return 0.0
    if isinstance(a, float) and isinstance(b, float):
        return a / b if b > 0.0 else 0.0
    return np.where(np.greater(b, 0.0), a / b, 0.0)
