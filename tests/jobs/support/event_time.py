"""A stream by event time without Spark: its buckets over dictionaries, fed micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

import kalman
from jobs.state.block_format import StateFormat, build_state_format
from jobs.state.encoding.estimates import EstimateFormat
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import NEVER, OutputPacket, Records
from jobs.state.encoding.routing import compute_buckets, compute_routes
from jobs.state.encoding.rows import RowFormat, select_ids
from jobs.state.event_time_bucket import EventTimeBucket
from jobs.state.plan import EventTimePolicy, Plan, Stores
from jobs.state.row_ids import build_ids_layout

SECOND = 1_000_000
BUCKETS, BLOCKS = 2, 3
DEFINITION: dict[str, Any] = {
    "filter": "linear",
    "states": ["level"],
    "measurement": ["y"],
    "control": [],
    "process": {"kind": "random_walk", "variance": 0.5},
    "observation": {"H": [[1.0]], "R": [[2.0]]},
    "initial": {"mean": [0.1], "covariance": [[10.0]]},
    "learn": None,
}
TEXT = RowFormat(KeyKind(("id",), ("string",), False), "at", ("y",), ())
INTEGER = RowFormat(KeyKind(("id",), ("bigint",), True), "at", ("y",), ())


class Row(NamedTuple):
    """One measurement: key, time in seconds, value, and row id (-1 without one)."""

    key: int
    time: int
    y: float
    id: int = -1


class DictStore:
    """A store of bytes that counts the bytes written."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}
        self.written = 0

    def get(self, number: int) -> bytes | None:
        return self.held.get(number)

    def put(self, number: int, value: bytes) -> None:
        self.written += len(value)
        self.held[number] = value

    def get_all(self, numbers: Sequence[int]) -> list[bytes | None]:
        return [self.get(number) for number in numbers]

    def put_all(self, values: Iterable[tuple[int, bytes]]) -> None:
        for number, value in values:
            self.put(number, value)

    def remove(self, number: int) -> None:
        del self.held[number]

    def items(self) -> Iterator[tuple[int, bytes]]:
        yield from self.held.items()


def plan_of(fmt: RowFormat = INTEGER, definition: dict[str, Any] = DEFINITION, **policy: Any) -> Plan:
    kernel = kalman.build(definition)
    state = build_state_format("m", 1, definition["states"], kernel.fields, fmt.kind, kernel.size)
    out = EstimateFormat(fmt.kind, len(definition["states"]), False, ())
    stored = StateFormat(b"rows of m", fmt.layout)
    if fmt.row_id is not None:
        policy["id_format"] = StateFormat(b"ids of m", build_ids_layout(fmt.kind, fmt.row_id))
    return Plan(
        kernel,
        float(SECOND),
        fmt,
        state,
        out,
        BLOCKS,
        event_time=EventTimePolicy(**{"delay": 0, "row_format": stored, **policy}),
    )


def packet(fmt: RowFormat, rows: list[Row]) -> bytes:
    return fmt.layout.encode(records_of(fmt, rows))


def records_of(fmt: RowFormat, rows: list[Row]) -> Records:
    keys = np.array([row.key for row in rows], np.int64)
    arrays = {
        "route": compute_routes(keys),
        "time": np.array([row.time * SECOND for row in rows], np.int64),
        "y": np.array([[row.y for row in rows]]),
    }
    label = None
    if fmt.row_id is not None:
        ids = np.array([max(row.id, 0) for row in rows], np.int64)
        arrays["id"] = np.array([ids] if fmt.row_id.integer else [ids * 3, ids * 5])
        arrays["named"] = np.array([row.id >= 0 for row in rows], np.uint8)
        if not fmt.row_id.integer:
            label = pa.array(["" if row.id < 0 else f"r{row.id}" for row in rows], pa.string())
    if fmt.kind.integer:
        return Records(arrays, None, label)
    return Records({**arrays, "check": keys * 7}, pa.array([f"k{key}" for key in keys], pa.string()), label)


