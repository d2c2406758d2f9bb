"""Silent keys expire and duplicates are found: against a simulation in plain Python, row by row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kalman
from jobs.state.encoding.packets import OutputPacket
from jobs.state.encoding.rows import unpack_rows
from jobs.state.expiry import split_lives
from jobs.state.filter_step import filter_step
from jobs.state.row_filter import RowFilter
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
    packet,
    plan_of,
)

VALUES = st.sampled_from([-1.5, 0.0, 0.25, 3.0, np.inf])
"""An infinite measurement is flagged and leaves its key as it was."""
BATCHES = st.lists(
    st.lists(st.builds(Row, st.integers(0, 4), st.integers(0, 120), VALUES, st.just(-1)), max_size=10),
    max_size=8,
)


class Life(NamedTuple):
    """One key's life: its filter state."""

    states: kalman.KeyStates

    @property
    def last(self) -> int:
        return int(self.states.event_time[0])

    @property
    def count(self) -> int:
        return int(self.states.count[0])


def step(life: Life, row: Row) -> tuple[Life, float, float]:
    """Filter one row: the life after it, its mean and its log-likelihood."""
    one = kalman.SortedRows(
        np.zeros(1, np.int64), np.array([row.time * SECOND]), np.array([[row.y]]), np.empty((0, 1))
    )
    states, out = kalman.run(KERNEL, life.states, one, float(SECOND))
    return Life(states), out.mean[0, 0], out.log_likelihood[0]


KERNEL = kalman.build(DEFINITION)


def born() -> Life:
    return Life(kalman.initial_states(KERNEL, 1))


