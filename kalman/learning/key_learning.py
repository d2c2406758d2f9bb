"""Maximum likelihood for each key: find starts from its rows, search, try further starts where in doubt, judge."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from kalman.evaluation.diagnostics import ljung_box
from kalman.learning import constraints
from kalman.learning.key_fits import (
    ARRIVED,
    ENOUGH_ROWS,
    FitOutcome,
    KeyFit,
    Population,
    compute_expected_gain,
    describe_missing_gain,
    find_row_shortage,
)
from kalman.learning.key_population import compute_evidence, compute_posterior, compute_row_share
from kalman.learning.key_rows import sort_by_rounds
from kalman.learning.key_search import Box, KeyPoints, SearchEnds, search
from kalman.learning.key_starts import Free, Starts, build_candidates, free_numbers
from kalman.learning.keys.directions import invert_information
from kalman.learning.keys.points import Points, Problems, add_in_order, compute_free_entries
from kalman.learning.keys.values import compute_fits, whiten_innovations
from kalman.learning.tangents import LearnedEntries
from kalman.models import learned_entries
from kalman.models.structure import Parameter
from kalman.run import SortedRows
from kalman.types import Array

ENOUGH = 5
"""Smallest number of measured values per free number; a key with fewer values has too few rows."""
PATIENCE = 6
"""Steps of a repeated search before it tries a variance of zero, which the first search may have tried too early."""
STARTS = 4
"""Number of starts of every key's search when entries of matrices are learned."""
APART = 1.5
"""Largest distance in an entry of theta at which two starts count as the same."""
FALL, RISE = 28.0, 14.0
"""Range of a variance's logarithm below and above the variance of the rows' differences: factors 1e-12 and 1e6."""
WIDER = 2
"""Maximum number of times that the bounds of a variance are widened when a search ends at a bound."""
LEANS = 0.98
"""If the key's rows make less than this share of its result, the search is repeated with the population as prior."""
REACH = 12.0
"""Largest distance of theta from its written value, for a number without unit that is not a noise: a factor e^12."""


Climbed = Callable[[Array, SortedRows, int, float], Array]
"""(start (p, J), rows of J keys, J, unit) -> theta (p, J) that another method has found."""


class Searched(Protocol):
    """A learned model: its parameters, written theta (p,), its free numbers, and the searches of keys."""

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...
    @property
    def written(self) -> Array: ...
    @property
    def free(self) -> list[Free]: ...

    def usable(self, rows: SortedRows) -> SortedRows:
        """Return the rows that the filter does not flag whatever the parameters are."""
        ...

    def searches(self, rows: SortedRows, unit: float) -> "KeySearches":
        """Return the searches of keys 0 to J - 1, each with at least one row."""
        ...


class Model(NamedTuple):
    """The learned model: the filter whose state holds the parameters, the learned parameters and written theta (p,)."""

    of: LearnedEntries
    parameters: tuple[Parameter, ...]
    written: Array
    free: list[Free]
    whole: bool
    """Whether only the measurements set a scale: all noises are learned and the start is diffuse."""

    def usable(self, rows: SortedRows) -> SortedRows:
        """Return the rows that the filter does not flag whatever the parameters are."""
        return _select_usable(self, rows)

    def searches(self, rows: SortedRows, unit: float) -> "KeySearches":
        """Return the searches of keys 0 to J - 1, each with at least one row."""
        return KeySearches(self, rows, unit)


def build_key_model(of: LearnedEntries, parameters: tuple[Parameter, ...], written: Array) -> Model:
    """Return the learned model of a filter."""
    free = free_numbers(of.model, parameters)
    noises = {one.parameter.name for one in free if one.power}
    all_noises = {
        p.name
        for p, numbers in ((p, free_numbers(of.model, [p])) for p in of.model.parameters)
        if any(one.power for one in numbers) or p.kind == "covariance"
    }
    proper = any(a != 0.0 for a in of.model.covariance) or not of.model.diffuse
    return Model(of, parameters, written, free, not proper and all_noises <= noises)


