"""Sigma points of a Gaussian and the moments of a function of them: unscented and cubature rules.

The points are m, m + c L_i and m - c L_i with L_i the columns of the covariance's factor. A function is split into a
linear part and its bends, the deviations from the linear part. With f0, f+ and f- the function's values at the points,

    b_i = (f+ + f-) / 2 - f0             the bend along column i
    mean = f0 + sum b_i / c^2
    a_i = (f+ - f-) / (2 c)              the slope along column i: the covariance with x is L a'
    covariance = sum a_i a_i' + sum e_i e_i'
    e_i = b_i / c - t sum_k b_k / c

The covariance equals the weighted sum over the points, but is written without weights. With alpha^2 kappa + beta n >= 0
it is a sum of squares and so positive semidefinite for any function, even if the weight of the centre is negative or,
with a small alpha, a million times the other weights. Otherwise a square is subtracted, which may be too large.

References: Julier and Uhlmann (2004), section III; Wan and van der Merwe (2000); cubature points: Arasaratnam and
Haykin (2009); deviations from the linear part: Lefebvre, Bruyninckx and De Schutter (2002).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kalman.linalg.entries import Entry, Vector, dot, minus, plus, times
from kalman.linalg.packing import packed_index


class PointRule(NamedTuple):
    """The points and their weights.

    n       number of states
    c       distance of the points from the mean, in standard deviations
    centre  whether the mean is one of the points
    bend    the t in the formula for e_i (see the module)
    excess  factor of the d d', d = sum b_i / c^2, that is subtracted from the covariance; 0 if nothing is subtracted
    """

    n: int
    c: float
    centre: bool
    bend: float
    excess: float

    @property
    def scale(self) -> float:
        """The factor 1 / (2 c) of the slopes and bends in `Regressed`."""
        return 0.5 / self.c

    @property
    def points(self) -> int:
        """Number of points."""
        return 2 * self.n + self.centre


def build_cubature_rule(n: int) -> PointRule:
    """Return the third-degree spherical-radial rule, which has 2 n points with equal weights."""
    return PointRule(n, math.sqrt(n), False, 1.0 / n, 0.0)


def build_unscented_rule(n: int, alpha: float, beta: float, kappa: float) -> PointRule:
    """Return the scaled unscented rule with lambda = alpha^2 (n + kappa) - n, which has 2 n + 1 points."""
    c = alpha * math.sqrt(n + kappa)
    excess = alpha * alpha - beta
    kept = 1.0 - n * excess / (c * c)  # coefficient of the square of the common bend
    if kept < 0.0:
        return PointRule(n, c, True, 0.0, excess)
    return PointRule(n, c, True, (1.0 - math.sqrt(kept)) / n, 0.0)


def draw_points(rule: PointRule, m: Vector, L: Vector) -> list[list[Entry]]:
    """Return each state's values at all points, in the order m (if it is a point), all m + c L_i, all m - c L_i."""
    result: list[list[Entry]] = []
    for i in range(rule.n):
        out = [times(rule.c, L[packed_index(i, k)]) if k <= i else 0.0 for k in range(rule.n)]
        centre = [m[i]] if rule.centre else []
        result.append([*centre, *[plus(m[i], a) for a in out], *[minus(m[i], a) for a in out]])
    return result


class Regressed(NamedTuple):
    """The moments of a function with r rows of values, for a Gaussian of n states.

    mean: (r); slopes, bends: (r x n) 2 c a_i and 2 c e_i, whose factor 2 c saves a multiplication; shift: (r) shift d
    of the mean, for `excess`
    """

    mean: list[Entry]
    slopes: list[list[Entry]]
    bends: list[list[Entry]]
    shift: list[Entry]


def regress(rule: PointRule, values: Sequence[Sequence[Entry]]) -> Regressed:
    """Return mean, slopes and bends of a function, given its r rows of values at the points."""
    n, ones = rule.n, [1.0] * rule.n
    result = Regressed([], [], [], [])
    for row in values:
        ups, downs = row[rule.centre : rule.centre + n], row[rule.centre + n :]
        bent = [plus(a, b) for a, b in zip(ups, downs, strict=True)]
        if rule.centre:
            twice = plus(row[0], row[0])
            bent = [minus(a, twice) for a in bent]
        summed = dot(ones, bent)
        shift = times(0.5 / (rule.c * rule.c), summed)
        common = times(rule.bend, summed)
        result.mean.append(plus(row[0], shift) if rule.centre else shift)
        result.slopes.append([minus(a, b) for a, b in zip(ups, downs, strict=True)])
        result.bends.append([minus(a, common) for a in bent])
        result.shift.append(shift)
    return result