class EventTimeStream:
    """The buckets of a stream; every micro-batch opens them from the stores that the previous one left."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stores = [{name: DictStore() for name in Stores._fields} for _ in range(BUCKETS)]
        self.clocks: list[bytes | None] = [None] * BUCKETS
        self.batch = 0
        self.sent: list[Row] = []
        self.put_out: list[tuple[int, int, int, bytes]] = []

    def take(self, rows: list[Row], now: int = 0) -> None:
        """Run one micro-batch, at a second of the machine's clock."""
        fmt = self.plan.rows
        self.sent += rows
        records = records_of(fmt, rows)
        bucket = compute_buckets(records.arrays["route"], BUCKETS)
        newest = int(records.arrays["time"].max(initial=NEVER))
        for number, (stores, clock) in enumerate(zip(self.stores, self.clocks, strict=True)):
            mine = np.flatnonzero(bucket == number)
            one = EventTimeBucket(self.plan, Stores(**stores), clock)
            packets = [fmt.layout.encode(records.take(part)) for part in np.array_split(mine, 2) if len(part)]
            self.put_out += [(self.batch, *out) for out in one.take(packets, newest, now * SECOND)]
            self.clocks[number] = one.clock.encode()
        self.batch += 1

    def wake(self, now: int) -> None:
        """Wake the buckets whose alarm has gone off, at a second of the machine's clock."""
        for number, (stores, clock) in enumerate(zip(self.stores, self.clocks, strict=True)):
            one = EventTimeBucket(self.plan, Stores(**stores), clock)
            if one.alarm is not None and one.alarm <= now * SECOND:
                self.put_out += [(self.batch, *out) for out in one.wake(now * SECOND)]
                assert one.alarm is None or one.alarm > now * SECOND
                self.clocks[number] = one.clock.encode()
        self.batch += 1

    def estimates(self) -> pd.DataFrame:
        """Return all estimates: batch, correction, key, time (seconds), mean, variance, log-likelihood."""
        frames = []
        for batch, kind, _, payload in self.put_out:
            if kind not in (OutputPacket.ESTIMATES, OutputPacket.CORRECTION):
                continue
            read = self.plan.estimates.layout.decode(payload)
            arrays = read.arrays
            key = arrays["key"] if read.text is None else [int(t[1:]) for t in read.text.to_pylist()]
            columns = {
                "batch": batch,
                "correction": kind == OutputPacket.CORRECTION,
                "key": key,
                "time": arrays["time"] // SECOND,
                "mean": arrays["mean"][0],
                "variance": arrays["covariance"][0],
                "log_likelihood": arrays["log_likelihood"],
            }
            frames.append(pd.DataFrame(columns))
        empty = {
            "batch": int,
            "correction": bool,
            "key": int,
            "time": int,
            "mean": float,
            "variance": float,
            "log_likelihood": float,
        }
        frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({name: [] for name in empty})
        return frame.astype(empty)

    def values(self, name: str) -> list[bytes]:
        """Return the values of a store, of all buckets."""
        return [value for stores in self.stores for value in stores[name].held.values()]

    def rows_of(self, kind: int) -> list[tuple[int, Row]]:
        """Return the measurement rows of the packets of a kind, each with its micro-batch, sorted."""
        found = []
        for batch, this, _, payload in self.put_out:
            if this == kind:
                read = self.plan.rows.layout.decode(payload)
                keys = keys_of(read)
                times, y = read.arrays["time"] // SECOND, read.arrays["y"][0]
                ids = [-1] * read.size if self.plan.rows.row_id is None else select_ids(read).to_pylist()
                ids = [-1 if one is None else int(str(one).removeprefix("r")) for one in ids]
                found += [
                    (batch, Row(*one)) for one in zip(keys, times.tolist(), y.tolist(), ids, strict=True)
                ]
        return sorted(found)

    def count_of(self, kind: int, batch: int) -> int:
        """Return the number of rows in the packets of a kind of a micro-batch."""
        return sum(rows for at, this, rows, _ in self.put_out if (at, this) == (batch, kind))


def keys_of(records: Records) -> list[int]:
    from jobs.state.encoding.routing import compute_identities

    if records.text is None:
        return compute_identities(np.array(records.arrays["route"])).tolist()
    return [int(text[1:]) for text in records.text.to_pylist()]


def filtered(rows: list[Row], definition: dict[str, Any] = DEFINITION) -> pd.DataFrame:
    """Filter rows key by key in event-time order, one row a call: key, time, mean, variance, log-likelihood."""
    kernel = kalman.build(definition)
    found = []
    for key in sorted({row.key for row in rows}):
        states = kalman.initial_states(kernel, 1)
        for row in sorted((row for row in rows if row.key == key), key=lambda row: (row.time, row.y)):
            one = kalman.SortedRows(
                np.zeros(1, np.int64), np.array([row.time * SECOND]), np.array([[row.y]]), np.empty((0, 1))
            )
            states, out = kalman.run(kernel, states, one, float(SECOND))
            found.append((key, row.time, out.mean[0, 0], out.covariance[0, 0], out.log_likelihood[0]))
    names = {"key": int, "time": int, "mean": float, "variance": float, "log_likelihood": float}
    columns = {name: [row[at] for row in found] for at, name in enumerate(names)}
    return pd.DataFrame(columns).astype(names)


def assert_same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Check that two sets of estimates are the same rows with the same bits."""
    columns = ["key", "time", "mean", "variance", "log_likelihood"]
    left, right = (
        pd.DataFrame({name: frame[name] for name in columns}).sort_values(columns, ignore_index=True)
        for frame in (found, expected)
    )
    pd.testing.assert_frame_equal(left, right, check_exact=True)
