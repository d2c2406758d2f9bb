"""Sigma points of a Gaussian and the moments of a function of them: unscented and cubature rules.

The points are m, m + c L_i and m - c L_i, L_i being the columns of the covariance's factor. A function is split into a
line and bends away from it: with f0, f+ and f- its values,

    b_i = (f+ + f-) / 2 - f0             the bend along column i
    mean = f0 + sum b_i / c^2
    a_i = (f+ - f-) / (2 c)              the slope along column i: the covariance with x is L a'
    covariance = sum a_i a_i' + sum e_i e_i'
    e_i = b_i / c - t sum_k b_k / c

which is the weighted sum over the points, written without its weights. With alpha^2 kappa + beta n >= 0 it is a sum of
squares, so positive semidefinite whatever the function is, also where the centre's weight is negative or, with a
small alpha, a million times the others. Otherwise a square is subtracted, and may be too large.

References: Julier and Uhlmann (2004), section III; Wan and van der Merwe (2000); cubature points: Arasaratnam and
Haykin (2009); the part that a line leaves: Lefebvre, Bruyninckx and De Schutter (2002).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kalman.linalg.entries import Entry, Vector, dot, minus, plus, times
from kalman.linalg.packing import packed_index


class PointRule(NamedTuple):
    """The points and their weights.

    c       distance of the points from the mean, in standard deviations
    centre  whether the mean itself is a point
    bend    t above
    excess  the covariance is less by excess * d d', d = sum b_i / c^2; 0 where it is a sum of squares
    """

    n: int
    c: float
    centre: bool
    bend: float
    excess: float

    @property
    def scale(self) -> float:
        """Factor of slopes and bends: 1 / (2 c)."""
        return 0.5 / self.c

    @property
    def points(self) -> int:
        """Number of points."""
        return 2 * self.n + self.centre


def build_cubature_rule(n: int) -> PointRule:
    """Return the third-degree spherical-radial rule: 2 n points of one weight."""
    return PointRule(n, math.sqrt(n), False, 1.0 / n, 0.0)


def build_unscented_rule(n: int, alpha: float, beta: float, kappa: float) -> PointRule:
    """Return the scaled unscented rule, lambda = alpha^2 (n + kappa) - n: 2 n + 1 points."""
    c = alpha * math.sqrt(n + kappa)
    excess = alpha * alpha - beta
    kept = 1.0 - n * excess / (c * c)  # coefficient of the square of the common bend
    if kept < 0.0:
        return PointRule(n, c, True, 0.0, excess)
    return PointRule(n, c, True, (1.0 - math.sqrt(kept)) / n, 0.0)


def draw_points(rule: PointRule, m: Vector, L: Vector) -> list[list[Entry]]:
    """Return each state's entries in all points: the centre, points along the columns, points against them."""
    result: list[list[Entry]] = []
    for i in range(rule.n):
        out = [times(rule.c, L[packed_index(i, k)]) if k <= i else 0.0 for k in range(rule.n)]
        centre = [m[i]] if rule.centre else []
        result.append([*centre, *[plus(m[i], a) for a in out], *[minus(m[i], a) for a in out]])
    return result


class Regressed(NamedTuple):
    """The moments of a function of r rows of a Gaussian of n states.

    mean (r); slopes 2 c a_i and bends 2 c e_i (r x n each), which saves a multiplication; and the shift d
    of the mean (r), for `excess`
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
