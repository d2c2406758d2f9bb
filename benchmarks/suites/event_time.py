"""Measure a sparse micro-batch of an event-time bucket, without Spark: `python -m benchmarks.suites.event_time`.

As many rows go into many keys and into few: the ratio within one run is the cost of the keys without rows. Measured are
processor time and written bytes of the bucket's state, whose values are text as in Spark's state.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.contenders import KEYS_A_BLOCK
from benchmarks.workloads.data import MINUTE_US, START_US
from benchmarks.workloads.work import DENSE
from jobs.state.block_format import build_state_format
from jobs.state.encoding.estimates import estimate_format
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.rows import build_row_format
from jobs.state.event_time_bucket import EventTimeBucket
from jobs.state.plan import EventTimePolicy, Plan, Stores
from jobs.state.reorder_buffer import build_waiting_format
from jobs.state.spark_values import decode_stored, to_text
from kalman import build

MANY, FEW, ROWS = 500_000, 5_000, 1_000
BATCHES, WARM = 26, 8
POLICIES: dict[str, dict[str, Any]] = {
    "strict": {},
    "replay of 8 rows": {"waits": False, "replay_length": 8},
    "expiry, no key is silent": {"waits": False, "idle": 10_000 * MINUTE_US},
}


class TextStore:
    """A store of values as text, which counts the bytes of values that it is given."""

    def __init__(self) -> None:
        self.values: dict[int, str] = {}
        self.written = 0

    def get(self, number: int) -> bytes | None:
        value = self.values.get(number)
        return None if value is None else decode_stored(value)

    def put(self, number: int, value: bytes) -> None:
        self.written += len(value)
        self.values[number] = to_text(value)

    def get_all(self, numbers: Sequence[int]) -> Iterable[bytes | None]:
        return map(self.get, numbers)

    def put_all(self, values: Iterable[tuple[int, bytes]]) -> None:
        for number, value in values:
            self.put(number, value)

    def remove(self, number: int) -> None:
        del self.values[number]

    def items(self) -> Iterator[tuple[int, bytes]]:
        for number, value in self.values.items():
            yield number, decode_stored(value)


def plan_of(policy: dict[str, Any], keys: int) -> Plan:
    """Return the plan of a model with two states by event time."""
    spec = DENSE[0].spec
    kernel, kind = build(spec.definition(), {}), KeyKind(("id",), ("bigint",), True)
    rows = build_row_format(spec, kind)
    state = build_state_format(spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size)
    event_time = EventTimePolicy(delay=0, row_format=build_waiting_format(spec, rows), **policy)
    blocks, out = max(1, keys // KEYS_A_BLOCK), estimate_format(kind, spec, kernel)
    return Plan(kernel, spec.unit_us, rows, state, out, blocks, event_time=event_time)


def micro_batch(plan: Plan, keys: int, folder: Path) -> tuple[float, float]:
    """Return the median seconds of a micro-batch of `ROWS` rows, and the bytes that it writes to the state."""
    clock = None
    stores = [TextStore() for _ in Stores._fields]
    rng = np.random.default_rng(0)
    seconds, written = [], []
    for number in range(BATCHES):
        ids = np.arange(keys) if number == 0 else rng.choice(keys, ROWS, replace=False)
        at = START_US + number * MINUTE_US
        rows = {
            "route": compute_routes(ids),
            "time": np.full(len(ids), at),
            "y": rng.normal(size=(1, len(ids))),
        }
        packet = plan.rows.layout.encode(Records(rows, None))
        before, began = sum(store.written for store in stores), time.process_time()
        bucket = EventTimeBucket(plan, Stores(*stores), clock, lambda variable: folder / variable)
        for _ in bucket.take([packet], at):
            pass
        clock = bucket.clock.encode()
        seconds.append(time.process_time() - began)
        written.append(sum(store.written for store in stores) - before)
    return statistics.median(seconds[WARM:]), statistics.median(written[WARM:])


def main() -> int:
    """Measure and print."""
    print(f"| {ROWS:,} rows | into {MANY:,} keys | into {FEW:,} keys | ratio |\n|---|---:|---:|---:|")
    for name, policy in POLICIES.items():
        found = []
        for keys in (MANY, FEW):
            with tempfile.TemporaryDirectory() as folder:
                found.append(micro_batch(plan_of(policy, keys), keys, Path(folder) / "query"))
        cells = [f"{1000 * seconds:.0f} ms, {written / 1e6:.2f} MB" for seconds, written in found]
        print(f"| {name} | {cells[0]} | {cells[1]} | {found[0][0] / found[1][0]:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
