"""Random structures as people build them, and their filter and smoother in 200 digits.

A model is a sum of levels, trends, seasons, an autoregression and an Ornstein-Uhlenbeck process; its measurement noise
is anything from none to that of its level, its start diffuse, proper or wide, and rows are missing. There "diffuse" is
a variance of 1e60, of which nothing is left in sixty digits.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import numpy as np

import kalman
from tests.kalman.support.decimals import decimals
from tests.kalman.support.oracles import UNIT

DIGITS, WIDE, INFINITE, LARGE = 200, Decimal(10) ** 60, Decimal(10) ** 40, Decimal(10) ** 15
LAG = 3
NOISES = (0.0, 0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-4, 1e-2, 1.0, 1.0)
"""Measurement variances, in units of the level's."""


class Drawn(NamedTuple):
    """A definition, the rows' measurements y (N,), NaN where missing, and their times in seconds (N,)."""

    definition: dict[str, Any]
    y: np.ndarray
    seconds: np.ndarray


class Exact(NamedTuple):
    """What is known of the states at some `rows` (k,), given the rows up to each and given all.

    means (k, n) and packed covariances (k, p), infinite where undetermined; the key's log-likelihood, without the
    infinite part of each diffuse state; forecast (h, 2): mean and variance of the measurement so many steps ahead
    """

    rows: np.ndarray
    filtered: np.ndarray
    covariances: np.ndarray
    smoothed: np.ndarray
    smoothed_covariances: np.ndarray
    log_likelihood: np.ndarray
    forecast: np.ndarray


def _arma(rng: np.random.Generator) -> tuple[dict[str, Any], list[float]]:
    """An autoregression of order 2 with a moving average of order 1, by Harvey's form."""
    radius, angle = rng.uniform(0.3, 0.97), rng.uniform(0.1, 3.0)
    phi, theta = (2 * radius * np.cos(angle), -(radius**2)), rng.uniform(-0.8, 0.8)
    noise = rng.choice([0.1, 1.0, 10.0])
    Q = noise * np.outer([1.0, theta], [1.0, theta])
    return {"kind": "explicit", "F": [[phi[0], 1.0], [phi[1], 0.0]], "Q": Q.tolist()}, [1.0, 0.0]


def _part(rng: np.random.Generator, kind: str) -> tuple[dict[str, Any], list[float]]:
    """A structure of one kind, and how a measurement sees its states."""
    some = float(rng.choice([0.0, 1e-4, 1e-2, 1.0]))
    if kind == "random_walk":
        return {"kind": kind, "variance": 1.0}, [1.0]
    if kind == "local_linear_trend":
        return {"kind": kind, "level_variance": 1.0, "slope_variance": some}, [1.0, 0.0]
    if kind == "damped_trend":
        more = {"slope_variance": max(some, 1e-4), "damping": rng.uniform(0.05, 1.0)}
        return {"kind": kind, "level_variance": 1.0, **more}, [1.0, 0.0]
    if kind == "ornstein_uhlenbeck":
        return {"kind": kind, "rate": rng.uniform(0.1, 2.0), "variance": 1.0}, [1.0]
    if kind == "seasonal_dummy":
        period = int(rng.integers(3, 8))
        return {"kind": kind, "period": period, "variance": some}, [1.0] + [0.0] * (period - 2)
    if kind == "seasonal_trigonometric":
        harmonics, period = int(rng.integers(1, 4)), float(rng.choice([7.0, 12.0, 24.0, 52.0, 168.0, 365.25]))
        form = {"period": period, "variance": 0.01 * some, "harmonics": harmonics}
        return {"kind": kind, **form}, [1.0, 0.0] * harmonics
    return _arma(rng)


SUMS = (
    ("random_walk", "seasonal_trigonometric"),
    ("local_linear_trend", "seasonal_dummy"),
    ("local_linear_trend", "seasonal_trigonometric"),
    ("random_walk", "ornstein_uhlenbeck"),
    ("random_walk", "arma"),
    ("local_linear_trend",),
    ("damped_trend", "seasonal_dummy"),
    ("arma",),
    ("random_walk", "seasonal_dummy", "ornstein_uhlenbeck"),
)


def draw(seed: int, start: str | None = None) -> Drawn:
    """Return a model and rows; start: diffuse, proper, wide or mixed, None for any of them."""
    rng = np.random.default_rng(seed)
    kinds = SUMS[seed % len(SUMS)]
    parts, H = zip(*(_part(rng, kind) for kind in kinds), strict=True)
    parts = [{**part, "name": f"p{i}"} for i, part in enumerate(parts)]
    seen = [a for part in H for a in part]
    n = len(seen)
    start = start or str(rng.choice(["diffuse", "diffuse", "proper", "wide", "mixed"]))
    initial: dict[str, Any] = {"diffuse": True}
    if start == "proper":
        initial = {
            "mean": [0.0] * n,
            "covariance": (float(rng.choice([0.1, 1.0, 10.0])) * np.eye(n)).tolist(),
        }
    if start == "wide":
        initial = {"mean": [0.0] * n, "covariance": (10.0 ** rng.integers(2, 9) * np.eye(n)).tolist()}
    if start == "mixed":
        flat = np.arange(n) == 0
        initial = {"diffuse": flat.tolist(), "mean": [0.0] * n, "covariance": np.diag(1.0 - flat).tolist()}
    process = parts[0] if len(parts) == 1 else {"kind": "sum", "parts": parts}
    many = int(rng.integers(2 * n + 4, 2 * n + 40))
    gaps = np.ones(many)
    if not any(part["kind"] in ("explicit", "seasonal_dummy") for part in parts) and rng.random() < 0.4:
        gaps = rng.choice([0.25, 1.0, 2.0, 5.0], many)
    y = np.cumsum(rng.normal(size=many)) + 3.0 * np.sin(np.arange(many))
    y[rng.random(many) < rng.choice([0.0, 0.1, 0.3])] = np.nan
    return Drawn(
        {
            "states": [f"x{i}" for i in range(n)],
            "measurement": ["y"],
            "process": process,
            "observation": {"H": [seen], "R": [[float(rng.choice(NOISES))]]},
            "initial": initial,
        },
        y,
        np.cumsum(gaps),
    )


