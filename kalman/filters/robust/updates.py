"""Measurement updates that are robust to outliers: gating, Student-t and Huber noise, fading memory.

All methods use three inputs, in entries: the innovation v = y - E[y], the covariance C of the predicted measurement
without measurement noise, and the noise covariance R. Heavy-tailed noise changes the R that the usual update uses, so
the methods work with every filter that has v, C and R.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import gammaincinv

from kalman.filters.recursions import decorrelate
from kalman.filters.update import LOG_2PI, Present
from kalman.linalg.entries import Entry, Matrix, Vector, dot, minus, over, plus, times
from kalman.linalg.packing import unpack_symmetric
from kalman.linalg.program import call_recorded
from kalman.models import checks
from kalman.models.columns import Cell, Column, parse_cell, resolve
from kalman.types import Array, ModelError


class Gate(NamedTuple):
    """The rule that a row is not applied if its NIS exceeds a threshold.

    thresholds: for 1, 2, ... m observed components
    limit: after this number of consecutive gated rows, the next row is applied; None means no limit
    probability: the column with each row's probability, if any; the thresholds are then quantiles at this probability
    """

    thresholds: tuple[Cell, ...]
    limit: int | None
    probability: Column | None = None

    def limits(self, u: Vector) -> list[Entry]:
        """Return the thresholds of a row with these controls."""
        if self.probability is None:
            return resolve(self.thresholds, u)
        m = len(self.thresholds)
        return call_recorded(partial(_compute_quantiles, m), m, resolve([self.probability], u))


class StudentT(NamedTuple):
    """Measurement noise with a multivariate Student-t distribution of the given degrees of freedom and scale R."""

    degrees: float
    iterations: int


class Huber(NamedTuple):
    """Measurement noise that is Gaussian up to `threshold` standard deviations and has Laplace tails beyond."""

    threshold: float
    iterations: int


Noise = StudentT | Huber


class Robust(NamedTuple):
    """The section `robust` of a definition; fading: the alpha in the predicted covariance alpha^2 F P F' + Q."""

    gate: Gate | None = None
    noise: Noise | None = None
    fading: Cell = 1.0

    def guards(self, u: Vector) -> list[Entry]:
        """Return entries that are zero or more for the keys whose row has columns that give a valid gate."""
        if self.gate is None:
            return []
        if self.gate.probability is not None:
            (value,) = resolve([self.gate.probability], u)
            return [np.where(np.greater(value, 0.0) & np.less(value, 1.0), 0.0, -1.0)]
        (first, *_) = self.gate.thresholds
        if not isinstance(first, Column):
            return []
        (value,) = resolve([first], u)
        return [np.where(np.greater(value, 0.0), 0.0, -1.0)]

    def fading_guards(self, u: Vector) -> list[Entry]:
        """Return entries that are zero or more for the keys whose row has columns that give a valid fading."""
        return [minus(a, 1.0) for a in resolve([self.fading], u)] if isinstance(self.fading, Column) else []


class Innovation(NamedTuple):
    """An innovation v as independent scalars z = W v with variances d; a missing component has z = 0 and d = 1."""

    W: Matrix
    d: Vector
    z: Vector


def parse(definition: Any, measurements: int, controls: Sequence[str] = ()) -> Robust:
    """Return the section `robust` of a definition; `controls` are the names of u. Raises ModelError."""
    if definition is None:
        return Robust()
    checks.check_keys("robust", definition, ("gate", "student_t", "huber", "fading"))
    if definition.get("student_t") is not None and definition.get("huber") is not None:
        raise ModelError("robust.huber", "student_t is given too", "keep one of them")
    fading = parse_cell("robust.fading", definition.get("fading", 1.0), controls)
    if isinstance(fading, float) and fading < 1.0:
        raise ModelError("robust.fading", f"{fading!r} is below 1", "write 1 (no fading) or a little more")
    noise: Noise | None = None
    if (section := definition.get("student_t")) is not None:
        checks.check_keys("robust.student_t", section, ("degrees", "iterations"))
        degrees = checks.parse_positive(
            "robust.student_t.degrees", checks.require_key("robust.student_t", section, "degrees")
        )
        noise = StudentT(degrees, _parse_iterations("robust.student_t", section))
    elif (section := definition.get("huber")) is not None:
        checks.check_keys("robust.huber", section, ("threshold", "iterations"))
        threshold = checks.parse_positive("robust.huber.threshold", section.get("threshold", 1.345))
        noise = Huber(threshold, _parse_iterations("robust.huber", section))
    return Robust(_parse_gate(definition.get("gate"), measurements, controls), noise, fading)


