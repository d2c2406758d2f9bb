"""Parameters as unconstrained numbers: the logarithm of a variance, the log-Cholesky factor of a covariance.

A covariance is L L' with L_ii = exp(t_ii) and L_ij = exp(t_ii) t_ij: any t gives a covariance, and t_ij has no unit. A
zero of the starting matrix stays zero. A probability becomes the logarithm of its ratio to the greatest probability of
its row; a zero stays zero. All functions work on numbers and on (K,) arrays alike.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kalman.linalg.entries import Entry
from kalman.linalg.packing import packed_index, unpack_symmetric
from kalman.models.columns import require_numbers
from kalman.models.structure import Parameter
from kalman.types import ModelError

LEAST = 1e-300
"""Smallest variance whose logarithm is a free number."""
ROUNDING = 1e-14
"""Share of a variance below which the conditional variance is a rounding error."""


CHANCES = ("chances", "transition")
"""Kinds of parameters whose rows are probabilities: a single row, or a square matrix."""


def list_probability_rows(parameter: Parameter) -> list[range]:
    """Return the packed entries of each row of probabilities."""
    size = len(parameter.value)
    width = math.isqrt(size) if parameter.kind == "transition" else size
    return [range(a, a + width) for a in range(0, size, width)]


def list_free_entries(parameter: Parameter) -> list[int]:
    """Return the packed entries that have a free number: not structural zeros, not each row's greatest probability."""
    if parameter.kind in CHANCES:
        return [
            e
            for row in list_probability_rows(parameter)
            for e in row
            if parameter.value[e] and e != _find_greatest(parameter, row)
        ]
    if parameter.kind != "covariance":
        return list(range(len(parameter.value)))
    return [e for e, value in enumerate(parameter.value) if value != 0.0]


def start(parameter: Parameter, field: str) -> list[float]:
    """Return the free numbers of a parameter's value. Raises ModelError for a value without free numbers."""
    entries = require_numbers(parameter.value)
    if parameter.kind in CHANCES:
        greatest = {
            e: entries[_find_greatest(parameter, row)]
            for row in list_probability_rows(parameter)
            for e in row
        }
        return [math.log(entries[e] / greatest[e]) for e in list_free_entries(parameter)]
    if parameter.kind in ("real", "vector"):
        return list(entries)
    if parameter.kind == "bounded":
        return [_map_from_bounds(parameter, entries[0])]
    if parameter.kind == "positive":
        if entries[0] <= 0.0:
            raise ModelError(field, "it starts at zero and cannot be learned", "start it above zero")
        return [math.log(entries[0])]
    full = np.array(unpack_symmetric(entries))
    linked = full != 0.0
    if not linked.any():
        raise ModelError(
            field, "it starts at zero and cannot be learned", "start it with variances above zero"
        )
    if ((linked.astype(int) @ linked.astype(int) > 0) & ~linked).any():
        raise ModelError(
            field,
            "its zeros cannot be kept while it is learned",
            "start with a full, a diagonal or a block-diagonal matrix",
        )
    varying = np.flatnonzero(np.diag(linked))
    factor = np.zeros_like(full)
    try:
        factor[np.ix_(varying, varying)] = np.linalg.cholesky(full[np.ix_(varying, varying)])
    except np.linalg.LinAlgError:
        raise ModelError(
            field, "it is singular and cannot be learned", "start with a positive definite matrix"
        ) from None
    result = []
    for i in range(len(full)):
        for j in range(i + 1):
            if linked[i, j]:
                result.append(math.log(factor[i, i]) if i == j else factor[i, j] / factor[i, i])
    return [float(a) for a in result]


def invert_entries(parameter: Parameter, entries: Sequence[Entry]) -> list[Entry]:
    """Return the free numbers (J,) of valid packed entries (J,); the inverse of `compute_entries`.

    A variance of zero or below, possibly from rounding, becomes `LEAST`.
    """
    if parameter.kind in ("real", "vector"):
        return list(entries)
    if parameter.kind == "bounded":
        low, high = parameter.bounds or (None, None)
        below = None if low is None else np.maximum(np.subtract(entries[0], low), LEAST)
        above = None if high is None else np.maximum(np.subtract(high, entries[0]), LEAST)
        if below is not None and above is not None:
            return [np.log(below / above)]
        beyond = above if below is None else below
        assert beyond is not None  # the parameter has at least one bound
        return [np.log(beyond)]
    if parameter.kind == "positive":
        return [np.log(np.maximum(entries[0], LEAST))]
    kept = list_free_entries(parameter)
    n = len(unpack_symmetric(parameter.value))
    L: list[list[Any]] = [[0.0] * n for _ in range(n)]
    found: dict[int, Entry] = {}
    for i in range(n):
        for j in range(i + 1):
            e = packed_index(i, j)
            if e not in kept:
                continue
            rest = entries[e] - sum((L[i][k] * L[j][k] for k in range(j)), 0.0)
            if i == j:
                L[i][i] = np.sqrt(np.maximum(rest, np.maximum(ROUNDING * entries[e], LEAST)))
                found[e] = np.log(L[i][i])
            else:
                L[i][j] = rest / L[j][j]
    for i in range(n):
        for j in range(i):
            if packed_index(i, j) in kept:
                found[packed_index(i, j)] = L[i][j] / L[i][i]
    return [found[e] for e in kept]


