"""The order of rows: by key, time and values, however they came."""

from __future__ import annotations

import numpy as np
import pytest

from jobs.state.encoding.row_order import order_rows

DAY_US = 86_400_000_000


@pytest.mark.parametrize("keys", [1, 3, 40])
@pytest.mark.parametrize(
    "step", [1, DAY_US, 2**60]
)  # the last: key and time do not fit into 64 bits together
def test_rows_are_ordered_as_by_one_sort_of_all_columns(keys: int, step: int) -> None:
    rng = np.random.default_rng(keys)
    for size in (0, 1, 2, 500):
        key = rng.integers(0, keys, size) << 57
        time = rng.integers(-3, 4, size) * step
        y = rng.integers(0, 3, (2, size)).astype(float)
        y[rng.random(y.shape) < 0.2] = np.nan
        u = rng.integers(0, 2, (1, size)).astype(float)
        wanted = np.lexsort((np.arange(size), u[0], y[1], y[0], time, key))
        np.testing.assert_array_equal(order_rows(key, time, y, u), wanted)


@pytest.mark.parametrize("last", [2**62 - 1, 2**62, 2**62 + 2**61, 2**63 - 2])
def test_times_that_almost_fill_64_bits_keep_their_order(last: int) -> None:
    # Two keys with times from 0 to `last`: from 2**62 on, the pairs of key and time have no room in 64 bits.
    key, time = np.array([1, 0, 1, 0, 1]), np.array([last, last, 0, 0, last // 2])
    y = np.zeros((1, 5))
    assert order_rows(key, time, y).tolist() == [3, 1, 2, 4, 0]
    assert order_rows(key[::-1], time[::-1], y).tolist() == [1, 3, 2, 0, 4]
