"""Starts of each key's search, computed from the key's measurements, robust to outliers and gaps.

For each noise of unit variance, the model gives the measurement's variance after a number of rows (the lag). The median
size of a key's measurement differences over this lag then gives the size of a noise that explains a given share of the
differences. Each division of the differences among the noises is a candidate. The filter computes the likelihood of
each candidate; if only the measurements set a scale, the filter also gives the best common factor of all variances.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from kalman.filters.linear import LinearFilter
from kalman.filters.recursions import congruence, predict
from kalman.filters.robust.adaptive import rank_parameter
from kalman.learning import constraints
from kalman.learning.tangents import LearnedEntries
from kalman.linalg.packing import packed_index, packed_size
from kalman.models.structure import Parameter
from kalman.run import SortedRows
from kalman.types import Array

SAMPLE = 101
"""Maximum number of differences of each key that enter the median size."""
LAGS = (1, 10)
"""Rows over which differences are taken: one row shows all noises except the noise of a slope, which needs several."""
NORMAL = 1.4826
"""Standard deviation of a normal variable whose absolute value has the median one."""
STEEP = 30.0
"""If a noise's variance grows by more than this between the lags, the longer lag is used; a random walk grows by 10."""
SHARES = (0.95, 0.6, 0.15, 0.01)
"""Shares of the differences' variance that process noise explains in the candidates."""
MOST = 24
"""Largest number of candidates."""


class Free(NamedTuple):
    """One free number: its parameter, its packed entry, and its effect on the variance.

    power  if the number scales a noise, the noise's variance is exp(power * theta); otherwise 0
    alone  whether the noise is a single variance, so that it can be zero
    """

    parameter: Parameter
    entry: int
    power: int
    alone: bool

    @property
    def name(self) -> str:
        """Name of the number's entry."""
        p = self.parameter
        if p.kind != "covariance":
            return p.name
        i, j = _locate_entry(self.entry)
        return f"{p.name}[{i}][{j}]" if len(p.value) > 1 else p.name


def free_numbers(model: LinearFilter, learned: Sequence[Parameter]) -> list[Free]:
    """Return the free numbers of the learned parameters, in the order of theta."""
    found: list[Free] = []
    for p in learned:
        noise = p.name == "R" or p.kind == "covariance"
        if p.kind == "positive":
            noise = rank_parameter(model.process, p, model.controls).rank > 0
        entries = constraints.list_free_entries(p)
        for e in entries:
            i, j = _locate_entry(e)
            if p.kind == "covariance":
                linked = any(packed_index(i, k) in entries for k in range(_find_order(p)) if k != i)
                found.append(Free(p, e, 2 if i == j else 0, i == j and not linked))
            else:
                found.append(Free(p, e, int(noise), noise))
    return found


def _locate_entry(entry: int) -> tuple[int, int]:
    i = int((np.sqrt(8 * entry + 1) - 1) / 2)
    return i, entry - i * (i + 1) // 2


def _find_order(p: Parameter) -> int:
    return _locate_entry(len(p.value) - 1)[0] + 1


class Starts(NamedTuple):
    """Candidates for the start of the search, for each of K keys.

    theta    (c, p, K)
    kind     (c,) or (c, K), the noise with the largest share
    spread   (p, K) log of the variance of a noise that alone explains the differences; 0 for numbers that are no noise
    widest   (p, K) log of the variance of a noise that alone explains the largest differences
    constant (K,) whether the key's measurements do not vary
    """

    theta: Array
    kind: np.ndarray
    spread: Array
    widest: Array
    constant: np.ndarray