class KeySearches:
    """The searches of the keys that have rows, numbered 0 to J - 1."""

    def __init__(self, model: Model, rows: SortedRows, unit: float) -> None:
        self.model, self.sorted, self.unit = model, rows, unit
        self.rows = sort_by_rounds(rows, unit)
        self.keys = self.rows.keys

    def compute_information(
        self, theta: Array, zero: np.ndarray, point: KeyPoints, which: np.ndarray | None = None
    ) -> Array:
        """Return the information (p, p, J) at the ends of the keys `which`; None means all keys.

        point: the search's last point.
        """
        return point.information

    def checked(self, theta: Array, zero: np.ndarray, fitted: int) -> tuple[Array, Array, Array]:
        """Return `compute_goodness_of_fit` of the keys at theta (p, J); fitted: count of numbers fitted to each key."""
        return _check_goodness(self, compute_free_entries(self.model, theta, zero), fitted)

    def points(self, which: np.ndarray | None = None) -> Problems:
        """Return the problems of these keys, in the given order; a key may occur twice. None means all keys."""
        if which is None:
            return Points(self.model, self.rows)
        place = np.empty(self.keys, np.int64)
        place[self.rows.number] = np.arange(self.keys)
        order = np.argsort(place[which], kind="stable")
        return Points(self.model, self.rows.at(place[which][order], order))

    @cached_property
    def measured(self) -> Array:
        """Number of measured values (J,), less the number of diffuse states, which the first values determine."""
        seen = (~np.isnan(self.sorted.y)).sum(axis=0)
        states = self.model.of.factor // max(1, len(self.model.of.model.states))
        return np.maximum(np.bincount(self.sorted.key, seen) - states, 0.0)

    @cached_property
    def starts(self) -> Starts:
        """The candidates of each key, the best first; where `whole`, variances have their best factor."""
        model = self.model
        found = build_candidates(model.of, model.free, model.written, self.sorted, self.unit)
        order = self.rows.number
        power = np.array([one.power for one in model.free])
        theta, values = [], []
        written = np.repeat(model.written[:, None], self.keys, axis=1)
        several = [*found.theta, *([] if model.whole else [written])]
        nothing = np.zeros(written.shape, bool)
        for one in several:
            logs, squares = np.empty(self.keys), np.empty(self.keys)
            logs[order], squares[order] = compute_fits(
                model.of, self.rows, compute_free_entries(model, one, nothing)[:, order]
            )
            value = logs - 0.5 * squares
            if model.whole:
                count = np.maximum(self.measured, 1.0)
                with np.errstate(all="ignore"):
                    factor = np.log(squares / count)
                    factor = np.where(np.isfinite(factor), factor, 0.0)
                value = logs - 0.5 * count * (factor + 1.0)
                one = np.where(power[:, None] > 0, one + factor / np.maximum(power, 1)[:, None], one)
            theta.append(one)
            values.append(np.where(np.isfinite(value), value, -np.inf))
        rank = np.argsort(-np.array(values), axis=0, kind="stable")
        ordered = np.take_along_axis(np.array(theta), rank[:, None, :], axis=0)
        kinds = np.concatenate([found.kind, np.zeros(len(several) - len(found.kind), np.int64)])
        return Starts(ordered, kinds[rank], found.spread, found.widest, found.constant)

    @cached_property
    def box(self) -> Box:
        """The bounds of each key's search, which enclose the key's starts."""
        spread, widest = self.starts.spread, self.starts.widest
        low, high = np.full(spread.shape, -np.inf), np.full(spread.shape, np.inf)
        limit: list[float] = []
        for i, one in enumerate(self.model.free):
            if one.power:
                low[i], high[i] = (spread[i] - FALL) / one.power, (widest[i] + RISE) / one.power
            elif one.parameter.kind not in ("real", "vector"):
                low[i], high[i] = self.model.written[i] - REACH, self.model.written[i] + REACH
            unlimited = one.parameter.kind in ("real", "vector")
            limit.append(np.inf if unlimited else 2.0 / max(1, one.power))
        alone = np.array([one.alone for one in self.model.free])
        power = np.array([one.power for one in self.model.free], float)
        return Box(low, high, np.array(limit), alone, power)

    @property
    def several(self) -> bool:
        """Whether each key needs several starts, since the likelihood has many maxima in the entries of a matrix."""
        return any(learned_entries.parse_entry_name(one.name) is not None for one in self.model.parameters)

    def alone(self, climbed: Climbed | None = None) -> SearchEnds:
        """Return the maximum of each key from the key's rows alone; `climbed` is a method to run before the search."""
        starts, kinds, box = self.starts.theta, self.starts.kind, self.box
        first = np.clip(starts[0], box.low, box.high)
        if climbed is not None:
            first = np.clip(climbed(first, self.sorted, self.keys, self.unit), box.low, box.high)
        found = search(self.points().point, first, box, self.measured)
        doubt = ~found.done | found.zero.any(axis=0) | self.at_bound(found).any(axis=0)
        doubt &= ~self.starts.constant
        which: list[np.ndarray] = []
        theta: list[Array] = []
        others = [self._find_best(kind) for kind in np.unique(kinds).tolist()]
        if self.several:
            doubt = ~self.starts.constant
            others = [(starts[c], np.ones(self.keys, bool)) for c in range(min(STARTS, len(starts)))]
        for begin, there in others:
            begin = np.clip(begin, box.low, box.high)
            other = doubt & there & (np.abs(begin - first).max(axis=0) > APART)
            which.append(np.flatnonzero(other))
            theta.append(begin[:, which[-1]])
        self._search_again(found, which, theta)
        for _ in range(WIDER):
            beyond = self.at_bound(found) & (box.power[:, None] > 0.0) & ~self.starts.constant
            keys = np.flatnonzero(beyond.any(axis=0))
            if not len(keys):
                break
            self.box = box = self._widen_box(beyond)
            self._search_again(found, [keys], [found.theta[:, keys]])
        return found

    def _widen_box(self, beyond: np.ndarray) -> Box:
        """Return the box with wider bounds for the variances where the mask `beyond` (p, J) is true."""
        power = np.maximum(self.box.power, 1.0)[:, None]
        low, high = np.where(beyond, FALL, 0.0) / power, np.where(beyond, RISE, 0.0) / power
        return self.box._replace(low=self.box.low - low, high=self.box.high + high)

    def _find_best(self, kind: int) -> tuple[Array, np.ndarray]:
        """Return the best candidate (p, K) of a kind, and a mask (K,) of keys that have a candidate of this kind."""
        is_of = self.starts.kind == kind
        best = np.argmax(is_of, axis=0)
        begin = np.take_along_axis(self.starts.theta, best[None, None, :], axis=0)[0]
        return begin, is_of.any(axis=0)

    def _search_again(self, found: SearchEnds, which: list[np.ndarray], theta: list[Array]) -> None:
        """Search some keys from other starts, all at once; write the best end of each key into `found`."""
        keys, begin = np.concatenate(which), np.concatenate(theta, axis=1)
        if not len(keys):
            return
        points, box = self.points(keys), self.box.take(keys)
        ends = search(points.point, begin, box, self.measured[keys], patience=PATIENCE)
        at = 0
        for some in which:
            other = ends.take(np.arange(at, at + len(some)))
            at += len(some)
            least = 1e-8 * self.measured[some]
            gain = other.point.value - found.point.value[some]
            better = (gain > least) | (other.done & ~found.done[some] & (gain > -least))
            found.put(some, other, better & np.isfinite(other.point.value))

    def at_bound(self, found: SearchEnds) -> np.ndarray:
        """Return a mask (p, J) of the entries of theta that ended at a bound of the search."""
        return ((found.theta <= self.box.low) | (found.theta >= self.box.high)) & ~found.zero


