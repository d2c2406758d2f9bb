"""The comparison finds what is planted, and nothing where both sides are the same in another order."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from demo.compare import (
    Differences,
    by_values,
    compare_rows,
    compare_states,
    key_names,
    largest_difference,
    rows_of,
    states_of,
)

N, ROWS = 2, 60


@pytest.fixture
def estimates() -> pa.Table:
    """Estimates of three keys, several rows of a key at one time, some of which observed nothing."""
    random = np.random.default_rng(7)
    nis = [None if i % 11 == 0 else float(v) for i, v in enumerate(random.chisquare(1, ROWS))]
    return pa.table(
        {
            "key": ["abc"[i % 3] for i in range(ROWS)],
            "event_time": pa.array([1_000_000 * (i // 12) for i in range(ROWS)]).cast(
                pa.timestamp("us", "UTC")
            ),
            "mean": random.normal(size=(ROWS, N)).tolist(),
            "covariance": random.normal(size=(ROWS, N * N)).tolist(),
            "log_likelihood": random.normal(size=ROWS),
            "nis": pa.array(nis, pa.float64()),
            "flags": pa.array([None if i else "not_psd" for i in range(ROWS)], pa.string()),
        }
    )


def compared(ours: pa.Table, wanted: pa.Table) -> Differences:
    names = key_names([ours, wanted])
    return compare_rows(rows_of(ours, names, ordered=False), by_values(rows_of(wanted, names, ordered=True)))


def changed(table: pa.Table, column: str, row: int, value: object) -> pa.Table:
    values = table.column(column).to_pylist()
    values[row] = value
    place = table.column_names.index(column)
    return table.set_column(place, column, pa.array(values, table.schema.field(column).type))


def test_the_same_rows_in_another_order_are_equal(estimates: pa.Table) -> None:
    shuffled = estimates.take(np.random.default_rng(1).permutation(ROWS))
    found = compared(shuffled, estimates)
    assert (found.compared, found.missing, found.surplus) == (ROWS, 0, 0)
    assert found.worst == 0.0


@pytest.mark.parametrize("column", ["mean", "covariance"])
def test_a_planted_difference_is_found(estimates: pa.Table, column: str) -> None:
    value = list(estimates.column(column)[30].as_py())
    value[-1] += 3e-7
    found = compared(changed(estimates, column, 30, value), estimates)
    assert found.worst == pytest.approx(3e-7, rel=1e-6)
    assert found.largest[column] == found.worst
    assert sum(size > 0 for size in found.largest.values()) == 1


def test_a_planted_difference_in_the_likelihood_is_found(estimates: pa.Table) -> None:
    value = estimates.column("log_likelihood")[59].as_py() - 2e-9
    found = compared(changed(estimates, "log_likelihood", 59, value), estimates)
    assert found.worst == pytest.approx(2e-9, rel=1e-4)


def test_a_missing_and_a_surplus_row_are_found(estimates: pa.Table) -> None:
    fewer = estimates.slice(1)
    assert compared(fewer, estimates).missing == 1
    assert compared(fewer, estimates).worst == math.inf
    assert compared(estimates, fewer).surplus == 1
    doubled = pa.concat_tables([estimates, estimates.slice(5, 1)])
    found = compared(doubled, estimates)
    assert (found.missing, found.surplus, found.compared) == (0, 1, ROWS)
    assert found.worst == math.inf


def test_a_key_that_is_only_on_one_side_is_found(estimates: pa.Table) -> None:
    found = compared(changed(estimates, "key", 3, "d"), estimates)
    assert (found.missing, found.surplus) == (1, 1)


def test_an_observation_that_became_missing_is_found(estimates: pa.Table) -> None:
    found = compared(changed(estimates, "nis", 5, None), estimates)
    assert found.largest["nis"] == math.inf


def test_a_flag_that_is_only_on_one_side_is_found(estimates: pa.Table) -> None:
    found = compared(changed(estimates, "flags", 0, None), estimates)
    assert found.unequal == {"flags": 1}
    assert found.worst == math.inf


def test_nothing_compared_is_not_parity(estimates: pa.Table) -> None:
    assert compared(estimates.slice(0, 0), estimates.slice(0, 0)).worst == math.inf


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([math.nan], [1.0], math.inf),
        ([2.0, 1.0], [1.0, 1.0], 1.0),
    ],
)
def test_largest_difference(a: list[float], b: list[float], difference: float) -> None:
    assert largest_difference(np.array(a), np.array(b)) == difference


def states(keys: str, mean: float = 0.0, count: int = 3) -> pa.Table:
    size = len(keys)
    return pa.table(
        {
            "key": list(keys),
            "mean": [[float(ord(key)) + mean, 1.0] for key in keys],
            "covariance": [[1.0, 0.0, 0.0, 1.0]] * size,
            "log_likelihood": [-5.0] * size,
            "event_time": pa.array([7] * size).cast(pa.timestamp("us", "UTC")),
            "state_index": [count] * size,
        }
    )


def test_states_are_compared_by_key() -> None:
    assert compare_states(states_of(states("cab")), states_of(states("abc"))).worst == 0.0
    assert compare_states(states_of(states("abc", 1e-6)), states_of(states("abc"))).worst == pytest.approx(
        1e-6
    )
    assert compare_states(states_of(states("abc", count=4)), states_of(states("abc"))).unequal["count"] == 3
    lost = compare_states(states_of(states("ab")), states_of(states("abc")))
    assert (lost.compared, lost.missing, lost.worst) == (2, 1, math.inf)
