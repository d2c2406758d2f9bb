"""Measure the bytes that a key's state takes: raw numbers, in a block, and as the text that the store keeps of it.

`python -m benchmarks.suites.state_bytes` runs a work's filter over micro-batches without Spark, and encodes the blocks
of one bucket. The store's overhead (keys, index, older values until they are compacted) is not included.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.contenders import KEYS_A_BLOCK
from benchmarks.workloads.data import MINUTE_US, START_US
from benchmarks.workloads.work import DENSE, KINDS, Work
from jobs.state.block_format import build_state_format
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_blocks, compute_routes
from jobs.state.encoding.rows import build_row_format, sort_by_key
from jobs.state.filter_step import filter_step
from jobs.state.row_filter import RowFilter
from jobs.state.spark_values import to_text
from kalman import build

KEYS, BATCHES = 30_000, 30
SAME, IRREGULAR = "a row of every key at the same time", "half of the keys, at times of their own"


def block_bytes(work: Work, times: str) -> tuple[float, float, float]:
    """Return the bytes a key of its raw numbers, of its share of a block, and of that as text."""
    spec, kernel = work.spec, build(work.spec.definition(), {})
    kind = KeyKind(("id",), ("bigint",), True)
    state = build_state_format(spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size)
    fmt = build_row_format(spec, kind)
    rng = np.random.default_rng(1)
    known = state.layout.empty()
    for number in range(BATCHES):
        ids, time = _rows(rng, times, START_US + number * 10 * MINUTE_US)
        arrays = {
            "route": compute_routes(ids),
            "time": time,
            "y": rng.normal(size=(len(fmt.measurement), len(ids))),
        }
        keyed = sort_by_key(Records(arrays, None), fmt)
        known = filter_step(RowFilter(kernel, spec.unit_us), state.layout, known, keyed).records
    block = compute_blocks(known.arrays["route"], -(-KEYS // KEYS_A_BLOCK))
    bounds = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(block)]
    blocks = [
        state.encode(known.slice(start, stop)) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    text = sum(len(to_text(value)) for value in blocks)
    return 8.0 * kernel.size, sum(map(len, blocks)) / known.size, text / known.size


def _rows(rng: np.random.Generator, times: str, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ids = np.arange(KEYS, dtype=np.int64)
    if times == SAME:
        return ids, np.full(KEYS, start)
    ids = ids[rng.random(KEYS) < 0.5]
    return ids, start + 1000 * rng.integers(0, 10 * MINUTE_US // 1000, len(ids))  # to the millisecond


def main() -> int:
    """Measure and print."""
    print("| bytes a key | rows | raw numbers | in a block | as text |\n|---|---|---:|---:|---:|")
    for work in (DENSE[1], KINDS[0]):
        for times in (SAME, IRREGULAR):
            raw, stored, text = block_bytes(work, times)
            print(f"| {work.name} | {times} | {raw:.0f} | {stored:.1f} | {text:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
