"""Fixed-interval smoothing of several models: every row's state and mode given all rows of its key.

The forward pass of the IMM gives for each mode j after a row its probability mu_j and a state N(m_j, P_j). The backward
pass carries for each mode a function l_j(x) proportional to the likelihood of all later rows given the state x. The
pair of mode j at a row and mode k at the next row has a probability proportional to mu_j p_jk times the integral of
N(x; m_j, P_j) l_k(x), with l_k taken back over the next row in mode k. The state of the pair has a density proportional
to N(x; m_j, P_j) l_k(x). The pairs of the same j are merged to one Gaussian, as the filter merges its pairs, and l_j of
this row is the ratio of the merged Gaussian to N(m_j, P_j).

A function l is carried as two moments r (n) and N (n x n) about a Gaussian N(m, P): given the rows that l stands for,
too, the state has mean m + P r and covariance V = P - P N P. V is carried beside r and N, since this difference loses
all digits where P is enormous. No matrix is inverted that a known state or a noiseless mode makes singular, and a
future without measurements (r = 0, N = 0) changes nothing. With one mode, or several equal modes, this is the smoother
of Rauch, Tung and Striebel. With modes that never change, it is this smoother in each mode. With a known state, it is
the smoother of Hamilton's filter (Kim 1994).

References: Helmick, Blair and Hoffman (1995), the pairs of a forward and a backward IMM; Fraser and Potter (1969), two
filters for one model; Bryson and Frazier (1963), the moments r and N; Barber (2006), how such merges compare.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from kalman.filters.linear import LinearFilter
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.prediction import Smoothable
from kalman.linalg.packing import pack, packed_size, unpack
from kalman.smoothers.linear import LinearSmoother
from kalman.smoothers.moments import MomentSmoother
from kalman.smoothers.rts import CrossSmoother
from kalman.types import Array, ModelError, Rows

ROUNDING = 1e-9
"""Largest rounding error of a share of variance that is exactly 1."""
TINY = 1e-300


class BackwardMoments(NamedTuple):
    """The moments of later rows about K keys' states in one mode: r (K, n), N (K, n, n).

    V (K, n, n): the states' covariance given the later rows too
    """

    r: Array
    N: Array
    V: Array


class BackwardStep(Protocol):
    """A function that takes the moments of later rows back over a row in one mode."""

    def __call__(self, before: Array, after: Array, rows: Rows, moments: BackwardMoments) -> BackwardMoments:
        """Return the moments about the states before the rows, given those about the states after them."""
        ...


@dataclass(frozen=True)
class ModeSmoother:
    """The smoother of an IMM or MMAE, which carries each mode's log-probability, r, packed N and packed V.

    Probabilities and V are given all rows of the key.
    """

    model: MultipleModels

    @cached_property
    def _backward_steps(self) -> list[BackwardStep]:
        return [_build_backward_step(f"modes[{j}]", mode) for j, mode in enumerate(self.model.modes)]

    @property
    def _depth(self) -> int:
        n = len(self.model.states)
        return n + 2 * packed_size(n)

    def begin(self, values: Array) -> Array:
        """Return the array after the last rows: the filter's log-probabilities and covariances, and zero moments."""
        logs = values[self.model.places["log_probabilities"]]
        parts = [logs]
        for j in range(len(self.model.modes)):
            P = pack(_flatten_matrices(self._gaussian(values, j)[1]))
            parts += [np.zeros((self._depth - len(P), values.shape[1])), P]
        return np.concatenate(parts)

    def smoothed(self, after: Array, later: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance (p, K) of the states after a row, given the later rows too."""
        weights = np.exp(later[: len(self.model.modes)])
        mean, covariance = _merge_mixture(weights, *self._smooth_modes(after, later))
        return mean.T, pack(_flatten_matrices(covariance))

    def extra(self, later: Array) -> dict[str, Array]:
        """Return each mode's probability given all rows (M, K)."""
        return {"mode_probabilities": np.exp(later[: len(self.model.modes)])}

    def back(self, before: Array, rows: Rows, later: Array) -> Array:
        """Return the array before the rows, given `later` after them and the states `before` them."""
        if rows.first.all():
            return later
        with np.errstate(all="ignore"):  # flagged and first rows can fail; `np.where` replaces their results
            earlier = self._step_modes_back(before, rows, later)
        return np.where(rows.first, later, earlier)

    def _step_modes_back(self, before: Array, rows: Rows, later: Array) -> Array:
        model, M = self.model, len(self.model.modes)
        mixed = before if model.transition is None else model.mixed(before, rows.mask_first_rows())[0]
        after, _ = model.step(before, rows)
        filtered = [self._gaussian(before, j) for j in range(M)]
        logs = before[model.places["log_probabilities"]]
        transition = model.extract_transitions(before)
        linked = np.eye(M) if model.transition is None else np.array(model.transition)
        chances = np.full((M, M, before.shape[1]), -np.inf)  # log-probabilities of (j, k)
        pairs: dict[tuple[int, int], BackwardMoments] = {}
        for k, (part, backward_step) in enumerate(zip(model.parts, self._backward_steps, strict=True)):
            moments = self._moments(later, k)
            moments = _limit_moments(moments, self._gaussian(after, k)[1])
            moments = backward_step(mixed[part], after[part], rows, moments)
            origin = self._gaussian(mixed, k)
            leading = np.flatnonzero(linked[:, k])
            if not len(leading):  # only the filter's floor gives mode k a probability
                continue
            scores = np.empty((len(leading), before.shape[1]))
            for at, j in enumerate(leading.tolist()):
                pairs[j, k], evidence = _move_origin(moments, origin, filtered[j])
                scores[at] = logs[j] + np.log(transition[j, k]) + evidence
            scores = _limit_floored(scores, logs[leading], float(np.log(model.floor)))
            chances[leading, k] = later[k] + scores - np.logaddexp.reduce(scores, axis=0)
        return self._merge_pairs(chances, pairs, logs, [P for _, P in filtered])

    def _merge_pairs(
        self,
        chances: Array,
        pairs: dict[tuple[int, int], BackwardMoments],
        logs: Array,
        filtered: list[Array],
    ) -> Array:
        """Return the array to carry, from each pair's log-probability and moments; filtered: each mode's covariance."""
        M = len(self.model.modes)
        total = np.logaddexp.reduce(chances, axis=1)
        total = total - np.logaddexp.reduce(total, axis=0)
        parts: list[Array] = []
        for j in range(M):
            some = [k for k in range(M) if (j, k) in pairs]
            weights = np.exp(chances[j, some] - np.logaddexp.reduce(chances[j, some], axis=0))
            weights = np.where(np.isfinite(weights), weights, 1.0 / len(some))
            moments = [pairs[j, k] for k in some]
            r = _sum(weights, [one.r for one in moments])
            N = _sum(weights, [one.N - _square(one.r - r) for one in moments])
            V = _sum(weights, [one.V + _square(_apply(filtered[j], one.r - r)) for one in moments])
            parts += [r.T, pack(_flatten_matrices(N)), pack(_flatten_matrices(V))]
        # a mode of probability zero keeps the filter's log-probability, which is finite
        return np.concatenate([np.where(np.isfinite(total), total, logs), *parts])

    def _gaussian(self, state: Array, j: int) -> tuple[Array, Array]:
        """Return mean (K, n) and covariance (K, n, n) of mode j in these states."""
        n, part = len(self.model.states), state[self.model.parts[j]]
        return _transpose_vectors(part[:n]), _unpack_matrices(part[n : n + packed_size(n)], n)

    def _moments(self, later: Array, j: int) -> BackwardMoments:
        n, at = len(self.model.states), len(self.model.modes) + j * self._depth
        part, p = later[at : at + self._depth], packed_size(n)
        return BackwardMoments(
            _transpose_vectors(part[:n]),
            _unpack_matrices(part[n : n + p], n),
            _unpack_matrices(part[n + p :], n),
        )

    def _smooth_modes(self, after: Array, later: Array) -> tuple[list[Array], list[Array]]:
        """Return each mode's mean and covariance given all rows."""
        means, covariances = [], []
        for j in range(len(self.model.modes)):
            m, P = self._gaussian(after, j)
            r, _, V = self._moments(later, j)
            means.append(m + _apply(P, r))
            covariances.append(V)
        return means, covariances


def build_mode_smoother(model: MultipleModels) -> ModeSmoother:
    """Return the smoother of an IMM or MMAE. Raises ModelError."""
    if model.window is not None:
        raise ModelError(
            "mmae.window",
            "the probabilities of a window's rows are not those of a mode given all rows",
            "leave it out to smooth, or use filter: imm",
        )
    smoother = ModeSmoother(model)
    for j, mode in enumerate(model.modes):
        _build_backward_step(f"modes[{j}]", mode)
    return smoother


def _build_backward_step(field: str, mode: object) -> BackwardStep:
    """Return the backward step of one mode over rows that are not their key's first. Raises ModelError."""
    if isinstance(mode, LinearFilter):
        smoother, states = MomentSmoother(mode), LinearSmoother(mode)

        def by_moments(before: Array, after: Array, rows: Rows, moments: BackwardMoments) -> BackwardMoments:
            n = len(mode.states)
            rows = rows._replace(first=np.zeros(len(rows.dt), bool))
            nothing = np.zeros((n, len(rows.dt)))
            earlier = smoother.back(
                before, rows, np.concatenate([moments.r.T, pack(_flatten_matrices(moments.N)), nothing])
            )
            V = states.step_states_back(
                before, rows, np.concatenate([after[:n], pack(_flatten_matrices(moments.V))])
            )[n:]
            P = _unpack_matrices(mode.moments(before)[1], n)
            return _replace_failed(
                BackwardMoments(
                    _transpose_vectors(earlier[:n]),
                    _unpack_matrices(earlier[n:-n], n),
                    _unpack_matrices(V, n),
                ),
                P,
            )

        return by_moments
    if not isinstance(mode, Smoothable):
        raise ModelError(f"{field}.filter", "its states cannot be smoothed", "choose another filter or form")
    cross = CrossSmoother(mode)

    def by_states(before: Array, after: Array, rows: Rows, moments: BackwardMoments) -> BackwardMoments:
        """Step back by the smoothed states, whose covariances must not be singular."""
        m, P = mode.moments(after)
        n = len(m)
        mean = _transpose_vectors(m) + _apply(_unpack_matrices(P, n), moments.r)
        later = np.concatenate([mean.T, pack(_flatten_matrices(moments.V))])
        earlier = cross.back(before, rows._replace(first=np.zeros(len(rows.dt), bool)), later)
        m, P = mode.moments(before)
        full = _unpack_matrices(P, n)
        inverse = _invert_matrices(full)
        V = _unpack_matrices(earlier[n:], n)
        r = _apply(inverse, _transpose_vectors(earlier[:n]) - _transpose_vectors(m))
        return _replace_failed(BackwardMoments(r, inverse @ (full - V) @ inverse, V), full)

    return by_states


def _move_origin(
    moments: BackwardMoments, origin: tuple[Array, Array], other: tuple[Array, Array]
) -> tuple[BackwardMoments, Array]:
    """Return moments about the Gaussian `origin` as moments about the Gaussian `other`, and its log-evidence.

    The evidence is the integral of N(m', P') l, `other` times l, divided by the integral of N(m, P) l, `origin` times
    l. With D = I + N (P' - P) it is |D|^(-1/2) exp(d'r - d'N d / 2 + g'(P' - P) D^-1 g / 2), where d = m' - m and g = r
    - N d.
    """
    r, N, V = moments
    d, wider = other[0] - origin[0], other[1] - origin[1]
    D = np.eye(r.shape[1]) + N @ wider
    gap = _apply(N, d)
    sign, size = np.linalg.slogdet(D)
    D = np.where((sign > 0)[:, None, None], D, np.eye(r.shape[1]))
    g: Any = np.linalg.solve(D, (r - gap)[..., None])[..., 0]
    evidence = _dot(d, r) - 0.5 * _dot(d, gap) + 0.5 * _dot(_apply(wider, r - gap), g)
    inside, left = np.linalg.solve(D, N), other[1] @ np.linalg.solve(D, _compute_remainder(N, V, origin[1]))
    evidence = evidence - 0.5 * np.where(sign > 0, size, 0.0)
    about = BackwardMoments(g, 0.5 * (inside + inside.swapaxes(1, 2)), 0.5 * (left + left.swapaxes(1, 2)))
    return about, np.where(np.isfinite(evidence), evidence, 0.0)


def _compute_remainder(N: Array, V: Array, P: Array) -> Array:
    """Return I - N P, which equals P^-1 V where P has an inverse.

    The difference I - N P loses all digits where P is enormous, so it is used only along directions without variance.
    """
    good: Any = np.isfinite(P).all(axis=(1, 2))
    n = P.shape[1]
    unit = 1.0 / np.sqrt(np.maximum(np.diagonal(P, axis1=1, axis2=2), TINY))
    scale = unit[:, :, None] * unit[:, None, :]
    sizes, axes = np.linalg.eigh(np.where(good[:, None, None], P * scale, 0.0))
    some = sizes > n * np.finfo(float).eps
    inverse = (axes * np.where(some, 1.0 / np.where(some, sizes, 1.0), 0.0)[:, None, :]) @ axes.swapaxes(1, 2)
    kept: Array = inverse * scale @ V
    regular: Any = some.all(axis=1)
    if regular.all():
        return kept
    # U^-1 (I - N P) U, in units of each state: `kept` along directions with variance, the difference along the others
    still = (axes * ~some[:, None, :]) @ axes.swapaxes(1, 2)
    straight = np.eye(n) - N @ P
    completed = kept + (still * unit[:, :, None] / unit[:, None, :]) @ straight
    return np.where(regular[:, None, None], kept, completed)


def _limit_floored(scores: Array, logs: Array, floor: float) -> Array:
    """Return log-scores (M, K) in which modes at the filter's floor do not rise above the floor.

    The true probability of a mode at the floor may be below the floor by more than the later rows raise the
    probability. Where all modes are at the floor, the scores stay.
    """
    low = logs <= floor
    top = np.max(np.where(low, -np.inf, scores), axis=0)
    return np.where(low & np.isfinite(top), np.minimum(scores, top + floor), scores)


class Spectrum(NamedTuple):
    """The decomposition L' N L = V diag(values) V' for states of covariance P = L L'.

    values: share of the variance in each direction that later rows remove. out: inverse of L', 0 where P has no
        variance.
    """

    L: Array
    out: Array
    values: Array
    V: Array

    def inside(self, values: Array) -> Array:
        """Return V diag(values) V'."""
        return (self.V * values[:, None, :]) @ self.V.swapaxes(1, 2)


def _compute_spectrum(N: Array, P: Array) -> Spectrum:
    good: Any = np.isfinite(N).all(axis=(1, 2)) & np.isfinite(P).all(axis=(1, 2))
    sizes, axes = np.linalg.eigh(np.where(good[:, None, None], P, 0.0))
    roots = np.sqrt(np.maximum(sizes, 0.0))
    L = axes * roots[:, None, :]
    is_open = roots > 1e-12 * roots[:, -1:]
    out = axes * np.where(is_open, 1.0 / np.where(is_open, roots, 1.0), 0.0)[:, None, :]
    return Spectrum(L, out, *np.linalg.eigh(L.swapaxes(1, 2) @ np.where(good[:, None, None], N, 0.0) @ L))


def _limit_moments(moments: BackwardMoments, P: Array) -> BackwardMoments:
    """Return moments about states of covariance P, whose shares of removed variance are limited to 0 to 1.

    A merge of distant pairs can be wider than the filter's state. Such a merge is valid as a smoothed state, but its
    ratio to the filter's state is not a likelihood and must not be carried further back.
    """
    r, N, V = moments
    found = _compute_spectrum(N, P)
    change: Any = np.clip(found.values, 0.0, 1.0) - found.values
    if change.any():
        changed = N + found.out @ found.inside(change) @ found.out.swapaxes(1, 2)
        N = np.where(change.any(axis=1)[:, None, None], changed, N)
    shares, axes = np.linalg.eigh(found.out.swapaxes(1, 2) @ np.where(np.isfinite(V), V, 0.0) @ found.out)
    wide: Any = (shares > 1.0 + ROUNDING).any(axis=1)
    if wide.any():
        inner = (axes * np.clip(shares, 0.0, 1.0)[:, None, :]) @ axes.swapaxes(1, 2)
        V = np.where(wide[:, None, None], found.L @ inner @ found.L.swapaxes(1, 2), V)
    return BackwardMoments(r, N, V)


def _replace_failed(moments: BackwardMoments, P: Array) -> BackwardMoments:
    """Return the moments; where moments are not finite, return r = 0, N = 0 and V = P, as without later rows."""
    good: Any = np.logical_and.reduce([np.isfinite(a).all(axis=tuple(range(1, a.ndim))) for a in moments])
    here = good[:, None, None]
    r, N, V = moments
    return BackwardMoments(np.where(good[:, None], r, 0.0), np.where(here, N, 0.0), np.where(here, V, P))


def _merge_mixture(weights: Array, means: list[Array], covariances: list[Array]) -> tuple[Array, Array]:
    """Return mean (K, n) and covariance (K, n, n) of a mixture with weights (M, K)."""
    mean = means[0] + _sum(weights[1:], [m - means[0] for m in means[1:]])
    return mean, _sum(weights, [P + _square(m - mean) for m, P in zip(means, covariances, strict=True)])


def _sum(weights: Array, parts: list[Array]) -> Array:
    total: Array = np.zeros(1)
    for w, part in zip(weights, parts, strict=True):
        total = total + w.reshape(-1, *[1] * (part.ndim - 1)) * part
    return total


def _invert_matrices(P: Array) -> Array:
    good: Any = np.isfinite(P).all(axis=(1, 2))
    return np.linalg.pinv(np.where(good[:, None, None], P, 0.0), hermitian=True)


def _apply(A: Array, x: Array) -> Array:
    return (A @ x[..., None])[..., 0]


def _dot(a: Array, b: Array) -> Array:
    return (a * b).sum(axis=-1)


def _square(x: Array) -> Array:
    return x[:, :, None] * x[:, None, :]


def _transpose_vectors(entries: Array) -> Array:
    """Return (n, K) as contiguous (K, n), since products of strided arrays have other bits for one key."""
    return np.ascontiguousarray(entries.T)


def _unpack_matrices(packed: Array, n: int) -> Array:
    """Return packed (p, K) as (K, n, n), contiguous."""
    return np.ascontiguousarray(np.moveaxis(unpack(packed).reshape(n, n, -1), 2, 0))


def _flatten_matrices(matrices: Array) -> Array:
    """Return (K, n, n) as full row-major (n*n, K)."""
    return matrices.reshape(len(matrices), -1).T
