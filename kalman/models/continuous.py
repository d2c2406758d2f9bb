"""Any linear model in continuous time, with an exact transition over the time between two rows.

The transition is a Taylor series over a short step h, which is then doubled: F(2h) = F(h) F(h),
Q(2h) = Q(h) + F(h) Q(h) F(h)'. Doubling adds covariances and never subtracts.

References: Van Loan (1978), "Computing integrals involving the matrix exponential".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, is_zero, plus, times
from kalman.linalg.packing import pack_lower, packed_size, unpack_symmetric
from kalman.linalg.program import call_recorded
from kalman.models import checks, columns
from kalman.models.columns import Cell, Cells, resolve, resolve_matrix
from kalman.models.inputs import compute_input, parse_inputs
from kalman.models.learned_entries import insert_entries, parse_entry_name
from kalman.models.structure import Parameter, Plain, Transition, Values, with_noise
from kalman.types import Array

ORDER = 16
"""Number of terms of the series: over a step with |A| h < 1/4, the next term is below rounding."""


@dataclass(frozen=True)
class Continuous(Plain):
    """dx = (A x + B u + offset) dt + L dW, with `diffusion` = L L' per unit of time and u constant between two rows.

    entries: the entries of A that groups or keys learn, which are therefore parameters.
    """

    A: Cells
    diffusion: tuple[Cell, ...]
    B: Cells | None = None
    offset: tuple[Cell, ...] | None = None
    entries: tuple[Parameter, ...] = ()

    @classmethod
    def parse(cls, field: str, definition: Mapping[str, Any], controls: Sequence[str]) -> Self:
        checks.check_keys(field, definition, ("kind", "name", "A", "diffusion", "B", "offset"))
        A = columns.parse_matrix_cells(
            f"{field}.A", checks.require_key(field, definition, "A"), names=controls
        )
        n = len(A)
        A = columns.parse_matrix_cells(f"{field}.A", definition["A"], n, n, controls)
        diffusion = columns.parse_covariance_cells(
            f"{field}.diffusion", checks.require_key(field, definition, "diffusion"), n, controls
        )
        return cls(A, diffusion, *parse_inputs(field, definition, n, controls))

    @property
    def size(self) -> int:
        return len(self.A)

    @property
    def controlled(self) -> bool:
        return self.B is not None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("diffusion", "covariance", self.diffusion), *self.entries)

    def transition(self, dt: Array, u: Sequence[Entry], values: Values) -> Transition:
        A, n = insert_entries("A", resolve_matrix(self.A, u), values), self.size
        moved = compute_input(self.B, self.offset, n, u)
        driven = not all(is_zero(a) for a in moved)
        F, G, (Q,) = discretise_system(A, [resolve(values["diffusion"], u)], dt, driven)
        return Transition(F, Q, apply(G, moved) if driven else [0.0] * n)

    def tangents(self, name: str, dt: Array, u: Sequence[Entry], values: Values) -> list[Transition]:
        size = packed_size(self.size)
        A, entry = insert_entries("A", resolve_matrix(self.A, u), values), parse_entry_name(name)
        if entry is not None:
            moved = compute_input(self.B, self.offset, self.size, u)
            return [_differentiate_entry(A, resolve(values["diffusion"], u), dt, entry[1:], moved)]
        units = [[float(i == e) for i in range(size)] for e in range(size)]
        _, _, noises = discretise_system(A, units, dt, False)
        return [with_noise(Q, self.size) for Q in noises]

    def guards(self, u: Sequence[Entry]) -> list[Entry]:
        return (
            [columns.compute_lowest_pivot(resolve(self.diffusion, u))]
            if columns.find_columns(self.diffusion)
            else []
        )


class Discretised(NamedTuple):
    """F = exp(A t); G, the integral of exp(A s) over 0 < s < t; Q, the integral of exp(A s) D exp(A s)' for each D."""

    F: Matrix
    G: Matrix
    Q: list[Vector]


def discretise_system(A: Matrix, D: Sequence[Vector], dt: Entry, driven: bool) -> Discretised:
    """Discretise dx = A x dt + noise of spectral density D over a time dt, for each of several D (packed).

    If the zeros of A make A nilpotent, the series ends and its sum is exact. G is valid only with `driven`.
    """
    n = len(A)
    shape = _Shape(
        tuple(tuple(not is_zero(a) for a in row) for row in A), tuple(_find_support(d) for d in D), driven
    )
    if not any(shape.reach_again[i][i] for i in range(n)):
        return _sum_series(A, D, dt, n, driven)
    rows = [a for row in A for a in row]
    cells = [*rows, *(a for d in D for a in d)]
    varying = [a for a in cells if not isinstance(a, float)]
    plan = _Plan(shape, tuple(a if isinstance(a, float) else None for a in cells))
    return shape.spread(call_recorded(plan, shape.count, [dt, *varying]))


