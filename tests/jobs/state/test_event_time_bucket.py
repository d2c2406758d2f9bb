"""A bucket under a watermark: its clock, the snapshot it begins with, and the states of new keys that it is given."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.state import key_states
from jobs.state.encoding.packets import NEVER, OutputPacket, Records
from jobs.state.encoding.rows import RowFormat, RowId
from jobs.state.event_time_bucket import EventTimeBucket
from jobs.state.key_states import CHANGES_FROM, Entries
from jobs.state.plan import Packet, Plan, Stores
from jobs.state.row_ids import DuplicateIds
from tests.jobs.support.event_time import INTEGER, SECOND, TEXT, DictStore, Row, keys_of, packet, plan_of

Estimates = dict[tuple[int, int], tuple[float, float]]


def opened(
    plan: Plan, stores: Stores | None = None, clock: bytes | None = None, folder: Path | None = None
) -> EventTimeBucket:
    made = stores or Stores(**{name: DictStore() for name in Stores._fields})
    return EventTimeBucket(plan, made, clock, lambda name: folder and folder / name)


def take(bucket: EventTimeBucket, rows: list[Row], now: int = 0) -> list[Packet]:
    newest = max((row.time * SECOND for row in rows), default=NEVER)
    return list(bucket.take([packet(bucket.plan.rows, rows)] if rows else [], newest, now * SECOND))


def states_of(bucket: EventTimeBucket) -> Records:
    values = [value for _, value in sorted(bucket.states.store.items())]
    return bucket.plan.state.decode_all(values)


def packed(bucket: EventTimeBucket, keys: Iterable[int] | None = None) -> list[bytes]:
    """The states of some keys, a packet each, as a snapshot gives them."""
    states, layout = states_of(bucket), bucket.plan.state.layout
    wanted = [at for at, key in enumerate(keys_of(states)) if keys is None or key in keys]
    return [layout.encode(states.take(np.array([at]))) for at in wanted]


def estimates(plan: Plan, packets: list[Packet]) -> Estimates:
    found: Estimates = {}
    for kind, _, payload in packets:
        if kind == OutputPacket.ESTIMATES:
            read = plan.estimates.layout.decode(payload).arrays
            text = plan.estimates.layout.decode(payload).text
            keys = read["key"].tolist() if text is None else [int(one[1:]) for one in text.to_pylist()]
            for i, key in enumerate(keys):
                at = int(read["time"][i]) // SECOND
                found[key, at] = (float(read["mean"][0, i]), float(read["covariance"][0, i]))
    return found


def expired(plan: Plan, packets: list[Packet]) -> list[int]:
    payloads = [payload for kind, _, payload in packets if kind == OutputPacket.EXPIRED]
    return sorted(key for payload in payloads for key in keys_of(plan.state.layout.decode(payload)))


FIRST = [Row(key, time, key + 0.5 * time) for key in range(1, 6) for time in (10, 20, 30)]
SECOND_HALF = [Row(key, time, key - 0.5 * time) for key in range(3, 8) for time in (25, 35, 50)]


@pytest.mark.parametrize("fmt", [INTEGER, TEXT])
def test_a_bucket_that_begins_with_a_snapshot_goes_on_where_the_other_ended(fmt: RowFormat) -> None:
    plan = plan_of(fmt, delay=6 * SECOND)
    before = opened(plan)
    take(before, FIRST)
    # At 24 s by the watermark, the rows of 30 s wait.
    rows = before.waiting.release(10**6 * SECOND)
    assert rows.size == 5 and (before.watermark, before.max_event_time) == (24 * SECOND, 30 * SECOND)
    again = plan_of(fmt, delay=6 * SECOND, watermark=before.watermark, max_event_time=before.max_event_time)
    seeded = opened(again)
    layout = plan.rows.layout
    seeded.seed(packed(before), [layout.encode(rows.take(np.array([at]))) for at in range(rows.size)])
    assert sorted(keys_of(states_of(seeded))) == [1, 2, 3, 4, 5] and seeded.waiting.count == 5
    assert seeded.watermark == 24 * SECOND

    whole = opened(plan)
    take(whole, FIRST)
    wanted = take(whole, SECOND_HALF)
    found = take(seeded, SECOND_HALF)
    assert estimates(plan, found) == estimates(plan, wanted)
    assert set(estimates(plan, found)) == {(key, 30) for key in range(1, 6)} | {
        (key, time) for key in range(3, 8) for time in (25, 35)
    }
    assert seeded.waiting.count == whole.waiting.count == 5


@pytest.mark.parametrize("integer", [True, False])
def test_a_bucket_that_begins_with_a_snapshots_ids_knows_its_rows(integer: bool) -> None:
    fmt = INTEGER._replace(row_id=RowId("n", integer, 30 * SECOND))
    plan = plan_of(fmt, delay=0, waits=False)
    before, other = opened(plan), opened(plan)
    take(before, [Row(1, 10, 1.0, 5), Row(2, 11, 2.0, 6)])
    assert isinstance(before.ids, DuplicateIds)
    entries = before.ids.blocks.state.decode_all(value for _, value in before.ids.blocks.store.items())
    layout = before.ids.blocks.state.layout
    other.seed(
        packed(before), [], ids=[layout.encode(entries.take(np.array([at]))) for at in range(entries.size)]
    )
    for bucket in (before, other):
        put_out = take(bucket, [Row(1, 12, 9.0, 5), Row(2, 12, 3.0, 7), Row(2, 13, 3.0, 6)])
        assert set(estimates(plan, put_out)) == {(2, 12)}
    bare = opened(plan)
    bare.seed(packed(before), [])
    assert set(estimates(plan, take(bare, [Row(1, 12, 9.0, 5)]))) == {(1, 12)}


def test_ids_are_forgotten_when_no_row_can_repeat_them() -> None:
    fmt = INTEGER._replace(row_id=RowId("n", True, 5 * SECOND))
    bucket = opened(plan_of(fmt, delay=0, waits=False, idle=20 * SECOND))
    assert isinstance(bucket.ids, DuplicateIds)
    left = []
    for row in (Row(1, 10, 1.0, 5), Row(2, 29, 1.0, 6), Row(3, 60, 1.0, 7)):
        take(bucket, [row])
        entries = bucket.ids.blocks.state.decode_all(value for _, value in bucket.ids.blocks.store.items())
        left.append(sorted(keys_of(entries)))
    # Rows come up to 20 s behind the watermark and repeat ids of the 5 s before; what is older goes within 5 s more.
    assert left == [[1], [1, 2], [3]]


def test_a_bucket_that_begins_with_nothing_has_nothing() -> None:
    bucket = opened(plan_of())
    bucket.seed([], [])
    assert (bucket.watermark, bucket.max_event_time, bucket.alarm) == (NEVER, NEVER, None)
    assert take(bucket, []) == []
    assert (bucket.watermark, bucket.max_event_time, bucket.last_arrival) == (NEVER, NEVER, NEVER)


def test_the_watermark_never_goes_back() -> None:
    bucket = opened(plan_of(delay=5 * SECOND))
    for newest, watermark, maximum in ((30, 25, 30), (28, 25, 30), (31, 26, 31)):
        put_out = take(bucket, [Row(1, newest, 1.0)], now=newest)
        assert bucket.watermark == watermark * SECOND and bucket.max_event_time == maximum * SECOND
        assert bucket.last_arrival == newest * SECOND
        assert (OutputPacket.WATERMARK, watermark * SECOND, b"") in put_out
    assert bucket.waiting.count == 3 and (OutputPacket.WAITING, 3, b"") in put_out
    stored = opened(bucket.plan, clock=bucket.clock.encode())
    assert (stored.watermark, stored.max_event_time, stored.last_arrival) == (
        26 * SECOND,
        31 * SECOND,
        31 * SECOND,
    )


def test_rows_wait_for_the_patience_and_not_a_microsecond_longer() -> None:
    bucket = opened(plan_of(delay=5 * SECOND, patience=10 * SECOND))
    assert bucket.alarm is None
    take(bucket, [Row(1, 25, 1.0), Row(1, 30, 1.0), Row(2, 24, 1.0)], now=100)
    assert bucket.waiting.count == 2  # at 25 s the watermark has passed what is older, and not itself
    assert bucket.alarm == 110 * SECOND + 1
    assert list(bucket.wake(110 * SECOND)) == [] and bucket.waiting.count == 2
    put_out = list(bucket.wake(110 * SECOND + 1))
    assert set(estimates(bucket.plan, put_out)) == {(1, 25), (1, 30)}
    assert (OutputPacket.WAITING, 0, b"") in put_out
    assert bucket.waiting.count == 0 and bucket.watermark == 30 * SECOND + 1 and bucket.alarm is None
    assert list(bucket.wake(10**4 * SECOND)) == []


def held_and_offered(**policy: Any) -> tuple[Plan, EventTimeBucket, EventTimeBucket]:
    """A bucket that has keys 1 and 2, and key 3 in its archive; and another one, which has keys 1 to 5."""
    plan = plan_of(waits=False, idle=100 * SECOND, archive=True, **policy)
    bucket, other = opened(plan), opened(plan)
    take(bucket, [Row(3, 10, 3.0)], now=10)
    put_out = take(bucket, [Row(1, 150, 1.0), Row(2, 150, 2.0)], now=150)
    assert expired(plan, put_out) == [3]
    take(other, [Row(key, 120, -9.0 * key) for key in range(1, 6)], now=120)
    return plan, bucket, other


def test_states_of_new_keys_are_added_and_no_others() -> None:
    plan, bucket, other = held_and_offered()
    before = packed(bucket)
    assert bucket.import_states(packed(other), now=160 * SECOND) == (2, 3)
    assert sorted(keys_of(states_of(bucket))) == [1, 2, 4, 5]
    assert packed(bucket, [1, 2]) == before and packed(bucket, [4, 5]) == packed(other, [4, 5])
    assert bucket.import_states(packed(other), now=160 * SECOND) == (0, 5)
    # They go on from there, as they would have in the other bucket; key 3 goes on from the archive.
    rows = [Row(key, 160, 0.25) for key in (3, 4, 5)]
    found = estimates(plan, take(bucket, rows, now=160))
    wanted = estimates(plan, take(other, rows, now=160))
    assert (
        found[4, 160] == wanted[4, 160]
        and found[5, 160] == wanted[5, 160]
        and found[3, 160] != wanted[3, 160]
    )
    # Silence counts by event time: from 160 s on for these, from 150 s on for keys 1 and 2.
    assert expired(plan, take(bucket, [Row(6, 255, 1.0)], now=255)) == [1, 2]
    assert expired(plan, take(bucket, [Row(6, 260, 1.0)], now=260)) == []
    assert expired(plan, take(bucket, [Row(6, 261, 1.0)], now=261)) == [3, 4, 5]


def test_by_the_machines_clock_new_keys_count_as_seen_when_they_came() -> None:
    plan, bucket, other = held_and_offered(processing_time=True)
    bucket.import_states(packed(other), now=200 * SECOND)
    assert bucket.alarm == 250 * SECOND + 1  # of keys 1 and 2, last seen at 150 s
    assert expired(plan, list(bucket.wake(250 * SECOND))) == []
    assert expired(plan, list(bucket.wake(250 * SECOND + 1))) == [1, 2]
    assert bucket.alarm == 300 * SECOND + 1
    assert expired(plan, list(bucket.wake(300 * SECOND))) == []
    assert expired(plan, list(bucket.wake(300 * SECOND + 1))) == [4, 5]
    assert bucket.alarm is None


def test_by_the_machines_clock_a_snapshots_keys_count_as_seen_when_the_stream_began() -> None:
    plan, _, other = held_and_offered(processing_time=True)
    bucket = opened(plan)
    bucket.seed(packed(other), [], now=500 * SECOND)
    assert bucket.alarm == 600 * SECOND + 1
    assert expired(plan, take(bucket, [Row(1, 130, 0.0)], now=600)) == []
    assert expired(plan, take(bucket, [Row(7, 131, 0.0)], now=601)) == [2, 3, 4, 5]


class Bucket:
    """A bucket whose stores and clock go from micro-batch to micro-batch, as in Spark's state."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.clock = plan, None
        self.held = {name: DictStore() for name in Stores._fields}

    def take(self, rows: list[Row], folder: Path | None) -> list[Packet]:
        bucket = opened(self.plan, Stores(**self.held), self.clock, folder)
        packets = take(bucket, rows)
        self.clock = bucket.clock.encode()
        return packets

    def fail(self, rows: list[Row], folder: Path | None) -> None:
        """Make an attempt whose values Spark's state never gets."""
        attempt = Bucket(self.plan)
        attempt.clock = self.clock
        for name, store in self.held.items():
            attempt.held[name].held = dict(store.held)
        attempt.take(rows, folder)

    def changes(self) -> int:
        return sum(number >= CHANGES_FROM for number in self.held["blocks"].held)

    def states(self) -> list[bytes]:
        """Return the states of all keys, and those before the rows kept for replay."""
        stores = self.held["blocks"], self.held["replay_base"]
        found = [Entries.of(store.items()).states(self.plan.state) for store in stores]
        return [self.plan.state.layout.encode(one) for one in found]


