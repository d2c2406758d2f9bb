"""The filters that are compared: ours, filterpy with an object a key, simdkalman with all keys at once.

Each is used as its documentation shows. Every contender takes `keys` series of `rows` measurements in its preferred
layout, and does for each key and row: predict (not before the first), update, log-likelihood if the contender has it.
It returns the last mean and covariance and the summed log-likelihood of each key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.workloads import filter_models as models
from benchmarks.workloads.filter_models import Array, Model

Filtered = tuple[Array, Array, Array | None]
"""Mean (n, K), covariance (n, n, K) and log-likelihood (K,), None if the contender has no correct one."""


class Contender(NamedTuple):
    """A way to do a work; prepare: measurements (rows, m, K) -> the timed function; share: its share of the work's
    keys. The speed of a contender that works key by key does not depend on their number; it gets only a part of the
    keys.
    """

    name: str
    prepare: Callable[[Array], Callable[[], Filtered]]
    share: float = 1.0


def ours(model: Model) -> Contender:
    """Return this library's filter, a call a row of all keys."""

    def prepare(y: Array) -> Callable[[], Filtered]:
        import kalman
        from kalman.linalg.packing import unpack

        kernel = kalman.build(model.definition)
        keys, n = y.shape[2], len(model.mean)
        none, one = np.empty((0, keys)), np.ones(keys)
        rows = [
            kalman.Rows(one, np.full(keys, k == 0), np.ascontiguousarray(a), none) for k, a in enumerate(y)
        ]

        def run() -> Filtered:
            state, total = kernel.initial(keys), np.zeros(keys)
            for row in rows:
                state, said = kernel.step(state, row)
                total += said.log_likelihood
            mean, covariance = kernel.moments(state)
            return mean, unpack(covariance).reshape(n, n, keys), total

        return run

    return Contender("ours", prepare)


def ours_from_rows(model: Model) -> Contender:
    """Return this library from sorted rows to an estimate for each, as batch and stream call it."""

    def prepare(y: Array) -> Callable[[], Filtered]:
        import kalman
        from kalman.linalg.packing import unpack

        kernel = kalman.build(model.definition)
        count, m, keys = y.shape
        n = len(model.mean)
        rows = kalman.SortedRows(
            np.repeat(np.arange(keys), count),
            np.tile(np.arange(count) * 1_000_000, keys),
            np.ascontiguousarray(y.transpose(1, 2, 0).reshape(m, -1)),
            np.empty((0, keys * count)),
        )

        def run() -> Filtered:
            states, _ = kalman.run(kernel, kalman.initial_states(kernel, keys), rows, 1e6)
            mean, covariance = kernel.moments(states.values)
            return mean, unpack(covariance).reshape(n, n, keys), states.log_likelihood

        return run

    return Contender("ours, rows to estimates", prepare)


def simdkalman(model: Model, likelihood: bool) -> Contender:
    """Return simdkalman's incremental interface, with its log-likelihood (which lacks the constant) or without."""

    def prepare(y: Array) -> Callable[[], Filtered]:
        from simdkalman import KalmanFilter

        one = KalmanFilter(model.F, model.Q, model.H, model.R)
        rows = [np.ascontiguousarray(a.T[:, :, None]) for a in y]
        keys = y.shape[2]

        def run() -> Filtered:
            mean = np.repeat(model.mean[None, :, None], keys, axis=0)
            covariance = np.repeat(model.covariance[None], keys, axis=0)
            total = np.zeros(keys)
            for k, row in enumerate(rows):
                if k:
                    mean, covariance = one.predict_next(mean, covariance)
                mean, covariance, _, *said = one.update(mean, covariance, row, log_likelihood=likelihood)
                if likelihood:
                    total += said[0]
            return mean[:, :, 0].T, covariance.transpose(1, 2, 0), None

        return run

    return Contender("simdkalman" if likelihood else "simdkalman, states alone", prepare)