class _Ends(NamedTuple):
    """The ends of J keys after all searches; lacking: the expected further gain in log-likelihood (J,)."""

    theta: Array
    zero: np.ndarray
    value: Array
    information: Array
    covariance: Array
    own: Array
    done: np.ndarray
    lacking: Array


def fit_each(
    model: Searched,
    rows: SortedRows,
    keys: int,
    unit: float,
    population: Population | None,
    climbed: Climbed | None = None,
) -> KeyFit:
    """Return the fits of keys 0 to `keys` - 1; a key without rows gets the population's mean or the written values."""
    rows = model.usable(rows)
    present, number = np.unique(rows.key, return_inverse=True)
    middle = model.written if population is None else population.mean
    result = _build_unsearched(model, keys, middle)
    if not len(present) or not len(middle):
        return result
    searches = model.searches(rows._replace(key=number), unit)
    ends = _search_alone(searches, climbed)
    if population is not None:
        ends = _lean_on_population(searches, ends, population)
    outcome, reason = _judge_ends(searches, ends, population)
    lost = (outcome == FitOutcome.FAILED) & (
        searches.starts.constant | ~np.isfinite(ends.value) | (population is not None)
    )
    theta = np.where(lost, np.asarray(middle, float)[:, None], ends.theta)
    zero = ends.zero & ~lost
    nis, p_value, seen = searches.checked(theta, zero, len(model.free) - 1)
    for k in np.flatnonzero(
        (outcome <= FitOutcome.AT_BOUND) & (seen < ENOUGH_ROWS * searches.measured)
    ).tolist():
        outcome[k], reason[k] = FitOutcome.FAILED, find_row_shortage(seen[k], searches.measured[k])
    errors = _compute_errors(searches, theta, zero, ends)
    errors[:, lost] = np.nan
    parts = (
        (result.theta, theta),
        (
            result.parameters,
            np.array([np.broadcast_to(a, len(present)) for a in _pack_learned(model, theta, zero)]),
        ),
        (result.log_likelihood, np.where(lost, np.nan, ends.value)),
        (result.used, np.bincount(number)),
        (result.outcome, outcome),
        (result.errors, errors),
        (result.information, np.where(lost, 0.0, ends.information)),
        (result.own, np.where(lost, 0.0, ends.own)),
        (result.nis, nis),
        (result.ljung_box, p_value),
    )
    for whole, new in parts:
        whole[..., present] = new
    for key, text in zip(present.tolist(), reason, strict=True):
        result.reason[key] = text
    return result


