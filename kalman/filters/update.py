"""The measurement update of a linear Gaussian state, one scalar after another."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kalman.filters.diffuse import condition_columns, fold
from kalman.filters.recursions import Decorrelated, Weighing, decorrelate, joseph, weigh
from kalman.linalg.entries import Entry, Matrix, Vector, over, plus, times
from kalman.types import Array

LOG_2PI = math.log(2.0 * math.pi)

Present = np.ndarray | None
"""Mask (K,) of the keys whose row has a component; None means all keys."""


class Scalar(NamedTuple):
    """One scalar update: the state m, P, A before the update, the weighing, and a mask of keys with the component."""

    m: Vector
    P: Vector
    A: Matrix | None
    weighing: Weighing
    present: Present


class Updated(NamedTuple):
    """The state m, P, A after the update, log-likelihood and NIS of the row, and the scalar updates, all in entries."""

    m: Vector
    P: Vector
    A: Matrix | None
    log_likelihood: Entry
    nis: Entry
    noise: Decorrelated
    scalars: list[Scalar]


def update(
    m: Vector,
    P: Vector,
    A: Matrix | None,
    H: Matrix,
    R: Vector,
    y: Vector,
    presents: Sequence[Present],
    apart: bool = True,
) -> Updated:
    """Return the state given y = H x + v, v ~ N(0, R), for the components that are present in each key.

    A diffuse component has no prediction, because it determines a state that was undetermined. Its log-likelihood is
    -(log 2 pi + log F_inf) / 2, and it does not enter the NIS. A row without a measurement has log-likelihood 0 and NIS
    NaN.

    References: Durbin and Koopman (2012), section 6.4; Joseph's form: Bucy and Joseph (1968).
    """
    noise = decorrelate(H, R, y, presents)
    scalars: list[Scalar] = []
    log_likelihood: Entry = 0.0
    nis: Entry = 0.0
    judged: Entry = 0.0  # the number of components in the NIS
    for h, r, z, has in zip(noise.G, noise.d, noise.z, presents, strict=True):
        weighing = _mask_weighing(weigh(m, P, A, h, r, z, apart), has)
        scalars.append(Scalar(m, P, A, weighing, has))
        v, _, S, K, diffuse, _ = weighing
        square = over(times(v, v), S)
        if diffuse is not None:
            square = np.where(diffuse, 0.0, square)
        score = -0.5 * (np.log(S) + square + LOG_2PI)
        counts: Entry = 1.0 if diffuse is None else np.where(diffuse, 0.0, 1.0)
        if has is not None:
            score, square, counts = (np.where(has, a, 0.0) for a in (score, square, counts))
        log_likelihood, nis, judged = plus(log_likelihood, score), plus(nis, square), plus(judged, counts)
        m = [plus(a, times(k, v)) for a, k in zip(m, K, strict=True)]
        P, A = apply_scalar(P, A, weighing, h, r, has)
    P, A = settle_columns(P, A, [scalar.weighing for scalar in scalars])
    if not isinstance(judged, float):
        nis = np.where(judged > 0.0, nis, np.nan)
    return Updated(m, P, A, log_likelihood, nis, noise, scalars)


def apply_scalar(
    P: Vector, A: Matrix | None, weighing: Weighing, h: Vector, r: Entry, has: Present
) -> tuple[list[Entry], Matrix | None]:
    """Return covariance and columns after one scalar measurement; the gain is zero for keys without the component."""
    _, M, _, K, _, given = weighing
    if A is None or given is None:
        return joseph(P, K, M, h, r), A
    own = [times(a, given.precision) for a in given.M]
    own = own if has is None else [np.where(has, a, 0.0) for a in own]
    gain = [np.where(given.apart, a, b) for a, b in zip(own, K, strict=True)]
    return joseph(P, gain, given.M, h, r), condition_columns(given, A, given.M, has)


def settle_columns(
    P: Vector, A: Matrix | None, weighings: Sequence[Weighing]
) -> tuple[Vector, Matrix | None]:
    """Return covariance and columns after a row; finite columns of the keys in `find_trusted` are folded into P."""
    ready = find_trusted(weighings)
    return (P, A) if A is None or ready is None else fold(P, A, ready)


def find_trusted(weighings: Sequence[Weighing]) -> np.ndarray | None:
    """Return a mask of keys that predict all components well, including missing components; None without columns."""
    given = [weighing.seen.trusted for weighing in weighings if weighing.seen is not None]
    if not given:
        return None
    ready = given[0]
    for each in given[1:]:
        ready = ready & each
    return ready


def mask_present(y: Array) -> Sequence[Present]:
    """Return a mask of keys for each component of y (m, K); if no key lacks a component, all masks are None."""
    missing = np.isnan(y)
    return list(~missing) if missing.any() else [None] * len(y)


def _mask_weighing(weighing: Weighing, has: Present) -> Weighing:
    """Return a weighing that does not change keys without the component."""
    if has is None:
        return weighing
    gain = [np.where(has, k, 0.0) for k in weighing.K]
    diffuse = None if weighing.diffuse is None else weighing.diffuse & has
    return weighing._replace(v=np.where(has, weighing.v, 0.0), K=gain, diffuse=diffuse)