class Simulation:
    """Every key's life in a dictionary; every row a step."""

    def __init__(self, delay: int, idle: int, waits: bool, archive: bool = False) -> None:
        self.delay, self.idle, self.waits, self.archive = delay * SECOND, idle * SECOND, waits, archive
        self.watermark: int | None = None
        self.lives: dict[int, Life] = {}
        self.archived: dict[int, Life] = {}
        self.waiting: list[Row] = []
        self.estimates: list[tuple[int, int, float, float]] = []
        self.ended: list[tuple[int, int, int, float]] = []
        self.refused: list[Row] = []

    def take(self, batch: list[Row]) -> None:
        before = self.watermark
        accepted = []
        for row in batch:
            reach = before if self.waits or before is None or self.archive else before - self.idle
            too_late = reach is not None and row.time * SECOND < reach and (self.waits or not self.archive)
            (self.refused if too_late else accepted).append(row)
        newest = max((row.time * SECOND for row in batch), default=None)
        if newest is not None:
            self.watermark = max(newest - self.delay, before if before is not None else newest - self.delay)
        rows = accepted
        if self.waits:
            rows = [row for row in self.waiting + accepted if row.time * SECOND < (self.watermark or 0)]
            self.waiting = [row for row in self.waiting + accepted if row not in rows]
        for row in sorted(rows, key=lambda row: (row.key, row.time, row.y)):
            self._apply(row)
        if self.watermark is not None:
            for key, life in list(self.lives.items()):
                if life.last < self.watermark - self.idle:
                    self._end(key)

    def _apply(self, row: Row) -> None:
        life = self.lives.get(row.key)
        if life is None and self.archive:
            life = self.archived.pop(row.key, None)
        if life is not None and row.time * SECOND < life.last:
            self.lives[row.key] = life
            self.refused.append(row)
            return
        if life is not None and not self.archive and row.time * SECOND - life.last > self.idle:
            self._end(row.key)
            life = None
        life, mean, log_likelihood = step(life or born(), row)
        self.estimates.append((row.key, row.time, mean, log_likelihood))
        if life.count:
            self.lives[row.key] = life

    def _end(self, key: int) -> None:
        life = self.lives.pop(key)
        self.ended.append((key, life.last // SECOND, life.count, float(life.states.values[0, 0])))
        if self.archive:
            self.archived[key] = life


class ByTheClock:
    """Keys that expire by a clock that the test drives: every key's life, and when its last row came."""

    def __init__(self, idle: int, archive: bool) -> None:
        self.idle, self.archive = idle, archive
        self.lives: dict[int, Life] = {}
        self.seen: dict[int, int] = {}
        self.archived: dict[int, Life] = {}
        self.estimates: list[tuple[int, int, float, float]] = []
        self.ended: list[tuple[int, int, int, float]] = []

    def end(self, now: int) -> None:
        for key, life in list(self.lives.items()):
            if self.seen[key] < now - self.idle:
                del self.lives[key]
                self.ended.append((key, life.last // SECOND, life.count, float(life.states.values[0, 0])))
                if self.archive:
                    self.archived[key] = life

    def take(self, batch: list[Row], now: int) -> None:
        self.end(now)
        for row in sorted(batch, key=lambda row: (row.key, row.time, row.y)):
            if row.key not in self.lives and row.key in self.archived:
                self.lives[row.key] = self.archived.pop(row.key)
            life = self.lives.get(row.key)
            if life is None or row.time * SECOND >= life.last:
                life, mean, log_likelihood = step(life or born(), row)
                self.estimates.append((row.key, row.time, mean, log_likelihood))
                if life.count:
                    self.lives[row.key] = life
            if row.key in self.lives:
                self.seen[row.key] = now


def ended_of(stream: EventTimeStream) -> list[tuple[int, int, int, float]]:
    found = []
    for _, kind, _, payload in stream.put_out:
        if kind == OutputPacket.EXPIRED:
            read = stream.plan.state.layout.decode(payload)
            arrays = read.arrays
            columns = (arrays["event_time"] // SECOND, arrays["count"], arrays["values"][0])
            found += list(zip(keys_of(read), *(column.tolist() for column in columns), strict=True))
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.integers(0, 30), st.integers(1, 40), st.booleans(), st.booleans())
@example([[Row(0, 0, 1.0)], [Row(0, 50, np.inf)], [Row(0, 55, 1.0)]], 0, 10, False, False)
@example([[Row(0, 0, 1.0), Row(0, 50, np.inf), Row(0, 55, 1.0), Row(1, 56, 1.0)]], 0, 10, False, False)
@example([[Row(0, 0, 1.0)], [Row(1, 90, 1.0)], [Row(0, 95, 1.0)]], 0, 10, False, True)
def test_keys_end_as_in_a_simulation(
    batches: list[list[Row]], delay: int, idle: int, waits: bool, archive: bool
) -> None:
    batches = [list(dict.fromkeys(batch)) for batch in batches]
    stream = EventTimeStream(
        plan_of(TEXT, delay=delay * SECOND, waits=waits, idle=idle * SECOND, archive=archive)
    )
    simulation = Simulation(delay, idle, waits, archive)
    for batch in batches:
        stream.take(batch)
        simulation.take(batch)
    found = stream.estimates()[["key", "time", "mean", "log_likelihood"]]
    assert sorted(map(str, found.itertuples(index=False, name=None))) == sorted(
        str((k, t, float(m), float(ll))) for k, t, m, ll in simulation.estimates
    )
    assert ended_of(stream) == sorted(simulation.ended)
    refused = [
        row for _, row in stream.rows_of(OutputPacket.LATE_BY_WATERMARK) + stream.rows_of(OutputPacket.LATE)
    ]
    assert sorted(refused) == sorted(simulation.refused)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans())), BATCHES, st.integers(1, 60), st.booleans())
def test_keys_end_by_a_clock_that_is_driven(
    steps: list[tuple[int, bool]], batches: list[list[Row]], idle: int, archive: bool
) -> None:
    """Micro-batches come and buckets wake as the clock goes on; event times do not count."""
    stream = EventTimeStream(
        plan_of(TEXT, waits=False, idle=idle * SECOND, archive=archive, processing_time=True)
    )
    simulation = ByTheClock(idle, archive)
    now = 1000
    coming = iter(batches)
    for seconds, wakes in steps:
        now += seconds
        if wakes:
            stream.wake(now)
            simulation.end(now)
        else:
            batch = next(coming, [])
            stream.take(batch, now)
            simulation.take(batch, now)
    found = stream.estimates()[["key", "time", "mean", "log_likelihood"]]
    assert sorted(map(str, found.itertuples(index=False, name=None))) == sorted(
        str((k, t, float(m), float(ll))) for k, t, m, ll in simulation.estimates
    )
    assert ended_of(stream) == sorted(simulation.ended)
    assert last_of(stream) == {key: life.last for key, life in simulation.lives.items()}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.builds(Row, st.integers(0, 4), st.integers(0, 200), VALUES, st.just(-1)), max_size=40),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_where_micro_batches_are_cut_does_not_change_when_keys_end(
    rows: list[Row], idle: int, size: int
) -> None:
    """In event-time order, any cut gives what one batch pass gives."""
    rows = sorted(set(rows), key=lambda row: (row.time, row.key, row.y))
    kernel, layout = KERNEL, plan_of().state.layout
    if not rows:
        return
    keyed = unpack_rows([packet(INTEGER, rows)], INTEGER)
    whole = filter_step(RowFilter(kernel, float(SECOND)), layout, layout.empty(), keyed, idle=idle * SECOND)
    times = sorted({row.time for row in rows})
    cuts = [set(times[start : start + size]) for start in range(0, len(times), size)]
    stream = EventTimeStream(plan_of(delay=0, waits=False, idle=idle * SECOND))
    for cut in cuts:
        stream.take([row for row in rows if row.time in cut])
    expected = pd.DataFrame(
        {
            "key": np.array(keys_of(keyed.keys), np.int64)[keyed.rows.key],
            "time": keyed.rows.time // SECOND,
            "mean": whole.outputs.mean[0],
            "variance": whole.outputs.covariance[0],
            "log_likelihood": whole.outputs.log_likelihood,
        }
    )
    assert_same(stream.estimates(), expected)


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.integers(0, 30), st.booleans())
def test_of_rows_of_one_key_and_time_the_first_counts(
    batches: list[list[Row]], delay: int, drop: bool
) -> None:
    """Strict: in whatever micro-batches they come, it is the row that a batch pass applies."""
    fmt = INTEGER._replace(distinct=True)
    stream = EventTimeStream(plan_of(fmt, delay=delay * SECOND, drop_duplicates=drop))
    plain = EventTimeStream(plan_of(delay=delay * SECOND))
    for batch in batches:
        stream.take(batch)
        plain.take(batch)
    due = [Row(*row) for row in plain.estimates()[["key", "time"]].assign(y=0.0).itertuples(index=False)]
    taken = {(row.key, row.time): min(r.y for r in accepted(plain, row)) for row in due}
    assert_same(stream.estimates(), filtered([Row(key, time, y) for (key, time), y in taken.items()]))
    assert stream.rows_of(OutputPacket.LATE_BY_WATERMARK) == plain.rows_of(OutputPacket.LATE_BY_WATERMARK)
    repeats = sum(
        rows
        for _, kind, rows, _ in stream.put_out
        if kind == (OutputPacket.DROPPED if drop else OutputPacket.DUPLICATE)
    )
    assert repeats == len(due) - len(taken)
    if drop:
        assert not any(payload for _, kind, _, payload in stream.put_out if kind == OutputPacket.DROPPED)
    else:
        assert len(stream.rows_of(OutputPacket.DUPLICATE)) == repeats