def _differentiate_entry(
    A: Matrix, D: Vector, dt: Entry, entry: tuple[int, int], moved: Vector
) -> Transition:
    """Return the derivative of F, Q and c by an entry of A.

    E is the unit matrix of that entry. The discretisation of [[A, E], [0, A]] has dF, dG and the integral of dF D F' in
    its blocks (Van Loan 1978; Mathias 1996).
    """
    n = len(A)
    unit = [[float((i, j) == entry) for j in range(n)] for i in range(n)]
    twice = [[*a, *e] for a, e in zip(A, unit, strict=True)] + [[*[0.0] * n, *a] for a in A]
    full = unpack_symmetric(D)
    noise = pack_lower([[0.0] * (2 * n)] * n + [[*[0.0] * n, *row] for row in full])
    driven = not all(is_zero(a) for a in moved)
    F, G, (Q,) = discretise_system(twice, [noise], dt, driven)
    Q_full = unpack_symmetric(Q)
    half = [row[n:] for row in Q_full[:n]]
    dQ = [plus(half[i][j], half[j][i]) for i in range(n) for j in range(i + 1)]
    c = apply([row[n:] for row in G[:n]], moved) if driven else [0.0] * n
    return Transition([row[n:] for row in F[:n]], dQ, c)


def _find_support(packed: Vector) -> tuple[bool, ...]:
    return tuple(not is_zero(a) for a in packed)


def _sum_series(A: Matrix, D: Sequence[Vector], dt: Entry, n: int, driven: bool) -> Discretised:
    """Return the sum of the series of a matrix with A^n = 0."""
    identity = _build_identity(n)
    F, G = identity, [[times(a, dt) for a in row] for row in identity]
    power, time = identity, dt
    for k in range(1, n):
        power = [[times(a, 1.0 / k) for a in row] for row in _multiply_rows(A, power)]
        F = _add_matrices(F, power, time)
        time = times(time, dt)
        if driven:
            G = _add_matrices(G, power, times(time, 1.0 / (k + 1)))
    noises: list[Vector] = []
    for d in D:
        M, Q, time = list(d), [times(a, dt) for a in d], dt
        for k in range(2, 2 * n):
            M = [times(a, 1.0 / k) for a in _compute_lyapunov(A, M)]
            time = times(time, dt)
            Q = [plus(q, times(a, time)) for q, a in zip(Q, M, strict=True)]
        noises.append(Q)
    return Discretised(F, G, noises)


@dataclass(frozen=True)
class _Shape:
    """Structural nonzeros of A (n x n) and of each D (packed), from which those of the results follow."""

    A: tuple[tuple[bool, ...], ...]
    D: tuple[tuple[bool, ...], ...]
    driven: bool

    @cached_property
    def reach_again(self) -> list[list[bool]]:
        """Row i marks the states on which state i depends by a path of one or more steps (Warshall)."""
        n = len(self.A)
        reach = [list(row) for row in self.A]
        for k in range(n):
            for i in range(n):
                for j in range(n):
                    reach[i][j] = reach[i][j] or (reach[i][k] and reach[k][j])
        return reach

    @cached_property
    def kept(self) -> list[tuple[int, int]]:
        """The places (i, j) of F and G whose values are computed; all other entries are structural zeros or ones."""
        n = len(self.A)
        return [(i, j) for i in range(n) for j in range(n) if self.reach_again[i][j] or (i == j)]

    @cached_property
    def noisy(self) -> list[list[int]]:
        """For each Q, the indices of the packed entries that are not zero."""
        n = len(self.A)
        reach = [[self.reach_again[i][j] or i == j for j in range(n)] for i in range(n)]
        found: list[list[int]] = []
        for d in self.D:
            full = unpack_symmetric(d)
            hit = pack_lower(
                [
                    [
                        any(full[k][m] and reach[i][k] and reach[j][m] for k in range(n) for m in range(n))
                        for j in range(n)
                    ]
                    for i in range(n)
                ]
            )
            found.append([e for e, yes in enumerate(hit) if yes])
        return found

    @property
    def count(self) -> int:
        """Number of results that are computed."""
        return len(self.kept) * (1 + self.driven) + sum(len(noisy) for noisy in self.noisy)

    def spread(self, flat: Sequence[Entry]) -> Discretised:
        """Return the results as matrices, from the computed entries and the structural zeros and ones."""
        n = len(self.A)
        rest = iter(flat)
        F, G = _build_identity(n), _build_identity(n)
        for matrix in (F, G) if self.driven else (F,):
            for i, j in self.kept:
                matrix[i][j] = next(rest)
        for i in range(n):
            if not self.reach_again[i][i]:
                F[i][i] = 1.0
        noises: list[Vector] = []
        for noisy in self.noisy:
            Q: list[Entry] = [0.0] * packed_size(n)
            for e in noisy:
                Q[e] = next(rest)
            noises.append(Q)
        return Discretised(F, G, noises)


