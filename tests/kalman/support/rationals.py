"""A linear Gaussian model filtered and smoothed in rational numbers, without any rounding."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np


def rational(values: Any) -> np.ndarray:
    """Return the same numbers, to the last bit of each, as an array of Fraction."""
    array = np.asarray(values, float)
    return np.array([Fraction(a) for a in array.ravel().tolist()], object).reshape(array.shape)


def smoothed(
    F: Any, Q: Any, H: Any, R: Any, start: Any, y: np.ndarray, fading: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return every state's mean (N, n) and covariance (N, n, n) given all of y (N, m), NaN where missing.

    The predicted covariance is fading^2 F P F' + Q. The states have mean 0 before the first row.
    By Rauch, Tung and Striebel's recursion; where the next state's covariance is singular, by any of its inverses.
    """
    F, Q, H, R, P = (rational(a) for a in (F, Q, H, R, start))
    m = rational(np.zeros(len(F)))
    filtered, predicted, wider = [], [], Fraction(fading) ** 2
    for k, row in enumerate(y):
        if k:
            m, P = F @ m, wider * F @ P @ F.T + Q
        predicted.append((m, P))
        for h, r, value in zip(H, np.diagonal(R), row, strict=True):
            if not np.isnan(value):
                M = P @ h
                K = M / (h @ M + r)
                m, P = m + K * (Fraction(float(value)) - h @ m), P - np.outer(K, M)
        filtered.append((m, P))
    x, V = filtered[-1]
    results = [(x, V)]
    for (m, P), (m_next, P_next) in zip(filtered[-2::-1], predicted[:0:-1], strict=True):
        G = solve(P_next, F @ P).T
        x, V = m + G @ (x - m_next), P + G @ (V - P_next) @ G.T
        results.append((x, V))
    means, covariances = zip(*results[::-1], strict=True)
    return np.array(means).astype(float), np.array(covariances).astype(float)


def solve(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Return an X with A X = B, 0 for unknowns that A leaves free."""
    n, table, pivots = len(A), np.concatenate([A, B], axis=1), []
    for column in range(n):
        rows = [i for i in range(len(pivots), n) if table[i, column] != 0]
        if rows:
            at = len(pivots)
            table[[at, rows[0]]] = table[[rows[0], at]]
            table[at] = table[at] / table[at, column]
            for i in range(n):
                if i != at and table[i, column] != 0:
                    table[i] = table[i] - table[i, column] * table[at]
            pivots.append(column)
    X = rational(np.zeros(B.shape))
    for at, column in enumerate(pivots):
        X[column] = table[at, n:]
    return X
