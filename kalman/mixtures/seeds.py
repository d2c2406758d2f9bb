"""Starts of batch EM from clusters of a sample of the rows, with a fixed random seed for each start.

Reference: Arthur and Vassilvitskii (2007), k-means++.
"""

import numpy as np

from kalman.linalg.packing import pack_lower
from kalman.mixtures.building import Request
from kalman.mixtures.components import Components
from kalman.types import Array

ROUNDS = 5
"""Number of k-means steps after the choice of the centres."""


def draw_seeds(asked: Request, y: Array, starts: int) -> Array:
    """Return `starts` mixtures (starts, c) for a sample y (m, N) of usable rows, N at least 1.

    A missing measurement is replaced by the mean of the same measurement in the other rows.
    """
    filled, variance = _fill_missing(asked.family.encode_measurements(y))
    scale = np.sqrt(filled) if asked.family.mean == "rates" else filled
    deviation = scale.std(axis=1, keepdims=True)
    points = ((scale - scale.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)).T
    return np.array([_build_seed(asked, filled, variance, points, start) for start in range(starts)])


def _build_seed(asked: Request, y: Array, variance: Array, points: Array, start: int) -> list[float]:
    labels = _assign_clusters(points, asked.count, np.random.default_rng(start))
    overall = y.mean(axis=1)
    weights: list[float] = []
    means: list[list[float]] = []
    within = np.diag(variance) * 1e-2
    for k in range(asked.count):
        here = y[:, labels == k]
        number = here.shape[1]
        # an additional row at the overall mean, so that no cluster is empty and no probability is 0 or 1
        means.append(((here.sum(axis=1) + overall) / (number + 1.0)).tolist())
        weights.append((number + 1.0) / (y.shape[1] + asked.count))
        away = here - np.array(means[k])[:, None]
        within = within + away @ away.T / y.shape[1]
    spread = [float(a) for a in pack_lower(within.tolist())] if asked.family.spread else []
    flat = Components(list(weights), [list(a) for a in means], [list(spread) for _ in means]).flat()
    return [float(a) for a in flat]


def _assign_clusters(points: Array, count: int, rng: np.random.Generator) -> Array:
    """Return the cluster number (below `count`) of each of the points (N, m) by k-means++ and a few k-means steps."""
    centres = [points[rng.integers(len(points))]]
    while len(centres) < count:
        away = np.min([((points - c) ** 2).sum(axis=1) for c in centres], axis=0)
        total = away.sum()
        chosen = rng.choice(len(points), p=away / total) if total > 0 else rng.integers(len(points))
        centres.append(points[chosen])
    labels = np.zeros(len(points), int)
    for _ in range(ROUNDS):
        labels = np.argmin([((points - c) ** 2).sum(axis=1) for c in centres], axis=0)
        centres = [
            points[labels == k].mean(axis=0) if (labels == k).any() else c for k, c in enumerate(centres)
        ]
    return labels


def _fill_missing(y: Array) -> tuple[Array, Array]:
    """Return y with missing values replaced by means, and each measurement's variance, which is above zero."""
    there = ~np.isnan(y)
    number = np.maximum(there.sum(axis=1), 1)
    mean = np.where(there, y, 0.0).sum(axis=1) / number
    filled = np.where(there, y, mean[:, None])
    variance = ((filled - mean[:, None]) ** 2).sum(axis=1) / number
    return filled, np.where(variance > 0.0, variance, np.maximum(1e-12 * mean * mean, 1e-12))
