"""Run the benchmark: everything in one session, contenders in turn, and write the results.

`python -m benchmarks.run` takes about half an hour on two cores, with `--quick` under three minutes. Nothing
else should run meanwhile: the load before it began is written into the results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import batch, equality, results, streaming
from benchmarks.contenders import FILTERPY, FLOOR, LIMIT, OURS, PARTITIONS, ROW_API, Contender
from benchmarks.work import ALL, DENSE, KINDS, QUICK, SCALE, Work

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS, QUICK_ROUNDS = 4, 2
BATCHES = 3
"""Measured micro-batches a round, of the contenders that are quick enough for it."""


def contenders_of(work: Work, quick: bool) -> list[tuple[Contender, int]]:
    """Return who runs a work, and how many measured micro-batches a round."""
    if work in KINDS:
        return [(OURS, BATCHES), (LIMIT, BATCHES)]
    if work in SCALE:
        return [(OURS, BATCHES)]
    chosen = [(OURS, BATCHES), (LIMIT, BATCHES)]
    if work.touched is not None:
        chosen.append((FLOOR, BATCHES))
    chosen.append((ROW_API, 1))
    if work.name == "dense_20k_x5" and not quick:
        chosen.append((FILTERPY, 1))
    return chosen


def session(folder: Path) -> SparkSession:
    """Start the session that everything runs in."""
    from jobs.session import spark_session
    from jobs.settings import Settings

    settings = Settings.load(warehouse=str(folder / "warehouse"), master=f"local[{PARTITIONS}]", quiet=True)
    return spark_session(
        settings,
        "benchmark",
        {
            "spark.sql.shuffle.partitions": str(PARTITIONS),
            "spark.driver.memory": os.environ.get("KALMAN_BENCH_MEMORY", "4g"),
            "spark.sql.codegen.wholeStage": "true",
        },
    )


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few works, few rounds")
    parser.add_argument("--only", nargs="*", help="names of works")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--output", type=Path, default=results.RESULTS)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f}: what else runs is measured too", file=sys.stderr)
    rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    works = [work for work in (QUICK if given.quick else ALL) if not given.only or work.name in given.only]
    folder = Path(tempfile.mkdtemp(prefix="kalman-bench-"))
    found: list[dict[str, Any]] = []
    try:
        spark = session(folder)
        differences = equality.largest_difference(
            spark, DENSE[0], (OURS, ROW_API, FILTERPY), folder / "equal"
        )
        print(
            "the same estimates: "
            + ", ".join(f"{name} within {value:.1e}" for name, value in differences.items())
        )
        for work in works:
            began = time.monotonic()
            measured = streaming.compare(
                spark, work, contenders_of(work, given.quick), rounds, folder / work.name
            )
            more: dict[str, Any] = {}
            size = measured["ours"].state_bytes
            if size:
                more["state_bytes_per_key"] = size / work.keys
            found += results.results_of(work.name, {n: m.rates for n, m in measured.items()}, more)
            print(_line(found, work.name, time.monotonic() - began), flush=True)
        if not given.only:
            work = DENSE[0] if given.quick else DENSE[1]
            rates = batch.compare(spark, work, 2 if given.quick else 5, rounds, folder / "batch")
            found += results.results_of(f"pretrain_{work.name}", rates, {})
            print(_line(found, f"pretrain_{work.name}", 0.0), flush=True)
        spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    path = results.write(found, load, given.quick, given.output)
    print(f"\n{path.read_text()}\nwritten to {path} and {path.with_suffix('.json')}")
    return 0


def _line(found: list[dict[str, Any]], work: str, seconds: float) -> str:
    """Say in a line what a work gave."""
    parts = [f"{one['what']} {one['rows_per_s']['median']:,.0f}" for one in found if one["work"] == work]
    return f"{work}: {', '.join(parts)} rows/s" + (f" ({seconds:.0f} s)" if seconds else "")


if __name__ == "__main__":
    sys.exit(main())
