"""The previous state given the next state: x = m + G (x' - m') + an independent rest.

G = P F' P'^-1 is the gain from the next state, with covariance P' = F P F' + Q, back to the previous state, with
covariance P. The covariance of the rest is P - G P' G'. This difference loses all digits if P is enormous in a
direction that the next state determines well. Joseph's form, (I - G F) P (I - G F)' + G Q G', is a sum of squares, and
an error in G enters squared.

References: Rauch, Tung and Striebel (1965); Bucy and Joseph (1968); Park and Kailath (1995), with square roots.
"""

from typing import NamedTuple

from kalman.filters.recursions import congruence
from kalman.linalg import cholesky
from kalman.linalg.entries import Entry, Matrix, Vector, dot, minus, plus, times
from kalman.linalg.ldl import factor, solve
from kalman.linalg.packing import unpack_symmetric


class Retrodiction(NamedTuple):
    """The gain G (n x n) from the next state back to the previous state, and the packed covariance of the rest."""

    G: Matrix
    rest: Vector


def retrodict(P: Vector, F: Matrix, Q: Vector, predicted: Vector) -> Retrodiction:
    """Return the retrodiction over x' = F x + noise of covariance Q; P and predicted = F P F' + Q are packed."""
    G = compute_back_gain(F, P, predicted)
    return Retrodiction(G, compute_covariance_back(P, F, G, Q))


def compute_back_gain(F: Matrix, P: Vector, predicted: Vector) -> list[list[Entry]]:
    """Return G = P F' predicted^-1."""
    return compute_gain(predicted, [[dot(row, to) for to in F] for row in unpack_symmetric(P)])


def compute_covariance_back(P: Vector, F: Matrix, G: Matrix, spread: Vector) -> list[Entry]:
    """Return (I - G F) P (I - G F)' + G spread G'.

    With spread = Q the result is the covariance of the rest. With spread = Q plus the covariance of the next state, the
    result is the covariance of the previous state.
    """
    columns = list(zip(*F, strict=True))
    left = [
        [minus(1.0 if i == j else 0.0, dot(row, column)) for j, column in enumerate(columns)]
        for i, row in enumerate(G)
    ]
    return [plus(a, b) for a, b in zip(congruence(left, P), congruence(G, spread), strict=True)]


def retrodict_from_root(L: Matrix, moved: Matrix, Q: Vector, predicted: Vector) -> Retrodiction:
    """Return the retrodiction for P = L L' and moved = F L, with Q = predicted - moved moved'."""
    cross = [[dot(row, to) for to in moved] for row in L]
    G = compute_gain(predicted, cross)
    columns = list(zip(*moved, strict=True))
    left = [
        [minus(a, dot(row, column)) for a, column in zip(own, columns, strict=True)]
        for own, row in zip(L, G, strict=True)
    ]
    rest = [plus(a, b) for a, b in zip(cholesky.square(left), congruence(G, Q), strict=True)]
    return Retrodiction(G, rest)


def retrodict_by_rotation(L: Matrix, moved: Matrix, noise: Matrix) -> Retrodiction:
    """Return the retrodiction for P = L L', moved = F L and Q = noise noise', computed from factors only.

    [[moved, noise], [L, 0]] is rotated into [[S, 0], [B, C]]: S is the factor of the predicted covariance, G = B S^-1,
    and C the factor of the rest.
    """
    n = len(L)
    width = len(noise[0])
    rows = [[*a, *b] for a, b in zip(moved, noise, strict=True)] + [[*row, *[0.0] * width] for row in L]
    whole = cholesky.unpack_triangle(cholesky.triangulate_rows(rows))
    S, below = [row[:n] for row in whole[:n]], whole[n:]
    inverse = [cholesky.reciprocal(S[j][j]) for j in range(n)]
    G: list[list[Entry]] = []
    for row in below:
        g: list[Entry] = [0.0] * n
        for j in reversed(range(n)):
            value = row[j]
            for k in range(j + 1, n):
                value = minus(value, times(g[k], S[k][j]))
            g[j] = times(value, inverse[j])
        G.append(g)
    return Retrodiction(G, cholesky.square([row[n:] for row in below]))


def compute_gain(predicted: Vector, cross: Matrix) -> list[list[Entry]]:
    """Return G = cross predicted^-1 (predicted is packed); G is 0 along a direction without variance.

    Every pivot above zero is used. A pivot that is only a rounding error adds an arbitrary part to G along a direction
    in which the next state has no variance; neither the mean nor the rest depends on this part.
    """
    factors = factor(predicted, nothing=0.0)
    return [solve(factors, list(row)) for row in cross]


def carry_covariance_back(back: Retrodiction, covariance: Vector) -> list[Entry]:
    """Return the packed covariance of the previous state, given the packed covariance of the next state."""
    return [plus(a, b) for a, b in zip(back.rest, congruence(back.G, covariance), strict=True)]


def retrodict_mean(m: Vector, predicted: Vector, G: Matrix, mean: Vector) -> list[Entry]:
    """Return the mean m + G (mean - predicted) of the previous state, given the mean of the next state."""
    gap = [minus(a, b) for a, b in zip(mean, predicted, strict=True)]
    return [plus(a, dot(row, gap)) for a, row in zip(m, G, strict=True)]
