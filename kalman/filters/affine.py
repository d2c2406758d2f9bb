"""Carry states over to other coordinates: x' = T x + b + e with e ~ N(0, N) independent of x.

A state that is unchanged, renamed or rescaled is a row of T with one number; a dropped (marginalised) state has no row.
An added state is a row of zeros in T with its mean in b and its variance in N.
"""

from typing import NamedTuple

import numpy as np

from kalman.filters.recursions import congruence
from kalman.linalg.entries import apply, plus
from kalman.linalg.packing import pack, pack_lower, unpack
from kalman.models.checks import Numbers
from kalman.types import Array


class Affine(NamedTuple):
    """The map x' = T x + b + e: T (n', n), b (n',), and N (n', n') positive semidefinite, the covariance of e."""

    T: Numbers
    b: tuple[float, ...]
    N: Numbers

    @property
    def identity(self) -> bool:
        """Return whether the map changes nothing."""
        n = len(self.b)
        same = tuple(tuple(float(i == j) for j in range(n)) for i in range(n))
        return self.T == same and not any(self.b) and not any(any(row) for row in self.N)


def move_moments(mean: Array, covariance: Array, to: Affine) -> tuple[Array, Array]:
    """Return mean (n', K) and full row-major covariance (n'*n', K) of x', from the moments of x.

    Entries are computed one by one, so that the entries of unchanged or renamed states keep their bits.
    """
    keys = np.shape(mean)[1]
    m = [plus(a, b) for a, b in zip(apply(to.T, list(mean)), to.b, strict=True)]
    P = [plus(a, n) for a, n in zip(congruence(to.T, list(pack(covariance))), pack_lower(to.N), strict=True)]
    return (
        np.array([np.broadcast_to(a, keys) for a in m]).reshape(len(m), keys),
        unpack(np.array([np.broadcast_to(a, keys) for a in P]).reshape(len(P), keys)),
    )
