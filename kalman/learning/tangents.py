"""Log-likelihood, exact gradient and information of every key, in one pass of the filter and its derivatives.

Beside mean and covariance, each key carries the derivatives of mean and covariance by every learned entry. An
innovation v ~ N(0, S) adds -(log 2 pi S + v^2 / S) / 2 to the log-likelihood and the derivative of this term to the
gradient. To the information it adds dv dv' / S + dS dS' / (2 S^2), whose expectation is Fisher's information. The
filter's gain is optimal, so that the new dP depends on the previous dP and on dr alone: (I - K h) dP (I - K h)' + dr K
K'. An exact diffuse component has another gain, M_inf / F_inf, whose derivative enters dP too.

References: Harvey (1989), section 3.4; Engle and Watson (1981); Durbin and Koopman (2012), sections 5.2 and 6.4.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kalman.filters.diffuse import compute_finite_covariance
from kalman.filters.diffuse import compute_flat_covariance as diffuse_covariance
from kalman.filters.linear import LinearFilter, Parts
from kalman.filters.recursions import Decorrelated, Weighing, congruence, decorrelate, predict, weigh
from kalman.filters.update import LOG_2PI, apply_scalar, settle_columns
from kalman.linalg.entries import Entry, Matrix, Vector, apply, dot, is_zero, minus, over, plus, times
from kalman.linalg.packing import packed_index, packed_size, unpack_symmetric
from kalman.linalg.program import Recorded, Tape
from kalman.models.columns import resolve
from kalman.models.learned_entries import parse_entry_name
from kalman.models.structure import Transition, build_zero_transition
from kalman.types import Array


class StateSlope(NamedTuple):
    """Derivatives of mean, packed covariance and packed diffuse part by one learned entry.

    P_inf is None if no state is diffuse.
    """

    m: list[Entry]
    P: list[Entry]
    P_inf: list[Entry] | None


class LearnedEntries(NamedTuple):
    """The learned entries of a model whose state holds the parameters; an entry is a name and a packed index.

    derived: whether to compute derivatives by the entries; otherwise only the log-likelihood is computed.
    """

    model: LinearFilter
    entries: tuple[tuple[str, int], ...]
    derived: bool = True

    @property
    def slopes(self) -> int:
        """Number of entries by which derivatives are taken."""
        return len(self.entries) if self.derived else 0

    @property
    def sums(self) -> int:
        """Number of sums over the rows: log S with its constant, v^2 / S, gradient, packed information."""
        return 2 + self.slopes + packed_size(self.slopes)

    def sizes(self, diffuse: bool) -> list[int]:
        """Return the numbers of rows of a key's running state: m, P, the diffuse factor, and each entry's derivatives.

        Each entry has derivatives of m, of P and, only while a state is diffuse, of the packed diffuse part.
        """
        n = len(self.model.states)
        derivatives = [n, packed_size(n), self.diffuse if diffuse else 0]
        return [n, packed_size(n), self.factor if diffuse else 0, *derivatives * self.slopes]

    def drop_diffuse_rows(self, state: Array) -> Array:
        """Return a running state without its diffuse rows."""
        kept: list[int] = []
        at = 0
        for i, size in enumerate([*self.sizes(True), len(state)]):
            if i % 3 != 2:
                kept += range(at, min(at + size, len(state)))
            at += size
        return state[kept]

    @property
    def factor(self) -> int:
        """Number of entries of the diffuse part's factor."""
        return len(self.model.diffuse)

    @property
    def diffuse(self) -> int:
        """Number of packed entries of the diffuse part."""
        return packed_size(len(self.model.states)) if self.model.diffuse else 0


def list_learned_entries(model: LinearFilter) -> LearnedEntries:
    """Return the learned entries of a model, without structural zeros."""
    found: list[tuple[str, int]] = []
    for p in model.parameters:
        if p.name in model.own:
            found += [(p.name, e) for e, a in enumerate(p.value) if p.kind != "covariance" or a != 0.0]
    return LearnedEntries(model, tuple(found))