def accepted(stream: EventTimeStream, row: Row) -> list[Row]:
    """Return the rows of a row's key and time that were sent and not refused."""
    refused = [one for _, one in stream.rows_of(OutputPacket.LATE_BY_WATERMARK)]
    sent = [one for one in stream.sent if (one.key, one.time) == (row.key, row.time)]
    for one in refused:
        if one in sent:
            sent.remove(one)
    return sent


@settings(max_examples=40, deadline=None)
@given(BATCHES, st.booleans())
def test_rows_that_all_repeat_change_nothing(batches: list[list[Row]], archive: bool) -> None:
    stream = EventTimeStream(
        plan_of(INTEGER._replace(distinct=True), waits=False, idle=1000 * SECOND, archive=archive)
    )
    for batch in batches:
        stream.take(batch)
    states, estimated = sorted(stream.values("blocks")), len(stream.estimates())
    stream.take([Row(key, time // SECOND, 0.0) for key, time in last_of(stream).items()])
    assert len(stream.estimates()) == estimated
    assert sorted(stream.values("blocks")) == states


def last_of(stream: EventTimeStream) -> dict[int, int]:
    """Return the event time of each key's state."""
    found: dict[int, int] = {}
    for value in stream.values("blocks"):
        records = stream.plan.state.decode(value)
        found |= dict(zip(keys_of(records), records.arrays["event_time"].tolist(), strict=True))
    return found


@settings(max_examples=40, deadline=None)
@given(BATCHES)
def test_as_arrived_a_row_of_its_key_s_newest_time_repeats_it(batches: list[list[Row]]) -> None:
    stream = EventTimeStream(plan_of(INTEGER._replace(distinct=True), delay=0, waits=False))
    lives: dict[int, Life] = {}
    estimated, repeats = [], []
    for number, batch in enumerate(batches):
        stream.take(batch)
        before = dict(lives)
        seen = set()
        for row in sorted(batch, key=lambda row: (row.key, row.time, row.y)):
            held = before.get(row.key)
            if (row.key, row.time) in seen or (held is not None and held.last == row.time * SECOND):
                repeats.append((number, row))
                continue
            seen.add((row.key, row.time))
            if held is not None and row.time * SECOND < held.last:
                continue
            life, mean, _ = step(lives.get(row.key, born()), row)
            estimated.append((row.key, row.time, mean))
            if life.count:
                lives[row.key] = life
    found = stream.estimates()[["key", "time", "mean"]]
    assert sorted(map(str, found.itertuples(index=False, name=None))) == sorted(
        str((k, t, float(m))) for k, t, m in estimated
    )
    assert stream.rows_of(OutputPacket.DUPLICATE) == sorted(repeats)


@settings(max_examples=30, deadline=None)
@given(BATCHES, st.integers(1, 40))
def test_offline_every_life_is_a_key_of_its_own(batches: list[list[Row]], idle: int) -> None:
    rows = sorted({row for batch in batches for row in batch}, key=lambda row: (row.key, row.time, row.y))
    simulation = Simulation(0, idle, waits=False)
    for row in rows:
        simulation._apply(row)
    sent = kalman.SortedRows(
        np.array([row.key for row in rows], np.int64),
        np.array([row.time * SECOND for row in rows], np.int64),
        np.array([[row.y for row in rows]]),
        np.empty((0, len(rows))),
    )
    fresh = kalman.initial_states(KERNEL, 5)
    apart, key_of_life = split_lives(KERNEL, fresh, sent, float(SECOND), idle * SECOND)
    _, out = kalman.run(KERNEL, fresh.take(key_of_life), apart, float(SECOND))
    np.testing.assert_array_equal(out.mean[0], [mean for _, _, mean, _ in simulation.estimates])