def build_candidates(
    of: LearnedEntries, free: Sequence[Free], written: Array, rows: SortedRows, unit: float
) -> Starts:
    """Return the candidates of keys 0 to K - 1, each with at least one row; written: theta (p,) of the definition."""
    sizes, largest, step, constant = _measure_differences(rows, unit)
    responses = _compute_responses(of, free, written, step, rows)
    keys = len(step)
    spread, brief, widest = np.zeros((3, len(free), keys))
    for i, one in enumerate(free):
        if one.power:
            with np.errstate(all="ignore"):
                short, long = (
                    np.where(r > 1e-12 * r.max(axis=0), s / r, np.inf).min(axis=0)
                    for r, s in zip(responses[i], sizes, strict=True)
                )
                growth = (responses[i][1] / responses[i][0]).max(axis=0)
                r = responses[i][0]
                most = np.where(r > 1e-12 * r.max(axis=0), largest / r, 0.0).max(axis=0)
            levels = (spread, np.where(growth > STEEP, long, short)), (brief, short), (widest, most)
            for target, level in levels:
                target[i] = np.log(np.where(np.isfinite(level) & (level > 0.0), level, 1.0))
    theta: list[Array] = []
    kinds: list[int] = []
    for kind, weights in _list_sharings(free):
        one = np.repeat(written[:, None], keys, axis=1)
        base = brief if kind < 0 else spread
        if kind < 0 and np.array_equal(brief, spread):
            continue
        for i, (number, weight) in enumerate(zip(free, weights, strict=True)):
            if number.power:
                one[i] = (base[i] + np.log(weight)) / number.power
        theta.append(one)
        kinds.append(kind)
    return Starts(np.array(theta), np.array(kinds), spread, np.maximum(spread, widest), constant)


def _list_sharings(free: Sequence[Free]) -> list[tuple[int, list[float]]]:
    """Return each candidate's kind, and each noise's share of the differences' variance.

    kind: 0 for equal shares of all process noises, i + 1 if number i has the largest share. Kind -(i + 1) is the same
        as i + 1, but always by differences over one row.
    """
    process = [i for i, one in enumerate(free) if one.power and one.parameter.name != "R"]
    measured = [i for i, one in enumerate(free) if one.power and one.parameter.name == "R"]
    several = process if len(process) > 1 else []
    kinds = [0, *(i + 1 for i in several), *(-i - 1 for i in several)]
    shares = SHARES if process and measured else (0.6,)
    found: list[tuple[int, list[float]]] = []
    for kind, share in product(kinds, shares):
        one = [1.0] * len(free)
        for i in process:
            one[i] = share * (1.0 / len(process) if kind == 0 else (1.0 if i == abs(kind) - 1 else 0.01))
        for i in measured:
            one[i] = 1.0 - share
        found.append((kind, one))
    return found[:MOST]


