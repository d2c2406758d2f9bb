"""The operator over an event-time bucket in Spark's tester: state, timers, and a clock that the test drives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql.streaming.tws_tester import TwsTester

from jobs.state.encoding.packets import OutputPacket, Records, RowPacket, join_records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.rows import RowId, encode_tick
from jobs.state.plan import Plan
from jobs.state.spark_values import decode_stored
from jobs.streaming.processors import EventTimeProcessor, FilterProcessor, KeyImporter
from tests.jobs.support.event_time import INTEGER, SECOND, Row, packet, plan_of

BUCKET = 7


def rows_and_tick(rows: list[Row], newest: int) -> pd.DataFrame:
    packets = [(RowPacket.ROWS, packet(INTEGER, rows))] if rows else []
    packets.append((RowPacket.MAX_EVENT_TIME, encode_tick(newest * SECOND)))
    return pd.DataFrame(
        {"kind": [kind for kind, _ in packets], "payload": [payload for _, payload in packets]}
    )


def counts(out: Any) -> dict[int, int]:
    """Return the number of rows of each kind that was put out, without kinds of no rows."""
    if len(out) == 0:
        return {}
    sums = out.groupby("kind")["rows"].sum()
    return {
        int(kind): int(sums[kind])
        for kind in (OutputPacket.ESTIMATES, OutputPacket.EXPIRED, OutputPacket.WAITING)
        if sums.get(kind, 0)
    }


def test_a_key_ends_when_its_timer_goes_off() -> None:
    plan = plan_of(waits=False, idle=10 * SECOND, processing_time=True)
    tester = TwsTester(EventTimeProcessor(plan), timeMode="ProcessingTime")
    tester.setProcessingTime(100_000)
    assert counts(tester.testInPandas(BUCKET, rows_and_tick([Row(1, 5, 0.0), Row(2, 5, 0.0)], 5))) == {
        OutputPacket.ESTIMATES: 2
    }
    assert counts(tester.setProcessingTime(106_000)) == {}
    assert counts(tester.testInPandas(BUCKET, rows_and_tick([Row(2, 6, 0.0)], 6))) == {
        OutputPacket.ESTIMATES: 1
    }
    assert counts(tester.setProcessingTime(110_000)) == {}  # ten seconds are not longer than ten seconds
    assert counts(tester.setProcessingTime(110_001)) == {OutputPacket.EXPIRED: 1}
    assert counts(tester.setProcessingTime(116_000)) == {}
    assert counts(tester.setProcessingTime(300_000)) == {OutputPacket.EXPIRED: 1}
    assert tester.peekMapState("blocks", BUCKET) == {}
    assert list(tester.handle.listTimers()) == []
    assert counts(tester.testInPandas(BUCKET, rows_and_tick([Row(1, 7, 0.0)], 7))) == {
        OutputPacket.ESTIMATES: 1
    }
    assert len(list(tester.handle.listTimers())) == 1


def test_waiting_rows_are_released_when_the_timer_goes_off() -> None:
    plan = plan_of(delay=60 * SECOND, patience=10 * SECOND)
    tester = TwsTester(EventTimeProcessor(plan), timeMode="ProcessingTime")
    tester.setProcessingTime(100_000)
    assert counts(tester.testInPandas(BUCKET, rows_and_tick([Row(1, 5, 0.0)], 5))) == {
        OutputPacket.WAITING: 1
    }
    tester.setProcessingTime(109_000)
    assert counts(tester.testInPandas(BUCKET, rows_and_tick([], 9))) == {
        OutputPacket.WAITING: 1
    }  # rows of another bucket
    assert counts(tester.setProcessingTime(119_000)) == {}
    assert counts(tester.setProcessingTime(119_001)) == {OutputPacket.ESTIMATES: 1}
    assert list(tester.handle.listTimers()) == []
    assert counts(tester.setProcessingTime(500_000)) == {}


def test_states_and_waiting_rows_of_a_snapshot_are_added() -> None:
    plan = plan_of(delay=10 * SECOND)
    first = TwsTester(EventTimeProcessor(plan))
    first.testInPandas(BUCKET, rows_and_tick([Row(1, 0, 1.0), Row(1, 15, 2.0), Row(2, 18, 3.0)], 20))
    held = {name: list(first.peekMapState(name, BUCKET).values()) for name in ("blocks", "waiting")}
    states = [
        plan.state.layout.encode(plan.state.decode(decode_stored(value))) for (value,) in held["blocks"]
    ]
    assert plan.event_time is not None
    waiting = [
        INTEGER.layout.encode(plan.event_time.row_format.decode(decode_stored(value)))
        for (value,) in held["waiting"]
    ]
    assert (len(states), sum(INTEGER.layout.decode(packet).size for packet in waiting)) == (1, 2)
    seeds = pd.DataFrame(
        {
            "kind": [RowPacket.STATES] * len(states) + [RowPacket.ROWS] * len(waiting),
            "payload": [*states, *waiting],
        }
    )
    began = plan._replace(
        event_time=plan.event_time._replace(watermark=10 * SECOND, max_event_time=20 * SECOND)
    )
    second = TwsTester(EventTimeProcessor(began), initialStatePandas=[(BUCKET, seeds)])
    left: Any = first.testInPandas(BUCKET, rows_and_tick([Row(1, 12, 0.0)], 40))
    right: Any = second.testInPandas(BUCKET, rows_and_tick([Row(1, 12, 0.0)], 40))
    assert counts(left) == {OutputPacket.ESTIMATES: 3}
    pd.testing.assert_frame_equal(left, right)


def test_row_ids_of_a_snapshot_are_added() -> None:
    fmt = INTEGER._replace(row_id=RowId("message", True, 50 * SECOND))
    plan = plan_of(fmt, waits=False)
    assert plan.event_time is not None and plan.event_time.id_format is not None

    def rows(*some: Row) -> pd.DataFrame:
        newest = encode_tick(max(row.time for row in some) * SECOND)
        return pd.DataFrame(
            {"kind": [RowPacket.ROWS, RowPacket.MAX_EVENT_TIME], "payload": [packet(fmt, list(some)), newest]}
        )

    first = TwsTester(EventTimeProcessor(plan))
    assert counts(first.testInPandas(BUCKET, rows(Row(1, 0, 1.0, 7), Row(2, 0, 1.0, 7)))) == {
        OutputPacket.ESTIMATES: 2
    }
    assert counts(first.testInPandas(BUCKET, rows(Row(1, 5, 1.0, 8)))) == {OutputPacket.ESTIMATES: 1}
    states = [
        plan.state.layout.encode(plan.state.decode(decode_stored(one)))
        for (one,) in first.peekMapState("blocks", BUCKET).values()
    ]
    stored = plan.event_time.id_format
    ids = [
        stored.layout.encode(stored.decode(decode_stored(one)))
        for (one,) in first.peekMapState("remembered", BUCKET).values()
    ]
    kinds = [RowPacket.STATES] * len(states) + [RowPacket.ROW_IDS] * len(ids)
    seeds = pd.DataFrame({"kind": kinds, "payload": [*states, *ids]})
    second = TwsTester(EventTimeProcessor(plan), initialStatePandas=[(BUCKET, seeds)])
    again = rows(Row(1, 20, 2.0, 8), Row(1, 21, 2.0, 9), Row(2, 30, 2.0, 7), Row(2, 81, 2.0, 7))
    left, right = (one.testInPandas(BUCKET, again) for one in (first, second))
    assert counts(left) == {OutputPacket.ESTIMATES: 2}
    pd.testing.assert_frame_equal(left, right)


def states_of(plan: Plan, keys: list[int], at: int) -> bytes:
    """Return a packet of states of keys whose newest row was at a time, at the level 4."""
    n = len(keys)
    values = plan.kernel.initial(n)
    values[0] = 4.0
    time = np.full(n, at * SECOND, np.int64)
    arrays = {"event_time": time, "count": np.ones(n, np.int64), "log_likelihood": np.zeros(n)}
    records = Records({"route": compute_routes(np.array(keys, np.int64)), **arrays, "values": values}, None)
    return plan.state.layout.encode(records.take(np.argsort(records.arrays["route"])))


@pytest.mark.parametrize("by_event_time", [False, True], ids=["plain", "event time"])
def test_new_keys_are_imported_before_their_rows_and_known_keys_keep_their_states(
    by_event_time: bool,
) -> None:
    plan = plan_of(waits=False) if by_event_time else plan_of()._replace(event_time=None)
    tester = TwsTester(KeyImporter(EventTimeProcessor(plan) if by_event_time else FilterProcessor(plan)))

    def batch(rows: list[Row], offered: list[int], at: int = 5) -> dict[int, int]:
        frame = rows_and_tick(rows, at) if rows else pd.DataFrame({"kind": [], "payload": []})
        if not by_event_time:
            frame = frame.loc[frame["kind"] == RowPacket.ROWS]
        kinds = [*frame["kind"].astype(int), *([RowPacket.STATES] if offered else [])]
        payloads = [*frame["payload"], *([states_of(plan, offered, 1)] if offered else [])]
        out = tester.testInPandas(BUCKET, pd.DataFrame({"kind": kinds, "payload": payloads}))
        found: Any = out.groupby("kind")["rows"].sum().to_dict()
        return {
            kind: int(found[kind])
            for kind in (OutputPacket.ESTIMATES, OutputPacket.KEYS_TAKEN, OutputPacket.KEYS_HELD)
            if found.get(kind)
        }

    assert batch([Row(1, 5, 0.0)], []) == {OutputPacket.ESTIMATES: 1}
    # Of keys 1, 2 and 3 the first has begun; the rows of the micro-batch find the others there.
    assert batch([Row(2, 6, 4.0)], [1, 2, 3], 6) == {
        OutputPacket.ESTIMATES: 1,
        OutputPacket.KEYS_TAKEN: 2,
        OutputPacket.KEYS_HELD: 1,
    }
    assert batch([], [2, 3]) == {OutputPacket.KEYS_HELD: 2}
    blocks = tester.peekMapState("blocks", BUCKET)
    held = join_records([plan.state.decode(decode_stored(value[0])) for value in blocks.values()])
    order = [
        int(np.flatnonzero(held.arrays["route"] == compute_routes(np.array([key])))[0]) for key in (1, 2, 3)
    ]
    assert held.size == 3
    assert held.arrays["count"][order].tolist() == [1, 2, 1]
    mean = plan.kernel.moments(np.ascontiguousarray(held.arrays["values"], np.float64))[0][0][order]
    assert mean[1:] == pytest.approx([4.0, 4.0]) and abs(mean[0]) < 0.1
