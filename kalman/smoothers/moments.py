"""The backward pass of two moments, used for rows with a diffuse state and for most other rows.

The moments of all later rows are r (n) and N (n x n): a state with mean m and covariance P given the rows so far has
mean m + P r and covariance P - P N P given all rows. No P, Q or R is inverted, so each of the three may be singular.
But the difference loses all digits where P is enormous (`kalman.smoothers.linear` handles this case).

While a state is m + A c + e with columns A and coefficients c (`kalman.filters.diffuse`), r and N are about e, given
the coefficients. Given all rows, c is mu + Xi w with w ~ N(0, I), and r - Omega w takes the place of r. So the state
has mean m + A mu + P r and covariance P - P N P + T T' with T = A Xi - P Omega. On the way back, a measurement that
determined a coefficient, or informed about the coefficient, gives its value. A column d that the filter folded into its
covariance P + d d' is taken out again: given r and N, the coefficient of d has mean d' r and variance 1 - d' N d.
Nothing here tends to infinity.

References: Bryson and Frazier (1963); de Jong (1989, 1991); Durbin and Koopman (2012), sections 4.4 (r and N), 5.7 (the
augmented smoother) and 6.4 (one scalar after another).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kalman.filters.diffuse import (
    Projection,
    Reflection,
    build_reflection,
    compute_flat_gains,
    compute_whole_covariance,
    condition_columns,
    split,
)
from kalman.filters.linear import LinearFilter, Traced, record_step
from kalman.filters.recursions import choose, congruence
from kalman.filters.state_layout import BLOCK
from kalman.filters.update import Scalar, find_trusted, mask_present
from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, minus, over, plus, times
from kalman.linalg.packing import packed_index, packed_size, unpack_symmetric
from kalman.linalg.program import Program, Recorded, Tape
from kalman.types import Array, Rows

UNDETERMINED = 1e-6
"""A relative diffuse remainder up to this is a rounding error: later rows determine the state."""

LOST = -1e-9
"""A smoothed variance below this multiple of the filter's is lost to rounding; one between this and zero is zero."""


class Later(NamedTuple):
    """The moments of all later rows r (n), N (packed), and Omega (n x q), mu (q), Xi (q x q) of
    columns.

    endless (q): 1 for a component of w that no row determines (its variance is infinite), else 0
    largest (n): the largest entry of N's diagonal about any later state
    """

    r: Vector
    N: Vector
    Omega: Matrix
    mu: Vector
    Xi: Matrix
    endless: Vector
    largest: Vector


