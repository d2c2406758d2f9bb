"""Run the work in S3 in a process of its own, since Spark has the store's client from its start or never.

The store is that of the tests: a server on this machine (`tests.support.object_store`). Ours and the limit have their
checkpoint and their table there. Beside them ours runs into a folder.
The rows come from a folder in all three.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.contenders.contenders import LIMIT, OURS_FILES, PARTITIONS
from benchmarks.results import ROOT
from benchmarks.suites.streaming import Share, compare
from benchmarks.workloads.session import session
from benchmarks.workloads.work import S3
from jobs.core.settings import Settings
from tests.support import object_store
from tests.support.object_store import BUCKET, ObjectStore, environment

WAREHOUSE = f"s3a://{BUCKET}/warehouse"
FOUND = "rates.json"


def missing() -> str | None:
    """Return what this machine lacks for the work; None if it has everything."""
    return object_store.missing(java=True)


def measure(keys: int, batches: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Return rows a second, by contender, of rounds of `batches` micro-batches.

    Raises:
        RuntimeError: the process failed; its output has the reason.
    """
    folder.mkdir(parents=True)
    numbers = ["--keys", str(keys), "--batches", str(batches), "--rounds", str(rounds)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suites.in_s3", str(folder), *numbers],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(f"{S3.name}: the process ended with {done.returncode}")
    return json.loads((folder / FOUND).read_text())


def main() -> int:
    """Measure, and write the rates into the folder."""
    parser = argparse.ArgumentParser("python -m benchmarks.suites.in_s3", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the data, the store and the rates")
    parser.add_argument("--keys", type=int, default=S3.keys)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    with ObjectStore(given.folder / "objects") as store:
        os.environ.update(environment(store.address))
        spark = session(Settings.load(warehouse=WAREHOUSE, master=f"local[{PARTITIONS}]", quiet=True))
        shares = [
            Share(OURS_FILES, given.batches, store=f"{WAREHOUSE}/ours"),
            Share(LIMIT, given.batches, store=f"{WAREHOUSE}/limit"),
            Share(OURS_FILES._replace(name="folder"), given.batches),
        ]
        found = compare(spark, S3._replace(keys=given.keys), shares, given.rounds, given.folder / "run")
        spark.stop()
    (given.folder / FOUND).write_text(json.dumps({name: one.rates for name, one in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
