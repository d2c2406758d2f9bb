"""Recursive least squares whose regressors are nearly one, against exact rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

import kalman
from tests.kalman.support.oracles import UNIT, full


def solved(A, b):
    """Return A^-1 b for lists of fractions; b has columns."""
    n = len(A)
    rows = [[*A[i], *b[i]] for i in range(n)]
    for i in range(n):
        pivot = next(k for k in range(i, n) if rows[k][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [a / rows[i][i] for a in rows[i]]
        for k in range(n):
            if k != i:
                rows[k] = [a - rows[k][i] * c for a, c in zip(rows[k], rows[i], strict=True)]
    return [row[n:] for row in rows]


def exact(X, y, forgetting):
    """Return the coefficients and (A' W A)^-1 of weighted least squares, rounded at the end."""
    A = [[Fraction(float(a)) for a in row] for row in X]
    W = [Fraction(forgetting) ** (len(A) - 1 - k) for k in range(len(A))]
    n = len(A[0])
    normal = [[sum(w * a[i] * a[j] for w, a in zip(W, A, strict=True)) for j in range(n)] for i in range(n)]
    right = [[sum(w * a[i] * Fraction(float(b)) for w, a, b in zip(W, A, y, strict=True))] for i in range(n)]
    eye = [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
    b = solved(normal, right)
    inverse = solved(normal, eye)
    errors = [
        Fraction(float(v)) - sum(c[0] * a for c, a in zip(b, row, strict=True))
        for v, row in zip(y, A, strict=True)
    ]
    residual = sum(w * e * e for w, e in zip(W, errors, strict=True))
    return (
        np.array([float(a[0]) for a in b]),
        np.array([[float(a) for a in row] for row in inverse]),
        float(residual),
    )


@pytest.mark.parametrize("forgetting", [1.0, 0.9375])
@pytest.mark.parametrize("apart", [1e-6, 1e-8, 1e-10, 1e-11])
def test_regressors_that_are_nearly_one(apart, forgetting):
    """The condition number is 1 / apart; the normal equations would lose all digits from 1e-8 on."""
    rng = np.random.default_rng(12)
    count = 24
    first = rng.normal(size=count)
    X = np.column_stack([first, first + apart * rng.normal(size=count)])
    design = np.column_stack([np.ones(count), X])
    condition = np.linalg.cond(design)
    assert 0.3 / apart < condition < 10.0 / apart
    y = design @ [1.0, 2.0, -1.0] + 1e-3 * rng.normal(size=count)
    definition = {
        "filter": "rls",
        "states": ["b0", "b1", "b2"],
        "measurement": ["y"],
        "control": ["x1", "x2"],
        "rls": {"forgetting": forgetting},
    }
    model = kalman.build(definition)
    time = np.arange(count) * 1_000_000
    rows = kalman.SortedRows(np.zeros(count, np.int64), time, y[None], X.T.copy())
    states, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    b, inverse, residual = exact(design, y, forgetting)
    rtol = 20.0 * np.finfo(float).eps * condition
    np.testing.assert_allclose(outputs.mean[1:, -1], b[1:], rtol=rtol)
    np.testing.assert_allclose(outputs.mean[0, -1], b[0], rtol=rtol, atol=1e-3 * rtol * abs(b[1]))
    s2 = float(states.values[-2, 0] / states.values[-1, 0])
    np.testing.assert_allclose(
        full(outputs.covariance)[-1] / s2, inverse, rtol=2 * rtol, atol=2 * rtol * inverse[1, 1] * 1e-3
    )
    if forgetting == 1.0:
        np.testing.assert_allclose(states.values[-2, 0], residual, rtol=1e-6)
    assert np.isinf(outputs.covariance[0, 1]) and np.isfinite(outputs.covariance[:, 3:]).all()