def _parse_iterations(field: str, section: Mapping[str, Any]) -> int:
    return checks.parse_integer(f"{field}.iterations", section.get("iterations", 10), 1, 1000)


def _parse_gate(section: Any, measurements: int, controls: Sequence[str]) -> Gate | None:
    if section is None:
        return None
    checks.check_keys("robust.gate", section, ("probability", "threshold", "limit"))
    if ("probability" in section) == ("threshold" in section):
        raise ModelError(
            "robust.gate",
            "needs a probability or a threshold, one of them",
            "write one, such as probability: 0.99",
        )
    limit = section.get("limit")
    if limit is not None:
        limit = checks.parse_integer("robust.gate.limit", limit, 1, 1_000_000)
    for name in ("threshold", "probability"):
        if isinstance(section.get(name), str):
            column = parse_cell(f"robust.gate.{name}", section[name], controls)
            assert isinstance(column, Column)
            own = column if name == "probability" else None
            return Gate((column,) * measurements, limit, own)
    if "threshold" in section:
        return Gate(
            (checks.parse_positive("robust.gate.threshold", section["threshold"]),) * measurements, limit
        )
    probability = checks.parse_positive("robust.gate.probability", section["probability"])
    if probability >= 1.0:
        raise ModelError(
            "robust.gate.probability", f"{probability!r} is not below 1", "write one such as 0.99"
        )
    return Gate(tuple(float(a) for a in _compute_quantiles(measurements, probability)), limit)


def _compute_quantiles(m: int, probability: Any) -> Any:
    """Return the quantiles of chi-square with 1, 2, ... m degrees of freedom, (m,) or (m, K)."""
    return np.array([2.0 * gammaincinv(k / 2, probability) for k in range(1, m + 1)])


def whiten(v: Vector, S: Vector, presents: Sequence[Present]) -> Innovation:
    """Return the innovation v (m) with covariance S (packed) as independent scalars; any components may be missing."""
    m = len(v)
    identity = [[1.0 if i == j else 0.0 for j in range(m)] for i in range(m)]
    _, d, W, z = decorrelate(identity, S, v, presents)
    return Innovation(
        W,
        [a if has is None else np.where(has, a, 1.0) for a, has in zip(d, presents, strict=True)],
        [a if has is None else np.where(has, a, 0.0) for a, has in zip(z, presents, strict=True)],
    )


def square_innovation(innovation: Innovation) -> list[Entry]:
    """Return z_i^2 / d_i, whose sum is the NIS; missing components give 0."""
    return [over(times(z, z), d) for z, d in zip(innovation.z, innovation.d, strict=True)]


class Surplus(NamedTuple):
    """The weighted excess of v v' over S: S^-1 v v' S^-1 - S^-1 = (W' p)(W' p)' - W' diag(q) W."""

    p: list[Entry]
    q: list[Entry]

    def form(self, rows: Matrix, X: Vector) -> Entry:
        """Return the trace of surplus times X (packed); rows: the measurement row of each independent scalar."""
        pulled = [dot(self.p, column) for column in zip(*rows, strict=True)]
        return minus(
            _compute_form(pulled, X),
            sum_entries([times(q, _compute_form(r, X)) for q, r in zip(self.q, rows, strict=True)]),
        )


def compute_surplus(innovation: Innovation, presents: Sequence[Present]) -> Surplus:
    """Return the surplus of the measured components."""
    pairs = zip(innovation.d, presents, strict=True)
    return Surplus(
        [over(z, d) for z, d in zip(innovation.z, innovation.d, strict=True)],
        [_select_if(has, np.divide(1.0, d), 0.0) for d, has in pairs],
    )


def count(presents: Sequence[Present]) -> Entry:
    """Return each key's number of present components."""
    return sum_entries([1.0 if has is None else np.where(has, 1.0, 0.0) for has in presents])


def sum_entries(entries: Vector) -> Entry:
    """Return the sum of the entries, added from first to last."""
    result: Entry = 0.0
    for entry in entries:
        result = plus(result, entry)
    return result


