"""Rows that wait for the watermark: full event-time order, in whatever order and micro-batches they come."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.state.block_format import StateFormat
from jobs.state.encoding.packets import NEVER, OutputPacket, Records, RowPacket, join_records
from jobs.state.encoding.routing import make_routing
from jobs.state.encoding.rows import RowFormat, build_event_time_packer, find_max_event_time
from jobs.state.reorder_buffer import MANY, PARTS, Clock, ReorderBuffer
from tests.jobs.support.event_time import (
    INTEGER,
    SECOND,
    TEXT,
    DictStore,
    EventTimeStream,
    Row,
    assert_same,
    filtered,
    plan_of,
    records_of,
)

VALUES = st.sampled_from([-1.5, 0.0, 0.25, 3.0])
BATCHES = st.lists(
    st.lists(st.builds(Row, st.integers(0, 5), st.integers(-40, 60), VALUES, st.just(-1)), max_size=12),
    max_size=8,
)


def by_hand(batches: list[list[Row]], delay: int) -> tuple[list[Row], list[tuple[int, Row]], list[int]]:
    """Return the rows that are applied, those refused with their micro-batch, and the number that waits after each."""
    watermark: int | None = None
    waiting: list[Row] = []
    applied: list[Row] = []
    refused: list[tuple[int, Row]] = []
    waits = []
    for number, batch in enumerate(batches):
        before = watermark
        for row in batch:
            if before is not None and row.time < before:
                refused.append((number, row))
                continue
            waiting.append(row)
        newest = max((row.time for row in batch), default=None)
        if newest is not None:
            watermark = newest - delay if watermark is None else max(watermark, newest - delay)
        if watermark is not None:
            applied += [row for row in waiting if row.time < watermark]
            waiting = [row for row in waiting if row.time >= watermark]
        waits.append(len(waiting))
    return applied, sorted(refused), waits


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.integers(0, 30), st.sampled_from([INTEGER, TEXT]))
def test_what_is_due_is_filtered_in_event_time_order(
    batches: list[list[Row]], delay: int, fmt: RowFormat
) -> None:
    stream = EventTimeStream(plan_of(fmt, delay=delay * SECOND))
    for batch in batches:
        stream.take(batch)
    applied, refused, waits = by_hand(batches, delay)
    assert_same(stream.estimates(), filtered(applied))
    assert stream.rows_of(OutputPacket.LATE_BY_WATERMARK) == refused
    assert [stream.count_of(OutputPacket.WAITING, batch) for batch in range(len(batches))] == waits


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20), VALUES), min_size=1, max_size=60),
    st.integers(1, 25),
    st.integers(1, 9),
)
def test_no_row_is_refused_that_comes_within_the_delay(
    sent: list[tuple[int, int, float]], delay: int, size: int
) -> None:
    """Rows of a clock that runs, each up to `delay` late: all of them are applied, and only the newest wait."""
    rows = [Row(key, 3 * at, y) for at, (key, _, y) in enumerate(sent)]
    arrival = sorted(range(len(rows)), key=lambda at: (3 * at + min(sent[at][1], delay), at))
    stream = EventTimeStream(plan_of(delay=delay * SECOND))
    for start in range(0, len(rows), size):
        stream.take([rows[at] for at in arrival[start : start + size]])
    assert stream.rows_of(OutputPacket.LATE_BY_WATERMARK) == []
    watermark = max(row.time for row in rows) - delay
    assert_same(stream.estimates(), filtered([row for row in rows if row.time < watermark]))


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.lists(st.integers(1, 30), min_size=8, max_size=8), st.integers(0, 30), st.integers(0, 25))
def test_rows_are_released_when_no_row_has_come_for_the_patience(
    batches: list[list[Row]], pauses: list[int], delay: int, patience: int
) -> None:
    """Every bucket wakes once a second of a driven clock, and releases its rows when the patience is over."""
    stream = EventTimeStream(plan_of(TEXT, delay=delay * SECOND, patience=patience * SECOND))
    now, came = 100, None
    watermark, newest = -(10**6), -(10**6)
    taken: list[Row] = []
    for batch, pause in zip(batches, pauses, strict=False):
        stream.take(batch, now)
        taken += [row for row in batch if row.time >= watermark]
        if batch:
            came, newest = now, max(newest, *(row.time for row in batch), newest)
            watermark = max(watermark, newest - delay)
        for _ in range(pause):
            now += 1
            stream.wake(now)
            if came is not None and now - came > patience:
                watermark = newest + 1
        assert_same(stream.estimates(), filtered([row for row in taken if row.time < watermark]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(-50, 200), max_size=20), st.integers(-60, 220)), max_size=60),
    st.integers(0, 40),
)
def test_waiting_rows_are_a_set_ordered_by_time(steps: list[tuple[list[int], int]], delay: int) -> None:
    store = DictStore()
    waiting = ReorderBuffer(store, StateFormat(b"12345678", TEXT.layout), delay * SECOND, PARTS.empty())
    kept: list[Row] = []
    for number, (times, before) in enumerate(steps):
        new = [Row(number, time, float(i)) for i, time in enumerate(times)]
        waiting.add(records_of(TEXT, new))
        ready = waiting.release(before * SECOND)
        kept += new
        assert as_rows(ready) == sorted(row for row in kept if row.time < before)
        kept = [row for row in kept if row.time >= before]
        assert waiting.count == len(kept)
        again = Clock.decode(Clock(before, waiting.parts).encode())
        waiting = ReorderBuffer(store, waiting.fmt, delay * SECOND, again.parts)
    assert as_rows(waiting.release(10**9 * SECOND)) == sorted(kept)
    assert not store.held


def test_a_row_that_waits_is_written_a_few_times_however_many_micro_batches_it_waits() -> None:
    """A second a micro-batch, an hour of delay: the bytes written stay near the bytes that come."""
    store = DictStore()
    waiting = ReorderBuffer(store, StateFormat(b"12345678", INTEGER.layout), 3600 * SECOND, PARTS.empty())
    size, sent = 20, 0
    for second in range(1000):
        rows = [Row(key, second, 0.0) for key in range(size)]
        sent += len(INTEGER.layout.encode(records_of(INTEGER, rows)))
        waiting.add(records_of(INTEGER, rows))
    assert waiting.parts.size <= 3 * MANY
    assert store.written < 20 * sent


def as_rows(records: Records) -> list[Row]:
    times, y = records.arrays["time"] // SECOND, records.arrays["y"][0]
    return sorted(
        Row(*one)
        for one in zip((records.arrays["check"] // 7).tolist(), times.tolist(), y.tolist(), strict=True)
    )


def test_a_stored_clock_of_something_else_is_refused() -> None:
    value = Clock(NEVER, PARTS.empty()).encode()
    with pytest.raises(ValueError, match="clock begins with"):
        Clock.decode(b"XXXX" + value[4:])
    assert Clock.decode(value).watermark == np.iinfo(np.int64).min


def test_every_bucket_gets_the_maximum_event_time() -> None:
    fmt, routing = TEXT, make_routing(3, 1)
    keys = pa.array([f"key {n}" for n in range(5)])
    columns = {
        "identity": pa.array(range(5), pa.int64()),
        "check": pa.array(range(5), pa.int64()),
        "text": keys,
        "time": pa.array([3, 9, 1, 4, 5], pa.int64()),
        "n0": pa.array([1.0, None, 2.0, 3.0, 4.0]),
        "_reason": pa.nulls(5, pa.string()),  # of a topic's messages there are more columns
    }
    batch = pa.RecordBatch.from_pydict(columns)
    out = list(build_event_time_packer(fmt, routing)(iter([batch.slice(0, 0), batch, batch.slice(2)])))
    packets = [
        (bucket, kind, payload)
        for part in out
        for bucket, kind, payload in zip(*(part.column(i).to_pylist() for i in range(3)), strict=True)
    ]
    for label in routing.labels:
        ticks = [
            payload
            for bucket, kind, payload in packets
            if (bucket, kind) == (label, RowPacket.MAX_EVENT_TIME)
        ]
        assert (
            find_max_event_time(ticks[:1]) == find_max_event_time(ticks) == 9
            and find_max_event_time(ticks[1:]) == 5
        )
    rows = join_records(
        [fmt.layout.decode(payload) for _, kind, payload in packets if kind == RowPacket.ROWS]
    )
    assert rows.text is not None
    assert sorted(zip(rows.text.to_pylist(), rows.arrays["time"].tolist(), strict=True)) == sorted(
        [
            (key, at)
            for start in (0, 2)
            for key, at in zip(keys[start:].to_pylist(), [3, 9, 1, 4, 5][start:], strict=True)
        ]
    )
    assert find_max_event_time([]) == NEVER
