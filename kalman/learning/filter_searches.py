"""Searches by key with a differenced likelihood: non-linear and robust filters, and several models.

The searches are those of `kalman.learning.key_learning`, except for the parts that need a linear model. The starts are
the sizes of the noises with the greatest likelihood among many sizes. Standard errors come from the observed curvature
at the maximum.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from kalman.evaluation.row_figures import INNOVATION, RowFigures
from kalman.filters.robust.updates import temper_innovations
from kalman.learning.filter_pass import Differences
from kalman.learning.key_learning import KeySearches, Problems, compute_goodness_of_fit
from kalman.learning.key_search import KeyPoints
from kalman.learning.key_starts import Free, Starts
from kalman.models.structure import Parameter
from kalman.run import KeyStates, SortedRows, run
from kalman.types import Array

DECADES = (0.0, -8.0, -4.0, -2.0, 2.0, 4.0, 8.0)
"""Powers of ten by which a start multiplies all written noises."""
RATIOS = (0.0, -4.0, -2.0, 2.0, 4.0)
"""Powers of ten by which a start multiplies the ratio of process noise to measurement noise."""
SMALL = 1e-5
"""Step from a variance of zero, relative to the variance at the start."""
CURVED = 1e-3
"""Step of a free number for the differences of the gradient."""


class Differenced(Protocol):
    """A model whose likelihood is differenced, `kalman.learning.filter_learning.FilterLearning`."""

    @property
    def each(self) -> Any:
        """The filter with its learned parameters in the state."""
        ...

    def begun(self, theta: Array, keys: int, instead: Array | None = None) -> Array:
        """Return the states (size, keys) of keys without rows at theta (p, keys), or at `instead` if finite."""
        ...

    def sizes(self, theta: Array) -> Array:
        """Return the size of each free number (p, keys), by which steps are multiplied."""
        ...

    def values(self, thetas: list[Array], rows: SortedRows, keys: int, unit: float) -> Array:
        """Return the log-likelihoods (c, keys) at each of c theta (p, keys)."""
        ...

    def differences(
        self, theta: Array, rows: SortedRows, keys: int, unit: float, zero: np.ndarray, small: Array
    ) -> Differences:
        """Return value, gradient and information at theta (p, keys)."""
        ...


class FilterModel(NamedTuple):
    """The learned model, as `kalman.learning.key_learning.Model`."""

    of: Differenced
    parameters: tuple[Parameter, ...]
    written: Array
    free: list[Free]

    def usable(self, rows: SortedRows) -> SortedRows:
        """Return the rows that the filter does not flag whatever the parameters are."""
        good = np.asarray(~np.isinf(rows.y).any(axis=0) & np.isfinite(rows.u).all(axis=0))
        return rows if good.all() else rows.take(good)

    def searches(self, rows: SortedRows, unit: float) -> "FilterSearches":
        """Return the searches of keys 0 to J - 1, each with at least one row."""
        return FilterSearches(self, rows, unit)


class _DifferencePoints:
    """Evaluations of problems; each problem is the rows of one key."""

    def __init__(self, searches: "FilterSearches", keys: np.ndarray) -> None:
        self.searches, self.keys = searches, keys
        self._used = np.zeros(len(keys), np.int64)

    # A key whose rows say little may begin at a variance beyond all numbers: `used` does not count the rows that are
    # not usable there.
    @np.errstate(over="ignore", invalid="ignore")
    def point(self, theta: Array, zero: np.ndarray, which: np.ndarray) -> KeyPoints:
        """Return the points of the problems `which`; where a row is not usable, the value is minus infinity."""
        searches, keys = self.searches, self.keys[which]
        rows = searches.rows_of(keys)
        found = searches.model.of.differences(
            theta, rows, len(which), searches.unit, zero, searches.small[:, keys]
        )
        lost = found.used < self._used[which]
        self._used[which] = np.maximum(self._used[which], found.used)
        value = np.where(lost | (found.used == 0), -np.inf, found.log_likelihood)
        return KeyPoints(value, found.gradient, found.information)


class FilterSearches(KeySearches):
    """The searches of the keys that have rows, numbered 0 to J - 1."""

    def __init__(self, model: FilterModel, rows: SortedRows, unit: float) -> None:
        self.model, self.sorted, self.unit = model, rows, unit  # type: ignore[assignment]
        self.keys = int(rows.key[-1]) + 1
        self._first = np.flatnonzero(np.diff(rows.key, prepend=-1))
        self._count = np.diff(self._first, append=len(rows.key))

    def rows_of(self, keys: np.ndarray) -> SortedRows:
        """Return the rows of keys (J,), which may repeat, numbered 0 to J - 1."""
        if len(keys) == self.keys and (keys == np.arange(self.keys)).all():
            return self.sorted
        count = self._count[keys]
        ends = np.cumsum(count)
        within = np.arange(ends[-1]) - np.repeat(ends - count, count)
        some = self.sorted.take(np.repeat(self._first[keys], count) + within)
        return some._replace(key=np.repeat(np.arange(len(keys)), count))

    @cached_property
    def measured(self) -> Array:
        """Number of measured values (J,)."""
        return np.asarray(np.bincount(self.sorted.key, (~np.isnan(self.sorted.y)).sum(axis=0)), float)

    @cached_property
    def small(self) -> Array:
        """Steps (p, J) from variances of zero."""
        return SMALL * np.exp(self.starts.spread)

    @cached_property
    def starts(self) -> Starts:
        """The candidates of each key, the best first: noises of many sizes, and the written values."""
        model = self.model
        power = np.array([one.power for one in model.free], float)
        sizes = list_starts(model.free, model.written, DECADES)
        theta = [np.repeat(one[:, None], self.keys, axis=1) for one, _ in sizes]
        kinds = [kind for _, kind in sizes]
        found = model.of.values(theta, self.sorted, self.keys, self.unit)
        value = np.where(np.isfinite(found), found, -np.inf)
        rank = np.argsort(-value, axis=0, kind="stable")
        ordered = np.take_along_axis(np.array(theta), rank[:, None, :], axis=0)
        low, high = (
            f.reduceat(np.where(np.isnan(self.sorted.y), fill, self.sorted.y), self._first, axis=1)
            for f, fill in ((np.minimum, np.inf), (np.maximum, -np.inf))
        )
        constant: np.ndarray = np.logical_and.reduce(high <= low, axis=0)
        spread = power[:, None] * ordered[0]
        with np.errstate(all="ignore"):
            range_of = np.log(np.maximum.reduce(high - low, axis=0) ** 2)
        widest = np.where((power[:, None] > 0) & np.isfinite(range_of), np.maximum(spread, range_of), spread)
        return Starts(ordered, np.array(kinds)[rank], spread, widest, constant)

    @property
    def several(self) -> bool:
        """Return True: every key needs several starts, since the likelihood of these filters has several maxima."""
        return True

    def points(self, which: np.ndarray | None = None) -> Problems:
        """Return the problems of these keys, in the given order; a key may occur twice. None means all keys."""
        return _DifferencePoints(self, np.arange(self.keys) if which is None else which)

    def compute_information(
        self, theta: Array, zero: np.ndarray, point: KeyPoints, which: np.ndarray | None = None
    ) -> Array:
        """Return the observed curvature (p, p, J) at the ends; off a maximum, the point's information."""
        points = self.points(which)
        every = np.arange(theta.shape[1])

        def gradient(moved: Array) -> Array:
            return points.point(moved, zero, every).gradient

        return compute_observed_curvature(
            gradient, theta, self.model.of.sizes(theta), zero, point.information
        )

    def checked(self, theta: Array, zero: np.ndarray, fitted: int) -> tuple[Array, Array, Array]:
        """Return `compute_goodness_of_fit` of the keys at theta (p, J); fitted: count of numbers fitted to each key."""
        model, keys = self.model.of.each, self.keys
        none = np.zeros(keys, np.int64)
        at_zero = np.where(zero, 0.0, np.nan)
        states = KeyStates(self.model.of.begun(theta, keys, at_zero), none, none.copy(), np.zeros(keys))
        figures = RowFigures(model, states, self.sorted, (INNOVATION,))
        run(model, states, self.sorted, self.unit, figures)
        white, noise = figures.found()[INNOVATION], getattr(getattr(model, "robust", None), "noise", None)
        return compute_goodness_of_fit(
            self.sorted.key, temper_innovations(noise, white) if noise else white, keys, fitted
        )


