"""Run the benchmark: everything in one session, contenders in turn, and write the results.

`python -m benchmarks.run` takes about half an hour on two cores, with `--quick` under three minutes. `--only` runs some
of the works and replaces their results in the file. Nothing else should run meanwhile: the load
before the start is written into the results. KALMAN_BENCH_CORES is the number of cores and of partitions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import results
from benchmarks.contenders import equality
from benchmarks.contenders.contenders import (
    FILTERPY,
    FLOOR,
    LIMIT,
    OURS,
    OURS_FILES,
    PARTITIONS,
    ROW_API,
)
from benchmarks.suites import batch, history, in_s3, life, streaming
from benchmarks.suites.streaming import Share
from benchmarks.workloads.data import CORES
from benchmarks.workloads.memory import Peak
from benchmarks.workloads.session import session
from benchmarks.workloads.work import ALL, DELTA, DENSE, HISTORY, HISTORY_DELTA, KINDS, QUICK, S3, SCALE, Work

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from jobs.core.settings import Settings

PUBLISHED_CORES = 2
ROUNDS, QUICK_ROUNDS = 4, 2
BATCHES = 3
"""Measured micro-batches a round, for quick contenders."""
SLOW_ROWS = 500_000
"""Rows a micro-batch from which state by the key has only one measured micro-batch: a minute or two."""
SLOW_KEYS = 1_000_000
"""Keys from which state by the key is not measured: creating its state alone would take minutes."""
PRETRAIN = DENSE[1]
LEARN = "learn_1m"
"""Learning from a million keys: pooled and each key's own, by maximum likelihood and by EM."""
LIFE_KEYS = 1_000_000
LIFE = f"verbs_{LIFE_KEYS // 1_000_000}m"


def shares_of(work: Work, quick: bool) -> list[Share]:
    """Return the contenders of a work, with the number of runs of each."""
    if work in SCALE:
        return [Share(OURS, BATCHES)]
    if work in DELTA:
        return [Share(OURS_FILES, BATCHES), Share(LIMIT, BATCHES)]
    shares = [Share(OURS, BATCHES), Share(LIMIT, BATCHES)]
    if work in KINDS:
        return shares
    if work.touched is not None:
        shares.append(Share(FLOOR, BATCHES))
    if work.batch_rows >= SLOW_ROWS:
        if not work.text:  # text keys have little effect: shown on the smallest work
            shares.append(Share(ROW_API, 1, 1, warm=False))
    elif work.keys < SLOW_KEYS:
        shares.append(Share(ROW_API, 1, 2))
    if work.name == "dense_20k_x5" and not quick:
        shares.append(Share(FILTERPY, 1, 1, warm=False))
    return shares


def names_of(quick: bool) -> list[str]:
    """Return the names of all works, in their order."""
    if quick:
        return [*(work.name for work in QUICK), f"pretrain_{DENSE[0].name}"]
    histories = [work.name for work in (*HISTORY, *HISTORY_DELTA)]
    works = [work.name for work in ALL if work not in SCALE]
    # Separate commands, measured before other works fill Java's memory.
    first = [*(work.name for work in SCALE), LIFE]
    return [*first, *works, f"pretrain_{PRETRAIN.name}", *histories, LEARN]


