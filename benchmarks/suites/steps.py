"""Measure the cost per row of each of our own steps, in one process and without Spark.

`python -m benchmarks.suites.steps` runs them repeatedly on the arrays of a work's micro-batch, and prints nanoseconds a
row: our part of the cost model. The rest of a micro-batch's time is Spark's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.contenders.contenders import KEYS_A_BLOCK, PARTITIONS
from benchmarks.results import RESULTS, commit, machine, spread
from benchmarks.workloads.data import MINUTE_US, START_US, names
from benchmarks.workloads.work import DENSE, KINDS, TEXT, Work
from jobs.state.block_format import build_state_format
from jobs.state.encoding.estimates import estimate_batch, estimate_format, pack_estimates
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import join_records
from jobs.state.encoding.routing import Routing, compute_blocks
from jobs.state.encoding.rows import build_row_format, build_row_packer, unpack_rows
from jobs.state.filter_step import filter_step
from jobs.state.row_filter import RowFilter
from kalman import build

ROUNDS = 7


def arrow_rows(work: Work) -> pa.RecordBatch:
    """Return one bucket's rows of a micro-batch, as input of the packing step."""
    keys = work.keys // PARTITIONS
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(keys), work.rows)
    minute = np.tile(np.arange(work.rows), keys)
    order = rng.permutation(len(ids))
    columns: dict[str, Any] = {"identity": ids[order].astype(np.int64)}
    if work.text:
        hashes = rng.integers(-(2**63), 2**63, (2, keys))
        columns = {"identity": hashes[0][ids[order]], "check": hashes[1][ids[order]]}
        columns["text"] = pa.array(names(ids[order]))
    columns["time"] = pa.array(START_US + minute[order] * MINUTE_US, pa.timestamp("us", tz="UTC"))
    for number in range(len(work.spec.measurement)):
        columns[f"n{number}"] = rng.normal(size=len(ids))
    arrays = [one if isinstance(one, pa.Array) else pa.array(one) for one in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, list(columns))


def steps_of(work: Work) -> tuple[int, dict[str, Callable[[], Any]]]:
    """Return the rows of one bucket and our steps on them, in their order."""
    spec = work.spec
    kernel = build(spec.definition(), {})
    kind = KeyKind(("id",), ("string" if work.text else "bigint",), not work.text)
    rows = build_row_format(spec, kind)
    state = build_state_format(spec.name, spec.version, spec.states, kernel.fields, kind, kernel.size)
    out = estimate_format(kind, spec, kernel)
    blocks = max(1, -(-work.keys // (PARTITIONS * KEYS_A_BLOCK)))
    batch = arrow_rows(work)
    pack = build_row_packer(rows, Routing((0,), blocks))
    payloads = [one.column("payload")[0].as_py() for one in pack(iter([batch]))]
    keyed = unpack_rows(payloads, rows)
    first = filter_step(RowFilter(kernel, spec.unit_us), state.layout, state.layout.empty(), keyed).records
    later = keyed._replace(rows=keyed.rows._replace(time=keyed.rows.time + work.rows * MINUTE_US))
    block = compute_blocks(first.arrays["route"], blocks)
    bounds = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(block)]
    parts = list(zip(bounds[:-1], bounds[1:], strict=True))
    values = [state.encode(first.slice(start, stop)) for start, stop in parts]
    known = join_records([state.decode(value) for value in values])
    advanced = filter_step(RowFilter(kernel, spec.unit_us), state.layout, known, later)
    packets = [packet for _, packet in pack_estimates(out, later, advanced.outputs)]
    return batch.num_rows, {
        "pack": lambda: list(pack(iter([batch]))),
        "unpack and sort": lambda: unpack_rows(payloads, rows),
        "decode states": lambda: join_records([state.decode(value) for value in values]),
        "filter": lambda: filter_step(RowFilter(kernel, spec.unit_us), state.layout, known, later),
        "encode states": lambda: [state.encode(advanced.records.slice(start, stop)) for start, stop in parts],
        "pack estimates": lambda: list(pack_estimates(out, later, advanced.outputs)),
        "unpack estimates": lambda: [estimate_batch(out, out.layout.decode(one)) for one in packets],
    }


def measure(work: Work) -> dict[str, dict[str, float]]:
    """Return nanoseconds a row of each step: least, median and greatest of some rounds."""
    rows, steps = steps_of(work)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS + 1):  # the first warms up
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number:
                found[name].append((time.perf_counter() - began) / rows * 1e9)
    return {name: spread(values) for name, values in found.items()}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser("python -m benchmarks.suites.steps", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    works = (*DENSE, TEXT[0], *KINDS)
    measured = {work.name: measure(work) for work in works}
    names_of = list(next(iter(measured.values())))
    lines = [
        f"| nanoseconds a row | {' | '.join(names_of)} | all |",
        f"|---|{'---:|' * (len(names_of) + 1)}",
    ]
    for name, steps in measured.items():
        medians = [one["median"] for one in steps.values()]
        lines.append(f"| {name} | {' | '.join(f'{one:.0f}' for one in medians)} | {sum(medians):.0f} |")
    table = "\n".join(lines)
    print(table)
    given.output.mkdir(parents=True, exist_ok=True)
    told = {"commit": commit(), "machine": machine(), "ns_a_row": measured}
    (given.output / "steps.json").write_text(json.dumps(told, indent=1) + "\n")
    (given.output / "steps.md").write_text(
        f"Commit `{commit()}`, {machine()}. Medians of {ROUNDS}.\n\n{table}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
