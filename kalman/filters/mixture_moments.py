"""Moments and scores of Gaussian mixtures in entry arithmetic; weights are logarithms."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.filters.update import Present
from kalman.linalg.entries import Entry, Vector, is_zero, minus, plus, times
from kalman.linalg.ldl import factor, whiten


class GaussianMoments(NamedTuple):
    """Mean (n entries) and covariance (packed)."""

    m: Vector
    P: Vector


def log_sum_exp(a: Sequence[Entry]) -> Entry:
    """Return log sum_i exp(a_i) without overflow; the result is -inf where all a_i are -inf."""
    top = a[0]
    for other in a[1:]:
        top = np.maximum(top, other)
    top = np.where(np.isfinite(top), top, 0.0)
    total: Entry = 0.0
    for entry in a:
        total = plus(total, np.exp(minus(entry, top)))
    return plus(top, np.log(total))


def normalise_weights(log_weights: Sequence[Entry], floor: float = 0.0) -> list[Entry]:
    """Return the logs of weights that sum to 1 and are at least about `floor`; all are NaN if every weight is zero."""
    total = log_sum_exp(log_weights)
    logs = [minus(a, total) for a in log_weights]
    if floor == 0.0:
        return logs
    raised = [np.maximum(a, float(np.log(floor))) for a in logs]
    total = log_sum_exp(raised)
    return [minus(a, total) for a in raised]


def mix_moments(weights: Sequence[Entry], parts: Sequence[GaussianMoments]) -> GaussianMoments:
    """Return the moments of a mixture: P = sum_i w_i (P_i + (m_i - m)(m_i - m)'). The weights sum to 1.

    The mean is computed relative to the first part's mean, so that equal means have exactly zero spread.

    References: Bar-Shalom, Li and Kirubarajan (2001), equations 1.4.16-9 and 11.6.6-9.
    """
    m = [
        plus(origin, _sum_weighed(weights[1:], [minus(part.m[i], origin) for part in parts[1:]]))
        for i, origin in enumerate(parts[0].m)
    ]
    away = [[minus(a, b) for a, b in zip(part.m, m, strict=True)] for part in parts]
    pairs = [(i, j) for i in range(len(m)) for j in range(i + 1)]
    P = [
        _sum_weighed(
            weights, [plus(part.P[k], times(d[i], d[j])) for part, d in zip(parts, away, strict=True)]
        )
        for k, (i, j) in enumerate(pairs)
    ]
    return GaussianMoments(m, P)


def nis(y: Vector, expected: GaussianMoments, presents: Sequence[Present]) -> Entry:
    """Return (y - m)' P^-1 (y - m) over the present components; NaN for keys without a present component."""
    factors = factor(expected.P, presents)
    v = [
        minus(a, b) if has is None else np.where(has, minus(a, b), 0.0)
        for a, b, has in zip(y, expected.m, presents, strict=True)
    ]
    total: Entry = 0.0
    for z, inverse in zip(whiten(factors.L, v), factors.inverse, strict=True):
        total = plus(total, times(times(z, z), inverse))
    if presents[0] is None:
        return total
    seen = presents[0]
    for has in presents[1:]:
        if has is not None and seen is not None:
            seen = seen | has
    return total if seen is None else np.where(seen, total, np.nan)


def _sum_weighed(weights: Sequence[Entry], values: Sequence[Entry]) -> Entry:
    total: Entry = 0.0
    for w, a in zip(weights, values, strict=True):
        if not is_zero(w):
            total = plus(total, times(w, a))
    return total
