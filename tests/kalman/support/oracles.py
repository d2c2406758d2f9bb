"""Textbook filters to test against: one key at a time, matrices and inverses, nothing clever."""

from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import expm

import kalman
from kalman.linalg.packing import unpack


class Truth(NamedTuple):
    means: np.ndarray  # (N, n)
    covariances: np.ndarray  # (N, n, n)
    log_likelihoods: np.ndarray  # (N,)
    nis: np.ndarray  # (N,), NaN where nothing was observed


def rates(process: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, diffusion and drift of a structure as a stochastic differential equation."""
    kind = process["kind"]
    if kind == "continuous":
        A = np.array(process["A"], float)
        return A, np.array(process["diffusion"], float), np.array(process.get("offset", np.zeros(len(A))))
    if kind == "damped_trend":
        A = np.array([[0.0, 1.0], [0.0, -process["damping"]]])
        return A, np.diag([process["level_variance"], process["slope_variance"]]), np.zeros(2)
    if kind == "constant_acceleration":
        eye = np.eye(process.get("dimensions", 1))
        A, D = np.diag([1.0, 1.0], 1), np.diag([0.0, 0.0, process["jerk_variance"]])
        return np.kron(eye, A), np.kron(eye, D), np.zeros(3 * len(eye))
    turns = np.diag(np.arange(1, process["harmonics"] + 1) * 2 * np.pi / process["period"])
    n = 2 * len(turns)
    return np.kron(turns, [[0, 1], [-1, 0]]), process["variance"] * np.eye(n), np.zeros(n)


CONTINUOUS = dict.fromkeys(
    ("continuous", "damped_trend", "constant_acceleration", "seasonal_trigonometric"), rates
)


def van_loan(
    A: np.ndarray, D: np.ndarray, drift: np.ndarray, dt: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """F, Q and offset by one exponential of a block matrix each (Van Loan 1978, theorem 1)."""
    n = len(A)
    steps = max(1, int(np.ceil(dt * np.abs(A).sum())))  # exp(-A h) would swamp exp(A h) over a long h
    h = dt / steps
    block = expm(np.block([[-A, D], [np.zeros((n, n)), A.T]]) * h)
    f = block[n:, n:].T
    q = f @ block[:n, n:]
    c = expm(np.block([[A, drift[:, None]], [np.zeros((1, n + 1))]]) * h)[:n, n]
    F, Q, offset = np.eye(n), np.zeros((n, n)), np.zeros(n)
    for _ in range(steps):
        F, Q, offset = f @ F, f @ Q @ f.T + q, f @ offset + c
    return F, (Q + Q.T) / 2, offset


def transition_of(process: dict[str, Any], dt: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """F, Q and offset of one step, written down apart from the library."""
    kind = process["kind"]
    if kind == "explicit":
        F = np.array(process["F"], float)
        return F, np.array(process["Q"], float), np.zeros(len(F))
    if kind == "random_walk":
        return np.eye(1), np.array([[process["variance"] * dt]]), np.zeros(1)
    if kind == "ornstein_uhlenbeck":
        kept = np.exp(-process["rate"] * dt)
        noise = process["variance"] * (1 - kept**2)
        return np.array([[kept]]), np.array([[noise]]), np.array([process.get("mean", 0.0) * (1 - kept)])
    integrated = np.array([[dt**3 / 3, dt**2 / 2], [dt**2 / 2, dt]])
    F = np.array([[1.0, dt], [0.0, 1.0]])
    if kind == "local_linear_trend":
        Q = process["slope_variance"] * integrated + np.diag([process["level_variance"] * dt, 0.0])
        return F, Q, np.zeros(2)
    if kind == "constant_velocity":
        d = process.get("dimensions", 1)
        eye = np.eye(d)
        return np.kron(eye, F), np.kron(eye, process["acceleration_variance"] * integrated), np.zeros(2 * d)
    if kind in CONTINUOUS:
        return van_loan(*CONTINUOUS[kind](process), dt)
    if kind == "seasonal_dummy":
        n = process["period"] - 1
        F, Q = np.diag(np.ones(n - 1), -1), np.zeros((n, n))
        F[0], Q[0, 0] = -1.0, process["variance"]
        return F, Q, np.zeros(n)
    parts = [transition_of(part, dt) for part in process["parts"]]
    n = sum(len(c) for _, _, c in parts)
    F, Q, at = np.zeros((n, n)), np.zeros((n, n)), 0
    for f, q, c in parts:
        here = slice(at, at + len(c))
        F[here, here], Q[here, here] = f, q
        at += len(c)
    return F, Q, np.concatenate([c for _, _, c in parts])


class Corrected(NamedTuple):
    """A state after a row: moments, innovation (s,) of what was measured, its covariance, log density and NIS."""

    mean: np.ndarray
    covariance: np.ndarray
    innovation: np.ndarray
    spread: np.ndarray
    score: float
    nis: float


def begun(definition: dict[str, Any], controls: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """R, B, mean and covariance, as the definition has them."""
    B = definition["process"].get("B") or np.zeros((len(definition["states"]), controls))
    x, P = (np.array(definition["initial"][name], float) for name in ("mean", "covariance"))
    return np.array(definition["observation"]["R"], float), np.array(B), x, P


def corrected(x: np.ndarray, P: np.ndarray, H: np.ndarray, R: np.ndarray, y: np.ndarray) -> Corrected:
    """Update a state by a row y (m,), NaN where missing."""
    seen = ~np.isnan(y)
    h, r = H[seen], R[np.ix_(seen, seen)]
    v, S = y[seen] - h @ x, h @ P @ h.T + r
    K = P @ h.T @ np.linalg.inv(S)
    L = np.eye(len(x)) - K @ h
    nis = v @ np.linalg.inv(S) @ v
    score = -0.5 * (nis + np.linalg.slogdet(S)[1] + seen.sum() * np.log(2 * np.pi))
    return Corrected(x + K @ v, L @ P @ L.T + K @ r @ K.T, v, S, score, float(nis) if seen.any() else np.nan)


def textbook(
    definition: dict[str, Any], H: np.ndarray, y: np.ndarray, dt: np.ndarray, u: np.ndarray
) -> Truth:
    """Filter y (N, m), NaN where missing; dt (N,), the first without meaning; u (N, c)."""
    rows = corrections(definition, H, y, dt, u)
    return Truth(
        *(np.array([getattr(row, name) for row in rows]) for name in ("mean", "covariance", "score", "nis"))
    )


def corrections(
    definition: dict[str, Any], H: np.ndarray, y: np.ndarray, dt: np.ndarray, u: np.ndarray
) -> list[Corrected]:
    """Filter as `textbook` does; return all that each row has."""
    R, B, x, P = begun(definition, u.shape[1])
    rows: list[Corrected] = []
    for k in range(len(y)):
        if k:
            F, Q, c = transition_of(definition["process"], dt[k])
            x, P = F @ x + B @ u[k] + c, F @ P @ F.T + Q
        rows.append(corrected(x, P, H, R, y[k]))
        x, P = rows[-1].mean, rows[-1].covariance
    return rows


def joint(
    definition: dict[str, Any], H: np.ndarray, y: np.ndarray, dt: np.ndarray, u: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Log-likelihood, last mean and covariance from the joint Gaussian of all states and measurements."""
    n, N = len(definition["states"]), len(y)
    R = np.array(definition["observation"]["R"], float)
    B = np.array(definition["process"].get("B") or np.zeros((n, u.shape[1])))
    mean, cov = np.zeros(n * N), np.zeros((n * N, n * N))
    mean[:n], cov[:n, :n] = definition["initial"]["mean"], definition["initial"]["covariance"]
    for k in range(1, N):
        F, Q, c = transition_of(definition["process"], dt[k])
        old, new = slice(n * (k - 1), n * k), slice(n * k, n * (k + 1))
        mean[new] = F @ mean[old] + B @ u[k] + c
        cov[new, : n * k] = F @ cov[old, : n * k]
        cov[: n * k, new] = cov[new, : n * k].T
        cov[new, new] = F @ cov[old, old] @ F.T + Q
    seen = ~np.isnan(y.ravel())
    Z, noise = np.kron(np.eye(N), H)[seen], np.kron(np.eye(N), R)[np.ix_(seen, seen)]
    v, S = y.ravel()[seen] - Z @ mean, Z @ cov @ Z.T + noise
    gain = cov[-n:] @ Z.T @ np.linalg.inv(S)
    score = -0.5 * (v @ np.linalg.solve(S, v) + np.linalg.slogdet(2 * np.pi * S)[1])
    return score, mean[-n:] + gain @ v, cov[-n:, -n:] - gain @ Z @ cov[:, -n:]


def diffuse_joint(
    definition: dict[str, Any], H: np.ndarray, y: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Log-likelihood, last mean and covariance when x1 is wholly unknown, for an explicit model.

    The limit of log L + (n / 2) log k as x1 ~ N(0, k I) widens: y = X x1 + e, e ~ N(0, V), and x1 integrated
    out with a flat prior (Harvey 1989, section 3.4.3).
    """
    F, Q, _ = transition_of(definition["process"], 1.0)
    R = np.array(definition["observation"]["R"], float)
    n, N = len(F), len(y)
    reach = np.concatenate([np.linalg.matrix_power(F, k) for k in range(N)])  # x_k by x1
    cov = np.zeros((n * N, n * N))
    for k in range(1, N):
        old, new = slice(n * (k - 1), n * k), slice(n * k, n * (k + 1))
        cov[new, : n * k] = F @ cov[old, : n * k]
        cov[: n * k, new] = cov[new, : n * k].T
        cov[new, new] = F @ cov[old, old] @ F.T + Q
    seen = ~np.isnan(y.ravel())
    Z = np.kron(np.eye(N), H)[seen]
    V = Z @ cov @ Z.T + np.kron(np.eye(N), R)[np.ix_(seen, seen)]
    X, values = Z @ reach, y.ravel()[seen]
    information = X.T @ np.linalg.solve(V, X)
    x1 = np.linalg.solve(information, X.T @ np.linalg.solve(V, values))
    v = values - X @ x1
    gain = np.linalg.solve(V, Z @ cov[:, -n:]).T
    left = reach[-n:] - gain @ X
    score = -0.5 * (
        v @ np.linalg.solve(V, v) + np.linalg.slogdet(2 * np.pi * V)[1] + np.linalg.slogdet(information)[1]
    )
    mean = reach[-n:] @ x1 + gain @ v
    return score, mean, cov[-n:, -n:] - gain @ Z @ cov[:, -n:] + left @ np.linalg.solve(information, left.T)


UNIT = 1_000_000.0  # one second, in microseconds


def run_one(definition: dict[str, Any], y: Any, seconds: Any = None, u: Any = None) -> tuple[Any, Any]:
    """Run one key's rows y (N, m) through the library; return its KeyStates and Outputs."""
    y = np.asarray(y, float)
    y = y.reshape(len(y), -1)
    seconds = np.arange(len(y)) if seconds is None else np.asarray(seconds)
    u = np.empty((len(y), 0)) if u is None else np.asarray(u, float)
    model = kalman.build(definition)
    rows = kalman.SortedRows(
        np.zeros(len(y), np.int64),
        np.round(seconds * UNIT).astype(np.int64),
        np.ascontiguousarray(y.T),
        np.ascontiguousarray(u.T),
    )
    return kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)


def full(covariance: np.ndarray) -> np.ndarray:
    """Packed (p, N) as matrices (N, n, n)."""
    n = int((np.sqrt(8 * len(covariance) + 1) - 1) / 2 + 0.5)
    return unpack(covariance).T.reshape(-1, n, n)
