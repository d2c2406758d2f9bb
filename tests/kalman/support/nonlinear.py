"""Functions that the tests' models name, and textbook filters for them: one key at a time, matrices and weights."""

from typing import Any

import numpy as np

from tests.kalman.support.models import random_covariance
from tests.kalman.support.oracles import Truth

BENDS = {n: np.random.default_rng(n).normal(size=(2, n, n)) for n in range(1, 9)}


def bent(x, dt, u):
    """x_i + tanh(dt) sum_j (a_ij sin x_j - b_ij x_j / 4) + u_i, for any number of states and controls."""
    a, b = BENDS[len(x)]
    rows = []
    for i in range(len(x)):
        row = x[i] + (u[i % len(u)] if len(u) else 0.0)
        for j in range(len(x)):
            row = row + np.tanh(dt) * (0.3 * a[i, j] * np.sin(x[j]) - 0.25 * b[i, j] * x[j])
        rows.append(row)
    return np.array(rows)


def bent_slope(x, dt, u):
    a, b = BENDS[len(x)]
    J = np.tanh(dt) * (0.3 * a[:, :, None] * np.cos(x)[None] - 0.25 * b[:, :, None])
    for i in range(len(x)):
        J[i, i] += 1.0
    return J


def bent_noise(dt):
    """A noise that grows with time, correlated, of two states."""
    return np.array([[dt + dt**3, 0.5 * dt], [0.5 * dt, dt]])


def seen(x, m):
    a, b = BENDS[len(x)]
    rows = []
    for i in range(m):
        row = 0.2 * x[i % len(x)] ** 2
        for j in range(len(x)):
            row = row + a[j, i % len(x)] * x[j] + 0.3 * b[j, i % len(x)] * np.cos(x[j] + i)
        rows.append(row)
    return np.array(rows)


def seen_slope(x, m):
    a, b = BENDS[len(x)]
    n = len(x)
    J = np.zeros((m, n, x.shape[1]))
    for i in range(m):
        J[i, i % n] += 0.4 * x[i % n]
        for j in range(n):
            J[i, j] += a[j, i % n] - 0.3 * b[j, i % n] * np.sin(x[j] + i)
    return J


def seen_1(x):
    return seen(x, 1)


def seen_2(x):
    return seen(x, 2)


def seen_3(x):
    return seen(x, 3)


def seen_slope_1(x):
    return seen_slope(x, 1)


def seen_slope_2(x):
    return seen_slope(x, 2)


def seen_slope_3(x):
    return seen_slope(x, 3)


def squared(x):
    return x**2


def line(x, dt, u):
    """Constant velocity in one dimension."""
    return np.array([x[0] + dt * x[1], x[1]])


def velocity(x, dt, u):
    """Constant velocity in two dimensions."""
    return np.array([x[0] + dt * x[1], x[1], x[2] + dt * x[3], x[3]])


def velocity_noise(dt):
    Q = np.zeros((4, 4, len(dt)))
    for at in (0, 2):
        Q[at, at], Q[at + 1, at + 1] = dt**3 / 3, dt
        Q[at, at + 1] = Q[at + 1, at] = dt**2 / 2
    return 0.05 * Q


def positions(x):
    return x[[0, 2]]


def toolbox_step(x, dt, u):
    return np.array([x[0] + x[1], x[1]])


def toolbox_seen(x):
    return np.array([0.5 * x[0] - 0.3 * x[1]])


def range_and_bearing(x):
    return np.array([np.sqrt(x[0] ** 2 + x[2] ** 2), np.arctan2(x[2], x[0])])


def polar(x, dt, u):
    """Range and bearing to places."""
    return np.array([x[0] * np.cos(x[1]), x[0] * np.sin(x[1])])


def first_state(x):
    return x[:1]


def first_state_slope(x):
    return np.array([[np.ones(x.shape[1]), np.zeros(x.shape[1])]])


def logarithms(x):
    return np.log(x[:1])


def still(x, dt, u):
    return x + 0.0


def pushed(x, dt, u):
    return x + u


def bent_by_control(x, dt, u):
    return x + u * (x - 3.0) ** 2


def random_nonlinear(
    rng: np.random.Generator, kind: str, n: int, m: int, c: int, jacobians: bool = True
) -> dict[str, Any]:
    here = "tests.kalman.support.nonlinear"
    process = {"kind": "function", "f": f"{here}:bent", "Q": random_covariance(rng, n, 0.05)}
    observation: dict[str, Any] = {"h": f"{here}:seen_{m}", "R": random_covariance(rng, m)}
    if jacobians and kind == "extended":
        process["jacobian"] = f"{here}:bent_slope"
        observation["jacobian"] = f"{here}:seen_slope_{m}"
    return {
        "filter": kind,
        "states": [f"x{i}" for i in range(n)],
        "measurement": [f"y{i}" for i in range(m)],
        "control": [f"u{i}" for i in range(c)],
        "process": process,
        "observation": observation,
        "initial": {"mean": rng.normal(size=n).tolist(), "covariance": random_covariance(rng, n, 0.3)},
    }


