"""Batch EM: the sufficient statistics of rows under a mixture, and the mixture of the M step.

The statistics are the sums of r, r d and r d d', with r the responsibility and d the distance from the component's
current mean. They are additive over keys and buckets, and nothing cancels if the means are far from zero.

References: Dempster, Laird and Rubin (1977); Bishop (2006), section 9.3; Ghahramani and Jordan (1994) for missing
components; Gauvain and Lee (1994) for the prior of a key-specific mixture.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from kalman.filters.update import mask_present
from kalman.linalg.entries import minus, plus, times
from kalman.linalg.packing import packed_index
from kalman.mixtures.building import Request, split
from kalman.mixtures.components import Components, bound_mixture, judge
from kalman.run import Integers, SortedRows
from kalman.types import Array


class MixtureSums(NamedTuple):
    """Sums over rows, with a last axis (K,) for K keys, or without this axis for all keys together.

    log_likelihood: sum of log-likelihoods; rows: number of rows; weights: (k,) sums of r
    means: (k * n,) sums of r d; spreads: (k * p,) sums of r (d d' + spread)
    """

    log_likelihood: Any
    rows: Any
    weights: Array
    means: Array
    spreads: Array


def select_usable(asked: Request, rows: SortedRows) -> SortedRows:
    """Return the usable rows, which have a measurement within the family's support."""
    y = rows.y
    good = ~np.isnan(y).all(axis=0) & ~np.isinf(y).any(axis=0) & ~asked.family.outside(y)
    if good.all():
        return rows
    kept = np.flatnonzero(good)
    return SortedRows(rows.key[kept], rows.time[kept], y[:, kept], rows.u[:, kept])


def sum_rows(asked: Request, theta: Array, rows: SortedRows, keys: int) -> MixtureSums:
    """Return the sums over each key's usable rows; theta: components, shared (c,) or key-specific (c, keys).

    Rows with a log-likelihood that is not finite are left out.
    """
    entries: Sequence[Any] = theta.tolist() if theta.ndim == 1 else list(theta[:, rows.key])
    mixture = split(asked, entries)
    y = list(rows.y)
    with np.errstate(all="ignore"):
        judged = judge(asked.family, mixture, y, mask_present(rows.y))
        scores = np.asarray(judged.log_likelihood, float)
        good = np.isfinite(scores)
        total = _build_key_sum(rows.key, keys)
        weights: list[Array] = []
        means: list[Array] = []
        spreads: list[Array] = []
        for mean, spread, r, seen in zip(
            mixture.means, mixture.spreads, judged.responsibilities, judged.seen, strict=True
        ):
            r = np.where(good, r, 0.0)
            away = [np.where(good, minus(a, b), 0.0) for a, b in zip(seen.value, mean, strict=True)]
            weights.append(total(r))
            means += [total(times(r, a)) for a in away]
            for i in range(len(away) if spread else 0):
                for j in range(i + 1):
                    square = plus(times(away[i], away[j]), seen.spread[packed_index(i, j)])
                    spreads.append(total(times(r, np.where(good, square, 0.0))))
    return MixtureSums(
        total(np.where(good, scores, 0.0)),
        total(good.astype(float)),
        np.array(weights),
        np.array(means),
        np.array(spreads).reshape(len(spreads), keys),
    )


def pool_sums(one: MixtureSums) -> MixtureSums:
    """Return the sums over all keys."""
    return MixtureSums(*(np.asarray(a).sum(axis=-1) for a in one))


def maximise_components(asked: Request, theta: Array, found: MixtureSums, least: Sequence[float]) -> Array:
    """Return the components (c,) or (c, K) after one M step from theta; fixed parameters are unchanged."""
    mixture, m = split(asked, list(theta)), asked.n
    p = asked.family.spreads(asked.m)
    learns_means, learns_spreads = asked.family.mean in asked.learn, asked.family.spread in asked.learn
    weights, means, spreads = mixture
    for k in range(asked.count):
        own = found.weights[k]
        some = np.greater(own, 0.0)
        divisor = np.where(some, own, 1.0)
        moves: list[Any] = [0.0] * m
        if "weights" in asked.learn:
            weights[k] = np.where(np.greater(found.rows, 0.0), own / np.maximum(found.rows, 1.0), weights[k])
        if learns_means:
            moves = [np.where(some, a / divisor, 0.0) for a in found.means[k * m : (k + 1) * m]]
            means[k] = [a + b for a, b in zip(means[k], moves, strict=True)]
        if p and learns_spreads:
            pairs = [(i, j) for i in range(m) for j in range(i + 1)]
            squares = found.spreads[k * p : (k + 1) * p]
            spreads[k] = [
                np.where(some, total / divisor - moves[i] * moves[j], before)
                for (i, j), total, before in zip(pairs, squares, spreads[k], strict=True)
            ]
    with np.errstate(all="ignore"):
        kept = bound_mixture(asked.family, mixture, least).flat()
    return np.array([np.broadcast_to(a, theta.shape[1:]) for a in kept], float)


def add_prior_rows(
    asked: Request, theta: Array, found: MixtureSums, prior: Array, strength: float
) -> MixtureSums:
    """Return the sums at theta (c, K) plus `strength` additional rows that have the distribution of `prior` (c,).

    The M step then gives the mode of the posterior under the conjugate prior.
    """
    mixture, before = split(asked, list(theta)), split(asked, prior.tolist())
    weights, means, spreads = (np.empty(np.shape(a)) for a in found[2:])
    m, p = asked.n, asked.family.spreads(asked.m)
    for k in range(asked.count):
        rows: Any = strength * before.weights[k]
        away = [minus(a, b) for a, b in zip(before.means[k], mixture.means[k], strict=True)]
        weights[k] = found.weights[k] + rows
        for i in range(m):
            means[k * m + i] = found.means[k * m + i] + rows * away[i]
            for j in range(i + 1 if p else 0):
                at = packed_index(i, j)
                square = before.spreads[k][at] + away[i] * away[j]
                spreads[k * p + at] = found.spreads[k * p + at] + rows * square
    return MixtureSums(found.log_likelihood, found.rows + strength, weights, means, spreads)


def sort_components(asked: Request, theta: Array) -> Array:
    """Return the components (c,) in ascending order of their means."""
    weights, means, spreads = split(asked, theta.tolist())
    order = sorted(range(asked.count), key=lambda k: cast(list[float], means[k]))
    together = Components([weights[k] for k in order], [means[k] for k in order], [spreads[k] for k in order])
    return np.array(together.flat(), float)


def _build_key_sum(key: Integers, keys: int) -> Callable[[Any], Array]:
    """Return a function that sums values (N,) over the rows of each key and returns sums (keys,)."""
    firsts = np.flatnonzero(np.diff(key, prepend=-1))
    numbers = key[firsts]

    def total(values: Any) -> Array:
        result = np.zeros(keys)
        if len(firsts):
            result[numbers] = np.add.reduceat(np.broadcast_to(values, key.shape), firsts)
        return result

    return total
