"""What a filter says of its prediction, for the smoothers."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from kalman.types import Array, Rows


class Prediction(NamedTuple):
    """The state just before a row's measurement, and how it goes together with the one after the row before.

    mean (n, K), covariance (n(n+1)/2, K) packed, cross (n, n, K): cov(x before, x now), P F' where linear
    """

    mean: Array
    covariance: Array
    cross: Array


@runtime_checkable
class Smoothable(Protocol):
    """What a filter offers to be smoothed, beside `Filter`."""

    def prediction(self, state: Array, rows: Rows) -> Prediction:
        """Return the prediction from the states (size, K) before the rows; what is said of a first row is not used."""
        ...

    def moments(self, state: Array) -> tuple[Array, Array]:
        """Return mean (n, K) and packed covariance."""
        ...