@dataclass(frozen=True)
class MomentSmoother:
    """The smoother of a linear filter, which carries `Later` back as an array (depth, K).

    A state may have more rows than the model's `size`; the further rows are ignored.
    """

    model: LinearFilter

    @cached_property
    def variances(self) -> np.ndarray:
        """Positions (n,) of the variances in a state, which begins with the mean and the packed covariance."""
        n = len(self.model.states)
        return np.array([n + packed_index(i, i) for i in range(n)])

    def begin(self, values: Array) -> Array:
        """Return the moments after the last row of keys in these states (size, K)."""
        later = np.zeros((_count_symbols(self.model), values.shape[1]))
        if self.model.is_diffuse(values):
            n, q = len(self.model.states), _count_columns(self.model)
            A = values[self.model.places["diffuse"]].reshape(n, q, -1)
            xi = len(later) - n - q - q * q
            for j in range(q):
                later[xi + j * q + j] = (A[:, j] != 0.0).any(axis=0)
            flat = np.array(split([list(row) for row in A])[0])
            later[xi + q * q : xi + q * q + q] = (flat != 0.0).any(axis=0)
        return later

    def smoothed(self, after: Array, later: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance (p, K) of states after a row, given the later rows too.

        An undetermined state has an infinite variance. The results of a key with a variance lost to rounding are NaN.
        """
        n = len(self.model.states)
        result = np.empty((n + packed_size(n), after.shape[1]))
        for start in range(0, after.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            program = _build_smoothed_program(self.model, self.model.is_diffuse(after[:, block]))
            run_program(program, [*after[: self.model.size, block], *later[:, block]], result[:, block])
        variances = result[self.variances]
        lost = (variances < LOST * after[self.variances]).any(axis=0)
        result[self.variances] = np.maximum(variances, 0.0)
        if lost.any():
            result[:, lost] = np.nan
        return result[:n], result[n:]

    def extra(self, later: Array) -> dict[str, Array]:
        """Return an empty mapping: the smoother has no outputs beside mean and covariance."""
        return {}

    def record_clear_back(self, missing: bool) -> tuple[Recorded, Recorded]:
        """Return the records of `back` and `smoothed` for a row in order; missing: some rows lack components.

        Inputs of the first: state, dt, control, measurement, moments, masks; of the second: state, moments.
        """
        back = _build_back_program(self.model, missing, False, False)
        return back.recorded, _build_smoothed_program(self.model, False).recorded

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the moments before the rows, about the states `before` (size, K) the rows."""
        result = np.empty(later.shape)
        for start in range(0, before.shape[1], BLOCK):
            block = slice(start, start + BLOCK)
            part = Rows(rows.dt[block], rows.first[block], rows.y[:, block], rows.u[:, block])
            presents, first = mask_present(part.y), part.mask_first_rows()
            program = _build_back_program(
                self.model,
                presents[0] is not None,
                first if isinstance(first, bool) else None,
                self.model.is_diffuse(before[:, block]),
            )
            masks = [a for a in (first, *presents) if isinstance(a, np.ndarray)]
            inputs = [*before[: self.model.size, block], part.dt, *part.u, *part.y, *later[:, block], *masks]
            run_program(program, inputs, result[:, block])
        return result


def smooth_state(m: Vector, P: Vector, A: Matrix | None, later: Later) -> tuple[list[Entry], list[Entry]]:
    """Return mean and packed covariance given all rows, from a state (m, P, A) given the rows so far.

    Undetermined entries of the covariance are infinite.
    """
    full = unpack_symmetric(P)
    mean = [plus(a, b) for a, b in zip(m, apply(full, later.r), strict=True)]
    covariance = [minus(a, b) for a, b in zip(P, congruence(full, later.N), strict=True)]
    if A is None:
        return mean, covariance
    D = [[plus(a, c) for a, c in zip(*rows, strict=True)] for rows in zip(*split(A), strict=True)]
    mean = [plus(a, dot(row, later.mu)) for a, row in zip(mean, D, strict=True)]
    finite: list[list[Entry]] = []
    free: list[list[Entry]] = []
    for row, own in zip(D, full, strict=True):
        by_xi, by_omega = apply(_transpose_rows(later.Xi), row), apply(_transpose_rows(later.Omega), own)
        T = [minus(a, b) for a, b in zip(by_xi, by_omega, strict=True)]
        size = dot([np.abs(a) for a in row], [_compute_length(each) for each in later.Xi])
        finite.append([times(a, minus(1.0, lost)) for a, lost in zip(T, later.endless, strict=True)])
        endless = [times(a, lost) for a, lost in zip(T, later.endless, strict=True)]
        real = np.greater(_compute_length(endless), UNDETERMINED * size)
        free.append([np.where(real, a, 0.0) for a in endless])
    return mean, compute_whole_covariance(covariance, free, finite)


def _step_before_row(later: Later, step: Traced, model: LinearFilter) -> Later:
    """Return the moments before a row; step: the filter's step of this row."""
    updated = step.updated
    later = _update_largest(later)
    ready = find_trusted([scalar.weighing for scalar in updated.scalars])
    if ready is not None:
        last = updated.scalars[-1]
        assert last.A is not None
        A = last.A if last.weighing.seen is None else _condition_columns(last)
        _, finite = split(A)
        for j, column in enumerate(zip(*finite, strict=True)):
            there = np.greater(_compute_length(column), 0.0) & ready
            later = _open_column(later, j, [np.where(there, a, 0.0) for a in column], there)
    for scalar, h in reversed(list(zip(updated.scalars, updated.noise.G, strict=True))):
        later = _step_before_scalar(later, scalar, h)
    if step.first is True:
        return later
    F = model.process.transition(step.dt, step.u, step.parts.values).F
    predicted = None if step.first is False else ~step.first
    return _step_before_prediction(later, F, predicted, step.parts.A is not None)


def _condition_columns(scalar: Scalar) -> Matrix:
    seen = scalar.weighing.seen
    assert seen is not None and scalar.A is not None
    return condition_columns(seen, scalar.A, seen.M, scalar.present)


def _open_column(later: Later, j: int, d: Vector, where: np.ndarray) -> Later:
    """Return the moments about a state of covariance P from the moments about P + d d', where d becomes column j."""
    full = unpack_symmetric(later.N)
    Nd = apply(full, d)
    left = minus(1.0, dot(d, Nd))
    root = np.sqrt(left)
    N = [
        plus(later.N[packed_index(a, b)], over(times(Nd[a], Nd[b]), left))
        for a in range(len(d))
        for b in range(a + 1)
    ]
    Omega = [
        [np.where(where, over(c, root), a) if k == j else a for k, a in enumerate(row)]
        for row, c in zip(later.Omega, Nd, strict=True)
    ]
    told = [minus(0.0, dot(d, column)) for column in zip(*later.Omega, strict=True)]
    told[j] = root
    mu, Xi = list(later.mu), [list(row) for row in later.Xi]
    mu[j] = np.where(where, dot(d, later.r), mu[j])
    Xi[j] = [np.where(where, a, b) for a, b in zip(told, Xi[j], strict=True)]
    return later._replace(N=N, Omega=Omega, mu=mu, Xi=Xi)


def _step_before_scalar(later: Later, scalar: Scalar, h: Vector) -> Later:
    """Return the moments before one scalar update.

    With L = I - K h: r = h v / S + L' r and N = h h' / S + L' N L. K and v are zero for a key that lacks the component.
    """
    v, _, S, K, _, _ = scalar.weighing
    has = scalar.present
    if scalar.A is not None and scalar.weighing.seen is not None:
        return _step_before_columns(later, scalar, scalar.weighing.seen, h)
    precision = over(1.0, S) if has is None else np.where(has, over(1.0, S), 0.0)
    told = _transform_moments(later, h, K, precision, scalar.A is not None)
    shift = times(v, precision)
    return told._replace(r=[plus(a, times(b, shift)) for a, b in zip(told.r, h, strict=True)])


def _step_before_columns(later: Later, scalar: Scalar, seen: Projection, h: Vector) -> Later:
    """Return the moments before a scalar update with a projection on columns; S, K and v are given the coefficients."""
    v, _, S, K, _, _ = scalar.weighing
    here: Any = True if scalar.present is None else scalar.present
    turn, precision = build_reflection(seen), seen.precision
    fixed = [
        minus(times(a, np.sqrt(seen.S)), times(b, np.sqrt(precision)))
        for a, b in zip(compute_flat_gains(seen, seen.flat), seen.M, strict=True)
    ]
    for j, picked in enumerate(turn.picked):  # the filter folds a well determined direction at once
        at_once = picked & here & ~seen.apart
        later = _open_column(later, j, [np.where(at_once, a, 0.0) for a in fixed], at_once)
    given = seen.apart | seen.undetermined
    precision = np.where(here, np.where(given, precision, over(1.0, S)), 0.0)
    gain = [np.where(given, times(a, precision), b) for a, b in zip(seen.M, K, strict=True)]
    told = _transform_moments(later, h, gain, precision, True)
    # the innovation given the coefficients, over S, is `shift` - `slope` w
    own = _weigh_coefficients(_build_unit_vector(turn.picked), later)
    by_beta = _weigh_coefficients(seen.beta, later)
    root = np.sqrt(precision)
    all_S = np.where(seen.undetermined, 1.0, S)
    short = np.where(seen.apart, times(root, np.sqrt(over(1.0, all_S))), 0.0)
    proper = np.where(seen.apart, minus(over(v, all_S), times(by_beta[0], short)), times(v, precision))
    determines = seen.undetermined & here
    shift = np.where(determines, minus(0.0, times(own[0], root)), proper)
    shift = np.where(np.greater(precision, 0.0), shift, 0.0)
    slope = [
        np.where(determines, times(a, root), times(b, short))
        for a, b in zip(own[1:], by_beta[1:], strict=True)
    ]
    r = [plus(a, times(b, shift)) for a, b in zip(told.r, h, strict=True)]
    Omega = [
        [plus(a, times(b, c)) for a, c in zip(row, slope, strict=True)]
        for row, b in zip(told.Omega, h, strict=True)
    ]
    before = _step_coefficients_back(told, seen, turn, v, all_S, here)
    return before._replace(r=r, Omega=Omega)


def _step_coefficients_back(
    later: Later, seen: Projection, turn: Reflection, v: Entry, S: Entry, here: Any
) -> Later:
    """Return the moments with the coefficients before a measurement; S: variance of an innovation that fixes none.

    A coefficient that the measurement fixes follows from the other coefficients and the noise. Without a fixed
    coefficient, all coefficients take Potter's step back.
    """
    determines, told = seen.undetermined & here, seen.apart & here & ~seen.undetermined
    step = over(1.0, plus(S, np.sqrt(times(S, seen.S))))
    columns: list[list[Entry]] = []
    for k, column in enumerate([list(later.mu), *_transpose_rows(later.Xi)]):
        shift = v if k == 0 else 0.0
        own, by_beta = dot(_build_unit_vector(turn.picked), column), dot(seen.beta, column)
        fixed = over(plus(minus(shift, by_beta), times(np.sqrt(seen.S), own)), turn.value)
        size = np.where(told, minus(over(shift, S), times(by_beta, step)), 0.0)
        moved = [
            np.where(picked & here, fixed, plus(a, times(b, size)))
            for picked, a, b in zip(turn.picked, column, seen.beta, strict=True)
        ]
        columns.append([np.where(determines, a, b) for a, b in zip(turn.of(moved), moved, strict=True)])
    return later._replace(mu=columns[0], Xi=_transpose_rows(columns[1:]))


def _weigh_coefficients(weights: Vector, later: Later) -> list[Entry]:
    """Return w' mu and the entries of w' Xi, where w are the weights."""
    return [dot(weights, later.mu), *(dot(weights, column) for column in _transpose_rows(later.Xi))]


def _build_unit_vector(picked: list[np.ndarray]) -> list[Entry]:
    return [np.where(here, 1.0, 0.0) for here in picked]


def _transform_moments(later: Later, h: Vector, K: Vector, precision: Entry, columns: bool) -> Later:
    """Return L' r, h h' precision + L' N L and, if there are columns, L' Omega with L = I - K h."""
    g = apply(unpack_symmetric(later.N), K)
    by_r = dot(K, later.r)
    c = plus(dot(K, g), precision)
    x = [minus(times(0.5, times(c, a)), b) for a, b in zip(h, g, strict=True)]
    n = len(h)
    N = [
        plus(later.N[packed_index(i, j)], plus(times(x[i], h[j]), times(h[i], x[j])))
        for i in range(n)
        for j in range(i + 1)
    ]
    later = later._replace(r=[minus(a, times(b, by_r)) for a, b in zip(later.r, h, strict=True)], N=N)
    if not columns:
        return later
    by_omega = [dot(K, column) for column in zip(*later.Omega, strict=True)]
    Omega = [
        [minus(a, times(b, c)) for a, c in zip(row, by_omega, strict=True)]
        for row, b in zip(later.Omega, h, strict=True)
    ]
    return later._replace(Omega=Omega)


def _update_largest(later: Later) -> Later:
    """Return the moments with `largest` updated by the diagonal of N."""
    size = [np.abs(later.N[packed_index(i, i)]) for i in range(len(later.r))]
    return later._replace(largest=[np.maximum(a, b) for a, b in zip(size, later.largest, strict=True)])


def _step_before_prediction(later: Later, F: Matrix, predicted: np.ndarray | None, columns: bool) -> Later:
    """Return the moments before a transition F; predicted: mask (K,) of keys with a prediction, None means all keys."""
    turned = [list(column) for column in zip(*F, strict=True)]
    r, N, Omega = apply(turned, later.r), congruence(turned, later.N), later.Omega
    if columns:
        Omega = _transpose_rows([apply(turned, column) for column in zip(*Omega, strict=True)])
    if predicted is not None:
        r, N = choose(predicted, r, later.r), choose(predicted, N, later.N)
        Omega = [choose(predicted, a, b) for a, b in zip(Omega, later.Omega, strict=True)]
    return later._replace(r=r, N=N, Omega=Omega)


def _transpose_rows(matrix: Matrix) -> list[list[Entry]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def _compute_length(vector: Vector) -> Entry:
    return np.sqrt(dot(vector, vector))


def _count_columns(model: LinearFilter) -> int:
    return len(model.diffuse) // len(model.states)


def _count_symbols(model: LinearFilter) -> int:
    n, q = len(model.states), _count_columns(model)
    return n + packed_size(n) + n * q + q + q * q + q + n


def _unpack_later(symbols: list[Any], model: LinearFilter) -> Later:
    n, q = len(model.states), _count_columns(model)
    places = np.cumsum([0, n, packed_size(n), n * q, q, q * q, q, n]).tolist()
    r, N, Omega, mu, Xi, endless, largest = (
        symbols[a:b] for a, b in zip(places[:-1], places[1:], strict=True)
    )
    square = [Xi[i * q : (i + 1) * q] for i in range(q)]
    return Later(r, N, [Omega[i * q : (i + 1) * q] for i in range(n)], mu, square, endless, largest)


def _pack_later(later: Later) -> list[Entry]:
    r, N, Omega, mu, Xi, endless, largest = later
    return [
        *r,
        *N,
        *(a for row in Omega for a in row),
        *mu,
        *(a for row in Xi for a in row),
        *endless,
        *largest,
    ]


def run_program(program: Program, inputs: list[Any], outputs: Array) -> None:
    """Run a program; the results of flagged keys may be invalid, and callers do not use them."""
    with np.errstate(all="ignore"):
        program(inputs, np.empty((program.buffers, outputs.shape[1])), outputs)


@lru_cache(maxsize=64)
def _build_smoothed_program(model: LinearFilter, diffuse: bool) -> Program:
    """Return `smoothed` as a program. Inputs: state, later. Outputs: mean, packed covariance."""
    tape = Tape()
    state, later = tape.symbols(model.size), tape.symbols(_count_symbols(model))
    parts = model.split(state, diffuse)
    mean, covariance = smooth_state(parts.m, parts.P, parts.A, _unpack_later(later, model))
    return Program(tape, [*state, *later], [*mean, *covariance])


@lru_cache(maxsize=64)
def _build_back_program(model: LinearFilter, missing: bool, first: bool | None, diffuse: bool) -> Program:
    """Return one step back as a program, with the same cases as `kalman.filters.linear.build_step_program`."""
    tape = Tape()
    symbols = tape.symbols(_count_symbols(model))
    step = record_step(model, tape, missing, first, diffuse)
    later = _step_before_row(_unpack_later(symbols, model), step, model)
    return Program(tape, [*step.inputs, *symbols, *step.masks], _pack_later(later))