def filterpy(
    name: str, build: Callable[[], Any], update: Callable[[Any, Array], None], likelihood: bool, share: float
) -> Contender:
    """Return filterpy with an object a key; build: a filter at its start, update: with a measurement (m,)."""

    def prepare(y: Array) -> Callable[[], Filtered]:
        series = np.ascontiguousarray(y.transpose(2, 0, 1))

        def run() -> Filtered:
            means, covariances, totals = [], [], []
            for rows in series:
                one, total = build(), 0.0
                for k, row in enumerate(rows):
                    if k:
                        one.predict()
                    update(one, row)
                    if likelihood:
                        total += one.log_likelihood
                means.append(one.x.ravel())
                covariances.append(one.P)
                totals.append(total)
            said = np.array(totals) if likelihood else None
            return np.array(means).T, np.array(covariances).transpose(1, 2, 0), said

        return run

    return Contender(name, prepare, share)


def filterpy_linear(model: Model, likelihood: bool, share: float) -> Contender:
    """Return filterpy's KalmanFilter."""
    name = "filterpy" if likelihood else "filterpy, states alone"
    return filterpy(name, lambda: _kalman_filter(model), lambda one, row: one.update(row), likelihood, share)


def _kalman_filter(model: Model) -> Any:
    from filterpy.kalman import KalmanFilter

    one = KalmanFilter(dim_x=len(model.mean), dim_z=len(model.H))
    one.x, one.P = model.mean[:, None].copy(), model.covariance.copy()
    one.F, one.Q, one.H, one.R = model.F, model.Q, model.H, model.R
    return one


def filterpy_unscented(model: Model, likelihood: bool, share: float) -> Contender:
    """Return filterpy's UnscentedKalmanFilter with Merwe's points."""
    from filterpy.kalman import MerweScaledSigmaPoints, UnscentedKalmanFilter

    def build() -> Any:
        one = UnscentedKalmanFilter(
            4, 2, models.STEP, models.seen, models.move, MerweScaledSigmaPoints(4, **models.POINTS)
        )
        one.x, one.P, one.Q, one.R = model.mean.copy(), model.covariance.copy(), model.Q, model.R
        # its update starts from the points of a prediction, which the first row lacks
        one.sigmas_f = one.points_fn.sigma_points(one.x, one.P)
        return one

    name = "filterpy" if likelihood else "filterpy, states alone"
    return filterpy(name, build, lambda one, row: one.update(row), likelihood, share)


def filterpy_extended(model: Model, likelihood: bool, share: float) -> Contender:
    """Return filterpy's ExtendedKalmanFilter, its prediction replaced by the model's, as in its guide."""
    from filterpy.kalman import ExtendedKalmanFilter

    class Tracked(ExtendedKalmanFilter):
        def predict_x(self, u: Any = 0) -> None:
            self.F = models.move_slope(self.x)
            self.x = models.move(self.x)

    def build() -> Any:
        one = Tracked(4, 2)
        one.x, one.P, one.Q, one.R = model.mean.copy(), model.covariance.copy(), model.Q, model.R
        return one

    def update(one: Any, row: Array) -> None:
        one.update(row, models.seen_slope, models.seen)

    name = "filterpy" if likelihood else "filterpy, states alone"
    return filterpy(name, build, update, likelihood, share)


def filterpy_switching(
    model: Model, noises: list[Array], transition: Array, start: Array, share: float
) -> Contender:
    """Return filterpy's IMMEstimator, which has no log-likelihood of its own."""
    from filterpy.kalman import IMMEstimator

    def build() -> Any:
        modes = []
        for Q in noises:
            modes.append(_kalman_filter(model))
            modes[-1].Q = Q
        one = IMMEstimator(modes, start, transition)
        one.cbar = start  # no mixing before the first row
        return one

    return filterpy("filterpy", build, lambda one, row: one.update(row[:, None]), False, share)
