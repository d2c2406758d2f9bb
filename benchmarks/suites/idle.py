"""Measure the cost of a stream without new rows: processor time of all its processes per minute.

`python -m benchmarks.suites.idle` lands and pretrains a few rows, starts the stream as users do, lets it settle,
and reads the processes' clocks before and after. A plain model's stream has no micro-batch without rows; one that uses
the machine's clock (`order.patience`) has one at every trigger. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.workloads.verbs import Verbs, sleep_beside

MODEL = "idle"
SETTLE_SECONDS = 45.0
PLAIN, PATIENT = "plain", "order.patience"
SPEC = """
name: idle
version: 1
key: [id]
time: at
measurement: [a]
states: [level]
process: {kind: explicit, F: [[1.0]], Q: [[1.0]]}
observation: {H: [[1.0]], R: [[1.0]]}
initial: {mean: [0.0], covariance: [[10.0]]}
stream: {partitions: 2}
"""
ORDERS = {PLAIN: "", PATIENT: "order: {kind: strict, delay: 1h, patience: 1d}\n"}
ROWS = 200


def land(verbs: Verbs, day: int) -> None:
    """Land rows of a day.

    Raises:
        RuntimeError: `ingest` fails.
    """
    rows = [f"{key % 20},2024-01-{day:02d}T00:{key // 20:02d}:00Z,{key}.5\n" for key in range(ROWS)]
    file = verbs.folder / f"{day}.csv"
    file.write_text("id,at,a\n" + "".join(rows))
    verbs.finish("ingest", "--input", str(file))


def processor_seconds(process: psutil.Process) -> dict[int, float]:
    """Return the processor time so far of a process and its descendants, by process."""
    found = {}
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[one.pid] = times.user + times.system
    return found


def run(order: str, trigger: str, seconds: float) -> float:
    """Return the processor seconds a minute of an idle stream.

    Args:
        order: one of `ORDERS`.
        trigger: seconds from micro-batch to micro-batch.
        seconds: how long to measure.

    Raises:
        RuntimeError: a verb fails, or the stream ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="kalman-idle-"))
    try:
        verbs = Verbs(folder, MODEL, SPEC + ORDERS[order])
        land(verbs, 1)
        verbs.finish("pretrain")
        land(verbs, 2)
        with verbs.stream(trigger) as stream:
            while not list((verbs.warehouse / "checkpoints").glob("*/commits/0")):
                sleep_beside(stream, 0.5)
            sleep_beside(stream, SETTLE_SECONDS)
            before, began = processor_seconds(psutil.Process(stream.pid)), time.monotonic()
            sleep_beside(stream, seconds)
            after, ended = processor_seconds(psutil.Process(stream.pid)), time.monotonic()
        spent = sum(value - before.get(pid, 0.0) for pid, value in after.items())
        return 60.0 * spent / (ended - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.suites.idle", description=__doc__)
    parser.add_argument("--triggers", nargs="+", default=["1", "10", "60"])
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    print("| model | trigger | processor seconds a minute |\n|---|---:|---:|")
    for order in ORDERS:
        for trigger in given.triggers:
            print(
                f"| {order} | {trigger} s | {run(order, trigger, given.seconds):.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
