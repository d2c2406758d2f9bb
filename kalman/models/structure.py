"""The protocol of process structures, and the types that all of them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from kalman.linalg.entries import Entry, Matrix, Vector
from kalman.linalg.packing import packed_index, packed_size
from kalman.models import checks
from kalman.models.columns import Cell
from kalman.types import Array


class Transition(NamedTuple):
    """x' = F x + c + w, w ~ N(0, Q): F (n x n entries), Q (packed lower entries), c (n entries)."""

    F: Matrix
    Q: Vector
    c: Vector


class Parameter(NamedTuple):
    """A parameter of the model: a value as packed entries, and a kind, which determines the valid values.

    A parameter of kind "positive", "real" or "bounded" is a number; a "bounded" number lies between `bounds` (None
    means no bound). A "vector" is several numbers, a "covariance" a packed lower triangle, "chances" a row of
    probabilities, and a "transition" a square matrix of probabilities. A parameter with an entry from a column cannot
    be learned.
    """

    name: str
    kind: str
    value: tuple[Cell, ...]
    bounds: tuple[float | None, float | None] | None = None


Values = Mapping[str, Sequence[Any]]
"""The packed entries of each parameter, by name."""


class Structure(Protocol):
    """A model of the state's motion."""

    @property
    def size(self) -> int: ...
    @property
    def controlled(self) -> bool: ...
    @property
    def observes(self) -> checks.Numbers | None: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        """Return the structure of a model definition; `controls` are the names of u. Raises ModelError."""
        ...

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        """Return F, Q, c of a step over the time dt (K,) with the controls u."""
        ...

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        """Return the derivative of the transition by each packed entry of a parameter."""
        ...

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        """Return entries that are zero or more for the keys whose row has columns that give a valid noise."""
        ...


@dataclass(frozen=True)
class Around:
    """Base class of a structure that wraps another structure (`inner`)."""

    inner: Structure

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def controlled(self) -> bool:
        return self.inner.controlled

    @property
    def observes(self) -> checks.Numbers | None:
        return self.inner.observes


class Plain:
    """Base class of a structure without controls, columns, or a measurement matrix, unless it overrides them."""

    @property
    def controlled(self) -> bool:
        return False

    @property
    def observes(self) -> checks.Numbers | None:
        return None

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        return []


def block_diagonal(parts: Sequence[Transition]) -> Transition:
    """Return the block-diagonal transition of independent parts."""
    sizes = [len(part.c) for part in parts]
    n = sum(sizes)
    F: list[list[Entry]] = [[0.0] * n for _ in range(n)]
    Q: list[Entry] = [0.0] * packed_size(n)
    c: list[Entry] = []
    for part, size in zip(parts, sizes, strict=True):
        start = len(c)
        for i in range(size):
            for j in range(size):
                F[start + i][start + j] = part.F[i][j]
                if j <= i:
                    Q[packed_index(start + i, start + j)] = part.Q[packed_index(i, j)]
        c.extend(part.c)
    return Transition(F, Q, c)


def build_zero_transition(n: int) -> Transition:
    """Return the zero derivative of a transition of n states."""
    return Transition([[0.0] * n for _ in range(n)], [0.0] * packed_size(n), [0.0] * n)


def with_noise(Q: Sequence[Entry], size: int) -> Transition:
    """Return the derivative of a transition by a parameter that changes only the noise Q."""
    return build_zero_transition(size)._replace(Q=list(Q))


def parse_variance(field: str, definition: Mapping[str, Any], name: str) -> float:
    """Return a variance, zero or more, of a definition. Raises ModelError."""
    return checks.parse_positive(f"{field}.{name}", checks.require_key(field, definition, name), zero=True)
