"""Noise covariances that follow the innovations, key by key: R, Q, or the variances of a named structure.

Each row gives an estimate of its noise. Given the innovation, the noise e ~ N(0, X) has a mean, a covariance, and so a
second moment E[e e' | y]. The covariance moves towards this second moment at a fixed rate,
X' = (1 - rate) X + rate E[e e' | y]. X' is an average of positive semidefinite matrices and so positive semidefinite.
At the true covariances, X is unchanged on average for any F and H. A missing component adds information about its noise
only through correlations with other components.

For R, the method is the residual-based estimate e e' + H P H' with exponential weights. For Q, the method is a step of
online EM on the filtered moments, because the usual estimate K v v' K' is unbiased only in a steady state with F = I.
The adapted parameters are key-specific and part of the state.

References: Mohamed and Schwarz (1999); Akhlaghi, Zhou and Huang (2017); Cappe and Moulines (2009).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kalman.filters.robust.updates import Innovation, Surplus
from kalman.filters.update import Present, Updated, update
from kalman.linalg.entries import Entry, Matrix, Vector, dot, is_zero, plus, times
from kalman.linalg.ldl import factor
from kalman.linalg.packing import find_order, packed_index, packed_size, unpack_symmetric
from kalman.models import checks, columns, structures
from kalman.models.columns import Cell, Column
from kalman.models.functions import FunctionProcess
from kalman.models.structure import Transition
from kalman.models.structures import Parameter, Structure
from kalman.types import Array, ModelError


class NoiseRank(NamedTuple):
    """A parameter whose entries scale one independent part of Q, and the rank of this part."""

    name: str
    rank: int


class Adaptive(NamedTuple):
    """The section `adaptive` of a definition.

    R, Q: rates, None for a fixed covariance; a rate of 0.02 moves 2 % of the way in each row, a memory of 50 rows
    whole: whether the parameter Q is adapted as a matrix; scaled: otherwise, the parameters that scale parts of Q
    """

    R: float | None = None
    Q: float | None = None
    whole: bool = False
    scaled: tuple[NoiseRank, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are adapted."""
        noise = ("Q",) if self.whole else tuple(part.name for part in self.scaled)
        return (*(noise if self.Q is not None else ()), *(("R",) if self.R is not None else ()))


def parse(definition: Any, process: Structure | FunctionProcess, R: Parameter, controls: int) -> Adaptive:
    """Return the section `adaptive` of a definition. Raises ModelError."""
    if definition is None:
        return Adaptive()
    checks.check_keys("adaptive", definition, ("R", "Q"))
    rates = {name: _parse_rate(f"adaptive.{name}", definition.get(name)) for name in ("R", "Q")}
    if rates["R"] is None and rates["Q"] is None:
        raise ModelError("adaptive", "names nothing to adapt", "write a rate such as R: 0.02")
    if rates["R"] is not None:
        _check_pattern("observation.R", R.value)
    if rates["Q"] is None:
        return Adaptive(rates["R"])
    if isinstance(process, FunctionProcess):
        if process.q is not None:
            remedy = "write Q as a matrix, or adapt R"
            raise ModelError("adaptive.Q", "process.q says what the noise of each row is", remedy)
        _check_pattern("process.Q", process.Q)
        return Adaptive(rates["R"], rates["Q"], whole=True)
    inner = process.inner if isinstance(process, structures.Scaled) else process
    if isinstance(inner, structures.Explicit):
        _check_pattern("process.Q", inner.Q)
        return Adaptive(rates["R"], rates["Q"], whole=True)
    parts = tuple(part for p in process.parameters if (part := rank_parameter(process, p, controls)).rank)
    if not parts:
        raise ModelError("adaptive.Q", "the process has no noise that could be adapted", "remove it")
    return Adaptive(rates["R"], rates["Q"], scaled=parts)


def _parse_rate(field: str, value: Any) -> float | None:
    if value is None:
        return None
    rate = checks.parse_positive(field, value)
    if rate >= 1.0:
        raise ModelError(field, f"{rate!r} is not below 1", "write a rate such as 0.02")
    return rate


def _check_pattern(field: str, packed: Sequence[Cell]) -> None:
    """Raise ModelError for columns, and for a pattern of zeros that an adapted covariance could not keep."""
    if columns.find_columns(packed):
        raise ModelError(
            field, "it comes from a column, so it cannot be adapted", "write numbers, or remove adaptive"
        )
    full = np.array(unpack_symmetric(packed))
    if np.linalg.eigvalsh((full != 0.0).astype(float)).min() < -1e-9:
        raise ModelError(
            field,
            "its zeros do not separate it into blocks, so it cannot be adapted",
            "write zeros only between independent groups of components",
        )


