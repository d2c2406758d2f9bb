"""Measure what a lost worker costs a stream on a cluster: `python -m benchmarks.recovery`.

A standalone cluster of two workers with a core each, as processes of this machine. A stream takes in a row of every
key a micro-batch; when it has done some, the worker with half of its states is killed. The executor that is left takes
over its tasks and reads those states from the checkpoint, and does all of the work from then on. What is told is the
time from commit to commit: before, with the loss in between, and after it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.data import MINUTE_US, START_US
from benchmarks.verbs import Verbs, sleep_beside
from demo.cluster import Cluster

MODEL = "recovery"
SPEC = """
name: recovery
version: 1
key: [id]
time: at
measurement: [y]
states: [level, slope]
process: {kind: local_linear_trend, level_variance: 0.5, slope_variance: 0.01}
observation: {H: [[1.0, 0.0]], R: [[1.0]]}
initial: {mean: [0.0, 0.0], covariance: [[10.0, 0.0], [0.0, 1.0]]}
stream: {partitions: 4, max_files_per_batch: 1}
"""
BEFORE, AFTER = 5, 4
"""Micro-batches before the loss, the first of them loading the snapshot, and behind the one that it falls into."""


def write(folder: Path, keys: int, minute: int) -> str:
    """Write a file with a row of every key, and return its path."""
    columns = {
        "id": pa.array(np.arange(keys)),
        "at": pa.array(np.full(keys, START_US + minute * MINUTE_US), pa.timestamp("us", tz="UTC")),
        "y": pa.array(np.random.default_rng(minute).normal(size=keys)),
    }
    path = folder / f"{minute:04d}.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


def run(keys: int) -> list[float]:
    """Return the seconds from commit to commit; those that end with commit `BEFORE` have the loss in them.

    Raises:
        RuntimeError: a verb fails, or the stream ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="kalman-recovery-"))
    try:
        with Cluster(folder / "cluster", cores=1) as cluster:
            verbs = Verbs(folder, MODEL, SPEC, KALMAN_MASTER=cluster.address)
            verbs.finish("ingest", "--input", write(folder, keys, 0))
            verbs.finish("pretrain")
            for minute in range(1, BEFORE + 1 + AFTER):
                verbs.finish("ingest", "--input", write(folder, keys, minute))
            commits = verbs.warehouse / "checkpoints" / f"{MODEL}-g0001" / "commits"
            with verbs.stream("0") as stream:
                for batch in range(BEFORE + AFTER):
                    while not (commits / str(batch)).exists():
                        sleep_beside(stream, 0.02)
                    if batch == BEFORE - 1:
                        cluster.kill_worker("worker-1")
                at = [(commits / str(batch)).stat().st_mtime for batch in range(BEFORE + AFTER)]
        return [after - before for before, after in pairwise(at)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    print(
        "| keys | micro-batch before (median) | with the loss of a worker | the next ones |\n|---:|---:|---:|---|"
    )
    for _ in range(given.rounds):
        seconds = run(given.keys)
        before, lost, after = seconds[: BEFORE - 1], seconds[BEFORE - 1], seconds[BEFORE:]
        said = ", ".join(f"{one:.1f}" for one in after)
        print(f"| {given.keys:,} | {statistics.median(before):.1f} s | {lost:.1f} s | {said} s |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
