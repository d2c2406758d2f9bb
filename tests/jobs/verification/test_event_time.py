"""Streams by event time, over the buckets of the real operator, against their recomputation in one pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs.state.encoding.packets import NEVER, OutputPacket, Records
from jobs.state.encoding.routing import compute_identities
from jobs.state.reorder_buffer import Clock
from jobs.verification.recomputing import Kind, Recipe, check
from kalman.flags import FLAGS
from tests.jobs.support.event_time import INTEGER, SECOND, EventTimeStream, Row, plan_of

REFUSED = (
    OutputPacket.LATE,
    OutputPacket.LATE_BY_WATERMARK,
    OutputPacket.BEYOND_REPLAY_WINDOW,
    OutputPacket.DUPLICATE,
    OutputPacket.DUPLICATE_ID,
)
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "strict": (False, {"waits": True, "delay": 8 * SECOND}),
    "strict, without doubled times": (True, {"waits": True, "delay": 8 * SECOND}),
    "replay": (False, {"waits": False, "replay_length": 6}),
    "replay, without doubled times": (True, {"waits": False, "replay_length": 6}),
    "strict, with expiry": (False, {"waits": True, "delay": 8 * SECOND, "idle": 12 * SECOND}),
}
SCHEMA = pa.schema(
    [
        ("kind", pa.int32()),
        ("key", pa.string()),
        ("time", pa.int64()),
        ("batch", pa.int64()),
        ("place", pa.int64()),
        ("numbers", pa.list_(pa.float64())),
        ("flag", pa.string()),
        ("count", pa.int64()),
        ("log_likelihood", pa.float64()),
    ]
)


def streamed(name: str, seed: int) -> tuple[EventTimeStream, Recipe]:
    """Feed a stream micro-batches with rows out of order."""
    distinct, policy = CASES[name]
    fmt = INTEGER._replace(distinct=distinct)
    stream = EventTimeStream(plan_of(fmt, **policy))
    rng = np.random.default_rng(seed)
    for batch in range(12):
        times = 10 * batch + rng.integers(-14, 10, 25)
        keys = rng.integers(0, 6, 25) + (0 if batch % 5 else 3)
        values = np.round(rng.normal(size=25), 1)
        stream.take([Row(int(k), int(t), float(y)) for k, t, y in zip(keys, times, values, strict=True)])
    plan, watermark = stream.plan, Clock.decode(stream.clocks[0] or b"").watermark
    idle = policy.get("idle")
    return stream, Recipe(
        plan.kernel,
        plan.unit,
        fmt.kind,
        plan.estimates,
        measured=1,
        controls=0,
        landed=1,
        stored="<f8",
        idle=idle,
        in_order=True,
        replays="replay_length" in policy,
        expired_before=NEVER if idle is None else watermark - idle,
    )


def table_of(stream: EventTimeStream) -> list[dict[str, Any]]:
    """Return the checker's input: landed rows, refusals, waiting rows, estimates and states."""
    plan = stream.plan
    rows: list[dict[str, Any]] = []
    for place, row in enumerate(stream.sent):
        rows.append({"kind": Kind.ROW, "key": str(row.key), "time": row.time * SECOND, "place": place // 25})
        rows[-1]["numbers"] = [row.y]
    for kind in REFUSED:
        for batch, row in stream.rows_of(kind):
            refused = {"kind": Kind.REFUSED, "key": str(row.key), "time": row.time * SECOND, "batch": batch}
            rows.append({**refused, "numbers": [row.y]})
    for value in stream.values("parts"):
        waiting = stream.plan.event_time.row_format.decode(value)  # type: ignore[union-attr]
        rows += records(Kind.WAITING, waiting, waiting.arrays["y"].T.tolist(), 0)
    for batch, kind, _, payload in stream.put_out:
        if kind in (OutputPacket.ESTIMATES, OutputPacket.CORRECTION):
            rows += estimated(plan.estimates.layout.decode(payload), batch, kind)
    for value in stream.values("blocks"):
        states = plan.state.decode(value)
        mean, covariance, _ = plan.kernel.snapshot(np.array(states.arrays["values"]))
        found = records(Kind.END, states, np.vstack([mean, covariance]).T.tolist(), 0, "event_time")
        for i, one in enumerate(found):
            one["count"] = int(states.arrays["count"][i])
            one["log_likelihood"] = float(states.arrays["log_likelihood"][i])
        rows += found
    return rows


def records(
    kind: Kind, read: Records, numbers: list[list[float]], batch: int, time: str = "time"
) -> list[dict[str, Any]]:
    keys = read.arrays["key"] if "key" in read.arrays else compute_identities(np.array(read.arrays["route"]))
    both = zip(keys.tolist(), read.arrays[time].tolist(), numbers, strict=True)
    return [{"kind": kind, "key": str(k), "time": t, "numbers": n, "batch": batch} for k, t, n in both]


def estimated(read: Records, batch: int, kind: int) -> list[dict[str, Any]]:
    arrays = read.arrays
    numbers = np.vstack([arrays["mean"], arrays["covariance"], arrays["log_likelihood"], arrays["nis"]])
    found = records(Kind.ESTIMATE, read, numbers.T.tolist(), batch)
    for one, flag in zip(found, arrays["flag"].tolist(), strict=True):
        one["flag"], one["place"] = FLAGS[flag], int(kind == OutputPacket.CORRECTION)
    return found


def checked(rows: list[dict[str, Any]], recipe: Recipe) -> Any:
    return check(recipe, pa.Table.from_pylist(rows, SCHEMA))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_a_stream_by_event_time_is_one_recomputed_pass(name: str, seed: int) -> None:
    stream, recipe = streamed(name, seed)
    rows = table_of(stream)
    found = checked(rows, recipe)
    kinds = [row["kind"] for row in rows]
    assert found.differences == 0, found
    assert found.counts["unrecorded"] == 0
    firsts = [row for row in rows if row["kind"] == Kind.ESTIMATE and row["place"] == 0]
    assert found.counts["equal"] == len(firsts) > 100
    assert found.counts["undecided"] == 0 or name == "replay"
    assert found.counts["refused"] == kinds.count(Kind.REFUSED)
    assert found.counts["refused"] > 0 or name == "replay"
    assert found.counts["waiting"] == kinds.count(Kind.WAITING)
    assert (found.counts["waiting"] > 0) == name.startswith("strict")
    assert (kinds.count(Kind.ESTIMATE) > len(firsts)) == name.startswith("replay")
    times = Counter(
        (row["key"], row["time"]) for row in firsts
    )  # which of several rows lost it cannot be told
    lost = [row for row in firsts if times[row["key"], row["time"]] == 1][50]
    found = checked([row for row in rows if row is not lost], recipe)
    assert (found.counts["missing"], found.differences) == (1, 1)
    found = checked([*rows, lost], recipe)
    assert (found.counts["doubled"], found.differences) == (1, 1)