def rank_parameter(process: Structure, parameter: Parameter, controls: int) -> NoiseRank:
    """Return a parameter and the rank of the part of Q that the parameter scales, 0 if it scales no part."""
    if columns.find_columns(parameter.value):
        return NoiseRank(parameter.name, 0)
    dt, u = np.array([0.7]), [np.ones(1)] * controls
    values = {p.name: columns.resolve(p.value, u) for p in process.parameters}
    for tangent in process.tangents(parameter.name, dt, u, values):
        if any(np.any(a) for a in (*tangent.c, *(a for row in tangent.F for a in row))):
            return NoiseRank(parameter.name, 0)  # the parameter also changes the mean
    part = compute_noise_part(process, parameter, dt, u, values)
    full = np.array([[float(np.squeeze(a)) for a in row] for row in unpack_symmetric(part)])
    return NoiseRank(parameter.name, int(np.linalg.matrix_rank(full)))


def compute_noise_part(
    process: Structure, parameter: Parameter, dt: Array, u: Vector, values: Mapping[str, Sequence[Entry]]
) -> Vector:
    """Return the part of Q (packed) that the parameter scales, for a step of dt."""
    result: list[Entry] = [0.0] * packed_size(process.size)
    tangents: list[Transition] = process.tangents(parameter.name, dt, u, values)
    for value, tangent in zip(values[parameter.name], tangents, strict=True):
        result = [plus(a, times(value, b)) for a, b in zip(result, tangent.Q, strict=True)]
    return result


def invert_scale(scale: Cell, u: Vector, still: Present) -> tuple[Entry, Present]:
    """Return 1 / scale of a row's noise, and the mask `still` with the keys without noise added."""
    if not isinstance(scale, Column):
        return 1.0 / scale, still
    (value,) = columns.resolve([scale], u)
    none = np.less_equal(value, 0.0)
    inverse = np.divide(1.0, np.where(none, 1.0, value))
    return inverse, none if still is None else none | still


def move_noise(X: Vector, scale: Vector, noise: Updated, rate: float, still: Present) -> list[Entry]:
    """Return (1 - rate) X + rate E[e e' | y], packed, and X for the keys in the mask `still`. Structural zeros stay.

    noise: the noise e ~ N(0, prior) given the row, with prior_ij = X_ij / (scale_i scale_j).
    """
    m = noise.m
    pairs = [(i, j) for i in range(len(m)) for j in range(i + 1)]
    moments = [
        times(plus(P, times(m[i], m[j])), times(scale[i], scale[j]))
        for P, (i, j) in zip(noise.P, pairs, strict=True)
    ]
    mean = [
        same if type(same) is float else plus(times(1.0 - rate, same), times(rate, moment))
        for same, moment in zip(X, moments, strict=True)
    ]
    new = repair_covariance(mean)
    return (
        new
        if still is None
        else [a if type(a) is float else np.where(still, a, b) for a, b in zip(X, new, strict=True)]
    )


def repair_covariance(X: Vector) -> list[Entry]:
    """Return X (packed) made positive semidefinite for keys with rounding errors; other keys keep their bits."""
    n = find_order(len(X))
    if n == 1:
        return list(X)
    L, d, _ = factor(X)
    lost = [np.equal(d[i], 0.0) for i in range(n) if not is_zero(X[packed_index(i, i)])]
    if not lost:  # every variance is zero
        return list(X)
    broken = lost[0]
    for here in lost[1:]:
        broken = broken | here
    weighed = [[times(a, b) for a, b in zip(row, d, strict=True)] for row in L]
    whole = [dot(weighed[i][: j + 1], L[j][: j + 1]) for i in range(n) for j in range(i + 1)]
    return [a if type(a) is float else np.where(broken, b, a) for a, b in zip(X, whole, strict=True)]


def condition_noise(X: Vector, H: Matrix, rest: Vector, v: Vector, presents: Sequence[Present]) -> Updated:
    """Return the noise e ~ N(0, X) given the innovation v = H e + an independent part with covariance `rest`."""
    return update([0.0] * len(unpack_symmetric(X)), X, None, H, rest, v, presents)


def compute_growth(part: Vector, rank: int, seen: Matrix, surplus: Surplus, rate: float) -> Entry:
    """Return the factor by which a row changes a parameter that scales this part of Q (packed)."""
    return plus(1.0, times(rate / rank, surplus.form(seen, part)))


def whiten_rows(innovation: Innovation, H: Matrix) -> list[list[Entry]]:
    """Return W H, the measurement matrix of the innovation's independent scalars."""
    columns = list(zip(*H, strict=True))
    return [[dot(row, column) for column in columns] for row in innovation.W]
