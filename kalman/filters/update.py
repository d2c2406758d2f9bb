"""The measurement update of a linear Gaussian state, one scalar after another."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.filters.diffuse import determine
from kalman.filters.recursions import Decorrelated, Weighing, decorrelate, joseph, weigh
from kalman.linalg.entries import Entry, Matrix, Vector, over, plus, times
from kalman.types import Array

LOG_2PI = math.log(2.0 * math.pi)

Present = np.ndarray | None
"""(K,) bool: which keys have a component; None when all have it."""


class Scalar(NamedTuple):
    """One scalar update: the state before it (m, P, A), its weighing, and the keys that have the component."""

    m: Vector
    P: Vector
    A: Matrix | None
    weighing: Weighing
    present: Present


class Updated(NamedTuple):
    """The state after the update, log-likelihood and NIS of the row (entries), and the scalar updates."""

    m: Vector
    P: Vector
    A: Matrix | None
    log_likelihood: Entry
    nis: Entry
    noise: Decorrelated
    scalars: list[Scalar]


def update(
    m: Vector, P: Vector, A: Matrix | None, H: Matrix, R: Vector, y: Vector, presents: Sequence[Present]
) -> Updated:
    """Return the state given y = H x + v, v ~ N(0, R), for the components that are present in each key.

    A diffuse component determines a state and predicts nothing: its log-likelihood is
    -(log 2 pi + log F_inf) / 2 and it has no NIS. A row without a measurement has log-likelihood 0
    and NIS NaN.

    References: Durbin and Koopman (2012), section 6.4; Joseph's form: Bucy and Joseph (1968).
    """
    noise = decorrelate(H, R, y, presents)
    scalars: list[Scalar] = []
    log_likelihood: Entry = 0.0
    nis: Entry = 0.0
    judged: Entry = 0.0  # the number of components that NIS is made of
    for h, r, z, has in zip(noise.G, noise.d, noise.z, presents, strict=True):
        weighing = _masked(weigh(m, P, A, h, r, z), has)
        scalars.append(Scalar(m, P, A, weighing, has))
        v, M, S, K, diffuse = weighing
        square = over(times(v, v), S)
        if diffuse is not None:
            square = np.where(diffuse, 0.0, square)
        score = -0.5 * (np.log(S) + square + LOG_2PI)
        counts: Entry = 1.0 if diffuse is None else np.where(diffuse, 0.0, 1.0)
        if has is not None:
            score, square, counts = (np.where(has, a, 0.0) for a in (score, square, counts))
        log_likelihood, nis, judged = plus(log_likelihood, score), plus(nis, square), plus(judged, counts)
        m = [plus(a, times(k, v)) for a, k in zip(m, K, strict=True)]
        P = joseph(P, K, M, h, r)
        if A is not None and diffuse is not None:
            A = determine(A, h, diffuse)
    if not isinstance(judged, float):
        nis = np.where(judged > 0.0, nis, np.nan)
    return Updated(m, P, A, log_likelihood, nis, noise, scalars)


def presence(y: Array) -> Sequence[Present]:
    """Return for each component of y (m, K) which keys have it, None for each when none is missing."""
    missing = np.isnan(y)
    return list(~missing) if missing.any() else [None] * len(y)


def _masked(weighing: Weighing, has: Present) -> Weighing:
    """Return a weighing that leaves keys without the component as they are."""
    if has is None:
        return weighing
    v, M, S, K, diffuse = weighing
    gain = [np.where(has, k, 0.0) for k in K]
    return Weighing(np.where(has, v, 0.0), M, S, gain, None if diffuse is None else diffuse & has)
