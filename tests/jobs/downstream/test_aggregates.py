"""Aggregates of windows: exact against rational arithmetic, whatever the portions."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.core.errors import UserError
from jobs.downstream.aggregates import WindowAggregate, accumulate, compute_aggregates, merge_accumulators
from kalman.models.named import Named

MOMENTS = [
    WindowAggregate(kind, kind) for kind in ("count", "min", "max", "sum", "mean", "variance", "stddev")
]
numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e150, max_value=1e150)


def middle(values: Any, start: Any) -> Any:
    return (values[start[:-1]] + values[start[1:] - 1]) / 2


def short(values: Any, start: Any) -> Any:
    return values[:1]


def of(
    values: list[float], cuts: list[int], keep: bool, aggregates: list[WindowAggregate]
) -> dict[str, float]:
    """Return the aggregates of readings that come in portions."""
    parts = [accumulate(np.array(some), np.array([0, len(some)]), keep)[0] for some in portions(values, cuts)]
    whole = parts[0]
    for part in parts[1:]:
        whole = merge_accumulators([whole, part], keep)
    return {name: float(found[0]) for name, found in compute_aggregates([whole], aggregates, keep).items()}


def portions(values: list[float], cuts: list[int]) -> list[list[float]]:
    places = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    return [values[a:b] for a, b in zip(places[:-1], places[1:], strict=True)]


@given(st.lists(numbers, min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_they_are_the_exact_ones_rounded_once(values: list[float], cuts: list[int], keep: bool) -> None:
    found = of(values, cuts, keep, MOMENTS)
    exact = [Fraction(one) for one in values]
    total, n = sum(exact), len(values)
    assert (found["count"], found["min"], found["max"]) == (n, min(values), max(values))
    assert found["sum"] == float(total) == math.fsum(values)
    assert found["mean"] == float(total / n)
    if n == 1:
        assert math.isnan(found["variance"]) and math.isnan(found["stddev"])
    else:
        variance = statistics.variance(exact)
        assert found["variance"] == float(variance)
        assert found["stddev"] == math.sqrt(float(variance))


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1.0, 1e300])
def test_numbers_of_any_size(scale: float) -> None:
    values = [scale * one for one in (1.0, -3.0, 7.0, 1e-9, 2.0**-60)]
    assert of(values, [2], False, MOMENTS)["sum"] == math.fsum(values)
    assert of([1e308, 1e308], [], False, MOMENTS)["sum"] == math.inf


def test_groups_at_once_quantiles_and_functions() -> None:
    rng = np.random.default_rng(0)
    values, start = rng.normal(size=500), np.array([0, 10, 10, 11, 400, 500])
    spread = WindowAggregate("middle", "function", function=Named(f"{__name__}:middle"))
    asked = [
        *MOMENTS,
        WindowAggregate("median", "quantile", 0.5),
        WindowAggregate("high", "quantile", 0.9),
        spread,
    ]
    some = np.array([0, 10, 11, 400, 500])
    kept = accumulate(values, some, True)
    found = compute_aggregates(kept, asked, True)
    for place, (a, b) in enumerate(zip(some[:-1], some[1:], strict=True)):
        mine = np.sort(values[a:b])
        assert found["median"][place] == np.quantile(mine, 0.5)
        assert found["high"][place] == np.quantile(mine, 0.9)
        assert found["middle"][place] == (mine[0] + mine[-1]) / 2
    sums = compute_aggregates(accumulate(values, start, False), MOMENTS, False)
    assert list(sums["count"]) == [10, 0, 1, 389, 100] and sums["sum"][1] == 0.0
    assert math.isnan(sums["mean"][1]) and math.isnan(sums["max"][1])
    for name, column in sums.items():
        np.testing.assert_array_equal(np.delete(column, 1), found[name])
    wrong = WindowAggregate("wrong", "function", function=Named(f"{__name__}:short"))
    with pytest.raises(UserError, match=r"aggregate wrong: .*:short returned an array of shape \(1,\)"):
        compute_aggregates(kept, [wrong], True)
