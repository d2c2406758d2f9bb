"""Fixed-lag smoothing of the linear filter: each row's state given `lag` more rows of its key.

Beside the filter's state, a key keeps figures of its last `lag` rows. For the j-th row before the newest row these are
the mean and covariance of that row's state given all rows so far, and the covariance C_j of that state with the current
state. They are the blocks of the augmented state (x_k, x_{k-1}, ..., x_{k-lag}) that a new row changes: a transition
turns C_j into C_j F', and a scalar measurement of the current state, with innovation v and variance S, moves the kept
state with the gain C_j h / S. This is exact for any
time steps and any missing components.

References: Biswas and Mahalanabis (1972); Anderson and Moore (1979), section 7.3; the exact diffuse start as in
Durbin and Koopman (2012), section 5.2, with the augmented state's factor of P_inf.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kalman import flags
from kalman.filters.diffuse import (
    compute_flat_gains,
    compute_whole_covariance,
    condition_columns,
    fold,
    split,
)
from kalman.filters.linear import LinearFilter
from kalman.filters.prediction import Smoothable
from kalman.filters.state_layout import BLOCK, StateLayout, StepTarget, Wrapping, step_in_blocks
from kalman.filters.update import Scalar, find_trusted, mask_present, update
from kalman.linalg.entries import Entry, Matrix, Vector, dot, minus, over, plus, times
from kalman.linalg.packing import packed_index, packed_size, unpack, unpack_symmetric
from kalman.models import checks
from kalman.models.definition import Definition
from kalman.smoothers.cross_lag import check_lag_filter
from kalman.types import Array, Filter, ModelError, Rows, Step

LONGEST = 500
"""Maximum number of rows that a key keeps."""


class Lags(NamedTuple):
    """The kept rows of K keys, the newest first; each entry is an array (lag, K).

    m (n), V packed (p), C (n x n) with the current state, A (n x q) or None: as in `kalman.filters.linear.Parts`;
    age (lag, K) time units since that row, below zero where there is no row yet
    """

    m: Vector
    V: Vector
    C: Matrix
    A: Matrix | None
    age: Array


@dataclass(frozen=True)
class FixedLagFilter(Wrapping, StateLayout):
    """A linear filter that also outputs each row's state given `lag` more rows of its key."""

    inner: LinearFilter
    lag: int

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The linear filter's fields, then those of the kept rows: `lag` values of each entry."""
        n, q = len(self.states), len(self.inner.diffuse) // len(self.states)
        kept = {"means": n, "covariances": packed_size(n), "crosses": n * n, "diffuses": n * q, "ages": 1}
        lags = {f"lagged_{name}": (width * self.lag,) for name, width in kept.items() if width}
        return {**self.inner.fields, **lags}

    @property
    def outputs(self) -> Mapping[str, int]:
        """The state `lag` rows ago, its row-major covariance, time units since that row."""
        n = len(self.states)
        return {"lagged_mean": n, "lagged_covariance": n * n, "lagged_age": 1}

    def initial(self, keys: int) -> Array:
        """Return the state (size, keys) of keys that have no row yet."""
        state = np.zeros((self.size, keys))
        state[: self.inner.size] = self.inner.initial(keys)
        state[self.places["lagged_ages"]] = -1.0
        return state

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance of the newest row's state."""
        return self.inner.moments(state[: self.inner.size])

    def step(self, state: Array, rows: Rows) -> tuple[Array, Step]:
        """Return the state (size, K) after one row for each key, and the rows' `Step`."""
        return step_in_blocks(state, rows, self.outputs, self._step_block, max(BLOCK // (self.lag + 1), 64))

    def _step_block(self, state: Array, rows: Rows, target: StepTarget) -> None:
        size = self.inner.size
        target.state[:size], step = self.inner.step(state[:size], rows)
        target.log_likelihood[:], target.nis[:] = step.log_likelihood, step.nis
        lags = self._advance_rows(state, rows)
        kept = [*lags.m, *lags.V, *(entry for row in lags.C for entry in row)]
        if self.inner.diffuse:
            nothing: list[Entry] = [0.0] * len(self.inner.diffuse)
            kept += nothing if lags.A is None else [entry for row in lags.A for entry in row]
        for place, entry in zip(range(size, self.size, self.lag), [*kept, lags.age], strict=True):
            target.state[place : place + self.lag] = entry
        mean, covariance = _extract_oldest(lags)
        there = lags.age[-1] >= 0.0
        target.extra["lagged_mean"][:] = np.where(there, mean, np.nan)
        target.extra["lagged_covariance"][:] = np.where(there, unpack(covariance), np.nan)
        target.extra["lagged_age"][:] = np.where(there, lags.age[-1], np.nan)
        finite = np.isfinite(target.state[size:]).all(axis=0)
        if step.flag.any() or not finite.all():
            overflow = np.where(finite, flags.WELL, flags.OVERFLOW).astype(np.uint8)
            target.leave(state, np.where(step.flag == flags.WELL, overflow, step.flag))

    def _advance_rows(self, state: Array, rows: Rows) -> Lags:
        """Return the kept rows after these rows."""
        linear, first, presents = self.inner, rows.mask_first_rows(), mask_present(rows.y)
        lags = self._kept(state)
        parts = linear.split(list(state[: linear.size]), lags.A is not None)
        prior = linear.predicted(parts, rows.dt, list(rows.u), first)
        if first is not True:
            F = linear.process.transition(rows.dt, list(rows.u), parts.values).F
            moved = _move_rows(_push_state(lags, parts.m, parts.P, parts.A), F, rows.dt)
            lags = moved if first is False else _choose_lags(first, lags, moved)
        seen = linear.observed(list(rows.u), prior.values)
        updated = update(
            *prior[:3], seen.H, seen.R, seen.subtract_offset(list(rows.y)), presents, linear.apart
        )
        for scalar, h, r in zip(updated.scalars, updated.noise.G, updated.noise.d, strict=True):
            lags = _apply_scalar(lags, scalar, h, r)
        ready = find_trusted([scalar.weighing for scalar in updated.scalars])
        if ready is not None:
            lags = _fold_columns(lags, updated.scalars[-1], ready)
        V = list(lags.V)
        for k in (packed_index(i, i) for i in range(len(self.states))):
            V[k] = np.maximum(V[k], 0.0)
        return lags._replace(V=V)

    def _kept(self, state: Array) -> Lags:
        """Return the rows kept in a state (size, K), without diffuse parts if no key has a diffuse part."""
        n = len(self.states)
        entries = {
            name: list(state[place].reshape(-1, self.lag, state.shape[1]))
            for name, place in self.places.items()
            if name.startswith("lagged_")
        }
        A = None
        if self.inner.diffuse and (
            self.inner.is_diffuse(state) or state[self.places["lagged_diffuses"]].any()
        ):
            A = _split_rows(entries["lagged_diffuses"], n)
        return Lags(
            entries["lagged_means"],
            entries["lagged_covariances"],
            _split_rows(entries["lagged_crosses"], n),
            A,
            entries["lagged_ages"][0],
        )


def add_fixed_lag(definition: Definition, model: Filter) -> Filter:
    """Return the filter with the lag of its definition's section `smoothing`. Raises ModelError."""
    smoothing = definition.get("smoothing")
    if smoothing is None:
        return model
    checks.check_keys("smoothing", smoothing, ("lag",))
    lag = checks.parse_integer("smoothing.lag", checks.require_key("smoothing", smoothing, "lag"), 1, LONGEST)
    if isinstance(model, LinearFilter):
        return FixedLagFilter(model, lag)
    if not isinstance(model, Smoothable):
        remedy = "remove smoothing, or use linear, extended, unscented or cubature"
        raise ModelError("smoothing", "the filter's states cannot be smoothed", remedy)
    return check_lag_filter(model, lag)


def _push_state(lags: Lags, m: Vector, P: Vector, A: Matrix | None) -> Lags:
    """Return the rows kept with the state (m, P, A) as the newest and without the oldest."""

    def push(old: Any, newest: Entry) -> Array:
        result = np.empty_like(old)
        result[1:], result[0] = old[:-1], newest
        return result

    return Lags(
        [push(a, b) for a, b in zip(lags.m, m, strict=True)],
        [push(a, b) for a, b in zip(lags.V, P, strict=True)],
        _change_entries(push, lags.C, unpack_symmetric(P)),
        None if lags.A is None or A is None else _change_entries(push, lags.A, A),
        push(lags.age, 0.0),
    )


def _move_rows(lags: Lags, F: Matrix, dt: Array) -> Lags:
    """Return the kept rows after a transition of the current state."""
    C = [[np.broadcast_to(dot(f, row), lags.age.shape) for f in F] for row in lags.C]
    return lags._replace(C=C, age=np.where(lags.age >= 0.0, lags.age + dt, lags.age))


def _choose_lags(first: np.ndarray, yes: Lags, no: Lags) -> Lags:
    """Return `yes` for the keys at their first row, which keep no rows yet, else `no`."""

    def choose(a: Any, b: Any) -> Array:
        return np.where(first, a, b)

    return Lags(
        [choose(a, b) for a, b in zip(yes.m, no.m, strict=True)],
        [choose(a, b) for a, b in zip(yes.V, no.V, strict=True)],
        _change_entries(choose, yes.C, no.C),
        None if yes.A is None or no.A is None else _change_entries(choose, yes.A, no.A),
        choose(yes.age, no.age),
    )


def _apply_scalar(lags: Lags, scalar: Scalar, h: Vector, r: Entry) -> Lags:
    """Return the kept rows after one scalar measurement of the current state."""
    v, M, S, K, _, seen = scalar.weighing
    n = len(M)
    precision = over(1.0, S)
    if scalar.present is not None:
        precision = np.where(scalar.present, precision, 0.0)
    g = [dot(h, row) for row in lags.C]  # the covariance of the kept state with the measurement
    gain = [times(a, precision) for a in g]
    V = [minus(a, b) for a, b in zip(lags.V, _multiply_outer(gain, g), strict=True)]
    C = [
        [minus(c, times(a, k)) for c, k in zip(row, K, strict=True)] for row, a in zip(lags.C, g, strict=True)
    ]
    A = lags.A
    if A is not None and seen is not None:
        # the kept state is an extra part of the state with its gain; the update is Joseph's, and the other case is its
        # short form
        has: Any = True if scalar.present is None else scalar.present
        flat, finite = split(A)
        long = seen.apart | (seen.undetermined & has)
        total = [plus(a, dot(row, seen.beta)) for a, row in zip(g, finite, strict=True)]
        gain = [
            np.where(seen.undetermined & has, a, times(b, precision))
            for a, b in zip(compute_flat_gains(seen, flat), total, strict=True)
        ]
        own = [np.where(seen.apart, times(a, seen.precision), b) for a, b in zip(g, gain, strict=True)]
        kept = [np.where(seen.apart, times(a, seen.precision), b) for a, b in zip(seen.M, K, strict=True)]
        left = [minus(a, times(b, plus(dot(h, seen.M), r))) for a, b in zip(g, own, strict=True)]
        for i in range(n):
            for j in range(n):
                moved = lags.C[i][j] - times(own[i], seen.M[j]) - times(left[i], kept[j])
                C[i][j] = np.where(long, np.where(has, moved, lags.C[i][j]), C[i][j])
            for j in range(i + 1):
                k = packed_index(i, j)
                moved = lags.V[k] - times(own[i], g[j]) - times(left[i], own[j])
                V[k] = np.where(long, np.where(has, moved, lags.V[k]), V[k])
        A = condition_columns(seen, A, g, scalar.present)
    m = [plus(a, times(k, v)) for a, k in zip(lags.m, gain, strict=True)]
    return Lags(m, V, C, A, lags.age)


def _fold_columns(lags: Lags, last: Scalar, where: np.ndarray) -> Lags:
    """Return the kept rows after the finite columns have been folded into the covariance of the keys `where`."""
    A, seen = last.A, last.weighing.seen
    if A is None or lags.A is None:
        return lags
    here = split(A if seen is None else condition_columns(seen, A, seen.M, last.present))[1]
    finite = split(lags.A)[1]
    C = [
        [np.where(where, plus(c, dot(a, b)), c) for c, b in zip(row, here, strict=True)]
        for row, a in zip(lags.C, finite, strict=True)
    ]
    V, A = fold(lags.V, lags.A, where)
    return lags._replace(V=V, C=C, A=A)


def _extract_oldest(lags: Lags) -> tuple[Array, Array]:
    """Return mean (n, K) and packed covariance of the oldest kept row; undetermined entries are infinite."""
    mean, covariance = (
        np.array([a[-1] for a in _convert_arrays(lags.m)]),
        np.array([a[-1] for a in _convert_arrays(lags.V)]),
    )
    if lags.A is not None:
        oldest = [[a[-1] for a in _convert_arrays(row)] for row in lags.A]
        covariance = np.array(compute_whole_covariance(list(covariance), *split(oldest)))
    return mean, covariance


def _multiply_outer(a: Vector, b: Vector) -> list[Entry]:
    """Return a b', packed."""
    return [times(a[i], b[j]) for i in range(len(a)) for j in range(i + 1)]


def _change_entries(change: Any, a: Matrix, b: Matrix) -> list[list[Array]]:
    """Return the entries of two matrices changed together."""
    return [[change(x, y) for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]


def _split_rows(entries: Sequence[Array], n: int) -> list[list[Array]]:
    width = len(entries) // n
    return [list(entries[i * width : (i + 1) * width]) for i in range(n)]


def _convert_arrays(vector: Vector) -> list[Array]:
    return [np.asarray(a) for a in vector]
