"""Symmetric matrices as their lower triangle, row by row: [P00, P10, P11, P20, ...]."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kalman.types import Array


def packed_size(n: int) -> int:
    """Return the number of entries in the lower triangle of an n x n matrix."""
    return n * (n + 1) // 2


def packed_index(i: int, j: int) -> int:
    """Return the index of entry (i, j), on either side of the diagonal, in the packed triangle."""
    return i * (i + 1) // 2 + j if i >= j else j * (j + 1) // 2 + i


def find_order(size: int) -> int:
    """Return the n of an n x n matrix whose packed triangle has `size` entries."""
    return int((np.sqrt(8 * size + 1) - 1) / 2 + 0.5)


@lru_cache
def _list_full_indices(size: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each entry of the full matrix, its index in a packed triangle of `size` entries."""
    n = find_order(size)
    return tuple(tuple(packed_index(i, j) for j in range(n)) for i in range(n))


def unpack_symmetric(packed: Sequence[Any]) -> list[list[Any]]:
    """Return the full matrix as nested lists that share the packed triangle's entries."""
    return [[packed[k] for k in row] for row in _list_full_indices(len(packed))]


def pack_lower(matrix: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the packed lower triangle of nested sequences (or of an array (n, n, ...))."""
    return [matrix[i][j] for i in range(len(matrix)) for j in range(i + 1)]


def unpack(packed: Array) -> Array:
    """Return the row-major full matrices (n*n, K) of packed triangles (n(n+1)/2, K)."""
    n = find_order(len(packed))
    return packed[[packed_index(i, j) for i in range(n) for j in range(n)]]


def pack(full: Array) -> Array:
    """Return the packed lower triangles (n(n+1)/2, K) of row-major full matrices (n*n, K)."""
    n = int(np.sqrt(len(full)) + 0.5)
    return full[[i * n + j for i in range(n) for j in range(i + 1)]]
