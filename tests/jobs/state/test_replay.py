"""Late rows replayed in their place: corrected estimates are those of the rows in order, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kalman
from jobs.state.encoding.packets import OutputPacket
from jobs.state.encoding.rows import RowFormat
from tests.jobs.support.event_time import (
    DEFINITION,
    INTEGER,
    SECOND,
    TEXT,
    EventTimeStream,
    Row,
    assert_same,
    filtered,
    keys_of,
    plan_of,
)

GATED: dict[str, Any] = {**DEFINITION, "robust": {"gate": {"probability": 0.9}}}
"""Outliers are flagged and leave the key as it was, so the rows before decide which row is one."""
VALUES = st.sampled_from([-1.5, 0.0, 0.25, 3.0, 40.0])
BATCHES = st.lists(
    st.lists(st.builds(Row, st.integers(0, 3), st.integers(0, 60), VALUES, st.just(-1)), max_size=10),
    max_size=8,
)


def latest(estimates: pd.DataFrame) -> pd.DataFrame:
    """Return, for each key and time, the estimates of the newest micro-batch that has one."""
    newest = estimates.groupby(["key", "time"])["batch"].transform("max")
    return estimates.loc[estimates["batch"] == newest]


def by_hand(batches: list[list[Row]], length: int) -> tuple[list[Row], list[tuple[int, Row]]]:
    """Return the rows that are taken, and those that more than the kept rows have overtaken, with their micro-batch.

    Only the last `length` rows of a key can be replayed. A row is refused if it is older than the
    newest of those that the filter did not flag.
    """
    taken: dict[int, list[Row]] = {}
    refused = []
    for number, batch in enumerate(batches):
        before = {key: list(rows) for key, rows in taken.items()}
        for row in batch:
            done = before.get(row.key, [])[:-length]
            reach = newest_good(done)
            if reach is not None and row.time < reach:
                refused.append((number, row))
            else:
                taken.setdefault(row.key, []).append(row)
        for key in taken:
            # Rows that have left the window stay as they were filtered; the others are in order.
            fixed = len(before.get(key, [])[:-length])
            taken[key] = taken[key][:fixed] + sorted(taken[key][fixed:], key=lambda row: (row.time, row.y))
    return [row for rows in taken.values() for row in rows], sorted(refused)


def newest_good(rows: list[Row]) -> int | None:
    """Return the time of the last row that the filter did not flag, of rows of one key in their order."""
    if not rows:
        return None
    kernel = kalman.build(DEFINITION)
    states = kalman.initial_states(kernel, 1)
    for row in rows:
        one = kalman.SortedRows(
            np.zeros(1, np.int64), np.array([row.time * SECOND]), np.array([[row.y]]), np.empty((0, 1))
        )
        states, _ = kalman.run(kernel, states, one, float(SECOND))
    return int(states.event_time[0]) // SECOND


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.sampled_from([INTEGER, TEXT]), st.sampled_from([DEFINITION, GATED]))
def test_rows_within_the_replay_window_are_as_if_they_had_come_in_order(
    batches: list[list[Row]], fmt: RowFormat, definition: dict[str, Any]
) -> None:
    stream = EventTimeStream(plan_of(fmt, definition, waits=False, replay_length=100))
    for batch in batches:
        stream.take(batch)
    rows = [row for batch in batches for row in batch]
    assert_same(latest(stream.estimates()), filtered(rows, definition))
    assert stream.rows_of(OutputPacket.BEYOND_REPLAY_WINDOW) == stream.rows_of(OutputPacket.LATE) == []
    firsts = stream.estimates().query("not correction")
    assert len(firsts) == len(rows)
    if definition is DEFINITION:
        assert counts(stream) == {row.key: sum(one.key == row.key for one in rows) for row in rows}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), VALUES), min_size=1, max_size=60),
    st.data(),
    st.integers(1, 6),
    st.integers(1, 7),
)
def test_a_row_that_so_many_rows_of_its_key_have_overtaken_finds_its_place(
    sent: list[tuple[int, float]], data: st.DataObject, length: int, size: int
) -> None:
    rows = [Row(key, at, y) for at, (key, y) in enumerate(sent)]
    arrival: list[Row] = []
    for key in sorted({row.key for row in rows}):
        mine = [row for row in rows if row.key == key]
        # Each row is overtaken by `length` rows of its key at most: it is moved so far back, one after another.
        place = [(i + data.draw(st.integers(0, length)) + 0.5, i) for i in range(len(mine))]
        arrival += [mine[i] for _, i in sorted(place)]
    shuffled = data.draw(st.permutations(sorted({row.key for row in rows})))
    arrival.sort(key=lambda row: shuffled.index(row.key))
    stream = EventTimeStream(plan_of(waits=False, replay_length=length))
    for start in range(0, len(arrival), size):
        stream.take(arrival[start : start + size])
    assert stream.rows_of(OutputPacket.BEYOND_REPLAY_WINDOW) == stream.rows_of(OutputPacket.LATE) == []
    assert_same(latest(stream.estimates()), filtered(rows))


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.integers(1, 4))
def test_a_row_older_than_the_kept_ones_is_refused(batches: list[list[Row]], length: int) -> None:
    stream = EventTimeStream(plan_of(waits=False, replay_length=length))
    for batch in batches:
        stream.take(batch)
    taken, refused = by_hand(batches, length)
    assert stream.rows_of(OutputPacket.BEYOND_REPLAY_WINDOW) == refused
    assert len(stream.estimates().query("not correction")) == len(taken)
    assert stream.plan.event_time is not None
    stored = stream.plan.event_time.row_format
    kept = [key for value in stream.values("replay_rows") for key in keys_of(stored.decode(value))]
    expected = pd.Series([row.key for row in taken], dtype=int).value_counts().clip(upper=length)
    assert pd.Series(kept, dtype=int).value_counts().to_dict() == expected.to_dict()


@settings(max_examples=30, deadline=None)
@given(BATCHES)
def test_distinct_the_first_to_come_counts(batches: list[list[Row]]) -> None:
    stream = EventTimeStream(plan_of(INTEGER._replace(distinct=True), waits=False, replay_length=100))
    taken: dict[tuple[int, int], Row] = {}
    repeats = []
    for number, batch in enumerate(batches):
        stream.take(batch)
        for row in sorted(batch, key=lambda row: row.y):
            if (row.key, row.time) in taken:
                repeats.append((number, row))
            else:
                taken[row.key, row.time] = row
    assert_same(latest(stream.estimates()), filtered(list(taken.values())))
    assert stream.rows_of(OutputPacket.DUPLICATE) == sorted(repeats)


@pytest.mark.parametrize("late", [3, 5])
def test_corrections_are_those_after_the_late_row(late: int) -> None:
    stream = EventTimeStream(plan_of(waits=False, replay_length=10))
    for at in range(0, 10, 2):
        stream.take([Row(1, at, 1.0), Row(2, at, 1.0)])
    stream.take([Row(1, late, 2.0)])
    last = stream.estimates().query("batch == 5")
    assert sorted(zip(last["key"], last["time"], last["correction"], strict=True)) == [
        (1, late, False),
        *((1, at, True) for at in range(late + 1, 10, 2)),
    ]


def counts(stream: EventTimeStream) -> dict[int, int]:
    """Return how many rows each key's newest state reflects."""
    found = {}
    for value in stream.values("blocks"):
        records = stream.plan.state.decode(value)
        found |= dict(zip(keys_of(records), records.arrays["count"].tolist(), strict=True))
    return found
