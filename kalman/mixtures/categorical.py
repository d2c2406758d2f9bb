"""Categorical components: each measurement is the code, 0 to C - 1, of one of its C categories.

Within a component the measurements are independent, and each category of a measurement has a probability (latent class
model). A row is encoded as indicators of the categories; the mean of the indicators is the component's probabilities.
The statistics are therefore the same as in all other families.
References: Bishop (2006), section 9.3.3, with more than two values; McLachlan and Peel (2000), section 5.11.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kalman.linalg.entries import Entry, Vector, minus, over, plus, times
from kalman.linalg.packing import packed_index
from kalman.mixtures.families import Family, Presents, Seen
from kalman.types import Array


@dataclass(frozen=True)
class Categorical(Family):
    """The family with a probability for each category; categories: number of categories of each measurement.

    A component's mean is the probabilities of all categories, one measurement after another.
    """

    categories: tuple[int, ...]
    mean: str = "probabilities"
    spread: str = ""

    def entries(self, m: int) -> int:
        """Return the total number of categories of all measurements."""
        return sum(self.categories)

    def spreads(self, m: int) -> int:
        """Return 0, because a component has no numbers besides its mean."""
        return 0

    def parts(self) -> list[range]:
        """Return the indices of each measurement's categories in a component's mean."""
        stops = np.cumsum(self.categories).tolist()
        return [range(stop - count, stop) for stop, count in zip(stops, self.categories, strict=True)]

    def seen(self, mean: Vector, spread: Vector, y: Vector, presents: Presents) -> Seen:
        """Return the row under one component; a missing measurement is replaced by the component's probabilities."""
        total: Entry = 0.0
        value: list[Entry] = []
        for part, code, has in zip(self.parts(), y, presents, strict=True):
            term = np.log(self._chosen([mean[i] for i in part], code))
            total = plus(total, term if has is None else np.where(has, term, 0.0))
            for number, place in enumerate(part):
                one = np.where(np.equal(code, float(number)), 1.0, 0.0)
                value.append(one if has is None else np.where(has, one, mean[place]))
        return Seen(total, value, [])

    def base(self, y: Vector, presents: Presents) -> Entry:
        """Return 0, because no part of the log-density is common to all components."""
        return 0.0

    def covariance(self, mean: Vector, spread: Vector) -> list[Entry]:
        """Return the packed covariance of the indicators: p (1 - p), and -p q between categories of one measurement."""
        result: list[Entry] = [0.0] * (len(mean) * (len(mean) + 1) // 2)
        for part in self.parts():
            for i in part:
                for j in range(part.start, i + 1):
                    other = minus(1.0, mean[i]) if i == j else np.negative(mean[i])
                    result[packed_index(i, j)] = times(mean[j], other)
        return result

    def bounded(self, mean: Vector, spread: Vector, least: Vector) -> tuple[list[Entry], list[Entry]]:
        """Return probabilities of at least about `least`, which sum to 1 for each measurement."""
        result: list[Entry] = []
        for part in self.parts():
            kept = [np.maximum(mean[i], least[i]) for i in part]
            total = kept[0]
            for a in kept[1:]:
                total = plus(total, a)
            result += [over(a, total) for a in kept]
        return result, []

    def least(self, floor: float, variances: Sequence[float]) -> tuple[float, ...]:
        """Return the same bound for every category."""
        return (floor,) * len(variances)

    def outside(self, y: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of rows with a value that is not the code of a category."""
        most = np.array(self.categories, float)[:, None]
        return np.any((y < 0.0) | (y >= most) | (np.floor(y) < y), axis=0)

    def encode_measurements(self, y: Array) -> Array:
        """Return the indicators of the categories, NaN for missing measurements."""
        rows = [
            np.where(np.isnan(code), np.nan, code == number)
            for code, count in zip(y, self.categories, strict=True)
            for number in range(count)
        ]
        return np.array(rows, float).reshape(len(rows), y.shape[1])

    def compute_distance(self, mean: Vector, y: Vector, presents: Presents) -> Entry:
        """Return the sum over measurements of Pearson's (1 / p - 1) / (C - 1), with p that of the observed category."""
        total: Entry = 0.0
        for part, code, has in zip(self.parts(), y, presents, strict=True):
            chosen = self._chosen([mean[i] for i in part], code)
            term = times(minus(over(1.0, chosen), 1.0), 1.0 / (len(part) - 1))
            total = plus(total, term if has is None else np.where(has, term, 0.0))
        return total

    def measured(self, mean: Vector, covariance: Vector) -> tuple[list[Entry], list[Entry]]:
        """Return mean (m) and packed covariance of the codes as numbers."""
        parts = self.parts()
        codes: list[Entry] = []
        packed: list[Entry] = []
        for a, rows in enumerate(parts):
            total: Entry = 0.0
            for code, i in enumerate(rows):
                total = plus(total, times(float(code), mean[i]))
            codes.append(total)
            for columns in parts[: a + 1]:
                total = 0.0
                for r, i in enumerate(rows):
                    for c, j in enumerate(columns):
                        place = packed_index(max(i, j), min(i, j))
                        total = plus(total, times(float(r * c), covariance[place]))
                packed.append(total)
        return codes, packed

    @staticmethod
    def _chosen(probabilities: Vector, code: Entry) -> Entry:
        """Return the probability of the observed category; an invalid code gives that of the first category."""
        result = probabilities[0]
        for number, probability in enumerate(probabilities[1:], start=1):
            result = np.where(np.equal(code, float(number)), probability, result)
        return result