POLICIES: dict[str, dict[str, Any]] = {
    "strict": {"delay": 20 * SECOND},
    "replay": {"waits": False, "replay_length": 3},
    "as arrived, once": {"waits": False},
}


@pytest.mark.parametrize("fmt", [INTEGER, TEXT])
@pytest.mark.parametrize("policy", POLICIES)
def test_changes_beside_blocks_give_the_packets_and_states_of_blocks_alone(
    fmt: RowFormat, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_states, "FEW", 8)
    if policy == "as arrived, once":
        fmt = fmt._replace(distinct=True)
    plan = plan_of(fmt, **POLICIES[policy])._replace(blocks=20)
    rng = np.random.default_rng(1)
    alone, changed, folder = Bucket(plan), Bucket(plan), tmp_path / "q" / "0"
    most = 0
    for stamp in range(60):
        count = 600 if stamp in (0, 30) else int(rng.integers(1, 12))
        keys = rng.choice(600 + 3 * stamp, count, replace=False)
        rows = [Row(int(key), 10 * stamp + int(rng.integers(15)), float(rng.normal())) for key in keys]
        rows += rows[:2]
        if stamp < 5:  # an earlier release has taken these
            changed.take(rows, None)
            assert changed.clock is not None and changed.clock[:4] == b"KCL2"
            changed.clock = b"KCL1" + changed.clock[4:]
        else:
            if rng.random() < 0.2:
                changed.fail(rows, folder)
            if rng.random() < 0.1:
                shutil.rmtree(folder, ignore_errors=True)
            found = changed.take(rows, None if rng.random() < 0.1 else folder)
            assert found == alone.take(rows, None)
            most = max(most, changed.changes())
            continue
        alone.take(rows, None)
    assert changed.states() == alone.states()
    assert most > 3
    assert alone.changes() == 0