def is_beyond_limit(limits: Vector, nis: Entry, observed: Entry) -> Any:
    """Return a mask of keys whose NIS exceeds the gate's threshold for their number of observed components."""
    return np.greater(nis, _select_by_count(limits, observed))


def compute_weights(
    noise: Noise, v: Vector, C: Vector, R: Vector, presents: Sequence[Present]
) -> list[Entry]:
    """Return a positive weight w_i for each component; the update then uses R_ij / sqrt(w_i w_j) in place of R_ij.

    Huber weights are at most 1; Student-t weights may exceed 1.
    """
    return (_weigh_student_t if isinstance(noise, StudentT) else _weigh_huber)(noise, v, C, R, presents)  # type: ignore[arg-type]


def weigh_noise(R: Vector, w: Vector) -> list[Entry]:
    """Return R_ij / sqrt(w_i w_j), packed."""
    full, roots = unpack_symmetric(R), [np.sqrt(a) for a in w]
    return [
        over(full[i][j], w[i] if i == j else times(roots[i], roots[j]))
        for i in range(len(w))
        for j in range(i + 1)
    ]


def log_density(noise: Noise, innovation: Innovation, presents: Sequence[Present]) -> Entry:
    """Return the log-density of the innovation under heavy-tailed noise, with the scale S = C + R.

    Student-t noise gives the multivariate t density of scale S. Huber noise gives Huber's least favourable density of
    each independent scalar. Both densities integrate to 1, so that models can be compared, and become Gaussian if the
    noise becomes Gaussian.
    """
    scale = sum_entries(
        [_select_if(has, -0.5 * np.log(d), 0.0) for d, has in zip(innovation.d, presents, strict=True)]
    )
    observed = count(presents)
    if isinstance(noise, StudentT):
        nu = noise.degrees
        sizes = range(1, len(presents) + 1)
        constant = _select_by_count([_compute_t_constant(nu, k) for k in sizes], observed)
        tail = times(-0.5 * plus(observed, nu), np.log1p(sum_entries(square_innovation(innovation)) / nu))
        return _select_if_any(presents, plus(plus(constant, scale), tail), observed)
    k = noise.threshold
    inside = math.erf(k / math.sqrt(2.0))
    outside = 2.0 / k * math.exp(-0.5 * k * k) / math.sqrt(2.0 * math.pi)
    constant = -math.log(inside + outside) - 0.5 * LOG_2PI
    losses: list[Entry] = []
    for square, has in zip(square_innovation(innovation), presents, strict=True):
        far = k * np.sqrt(square) - 0.5 * k * k
        losses.append(
            _select_if(has, minus(constant, np.where(np.greater(square, k * k), far, 0.5 * square)), 0.0)
        )
    return plus(scale, sum_entries(losses))


def temper_innovations(noise: Noise, white: Array) -> Array:
    """Return normalised innovations (m, N) shrunk as the heavy-tailed noise requires, so that their squares average 1.

    The average is 1 where the score of a common scale of the innovations is zero, which is at maximum likelihood.
    """
    size = np.abs(white)
    if isinstance(noise, Huber):
        return np.asarray(np.sign(white) * np.minimum(size, np.sqrt(noise.threshold * size)))
    measured, nis = (~np.isnan(white)).sum(axis=0), np.nansum(size**2, axis=0)
    return np.asarray(white * np.sqrt((noise.degrees + measured) / (noise.degrees + nis)))


def _weigh_student_t(
    noise: StudentT, v: Vector, C: Vector, R: Vector, presents: Sequence[Present]
) -> list[Entry]:
    """Return the expected precision lambda of the noise, the same number for all components of a row.

    The model is y = H x + e, e ~ N(0, R / lambda), lambda ~ Gamma(nu / 2, nu / 2). A fixed number of coordinate-ascent
    steps on the factorised posterior of x and lambda starts from lambda = 1. E[e e'] is a function of the innovation,
    so neither x nor an inverse of R is needed.

    References: Piche, Sarkka and Hartikainen (2012), algorithm of the variational update; Agamennoni, Nieto
    and Nebot (2012), section III.
    """
    observed, nu = count(presents), noise.degrees
    precision: Entry = 1.0
    for _ in range(noise.iterations):
        scaled = R if type(precision) is float else [over(r, precision) for r in R]
        innovation = whiten(v, _sum(C, scaled), presents)
        # tr(R^-1 E[e e']) = count / lambda + tr(surplus R) / lambda^2
        change = compute_surplus(innovation, presents).form(innovation.W, R)
        size = over(plus(observed, over(change, precision)), precision)
        precision = over(plus(observed, nu), plus(size, nu))
    return [precision] * len(v)


