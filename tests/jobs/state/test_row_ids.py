"""Duplicates by row id: the stream finds those of a batch pass, however it is cut into micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.state.encoding.packets import NEVER, OutputPacket, Records
from jobs.state.encoding.row_order import Marks, find_resent
from jobs.state.encoding.rows import RowFormat, RowId, remove_duplicates, sort_by_key
from jobs.state.reorder_buffer import Clock, LastSeenIndex
from jobs.state.row_ids import build_ids_layout
from tests.jobs.state.test_replay import latest
from tests.jobs.state.test_strict import by_hand
from tests.jobs.support.event_time import (
    INTEGER,
    SECOND,
    TEXT,
    EventTimeStream,
    Row,
    assert_same,
    filtered,
    keys_of,
    packet,
    plan_of,
    records_of,
)

IDS = st.integers(-1, 4)
VALUES = st.sampled_from([-1.5, 0.0, 0.25, 3.0])
BATCHES = st.lists(
    st.lists(st.builds(Row, st.integers(0, 2), st.integers(-40, 60), VALUES, IDS), max_size=12), max_size=8
)


def with_ids(fmt: RowFormat, within: int, integer: bool = True) -> RowFormat:
    return fmt._replace(row_id=RowId("message", integer, within * SECOND))


FORMATS = st.builds(with_ids, st.sampled_from([INTEGER, TEXT]), st.integers(0, 50), st.booleans())


def once(rows: list[Row], within: int) -> tuple[list[Row], list[Row]]:
    """Return the rows that count and the duplicates, found row by row in the order of their times."""
    seen: dict[tuple[int, int], int] = {}
    count: list[Row] = []
    repeat: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.time, row.y)):
        again = row.id >= 0 and row.time - seen.get((row.key, row.id), -(10**9)) <= within
        (repeat if again else count).append(row)
        if row.id >= 0:
            seen[row.key, row.id] = row.time
    return count, repeat


def in_words(rows: list[Row]) -> list[str]:
    return sorted(map(str, rows))


def seconds(fmt: RowFormat) -> int:
    assert fmt.row_id is not None
    return fmt.row_id.within // SECOND


@settings(max_examples=75, deadline=None)
@given(BATCHES, st.integers(0, 30), FORMATS)
def test_strict_a_row_counts_once_wherever_micro_batches_are_cut(
    batches: list[list[Row]], delay: int, fmt: RowFormat
) -> None:
    stream, within = EventTimeStream(plan_of(fmt, delay=delay * SECOND)), seconds(fmt)
    for batch in batches:
        stream.take(batch)
    applied, refused, _ = by_hand(batches, delay)
    count, repeat = once(applied, within)
    assert_same(stream.estimates(), filtered(count))
    # Of the rows behind the watermark, those are duplicates whose first row is still remembered.
    behind, repeats = (
        stream.rows_of(OutputPacket.LATE_BY_WATERMARK),
        stream.rows_of(OutputPacket.DUPLICATE_ID),
    )
    for _, row in repeats:
        if row in repeat:
            repeat.remove(row)
        else:
            far = [abs(row.time - at) for at in times_of(row, applied)]
            assert min(far, default=within + 1) <= within
    assert repeat == []
    assert len(behind) + len(repeats) + len(count) == len(applied) + len(refused)
    for number, row in behind:
        mark = max(row.time for batch in batches[:number] for row in batch) - delay
        done, _, _ = by_hand(batches[:number], delay)
        assert not any(abs(row.time - at) <= within and at >= mark - within for at in times_of(row, done))


def times_of(row: Row, rows: list[Row]) -> list[int]:
    """Return the times of the rows with the key and id of a row that has an id."""
    return [one.time for one in rows if row.id >= 0 and (one.key, one.id) == (row.key, row.id)]


@settings(max_examples=75, deadline=None)
@given(
    BATCHES.map(lambda some: [row for batch in some for row in batch]), FORMATS, st.sets(st.integers(-40, 60))
)
def test_as_arrived_rows_that_come_in_order_count_as_in_batch(
    rows: list[Row], fmt: RowFormat, cuts: set[int]
) -> None:
    """Each key has times of its own, days apart from the others', so that no watermark decides what is forgotten."""
    stream, within = EventTimeStream(plan_of(fmt, waits=False)), seconds(fmt)
    edges = [-41, *sorted(cuts), 61]
    rows = [row._replace(time=row.time + 100_000 * row.key) for row in rows]
    for first, last in zip(edges, edges[1:], strict=False):
        stream.take([row for row in rows if first < row.time - 100_000 * row.key <= last])
        assert_bounded(stream, within)
    count, repeat = once(rows, within)
    assert_same(stream.estimates(), filtered(count))
    assert in_words([row for _, row in stream.rows_of(OutputPacket.DUPLICATE_ID)]) == in_words(repeat)
    assert stream.rows_of(OutputPacket.LATE) == []
    # The batch pass is another piece of code.
    keyed = remove_duplicates(sort_by_key(records_of(fmt, rows), fmt), fmt)
    keys = np.array(keys_of(keyed.keys), np.int64)[keyed.rows.key]
    found = zip(keys.tolist(), (keyed.rows.time // SECOND).tolist(), keyed.rows.y[0].tolist(), strict=True)
    assert sorted(found) == sorted(tuple(row[:3]) for row in count)


def assert_bounded(stream: EventTimeStream, within: int) -> None:
    """Check that no id is held of a row which is older than its key's newest by more than `within`."""
    held = entries(stream)
    newest = {key: max(time for one, time, _ in held if one == key) for key, _, _ in held}
    assert all(time >= newest[key] - within for key, time, _ in held)


def entries(stream: EventTimeStream) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the ids that a stream holds: key, time, id."""
    policy, found = stream.plan.event_time, []
    assert policy is not None and policy.id_format is not None
    for value in stream.values("row_ids"):
        arrays = policy.id_format.decode(value).arrays
        keys = (
            keys_of(Records({"route": arrays["route"]}, None))
            if "check" not in arrays
            else arrays["check"] // 7
        )
        ids = [tuple(one) for one in arrays["id"].T.tolist()]
        found += zip([int(key) for key in keys], (arrays["time"] // SECOND).tolist(), ids, strict=True)
    return found


@settings(max_examples=100, deadline=None)
@given(BATCHES, FORMATS)
def test_replay_the_first_to_come_counts(batches: list[list[Row]], fmt: RowFormat) -> None:
    stream, within = EventTimeStream(plan_of(fmt, waits=False, replay_length=200)), seconds(fmt)
    came: list[Row] = []
    count: list[Row] = []
    repeat: list[tuple[int, Row]] = []
    for number, batch in enumerate(batches):
        stream.take(batch)
        before = list(came)
        for row in sorted(batch, key=lambda row: (row.time, row.y)):
            same = [one for one in came if row.id >= 0 and (one.key, one.id) == (row.key, row.id)]
            far = [abs(row.time - one.time) for one in same if one in before or one.time <= row.time]
            if min(far, default=within + 1) <= within:
                repeat.append((number, row))
            else:
                count.append(row)
            came.append(row)
    assert_same(latest(stream.estimates()), filtered(count))
    assert in_words([row for _, row in stream.rows_of(OutputPacket.DUPLICATE_ID)]) == in_words(
        [row for _, row in repeat]
    )
    assert stream.rows_of(OutputPacket.BEYOND_REPLAY_WINDOW) == []


def brute_force(
    rows: list[tuple[int, int, int]], known: list[tuple[int, int, int]], late: list[bool], within: int
) -> list[bool]:
    """Return which rows (key, id, time) repeat another, each compared with every other one."""
    repeats = []
    for i, (key, ident, time) in enumerate(rows):
        same = [(at, True) for k, n, at in known if (k, n) == (key, ident)]
        for j, (k, n, at) in enumerate(rows):
            # A new row counts if it is before this one, or if this one is refused in any case.
            if (k, n) == (key, ident) and not late[j] and (late[i] or (at, j) < (time, i)) and i != j:
                same.append((at, late[i]))
        repeats.append(any(abs(time - at) <= within for at, _ in same))
    return repeats


TRIPLES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 40)), max_size=25)


@settings(max_examples=300, deadline=None)
@given(
    TRIPLES, TRIPLES, st.lists(st.booleans(), min_size=25, max_size=25), st.integers(0, 20), st.integers(1, 2)
)
def test_each_pair_of_rows_is_compared(
    rows: list[tuple[int, int, int]],
    known: list[tuple[int, int, int]],
    late: list[bool],
    within: int,
    width: int,
) -> None:
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    late = late[: len(rows)]

    def marks(some: list[tuple[int, int, int]]) -> Marks:
        table = np.array(some, np.int64).reshape(-1, 3).T
        # Of two numbers of an id only the second one may differ.
        ids = table[1:2] if width == 1 else np.stack([table[1] * 0, table[1]])
        return Marks(table[0], ids, table[2])

    found = find_resent(marks(rows), within, marks(known), np.array(late, bool))
    assert found.tolist() == brute_force(rows, known, late, within)


def test_a_late_row_makes_no_duplicate_of_one_that_comes_in_time() -> None:
    fmt = with_ids(INTEGER, 100)
    stream = EventTimeStream(plan_of(fmt, waits=False))
    stream.take([Row(1, 50, 0.0, 7)])
    stream.take([Row(1, 40, 1.0, 8), Row(1, 60, 2.0, 8)])
    assert stream.estimates()["time"].tolist() == [50, 60]
    assert stream.rows_of(OutputPacket.DUPLICATE_ID) == [(1, Row(1, 40, 1.0, 8))]
    stream.take([Row(1, 45, 1.0, 9)])
    stream.take([Row(1, 70, 2.0, 9), Row(1, 30, 2.0, 7)])
    assert stream.estimates()["time"].tolist() == [50, 60, 70]
    assert stream.rows_of(OutputPacket.LATE) == [(2, Row(1, 45, 1.0, 9))]
    assert stream.rows_of(OutputPacket.DUPLICATE_ID)[1:] == [(3, Row(1, 30, 2.0, 7))]


def test_two_ids_of_one_time_both_count_and_dropped_ones_are_counted() -> None:
    stream = EventTimeStream(plan_of(with_ids(TEXT, 10, integer=False), drop_duplicates=True))
    stream.take([Row(1, 5, 0.0, 1), Row(1, 5, 0.0, 2), Row(1, 9, 3.0, 1), Row(1, 5, 0.0), Row(1, 5, 0.0)])
    stream.take([Row(2, 30, 0.0, 1)])
    assert stream.estimates()["time"].tolist() == [5, 5, 5, 5]
    dropped = [(rows, payload) for _, kind, rows, payload in stream.put_out if kind == OutputPacket.DROPPED]
    assert dropped == [(1, b"")]


def test_ids_of_silent_keys_are_removed_once_the_watermark_is_far_ahead() -> None:
    fmt = with_ids(INTEGER, 10)
    stream = EventTimeStream(plan_of(fmt, delay=5 * SECOND))
    stream.take([Row(key, 0, 0.0, key) for key in range(40)])
    stream.take([Row(100, 12, 0.0, 1)])
    assert len(entries(stream)) == 40
    stream.take([Row(100, 27, 0.0, 2)])
    stream.take([Row(100, 40, 0.0, 3)])
    assert sorted(time for _, time, _ in entries(stream)) == [27]
    # The indexes of a bucket come back with its clock.
    clock = Clock.decode(next(one for one in stream.clocks if one is not None))
    assert Clock.decode(clock._replace(row_ids=LastSeenIndex()).encode()).row_ids.blocks.size == 0
    index = LastSeenIndex(Records({"block": np.array([1, 2]), "oldest": np.array([5, 6])}, None))
    again = Clock.decode(Clock(NEVER, last_seen=index, row_ids=index).encode())
    assert again.row_ids.blocks.arrays["oldest"].tolist() == [5, 6]
    assert again.last_seen.blocks.arrays["oldest"].tolist() == [5, 6]


@pytest.mark.parametrize(("integer", "size"), [(True, 24), (False, 32)])
def test_the_bytes_of_an_id_in_the_state(integer: bool, size: int) -> None:
    fmt = with_ids(INTEGER, 10, integer)
    assert fmt.row_id is not None
    rows = [Row(key, 0, 0.0, key) for key in range(1000)]
    held = Records({**records_of(fmt, rows).arrays}, None)
    packed = build_ids_layout(fmt.kind, fmt.row_id).encode(held)
    assert len(packed) == 16 + size * 1000


@settings(max_examples=40, deadline=None)
@given(BATCHES.map(lambda some: [row for batch in some for row in batch]), FORMATS)
def test_packed_rows_keep_their_ids(rows: list[Row], fmt: RowFormat) -> None:
    read: Any = fmt.layout.decode(packet(fmt, rows))
    expected = records_of(fmt, rows)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(read.arrays[name], array)
    assert (read.text, read.label) == (expected.text, expected.label)