@dataclass(frozen=True)
class _Plan:
    """The series and its doublings as a function of dt (K,) and of the entries that vary between keys.

    Matrices are arrays (n, n, K) here, or (n, n, 1) if no entry varies, because the function runs at every step and a
    NumPy call for each entry would cost more than the arithmetic. All operations are still elementwise along the keys.
    """

    shape: _Shape
    cells: tuple[float | None, ...]

    def __call__(self, dt: Array, *varying: Array) -> Array:
        """Return the computed results, (count, K)."""
        dt = np.asarray(dt, float)
        if varying:
            return self._work(dt, varying)
        few, which = np.unique(dt, return_inverse=True)  # most data sets have few different dt
        return self._work(few, ())[:, which]

    @cached_property
    def _constant(self) -> "_Scaled | None":
        return _scale_series(*self._build_matrices(())) if all(a is not None for a in self.cells) else None

    def _build_matrices(self, varying: Sequence[Array]) -> tuple[Array, Array]:
        """Return A (n, n, K) and D (d, n, n, K)."""
        rest = iter(varying)
        cells = [np.atleast_1d(next(rest) if a is None else a) for a in self.cells]
        n = len(self.shape.A)
        size = packed_size(n)
        D = [unpack_symmetric(cells[n * n + k * size :][:size]) for k in range(len(self.shape.D))]
        width = max(len(a) for a in cells)
        stacked = np.array([np.broadcast_to(a, width) for a in cells[: n * n]]).reshape(n, n, width)
        return stacked, np.array([[[np.broadcast_to(a, width) for a in row] for row in d] for d in D])

    def _work(self, dt: Array, varying: Sequence[Array]) -> Array:
        unit, powers, noises = self._constant or _scale_series(*self._build_matrices(varying))
        t = np.ldexp(dt, unit)
        doublings = np.where(np.isfinite(t), np.maximum(np.frexp(t)[1] + 2, 0), 0)
        h = np.ldexp(t, -doublings)
        F = _evaluate_horner(powers, h)
        G = _evaluate_horner([p / (k + 1) for k, p in enumerate(powers)], h) * h
        Q = _evaluate_horner(noises, h) * h
        for k in range(int(doublings.max(initial=0))):
            more = k < doublings
            Q = np.where(more, Q + _multiply_matrices(_multiply_matrices(F, Q), F.swapaxes(0, 1)), Q)
            if self.shape.driven:
                G = np.where(more, G + _multiply_matrices(F, G), G)
            F = np.where(more, _multiply_matrices(F, F), F)
        n = len(F)
        matrices = (F, np.ldexp(G, -unit)) if self.shape.driven else (F,)
        flat = [matrix[i, j] for matrix in matrices for i, j in self.shape.kept]
        for q, noisy in zip(Q, self.shape.noisy, strict=True):
            packed = [q[i, j] for i in range(n) for j in range(i + 1)]
            flat += [packed[e] for e in noisy]
        return np.array(flat)


class _Scaled(NamedTuple):
    """The series: the exponent of its time unit, and in this unit A^k / k! and noise terms / h, by powers of h."""

    unit: Any
    powers: list[Array]
    noises: list[Array]


def _scale_series(A: Array, D: Array) -> _Scaled:
    """Return the series in a unit of time in which |A| < 1; the unit is a power of two, so that scaling is exact."""
    norm = A[:, 0] * 0.0
    for column in np.abs(A).swapaxes(0, 1):
        norm = norm + column
    largest = norm[0]
    for row in norm[1:]:
        largest = np.maximum(largest, row)
    unit = np.where(np.isfinite(largest), np.frexp(largest)[1], 0)
    A, D = np.ldexp(A, -unit), np.ldexp(D, -unit)
    powers = [np.broadcast_to(np.eye(len(A))[:, :, None], A.shape)]
    for k in range(1, ORDER):
        powers.append(_multiply_matrices(A, powers[-1]) / k)
    noises = [D]
    for k in range(2, ORDER + 1):
        AM = _multiply_matrices(A, noises[-1])
        noises.append((AM + AM.swapaxes(-3, -2)) / k)
    return _Scaled(unit, powers, noises)


def _evaluate_horner(coefficients: Sequence[Array], h: Array) -> Array:
    total = coefficients[-1]
    for a in reversed(coefficients[:-1]):
        total = total * h + a
    return total


def _multiply_matrices(A: Array, B: Array) -> Array:
    """Return the product of matrices (..., n, n, K); each sum runs from the first to the last term."""
    total = A[..., :, 0, None, :] * B[..., None, 0, :, :]
    for k in range(1, A.shape[-2]):
        total = total + A[..., :, k, None, :] * B[..., None, k, :, :]
    return total


def _build_identity(n: int) -> list[list[Entry]]:
    return [[float(i == j) for j in range(n)] for i in range(n)]


def _multiply_rows(A: Matrix, B: Matrix) -> list[list[Entry]]:
    return [[dot(row, column) for column in zip(*B, strict=True)] for row in A]


def _add_matrices(A: Matrix, B: Matrix, scale: Entry) -> list[list[Entry]]:
    """Return A + scale B."""
    return [[plus(a, times(b, scale)) for a, b in zip(x, y, strict=True)] for x, y in zip(A, B, strict=True)]


def _compute_lyapunov(A: Matrix, M: Vector) -> list[Entry]:
    """Return A M + M A', packed, of a packed symmetric M."""
    AM = _multiply_rows(A, unpack_symmetric(M))
    return [plus(AM[i][j], AM[j][i]) for i in range(len(A)) for j in range(i + 1)]
