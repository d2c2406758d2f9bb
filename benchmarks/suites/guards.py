"""Measure what Spark's own guards of a stream's state cost: `python -m benchmarks.suites.guards`.

Each guard is a setting with which a query begins: the second format of a checkpoint, whose files are named by attempt,
with and without Spark's checksums of these files, and a checksum in every row of the state store. The same operator
runs the same micro-batches with none and with each.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders.contenders import PARTITIONS, Contender, ours
from benchmarks.suites.streaming import Share, compare
from benchmarks.workloads.session import session
from benchmarks.workloads.work import DELTA, QUICK, Work
from jobs.core.settings import Settings
from jobs.spark.conf import STATE_FORMAT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROUNDS, BATCHES = 6, 3
STORE = "spark.sql.streaming.stateStore."
NONE = {
    STATE_FORMAT: "1",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    f"{STORE}rowChecksum.enabled": "false",
}
"""The settings without any guard."""
FORMAT, FILES, ROWS = NONE
GUARDS: dict[str, dict[str, str]] = {
    "none": {},
    "format 2": {FORMAT: "2"},
    "format 2 and checksums of files": {FORMAT: "2", FILES: "true"},
    "row checksum": {ROWS: "true"},
}


def guarded(name: str, settings: dict[str, str]) -> Contender:
    """Return our operator in a query that begins with these settings."""

    def build(frame: DataFrame, work: Work) -> DataFrame:
        for setting, value in {**NONE, **settings}.items():
            frame.sparkSession.conf.set(setting, value)
        return ours(frame, work)

    return Contender(name, build, 400_000)


def main() -> int:
    from pyspark.errors import PySparkException

    contenders = [guarded(name, settings) for name, settings in GUARDS.items()]
    with tempfile.TemporaryDirectory() as folder:
        spark = session(Settings.load(warehouse=folder, master=f"local[{PARTITIONS}]", quiet=True))
        print(f"load at the start: {os.getloadavg()[0]:.2f}")
        for work in (one for one in QUICK if one not in DELTA):
            try:
                shares = [Share(one, BATCHES) for one in contenders]
                found = compare(spark, work, shares, ROUNDS, Path(folder) / work.name)
            except PySparkException as error:
                print(f"{work.name}: {error}")
                return 1
            base = statistics.median(found["none"].seconds)
            for name, measured in found.items():
                median = statistics.median(measured.seconds)
                print(
                    f"{work.name}, {name}: {median:.3f} s a micro-batch (median of {len(measured.seconds)}), "
                    f"{median / base:.3f} of that without a guard"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
