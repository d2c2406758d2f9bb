"""Recursive least squares in square-root information form: each row updates a QR factor.

The state is the triangular factor R of the (discounted) normal equations, the rotated measurements z with R b = z, and
the residual sum of squares. Givens rotations add a row to R and z without squaring any number. The result is as
accurate as a QR decomposition of all rows, also for data at which the covariance form loses all digits.

References: Golub and Van Loan (2013), section 6.5.3 (rows appended to a QR factorisation); Haykin (2014), chapters
10 and 15 (forgetting, and the QR form); Brown, Durbin and Evans (1975) for the recursive residuals.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import gammaln

from kalman.filters.program_filter import ProgramFilter, ProgramStep
from kalman.filters.regression import parse_regression, parse_section
from kalman.filters.update import Present
from kalman.linalg.entries import Entry, Vector, dot, minus, over, plus, times
from kalman.linalg.packing import packed_index, packed_size, unpack, unpack_symmetric
from kalman.linalg.program import call_recorded
from kalman.models import checks, definition
from kalman.models.columns import Cell, Cells, resolve, resolve_matrix
from kalman.models.definition import Definition
from kalman.types import Array, ModelError, Rows

ROUNDING = 1e-13
"""A remainder of a regressor below this fraction of the rotated part is a rounding error, not a new direction."""


@dataclass(frozen=True)
class RecursiveLeastSquares(ProgramFilter):
    """Least squares with forgetting: row k of N has the weight forgetting^(N - k).

    A row without a measurement changes nothing, and earlier rows are then not discounted.
    start   the state's entries before the first row
    """

    states: tuple[str, ...]
    measurements: int
    controls: int
    H: Cells
    offset: tuple[Cell, ...]
    forgetting: float
    start: tuple[float, ...]

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The fields: rows of R from the diagonal on, z, the residual sum of squares, and its degrees of freedom."""
        n = len(self.states)
        return {"root": (packed_size(n),), "rotated": (n,), "residual": (1,), "freedom": (1,)}

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        return np.repeat(np.array(self.start)[:, None], keys, axis=1)

    def step_entries(self, state: Vector, u: Vector, y: Vector, presents: Sequence[Present]) -> ProgramStep:
        """Return the result of one row: discount older rows, then rotate each measurement into R and z.

        A measurement given the earlier measurements has a Student-t density with the degrees of freedom so far, because
        coefficients and variance are estimated. The NIS is t squared. Log-likelihood and NIS start with the first row
        for which a residual variance exists.
        """
        n = len(self.states)
        root = _build_triangle(list(state[: self.places["root"].stop]), n)
        z = list(state[self.places["rotated"]])
        residual, freedom = state[-2], state[-1]
        if self.forgetting < 1.0:
            kept: Entry = self.forgetting
            if presents[0] is not None:
                some = presents[0]
                for has in presents[1:]:
                    some = some | has if has is not None else some
                kept = np.where(some, kept, 1.0)
            half = np.sqrt(kept)
            root = [[times(a, half) for a in row] for row in root]
            z = [times(a, half) for a in z]
            residual, freedom = times(residual, kept), times(freedom, kept)
        log_likelihood: Entry = 0.0
        nis: Entry = 0.0
        judged: Entry = 0.0
        values = [minus(a, b) for a, b in zip(y, resolve(self.offset, u), strict=True)]
        for h, value, has in zip(resolve_matrix(self.H, u), values, presents, strict=True):
            row: list[Entry] = list(h)
            if has is not None:
                row = [np.where(has, a, 0.0) for a in row]
                value = np.where(has, value, 0.0)
            root, z, left, share, new = _rotate_row(root, z, row, value)
            counted = ~new if has is None else ~new & has
            square = times(left, left)
            known = counted & np.greater(freedom, 0.0) & np.greater(residual, 0.0)
            safe, degrees = np.where(known, residual, 1.0), np.where(known, freedom, 1.0)
            (constant,) = call_recorded(_compute_log_constant, 1, [degrees])
            score = constant - 0.5 * np.log(safe) + np.log(share)
            score = score - 0.5 * (degrees + 1.0) * np.log1p(square / safe)
            log_likelihood = plus(log_likelihood, np.where(known, score, 0.0))
            nis = plus(nis, np.where(known, square * degrees / safe, 0.0))
            judged = plus(judged, np.where(known, 1.0, 0.0))
            residual = residual + np.where(counted, square, 0.0)
            freedom = freedom + np.where(counted, 1.0, 0.0)
        nis = np.where(np.greater(judged, 0.0), nis, np.nan)
        after = [a for i, row in enumerate(root) for a in row[i:]]
        return ProgramStep([*after, *z, residual, freedom], log_likelihood, nis, {})

    def residual(self, state: Array, rows: Rows) -> tuple[Array, Array]:
        """Return the residuals (m, K) of the rows at the coefficients before the rows, and their packed covariances.

        With R' g = h, the prediction is g' z and the covariance is s^2 (1 + g' g / forgetting). In a row with one
        measurement, the squared residual over this covariance is the NIS. The covariance is infinite where h depends
        on undetermined coefficients, or before s^2 exists.
        """
        u, keys = list(rows.u), state.shape[1]
        root = _build_triangle(list(state[self.places["root"]]), len(self.states))
        z = list(state[self.places["rotated"]])
        with np.errstate(all="ignore"):
            s2 = state[-2] / state[-1]
            judged = (state[-1] > 0.0) & (state[-2] > 0.0)
            solved = [_solve_transposed(root, h, keys) for h in resolve_matrix(self.H, u)]
            residuals: list[Any] = []
            packed: list[Any] = []
            for i, ((g, unknown), offset) in enumerate(zip(solved, resolve(self.offset, u), strict=True)):
                residuals.append(np.where(unknown, np.nan, rows.y[i] - offset - dot(g, z)))
                for j, (other, free) in enumerate(solved[: i + 1]):
                    own = 1.0 if i == j else 0.0
                    spread = s2 * (own + dot(g, other) / self.forgetting)
                    packed.append(np.where(judged & ~unknown & ~free, spread, np.inf if i == j else 0.0))
        return np.array(residuals), np.array(packed)

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return coefficients (n, K) and their packed covariance, s^2 (R' R)^-1.

        s^2 is the residual sum of squares divided by its degrees of freedom. Variances are infinite before s^2 exists,
        and for undetermined coefficients, whose values are only one of many solutions.
        """
        n = len(self.states)
        root = _build_triangle(list(state[self.places["root"]]), n)
        with np.errstate(all="ignore"):
            determined = [root[i][i] > 0.0 for i in range(n)]
            divisors = [np.where(yes, root[i][i], 1.0) for i, yes in enumerate(determined)]
            mean: list[Any] = [0.0] * n
            inverse: list[list[Any]] = [[0.0] * n for _ in range(n)]
            for i in reversed(range(n)):
                rest = state[self.places["rotated"]][i]
                for j in range(i + 1, n):
                    rest = rest - root[i][j] * mean[j]
                mean[i] = np.where(determined[i], rest / divisors[i], 0.0)
                inverse[i][i] = np.where(determined[i], 1.0 / divisors[i], 0.0)
                for j in range(i + 1, n):
                    total = root[i][i + 1] * inverse[i + 1][j]
                    for k in range(i + 2, j + 1):
                        total = total + root[i][k] * inverse[k][j]
                    inverse[i][j] = np.where(determined[i], -total / divisors[i], 0.0)
            s2 = state[-2] / state[-1]
            free = self._free(root, determined, divisors)
            free = [a | ~(state[-1] > 0.0) for a in free]
            packed: list[Any] = []
            for i in range(n):
                for j in range(i + 1):
                    total = inverse[i][i] * inverse[j][i]
                    for k in range(i + 1, n):
                        total = total + inverse[i][k] * inverse[j][k]
                    unknown = np.inf if i == j else 0.0
                    packed.append(np.where(free[i] | free[j], unknown, s2 * total))
        return np.array(mean), np.array(packed)

    def measured(self, state: Array, u: Array) -> tuple[Array, Array]:
        """Return mean (m, K) and packed covariance of a measurement, H b + offset plus noise; u: (c, K) controls.

        The covariance is s^2 (I + H (R'R)^-1 H' / forgetting). The division by `forgetting` is there because a measured
        row first discounts earlier rows; so the squared error over this variance is the row's NIS. Variances are
        infinite before s^2 exists, and where the regressors involve an undetermined coefficient. The measurement has a
        Student-t distribution with the state's degrees of freedom.

        Reference: Seber and Lee (2003), section 5.3.1.
        """
        keys, n, m = state.shape[1], len(self.states), self.measurements
        H = resolve_matrix(self.H, list(u))
        b, packed = self.moments(state)
        free = [~np.isfinite(packed[packed_index(i, i)]) for i in range(n)]
        P = unpack_symmetric([np.where(np.isfinite(entry), entry, 0.0) for entry in packed])
        has = (state[-1] > 0.0) & (state[-2] > 0.0)
        s2 = np.where(has, state[-2] / np.where(has, state[-1], 1.0), np.inf)
        blind = [functools.reduce(np.logical_or, [(h[a] != 0.0) & free[a] for a in range(n)]) for h in H]
        mean = [plus(dot(h, list(b)), a) for h, a in zip(H, resolve(self.offset, list(u)), strict=True)]
        covariance: list[Entry] = []
        for i in range(m):
            for j in range(i + 1):
                spread = over(dot([dot(list(row), H[j]) for row in P], H[i]), self.forgetting)
                unknown = np.inf if i == j else 0.0
                covariance.append(np.where(blind[i] | blind[j], unknown, plus(spread, s2 if i == j else 0.0)))
        return tuple(  # type: ignore[return-value]
            np.array([np.broadcast_to(entry, keys) for entry in entries], float)
            for entries in (mean, covariance)
        )

    def _free(self, root: Any, determined: Any, divisors: Any) -> list[Array]:
        """Return, for each coefficient, a mask of the keys whose rows do not determine the coefficient.

        A coefficient is undetermined if a null vector of R contains it.
        """
        n = len(root)
        free = [np.zeros(determined[0].shape, bool) for _ in range(n)]
        for u in range(n):
            if determined[u].all():
                continue
            null: list[Any] = [0.0] * n
            null[u] = 1.0
            for i in reversed(range(u)):
                rest = -root[i][u]
                for j in range(i + 1, u):
                    rest = rest - root[i][j] * null[j]
                null[i] = np.where(determined[i], rest / divisors[i], 0.0)
            for i in range(u + 1):
                free[i] |= ~determined[u] & (np.abs(null[i]) > 1e-10)
        return free

    def snapshot(self, state: Array) -> tuple[Array, Array, dict[str, Array]]:
        """Return mean (n, K), full row-major covariance (n*n, K), and all fields of the state."""
        mean, covariance = self.moments(state)
        return mean, unpack(covariance), {name: state[place] for name, place in self.places.items()}

    def restore(self, mean: Array, covariance: Array, extras: Mapping[str, Array]) -> Array:
        """Return the state from the parts that `snapshot` returned, bit for bit."""
        return np.concatenate([np.asarray(extras[name], float) for name in self.fields])

    def from_moments(self, mean: Array, covariance: Array) -> Array:
        """Raise ModelError: the state also holds the residual sum of squares and its degrees of freedom."""
        raise ModelError(
            "filter",
            "the filter keeps its rows' residual beside mean and covariance",
            "let it see the rows again",
        )


def build_rls(given: Definition, learned: Mapping[str, Any]) -> RecursiveLeastSquares:
    """Return the recursive least squares of a definition. Raises ModelError."""
    found = parse_regression(given, "rls")
    options = parse_section(given, "rls", ("forgetting", "delta"))
    forgetting = checks.parse_positive("rls.forgetting", options.get("forgetting", 1.0))
    if forgetting > 1.0:
        raise ModelError("rls.forgetting", f"{forgetting!r} is above one", "write 1.0, or a little less")
    start = _start(given.get("initial"), options.get("delta"), len(found.states))
    return RecursiveLeastSquares(*found, forgetting, start)


def _start(initial: Any, delta: Any, n: int) -> tuple[float, ...]:
    """Return the state before the first row: zeros, or from `initial` or `delta`."""
    root, mean = np.zeros((n, n)), np.zeros(n)
    if delta is not None:
        if initial is not None:
            raise ModelError("rls.delta", "there is an initial distribution too", "keep one of them")
        root = np.sqrt(checks.parse_positive("rls.delta", delta)) * np.eye(n)
    elif initial is not None:
        first, packed, factor = definition.parse_initial(initial, n)
        proper = np.flatnonzero(~np.array(factor).reshape(n, -1).any(axis=1)) if factor else np.arange(n)
        block = np.array(unpack_symmetric(packed), float)[np.ix_(proper, proper)]
        mean = np.array(first)
        try:
            inverse = np.linalg.inv(np.linalg.cholesky(block)) if len(proper) else block
        except np.linalg.LinAlgError:
            raise ModelError(
                "initial.covariance", "it is singular", "write a positive definite one, or diffuse: true"
            ) from None
        root[np.ix_(proper, proper)] = np.linalg.qr(inverse, mode="r") if len(proper) else block
        root *= np.where(np.diag(root) < 0.0, -1.0, 1.0)[:, None]
    packed_root = [root[i, j] for i in range(n) for j in range(i, n)]
    return tuple(float(a) for a in (*packed_root, *(root @ mean), 0.0, 0.0))


def _build_triangle(packed: list[Any], n: int) -> list[list[Any]]:
    """Return an upper triangular matrix (n x n) from its rows, which are packed from the diagonal on."""
    rest = iter(packed)
    return [[next(rest) if j >= i else 0.0 for j in range(n)] for i in range(n)]


def _solve_transposed(root: list[list[Any]], h: Vector, keys: int) -> tuple[list[Any], Any]:
    """Return g with R' g = h, and a mask (K,) of keys without a solution, whose rows do not determine direction h."""
    g: list[Any] = []
    unknown = np.zeros(keys, bool)
    for i in range(len(root)):
        rest: Any = np.broadcast_to(np.asarray(h[i], float), keys)
        size: Any = np.abs(rest)
        for j in range(i):
            part = root[j][i] * g[j]
            rest, size = rest - part, np.maximum(size, np.abs(part))
        empty = np.equal(root[i][i], 0.0)
        unknown |= empty & (np.abs(rest) > ROUNDING * size)
        g.append(np.where(empty, 0.0, rest / np.where(empty, 1.0, root[i][i])))
    return g, unknown


def _rotate_row(
    root: list[list[Any]], z: list[Any], row: list[Any], value: Any
) -> tuple[list[list[Any]], list[Any], Any, Any, Any]:
    """Rotate one row (n entries) and its value into R and z.

    Returns R, z, the recursive residual, the ratio of this residual to the prediction error (1 / sqrt(1 + h P h')), and
    a mask of the keys whose row determined a new direction and therefore has no residual.
    """
    n = len(z)
    root, z, row = [list(a) for a in root], list(z), list(row)
    size: list[Any] = [np.abs(a) for a in row]
    share: Any = 1.0
    new: Any = None
    for i in range(n):
        diagonal = root[i][i]
        empty = np.equal(diagonal, 0.0)
        x = np.where(empty & np.less_equal(np.abs(row[i]), ROUNDING * size[i]), 0.0, row[i])
        length = np.hypot(diagonal, x)
        still = np.equal(length, 0.0)
        divisor = np.where(still, 1.0, length)
        c, s = np.where(still, 1.0, diagonal / divisor), x / divisor
        fresh = empty & ~still
        new = fresh if new is None else new | fresh
        share = times(share, np.where(fresh, 1.0, c))
        root[i][i] = length
        for j in range(i + 1, n):
            above = root[i][j]
            size[j] = np.maximum(size[j], np.abs(s * above))
            root[i][j], row[j] = c * above + s * row[j], c * row[j] - s * above
        z[i], value = c * z[i] + s * value, c * value - s * z[i]
    return root, z, value, share, new


def _compute_log_constant(freedom: Array) -> Array:
    """Return the log of the normalising constant of the Student-t density in terms of a sum of squares, (1, K)."""
    return (gammaln(0.5 * (freedom + 1.0)) - gammaln(0.5 * freedom) - 0.5 * np.log(np.pi))[None]
