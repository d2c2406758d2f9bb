"""The components of a mixture together: responsibilities of a row, predictions, and averages of two mixtures.

Weights, means and covariances are equivalent to the sufficient statistics (sums of r, r y and r y y'), but averages of
them lose no digits to cancellation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kalman.linalg import ldl
from kalman.linalg.entries import Entry, Vector, dot, minus, plus, times
from kalman.mixtures.families import Family, Presents, Seen

LEAST_WEIGHT = 1e-6
"""Least weight of a component, so that it can recover."""


class Components(NamedTuple):
    """k components: weights (k entries), means (k lists of m entries), spreads (k lists of packed or no entries)."""

    weights: list[Entry]
    means: list[list[Entry]]
    spreads: list[list[Entry]]

    def flat(self) -> list[Entry]:
        """Return all entries as one list: weights, means, spreads."""
        return [*self.weights, *(a for one in (*self.means, *self.spreads) for a in one)]


def unpack_components(flat: Sequence[Any], k: int, m: int, p: int) -> Components:
    """Return k components, each with m entries of mean and p entries of spread, from the list that `flat` returns."""
    second, third = k, k + k * m
    return Components(
        list(flat[:k]),
        [list(flat[second + i * m : second + (i + 1) * m]) for i in range(k)],
        [list(flat[third + i * p : third + (i + 1) * p]) for i in range(k)],
    )


class Judged(NamedTuple):
    """A row under a mixture: log-likelihood, responsibilities (k entries, sum 1), and each component's `Seen`."""

    log_likelihood: Entry
    responsibilities: list[Entry]
    seen: list[Seen]


def judge(family: Family, mixture: Components, y: Vector, presents: Presents) -> Judged:
    """Judge a row under a mixture, with logarithms relative to the largest, which is accurate at any distance."""
    seen = [
        family.seen(mean, spread, y, presents)
        for mean, spread in zip(mixture.means, mixture.spreads, strict=True)
    ]
    logs = [plus(np.log(w), one.log_density) for w, one in zip(mixture.weights, seen, strict=True)]
    top = logs[0]
    for log in logs[1:]:
        top = np.maximum(top, log)
    parts = [np.exp(log - top) for log in logs]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    log_likelihood = plus(top + np.log(total), family.base(y, presents))
    some = find_any_present(presents)
    if some is not None:
        log_likelihood = np.where(some, log_likelihood, 0.0)
    return Judged(log_likelihood, [part / total for part in parts], seen)


def find_any_present(presents: Presents) -> Any:
    """Return a mask of keys with at least one measured component; None if no component is missing."""
    some = presents[0]
    for has in presents[1:]:
        some = None if some is None or has is None else some | has
    return some


def build_row_mixture(judged: Judged) -> Components:
    """Return the mixture of one row alone."""
    return Components(
        judged.responsibilities, [one.value for one in judged.seen], [one.spread for one in judged.seen]
    )


def average_mixtures(a: Components, b: Components, share: Entry) -> Components:
    """Return the mixture with the sufficient statistics (1 - share) s_a + share s_b, from those of a and b."""
    rest = minus(1.0, share)
    weights: list[Entry] = []
    means: list[list[Entry]] = []
    spreads: list[list[Entry]] = []
    for i in range(len(a.weights)):
        came = times(share, b.weights[i])
        weight = plus(times(rest, a.weights[i]), came)
        some = np.greater(weight, 0.0)
        part = np.where(some, np.divide(came, np.where(some, weight, 1.0)), 0.0)
        other = 1.0 - part
        away = [minus(y, x) for x, y in zip(a.means[i], b.means[i], strict=True)]
        weights.append(weight)
        means.append([plus(x, times(part, d)) for x, d in zip(a.means[i], away, strict=True)])
        between = part * other
        spread: list[Entry] = []
        if a.spreads[i]:
            products = _multiply_outer(away)
            for x, y, square in zip(a.spreads[i], b.spreads[i], products, strict=True):
                spread.append(plus(plus(times(other, x), times(part, y)), times(between, square)))
        spreads.append(spread)
    return Components(weights, means, spreads)


def bound_mixture(family: Family, mixture: Components, least: Vector) -> Components:
    """Return the mixture within the bounds that prevent degeneration, with weights that sum to 1."""
    pairs = zip(mixture.means, mixture.spreads, strict=True)
    kept = [family.bounded(mean, spread, least) for mean, spread in pairs]
    weights = [np.maximum(w, LEAST_WEIGHT) for w in mixture.weights]
    total = weights[0]
    for w in weights[1:]:
        total = total + w
    return Components(
        [w / total for w in weights], [mean for mean, _ in kept], [spread for _, spread in kept]
    )


def predict_mean(mixture: Components) -> list[Entry]:
    """Return the mean (m entries) of a row."""
    return [dot(mixture.weights, [one[i] for one in mixture.means]) for i in range(len(mixture.means[0]))]


def predict_moments(family: Family, mixture: Components) -> tuple[list[Entry], list[Entry]]:
    """Return mean (m entries) and packed covariance of a row, both within and between the components."""
    mean = predict_mean(mixture)
    m = len(mean)
    covariance: list[Entry] = [0.0] * (m * (m + 1) // 2)
    for w, centre, spread in zip(*mixture, strict=True):
        within = family.covariance(centre, spread)
        between = _multiply_outer([minus(a, b) for a, b in zip(centre, mean, strict=True)])
        covariance = [
            plus(total, times(w, plus(a, b))) for total, a, b in zip(covariance, within, between, strict=True)
        ]
    return mean, covariance


def nis(family: Family, mixture: Components, y: Vector, presents: Presents) -> Entry:
    """Return the squared distance of a row from the mixture's mean in its covariance; NaN without a measurement.

    Under the true mixture, the distance averages 1 for each present measurement, but is not chi-square.
    """
    some = find_any_present(presents)
    own = family.compute_distance(predict_mean(mixture), y, presents)
    if own is not None:
        return own if some is None else np.where(some, own, np.nan)
    mean, covariance = predict_moments(family, mixture)
    has = [a for a in presents if a is not None]
    L, _, inverse = ldl.factor(covariance, has or None)
    away = [minus(a, b) for a, b in zip(y, mean, strict=True)]
    if has:
        away = [np.where(there, a, 0.0) for there, a in zip(has, away, strict=True)]
    total: Entry = 0.0
    for z, scale in zip(ldl.whiten(L, away), inverse, strict=True):
        total = plus(total, times(times(z, z), scale))
    return total if some is None else np.where(some, total, np.nan)


def _multiply_outer(a: Vector) -> list[Entry]:
    """Return the packed outer product of a vector."""
    return [times(a[i], a[j]) for i in range(len(a)) for j in range(i + 1)]