def points_of(
    kind: str, rule: dict[str, float], x: np.ndarray, P: np.ndarray, real: Any = float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points (n, p) of x ~ (x, P), and their weights for mean and covariance, as the textbooks have them."""
    n, L = len(x), np.linalg.cholesky(P.astype(float)).astype(real)
    if real is not float:
        L = _polished(L, P)
    if kind == "cubature":
        weights = np.full(2 * n, real(1) / (2 * n))
        return x[:, None] + np.sqrt(real(n)) * np.hstack([L, -L]), weights, weights
    chosen = {"alpha": 1.0, "beta": 0.0, "kappa": 2.0, **rule}
    alpha, beta, kappa = (real(chosen[name]) for name in ("alpha", "beta", "kappa"))
    scale = alpha**2 * (n + kappa)
    points = x[:, None] + np.sqrt(scale) * np.hstack([np.zeros((n, 1), real), L, -L])
    wm = np.full(2 * n + 1, 1 / (2 * scale))
    wm[0] = (scale - n) / scale
    wc = wm.copy()
    wc[0] += 1 - alpha**2 + beta
    return points, wm, wc


def moved(
    kind: str,
    rule: dict[str, float],
    x: np.ndarray,
    P: np.ndarray,
    function: Any,
    slope: Any,
    real: Any = float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean, covariance and cross-covariance of a function of x ~ (x, P)."""
    if kind == "extended":
        J = slope(x[:, None])[:, :, 0]
        return function(x[:, None])[:, 0], J @ P @ J.T, P @ J.T
    points, wm, wc = points_of(kind, rule, x, P, real)
    values = function(points)
    mean = values @ wm
    d, e = values - mean[:, None], points - x[:, None]
    return mean, (d * wc) @ d.T, (e * wc) @ d.T


def textbook_nonlinear(
    definition: dict[str, Any], y: np.ndarray, dt: np.ndarray, u: np.ndarray, real: Any = float
) -> Truth:
    """Filter y (N, m), NaN where missing; dt (N,); u (N, c), with a textbook's weights and inverses."""
    m = y.shape[1]
    Q, R = (np.array(definition[a][b], real) for a, b in (("process", "Q"), ("observation", "R")))
    x, P = (np.array(definition["initial"][name], real) for name in ("mean", "covariance"))
    kind, rule = definition["filter"], definition.get("unscented", {})

    def f(points, k):  # columns
        many = points.shape[1]
        return bent(points, np.full(many, dt[k]), np.repeat(u[k][:, None], many, axis=1))

    means, covariances, scores, nis = [], [], [], []
    for k in range(len(y)):
        if k:

            def slope(p, k=k):
                return bent_slope(p, dt[k : k + 1], u[k][:, None])

            x, P, _ = moved(kind, rule, x, P, lambda p, k=k: f(p, k), slope, real)
            P = P + Q
        has = ~np.isnan(y[k])
        z, S, C = moved(kind, rule, x, P, lambda p: seen(p, m), lambda p: seen_slope(p, m), real)
        S, C, v = (S + R)[np.ix_(has, has)], C[:, has], (y[k] - z)[has]
        inverse = np.linalg.inv(S.astype(float)).astype(real)
        if real is not float:
            inverse = inverse @ (2 * np.eye(len(S)) - S @ inverse)
        K = C @ inverse
        x, P = x + K @ v, P - K @ S @ K.T
        square = v @ inverse @ v
        means.append(x.astype(float))
        covariances.append(P.astype(float))
        scores.append(
            -0.5 * float(square + np.linalg.slogdet(S.astype(float))[1] + has.sum() * np.log(2 * np.pi))
        )
        nis.append(float(square) if has.any() else np.nan)
    return Truth(np.array(means), np.array(covariances), np.array(scores), np.array(nis))


def _polished(L: np.ndarray, P: np.ndarray) -> np.ndarray:
    """One column after another in the precision of P."""
    n = len(P)
    L = np.zeros_like(P)
    for j in range(n):
        L[j, j] = np.sqrt(P[j, j] - L[j, :j] @ L[j, :j])
        for i in range(j + 1, n):
            L[i, j] = (P[i, j] - L[i, :j] @ L[j, :j]) / L[j, j]
    return L