def _build_unsearched(model: Searched, keys: int, middle: Array) -> KeyFit:
    """Return the fits of keys without rows, at theta `middle` (p,)."""
    theta = np.repeat(np.asarray(middle, float)[:, None], keys, axis=1)
    p = len(theta)
    return KeyFit(
        theta,
        np.array([np.broadcast_to(a, keys) for a in _pack_learned(model, theta, np.zeros((p, keys), bool))]),
        np.zeros(keys),
        np.zeros(keys, np.int64),
        np.full(keys, FitOutcome.TOO_FEW_ROWS, np.int8),
        ["it has no rows"] * keys,
        np.full((sum(len(one.value) for one in model.parameters), keys), np.nan),
        np.zeros((p, p, keys)),
        np.zeros(keys),
        np.full(keys, np.nan),
        np.full(keys, np.nan),
    )


def _select_usable(model: Model, rows: SortedRows) -> SortedRows:
    """Return the rows that the filter does not flag whatever the parameters are."""
    good = np.asarray(~np.isinf(rows.y).any(axis=0))
    if len(rows.u):
        good &= np.isfinite(rows.u).all(axis=0)
        guard = model.of.model.guard(
            list(rows.u), {p.name: p.value for p in model.of.model.parameters}, False
        )
        if guard is not None:
            good &= np.greater_equal(guard, 0.0)
    return rows if good.all() else rows.take(good)


def _pack_learned(model: Searched, theta: Array, zero: np.ndarray) -> list[Array]:
    """Return the packed entries (d) of all learned parameters."""
    found: list[Any] = []
    at = 0
    for p in model.parameters:
        entries = constraints.list_free_entries(p)
        width = len(entries)
        values = constraints.compute_entries(p, list(theta[at : at + width]))
        for place, e in enumerate(entries):
            values[e] = np.where(zero[at + place], 0.0, values[e])
        found += values
        at += width
    return found


def _search_alone(searches: KeySearches, climbed: Climbed | None) -> _Ends:
    found = searches.alone(climbed)
    p = len(found.theta)
    gone = found.zero[:, None] | found.zero[None, :]
    known = searches.compute_information(found.theta, found.zero, found.point)
    information = np.where(gone | ~np.isfinite(known), 0.0, known)
    held = found.zero | searches.at_bound(found) | (np.array([information[i, i] for i in range(p)]) <= 0.0)
    covariance = np.where(held[:, None] | held[None, :], np.nan, invert_information(information, held))
    ones = np.ones(searches.keys)
    lacking = _compute_lacking_gain(found, searches.box)
    return _Ends(
        found.theta, found.zero, found.point.value, information, covariance, ones, found.done, lacking
    )


def _compute_lacking_gain(found: SearchEnds, box: Box) -> Array:
    """Return the log-likelihood (J,) that further steps from the ends are expected to gain."""
    held = np.where(found.zero | (found.theta <= box.low), -1, np.where(found.theta >= box.high, 1, 0))
    power = np.where(box.alone, box.power, 0.0)
    return compute_expected_gain(found.point.gradient, found.point.information, held, power)