def list_starts(free: list[Free], written: Array, decades: tuple[float, ...]) -> list[tuple[Array, int]]:
    """Return thetas (p,) of many sizes of the noises, the written values first, each with its kind.

    decades: powers of ten of all noises. The kind compares the ratio of process noise to measurement noise with the
    written one: 0 less, 1 equal, 2 more.
    """
    power = np.array([one.power for one in free], float)
    measured = np.array([one.parameter.name.rpartition(".")[2] == "R" for one in free])
    both = (measured & (power > 0)).any() and (~measured & (power > 0)).any()
    found: list[tuple[Array, int]] = []
    for decade, ratio in product(decades if power.any() else (0.0,), RATIOS if both else (0.0,)):
        logs = np.log(10.0) * (decade + np.where(measured, -0.5, 0.5) * ratio)
        moved = np.where(power > 0, logs / np.maximum(power, 1.0), 0.0)
        found.append((written + moved, int(np.sign(ratio)) + 1))
    return found


def compute_observed_curvature(
    gradient: Callable[[Array], Array], theta: Array, sizes: Array, held: np.ndarray, otherwise: Array
) -> Array:
    """Return the negative second derivatives (p, p, J) at theta (p, J), by central differences of the gradient.

    held: (p, J) mask of fixed numbers. For a key whose other numbers are not at a maximum, the result is `otherwise`.
    """
    p, J = theta.shape
    H = np.zeros((p, p, J))
    for i in range(p):
        step = np.where(held[i], 0.0, CURVED * sizes[i])
        moved = np.zeros((p, J))
        moved[i] = step
        with np.errstate(all="ignore"):
            H[i] = -(gradient(theta + moved) - gradient(theta - moved)) / (2.0 * step)
    H = 0.5 * (H + np.swapaxes(H, 0, 1))
    gone = held[:, None] | held[None, :]
    eye = np.eye(p)[:, :, None]
    known = np.where(np.isfinite(H) & ~gone, H, np.where(gone, eye, np.nan))
    diagonal = np.array([known[i, i] for i in range(p)])
    with np.errstate(all="ignore"):
        unit = known / np.sqrt(diagonal[:, None] * diagonal[None, :])
    sound = np.isfinite(unit).all(axis=(0, 1))
    least = np.linalg.eigvalsh(np.moveaxis(np.where(sound, unit, eye), -1, 0))[:, 0]
    return np.where(sound & (least > 1e-8), np.where(gone, 0.0, known), otherwise)
