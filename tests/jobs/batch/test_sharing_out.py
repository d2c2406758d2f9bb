"""How the keys of a history are shared out: buckets, slices and commits; no Spark."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.batch.batch_filter import ROWS_A_BUCKET, Interval
from jobs.batch.bucket_estimates import SLICES
from jobs.batch.estimating import ROWS_A_COMMIT, choose_layout
from jobs.batch.history_table import ReplacedPart, Slices
from jobs.state.encoding.routing import compute_buckets, compute_partition, compute_routes
from jobs.storage.table_rows import UTC_MICROSECONDS, drop_rows


@pytest.mark.parametrize("rows", [0, 1, ROWS_A_COMMIT, ROWS_A_COMMIT + 1, 10 * ROWS_A_COMMIT])
def test_each_bucket_has_a_partition_of_its_own_and_each_commit_whole_slices(rows: int) -> None:
    layout = choose_layout(rows)
    labels = layout.routing().labels
    assert len(labels) == layout.buckets >= 4 and layout.buckets * ROWS_A_BUCKET >= rows
    assert layout.commits * ROWS_A_COMMIT >= rows
    assert [compute_partition(label, layout.buckets) for label in labels] == list(range(layout.buckets))
    parts = [layout.slices(commit) for commit in range(layout.commits)]
    assert [one.first for one in parts] == [0, *(one.stop for one in parts[:-1])] and parts[-1].stop == SLICES
    # A key's bucket is in the commit whose slices have the key's slice.
    route = compute_routes(np.arange(1000))
    bucket, slice_ = compute_buckets(route, layout.buckets), compute_buckets(route, SLICES)
    for commit, part in enumerate(parts):
        inside = (slice_ >= part.first) & (slice_ < part.stop)
        assert (inside == (bucket // layout.a_commit == commit)).all()
    assert len({label >> 20 for label in labels}) == layout.commits


def test_a_great_history_has_as_many_buckets_as_slices_at_most() -> None:
    assert choose_layout(10**12).buckets == SLICES


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8))), st.integers(0, 8), st.integers(0, 8))
def test_slices_are_covered_if_each_one_is(others: list[tuple[int, int]], first: int, stop: int) -> None:
    covered = {number for one in others for number in range(*one)}
    expected = set(range(first, stop)) <= covered
    assert Slices(first, stop).within([Slices(*one) for one in others]) == expected


def test_what_is_replaced_is_exact_to_the_microsecond() -> None:
    times = [0, 1, 1_380_585_600_000_000, 1_380_585_600_000_001]
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([0, 3, 4, 4] * 4),
            pa.array([one for one in times for _ in range(4)]).cast(UTC_MICROSECONDS),
        ],
        ["batch_id", "event_time"],
    )
    left = drop_rows(rows, ReplacedPart(Slices(1, 4), Interval(1, times[3])).rows)
    kept = list(
        zip(left["batch_id"].to_pylist(), left["event_time"].cast(pa.int64()).to_pylist(), strict=True)
    )
    assert kept == [
        (slice_, at) for at in times for slice_ in (0, 3, 4, 4) if slice_ != 3 or at not in times[1:3]
    ]