def measure(
    name: str, spark: SparkSession, settings: Settings, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the results of one work."""
    folder = Path(settings.warehouse).parent / name
    rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    if name == LIFE:
        rates = life.measure(settings, given.keys or LIFE_KEYS, min(rounds, 2), folder, print)
        return [
            {"work": LIFE, "what": verb, "rows_per_s": results.spread(values), "samples": len(values)}
            for verb, values in rates.items()
        ]
    if name == LEARN:
        own = Work(name, given.keys or 1_000_000, 5)
        return results.results_of(name, batch.learning(spark, own, folder), {})
    known = {work.name: work for work in (*ALL, *QUICK, *HISTORY, *HISTORY_DELTA)}
    work = known[name.removeprefix("pretrain_")]
    if given.keys is not None:
        work = work._replace(keys=given.keys, touched=work.touched and min(work.touched, given.keys))
    if name.startswith("history_"):
        return results.results_of(name, history.compare(spark, work, rounds, folder), {})
    if name.startswith("pretrain_"):
        rates = batch.compare(spark, work, 2 if given.quick else 5, rounds, folder)
        return results.results_of(name, rates, {})
    if name == S3.name:
        return results.results_of(name, in_s3.measure(work.keys, BATCHES, rounds, folder), {})
    with Peak() as peak:
        measured = streaming.compare(spark, work, shares_of(work, given.quick), rounds, folder)
    more: dict[str, Any] = {"peak_memory_bytes": peak.bytes} if work.name.startswith("scale_") else {}
    if work.touched is not None:
        raw = work.touched * raw_bytes(work)
        more["state_bytes_vs_raw"] = results.spread([one / raw for one in measured[OURS.name].state_bytes])
    return results.results_of(name, {who: one.rates for who, one in measured.items()}, more)


def missed(names: Sequence[str]) -> dict[str, str]:
    """Return the works that cannot be run on this machine, with the reason, and print them."""
    reason = in_s3.missing() if S3.name in names else None
    if reason is None:
        return {}
    print(f"{S3.name}: not run: {reason}", flush=True)
    return {S3.name: reason}


def raw_bytes(work: Work) -> int:
    """Return the bytes of one key's state, with the key and its time, before anything is packed or compressed."""
    import kalman
    from jobs.state.block_format import build_state_layout
    from jobs.state.encoding.keys import KeyKind
    from jobs.state.encoding.sorted_run import build_row_type

    spec = work.spec
    size = kalman.build(spec.definition(), {}).size
    layout = build_state_layout(KeyKind(tuple(spec.key), ("bigint",), True), size)
    return build_row_type(layout).itemsize + np.dtype(layout.columns[0].dtype).itemsize


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few works, few rounds")
    parser.add_argument("--only", nargs="+", metavar="WORK", help="of these: " + ", ".join(names_of(False)))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--keys", type=int, help="instead of the works' own numbers, to try whether it runs")
    parser.add_argument("--output", type=Path, default=results.RESULTS)
    given = parser.parse_args()
    unknown = sorted(set(given.only or ()) - set(names_of(given.quick)))
    if unknown:
        parser.error(f"no such work: {', '.join(unknown)}; there are {', '.join(names_of(given.quick))}")
    if given.output == results.RESULTS:
        if given.keys is not None:
            parser.error("--keys is for trials: give their results another folder with --output")
        if CORES != PUBLISHED_CORES:
            parser.error(
                f"results are of {PUBLISHED_CORES} cores: give those of KALMAN_BENCH_CORES={CORES} another folder "
                "with --output"
            )
    return given


def main() -> int:
    """Measure and write."""
    from jobs.core.settings import Settings

    given = arguments()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f}: what else runs is measured too", file=sys.stderr)
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # of pandas, in the contenders' workers
    folder = Path(tempfile.mkdtemp(prefix="kalman-bench-"))
    settings = Settings.load(warehouse=str(folder / "warehouse"), master=f"local[{PARTITIONS}]", quiet=True)
    found: list[dict[str, Any]] = []
    run, path = results.begun(load), given.output
    try:
        spark = session(settings)
        differences = equality.largest_difference(
            spark, DENSE[0], (OURS, ROW_API, FILTERPY), folder / "equal"
        )
        print(
            "the same estimates: "
            + ", ".join(f"{name} within {value:.1e}" for name, value in differences.items())
        )
        names, failed = given.only or names_of(given.quick), False
        not_run = missed(names)
        for name in (one for one in names if one not in not_run):
            began = time.monotonic()
            try:
                found += measure(name, spark, settings, given)
            except Exception:  # the other works still count
                failed = True
                traceback.print_exc()
                continue
            print(_line(found, name, time.monotonic() - began), flush=True)
            # After each work, so that a failure does not lose an hour's results.
            keep = given.only is not None
            path = results.write(found, run, given.quick, given.output, keep, not_run)
        spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if found:
        print(f"\n{path.read_text()}\nwritten to {path} and {path.with_suffix('.json')}")
    return 1 if failed else 0


def _line(found: list[dict[str, Any]], work: str, seconds: float) -> str:
    """Return the results of a work in a line."""
    parts = [f"{one['what']} {one['rows_per_s']['median']:,.0f}" for one in found if one["work"] == work]
    return f"{work}: {', '.join(parts)} rows/s" + (f" ({seconds:.0f} s)" if seconds else "")


if __name__ == "__main__":
    sys.exit(main())
