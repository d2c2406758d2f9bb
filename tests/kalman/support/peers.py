"""Maximum likelihood by statsmodels, from several starts, with the exact diffuse likelihood."""

import warnings
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from statsmodels.tsa.statespace.mlemodel import MLEModel

SHARES = (0.9, 0.3, 0.02)


class Peer(NamedTuple):
    """The greatest log-likelihood of several starts, and the variances there: of the process, then R."""

    log_likelihood: float
    variances: np.ndarray


class _Model(MLEModel):
    """A random walk, or the local linear trend in continuous time, over regular steps of one unit of time."""

    def __init__(self, y, states):
        super().__init__(y, k_states=states, k_posdef=states, initialization="diffuse")
        self["design", 0, 0] = 1.0
        self["transition"] = np.eye(states) + np.eye(states, k=1)
        self["selection"] = np.eye(states)
        self.ssm.loglikelihood_burn = 0

    def transform_params(self, unconstrained):
        return unconstrained**2

    def untransform_params(self, constrained):
        return np.sqrt(constrained)

    def update(self, params, **kwargs):
        params = super().update(params, **kwargs)
        self["obs_cov", 0, 0] = params[-1]
        if self.k_states == 1:
            self["state_cov", 0, 0] = params[0]
        else:
            q, s = params[0], params[1]
            self["state_cov"] = np.array([[q + s / 3, s / 2], [s / 2, s]])


def log_likelihood(y, states, variances):
    """Return the exact diffuse log-likelihood of y (n,), NaN where missing, at variances."""
    scale, _ = _unit(y)
    model = _Model(y / scale, states)
    ll = model.loglike(np.asarray(variances, float) / scale**2)
    return float(ll) - (np.count_nonzero(~np.isnan(y)) - states) * np.log(scale)


def best(y, states, shares=SHARES):
    """Return the best of several starts; y (n,) at regular times, NaN where missing."""
    scale, _ = _unit(y)
    z = y / scale
    model = _Model(z, states)
    found = []
    for share, slope in product(shares, (0.2, 0.002) if states == 2 else (0.0,)):
        start = [share, *([share * slope] if states == 2 else []), 0.5 * (1.0 - share)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            params: Any = model.fit(start_params=np.array(start), disp=0, maxiter=200, return_params=True)
        for one in (
            params,
            np.where(params < 1e-6 * params.max(), 0.0, params),
        ):  # zero itself, where it is near
            found.append((float(model.loglike(one)), one))
    ll, params = max(found, key=lambda one: one[0] if np.isfinite(one[0]) else -np.inf)
    n = np.count_nonzero(~np.isnan(y))
    return Peer(ll - (n - states) * np.log(scale), np.asarray(params) * scale**2)


def together(series, states, shares=SHARES):
    """Return the best of several starts of one set of variances for all series, each (n,) at regular times.

    The sum of statsmodels' log-likelihoods, searched by SciPy's simplex method in the deviations, and again from where
    that ended; each variance is also tried as zero. The result is in the unit of the series.
    """
    scale = float(np.exp(np.mean([np.log(_unit(y)[0]) for y in series])))
    models = [_Model(y / scale, states) for y in series]

    def lost(deviations: Any) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = -sum(float(model.loglike(np.square(deviations))) for model in models)
        return value if np.isfinite(value) else 1e300

    loudest = max(_unit(y)[0] for y in series) / scale
    found: list[tuple[float, Any]] = []
    for share, slope in product(shares, (0.2, 0.002) if states == 2 else (0.0,)):
        start = np.array([share, *([share * slope] if states == 2 else []), 0.5 * (1.0 - share)])
        at: Any = loudest * np.sqrt(start)
        for _ in range(2):
            end = minimize(
                lost, at, method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-7, "maxiter": 400}
            )
            at = end.x
        for i in range(len(at)):
            without = np.where(np.arange(len(at)) == i, 0.0, at)
            if np.abs(without).max() > 1e-3 * np.abs(at).max():  # else nothing is left
                found.append((lost(without), without))
        found.append((lost(at), at))
    least, at = min(found, key=lambda one: one[0])
    shift = sum((np.count_nonzero(~np.isnan(y)) - states) * np.log(scale) for y in series)
    return Peer(-least - shift, np.square(at) * scale**2)


def _unit(y):
    """Return the size of the differences of y, and y without what is missing."""
    kept = y[~np.isnan(y)]
    return float(np.sqrt(np.mean(np.diff(kept) ** 2))) or 1.0, kept