def compute_entries(parameter: Parameter, theta: Sequence[Entry]) -> list[Entry]:
    """Return the parameter's packed entries for its free numbers."""
    if parameter.kind in CHANCES:
        return _compute_chances(parameter, theta)
    if parameter.kind in ("real", "vector"):
        return list(theta)
    if parameter.kind == "bounded":
        return [_map_to_bounds(parameter, theta[0])[0]]
    if parameter.kind == "positive":
        return [np.exp(theta[0])]
    L = _build_factor(parameter, theta)
    return [
        sum((L[i][k] * L[j][k] for k in range(j + 1)), 0.0)
        if parameter.value[packed_index(i, j)] != 0.0
        else 0.0
        for i in range(len(L))
        for j in range(i + 1)
    ]


def pull_back(parameter: Parameter, theta: Sequence[Entry], slope: Sequence[Entry]) -> list[Entry]:
    """Return the derivatives by the free numbers, given the derivatives by the packed entries."""
    if parameter.kind in CHANCES:
        found = _compute_chances(parameter, theta)
        mean = {
            e: sum((slope[k] * found[k] for k in row), 0.0)
            for row in list_probability_rows(parameter)
            for e in row
        }
        return [found[e] * (slope[e] - mean[e]) for e in list_free_entries(parameter)]
    if parameter.kind in ("real", "vector"):
        return list(slope)
    if parameter.kind == "bounded":
        return [slope[0] * _map_to_bounds(parameter, theta[0])[1]]
    if parameter.kind == "positive":
        return [slope[0] * np.exp(theta[0])]
    L = _build_factor(parameter, theta)
    n = len(L)
    by_factor: list[list[Entry]] = [[0.0 for _ in range(n)] for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            if parameter.value[packed_index(i, j)] != 0.0:  # (S L)_ij with S twice the symmetric derivative
                terms = [(2.0 if i == k else 1.0) * slope[packed_index(i, k)] * L[k][j] for k in range(j, n)]
                by_factor[i][j] = sum(terms, 0.0)
    result: list[Entry] = []
    for i in range(n):
        for j in range(i + 1):
            if parameter.value[packed_index(i, j)] == 0.0:
                continue
            if i == j:
                result.append(sum((by_factor[i][k] * L[i][k] for k in range(i + 1)), 0.0))
            else:
                result.append(by_factor[i][j] * L[i][i])
    return result


def _find_greatest(parameter: Parameter, row: range) -> int:
    """Return the entry of a row's greatest probability; of equal probabilities, the first entry."""
    return max(row, key=lambda e: (parameter.value[e], -e))


def _compute_chances(parameter: Parameter, theta: Sequence[Entry]) -> list[Entry]:
    number = dict(zip(list_free_entries(parameter), theta, strict=True))
    result: list[Entry] = [0.0] * len(parameter.value)
    for row in list_probability_rows(parameter):
        logs = {e: number.get(e, 0.0) for e in row if parameter.value[e] != 0.0}
        highest: Entry = 0.0
        for a in logs.values():
            highest = np.maximum(highest, a)
        shares = {e: np.exp(np.subtract(a, highest)) for e, a in logs.items()}
        total = sum(shares.values(), 0.0)
        for e, share in shares.items():
            result[e] = share / total
    return result


def _map_to_bounds(parameter: Parameter, theta: Entry) -> tuple[Entry, Entry]:
    """Return the number between the bounds for a free number, and its derivative."""
    low, high = parameter.bounds or (None, None)
    if low is None or high is None:
        beyond = np.exp(theta)
        return (
            (high - beyond, -beyond) if low is None and high is not None else ((low or 0.0) + beyond, beyond)
        )
    share = 1.0 / (1.0 + np.exp(-theta))
    return low + (high - low) * share, (high - low) * share * (1.0 - share)


def _map_from_bounds(parameter: Parameter, number: float) -> float:
    low, high = parameter.bounds or (None, None)
    if low is not None and high is not None:
        return math.log((number - low) / (high - number))
    return math.log(high - number if high is not None else number - (low or 0.0))


def _build_factor(parameter: Parameter, theta: Sequence[Entry]) -> list[list[Entry]]:
    n = len(unpack_symmetric(parameter.value))
    number = dict(zip(list_free_entries(parameter), theta, strict=True))
    L: list[list[Entry]] = [[0.0] * n for _ in range(n)]
    for i in range(n):
        own = number.get(packed_index(i, i))
        if own is None:
            continue
        L[i][i] = np.exp(own)
        for j in range(i):
            if packed_index(i, j) in number:
                L[i][j] = L[i][i] * number[packed_index(i, j)]
    return L