def _measure_differences(rows: SortedRows, unit: float) -> tuple[list[Array], Array, Array, np.ndarray]:
    """Return figures of the measurements of each of K keys.

    These are the variances of differences over each lag, (m, K) each; the square (m, K) of the largest difference
    between any two rows; the usual time step (K,); and a mask (K,) of keys whose measurements do not vary.
    """
    count = np.bincount(rows.key)
    first = np.concatenate([[0], np.cumsum(count)[:-1]])
    sizes: list[Array] = []
    for lag in LAGS:
        here = np.maximum(np.minimum(lag, count // 3), 1)
        room = np.maximum(count - here, 0)
        picked = first[:, None] + np.arange(SAMPLE)[None, :] * room[:, None] // SAMPLE
        picked = np.minimum(picked, len(rows.key) - 1)
        later = np.minimum(picked + here[:, None], (first + count - 1)[:, None])
        away = rows.y[:, later] - rows.y[:, picked]
        away[:, room == 0] = np.nan
        square = (NORMAL * _compute_median(np.abs(away))) ** 2
        with np.errstate(all="ignore"):
            known = np.isfinite(away)
            mean = np.where(known, away, 0.0)
            mean = (mean * mean).sum(axis=-1) / known.sum(axis=-1)
        square = np.where(square > 0.0, square, mean)  # most steps are zero where values are rounded
        sizes.append(square * (lag / here))
    steps = np.diff(rows.time, append=rows.time[-1:]) / unit
    picked = first[:, None] + np.arange(SAMPLE)[None, :] * np.maximum(count - 1, 0)[:, None] // SAMPLE
    step = _compute_median(np.where((count > 1)[:, None], steps[picked], np.nan))
    step = np.where(np.isfinite(step) & (step > 0.0), step, 1.0)
    low, high = (
        f.reduceat(np.where(np.isnan(rows.y), fill, rows.y), first, axis=1)
        for f, fill in ((np.minimum, np.inf), (np.maximum, -np.inf))
    )
    constant: np.ndarray = np.logical_and.reduce(high <= low, axis=0)
    with np.errstate(all="ignore"):
        largest = (high - low) ** 2
    sizes = [np.where(np.isfinite(a), a, 0.0) for a in sizes]
    return sizes, np.where(np.isfinite(largest), largest, 0.0), step, constant


def _compute_median(values: Array) -> Array:
    """Return the medians along the last axis, leaving out NaN; of two middle values the lower; NaN without values."""
    ordered = np.sort(values, axis=-1)
    known = (~np.isnan(ordered)).sum(axis=-1)
    middle = np.maximum((known - 1) // 2, 0)
    return np.take_along_axis(ordered, middle[..., None], axis=-1)[..., 0]


def _compute_responses(
    of: LearnedEntries, free: Sequence[Free], written: Array, step: Array, rows: SortedRows
) -> list[list[Array]]:
    """Return for each free number that scales a noise the variances of the measurement (m, K) after each lag."""
    model, keys = of.model, len(step)
    with np.errstate(all="ignore"):
        first = np.concatenate([[0], np.flatnonzero(np.diff(rows.key)) + 1])
        count = np.diff([*first, len(rows.key)])
        u = np.add.reduceat(rows.u, first, axis=1) / count if len(rows.u) else rows.u[:, :keys]
    u = np.where(np.isfinite(u), u, 0.0)
    n = len(model.states)
    result: list[list[Array]] = []
    for one in free:
        if not one.power or one.parameter.name == "R":
            i = _locate_entry(one.entry)[0]
            size = 2.0 * (np.arange(model.measurements) == i) if one.power else np.zeros(model.measurements)
            result.append([np.repeat(size[:, None], keys, axis=1)] * len(LAGS))
            continue
        values = _isolate_noise(of, one, keys)
        zero = np.zeros(keys)
        P: Sequence[Any] = [zero] * packed_size(n)
        H = model.observed(list(u), values).H
        found: list[Array] = []
        for lag in range(1, LAGS[-1] + 1):
            transition = model.process.transition(step, list(u), values)
            _, P = predict([zero] * n, P, transition)
            if lag in LAGS:
                seen = compute_congruence_diagonal(H, P)
                found.append(np.array([np.broadcast_to(a, keys) for a in seen], float))
        result.append(found)
    return result


def compute_congruence_diagonal(H: Sequence[Sequence[Any]], P: Sequence[Any]) -> list[Any]:
    """Return the diagonal of H P H'."""
    packed = congruence(H, P)
    return [packed[packed_index(i, i)] for i in range(len(H))]


def _isolate_noise(of: LearnedEntries, one: Free, keys: int) -> dict[str, Sequence[Any]]:
    """Return the model's parameters with this noise at variance 1 and the other learned noises at 0."""
    values: dict[str, Sequence[Any]] = {p.name: p.value for p in of.model.parameters}
    for p in of.model.parameters:
        noise = p.kind == "covariance" or (
            p.kind == "positive" and rank_parameter(of.model.process, p, of.model.controls).rank > 0
        )
        if p.name in of.model.own and noise:
            values[p.name] = [np.zeros(keys) for _ in p.value]
    name = one.parameter.name
    values[name] = [np.full(keys, float(e == one.entry)) for e in range(len(one.parameter.value))]
    return values
