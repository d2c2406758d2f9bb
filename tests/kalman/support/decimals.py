"""The joint Gaussian of all states and measurements in 120 digits, where "diffuse" can simply be a variance of 1e40."""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import numpy as np

from tests.kalman.support.oracles import transition_of

DIGITS, WIDE, INFINITE = 120, 10**40, 1e25


class Exact(NamedTuple):
    means: np.ndarray  # (N, n)
    covariances: np.ndarray  # (N, n, n), infinite where nothing determines the state


def given_all(
    definition: dict[str, Any], H: np.ndarray, y: np.ndarray, dt: np.ndarray, u: np.ndarray
) -> Exact:
    """Every state given every measurement: y (N, m), dt (N,), u (N, c); what is left of 1e40 is infinite."""
    with localcontext() as context:
        context.prec = DIGITS
        return _given_all(definition, H, y, dt, u)


def _given_all(
    definition: dict[str, Any], H: np.ndarray, y: np.ndarray, dt: np.ndarray, u: np.ndarray
) -> Exact:
    n, N = len(definition["states"]), len(y)
    initial = definition["initial"]
    B = decimals(definition["process"].get("B") or np.zeros((n, u.shape[1])))
    mean, cov = np.full(n * N, Decimal(0)), np.full((n * N, n * N), Decimal(0))
    mean[:n] = decimals(initial.get("mean") or np.zeros(n))
    cov[:n, :n] = decimals(initial.get("covariance") or np.zeros((n, n)))
    for i in np.flatnonzero(np.broadcast_to(np.array(initial.get("diffuse", False)), n)):
        cov[i, i] = Decimal(WIDE)
    for k in range(1, N):
        F, Q, c = (decimals(a) for a in transition_of(definition["process"], dt[k]))
        old, new = slice(n * (k - 1), n * k), slice(n * k, n * (k + 1))
        mean[new] = F @ mean[old] + c + (B @ decimals(u[k]) if u.shape[1] else Decimal(0))
        cov[new, : n * k] = F @ cov[old, : n * k]
        cov[: n * k, new] = cov[new, : n * k].T
        cov[new, new] = F @ cov[old, old] @ F.T + Q
    seen = ~np.isnan(y.ravel())
    if seen.any():
        Z = decimals(np.kron(np.eye(N), H)[seen])
        R = decimals(np.kron(np.eye(N), definition["observation"]["R"])[np.ix_(seen, seen)])
        half = Z @ cov
        v = decimals(y.ravel()[seen]) - Z @ mean
        solved = solve(half @ Z.T + R, np.concatenate([half, v[:, None]], axis=1))
        mean, cov = mean + half.T @ solved[:, -1], cov - half.T @ solved[:, :-1]
    result = cov.astype(float)
    result = np.where(np.abs(result) > INFINITE, np.inf, result)
    blocks = [result[n * k : n * (k + 1), n * k : n * (k + 1)] for k in range(N)]
    return Exact(mean.astype(float).reshape(N, n), np.array(blocks))


def decimals(values: Any) -> np.ndarray:
    """Return the same numbers, to the last bit of each, as an array of Decimal."""
    array = np.asarray(values, float)
    return np.array([Decimal(a) for a in array.ravel().tolist()], object).reshape(array.shape)


def solve(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Return A^-1 B of matrices of Decimal, by elimination with pivots."""
    A, B, n = A.copy(), B.copy(), len(A)
    for k in range(n):
        p = k + int(np.argmax(np.abs(A[k:, k])))
        A[[k, p]], B[[k, p]] = A[[p, k]], B[[p, k]]
        share = A[k + 1 :, k] / A[k, k]
        A[k + 1 :] -= np.outer(share, A[k])
        B[k + 1 :] -= np.outer(share, B[k])
    for k in reversed(range(n)):
        B[k] = (B[k] - A[k, k + 1 :] @ B[k + 1 :]) / A[k, k] if k + 1 < n else B[k] / A[k, k]
    return B