def _lean_on_population(searches: KeySearches, ends: _Ends, population: Population) -> _Ends:
    """Return the ends of all keys; a key whose rows do not determine its theta is drawn to the population."""
    p = len(ends.theta)
    own = compute_row_share(population, ends.information)
    which = np.flatnonzero((own < LEANS) | ends.zero.any(axis=0) | ~ends.done)
    if not len(which):
        return ends._replace(own=own)
    precision = np.linalg.inv(population.covariance)
    information = np.where(ends.done[which], ends.information[:, :, which], 0.0)
    begin, _ = compute_posterior(population, ends.theta[:, which], information)

    points = searches.points(which)

    def point(theta: Array, zero: np.ndarray, some: np.ndarray) -> KeyPoints:
        plain = points.point(theta, zero, some)
        away = theta - population.mean[:, None]
        pull = np.array([add_in_order(precision[i, j] * away[j] for j in range(p)) for i in range(p)])
        penalty = 0.5 * add_in_order(pull[i] * away[i] for i in range(p))
        return KeyPoints(
            plain.value - penalty, plain.gradient - pull, plain.information + precision[:, :, None]
        )

    none = np.zeros(begin.shape, bool)
    free = np.full(begin.shape, np.inf)
    box = searches.box._replace(low=-free, high=free, alone=np.zeros(p, bool))
    found = search(point, begin, box, searches.measured[which])
    plain = points.point(found.theta, none, np.arange(len(which)))
    plain = plain._replace(information=searches.compute_information(found.theta, none, plain, which))
    alone = compute_evidence(
        population,
        ends.theta[:, which],
        ends.zero[:, which],
        ends.value[which],
        ends.information[:, :, which],
    )
    shared = compute_evidence(population, found.theta, none, plain.value, plain.information)
    kept = ends.zero[:, which].any(axis=0) & ends.done[which] & (alone > shared)
    take = ~kept & np.isfinite(plain.value)
    at = which[take]
    theta, zero, value = ends.theta.copy(), ends.zero.copy(), ends.value.copy()
    information, covariance, done = ends.information.copy(), ends.covariance.copy(), ends.done.copy()
    theta[:, at], zero[:, at], value[at] = found.theta[:, take], False, plain.value[take]
    information[:, :, at], done[at] = plain.information[:, :, take], found.done[take]
    covariance[:, :, at] = compute_posterior(population, theta[:, at], information[:, :, at])[1]
    own = np.where(zero.any(axis=0), 1.0, compute_row_share(population, information))
    lacking = ends.lacking.copy()
    lacking[at] = _compute_lacking_gain(found, box)[take]
    return _Ends(theta, zero, value, information, covariance, own, done, lacking)


def _judge_ends(
    searches: KeySearches, ends: _Ends, population: Population | None
) -> tuple[np.ndarray, list[str | None]]:
    """Return the outcome (J,) of each key and its reason, which is None for a converged key."""
    box, free = searches.box, searches.model.free
    p = len(free)
    outcome = np.full(searches.keys, FitOutcome.CONVERGED, np.int8)
    reason: list[str | None] = [None] * searches.keys
    sure = population is None
    at = ((ends.theta <= box.low) | (ends.theta >= box.high)) & ~ends.zero
    few = (searches.measured < ENOUGH * p) | (ends.own < 0.5)
    failed = ~ends.done | ~np.isfinite(ends.value) | searches.starts.constant | ~(ends.lacking < ARRIVED)
    bound = ends.zero.any(axis=0) | at.any(axis=0)
    for k in np.flatnonzero(few | failed | bound).tolist():
        if searches.starts.constant[k] and searches.measured[k] > 1:
            outcome[k], reason[k] = FitOutcome.FAILED, "its measurements do not vary"
        elif few[k]:
            outcome[k] = FitOutcome.TOO_FEW_ROWS
            text = f"{searches.measured[k]:.0f} measured values for {p} numbers"
            if not sure:
                text += f", {100 * ends.own[k]:.0f} % its own"
            reason[k] = text
        elif failed[k]:
            outcome[k] = FitOutcome.FAILED
            reason[k] = "the search found no maximum"
            if ends.done[k] and np.isfinite(ends.value[k]):
                reason[k] = describe_missing_gain(ends.lacking[k])
        else:
            outcome[k] = FitOutcome.AT_BOUND
            names = [f"{one.name} is zero" for one, a in zip(free, ends.zero[:, k], strict=True) if a]
            names += [
                f"{one.name} is at its {'lowest' if ends.theta[i, k] <= box.low[i, k] else 'highest'}"
                for i, one in enumerate(free)
                if at[i, k]
            ]
            reason[k] = ", ".join(names)
    return outcome, reason