class _Traced(NamedTuple):
    """The symbols of one row's step: the parts of the state, all inputs in order, and the parts of the row."""

    tape: Tape
    parts: Parts
    inputs: list[Any]
    dt: Any
    u: list[Any]
    y: list[Any]
    presents: list[Any]


def _record_step(
    of: LearnedEntries, missing: bool, diffuse: bool, more: Sequence[int]
) -> tuple[_Traced, list[list[Any]]]:
    """Return the symbols of a step, and groups of symbols for further rows of the running state.

    more: the size of each group.
    """
    model, tape = of.model, Tape()
    n = len(model.states)
    m, P, A = (tape.symbols(count) for count in of.sizes(diffuse)[:3])
    groups = [tape.symbols(count) for count in more]
    own = tape.symbols(len(of.entries))
    dt, u, y = tape.symbol(), tape.symbols(model.controls), tape.symbols(model.measurements)
    presents = tape.symbols(len(y), boolean=True) if missing else [None] * len(y)
    symbols = dict(zip(of.entries, own, strict=True))
    values: dict[str, Sequence[Any]] = {p.name: p.value for p in model.parameters}
    for p in model.parameters:
        if p.name in model.own:
            values[p.name] = [symbols.get((p.name, e), 0.0) for e in range(len(p.value))]
    factor = [A[i * (len(A) // n) : (i + 1) * (len(A) // n)] for i in range(n)] if diffuse else None
    inputs = [*m, *P, *A, *(a for group in groups for a in group), *own, dt, *u, *y]
    masks = [a for a in presents if a is not None]
    return _Traced(tape, Parts(m, P, factor, values), [*inputs, *masks], dt, u, y, presents), groups


class RecordedRow(NamedTuple):
    """The record of one row's step, and the row's term of the log-likelihood without v^2 / S (an output's addend)."""

    step: Recorded
    score: Entry


def record_sums(of: LearnedEntries, missing: bool, first: bool, diffuse: bool) -> RecordedRow:
    """Return the record of one step.

    Its inputs are the running state, the sums so far, the learned entries, dt, u, y and, if components are missing,
    masks of those present. Its outputs are the running state after the row, then the sums.
    """
    d = of.slopes
    trace, groups = _record_step(of, missing, diffuse, [*of.sizes(diffuse)[3:], of.sums])
    sums = groups.pop()
    slopes = [
        StateSlope(groups[3 * j], groups[3 * j + 1], groups[3 * j + 2] if diffuse else None) for j in range(d)
    ]
    parts = trace.parts
    if not first:
        slopes = _predict_slopes(of, trace, slopes)
        parts = of.model.predicted(parts, trace.dt, trace.u, False)
    m, P, A, added = _update_row(of, trace, parts, slopes, slopes)
    factor = [] if A is None else [a for row in A for a in row]
    moved = [a for slope in slopes for a in (*slope.m, *slope.P, *(slope.P_inf or []))]
    totals = [plus(a, b) for a, b in zip(sums, added, strict=True)]
    outputs = [*m, *P, *factor, *moved, *totals]
    return RecordedRow(Recorded(trace.tape.operations, trace.inputs, outputs), added[0])


def record_innovations(of: LearnedEntries, missing: bool, first: bool, diffuse: bool) -> Recorded:
    """Return the record of one step: the state after the row, then each component's innovation and variance.

    Its inputs are those of `record_sums` without derivatives and sums.
    """
    trace, _ = _record_step(of, missing, diffuse, [])
    parts = trace.parts if first else of.model.predicted(trace.parts, trace.dt, trace.u, False)
    found: list[Entry] = []
    m, P, A, _ = _update_row(of, trace, parts, [], [], found)
    factor = [] if A is None else [a for row in A for a in row]
    return Recorded(trace.tape.operations, trace.inputs, [*m, *P, *factor, *found])


def _predict_slopes(of: LearnedEntries, trace: _Traced, slopes: list[StateSlope]) -> list[StateSlope]:
    """Return the derivatives after a transition."""
    process, parts = of.model.process, trace.parts
    transition = process.transition(trace.dt, trace.u, parts.values)
    tangents: dict[str, list[Transition]] = {}
    result: list[StateSlope] = []
    for (name, entry), slope in zip(of.entries[: of.slopes], slopes, strict=True):
        if name == "R" or name.startswith("H["):
            tangent = build_zero_transition(len(parts.m))
        else:
            if name not in tangents:
                tangents[name] = process.tangents(name, trace.dt, trace.u, parts.values)
            tangent = tangents[name][entry]
        m, P = predict(slope.m, slope.P, Transition(transition.F, tangent.Q, tangent.c))
        P_inf = None if slope.P_inf is None else congruence(transition.F, slope.P_inf)
        if not all(is_zero(a) for row in tangent.F for a in row):
            m = [plus(a, b) for a, b in zip(m, apply(tangent.F, parts.m), strict=True)]
            before = parts.P if parts.A is None else compute_finite_covariance(parts.P, parts.A)
            P = _turn_covariance(P, tangent.F, transition.F, before)
            if P_inf is not None and parts.A is not None:
                P_inf = _turn_covariance(P_inf, tangent.F, transition.F, diffuse_covariance(parts.A))
        result.append(StateSlope(m, P, P_inf))
    return result


def _turn_covariance(P: Vector, dF: Matrix, F: Matrix, before: Vector) -> list[Entry]:
    """Return P + dF X F' + F X dF', packed; `before` is X, packed."""
    full = unpack_symmetric(before)
    FX = [[dot(row, column) for column in full] for row in F]
    n = len(F)
    return [
        plus(P[packed_index(i, j)], plus(dot(dF[i], FX[j]), dot(dF[j], FX[i])))
        for i in range(n)
        for j in range(i + 1)
    ]


def _differentiate_noise(
    of: LearnedEntries, trace: _Traced, noise: Decorrelated
) -> list[tuple[Vector, Matrix, Vector]]:
    """Return the derivatives of the independent measurements by each learned entry: of d (m), G (m x n) and z (m).

    The derivative by an entry of H is dG = L^-1 dH.

    For an entry of R, with R = L diag(d) L', z = L^-1 y and G = L^-1 H: X = L^-1 dR L^-T equals A diag(d) + dd +
    diag(d) A' with A strictly lower, so that dz = -A z and dG = -A G. A missing component is cut out of both R and dR.
    """
    size, n = len(noise.d), len(of.model.states)
    (scale,) = resolve([of.model.noise_scale], trace.u)
    result: list[tuple[Vector, Matrix, Vector]] = []
    for name, entry in of.entries:
        d: list[Entry] = [0.0] * size
        G: list[list[Entry]] = [[0.0] * n for _ in range(size)]
        z: list[Entry] = [0.0] * size
        if name == "R":
            X: list[list[Entry]] = [[0.0] * size for _ in range(size)]
            a, b = next((i, j) for i in range(size) for j in range(i + 1) if packed_index(i, j) == entry)
            X[a][b] = X[b][a] = _cut(scale, trace.presents[a], trace.presents[b])
            for i in range(size):  # L^-1 X by forward substitution, then X L^-T
                for k in range(i):
                    X[i] = [minus(x, times(noise.L[i][k], y)) for x, y in zip(X[i], X[k], strict=True)]
            for i in range(size):
                for k in range(i):
                    for row in X:
                        row[i] = minus(row[i], times(noise.L[i][k], row[k]))
            for i in range(size):
                d[i] = X[i][i]
                for j in range(i):
                    if is_zero(X[i][j]):
                        continue
                    A = over(X[i][j], noise.d[j])
                    z[i] = minus(z[i], times(A, noise.z[j]))
                    G[i] = [minus(g, times(A, h)) for g, h in zip(G[i], noise.G[j], strict=True)]
        seen = parse_entry_name(name)
        if seen is not None and seen[0] == "H":
            G[seen[1]][seen[2]] = 1.0
            for i in range(size):
                for k in range(i):
                    G[i] = [minus(g, times(noise.L[i][k], h)) for g, h in zip(G[i], G[k], strict=True)]
        result.append((d, G, z))
    return result


def _cut(a: Entry, one: Any, other: Any) -> Entry:
    for present in (one, other):
        if present is not None:
            a = np.where(present, a, 0.0)
    return a


def _update_row(
    of: LearnedEntries,
    trace: _Traced,
    prior: Parts,
    slopes: list[StateSlope],
    target: list[StateSlope],
    innovations: list[Entry] | None = None,
) -> tuple[Vector, Vector, Matrix | None, list[Entry]]:
    """Return mean, covariance and diffuse factor after the row's measurements, and the measurements' terms of the sums.

    The slopes after the measurements are written into `target`, the innovations and their variances into `innovations`.
    """
    m, P, A, values = prior
    seen = of.model.observed(trace.u, values)
    noise = decorrelate(seen.H, seen.R, seen.subtract_offset(trace.y), trace.presents)
    by_entry = _differentiate_noise(of, trace, noise) if slopes else []
    d = len(slopes)
    added: list[Entry] = [0.0] * (2 + d + packed_size(d))
    weighings: list[Weighing] = []
    for i, (h, r, z, has) in enumerate(zip(noise.G, noise.d, noise.z, trace.presents, strict=True)):
        weighing = weigh(m, P, A, h, r, z, of.model.apart)
        weighings.append(weighing)
        v, M, S, K, diffuse, _ = weighing
        u = over(v, S)
        square = times(v, u) if diffuse is None else np.where(diffuse, 0.0, times(v, u))
        score = times(-0.5, plus(np.log(S), LOG_2PI))
        step = _Update(
            m, P if A is None else compute_finite_covariance(P, A), A, h, r, v, M, S, K, u, diffuse, has
        )
        slopes, parts = _move_slopes(step, slopes, [(dd[i], dG[i], dz[i]) for dd, dG, dz in by_entry])
        for at, part in enumerate([score, square, *parts]):
            added[at] = plus(added[at], _mask_entry(has, part))
        if innovations is not None:
            seen_v, seen_S = (v if diffuse is None else np.where(diffuse, np.nan, v)), S
            if has is not None:
                seen_v, seen_S = np.where(has, seen_v, np.nan), np.where(has, S, np.nan)
            innovations += [seen_v, seen_S]
        gain, shift = [_mask_entry(has, k) for k in K], _mask_entry(has, v)
        m = [plus(a, times(k, shift)) for a, k in zip(m, gain, strict=True)]
        P, A = apply_scalar(P, A, weighing._replace(K=gain), h, r, has)
    P, A = settle_columns(P, A, weighings)
    target[:] = slopes
    return m, P, A, added


class _Update(NamedTuple):
    """One scalar measurement and the state before it, with the fields of `Weighing`; u = v / S.

    has: mask of keys that have the measurement; None means all keys.
    """

    m: Vector
    P: Vector
    A: Matrix | None
    h: Vector
    r: Entry
    v: Entry
    M: Vector
    S: Entry
    K: Vector
    u: Entry
    diffuse: Any
    has: Any


def _mask_entry(has: Any, a: Entry) -> Entry:
    return a if has is None or is_zero(a) else np.where(has, a, 0.0)


def _move_slopes(
    at: _Update, slopes: list[StateSlope], noise: list[tuple[Entry, Vector, Entry]]
) -> tuple[list[StateSlope], list[Entry]]:
    """Return the slopes after a scalar measurement, and the measurement's terms of gradient and packed information."""
    moved: list[StateSlope] = []
    dvs: list[Entry] = []
    ratios: list[Entry] = []
    gradient: list[Entry] = []
    fit = times(0.5, minus(1.0, times(at.v, at.u)))
    for slope, (dr, dh, dz) in zip(slopes, noise, strict=True):
        still = all(is_zero(a) for a in dh)
        dM = apply(unpack_symmetric(slope.P), at.h)
        dv = minus(dz, dot(at.h, slope.m))
        dS = plus(dot(at.h, dM), dr)
        x: list[Entry] = []
        if not still:  # P dh
            x = apply(unpack_symmetric(at.P), dh)
            dM = [plus(a, b) for a, b in zip(dM, x, strict=True)]
            dv = minus(dv, dot(dh, at.m))
            dS = plus(dS, times(2.0, dot(at.h, x)))
        ratio = over(dS, at.S)
        slope_of_value = minus(minus(0.0, times(ratio, fit)), times(at.u, dv))
        dK = [over(minus(a, times(k, dS)), at.S) for a, k in zip(dM, at.K, strict=True)]
        P_inf: list[Any] | None = slope.P_inf
        if at.diffuse is not None:
            assert P_inf is not None and at.A is not None
            dM_inf = apply(unpack_symmetric(P_inf), at.h)
            dF_inf = dot(at.h, dM_inf)
            if not still:
                more = apply(unpack_symmetric(diffuse_covariance(at.A)), dh)
                dM_inf = [plus(a, b) for a, b in zip(dM_inf, more, strict=True)]
                dF_inf = plus(dF_inf, times(2.0, dot(at.h, more)))
            dK_inf = [over(minus(a, times(k, dF_inf)), at.S) for a, k in zip(dM_inf, at.K, strict=True)]
            dK = [np.where(at.diffuse, a, b) for a, b in zip(dK_inf, dK, strict=True)]
            slope_of_value = np.where(at.diffuse, times(-0.5, over(dF_inf, at.S)), slope_of_value)
            ratio, dv_seen = (np.where(at.diffuse, 0.0, a) for a in (ratio, dv))
            moving = at.diffuse if at.has is None else at.diffuse & at.has
            P_inf = [
                np.where(moving, a, b)
                for a, b in zip(_change_covariance(P_inf, at.K, dM_inf, dF_inf), P_inf, strict=True)
            ]
        else:
            dv_seen = dv
        gain, dgain = [_mask_entry(at.has, k) for k in at.K], [_mask_entry(at.has, k) for k in dK]
        m = [
            plus(a, plus(times(k, _mask_entry(at.has, dv)), times(dk, _mask_entry(at.has, at.v))))
            for a, k, dk in zip(slope.m, gain, dgain, strict=True)
        ]
        P = _change_covariance(slope.P, gain, [_mask_entry(at.has, a) for a in dM], dS)
        if at.diffuse is not None:
            P = _with_gain(P, at, dgain)
        moved.append(StateSlope(m, P, P_inf))
        dvs.append(dv_seen)
        ratios.append(ratio)
        gradient.append(slope_of_value)
    information: list[Entry] = []
    for i in range(len(moved)):
        scaled, half = over(dvs[i], at.S), times(0.5, ratios[i])
        information += [plus(times(scaled, dvs[j]), times(half, ratios[j])) for j in range(i + 1)]
    return moved, [*gradient, *information]


def _change_covariance(P: Vector, K: Vector, dM: Vector, dS: Entry) -> list[Entry]:
    """Return P - dM K' - K dM' + K dS K', packed: the derivative P after an update by a fixed gain K."""
    c = [minus(a, times(0.5, times(k, dS))) for a, k in zip(dM, K, strict=True)]
    n = len(K)
    return [
        minus(P[packed_index(i, j)], plus(times(K[i], c[j]), times(c[i], K[j])))
        for i in range(n)
        for j in range(i + 1)
    ]


def _with_gain(P: Vector, at: _Update, dK: Vector) -> list[Entry]:
    """Return P - dK w' - w dK', packed, with w = M - K (h M + r): the effect of dK where the gain is not optimal."""
    proper = plus(dot(at.h, at.M), at.r)
    w = [np.where(at.diffuse, minus(a, times(k, proper)), 0.0) for a, k in zip(at.M, at.K, strict=True)]
    n = len(dK)
    return [
        minus(P[packed_index(i, j)], plus(times(dK[i], w[j]), times(w[i], dK[j])))
        for i in range(n)
        for j in range(i + 1)
    ]