def exact(drawn: Drawn, ahead: int = 5) -> Exact:
    """Return what the filter and smoother of a model find, every operation in 200 digits.

    Transitions are those that the model itself computes, in double precision.
    """
    with localcontext() as context:
        context.prec = DIGITS
        return _exact(drawn, ahead)


def _exact(drawn: Drawn, ahead: int) -> Exact:
    model: Any = kalman.build(drawn.definition)
    n, N = len(model.states), len(drawn.y)
    h, r = (
        decimals(drawn.definition["observation"]["H"][0]),
        decimals(drawn.definition["observation"]["R"])[0, 0],
    )
    initial = drawn.definition["initial"]
    m = decimals(initial.get("mean") or np.zeros(n))
    P = decimals(initial.get("covariance") or np.zeros((n, n)))
    for i in np.flatnonzero(
        np.broadcast_to(np.array(initial["diffuse"] if "diffuse" in initial else False), n)
    ):
        P[i, i] = WIDE
    known, score = [], Decimal(0)
    dt = np.diff(drawn.seconds, prepend=0.0)
    F = np.full((n, n), Decimal(0))
    for k in range(N):
        if k:
            F, Q, c = transition(model, float(dt[k]))
            m, P = F @ m + c, F @ P @ F.T + Q
        seen = not np.isnan(drawn.y[k])
        M = P @ h
        S, v = h @ M + r, (Decimal(float(drawn.y[k])) - h @ m if seen else Decimal(0))
        K = M / S if seen else M * 0
        known.append((F, v, S, K, seen))
        if seen:
            score -= (S.ln() + v * v / S + (2 * Decimal(np.pi)).ln()) / 2
            m, P = m + K * v, P - np.outer(K, M)
            score += WIDE.ln() / 2 if S > LARGE**2 else 0
        known[-1] = (*known[-1], m, P)
    smoothed, N_, r_ = [], np.full((n, n), Decimal(0)), np.full(n, Decimal(0))
    after = [None, *[a[0] for a in known[:0:-1]]]
    for F_next, (_, v, S, K, seen, mean, cov) in zip(after, known[::-1], strict=True):
        if F_next is not None:
            r_, N_ = F_next.T @ r_, F_next.T @ N_ @ F_next
        smoothed.append((mean + cov @ r_, cov - cov @ N_ @ cov))
        if seen:
            L = np.array([[Decimal(int(i == j)) for j in range(n)] for i in range(n)], object) - np.outer(
                K, h
            )
            r_, N_ = h * (v / S) + L.T @ r_, np.outer(h, h) / S + L.T @ N_ @ L
    forecast = []
    for _ in range(ahead):
        F, Q, c = transition(model, 1.0)
        m, P = F @ m + c, F @ P @ F.T + Q
        forecast.append((h @ m, h @ P @ h + r))
    rows = np.unique([0, 1, n, N // 2, N - 1 - LAG, N - 1])
    low = np.tril_indices(n)
    return Exact(
        rows,
        floats([known[k][-2] for k in rows]),
        floats([judged(known[k][-1])[low] for k in rows]),
        floats([smoothed[N - 1 - k][0] for k in rows]),
        floats([judged(smoothed[N - 1 - k][1])[low] for k in rows]),
        np.array(float(score)),
        floats(forecast),
    )


def transition(model: Any, dt: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return F, Q and offset of a model's step, as Decimal."""
    F, Q, c = model.process.transition(np.full(1, dt), [], {p.name: p.value for p in model.parameters})
    n = len(c)

    def value(a: Any) -> float:
        return float(np.asarray(a).ravel()[0])

    low = [[value(Q[i * (i + 1) // 2 + j]) if j <= i else 0.0 for j in range(n)] for i in range(n)]
    full = np.array(low) + np.tril(low, -1).T
    return decimals([[value(a) for a in row] for row in F]), decimals(full), decimals([value(a) for a in c])


def judged(covariance: np.ndarray) -> np.ndarray:
    """Return a covariance with NaN for what a diffuse start leaves in an entry that rounding of F alone puts there."""
    variances = [abs(a) for a in np.diagonal(covariance)]
    rounded = [LARGE < a < INFINITE for a in variances]
    result = covariance.copy()
    for i, a in enumerate(variances):
        for j, b in enumerate(variances):
            least = max(INFINITE, Decimal("1e-9") * (a * b).sqrt())
            if rounded[i] or rounded[j] or LARGE < abs(covariance[i, j]) < least:
                result[i, j] = Decimal("NaN")
    return result


def floats(values: Any) -> np.ndarray:
    """Return Decimals as floats, infinite where they are as large as what is left of a diffuse start."""
    array = np.array(values, object)
    flat = [
        float(a) if a.is_nan() or abs(a) < INFINITE else float("inf" if a > 0 else "-inf")
        for a in array.ravel().tolist()
    ]
    return np.array(flat).reshape(array.shape)


def rows_of(drawn: Drawn) -> kalman.SortedRows:
    """Return the rows, of one key."""
    many = len(drawn.y)
    time = np.round(drawn.seconds * UNIT).astype(np.int64)
    return kalman.SortedRows(np.zeros(many, np.int64), time, drawn.y[None].copy(), np.empty((0, many)))