def _compute_errors(searches: KeySearches, theta: Array, zero: np.ndarray, ends: _Ends) -> Array:
    """Return the standard errors (d, J) of the packed entries by the delta method; NaN where undefined."""
    result: list[Array] = []
    at = 0
    for one in searches.model.parameters:
        entries = constraints.list_free_entries(one)
        width = len(entries)
        part = slice(at, at + width)
        for e in range(len(one.value)):
            if e not in entries and one.kind not in constraints.CHANCES:
                result.append(np.full(searches.keys, np.nan))
                continue
            unit = [float(e == other) for other in range(len(one.value))]
            slopes = [
                np.broadcast_to(a, (searches.keys,))
                for a in constraints.pull_back(one, list(theta[part]), unit)
            ]
            variance = add_in_order(
                np.where(
                    (slopes[i] != 0.0) & (slopes[j] != 0.0),
                    slopes[i] * slopes[j] * ends.covariance[at + i, at + j],
                    0.0,
                )
                for i in range(width)
                for j in range(width)
            )
            gone = zero[at + entries.index(e)] if e in entries else np.zeros(searches.keys, bool)
            result.append(np.where(gone | ~(variance > 0.0), np.nan, np.sqrt(np.maximum(variance, 0.0))))
        at += width
    return np.array(result)


def _check_goodness(searches: KeySearches, entries: Array, fitted: int) -> tuple[Array, Array, Array]:
    """Return `compute_goodness_of_fit` of the keys at the learned entries (p, J)."""
    rows = searches.rows
    found = whiten_innovations(searches.model.of, rows, entries[:, rows.number])
    with np.errstate(all="ignore"):
        white = found[0::2] / np.sqrt(found[1::2])
    widths = np.diff(rows.starts)
    key = rows.number[np.arange(rows.size) - np.repeat(rows.starts[:-1], widths)]
    order = np.argsort(key, kind="stable")
    return compute_goodness_of_fit(key[order], white[:, order], searches.keys, fitted)


def compute_goodness_of_fit(
    key: np.ndarray, white: Array, keys: int, fitted: int
) -> tuple[Array, Array, Array]:
    """Return each key's mean NIS per measured component, its p-value of Ljung and Box, and its innovations, (J,) each.

    Args:
        key: the key of each row (N,), ascending.
        white: normalised innovations (m, N), NaN where missing.
        keys: the number of keys J.
        fitted: the count of numbers fitted to each key.

    The p-value is corrected by Bonferroni's rule: m times the smallest p-value of a component, at most 1.
    """
    total, count, least = np.zeros(keys), np.zeros(keys), np.full(keys, np.inf)
    for z in white:
        known = np.isfinite(z)
        total += np.bincount(key[known], z[known] ** 2, minlength=keys)
        count += np.bincount(key[known], minlength=keys)
        least = np.fmin(least, ljung_box(key, z, keys, fitted=fitted).p_value)
    with np.errstate(all="ignore"):
        p_value = np.where(np.isfinite(least), np.minimum(1.0, len(white) * least), np.nan)
        return total / count, p_value, count


def check(model: Searched, rows: SortedRows, keys: int, unit: float, theta: Array) -> tuple[Array, Array]:
    """Return the mean NIS per measured component (K,) and the p-value of Ljung and Box (K,) of keys at theta (p, K).

    Both are NaN for a key without rows; the p-value is also NaN for a key with too few rows.
    """
    nis, p_value = np.full(keys, np.nan), np.full(keys, np.nan)
    rows = model.usable(rows)
    present, number = np.unique(rows.key, return_inverse=True)
    if len(present):
        searches = model.searches(rows._replace(key=number), unit)
        some = np.asarray(theta, float)[:, present]
        none = np.zeros(some.shape, bool)
        nis[present], p_value[present], _ = searches.checked(some, none, 0)  # theta is not fitted to one key
    return nis, p_value