def _weigh_huber(noise: Huber, v: Vector, C: Vector, R: Vector, presents: Sequence[Present]) -> list[Entry]:
    """Return Huber's weight min(1, k / |e_i|) of each component's standardised residual e_i.

    The first weights are the closed-form weights of each component alone. A single component needs no more. For several
    components, a fixed number of iterations of reweighted least squares follows. With correlated noise, `weigh_noise`
    applies the weights of both components to each entry of R.

    References: Huber (1964); Durovic and Kovacevic (1999); Karlgaard and Schaub (2007); for correlated noise
    Yang, Song and Xu (2002).
    """
    m, k = len(v), noise.threshold
    C_full, R_full = unpack_symmetric(C), unpack_symmetric(R)
    w: list[Entry] = []
    for i, has in enumerate(presents):
        r = R_full[i][i]
        needed = minus(times(np.abs(v[i]), np.sqrt(r)) / k, C_full[i][i])
        w.append(_select_if(has, over(r, np.maximum(r, needed)), 1.0))
    for _ in range(noise.iterations if m > 1 else 0):
        scaled = weigh_noise(R, w)
        innovation = whiten(v, _sum(C, scaled), presents)
        pull = compute_surplus(innovation, presents).p
        solved = [dot(column, pull) for column in zip(*innovation.W, strict=True)]  # S^-1 v
        residual = [dot(row, solved) for row in unpack_symmetric(scaled)]
        w = [
            _select_if(has, over(k, np.maximum(k, over(np.abs(e), np.sqrt(R_full[i][i])))), 1.0)
            for i, (e, has) in enumerate(zip(residual, presents, strict=True))
        ]
    return w


def _compute_form(row: Vector, matrix: Vector) -> Entry:
    """Return row @ matrix @ row."""
    return dot(row, [dot(other, row) for other in unpack_symmetric(matrix)])


def _sum(a: Vector, b: Vector) -> list[Entry]:
    return [plus(x, y) for x, y in zip(a, b, strict=True)]


def _compute_t_constant(nu: float, k: int) -> float:
    """Return the log of Gamma((nu + k) / 2) / Gamma(nu / 2) (nu pi)^(-k / 2), accurate also for a very large nu."""
    # computed in steps of 1/2 in the argument, so that no two huge logarithms cancel
    steps = sum(_compute_log_ratio((nu + i) / 2.0) for i in range(k))
    return steps - 0.5 * k * math.log(nu * math.pi)


def _compute_log_ratio(x: float) -> float:
    """Return log Gamma(x + 1/2) - log Gamma(x)."""
    if x < 1e3:
        return math.lgamma(x + 0.5) - math.lgamma(x)
    # Stirling's series for the difference of the two logarithms
    return 0.5 * math.log(x) - 1.0 / (8.0 * x) + 1.0 / (192.0 * x**3)


def _select_by_count(values: Vector, observed: Entry) -> Entry:
    """Return values[k - 1] for the keys with k components, and the last value for the keys without components."""
    if isinstance(observed, float):
        return values[-1]
    result: Entry = values[-1]
    for k in range(1, len(values)):
        result = np.where(np.equal(observed, float(k)), values[k - 1], result)
    return result


def _select_if(has: Present, yes: Entry, no: Entry) -> Entry:
    return yes if has is None else np.where(has, yes, no)


def _select_if_any(presents: Sequence[Present], yes: Entry, observed: Entry) -> Entry:
    return yes if presents[0] is None else np.where(np.greater(observed, 0.0), yes, 0.0)


def predict_measurement(m: Vector, P: Vector, H: Matrix) -> tuple[list[Entry], list[Entry]]:
    """Return mean H m and packed covariance H P H' of the predicted measurement without measurement noise."""
    full = unpack_symmetric(P)
    C: list[Entry] = []
    for i, h in enumerate(H):
        seen = [dot(h, row) for row in full]
        C += [dot(H[j], seen) for j in range(i + 1)]
    return [dot(h, m) for h in H], C
