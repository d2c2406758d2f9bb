"""Kinds of mixture components: the density of a row, and the expectation of missing measurements.

A component has a mean (m entries) and, if Gaussian, a packed covariance; entries are numbers or arrays (K,).
References: Bishop (2006), sections 9.2 and 9.3; Ghahramani and Jordan (1994) for missing components.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from kalman.filters.update import LOG_2PI, Present
from kalman.linalg import ldl
from kalman.linalg.entries import Entry, Vector, dot, minus, over, plus, times
from kalman.linalg.packing import find_order, packed_index, packed_size
from kalman.linalg.program import call_recorded
from kalman.types import Array

Presents = Sequence[Present]


class Seen(NamedTuple):
    """A row under one component.

    log_density  log-density of the present measurements, without the part that all components share (`Family.base`)
    value        m entries: each measurement; a missing measurement is replaced by its expectation given the others
    spread       covariance of the replaced measurements, packed, or no entries
    """

    log_density: Entry
    value: list[Entry]
    spread: list[Entry]


class Family(Protocol):
    """A kind of component; mean, spread: names of its parameters, '' for a kind without a spread."""

    @property
    def mean(self) -> str: ...
    @property
    def spread(self) -> str: ...

    def entries(self, m: int) -> int:
        """Return the size of a component's mean: a number for each of m measurements, or each of their categories."""
        return m

    def spreads(self, m: int) -> int:
        """Return how many numbers a component has in addition to its mean."""
        ...

    def seen(self, mean: Vector, spread: Vector, y: Vector, presents: Presents) -> Seen:
        """Return the row y under one component."""
        ...

    def base(self, y: Vector, presents: Presents) -> Entry:
        """Return the part of a row's log-density that all components share."""
        ...

    def covariance(self, mean: Vector, spread: Vector) -> list[Entry]:
        """Return a component's packed covariance."""
        ...

    def bounded(self, mean: Vector, spread: Vector, least: Vector) -> tuple[list[Entry], list[Entry]]:
        """Return mean and spread within lower bounds; least: the bounds that the method `least` returns."""
        ...

    def least(self, floor: float, variances: Sequence[float]) -> tuple[float, ...]:
        """Return a bound for each entry of the mean; variances: those of the whole mixture."""
        ...

    def outside(self, y: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of rows (K,) with measurements y (m, K) that are impossible under this kind of component."""
        ...

    def encode_measurements(self, y: Array) -> Array:
        """Return measurements (m, K) in the encoding in which a component's mean is their mean."""
        return y

    def compute_distance(self, mean: Vector, y: Vector, presents: Presents) -> Entry | None:
        """Return a distance of a row from the mixture's mean that averages 1 for each measurement.

        None means the squared distance in the mixture's covariance.
        """
        return None

    def measured(self, mean: Vector, covariance: Vector) -> tuple[list[Entry], list[Entry]]:
        """Return mean (m) and packed covariance of the measurements from mean and covariance of a mixture's states."""
        return list(mean), list(covariance)


@dataclass(frozen=True)
class Gaussian(Family):
    """N(mean, covariance) with a full covariance."""

    mean: str = "means"
    spread: str = "covariances"

    def spreads(self, m: int) -> int:
        """Return the size of a packed covariance."""
        return packed_size(m)

    def seen(self, mean: Vector, spread: Vector, y: Vector, presents: Presents) -> Seen:
        """Return the row; missing measurements are replaced by their regression on the present measurements."""
        has = [a for a in presents if a is not None]
        L, d, inverse = factors = ldl.factor(spread, has or None)
        away = [minus(a, b) for a, b in zip(y, mean, strict=True)]
        logs: list[Entry] = [plus(np.log(a), LOG_2PI) for a in d]
        if has:
            away = [np.where(there, a, 0.0) for there, a in zip(has, away, strict=True)]
            logs = [np.where(there, a, 0.0) for there, a in zip(has, logs, strict=True)]
        total: Entry = 0.0
        for z, scale, log in zip(ldl.whiten(L, away), inverse, logs, strict=True):
            total = plus(total, plus(log, times(times(z, z), scale)))
        density = times(-0.5, total)
        if not has:
            return Seen(density, list(y), [0.0] * len(spread))
        m, weighed = len(y), ldl.solve(factors, away)
        rows = [[spread[packed_index(i, j)] for j in range(m)] for i in range(m)]
        value: list[Entry] = [
            np.where(there, a, plus(b, dot(row, weighed)))
            for there, a, b, row in zip(has, y, mean, rows, strict=True)
        ]
        left: list[Entry] = []
        for i in range(m):
            regression = ldl.solve(
                factors, [np.where(there, a, 0.0) for there, a in zip(has, rows[i], strict=True)]
            )
            for j in range(i + 1):
                left.append(np.where(has[i] | has[j], 0.0, minus(rows[i][j], dot(rows[j], regression))))
        return Seen(density, value, left)

    def base(self, y: Vector, presents: Presents) -> Entry:
        """Return 0, because no part of the log-density is common to all components."""
        return 0.0

    def covariance(self, mean: Vector, spread: Vector) -> list[Entry]:
        """Return `spread`, which is the covariance."""
        return list(spread)

    def bounded(self, mean: Vector, spread: Vector, least: Vector) -> tuple[list[Entry], list[Entry]]:
        """Return the covariance with a lower bound on each measurement's variance given the previous measurements."""
        n = find_order(len(spread))
        result = list(spread)
        L: list[list[Entry]] = []
        d: list[Entry] = []
        for i in range(n):
            own = spread[packed_index(i, i)]
            weighed: list[Entry] = []
            L.append([])
            for j in range(i):
                a = minus(spread[packed_index(i, j)], dot(weighed, L[j][:j]))
                weighed.append(a)
                L[i].append(over(a, d[j]))
                own = minus(own, times(a, L[i][j]))
            lifted = np.maximum(own, least[i])
            place = packed_index(i, i)
            result[place] = np.where(np.less(own, least[i]), plus(result[place], lifted - own), result[place])
            d.append(lifted)
        return list(mean), result

    def least(self, floor: float, variances: Sequence[float]) -> tuple[float, ...]:
        """Return the fraction `floor` of each measurement's variance."""
        return tuple(floor * a for a in variances)

    def outside(self, y: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of no rows, because every number is possible."""
        return np.zeros(y.shape[1], bool)


class _Independent(Family):
    """Components with only a mean, whose measurements are independent given the component."""

    spread: str = ""

    def spreads(self, m: int) -> int:
        return 0

    def seen(self, mean: Vector, spread: Vector, y: Vector, presents: Presents) -> Seen:
        """Return the row; missing measurements are replaced by the mean."""
        total: Entry = 0.0
        value: list[Entry] = []
        for centre, a, has in zip(mean, y, presents, strict=True):
            term = self._term(centre, a if has is None else np.where(has, a, 0.0))
            total = plus(total, term if has is None else np.where(has, term, 0.0))
            value.append(a if has is None else np.where(has, a, centre))
        return Seen(total, value, [])

    def _term(self, centre: Entry, a: Entry) -> Entry:
        raise NotImplementedError

    def _variance(self, centre: Entry) -> Entry:
        raise NotImplementedError

    def covariance(self, mean: Vector, spread: Vector) -> list[Entry]:
        """Return a diagonal covariance."""
        return [self._variance(mean[i]) if i == j else 0.0 for i in range(len(mean)) for j in range(i + 1)]

    def least(self, floor: float, variances: Sequence[float]) -> tuple[float, ...]:
        """Return the same bound for every measurement."""
        return (floor,) * len(variances)


@dataclass(frozen=True)
class Poisson(_Independent):
    """Counts, each with a Poisson distribution; the mean holds the rates."""

    mean: str = "rates"

    def _term(self, centre: Entry, a: Entry) -> Entry:
        return minus(times(a, np.log(centre)), centre)

    def _variance(self, centre: Entry) -> Entry:
        return centre

    def base(self, y: Vector, presents: Presents) -> Entry:
        """Return the sum of -log y! over the present measurements."""
        total: Entry = 0.0
        for a, has in zip(y, presents, strict=True):
            (log,) = call_recorded(_compute_log_factorial, 1, [a if has is None else np.where(has, a, 0.0)])
            total = minus(total, log)
        return total

    def bounded(self, mean: Vector, spread: Vector, least: Vector) -> tuple[list[Entry], list[Entry]]:
        """Return rates of at least `least`."""
        return [np.maximum(a, b) for a, b in zip(mean, least, strict=True)], []

    def outside(self, y: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of rows with a value that is negative or fractional, and so not a count."""
        return np.any((y < 0.0) | (np.floor(y) < y), axis=0)


@dataclass(frozen=True)
class Bernoulli(_Independent):
    """Zeros and ones; the mean holds the probability of a one for each measurement."""

    mean: str = "probabilities"

    def _term(self, centre: Entry, a: Entry) -> Entry:
        return np.where(np.greater(a, 0.5), np.log(centre), np.log1p(np.negative(centre)))

    def _variance(self, centre: Entry) -> Entry:
        return times(centre, minus(1.0, centre))

    def base(self, y: Vector, presents: Presents) -> Entry:
        """Return 0, because no part of the log-density is common to all components."""
        return 0.0

    def bounded(self, mean: Vector, spread: Vector, least: Vector) -> tuple[list[Entry], list[Entry]]:
        """Return probabilities that are `least` away from 0 and 1."""
        pairs = zip(mean, least, strict=True)
        return [np.minimum(np.maximum(a, b), minus(1.0, b)) for a, b in pairs], []

    def outside(self, y: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of rows with a value that is neither 0 nor 1."""
        return np.any((y != 0.0) & (y != 1.0) & ~np.isnan(y), axis=0)


def _compute_log_factorial(a: Array) -> Array:
    return gammaln(np.asarray(a) + 1.0)[None]
