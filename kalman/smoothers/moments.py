"""The backward pass of two moments: rows whose state is still diffuse, and the modes of an IMM, are smoothed by it.

The moments of all later rows are r (n) and N (n x n): a state of mean m and covariance P given the rows up to its own
has mean m + P r and covariance P - P N P given all. No P, Q or R is inverted, so each may be singular; but the
difference loses all digits where P is enormous, so that other rows are smoothed as `kalman.smoothers.linear` says.
While a part P_inf = A A' of the covariance is infinite, r and N are expanded in the powers of 1 / kappa of the prior
P + kappa P_inf, kappa -> infinity: r = r0 + r1 / kappa, N = N0 + N1 / kappa + N2 / kappa^2. Where a measurement
determines a diffuse state that it hardly sees, by a share c of all that it sees, digits are lost with c^4.

References: Bryson and Frazier (1963); de Jong (1989); Durbin and Koopman (2012), sections 4.4 (r and N), 5.3
(the exact diffuse start) and 6.4 (one scalar after another); Koopman and Durbin (2003).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kalman.filters.diffuse import covariance as outer
from kalman.filters.linear import LinearFilter, traced
from kalman.filters.recursions import choose, congruence
from kalman.filters.state_layout import BLOCK
from kalman.filters.update import Scalar, presence
from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, minus, over, plus, times
from kalman.linalg.packing import packed_index, packed_size, symmetric
from kalman.linalg.program import Program, Tape
from kalman.types import Array, Rows

UNDETERMINED = 1e-6
"""A smaller remainder of a diffuse state is the rounding of a state that later rows determine."""


class Later(NamedTuple):
    """The moments of all later rows about a state: r0 (n), N0 (packed), and r1, N1, N2 while something is diffuse."""

    r0: Vector
    N0: Vector
    r1: Vector
    N1: Vector
    N2: Vector


@dataclass(frozen=True)
class MomentSmoother:
    """The smoother of a linear filter. It carries `Later` back as an array (depth, K), zeros at a key's last row.

    States may have more rows after those of the model, which are ignored.
    """

    model: LinearFilter

    def begin(self, values: Array) -> Array:
        """Return the moments after the last row of keys in these states: zeros."""
        n = len(self.model.states)
        p = packed_size(n)
        return np.zeros((2 * n + 3 * p if self.model.diffuse else n + p, values.shape[1]))

    def smoothed(self, after: Array, later: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance (p, K) of states after a row, given the later rows too.

        What no row ever determines has an infinite variance.
        """
        n = len(self.model.states)
        result = np.empty((n + packed_size(n), after.shape[1]))
        for start in range(0, after.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            program = _smoothed_program(self.model, self.model.is_diffuse(after[:, block]))
            _run(program, [*after[: self.model.size, block], *later[:, block]], result[:, block])
        mean, covariance = result[:n], result[n:]
        for i in range(n):
            variance = covariance[packed_index(i, i)]
            np.maximum(variance, 0.0, out=variance)
        return mean, covariance

    def extra(self, later: Array) -> dict[str, Array]:
        """Nothing beside mean and covariance."""
        return {}

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the moments before the rows, about the states (size, K) before them."""
        result = np.empty(later.shape)
        for start in range(0, before.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            part = Rows(rows.dt[block], rows.first[block], rows.y[:, block], rows.u[:, block])
            presents, first = presence(part.y), part.which_first()
            program = _back_program(
                self.model,
                presents[0] is not None,
                first if isinstance(first, bool) else None,
                self.model.is_diffuse(before[:, block]),
            )
            masks = [a for a in (first, *presents) if isinstance(a, np.ndarray)]
            inputs = [*before[: self.model.size, block], part.dt, *part.u, *part.y, *later[:, block], *masks]
            _run(program, inputs, result[:, block])
        return result


def smoothed(m: Vector, P: Vector, A: Matrix | None, later: Later) -> tuple[list[Entry], list[Entry]]:
    """Return mean and packed covariance given all rows of a state (m, P, A) given those up to its own.

    P_inf = A A' leaves the covariance where later rows determine all of it; what is left has infinite
    entries.
    """
    n = len(m)
    full = symmetric(P)
    mean = [plus(a, b) for a, b in zip(m, apply(full, later.r0), strict=True)]
    covariance = [minus(a, b) for a, b in zip(P, congruence(full, later.N0), strict=True)]
    if A is None:
        return mean, covariance
    columns = list(zip(*A, strict=True))
    mean = [plus(a, b) for a, b in zip(mean, apply(A, apply(columns, later.r1)), strict=True)]
    P_inf = symmetric(outer(A))
    second = congruence(P_inf, later.N2)
    N1 = symmetric(later.N1)
    PN = [apply(N1, row) for row in full]  # P N1
    cross = [[dot(row, column) for column in P_inf] for row in PN]  # P N1 P_inf
    # what is left of A when the later rows have determined what they see of it: A (I - A' N1 A)
    seen = [[dot(apply(N1, b), a) for a in columns] for b in columns]
    left = [[minus(a, dot(row, column)) for a, column in zip(row, seen, strict=True)] for row in A]
    for i, (row, rest) in enumerate(zip(A, left, strict=True)):
        real = np.greater(_length(rest), UNDETERMINED * _length(row))
        left[i] = [np.where(real, a, 0.0) for a in rest]
    infinite = outer(left)
    for i in range(n):
        for j in range(i + 1):
            k = packed_index(i, j)
            finite = minus(minus(covariance[k], plus(cross[i][j], cross[j][i])), second[k])
            covariance[k] = np.where(np.equal(infinite[k], 0.0), finite, np.copysign(np.inf, infinite[k]))
    return mean, covariance


def before_update(later: Later, scalars: list[Scalar], G: Matrix, d: Vector) -> Later:
    """Return the moments before the scalar updates z = G x + noise of variances d."""
    for scalar, h, r in reversed(list(zip(scalars, G, d, strict=True))):
        later = _before_scalar(later, scalar, h, r)
    return later


def _before_scalar(later: Later, scalar: Scalar, h: Vector, r: Entry) -> Later:
    """Return the moments before one scalar update.

    With L = I - K h: r = h v / S + L' r and N = h h' / S + L' N L, in the powers of 1 / kappa. K and v are
    zero for a key that lacks the component.
    """
    r0, N0, r1, N1, N2 = later
    _, _, A, (v, M, S, K, diffuse), has = scalar
    precision = over(1.0, S) if has is None else np.where(has, over(1.0, S), 0.0)
    u = times(v, precision)
    g = apply(symmetric(N0), K)
    s = dot(K, g)
    if A is None:
        r0 = [plus(a, times(b, minus(u, dot(K, r0)))) for a, b in zip(r0, h, strict=True)]
        return Later(r0, _seen(N0, h, g, plus(s, precision)), r1, N1, N2)
    improper: Entry = 0.0 if diffuse is None else np.where(diffuse, 1.0, 0.0)
    proper = minus(1.0, improper)
    # where diffuse, K and S are K_inf and F_inf; K1 is the gain's next term, F the proper variance
    F = plus(dot(h, M), r)
    K1 = [times(improper, times(minus(a, times(k, F)), precision)) for a, k in zip(M, K, strict=True)]
    g1, g2 = apply(symmetric(N1), K), apply(symmetric(N2), K)
    e0, e1 = apply(symmetric(N0), K1), apply(symmetric(N1), K1)
    by_r1 = minus(minus(times(improper, u), dot(K, r1)), dot(K1, r0))
    by_r0 = minus(times(proper, u), dot(K, r0))
    c0 = plus(s, times(proper, precision))
    c1 = plus(plus(dot(K, g1), times(improper, precision)), 2.0 * dot(K, e0))
    c2 = plus(
        minus(dot(K, g2), times(improper, times(F, times(precision, precision)))),
        plus(2.0 * dot(K, e1), dot(K1, e0)),
    )
    return Later(
        [plus(a, times(b, by_r0)) for a, b in zip(r0, h, strict=True)],
        _seen(N0, h, g, c0),
        [plus(a, times(b, by_r1)) for a, b in zip(r1, h, strict=True)],
        _seen(N1, h, [plus(a, b) for a, b in zip(g1, e0, strict=True)], c1),
        _seen(N2, h, [plus(a, b) for a, b in zip(g2, e1, strict=True)], c2),
    )


def _seen(N: Vector, h: Vector, g: Vector, c: Entry) -> list[Entry]:
    """Return N - g h' - h g' + c h h', packed."""
    x = [minus(times(0.5, times(c, a)), b) for a, b in zip(h, g, strict=True)]
    n = len(h)
    return [
        plus(N[packed_index(i, j)], plus(times(x[i], h[j]), times(h[i], x[j])))
        for i in range(n)
        for j in range(i + 1)
    ]


def before_prediction(later: Later, F: Matrix, predicted: np.ndarray | None) -> Later:
    """Return the moments before a transition F; predicted (K,) bool: which keys were, None for all."""
    turned = [list(column) for column in zip(*F, strict=True)]
    moved = Later(
        *(apply(turned, part) if k in (0, 2) else congruence(turned, part) for k, part in enumerate(later))
    )
    if predicted is None:
        return moved
    return Later(*(choose(predicted, a, b) for a, b in zip(moved, later, strict=True)))


def _length(vector: Vector) -> Entry:
    return np.sqrt(dot(vector, vector))


def _later(symbols: list[Any], n: int) -> Later:
    p = packed_size(n)
    zero: list[Entry] = [0.0]
    if len(symbols) == n + p:
        return Later(symbols[:n], symbols[n:], zero * n, zero * p, zero * p)
    places = np.cumsum([0, n, p, n, p, p]).tolist()
    return Later(*(symbols[a:b] for a, b in zip(places[:-1], places[1:], strict=True)))


def _flat(later: Later, depth: int) -> list[Entry]:
    return [entry for part in later for entry in part][:depth]


def _depth(model: LinearFilter) -> int:
    n = len(model.states)
    return 2 * n + 3 * packed_size(n) if model.diffuse else n + packed_size(n)


def _run(program: Program, inputs: list[Any], outputs: Array) -> None:
    with np.errstate(all="ignore"):  # only flagged rows can go wrong, and they are left out
        program(inputs, np.empty((program.buffers, outputs.shape[1])), outputs)


@lru_cache(maxsize=64)
def _smoothed_program(model: LinearFilter, diffuse: bool) -> Program:
    """Return `smoothed` as a program. Inputs: state, later. Outputs: mean, packed covariance."""
    tape = Tape()
    state, later = tape.symbols(model.size), tape.symbols(_depth(model))
    parts = model.split(state, diffuse)
    mean, covariance = smoothed(parts.m, parts.P, parts.A, _later(later, len(model.states)))
    return Program(tape, [*state, *later], [*mean, *covariance])


@lru_cache(maxsize=64)
def _back_program(model: LinearFilter, missing: bool, first: bool | None, diffuse: bool) -> Program:
    """Return one step back as a program; the cases are those of `kalman.filters.linear.step_program`."""
    tape = Tape()
    symbols = tape.symbols(_depth(model))
    step = traced(model, tape, missing, first, diffuse)
    later = _later(symbols, len(model.states))
    later = before_update(later, step.updated.scalars, step.updated.noise.G, step.updated.noise.d)
    if first is not True:
        transition = model.process.transition(step.dt, step.u, step.parts.values)
        later = before_prediction(later, transition.F, None if first is False else ~step.first)
    return Program(tape, [*step.inputs, *symbols, *step.masks], _flat(later, len(symbols)))
