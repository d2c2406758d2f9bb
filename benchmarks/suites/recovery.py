"""Measure what a lost worker costs a stream on a cluster: `python -m benchmarks.suites.recovery`.

A standalone cluster of two workers with a core each, as processes of this machine. A stream processes one row of every
key per micro-batch; after some of them, the worker with half of its states is killed. The remaining executor takes
over its tasks, reads those states from the checkpoint, and does all work from then on. The result is the
time from commit to commit: before the loss, with it, and after it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks.workloads.data import row_of_each
from benchmarks.workloads.verbs import Verbs, sleep_beside
from benchmarks.workloads.work import MODELS
from demo.cluster import Cluster

MODEL = "trend"
STREAM = "stream: {partitions: 4, max_files_per_batch: 1}\n"
BEFORE, AFTER = 5, 4
"""Micro-batches before the loss (the first loads the snapshot), and after the micro-batch with the loss."""


def run(keys: int) -> list[float]:
    """Return the seconds from commit to commit; the interval that ends with commit `BEFORE` contains the loss.

    Raises:
        RuntimeError: a verb fails, or the stream ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="kalman-recovery-"))
    try:
        with Cluster(folder / "cluster", cores=1) as cluster:
            spec = (MODELS / f"{MODEL}.yaml").read_text() + STREAM
            verbs = Verbs(folder, MODEL, spec, **cluster.environment)
            verbs.finish("ingest", "--input", str(row_of_each(folder, keys, 0)))
            verbs.finish("pretrain")
            for minute in range(1, BEFORE + 1 + AFTER):
                verbs.finish("ingest", "--input", str(row_of_each(folder, keys, minute)))
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
    parser = argparse.ArgumentParser("python -m benchmarks.suites.recovery", description=__doc__)
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
